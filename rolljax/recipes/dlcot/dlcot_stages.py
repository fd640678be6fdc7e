"""DLCoT as stages: a model takes traces apart, labels and clusters (`Deconstruct`), rules prune (`Prune`), a model
repairs the transitions between the remaining parts (`Rewrite`). The formulas are in `dlcot`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Literal

from rolljax.data.base import Place, Record, RecordSource, Stage, text_of
from rolljax.data.judge import VerdictStage
from rolljax.errors import ConfigError, DataError, Range, check_fields
from rolljax.judging.prompts import filled
from rolljax.judging.verdict import last_object
from rolljax.recipes.dlcot import dlcot
from rolljax.recipes.dlcot.dlcot import LABELS, PARTS, Trace

SPLIT = """Split the solution below into these parts, in this order, and repeat the text of each exactly as it is:
question_repeat: the question told again. problem_understanding: analysis before any calculation.
exploration: everything up to the first answer, further attempts included. verification: all checks of an answer.
conclusion: the final statement with the boxed answer. Leave a part empty that is not there.
Put each under a heading of its own, `## question_repeat` and so on.

# Solution
{text}"""
SOLUTIONS = """Split the text below into solutions: a new one begins where the approach changes ("alternatively", \
"maybe there is a better way") or a new attempt begins. Repeat the text of each exactly as it is, under headings \
`## solution_1`, `## solution_2`, ...

# Text
{text}"""
STEPS = """Split the verification below into its steps. Keep sentences in which the writer approves of or doubts the \
work (self-affirmation, self-negation) as steps of their own. Repeat the text of each exactly as it is, under headings \
`## step_1`, `## step_2`, ...

# Verification
{text}"""
COMPLETE = """Question: {question}
Below are a solution and, numbered, the steps of its verification. If the solution does not reach an answer, how many \
of the first steps belong to it so that it does? Answer with one JSON object: {"steps": 0} if it reaches one by itself.

# Solution
{solution}

# Verification
{steps}"""
CLASSIFY = """Question: {question}
Answer: {answer}
For each solution below: is its answer Correct, Incorrect, or is it Incomplete (no answer)? Does it hold an error of \
calculation or derivation? Quote the sentences that do. Answer with one JSON object:
{"solutions": [{"label": "Correct", "error": false, "spans": []}, ...]}

{solutions}"""
CLUSTER = """Question: {question}
Put the numbered parts below into clusters: those that go the same way, by the same method, belong together. \
Every number stands in one cluster. Answer with one JSON object: {"clusters": [[1, 3], [2]]}

{parts}"""
REWRITE = """From the text below, parts were cut out. Change as little as you can so that it can be read: words that \
join, references to what is gone. Do not shorten it, change no calculation, keep the final boxed answer. Answer with \
the text alone.

