"""Reward-ranked fine-tuning with PPO's ratio."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from rolljax.trainer.aggregation import Aggregation
from rolljax.trainer.algorithms.base import Carry, ClippedRatio
from rolljax.trainer.credit.episodes import Episodes
from rolljax.trainer.credit.estimators import Mean, Std, spread
from rolljax.trainer.paper import Stated


@dataclasses.dataclass(frozen=True)
class RaftPP(ClippedRatio):
    """RAFT++ (arXiv 2504.11343): only rewarded trajectories count, with their reward as the advantage of every token,
    under PPO's clipped ratio, mean over answers of the mean over their tokens. Rewards are meant to be 0 or 1; negative
    ones count as 0."""

    mean: Mean = "none"
    std: Std = "none"
    aggregation: Aggregation = "seq-mean-token-mean"
    clip_low: float | None = None

    paper: ClassVar[Mapping[str, Stated]] = {
        "mean": Stated("none", "arXiv 2504.11343 (version 2), equation 6: an indicator in the place of an advantage"),
        "std": Stated("none", "arXiv 2504.11343 (version 2), equation 6: an indicator in the place of an advantage"),
        "aggregation": Stated("seq-mean-token-mean", "arXiv 2504.11343 (version 2), equation 6: 1/|D| and 1/|a|"),
        "anchor": Stated(
            "behaviour", "arXiv 2504.11343 (version 2), equation 6: the ratio is to the policy that sampled"
        ),
        "kl_coef": Stated(0.0, "arXiv 2504.11343 (version 2), equation 6: no such term"),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("clip_low", "dual_clip"):
            if getattr(self, name) is not None:
                raise self.refuse(
                    name, "can have no effect: it acts on negative advantages, and there are none", "leave it None"
                )
        for name in ("mean", "std"):
            if getattr(self, name) != "none":
                raise self.refuse(name, "can have no effect: the reward itself is the advantage", "leave it 'none'")

    def prepare(self, e: Episodes) -> tuple[np.ndarray, np.ndarray]:
        rewards, keep = super().prepare(e)
        return rewards, keep & (rewards > 0)

    def advantages(self, e: Episodes, rewards: np.ndarray, carry: Carry) -> np.ndarray:
        return spread(np.maximum(self.clip(rewards), 0), e.mask)
