"""Group-in-group policy optimization."""

from __future__ import annotations

import dataclasses

import numpy as np

from rolljax.trainer import credit as credits
from rolljax.trainer.algorithms.base import ClippedRatio, Memory
from rolljax.trainer.episodes import Episodes


@dataclasses.dataclass(frozen=True)
class GiGpo(ClippedRatio):
    """GiGPO (arXiv 2505.10978): the group-normalised score of the episode, plus the discounted return of a turn
    normalised over all turns of the group that began in the same state (equal observation).

    episode_weight, turn_weight: of the two parts. gamma: discount per turn.
    """

    episode_weight: float = 1.0
    turn_weight: float = 1.0
    gamma: float = 0.95

    def advantages(self, e: Episodes, rewards: np.ndarray, memory: Memory) -> np.ndarray:
        episode = super().advantages(e, rewards, memory)
        returns = credits.turn_returns(e.turn_rewards, e.num_turns, self.gamma)
        turn = credits.same_state_normalised(returns, e.states, e.num_turns, e.groups, std=self.std != "none")
        return self.episode_weight * episode + self.turn_weight * credits.spread_turns(turn, e.turns, e.mask)

    def check(self, setup):
        if setup.max_turns == 1 and self.turn_weight:
            raise self.refuse(
                "turn_weight",
                "compares turns that began in the same state, but episodes have one turn",
                "use grpo.Grpo, or an environment with several turns",
            )
        return super().check(setup)
