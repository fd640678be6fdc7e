"""Return batch normalisation."""

from __future__ import annotations

import dataclasses

import numpy as np

from rolljax.trainer import credit as credits
from rolljax.trainer.aggregation import Aggregation
from rolljax.trainer.algorithms.base import ClippedRatio, Memory
from rolljax.trainer.credit import Mean, Std
from rolljax.trainer.episodes import Episodes


@dataclasses.dataclass(frozen=True)
class ReBn(ClippedRatio):
    """ReBN (GEM, arXiv 2510.01051): discounted returns of all turns of the batch, normalised together. Needs no groups,
    takes dense rewards, and with `gamma` below 1 prefers short solutions (0.9 for games, 1 for questions).

    Answers that were cut are left out of the loss.
    """

    gamma: float = 0.9
    mask_truncated: bool = True
    aggregation: Aggregation = "seq-sum-norm"
    mean: Mean = "none"
    std: Std = "none"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("mean", "std"):
            if getattr(self, name) != "none":
                raise self.refuse(
                    name, "can have no effect: returns are normalised over all turns", "leave it at 'none'"
                )

    def advantages(self, e: Episodes, rewards: np.ndarray, memory: Memory) -> np.ndarray:
        shaped = e.turn_rewards.copy()
        shaped[np.arange(e.num), e.num_turns - 1] += rewards - e.rewards
        returns = credits.turn_returns(shaped, e.num_turns, self.gamma)
        return credits.spread_turns(credits.batch_return_normalised(returns, e.num_turns), e.turns, e.mask)
