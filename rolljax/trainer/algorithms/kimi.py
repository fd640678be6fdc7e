"""Policy gradient held near the policy that sampled."""

from __future__ import annotations

import dataclasses

import jax

from rolljax.trainer import objectives
from rolljax.trainer.algorithms.base import OutcomeGradient
from rolljax.trainer.batch import TokenBatch
from rolljax.trainer.credit import Std


@dataclasses.dataclass(frozen=True)
class Kimi(OutcomeGradient):
    """Kimi k1.5 (arXiv 2501.12599): policy gradient with the group's mean as baseline, plus `tau`/2 times the squared
    log-ratio, which pulls each token back to the policy it was sampled from."""

    std: Std = "none"
    tau: float = 0.1

    def surrogate(self, logp: jax.Array, ratio: jax.Array, batch: TokenBatch) -> jax.Array:
        return objectives.kimi(batch.advantages, logp, batch.anchor(self.anchor), self.tau)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tau <= 0:
            raise self.refuse("tau", "must be positive", "0.1 is usual; without the term use reinforce.Reinforce")
