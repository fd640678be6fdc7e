"""Policy gradient held near the policy that sampled."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import jax

from rolljax.errors import Range, check_fields
from rolljax.trainer import objectives
from rolljax.trainer.aggregation import Aggregation
from rolljax.trainer.algorithms.policy_gradient import NormalisedReward, PolicyGradient
from rolljax.trainer.batch import TokenBatch
from rolljax.trainer.credit.estimators import Mean, Std
from rolljax.trainer.paper import Stated


@dataclasses.dataclass(frozen=True)
class Kimi(NormalisedReward, PolicyGradient):
    """Kimi k1.5 (arXiv 2501.12599): policy gradient with the group's mean as baseline, plus `tau`/2 times the squared
    log-ratio, which pulls answers back to the policy they were sampled from."""

    aggregation: Aggregation = "seq-mean-token-sum"
    mean: Mean = "group"
    std: Std = "none"
    square: Literal["sequence", "token"] = "sequence"
    """Log-ratio that is squared: of the whole answer (`sequence`, the paper's eq. 3), or of each `token` (ROLL)."""
    tau: Annotated[float, Range(above=0, remedy="0.1 is usual; without the term use reinforce.Reinforce")] = 0.1
    """Weight of the squared log-ratio; the paper gives none. With sums over answers of n tokens the pull is up to n
    times as strong as with single tokens."""

    paper: ClassVar[Mapping[str, Stated]] = {
        "aggregation": Stated(
            "seq-mean-token-sum", "arXiv 2501.12599, eq. 3: mean over the k answers of log pi of each"
        ),
        "mean": Stated("group", "arXiv 2501.12599, section 2.3.2"),
        "std": Stated("none", "arXiv 2501.12599, section 2.3.2"),
        "square": Stated("sequence", "arXiv 2501.12599, eq. 3"),
    }

    def surrogate(self, logp: jax.Array, ratio: jax.Array, batch: TokenBatch) -> jax.Array:
        sequences = (batch.sequence_ids, batch.scale != 0) if self.square == "sequence" else None
        return objectives.kimi(batch.advantages, logp, batch.anchor(self.anchor), self.tau, sequences)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self)