{text}"""
DLCOT = "dlcot"


@dataclasses.dataclass(frozen=True)
class Deconstruct(VerdictStage):
    """Take traces apart: a column `dlcot` with parts, solutions, labels and clusters (`dlcot.Trace`).

    A model's repetition is aligned with the trace, so that the parts joined are the trace; a proposal that is too
    unlike it, or that cannot be parsed, is requested again. If that does not help, the trace is left out, and the
    reason is the question that failed.
    """

    question_key: str = ""
    """Column of the question; empty: `Pipeline.key`."""
    answer_key: str = "answer"
    """Column of the answer."""
    trace_key: str = "trace"
    """Column of the trace."""
    least: Annotated[float, Range(above=0, high=1)] = 0.95
    """Lowest Jaccard similarity between a proposal and the text at which the proposal is accepted."""
    tries: int = 10
    temperature: float = 0.8
    max_tok: int = 8192

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self)

    def run(self, source: RecordSource, place: Place) -> Iterator[Record]:
        async def work(record: Record) -> Trace | str:
            return await _Deconstruction(self, place, record).trace()

        for record, found in place.asker.each(source, work):
            if isinstance(found, str):
                place.drop(record, f"no_{found}")
            else:
                place.observe("solutions", len(found.solutions))
                yield {**record, DLCOT: found.to_json()}


class _Deconstruction:
    """Asks the questions about one trace."""

    def __init__(self, stage: Deconstruct, place: Place, record: Record) -> None:
        self._stage, self._place, self._record = stage, place, record

    async def trace(self) -> Trace | str:
        """Return the trace taken apart, or the name of the question that failed."""
        stage, record = self._stage, self._record
        text = text_of(record, stage.trace_key)
        question, answer = text_of(record, stage.question_key), text_of(record, stage.answer_key)
        parts = await self._split(SPLIT.replace("{text}", text), text, PARTS)
        if parts is None or not parts[2].strip():
            return "partition"
        split = await self._split(SOLUTIONS.replace("{text}", parts[2]), parts[2], "solution")
        if split is None:
            return "solutions"
        checks: list[str] | None = [parts[3]] if parts[3] else []
        if parts[3].strip():
            checks = await self._split(STEPS.replace("{text}", parts[3]), parts[3], "step")
        if checks is None:
            return "steps"
        solutions, steps = tuple(split), tuple(checks)
        if steps:
            shown = {"question": question, "solution": solutions[-1], "steps": _numbered(steps)}
            num = await self._json(COMPLETE, shown, lambda said: _whole(said.get("steps"), len(steps)))
            if num is None:
                return "completion"
            solutions, steps = dlcot.complete(solutions, steps, num)
        shown = {"question": question, "answer": answer, "solutions": _numbered(solutions)}
        labels = await self._json(CLASSIFY, shown, lambda said: _labels(said, solutions))
        if labels is None:
            return "labels"
        shown = {"question": question, "parts": _numbered((*solutions, *steps))}
        clusters = await self._json(CLUSTER, shown, lambda said: _clusters(said, len(solutions) + len(steps)))
        if clusters is None:
            return "clusters"
        named, errors, spans = (tuple(column) for column in zip(*labels, strict=True))
        return Trace(parts[0] + parts[1], solutions, steps, parts[4], named, errors, spans, clusters)

    async def _split(self, prompt: str, text: str, names: Sequence[str] | str) -> list[str] | None:
        """Split a text exactly along the model's proposal, into named parts or into numbered ones; None if no proposal
        is usable."""

        def parse(answer: str) -> list[str] | None:
            headings, bodies = sections(answer)
            if isinstance(names, str):
                if not headings or set(headings) != {names}:
                    return None
                found = dlcot.aligned(text, bodies, self._stage.least)
                return None if found is None else [part for part in found if part]
            if [h for h in names if h in headings] != headings:
                return None
            by_name = dict(zip(headings, bodies, strict=True))
            return dlcot.aligned(text, [by_name.get(name, "") for name in names], self._stage.least)

        return await self._ask(prompt, parse)

    async def _json(self, template: str, shown: dict[str, str], read: Callable[[Any], Any]) -> Any:
        """Parse an answer's JSON object; None: no answer could be parsed."""
        return await self._ask(filled(template, shown), lambda answer: read(last_object(answer)))

    async def _ask(self, prompt: str, parse: Callable[[str], Any]) -> Any:
        return await self._stage.ask_until(self._place, self._record, prompt, parse)


How = Literal["redundant", "redundant_1", "redundant_2", "incorrect"]


@dataclasses.dataclass(frozen=True)
class Prune(Stage):
    """Cut redundant or failed parts out of traces; the remaining text is written to `column`. Reads the column
    `dlcot`."""

    how: How = "incorrect"
    """`redundant`: of every cluster all but the first go; redundant_1, redundant_2: only the last one or two of these;
    `incorrect`: as `dlcot.incorrect`, which keeps the way to the first correct solution. Traces without a correct
    solution are left out."""
    spans: bool = False
    """Whether to cut sentences with errors out of the correct solutions after the trunk (needs `how = "incorrect"`)."""
    trunk_spans: bool = False
    """Whether to cut sentences with errors out of the solutions of the trunk too; implies `spans`."""
    column: str = "trace"
    """Column to which the remaining text is written."""

    def __post_init__(self) -> None:
        hows = ("redundant", "redundant_1", "redundant_2", "incorrect")
        if self.how not in hows:
            raise ConfigError("is no way to prune", setting="Prune.how", value=self.how, remedy=f"of {', '.join(hows)}")
        if (self.spans or self.trunk_spans) and self.how != "incorrect":
            raise ConfigError("has no effect", setting="Prune.spans", value=True, remedy="Prune.how = 'incorrect'")

    def run(self, source: RecordSource, place: Place) -> Iterator[Record]:
        before = after = 0
        for record in source:
            trace = trace_of(record)
            if self.how == "incorrect":
                gone = dlcot.incorrect(trace)
                spans = dlcot.erroneous_spans(trace, trunk=self.trunk_spans) if self.spans or self.trunk_spans else {}
            else:
                gone = set(dlcot.redundant(trace.clusters, {"redundant_1": 1, "redundant_2": 2}.get(self.how)))
                spans = {}
            if gone is None:
                place.drop(record, "no_correct_solution")
                continue
            left = trace.without(gone, spans)
            before, after = before + len(trace.text), after + len(left)
            place.observe("share_left", len(left) / len(trace.text))
            place.count("parts_cut", len(gone))
            yield {**record, self.column: left}
        place.number("characters_before", before)
        place.number("characters_after", after)


