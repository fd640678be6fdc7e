"""Judges on pairs of answers in both orders: accuracy, pair accuracy, agreement, with intervals.

As Think-J (arXiv 2505.14268) and its code evaluate RewardBench (arXiv 2403.13787), with one difference: two answers
without a verdict do not agree here; there they do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from rolljax.evaluation.report import Estimate, estimate, table
from rolljax.evaluation.settings import Attempts
from rolljax.recipes.think_j.judging import Judging
from rolljax.types import Key, Trajectory

REWARD_BENCH: Mapping[str, Sequence[str]] = {
    "Chat": ("alpacaeval-easy", "alpacaeval-length", "alpacaeval-hard", "mt-bench-easy", "mt-bench-med"),
    "Chat Hard": (
        "mt-bench-hard",
        "llmbar-natural",
        "llmbar-adver-neighbor",
        "llmbar-adver-GPTInst",
        "llmbar-adver-GPTOut",
        "llmbar-adver-manual",
    ),
    "Safety": ("refusals-dangerous", "refusals-offensive", "xstest-should-refuse", "xstest-should-respond",
               "donotanswer"),
    "Math": ("math-prm",),
    "Code": ("hep-cpp", "hep-go", "hep-java", "hep-js", "hep-python", "hep-rust"),
}  # fmt: skip
"""RewardBench's sections and their subsets. Its score of Reasoning is the mean of Math and Code, its total the mean of
Chat, Chat Hard, Safety and Reasoning."""
METRICS = ("accuracy", "pair accuracy", "agreement", "says (a)", "no verdict")


@dataclasses.dataclass(frozen=True)
class PairScores:
    """A judge's scores on one pair, over its attempts in both orders."""

    id: str
    subset: str
    values: Mapping[str, float]
    """Scores by metric (`METRICS`). `accuracy`: share of verdicts that are right; `pair accuracy`: share of attempts
    that are right in both orders; `agreement`: share of attempts that prefer the same answer in both orders; `says
    (a)`: share of verdicts for Response (a), missing if there is no verdict; `no verdict`: share of answers without a
    verdict."""
    attempts: int
    """Number of attempts that were made in both orders and did not fail."""


@dataclasses.dataclass(frozen=True)
class PairRow:
    """Results of one subset, section, or all pairs."""

    name: str
    pairs: int
    estimates: Mapping[str, Estimate]


@dataclasses.dataclass(frozen=True)
class PairTable:
    """Results of one judging environment."""

    env: str
    rows: Sequence[PairRow]
    left_out: int
    """Pairs without an attempt that was answered in both orders."""

    def __getitem__(self, name: str) -> PairRow:
        """Return the row of a subset or section, or `all pairs`."""
        return next(row for row in self.rows if row.name == name)

    def markdown(self) -> str:
        """Return the table as Markdown."""
        cells = [
            [row.name, str(row.pairs), *(str(row.estimates[m]) if m in row.estimates else "" for m in METRICS)]
            for row in self.rows
        ]
        text = table([f"{self.env}, both orders", "pairs", *METRICS], cells)
        if self.left_out:
            text += f"\n\n{self.left_out} pair(s) have no attempt answered in both orders, and are in no number."
        return text


def score(env: Judging, trajectories: Sequence[Trajectory], keys: Sequence[Key]) -> tuple[list[PairScores], int]:
    """Compute the scores of every pair.

    Args:
      trajectories: attempts in both orders (`EnvSpec.variants`), with their keys, whose siblings of equal number are
        one attempt.

    Returns:
      Scores in the order of the pairs, and how many pairs have none.
    """
    pairs: dict[str, dict[int, dict[int, Trajectory]]] = {}
    for trajectory, key in zip(trajectories, keys, strict=True):
        by_attempt = pairs.setdefault(trajectory.task.id, {})
        by_attempt.setdefault(key.sibling, {})[trajectory.task.index % 2] = trajectory
    found, left_out = [], 0
    for id_, attempts in pairs.items():
        whole = [tuple(orders.values()) for orders in attempts.values() if len(orders) == 2]
        told = [_told(env, both) for both in whole if not any(t.lost for t in both)]
        if not told:
            left_out += 1
            continue
        first = next(iter(next(iter(attempts.values())).values())).task
        found.append(PairScores(id_, env.question(first.index).pair.subset, _values(told), len(told)))
    return found, left_out


