"""REINFORCE."""

from __future__ import annotations

import dataclasses

import jax

from rolljax.trainer import objectives
from rolljax.trainer.algorithms.base import OutcomeGradient
from rolljax.trainer.batch import TokenBatch
from rolljax.trainer.credit import Mean, Std


@dataclasses.dataclass(frozen=True)
class Reinforce(OutcomeGradient):
    """REINFORCE (Williams 1992, doi 10.1007/BF00992696): every token gets the trajectory's reward, no ratio, no clip.

    `mean = 'batch'` or `'group'` subtracts a baseline.
    """

    mean: Mean = "none"
    std: Std = "none"

    def surrogate(self, logp: jax.Array, ratio: jax.Array, batch: TokenBatch) -> jax.Array:
        return objectives.vanilla(batch.advantages, logp)

    def uses_ratio(self) -> bool:
        return False
