"""PPO with a proximal policy of its own."""

from __future__ import annotations

import dataclasses
from typing import Literal

from rolljax.trainer.algorithms.base import ClippedRatio
from rolljax.trainer.mismatch import Correction


@dataclasses.dataclass(frozen=True)
class DecoupledPpo(ClippedRatio):
    """Decoupled PPO (arXiv 2110.00641; AReaL, arXiv 2505.24298): the clip is around the weights at the start of the
    step (the proximal policy), and a capped weight from the behaviour policy to it corrects for stale samples."""

    anchor: Literal["behaviour", "proximal"] = "proximal"
    correction: Correction | None = Correction(level="token", weight_cap=2.0)
