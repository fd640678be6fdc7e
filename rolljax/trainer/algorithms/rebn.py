"""Return batch normalisation."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from rolljax.trainer.aggregation import Aggregation
from rolljax.trainer.algorithms.base import AlgorithmState
from rolljax.trainer.algorithms.policy_gradient import ClippedRatio, PolicyGradient, turn_returns
from rolljax.trainer.credit import estimators as credits
from rolljax.trainer.credit.episodes import Credit, Episodes
from rolljax.trainer.paper import Stated

_GEM = "github.com/axon-rl/gem, examples/train_oat/train_oat.py"


@dataclasses.dataclass(frozen=True)
class ReBn(ClippedRatio, PolicyGradient):
    """ReBN (GEM, arXiv 2510.01051): discounted returns of all turns of the batch, normalised together. Needs no groups,
    takes dense rewards, and with `gamma` below 1 prefers short solutions (0.9 for games, 1 for questions). Every turn
    is a sample: the loss is a sum over tokens, divided by turns times the longest answer.

    With `mask_truncated`, turns whose answer was cut have no surrogate; they still count in the denominator, and their
    episode keeps its other turns.
    """

    gamma: float = 0.9
    """Discount of a turn."""
    aggregation: Aggregation = "turn-sum-norm"

    paper: ClassVar[Mapping[str, Stated]] = {
        "gamma": Stated(
            1.0,
            f"{_GEM}, Args.gamma; 0.9 for games in its README.md",
            "episodes of several turns are what the class is for, and there 0.9 prefers short solutions",
        ),
        "aggregation": Stated(
            "turn-sum-norm", f"{_GEM}, Learner._init: masked sum over generate_max_length, mean of turns"
        ),
        "anchor": Stated(
            "proximal",
            "github.com/sail-sg/oat, oat/algorithms/ppo.py: ratios to the trainer's own log-probs",
            "sampler and trainer are one model function here, and agree without a further forward pass",
        ),
        "mask_truncated": Stated(False, "github.com/sail-sg/oat, oat/algorithms/ppo.py, ignore_no_eos"),
        "clip_low": Stated(0.2, "github.com/sail-sg/oat, oat/algorithms/ppo.py, cliprange"),
        "clip_high": Stated(0.2, "github.com/sail-sg/oat, oat/algorithms/ppo.py, cliprange"),
        "kl": Stated(None, "github.com/axon-rl/gem, examples/train_oat/README.md, beta"),
    }

    def prepare(self, e: Episodes) -> tuple[np.ndarray, np.ndarray]:
        # cut turns lose their surrogate in `finish`; no episode is left out for them
        return super().prepare(dataclasses.replace(e, truncated=np.zeros(e.num, bool)))

    def advantages(self, e: Episodes, rewards: np.ndarray, algorithm_state: AlgorithmState) -> np.ndarray:
        returns = turn_returns(e, self.clipped(rewards), self.gamma)
        return credits.spread_turns(credits.batch_return_normalised(returns, e.num_turns), e.turns, e.mask)

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
        if not self.mask_truncated:
            return credit
        uncut = credits.spread_turns(~e.cut, e.turns, e.mask)
        return dataclasses.replace(credit, weights=uncut * credit.weights)
