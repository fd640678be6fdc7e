"""Rejection sampling: keep the right and distinct attempts at a task, as examples to imitate."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from rolljax.data.attempts import ATTEMPTS, attempts_of
from rolljax.data.base import Place, Record, RecordSource, Stage
from rolljax.data.texts import normalised, similarity
from rolljax.envs.data import answers
from rolljax.errors import Checked, DataError, Range


@dataclasses.dataclass(frozen=True)
class RejectionSampling(Checked, Stage):
    """Yield a record for each kept attempt, with its text in the column `answer`, which `Records` trains on (RFT).
    Records without a kept attempt are left out."""

    min_reward: float = 1.0
    """Minimum reward of an attempt that may be kept."""
    cap: Annotated[int, Range(low=1)] = 4
    """Maximum number of attempts kept per record."""
    similarity: Annotated[float, Range(above=0, high=1)] = 0.9
    """Similarity of texts (by edit distance) above which an attempt is left out, if it has the same final answer, in
    any notation, as a kept attempt."""
    prefer: Literal["first", "shortest"] = "first"
    """The order in which attempts are kept, up to `cap`: as they were made, or by their characters."""
    answer_key: str = "answer"
    """The column that the text is written to."""
    tok_key: str = ""
    """The column that the number of the attempt's tokens is written to, such as `LengthBand.ref_key`; empty: none."""

    def run(self, source: RecordSource, place: Place) -> Iterator[Record]:
        for record in source:
            attempts = attempts_of(record)
            good = [a for a in attempts if a["reward"] >= self.min_reward]
            if self.prefer == "shortest":
                good.sort(key=lambda a: len(a["text"]))
            kept = distinct([a["text"] for a in good], self.similarity, self.cap)
            place.count("attempts", len(attempts))
            place.count("attempts_good", len(good))
            place.count("attempts_kept", len(kept))
            if not kept:
                place.drop({k: v for k, v in record.items() if k != ATTEMPTS}, "no_good_attempt")
            base = {name: value for name, value in record.items() if name != ATTEMPTS}
            for text in kept:
                attempt = next(a for a in good if a["text"] == text)
                yield {**base, self.answer_key: text, **self._length(attempt)}

    def _length(self, attempt: dict[str, Any]) -> dict[str, int]:
        if not self.tok_key:
            return {}
        if not attempt.get("num_tok"):
            raise DataError(
                f"an attempt has no num_tok, which RejectionSampling.tok_key = {self.tok_key!r} asks for: "
                f"{str(attempt)[:200]}"
            )
        return {self.tok_key: attempt["num_tok"]}


def distinct(texts: Sequence[str], threshold: float, cap: int) -> list[str]:
    """Return the first of the texts that are not nearly equal, at most `cap`. Texts with equal final answers, or with a
    similarity (1 minus the edit distance over the longer length, of normalised texts) above `threshold`, count as
    equal."""
    kept: list[tuple[str, str, str]] = []
    for text in texts:
        found = answers.find(text)
        final = "" if found is None else answers.canonical(found)
        plain = normalised(text)
        if any(final == f and (plain == p or similarity(plain, p) > threshold) for _, f, p in kept):
            continue
        kept.append((text, final, plain))
        if len(kept) == cap:
            break
    return [text for text, _, _ in kept]
