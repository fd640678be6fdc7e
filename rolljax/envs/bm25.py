"""Ranked text search, from its formula (Robertson and Zaragoza, "The Probabilistic Relevance Framework: BM25 and
Beyond", 2009)."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence

MAX_QUERY_CHARS = 400
_WORD = re.compile(r"[a-z0-9]+(?:-[a-z0-9]+)*")


def words(text: str) -> list[str]:
    """Return the lower-case words of letters a-z and digits; hyphens join."""
    return _WORD.findall(text.lower())


class Bm25:
    """An index of short texts.

    k1: how fast repetitions of a word stop to count. b: how much longer texts are discounted.
    """

    def __init__(self, texts: Sequence[str], k1: float = 1.2, b: float = 0.75) -> None:
        docs = [words(t) for t in texts]
        mean_len = sum(map(len, docs)) / max(1, len(docs)) or 1.0
        found: dict[str, list[tuple[int, int]]] = {}
        for i, doc in enumerate(docs):
            for word, count in Counter(doc).items():
                found.setdefault(word, []).append((i, count))
        self._postings: dict[str, list[tuple[int, float]]] = {}
        for word, occurrences in found.items():
            idf = math.log(1 + (len(docs) - len(occurrences) + 0.5) / (len(occurrences) + 0.5))
            self._postings[word] = [
                (i, idf * n * (k1 + 1) / (n + k1 * (1 - b + b * len(docs[i]) / mean_len))) for i, n in occurrences
            ]

    def scores(self, query: str) -> dict[int, float]:
        """Return index -> score of every text that shares a word with the query; each word of the query counts once."""
        total: dict[int, float] = {}
        for word in sorted(set(words(query[:MAX_QUERY_CHARS]))):
            for i, score in self._postings.get(word, ()):
                total[i] = total.get(i, 0.0) + score
        return {i: round(score, 9) for i, score in total.items()}