@dataclasses.dataclass(frozen=True)
class Rewrite(VerdictStage):
    r"""Ask a model to repair pruned traces with as few changes as possible. An answer is accepted if its edit distance
    to the pruned text is small enough (`tolerance`) and it ends with the same `\boxed{...}` as the trace."""

    column: str = "trace"
    """Column of the text to repair."""
    tolerance: Annotated[float, Range(low=0, high=1)] = 0.05
    """Largest edit distance, as a share of the text."""
    keep_unmended: bool = False
    """Whether to keep the pruned text if no answer is accepted and the pruned text ends with the trace's answer; the
    record is left out otherwise."""
    max_tok: int = 8192

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self)

    def run(self, source: RecordSource, place: Place) -> Iterator[Record]:
        async def mend(record: Record) -> str | None:
            kept, whole = text_of(record, self.column), trace_of(record).text
            if kept == whole:
                return kept

            def parse(answer: str) -> str | None:
                fault = dlcot.rewrite_fault(whole, kept, answer.strip(), self.tolerance)
                if fault:
                    place.count(fault)
                return None if fault else answer.strip()

            return await self.ask_until(place, record, REWRITE.replace("{text}", kept), parse)

        for record, mended in place.asker.each(source, mend):
            kept = text_of(record, self.column)
            if mended is None and self.keep_unmended and not dlcot.rewrite_fault(trace_of(record).text, kept, kept):
                place.count("unmended")
                mended = kept
            if mended is None:
                place.drop(record, "no_rewriting")
            else:
                yield {**{k: v for k, v in record.items() if k != DLCOT}, self.column: mended}


def trace_of(record: Record) -> Trace:
    """Return the deconstructed trace of a record (column `dlcot`).

    Raises:
      DataError: it has none.
    """
    try:
        return Trace.from_json(record[DLCOT])
    except (LookupError, TypeError):
        raise DataError(f"a record has no column {DLCOT!r}: put Deconstruct before this stage") from None


def sections(answer: str) -> tuple[list[str], list[str]]:
    """Return the headings of an answer, lines like `## Solution 2`, in small letters and without their numbers, and the
    text under each; text before the first heading is left out."""
    headings: list[str] = []
    bodies: list[str] = []
    for line in answer.splitlines(keepends=True):
        told = line[2:].strip()
        if line.startswith("##") and told.replace(" ", "").replace("_", "").isalnum():
            headings.append(told.lower().rstrip("_ 0123456789"))
            bodies.append("")
        elif bodies:
            bodies[-1] += line
    return headings, bodies


def _numbered(texts: Sequence[str]) -> str:
    return "\n\n".join(f"[{i}]\n{text.strip()}" for i, text in enumerate(texts, 1))


def _whole(value: Any, most: int) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most else None


def _labels(said: Any, solutions: Sequence[str]) -> list[tuple[str, bool, tuple[str, ...]]] | None:
    """Parse label, error and spans of every solution; spans that do not quote the solution are dropped. None: the
    answer is not usable."""
    found = said.get("solutions")
    if not isinstance(found, list) or len(found) != len(solutions):
        return None
    made = []
    for entry, text in zip(found, solutions, strict=True):
        if not isinstance(entry, dict) or entry.get("label") not in LABELS or not isinstance(entry.get("error"), bool):
            return None
        quoted = entry.get("spans")
        spans = tuple(q for q in quoted if isinstance(q, str) and q and q in text) if isinstance(quoted, list) else ()
        made.append((entry["label"], entry["error"], spans))
    return made


def _clusters(said: Any, num: int) -> tuple[tuple[int, ...], ...] | None:
    """Return the clusters; every number from 1 to `num` is in exactly one. None: the answer is not usable."""
    found = said.get("clusters")
    if not isinstance(found, list) or not all(isinstance(c, list) and c for c in found):
        return None
    try:
        if sorted(i for c in found for i in c) != list(range(1, num + 1)):
            return None
    except TypeError:
        return None
    return tuple(tuple(sorted(c)) for c in json.loads(json.dumps(found)))
