"""Guidance: the trajectories of a phase that begin with a latent prefix (Reasoning Palette, arXiv:2512.17206).

Which siblings are guided, and by which latent, depends on the run's seed and their address alone, so a resumed run
guides them alike.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Annotated, Literal, get_args

import numpy as np

from rolljax.errors import Checked, ConfigError, Range
from rolljax.model.prefixes import Prefixes
from rolljax.types import EVAL_STREAM, Group, Key

GuidanceSchedule = Literal["all", "linear", "two_phase"]
_STREAM = 7_203_713
"""Part of the address of the choice of latents, so that nothing else draws the same numbers."""


@dataclasses.dataclass(frozen=True)
class Guidance(Checked):
    """Latent prefixes in front of a phase's prompts (Reasoning Palette, arXiv:2512.17206). Evaluations have none."""

    length: Annotated[int, Range(low=0)] = 8
    """Vectors of a prefix. 0: no trajectory has one."""
    schedule: GuidanceSchedule = "linear"
    """Share of a group's trajectories that have a prefix, by progress t from 0 to 1: `linear` 1 - t; `two_phase` all
    before t = 0.5, and then none; `all`. Progress is the number of the group among those that the phase needs, in
    whole steps."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.schedule not in get_args(GuidanceSchedule):
            raise ConfigError(
                f"must be one of {get_args(GuidanceSchedule)}", setting="Guidance.schedule", value=self.schedule
            )

    def num_guided(self, group_size: int, progress: float) -> int:
        """Return the number of a group's trajectories that have a prefix, at a progress from 0 to 1."""
        share = {"all": 1.0, "linear": 1 - progress, "two_phase": float(progress < 0.5)}[self.schedule]
        return math.floor(share * group_size + 0.5) if self.length else 0


@dataclasses.dataclass(frozen=True, eq=False)
class Guide:
    """The prefixes of a phase's trajectories."""

    guidance: Guidance
    prefixes: Prefixes
    first_id: int
    """Token id of the first vector: the size of the vocabulary."""
    group_size: int
    groups_per_step: int
    steps: int
    """Steps of the phase."""
    seed: int
    """Seed of the run."""

    def is_guided(self, key: Key) -> bool:
        """Return whether a trajectory has a prefix. Spare siblings have one as often as the others."""
        if key.stream == EVAL_STREAM:
            return False
        progress = min(key.prompt_index // self.groups_per_step / self.steps, 1.0)
        return key.sibling % self.group_size < self.guidance.num_guided(self.group_size, progress)

    def prefix(self, key: Key) -> np.ndarray:
        """Return the token ids in front of a trajectory's prompt, int32 `[length]`, or `[0]` if it is not guided.

        Siblings have different latents, as far as there are enough.
        """
        if not self.is_guided(key):
            return np.zeros(0, np.int32)
        rng = np.random.default_rng((_STREAM, self.seed % 2**31, key.stream, key.prompt_index))
        latent = rng.permutation(self.prefixes.latents)[key.sibling % self.prefixes.latents]
        first = self.first_id + latent * self.prefixes.length
        return np.arange(first, first + self.guidance.length, dtype=np.int32)

    def row(self, groups: Sequence[Group]) -> dict[str, float]:
        """Return the share of trajectories with a prefix, and the mean rewards of those with and without one."""
        rewards: dict[bool, list[float]] = {True: [], False: []}
        for t in (t for group in groups for t in group.trajectories if not t.lost):
            rewards[self.is_guided(t.key)].append(t.reward)
        total = len(rewards[True]) + len(rewards[False])
        row = {"guidance/share_frac": len(rewards[True]) / total} if total else {}
        names = {True: "guidance/guided_reward_mean", False: "guidance/free_reward_mean"}
        return row | {names[guided]: float(np.mean(found)) for guided, found in rewards.items() if found}
