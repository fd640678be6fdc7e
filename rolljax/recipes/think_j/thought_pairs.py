"""Pairs of thoughts for offline training of a judge (Think-J, arXiv 2505.14268, section 3.2): records to records.

For each question a judge writes a trace J. If J is right, a critic whose prompt has the wrong label writes C-, the
rejected trace; if J is wrong, a critic whose prompt has the right label writes C+, the chosen one:

    J is right   C- concludes wrong  ->  chosen J, rejected C-          J is right   C- concludes right  ->  none
    J is wrong   C+ concludes right  ->  chosen C+, rejected J          J is wrong   C+ concludes wrong  ->  none

A trace without a verdict counts as wrong for a judge and is useless from a critic. (The authors' code also rejects a C-
without a verdict, which teaches the format and not the judgement.) Critics' traces that reveal that the label was in
the prompt are dropped, and so is a pair of equal traces.

These functions call no models; `rolljax.recipes.think_j.judge_pairs` has models write the traces.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from rolljax.recipes.think_j.judging import JudgeQuestion, Judging
from rolljax.recipes.think_j.verdicts import Side, other

Outcome = Literal["judge_right", "judge_wrong", "critic_failed", "leaked", "same"]
"""The outcome of a question: a pair with the judge's trace chosen, or rejected; or no pair, and why."""
MAX_LOOKED_AT = 2**16
"""Characters of a critic's trace that are searched for a leak."""

_LEAKS = re.compile(
    r"\b(?:it is|it's|as|we are|i was|i am|were) (?:already )?(?:known|told|given|informed|instructed) (?:that|to be)\b"
    r"|\bthe (?:given|provided|stated|known|supplied|gold|reference|correct) (?:label|preference|verdict|judge?ment)\b"
    r"|\bthe (?:label|hint)\b"
    r"|\bgiven that response \([ab]\) is (?:known to be )?(?:the )?better",
    re.IGNORECASE,
)


@dataclasses.dataclass(frozen=True)
class Traces:
    """The traces of one question."""

    index: int
    """Index of the task."""
    judge: str
    """Trace J that the judge wrote."""
    critic: str | None = None
    """C- where J is right, else C+; None: not requested yet."""

    def to_json(self) -> dict[str, Any]:
        """Return the traces as a line of a file."""
        return dataclasses.asdict(self)


def label_for_critic(env: Judging, question: JudgeQuestion, judge: str) -> Side:
    """Return the label in the critic's prompt: the wrong label if the judge's trace is right, else the right one."""
    return other(question.better) if _concludes(env, judge) == question.better else question.better


def leaks(trace: str) -> bool:
    """Return whether a critic's trace reveals that the label was in its prompt ("it is known that ...", "the label
    says ..."). Reads the first and last `MAX_LOOKED_AT` characters, in linear time."""
    words = " ".join(trace[:MAX_LOOKED_AT].split()), " ".join(trace[-MAX_LOOKED_AT:].split())
    return any(_LEAKS.search(text) for text in words)


def pair_of(env: Judging, traces: Traces) -> tuple[dict[str, Any] | None, Outcome]:
    """Return the pair of a question's traces, and the outcome.

    Returns:
      A record with `prompt` (the judge's question, as messages), `chosen` and `rejected`, as `Records` reads them; None
      where there is none.
    """
    question = env.question(traces.index)
    right = _concludes(env, traces.judge) == question.better
    wanted = label_for_critic(env, question, traces.judge)
    if traces.critic is None or _concludes(env, traces.critic) != wanted:
        return None, "critic_failed"
    if leaks(traces.critic):
        return None, "leaked"
    chosen, rejected = (traces.judge, traces.critic) if right else (traces.critic, traces.judge)
    if not rejected.strip() or chosen.strip() == rejected.strip():
        return None, "same"
    prompt = [{"role": m.role, "content": m.content} for m in env.prompt(question)]
    record = {"prompt": prompt, "chosen": chosen.strip(), "rejected": rejected.strip(), "index": traces.index}
    return record, "judge_right" if right else "judge_wrong"


def build(env: Judging, traces: Iterable[Traces]) -> tuple[list[dict[str, Any]], Mapping[Outcome, int]]:
    """Return the pairs of many questions, in their order, and the number of questions with each outcome."""
    records: list[dict[str, Any]] = []
    counts: collections.Counter[Outcome] = collections.Counter()
    for each in traces:
        record, outcome = pair_of(env, each)
        counts[outcome] += 1
        if record is not None:
            records.append(record)
    return records, counts


def reference_traces(env: Judging, indices: Sequence[int], *, critic: bool = True) -> list[dict[str, Any]]:
    """Return the environment's own answers as records of `prompt` and `answer`: a judge's answer to each question, and
    with `critic` also the answers of two critics, one with the wrong and one with the right label."""
    records = []
    for index in indices:
        plain = dataclasses.replace(env.question(index), told=None)
        asked = [plain, *([env.critic(plain, side) for side in ("a", "b")] if critic else [])]
        for question in asked:
            prompt = [{"role": m.role, "content": m.content} for m in env.prompt(question)]
            records.append({"prompt": prompt, "answer": env.answer(question, question.conclusion)})
    return records


def _concludes(env: Judging, trace: str) -> Side | None:
    verdict = env.read(trace)
    return None if verdict is None else verdict.better
