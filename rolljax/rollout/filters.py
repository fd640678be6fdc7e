"""Which trajectories take part in a step, and when a step is not worth an update."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Literal

from rolljax.envs.pool.blame import SET_ASIDE
from rolljax.errors import check_range
from rolljax.types import Group, Trajectory

Row = dict[str, float]


@dataclasses.dataclass(frozen=True)
class FilterConfig:
    """Rules for trajectories that would teach the wrong thing.

    A trajectory that was lost to a fault of environment or infrastructure is never trained on: it is no wrong answer,
    and group means leave it out. The same holds for a trajectory that looped in every attempt.

    max_failed_frac: largest share of lost trajectories in a step; with more the step is skipped, because the rest may
      not be typical.
    tampering: what to do with an episode whose environment saw the policy tamper with it (its metric `tamper_n`).
      alarm: count it; zero: its reward becomes 0 at most, and it did not succeed; drop: leave it out.
    drop_failures_over_tok: leave out unsuccessful trajectories with more sampled tokens than this (0: off), because
      very long failures also penalise many correct tokens.
    """

    max_failed_frac: float = 0.5
    tampering: Literal["alarm", "zero", "drop"] = "zero"
    drop_failures_over_tok: int = 0

    def __post_init__(self) -> None:
        check_range(self, "max_failed_frac", low=0, high=1)
        check_range(self, "drop_failures_over_tok", low=0)


def filter_groups(groups: Sequence[Group], cfg: FilterConfig = FilterConfig()) -> list[list[Trajectory]]:
    """Return the trajectories to train on, by group, with the expert's demonstration if a group failed. Groups with too
    few trajectories are left out. Empty if the step is skipped."""
    every = [t for g in groups for t in g.trajectories]
    if sum(t.lost for t in every) > cfg.max_failed_frac * len(every):
        return []
    alive = [[adjusted(t, cfg) for t in g.trajectories if takes_part(t, cfg)] for g in groups]
    return [
        [*a, g.demonstration] if g.demonstration else a
        for a, g in zip(alive, groups, strict=True)
        if len(a) >= min(2, len(g.trajectories))
    ]


def takes_part(t: Trajectory, cfg: FilterConfig) -> bool:
    """Whether a trajectory is one to learn from."""
    if t.status == "failed" or not t.turns:
        return False
    if cfg.tampering == "drop" and tampered(t):
        return False
    return not (cfg.drop_failures_over_tok and not t.success and t.num_sampled_tok > cfg.drop_failures_over_tok)


def adjusted(t: Trajectory, cfg: FilterConfig) -> Trajectory:
    """The trajectory with the reward that counts."""
    if cfg.tampering != "zero" or not tampered(t):
        return t
    turns = tuple(dataclasses.replace(turn, reward=min(turn.reward, 0.0)) for turn in t.turns)
    return dataclasses.replace(t, turns=turns, reward=min(t.reward, 0.0), success=False)


def tampered(t: Trajectory) -> bool:
    """Whether the environment saw the policy tamper with its task."""
    return t.metrics.get("tamper_n", 0) > 0


def faults_row(groups: Sequence[Group]) -> Row:
    """Return the counts of episodes by kind of fault, of restarts, loops, tampering, and cancelled episodes."""
    every = [t for g in groups for t in g.trajectories]
    kinds = Counter(t.fault.kind for t in every if t.fault)
    return {
        **{f"faults/{kind}_n": float(kinds[kind]) for kind in ("infra", "env", "agent", "limit")},
        "faults/set_aside_n": float(sum(t.fault is not None and t.fault.stage == SET_ASIDE for t in every)),
        "faults/retried_n": float(sum(t.attempts - 1 for t in every)),
        "faults/looped_n": float(sum(t.loops for t in every)),
        "faults/tampered_n": float(sum(map(tampered, every))),
        "rollout/cancelled_n": float(sum(g.cancelled for g in groups)),
    }
