"""Reward-ranked fine-tuning with PPO's ratio."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from rolljax.trainer.aggregation import Aggregation
from rolljax.trainer.algorithms.base import AlgorithmState
from rolljax.trainer.algorithms.policy_gradient import ClippedRatio, PolicyGradient
from rolljax.trainer.credit.episodes import Episodes
from rolljax.trainer.credit.estimators import spread
from rolljax.trainer.paper import Stated


@dataclasses.dataclass(frozen=True)
class RaftPP(ClippedRatio, PolicyGradient):
    """RAFT++ (arXiv 2504.11343): only rewarded trajectories count, with their reward as the advantage of every token,
    under PPO's clipped ratio, mean over answers of the mean over their tokens. Rewards are meant to be 0 or 1; negative
    ones count as 0."""

    aggregation: Aggregation = "seq-mean-token-mean"
    clip_low: float | None = None

    paper: ClassVar[Mapping[str, Stated]] = {
        "aggregation": Stated("seq-mean-token-mean", "arXiv 2504.11343 (version 2), equation 6: 1/|D| and 1/|a|"),
        "anchor": Stated(
            "behaviour", "arXiv 2504.11343 (version 2), equation 6: the ratio is to the policy that sampled"
        ),
        "kl": Stated(None, "arXiv 2504.11343 (version 2), equation 6: no such term"),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("clip_low", "dual_clip"):
            if getattr(self, name) is not None:
                raise self.refuse(
                    name, "can have no effect: it acts on negative advantages, and there are none", "leave it None"
                )

    def prepare(self, e: Episodes) -> tuple[np.ndarray, np.ndarray]:
        rewards, keep = super().prepare(e)
        return rewards, keep & (rewards > 0)

    def advantages(self, e: Episodes, rewards: np.ndarray, algorithm_state: AlgorithmState) -> np.ndarray:
        return spread(np.maximum(self.clipped(rewards), 0), e.mask)
