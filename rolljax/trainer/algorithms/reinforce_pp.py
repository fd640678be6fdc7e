"""REINFORCE++."""

from __future__ import annotations

import dataclasses

from rolljax.trainer.algorithms.base import ClippedRatio
from rolljax.trainer.credit import Mean, Std


@dataclasses.dataclass(frozen=True)
class ReinforcePP(ClippedRatio):
    """REINFORCE++ (arXiv 2501.03262): rewards normalised over the whole batch under PPO's clipped ratio; the paper's KL
    penalty goes into the reward (`kl_reward_coef`)."""

    mean: Mean = "batch"
    std: Std = "batch"


@dataclasses.dataclass(frozen=True)
class ReinforcePPBaseline(ClippedRatio):
    """REINFORCE++ with a baseline (arXiv 2501.03262): rewards less the group's mean, then whitened over all tokens."""

    mean: Mean = "group"
    std: Std = "none"
    whiten: bool = True
