"""REINFORCE."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import jax

from rolljax.trainer import objectives
from rolljax.trainer.algorithms.policy_gradient import NormalisedReward, PolicyGradient
from rolljax.trainer.batch import TokenBatch
from rolljax.trainer.credit.estimators import Mean, Std
from rolljax.trainer.paper import Stated


@dataclasses.dataclass(frozen=True)
class Reinforce(NormalisedReward, PolicyGradient):
    """REINFORCE (Williams 1992, doi 10.1007/BF00992696): every token gets the trajectory's reward, no ratio, no clip.

    `mean = 'batch'` or `'group'` subtracts a baseline.
    """

    mean: Mean = "none"
    std: Std = "none"

    paper: ClassVar[Mapping[str, Stated]] = {
        "mean": Stated("none", "doi 10.1007/BF00992696, section 4: a baseline of 0 is the plain form"),
        "std": Stated("none", "doi 10.1007/BF00992696, section 4"),
        "aggregation": Stated(
            "seq-mean-token-sum",
            "doi 10.1007/BF00992696, section 5: sums over the steps of an episode",
            "the size of a step would grow with the length of answers",
        ),
    }

    def surrogate(self, logp: jax.Array, ratio: jax.Array, batch: TokenBatch) -> jax.Array:
        return objectives.vanilla(batch.advantages, logp)

    def uses_ratio(self) -> bool:
        return False
