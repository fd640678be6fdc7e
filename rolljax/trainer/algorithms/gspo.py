"""Group sequence policy optimization."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

from rolljax.trainer.aggregation import Aggregation
from rolljax.trainer.algorithms.base import ClippedRatio


@dataclasses.dataclass(frozen=True)
class Gspo(ClippedRatio):
    """GSPO (arXiv 2507.18071): one ratio per trajectory, the geometric mean over its tokens, clipped very near to 1.
    For models whose single-token ratios are noisy (mixtures of experts)."""

    clip_low: float | None = 3e-4
    clip_high: float | None = 4e-4
    aggregation: Aggregation = "seq-mean-token-mean"
    level: ClassVar[Literal["token", "chunk", "sequence"]] = "sequence"
