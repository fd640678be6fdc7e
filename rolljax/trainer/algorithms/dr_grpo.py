"""GRPO done right."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

from rolljax.trainer.aggregation import Aggregation
from rolljax.trainer.algorithms.policy_gradient import ClippedRatio, NormalisedReward, PolicyGradient
from rolljax.trainer.credit.estimators import Std
from rolljax.trainer.paper import Stated


@dataclasses.dataclass(frozen=True)
class DrGrpo(NormalisedReward, ClippedRatio, PolicyGradient):
    """Dr. GRPO (arXiv 2503.20783): rewards less the group's mean, not divided by its deviation; token losses summed and
    divided by a constant, so that neither long wrong answers nor easy questions weigh less."""

    std: Std = "none"
    aggregation: Aggregation = "seq-sum-norm"

    paper: ClassVar[Mapping[str, Stated]] = {
        "mean": Stated("group", "arXiv 2503.20783, section 3.2"),
        "std": Stated("none", "arXiv 2503.20783, section 3.2"),
        "aggregation": Stated("seq-sum-norm", "arXiv 2503.20783, section 3.2 and listing 1"),
        "filter": Stated(None, "arXiv 2503.20783, section 3.2"),
        "kl": Stated(
            None,
            "arXiv 2503.20783, section 3; github.com/sail-sg/understand-r1-zero, examples/qwen2.5-math-7b.sh: --beta 0",
        ),
    }
