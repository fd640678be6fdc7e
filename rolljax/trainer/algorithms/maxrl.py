"""Maximum likelihood reinforcement learning."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from rolljax.trainer.algorithms.base import AlgorithmState
from rolljax.trainer.algorithms.policy_gradient import ClippedRatio, NormalisedReward, PolicyGradient
from rolljax.trainer.credit.episodes import Episodes
from rolljax.trainer.credit.estimators import Std
from rolljax.trainer.paper import Stated

CODE = "github.com/tajwarfahim/maxrl at 7db6bb9, verl/trainer/ppo/core_algos.py"


@dataclasses.dataclass(frozen=True)
class MaxRl(NormalisedReward, ClippedRatio, PolicyGradient):
    """MaxRL (arXiv 2602.02710): rewards less the group's mean, divided by that mean. In expectation over groups of N
    answers it is the gradient of the first N - 1 terms of log p = -sum (1 - p)^k / k, p the probability of success:
    rarely solved prompts weigh more than under GRPO. Rewards must not be negative; 0 and 1 are meant."""

    std: Std = "group_mean"

    paper: ClassVar[Mapping[str, Stated]] = {
        "mean": Stated("group", f"arXiv 2602.02710, algorithm 1; {CODE}, compute_p_normalization_outcome_advantage"),
        "std": Stated(
            "group_mean", f"arXiv 2602.02710, algorithm 1; {CODE}, compute_p_normalization_outcome_advantage"
        ),
    }

    def scores(self, e: Episodes, rewards: np.ndarray, algorithm_state: AlgorithmState) -> np.ndarray:
        if self.std == "group_mean" and (rewards < 0).any():
            raise self.refuse(
                "std",
                f"cannot be used with a reward of {rewards.min():g}: the mean of a group would not be a success rate",
                "give rewards from 0 on and no penalty by RewardShaping, or choose Grpo",
            )
        return super().scores(e, rewards, algorithm_state)
