"""REINFORCE++."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal

import numpy as np

from rolljax.trainer.algorithms.base import Carry, ClippedRatio
from rolljax.trainer.credit import estimators as credits
from rolljax.trainer.credit.episodes import Episodes
from rolljax.trainer.credit.estimators import Mean, Std
from rolljax.trainer.paper import Stated

_CODE = "github.com/OpenRLHF/OpenRLHF, openrlhf/trainer/ppo_utils/experience_maker.py"
_PAPER = "arXiv 2501.03262 (version 9)"
_CLIP = Stated(
    0.2,
    "arXiv 2501.03262 (version 1), table 1; github.com/OpenRLHF/OpenRLHF, openrlhf/cli/train_ppo_ray.py, "
    "actor.eps_clip",
)
_SUM = Stated(
    "token-mean",
    "github.com/OpenRLHF/OpenRLHF, openrlhf/models/loss.py, token_level_loss "
    f"({_PAPER}, equation 1: the mean over an answer's tokens first)",
)


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
        "order": Stated("tokens", f"{_PAPER}, equations 4 and 5; {_CODE}"),
        "clip_low": _CLIP,
        "clip_high": _CLIP,
        "aggregation": _SUM,
        "kl_reward": Stated("k1", f"{_PAPER}, equation 4"),
    }

    def advantages(self, e: Episodes, rewards: np.ndarray, carry: Carry) -> np.ndarray:
        if self.order == "tokens":
            return super().advantages(e, rewards, carry)
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
        "mean": Stated("group", f"{_PAPER}, equation 6; {_CODE}, reinforce_baseline"),
        "std": Stated("none", f"{_PAPER}, equation 6; {_CODE}, reinforce_baseline"),
        "whiten": Stated(True, f"{_PAPER}, equation 7; {_CODE}"),
        "kl": Stated("k2", f"{_PAPER}, equation 8"),
        "aggregation": _SUM,
    }

    def whitened(self, advantages: np.ndarray, part: np.ndarray) -> np.ndarray:
        return credits.whiten(advantages, part, ddof=0) if self.whiten else advantages
