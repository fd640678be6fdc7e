"""Texts as sets and counts of their parts, so that they can be compared."""

from __future__ import annotations

import re
import unicodedata
import zlib
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np

from rolljax.errors import needed

Unit = Literal["word", "char"]
_WORD = re.compile(r"\w+")


def normalised(text: str) -> str:
    """Normalize a text: NFKC, small letters, words and numbers with single blanks between them."""
    return " ".join(_WORD.findall(unicodedata.normalize("NFKC", text).casefold()))


def shingles(text: str, unit: Unit, n: int) -> set[str]:
    """Return the runs of n words or characters of a normalised text; the text itself if it is shorter."""
    plain = normalised(text)
    parts: Sequence[str] = plain.split() if unit == "word" else plain
    if len(parts) <= n:
        return {plain} if plain else set()
    between = " " if unit == "word" else ""
    return {between.join(parts[i : i + n]) for i in range(len(parts) - n + 1)}


def jaccard(a: set[str], b: set[str]) -> float:
    """Compute the size of the intersection over the size of the union; 1 for two empty sets."""
    union = len(a | b)
    return len(a & b) / union if union else 1.0


def word_grams(text: str, n: int) -> Iterator[str]:
    """Yield the runs of n words of a normalised text; none if it has fewer."""
    words = normalised(text).split()
    for i in range(len(words) - n + 1):
        yield " ".join(words[i : i + n])


def similarity(a: str, b: str) -> float:
    """Compute 1 minus the edit distance (Levenshtein) over the length of the longer text.

    Raises:
      ConfigError: the package rapidfuzz is missing.
    """
    with needed("rapidfuzz", "an edit distance", install="rolljax[data]"):
        from rapidfuzz.distance import Levenshtein
    return float(Levenshtein.normalized_similarity(a, b))


def hashed_counts(text: str, dim: int) -> np.ndarray:
    """Count the words and pairs of words of a text in `dim` bins by their hashes; float32 `[dim]`."""
    words = normalised(text).split()
    pairs = [f"{a} {b}" for a, b in zip(words, words[1:], strict=False)]
    bins = [zlib.crc32(part.encode()) % dim for part in (*words, *pairs)]
    return np.bincount(bins, minlength=dim).astype(np.float32) if bins else np.zeros(dim, np.float32)
