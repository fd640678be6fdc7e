"""Selects the trajectories that take part in a step, and skips steps without a signal."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from rolljax.errors import Checked, Range
from rolljax.types import Group, Trajectory


@dataclasses.dataclass(frozen=True)
class FilterConfig(Checked):
    """Rules for trajectories that would teach the wrong thing.

    A trajectory that was lost to a fault of environment or infrastructure is never trained on: it is not a wrong
    answer, and group means leave it out. The same holds for a trajectory that looped in every attempt.
    """

    max_failed_frac: Annotated[float, Range(low=0, high=1)] = 0.5
    """Largest share of lost trajectories in a step; with more the step is skipped, because the rest may not be
    typical."""
    tampering: Literal["alarm", "zero", "drop"] = "zero"
    """Treatment of an episode whose environment saw the policy tamper with it (its metric `tamper_n`). alarm: count it.
    zero: its reward becomes 0 at most, and it did not succeed. drop: leave it out."""
    drop_failures_over_tok: Annotated[int, Range(low=0)] = 0
    """Leave out unsuccessful trajectories with more sampled tokens than this (0: off), because very long failures also
    penalise many correct tokens."""


class GroupFilters:
    """Filters groups by the rules of a recipe, and by the own rules of a mixture's domains. Every group is filtered
    once, when it is complete; a step looks only at how many trajectories were lost.

    Args:
      own: by domain; the groups of a domain without an entry follow `cfg`.
    """

    def __init__(self, cfg: FilterConfig, own: Mapping[str, FilterConfig]) -> None:
        self._cfg, self._own = cfg, own

    def group(self, group: Group) -> list[Trajectory]:
        """Return the trajectories of a group to train on, with the expert's demonstration if the group has one; empty
        if too few are left."""
        cfg = self._own.get(group.task.env, self._cfg)
        alive = [adjusted(t, cfg) for t in group.trajectories if takes_part(t, cfg)]
        if len(alive) < min(2, len(group.trajectories)):
            return []
        return [*alive, group.demonstration] if group.demonstration else alive

    def step(self, groups: Sequence[Group], kept: Sequence[list[Trajectory]]) -> list[list[Trajectory]]:
        """Return the trajectories of a step to train on, by group: without empty groups, and without the domains in
        which too many trajectories were lost.

        Args:
          kept: `group` of each of the groups.
        """
        lost, total = Counter[str](), Counter[str]()
        for g in groups:
            domain = self._domain(g)
            lost[domain] += sum(t.lost for t in g.trajectories)
            total[domain] += len(g.trajectories)
        skipped = {d for d in total if lost[d] > self._own.get(d, self._cfg).max_failed_frac * total[d]}
        return [k for g, k in zip(groups, kept, strict=True) if k and self._domain(g) not in skipped]

    def _domain(self, group: Group) -> str:
        """Return the domain whose rules a group follows; empty: the recipe's."""
        return group.task.env if group.task.env in self._own else ""


def takes_part(t: Trajectory, cfg: FilterConfig) -> bool:
    """Return whether to train on a trajectory."""
    if t.status == "failed" or not t.turns:
        return False
    if cfg.tampering == "drop" and t.tampered:
        return False
    return not (cfg.drop_failures_over_tok and not t.success and t.num_sampled_tok > cfg.drop_failures_over_tok)


def adjusted(t: Trajectory, cfg: FilterConfig) -> Trajectory:
    """Return the trajectory with the reward that counts."""
    if cfg.tampering != "zero" or not t.tampered:
        return t
    turns = tuple(dataclasses.replace(turn, reward=min(turn.reward, 0.0)) for turn in t.turns)
    return dataclasses.replace(t, turns=turns, reward=min(t.reward, 0.0), success=False)
