"""REINFORCE over turns."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import jax
import numpy as np

from rolljax.trainer import objectives
from rolljax.trainer.algorithms.base import Carry, PolicyGradient
from rolljax.trainer.batch import TokenBatch
from rolljax.trainer.credit import estimators as credits
from rolljax.trainer.credit.episodes import Credit, Episodes
from rolljax.trainer.paper import Stated


@dataclasses.dataclass(frozen=True)
class TurnReinforce(PolicyGradient):
    """REINFORCE over the turns of an episode (Williams 1992, doi 10.1007/BF00992696): the tokens of turn k get
    `G_k = r_k + gamma G_{k+1}`.

    equal_turns: every turn is a sample of its own and counts the same, whatever its length ("step REINFORCE"); off:
    every token counts the same ("segment REINFORCE").
    """

    gamma: float = 0.95
    equal_turns: bool = False

    paper: ClassVar[Mapping[str, Stated]] = {
        "gamma": Stated(0.95, "github.com/alibaba/ROLL, roll/pipeline/agentic/agentic_config.py, step_reward_gamma"),
    }

    def advantages(self, e: Episodes, rewards: np.ndarray, carry: Carry) -> np.ndarray:
        shaped = e.turn_rewards.copy()
        shaped[np.arange(e.num), e.num_turns - 1] += self.clip(rewards) - e.rewards
        return credits.spread_turns(credits.turn_returns(shaped, e.num_turns, self.gamma), e.turns, e.mask)

    def finish(
        self, e: Episodes, advantages: np.ndarray, keep: np.ndarray, carry: Carry, stats: Mapping[str, float]
    ) -> Credit:
        credit = super().finish(e, advantages, keep, carry, stats)
        if not self.equal_turns:
            return credit
        part = e.mask & keep[:, None] & (True if credit.mask is None else credit.mask)
        lengths = np.stack([(part & (e.turns == k)).sum(1) for k in range(e.turn_rewards.shape[1])], 1)
        each = part.sum() / np.maximum(lengths * np.count_nonzero(lengths), 1)
        equal = credits.spread_turns(each, e.turns, e.mask)
        return dataclasses.replace(credit, weights=equal if credit.weights is None else equal * credit.weights)

    def surrogate(self, logp: jax.Array, ratio: jax.Array, batch: TokenBatch) -> jax.Array:
        return objectives.vanilla(batch.advantages, logp)

    def uses_ratio(self) -> bool:
        return False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.gamma <= 1:
            raise self.refuse("gamma", "must be between 0 and 1", "0.95 is usual")
        if self.equal_turns and self.aggregation != "token-mean":
            raise self.refuse(
                "equal_turns", "makes turns equal under the token mean only", "aggregation = 'token-mean'"
            )
