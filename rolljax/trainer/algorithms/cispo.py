"""Clipped importance-sampling weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import jax

from rolljax.trainer import objectives
from rolljax.trainer.algorithms.base import Setup
from rolljax.trainer.algorithms.checks import check_clips
from rolljax.trainer.algorithms.policy_gradient import NormalisedReward, PolicyGradient
from rolljax.trainer.batch import TokenBatch
from rolljax.trainer.credit.shaping import GroupFilter
from rolljax.trainer.paper import Stated


@dataclasses.dataclass(frozen=True)
class Cispo(NormalisedReward, PolicyGradient):
    """CISPO (MiniMax-M1, arXiv 2506.13585): the ratio is clipped and held fixed as a weight of log-prob, so that every
    token keeps a gradient."""

    clip_low: float | None = None
    """Maximum distance of the weight below 1 (None: no bound). The paper has no lower bound."""
    clip_high: float | None = 0.28
    """Maximum distance of the weight above 1 (None: no bound). The paper tunes it without giving a value."""
    unified_mask: bool = False
    """Leave out the tokens that PPO's clip would."""

    paper: ClassVar[Mapping[str, Stated]] = {
        "clip_low": Stated(None, "arXiv 2506.13585, section 3.1, after eq. 5: no lower bound on the weight"),
        "unified_mask": Stated(False, "arXiv 2506.13585, eq. 4 and 5; the mask is the general form, eq. 6 and 7"),
        "aggregation": Stated("token-mean", "arXiv 2506.13585, eq. 4: divided by the sum of the answers' lengths"),
        "mean": Stated("group", "arXiv 2506.13585, section 3.1: group-relative advantage"),
        "std": Stated("group", "arXiv 2506.13585, section 3.1: group-relative advantage"),
        "filter": Stated(
            GroupFilter(),
            "arXiv 2506.13585, section 3.1: DAPO's dynamic sampling, and its length penalty, are used as well",
            "they are choices of data and reward, apart from the loss: GroupFilter, RewardShaping.overlong_cache",
        ),
        "kl": Stated(None, "arXiv 2506.13585, section 3.1: no KL term"),
    }

    ratio_settings: ClassVar[tuple[str, ...]] = ("clip_high", "clip_low")

    @property
    def clip_range(self) -> tuple[float | None, float | None]:
        return self.clip_low, self.clip_high

    def surrogate(self, logp: jax.Array, ratio: jax.Array, batch: TokenBatch) -> jax.Array:
        return objectives.cispo(ratio, batch.advantages, logp, self.clip_low, self.clip_high, self.unified_mask)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_clips(self, self.clip_low, "clip_low", "clip_high")
        if self.unified_mask and self.clip_low is None and self.clip_high is None:
            raise self.refuse("unified_mask", "can have no effect without clip_low or clip_high", "set one of them")

    def check(self, setup: Setup) -> list[str]:
        warnings = super().check(setup)
        if setup.on_policy and self.clip_low is None and self.clip_high is None:
            return [*warnings, "Cispo differs from REINFORCE by its ratio, which is 1 here: one update, no staleness"]
        return warnings