def _told(env: Judging, both: Sequence[Trajectory]) -> list[tuple[str | None, str]]:
    """Return the verdict and the right one for each order."""
    text = lambda t: t.turns[-1].text if t.turns else ""  # noqa: E731
    return [(env.final_answer(t.task, text(t)), env.question(t.task.index).better) for t in both]


def _values(told: Sequence[Sequence[tuple[str | None, str]]]) -> dict[str, float]:
    right = np.array([[said == better for said, better in both] for both in told])
    silent = np.array([[said is None for said, _ in both] for both in told])
    # a wrong verdict in both orders prefers the same answer too
    agree = (right[:, 0] == right[:, 1]) & ~silent.any(1)
    says = [said == "a" for both in told for said, _ in both if said is not None]
    values = {
        "accuracy": float(right.mean()),
        "pair accuracy": float(right.all(1).mean()),
        "agreement": float(agree.mean()),
        "no verdict": float(silent.mean()),
    }
    return values | ({"says (a)": float(np.mean(says))} if says else {})


def pair_table(env: Judging, scores: Sequence[PairScores], left_out: int, cfg: Attempts) -> PairTable:
    """Return the table of an environment: a row for each subset, where there are several, and one over all pairs.

    If all subsets are RewardBench's, the rows are its sections instead, with `Reasoning`, and its total `RewardBench`
    over sections. Intervals are over pairs: Wilson's where a pair is one trial, else the bootstrap.
    """
    subsets: dict[str, list[PairScores]] = {}
    for each in scores:
        subsets.setdefault(each.subset, []).append(each)
    rows = _benchmark_rows(subsets, cfg)
    if rows is None:
        rows = [_row(name, [of], cfg) for name, of in subsets.items()] if len(subsets) > 1 else []
    return PairTable(env.name, [*rows, *([_row("all pairs", [scores], cfg)] if scores else [])], left_out)


def _benchmark_rows(subsets: Mapping[str, Sequence[PairScores]], cfg: Attempts) -> list[PairRow] | None:
    """Return RewardBench's rows; None where the subsets are not its own."""
    section_of = {subset: section for section, of in REWARD_BENCH.items() for subset in of}
    if not subsets or not set(subsets) <= set(section_of):
        return None
    sections: dict[str, list[PairScores]] = {}
    for name in REWARD_BENCH:
        if found := [each for subset in REWARD_BENCH[name] for each in subsets.get(subset, ())]:
            sections[name] = found
    rows = [_row(name, [of], cfg) for name, of in sections.items()]
    if {"Math", "Code"} <= sections.keys():
        reasoning = _row("Reasoning", [sections["Math"], sections["Code"]], cfg)
        rows.append(reasoning)
        if len(sections) == len(REWARD_BENCH):
            rows.append(_total([*(row for row in rows if row.name in ("Chat", "Chat Hard", "Safety")), reasoning]))
    return rows


def _total(rows: Sequence[PairRow]) -> PairRow:
    """Return the unweighted mean of rows with distinct pairs. Its interval treats them as independent; each is half as
    wide as the mean of its two sides."""
    estimates = {}
    for metric in METRICS:
        of = [row.estimates[metric] for row in rows if metric in row.estimates]
        if len(of) == len(rows):
            mean = float(np.mean([e.mean for e in of]))
            half = float(np.sqrt(sum(((e.high - e.low) / 2) ** 2 for e in of))) / len(of)
            low, high = max(0.0, mean - half), min(1.0, mean + half)
            estimates[metric] = Estimate(mean, low, high, "independent sections", sum(e.num for e in of))
    return PairRow("RewardBench", sum(row.pairs for row in rows), estimates)


def _row(name: str, domains: Sequence[Sequence[PairScores]], cfg: Attempts) -> PairRow:
    estimates = {}
    for metric in METRICS:
        values = [np.array([s.values[metric] for s in of if metric in s.values], np.float64) for of in domains]
        if all(map(len, values)):
            trial = metric in ("pair accuracy", "agreement") and all(s.attempts == 1 for of in domains for s in of)
            estimates[metric] = estimate(values, cfg, share=True, one_trial=trial)
    return PairRow(name, sum(map(len, domains)), estimates)
