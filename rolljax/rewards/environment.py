"""The environment's own reward, as a term next to others."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from rolljax.rewards.base import Reward, RewardConfig, RewardContext
from rolljax.types import Task, Trajectory


@dataclasses.dataclass(frozen=True)
class Environment(RewardConfig):
    """The reward that the environment gave, turn by turn, with its parts."""

    @property
    def name(self) -> str:
        return "environment"

    @property
    def is_free(self) -> bool:
        return True

    def open(self, around: RewardContext) -> EnvironmentScorer:
        return EnvironmentScorer()


class EnvironmentScorer:
    """Reads the reward that the trajectory already has."""

    async def score(self, task: Task, trajectory: Trajectory) -> Reward:
        """Return the reward of an episode that did not fail."""
        by_turn = tuple(turn.reward for turn in trajectory.turns)
        return Reward(trajectory.reward, trajectory.reward_parts, trajectory.success, by_turn)

    def counts(self) -> Mapping[str, int]:
        """Return the number of calls, and of their faults by kind."""
        return {}

    async def close(self) -> None:
        """Release all resources."""
