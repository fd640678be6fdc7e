"""Tapered off-policy REINFORCE."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import jax

from rolljax.trainer import objectives
from rolljax.trainer.aggregation import Aggregation
from rolljax.trainer.algorithms.base import OutcomeGradient
from rolljax.trainer.batch import TokenBatch
from rolljax.trainer.credit.estimators import Mean, Std
from rolljax.trainer.paper import Stated


@dataclasses.dataclass(frozen=True)
class Topr(OutcomeGradient):
    """TOPR (arXiv 2503.14286): trajectories of positive reward are imitated whatever their ratio; the others are pushed
    away with a weight that falls to 0 as they become unlikely, which keeps stale negatives bounded.

    The reward is the advantage: failures must have a negative one, or there must be a baseline (`mean`), to be pushed
    away at all.

    level: what the ratio is of: the whole trajectory (the product over its tokens, as in the paper), each `token` (as
      in ROLL), or the `sequence` (the geometric mean).
    positive, negative: weights of the two halves (1, 1 is the paper's; others are "weighted TOPR").
    """

    level: objectives.Level = "trajectory"  # type: ignore[misc]
    aggregation: Aggregation = "seq-mean-token-sum"
    mean: Mean = "none"
    std: Std = "none"
    positive: float = 1.0
    negative: float = 1.0

    paper: ClassVar[Mapping[str, Stated]] = {
        "level": Stated("trajectory", "arXiv 2503.14286, eq. 8: pi(tau)/mu(tau) of the trajectory"),
        "aggregation": Stated("seq-mean-token-sum", "arXiv 2503.14286, eq. 8: the gradient of log pi(tau)"),
        "mean": Stated("none", "arXiv 2503.14286, eq. 8: R(tau) itself"),
        "std": Stated("none", "arXiv 2503.14286, eq. 8: R(tau) itself"),
        "positive": Stated(1.0, "arXiv 2503.14286, eq. 8"),
        "negative": Stated(1.0, "arXiv 2503.14286, eq. 8"),
    }

    def uses_rewards(self) -> bool:
        return True

    def surrogate(self, logp: jax.Array, ratio: jax.Array, batch: TokenBatch) -> jax.Array:
        good = batch.required("rewards") > 0
        return objectives.topr(ratio, batch.advantages, logp, self.positive, self.negative, good_BT=good)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("positive", "negative"):
            if getattr(self, name) < 0:
                raise self.refuse(name, "must not be negative", "1 is the paper's weight, 0 leaves that half out")


@dataclasses.dataclass(frozen=True)
class SequenceTopr(Topr):
    """TOPR (arXiv 2503.14286) with one ratio per trajectory, the geometric mean over its tokens: the baseline that
    IPA starts from (arXiv 2512.24873, section 3.2.4.1)."""

    level: objectives.Level = "sequence"  # type: ignore[misc]

    paper: ClassVar[Mapping[str, Stated]] = {
        "level": Stated("sequence", "arXiv 2512.24873, section 3.2.4.1, equations 4 and 5: the geometric mean"),
    }
