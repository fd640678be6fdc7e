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
    """What is done with trajectories that would teach the wrong thing.

    Those lost to a fault of environment or infrastructure never take part: they are no wrong answers, and group means
    are taken over the others. Nor do those that looped in every attempt.

    max_failed_frac: with a larger share of lost ones in a step, the step is skipped: what is left may not be typical.
    tampering: what to do with an episode whose environment saw the policy tamper with it (its metric `tamper_n`).
      alarm: count it; zero: its reward becomes 0 at most, and it did not succeed; drop: it takes no part.
    drop_failures_over_tok: unsuccessful trajectories with more sampled tokens than this take no part (0: off); very
      long failures push away much that was right.
    """

    max_failed_frac: float = 0.5
    tampering: Literal["alarm", "zero", "drop"] = "zero"
    drop_failures_over_tok: int = 0

    def __post_init__(self) -> None:
        check_range(self, "max_failed_frac", low=0, high=1)
        check_range(self, "drop_failures_over_tok", low=0)


def filter_groups(groups: Sequence[Group], cfg: FilterConfig = FilterConfig()) -> list[list[Trajectory]]:
    """The trajectories that take part, by group, and what experts show to those that failed; groups of which too few
    are left are not there. Empty if the step is to be skipped."""
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
    """Episodes by kind of fault, those begun again, and those let go."""
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
