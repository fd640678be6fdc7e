"""Group sequence policy optimization."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

from rolljax.trainer.aggregation import Aggregation
from rolljax.trainer.algorithms.policy_gradient import ClippedRatio, NormalisedReward, PolicyGradient
from rolljax.trainer.credit.mismatch import RatioLevel
from rolljax.trainer.paper import Stated


@dataclasses.dataclass(frozen=True)
class Gspo(NormalisedReward, ClippedRatio, PolicyGradient):
    """GSPO (arXiv 2507.18071): one ratio per trajectory, the geometric mean over its tokens, clipped very near to 1.
    For models whose single-token ratios are noisy (mixtures of experts)."""

    clip_low: float | None = 3e-4
    clip_high: float | None = 4e-4
    aggregation: Aggregation = "seq-mean-token-mean"
    level: ClassVar[RatioLevel] = "geometric"

    paper: ClassVar[Mapping[str, Stated]] = {
        "mean": Stated("group", "arXiv 2507.18071, equation 6"),
        "std": Stated("group", "arXiv 2507.18071, equation 6"),
        "clip_low": Stated(3e-4, "arXiv 2507.18071, section 5.1"),
        "clip_high": Stated(4e-4, "arXiv 2507.18071, section 5.1"),
        "aggregation": Stated("seq-mean-token-mean", "arXiv 2507.18071, equation 5"),
        "filter": Stated(None, "arXiv 2507.18071, equation 5"),
        "kl": Stated(None, "arXiv 2507.18071, section 2 (left out for brevity, its coefficient is not given)"),
    }
