"""Truncated importance sampling."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, ClassVar

import jax

from rolljax.errors import Range, check_fields
from rolljax.trainer import objectives
from rolljax.trainer.algorithms.policy_gradient import NormalisedReward, PolicyGradient
from rolljax.trainer.batch import TokenBatch
from rolljax.trainer.paper import Stated


@dataclasses.dataclass(frozen=True)
class Tis(NormalisedReward, PolicyGradient):
    """Truncated importance sampling as in ROLL Flash (arXiv 2510.11345): the policy gradient weighted by the ratio, cut
    at `cap` (as in IMPALA, arXiv 1802.01561) and held fixed."""

    cap: Annotated[float, Range(above=0, remedy="1 is usual")] = 1.0
    """Largest importance weight; larger ratios are cut to it."""

    paper: ClassVar[Mapping[str, Stated]] = {
        "cap": Stated(1.0, "github.com/alibaba/ROLL, roll/pipeline/rlvr/actor_pg_worker.py, tis_upper_bound"),
    }

    def surrogate(self, logp: jax.Array, ratio: jax.Array, batch: TokenBatch) -> jax.Array:
        return objectives.truncated_is(ratio, batch.advantages, logp, self.cap)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self)
