"""DLCoT (arXiv:2503.16385): long chains of thought taken apart, pruned, and put together again. Here are
plain functions of texts and labels; `dlcot_stages` asks models for the labels.

A trace is split into five parts; the exploration into solutions, the verification into steps. Solutions are labelled,
and solutions and steps are clustered by method. Numbers of solutions and steps count from 1; steps follow solutions.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from rolljax.data.texts import jaccard, similarity
from rolljax.envs.data.answers import boxed

PARTS = ("question_repeat", "problem_understanding", "exploration", "verification", "conclusion")
Label = Literal["Correct", "Incorrect", "Incomplete"]
LABELS = ("Correct", "Incorrect", "Incomplete")
_SENTENCE = re.compile(r"(?<=[.!?])\s+|\n+")


def sentences(text: str) -> list[str]:
    """Split a text into sentences and lines, each with the white space after it: joined they are the text."""
    ends = [m.end() for m in _SENTENCE.finditer(text)]
    cuts = [0, *ends, len(text)]
    return [text[a:b] for a, b in zip(cuts, cuts[1:], strict=False) if a < b]


def aligned(text: str, proposed: Sequence[str], least: float = 0.95) -> list[str] | None:
    """Split a text exactly along a model's proposed partition, which may paraphrase and lose white space.

    Sentences of the proposal are matched to those of the text, in order. An unmatched sentence of the text belongs to
    the part of the sentence before it. Returns None if no sentence matches, or if the words of proposal and text are
    less similar than `least` (Jaccard).

    Returns:
      as many parts as proposed, possibly empty ones; joined they are the text.
    """
    if jaccard(set(" ".join(proposed).split()), set(text.split())) < least:
        return None
    own = sentences(text)
    told = [(_plain(s), k) for k, part in enumerate(proposed) for s in sentences(part) if _plain(s)]
    matcher = difflib.SequenceMatcher(None, [_plain(s) for s in own], [s for s, _ in told], autojunk=False)
    owner = [-1] * len(own)
    for a, b, size in matcher.get_matching_blocks():
        for i in range(size):
            owner[a + i] = told[b + i][1]
    if all(k < 0 for k in owner):
        return None
    parts, now = [""] * len(proposed), next(k for k in owner if k >= 0)
    for sentence, k in zip(own, owner, strict=True):
        now = k if k >= 0 else now
        parts[now] += sentence
    return parts


def _plain(sentence: str) -> str:
    return " ".join(sentence.split()).casefold()


@dataclasses.dataclass(frozen=True)
class Trace:
    """A trace taken apart. `head` (question repeat and understanding), solutions, steps of the verification, and the
    conclusion: joined they are the trace."""

    head: str
    solutions: tuple[str, ...]
    steps: tuple[str, ...]
    conclusion: str
    labels: tuple[Label, ...]
    """Labels of the solutions, in order."""
    errors: tuple[bool, ...]
    """Whether each solution contains errors, in the order of the solutions."""
    spans: tuple[tuple[str, ...], ...]
    """The sentences of each solution that have errors, quoted."""
    clusters: tuple[tuple[int, ...], ...]
    """Numbers of solutions and steps with the same approach; a number in no cluster is alone."""

    @property
    def text(self) -> str:
        """The whole trace."""
        return "".join((self.head, *self.solutions, *self.steps, self.conclusion))

    @property
    def first_correct(self) -> int | None:
        """Return the number of the first correct solution: the trunk ends with it. None: there is none."""
        return next((i for i, label in enumerate(self.labels, 1) if label == "Correct"), None)

    def without(self, numbers: Iterable[int], spans: Mapping[int, Sequence[str]] | None = None) -> str:
        """Return the trace without some solutions and steps, and without some spans of others."""
        gone, kept = set(numbers), [self.head]
        for i, text in enumerate((*self.solutions, *self.steps), 1):
            if i not in gone:
                for span in (spans or {}).get(i, ()):
                    text = text.replace(span, "", 1)
                kept.append(text)
        return "".join((*kept, self.conclusion))

    def to_json(self) -> dict[str, Any]:
        """Return all fields as a JSON value."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(found: Mapping[str, Any]) -> Trace:
        """Parse the output of `to_json`."""
        return Trace(
            found["head"],
            tuple(found["solutions"]),
            tuple(found["steps"]),
            found["conclusion"],
            tuple(found["labels"]),
            tuple(found["errors"]),
            tuple(map(tuple, found["spans"])),
            tuple(map(tuple, found["clusters"])),
        )


def redundant(clusters: Sequence[Sequence[int]], last: int | None = None) -> list[int]:
    """Return the solutions to remove for less redundancy: of each cluster all but the first, in the order of the
    clusters.

    last: only this many, from the end; None: all.
    """
    marked = [i for cluster in clusters for i in sorted(cluster)[1:]]
    return marked if last is None else marked[max(0, len(marked) - last) :]


def incorrect(trace: Trace) -> set[int] | None:
    """Return the numbers of the solutions to remove for less incorrectness; None: no solution is correct, so the trace
    cannot be used.

    The trunk is everything up to the first correct solution. Of every cluster all but the first are removed, except
    correct solutions of the trunk. A solution after the trunk that has errors and is not correct is removed as a whole.
    """
    first = trace.first_correct
    if first is None:
        return None
    gone = {i for i in redundant(trace.clusters) if not (i <= first and trace.labels[i - 1] == "Correct")}
    for i, (label, error) in enumerate(zip(trace.labels, trace.errors, strict=True), 1):
        if error and i > first and label != "Correct":
            gone.add(i)
    return gone


def erroneous_spans(trace: Trace, *, trunk: bool) -> dict[int, tuple[str, ...]]:
    """Return the spans with errors to remove, by solution: of correct ones after the trunk, and optionally of
    those of the trunk (keeping them teaches to find and correct errors)."""
    first = trace.first_correct or 0
    return {
        i: spans
        for i, (label, spans) in enumerate(zip(trace.labels, trace.spans, strict=True), 1)
        if spans and (trunk if i <= first else label == "Correct")
    }


def rewrite_fault(trace: str, kept: str, rewritten: str, tolerance: float = 0.05) -> str:
    r"""Return the fault of a model's rewriting of the kept text, as one word; empty: no fault.

    It may differ from it by an edit distance of `tolerance` times the longer text, and must end with the trace's own
    `\boxed{...}`.
    """
    if boxed(trace) != boxed(rewritten):
        return "answer_changed"
    if 1 - similarity(kept, rewritten) > tolerance:
        return "rewritten_too_much"
    return ""


def complete(solutions: Sequence[str], steps: Sequence[str], num: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Move the first `num` steps into the last solution, which lacked its answer; return solutions and steps."""
    return (*solutions[:-1], "".join((solutions[-1], *steps[:num]))), tuple(steps[num:])
