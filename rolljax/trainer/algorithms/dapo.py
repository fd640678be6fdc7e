"""Decoupled clip and dynamic sampling."""

from __future__ import annotations

import dataclasses

from rolljax.trainer.algorithms.base import ClippedRatio


@dataclasses.dataclass(frozen=True)
class Dapo(ClippedRatio):
    """DAPO (arXiv 2503.14476): GRPO with a higher upper clip, groups that teach nothing replaced by further ones, the
    mean over tokens, a soft penalty for answers near the limit, and no KL term.

    `overlong_cache`: tokens before the limit over which the penalty falls to -1 (the paper: 4096 of 20480).
    """

    clip_high: float | None = 0.28
    drop_degenerate: bool = True
    refills: int = 3
    overlong_cache: int = 0
