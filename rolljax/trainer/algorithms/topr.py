"""Tapered off-policy REINFORCE."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, ClassVar

import jax

from rolljax.errors import Range, check_fields
from rolljax.trainer import objectives
from rolljax.trainer.aggregation import Aggregation
from rolljax.trainer.algorithms.policy_gradient import NormalisedReward, PolicyGradient
from rolljax.trainer.batch import TokenBatch
from rolljax.trainer.credit.estimators import Mean, Std
from rolljax.trainer.credit.mismatch import RatioLevel
from rolljax.trainer.paper import Stated


@dataclasses.dataclass(frozen=True)
class Topr(NormalisedReward, PolicyGradient):
    """TOPR (arXiv 2503.14286): trajectories of positive reward are imitated, regardless of their ratio; the others are
    pushed away with a weight that falls to 0 as they become unlikely, which keeps stale negatives bounded.

    The reward is the advantage: failures must have a negative one, or there must be a baseline (`mean`), to be pushed
    away at all.
    """

    level: RatioLevel = "trajectory"  # type: ignore[misc]
    """Scope of the ratio: the `trajectory` (the product over its tokens, as in the paper), each `token` (as in ROLL),
    each `turn`, or the trajectory's `geometric` mean."""
    aggregation: Aggregation = "seq-mean-token-sum"
    mean: Mean = "none"
    std: Std = "none"
    positive: Annotated[float, Range(low=0, remedy="1 is the paper's weight, 0 leaves that half out")] = 1.0
    """Weight of the trajectories of positive reward (1 in the paper; other weights are "weighted TOPR")."""
    negative: Annotated[float, Range(low=0, remedy="1 is the paper's weight, 0 leaves that half out")] = 1.0
    """Weight of the trajectories that are pushed away (1 in the paper; other weights are "weighted TOPR")."""

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
        check_fields(self)


@dataclasses.dataclass(frozen=True)
class SequenceTopr(Topr):
    """TOPR (arXiv 2503.14286) with one ratio per trajectory, the geometric mean over its tokens: the baseline that
    IPA starts from (arXiv 2512.24873, section 3.2.4.1)."""

    level: RatioLevel = "geometric"  # type: ignore[misc]

    paper: ClassVar[Mapping[str, Stated]] = {
        "level": Stated("geometric", "arXiv 2512.24873, section 3.2.4.1, equations 4 and 5: the geometric mean"),
    }
