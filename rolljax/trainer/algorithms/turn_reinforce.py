"""REINFORCE over turns."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, ClassVar

import jax
import numpy as np

from rolljax.errors import Range, check_fields
from rolljax.trainer import objectives
from rolljax.trainer.algorithms.base import AlgorithmState
from rolljax.trainer.algorithms.policy_gradient import PolicyGradient, turn_returns
from rolljax.trainer.batch import TokenBatch
from rolljax.trainer.credit import estimators as credits
from rolljax.trainer.credit.episodes import Credit, Episodes
from rolljax.trainer.paper import Stated


@dataclasses.dataclass(frozen=True)
class TurnReinforce(PolicyGradient):
    """REINFORCE over the turns of an episode (Williams 1992, doi 10.1007/BF00992696): the tokens of turn k get
    `G_k = r_k + gamma G_{k+1}`."""

    gamma: Annotated[float, Range(low=0, high=1, remedy="0.95 is usual")] = 0.95
    """Discount of a turn."""
    equal_turns: bool = False
    """True: every turn is a separate sample and has the same weight, regardless of its length. False: every token has
    the same weight."""

    paper: ClassVar[Mapping[str, Stated]] = {
        "gamma": Stated(0.95, "github.com/alibaba/ROLL, roll/pipeline/agentic/agentic_config.py, step_reward_gamma"),
    }

    def advantages(self, e: Episodes, rewards: np.ndarray, algorithm_state: AlgorithmState) -> np.ndarray:
        return credits.spread_turns(turn_returns(e, self.clipped(rewards), self.gamma), e.turns, e.mask)

    def finish(
        self,
        e: Episodes,
        rewards: np.ndarray,
        keep: np.ndarray,
        advantages: np.ndarray,
        algorithm_state: AlgorithmState,
        stats: Mapping[str, float],
    ) -> Credit:
        credit = super().finish(e, rewards, keep, advantages, algorithm_state, stats)
        if not self.equal_turns:
            return credit
        trained = credit.trained(e.mask)
        lengths = np.stack([(trained & (e.turns == k)).sum(1) for k in range(e.turn_rewards.shape[1])], 1)
        each = trained.sum() / np.maximum(lengths * np.count_nonzero(lengths), 1)
        equal = credits.spread_turns(each, e.turns, e.mask)
        return dataclasses.replace(credit, weights=equal * credit.weights)

    def surrogate(self, logp: jax.Array, ratio: jax.Array, batch: TokenBatch) -> jax.Array:
        return objectives.vanilla(batch.advantages, logp)

    def uses_ratio(self) -> bool:
        return False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self)
        if self.equal_turns and self.aggregation != "token-mean":
            raise self.refuse(
                "equal_turns", "makes turns equal under the token mean only", "aggregation = 'token-mean'"
            )
