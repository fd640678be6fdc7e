"""Measure a judge's agreement with people on a labelled set, and fit a calibration curve from its scores to the labels.

A labelled set is a JSON Lines file: `{"index": 3, "answer": "...", "label": 1}`: the index of the task, an answer, and
the score from 0 to 1 that a person gave the answer.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rolljax.errors import DataError, InfraError, boundary
from rolljax.rewards.base import RewardConfig, RewardContext
from rolljax.types import Key, Trajectory, Turn


@dataclasses.dataclass(frozen=True)
class Labelled:
    """An answer to a task, with the score that a person gave it."""

    index: int
    """Index of the task."""
    answer: str
    """Text of the answer."""
    label: float
    """Score that a person gave the answer, from 0 to 1."""


@dataclasses.dataclass(frozen=True)
class Agreement:
    """The agreement between a reward and a labelled set."""

    num: int
    """Answers with a verdict."""
    lost: int
    """Answers without one."""
    accuracy: float
    """Share of answers whose reward and label are both at least 0.5 or both below it."""
    kappa: float
    """Cohen's kappa of reward and label, each split at 0.5 (0: no better than chance, NaN: undefined)."""
    mean_error: float
    """Mean of |reward - label|."""
    scores: tuple[float, ...]
    """Reward of every answer with a verdict."""
    labels: tuple[float, ...]
    """Label of every answer with a verdict."""


def read_labelled(path: str | Path) -> list[Labelled]:
    """Read a labelled set from a file.

    Raises:
      DataError: a line is not a labelled answer.
    """
    found = []
    with boundary(DataError, f"reading {path}"):
        lines = Path(path).read_text().splitlines()
    for number, line in enumerate(lines, 1):
        if line.strip():
            with boundary(DataError, f"{path}, line {number}"):
                record = json.loads(line)
                one = Labelled(int(record["index"]), str(record["answer"]), float(record["label"]))
            if not 0 <= one.label <= 1:
                raise DataError(f"{path}, line {number}: label is {one.label:g}, not from 0 to 1")
            found.append(one)
    if not found:
        raise DataError(f"{path} holds no labelled answers")
    return found


async def agreement(reward: RewardConfig, around: RewardContext, labelled: Sequence[Labelled]) -> Agreement:
    """Ask a reward about every answer of a labelled set."""
    scorer = reward.open(around)

    async def score(one: Labelled) -> float | None:
        task, none = around.env.task(one.index), np.zeros(0, np.int32)
        turn = Turn(none, none, none.astype(np.float32), none, "stop", 0.0, one.answer)
        try:
            return (await scorer.score(task, Trajectory(Key(0, 0, 0), task, (turn,), 0.0, {}, False, "ok"))).value
        except InfraError:
            return None

    try:
        scores = await asyncio.gather(*map(score, labelled))
    finally:
        await scorer.close()
    both = [(s, one.label) for s, one in zip(scores, labelled, strict=True) if s is not None]
    said, labels = tuple(s for s, _ in both), tuple(g for _, g in both)
    return agreed(said, labels, lost=len(labelled) - len(both))


def agreed(scores: Sequence[float], labels: Sequence[float], lost: int = 0) -> Agreement:
    """Return the agreement between scores and labels of the same answers."""
    a, b = np.array(scores, np.float64), np.array(labels, np.float64)
    if not len(a):
        return Agreement(0, lost, math.nan, math.nan, math.nan, (), ())
    good, reference = a >= 0.5, b >= 0.5
    accuracy, by_chance = (
        float((good == reference).mean()),
        float(good.mean() * reference.mean() + (~good).mean() * (~reference).mean()),
    )
    kappa = (accuracy - by_chance) / (1 - by_chance) if by_chance < 1 else math.nan
    return Agreement(len(a), lost, accuracy, kappa, float(abs(a - b).mean()), tuple(scores), tuple(labels))


def isotonic(scores: Sequence[float], labels: Sequence[float]) -> tuple[tuple[float, float], ...]:
    """Fit the non-decreasing curve from scores to labels with the least squared error (pool adjacent violators).
    Returns its points, for `Judge.calibration` and `compose.Shaping`.

    Args:
      scores: of the judge, `[N]`. labels: of the same answers, `[N]`.

    Raises:
      DataError: there are no scores.
    """
    if not scores or len(scores) != len(labels):
        raise DataError(f"{len(scores)} scores for {len(labels)} answers cannot be calibrated")
    xs = sorted(set(scores))
    means = [[g for s, g in zip(scores, labels, strict=True) if s == x] for x in xs]
    blocks: list[tuple[float, int, int]] = []  # mean, answers, scores
    for group in means:
        mean, num, size = sum(group) / len(group), len(group), 1
        while blocks and blocks[-1][0] >= mean:
            before = blocks.pop()
            mean = (mean * num + before[0] * before[1]) / (num + before[1])
            num, size = num + before[1], size + before[2]
        blocks.append((mean, num, size))
    fitted = [mean for mean, _, size in blocks for _ in range(size)]
    return tuple((float(x), float(y)) for x, y in zip(xs, fitted, strict=True))
