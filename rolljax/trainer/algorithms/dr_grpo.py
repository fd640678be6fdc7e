"""GRPO done right."""

from __future__ import annotations

import dataclasses

from rolljax.trainer.aggregation import Aggregation
from rolljax.trainer.algorithms.base import ClippedRatio
from rolljax.trainer.credit import Std


@dataclasses.dataclass(frozen=True)
class DrGrpo(ClippedRatio):
    """Dr. GRPO (arXiv 2503.20783): rewards less the group's mean, not divided by its deviation; token losses summed and
    divided by a constant, so that neither long wrong answers nor easy questions weigh less."""

    std: Std = "none"
    aggregation: Aggregation = "seq-sum-norm"
