"""REINFORCE++."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal

import numpy as np

from rolljax.trainer import credit as credits
from rolljax.trainer.algorithms.base import ClippedRatio, Memory
from rolljax.trainer.credit import Mean, Std
from rolljax.trainer.episodes import Episodes
from rolljax.trainer.paper import Stated

_CODE = "github.com/OpenRLHF/OpenRLHF, openrlhf/trainer/ppo_utils/experience_maker.py"


@dataclasses.dataclass(frozen=True)
class ReinforcePP(ClippedRatio):
    """REINFORCE++ (arXiv 2501.03262) under PPO's clipped ratio: a token's advantage is the reward less the KL penalty
    from it to the end of the answer (`kl_reward_coef`), normalised over all tokens of the batch.

    order: what is normalised. `tokens`: that sum, the paper's. `rewards`: trajectory rewards over the batch, and the KL
      penalty is added to them as it is (ROLL).
    """

    order: Literal["tokens", "rewards"] = "tokens"
    mean: Mean = "none"
    std: Std = "none"

    paper: ClassVar[Mapping[str, Stated]] = {
        "order": Stated("tokens", f"arXiv 2501.03262, eq. 8 to 10; {_CODE}"),
        "clip_low": Stated(0.2, "github.com/OpenRLHF/OpenRLHF, openrlhf/cli/train_ppo_ray.py, eps_clip_low_high"),
        "clip_high": Stated(0.2, "github.com/OpenRLHF/OpenRLHF, openrlhf/cli/train_ppo_ray.py, eps_clip_low_high"),
        "kl_reward": Stated("k1", "arXiv 2501.03262, eq. 9"),
    }

    def advantages(self, e: Episodes, rewards: np.ndarray, memory: Memory) -> np.ndarray:
        if self.order == "tokens":
            return super().advantages(e, rewards, memory)
        scores = credits.normalise(rewards, mean="batch", std="batch")
        return credits.spread(self.clip(scores), e.mask)

    def whitened(self, advantages: np.ndarray, part: np.ndarray) -> np.ndarray:
        # the authors' code takes the deviation of the population
        return credits.whiten(advantages, part, ddof=0) if self.order == "tokens" else advantages

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, only in (("mean", "none"), ("std", "none"), ("whiten", False)):
            if getattr(self, name) != only:
                raise self.refuse(name, "can have no effect: `order` says what is normalised", f"leave it at {only!r}")


@dataclasses.dataclass(frozen=True)
class ReinforcePPBaseline(ClippedRatio):
    """REINFORCE++ with a baseline (arXiv 2501.03262): rewards less the group's mean, then normalised over all tokens of
    the batch. The paper's KL term is k2 in the loss (`kl_coef`)."""

    mean: Mean = "group"
    std: Std = "none"
    whiten: bool = True
    kl: Literal["k1", "abs", "k2", "k3", "full"] = "k2"

    paper: ClassVar[Mapping[str, Stated]] = {
        "mean": Stated("group", f"arXiv 2501.03262, REINFORCE++ w/ baseline; {_CODE}, reinforce_baseline"),
        "std": Stated("none", f"{_CODE}, reinforce_baseline"),
        "whiten": Stated(True, f"arXiv 2501.03262, REINFORCE++ w/ baseline; {_CODE}"),
        "kl": Stated("k2", "arXiv 2501.03262, REINFORCE++ w/ baseline"),
    }

    def whitened(self, advantages: np.ndarray, part: np.ndarray) -> np.ndarray:
        return credits.whiten(advantages, part, ddof=0) if self.whiten else advantages
