"""Tapered off-policy REINFORCE."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

import jax

from rolljax.trainer import objectives
from rolljax.trainer.algorithms.base import OutcomeGradient
from rolljax.trainer.batch import TokenBatch


@dataclasses.dataclass(frozen=True)
class Topr(OutcomeGradient):
    """TOPR (arXiv 2503.14286): good tokens are imitated whatever the ratio; bad ones are pushed away with a weight that
    falls to 0 as they become unlikely, which keeps stale negatives bounded.

    positive, negative: weights of the two halves (1, 1 is the paper's; others are "weighted TOPR").
    """

    positive: float = 1.0
    negative: float = 1.0

    def surrogate(self, logp: jax.Array, ratio: jax.Array, batch: TokenBatch) -> jax.Array:
        return objectives.topr(ratio, batch.advantages, logp, self.positive, self.negative)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("positive", "negative"):
            if getattr(self, name) < 0:
                raise self.refuse(name, "must not be negative", "1 is the paper's weight, 0 leaves that half out")


@dataclasses.dataclass(frozen=True)
class SequenceTopr(Topr):
    """TOPR (arXiv 2503.14286) with one ratio per trajectory, the geometric mean over its tokens: the token-level
    baseline that IPA starts from."""

    level: ClassVar[Literal["token", "chunk", "sequence"]] = "sequence"
