"""Group relative policy optimization."""

from __future__ import annotations

import dataclasses

from rolljax.trainer.algorithms.base import ClippedRatio


@dataclasses.dataclass(frozen=True)
class Grpo(ClippedRatio):
    """GRPO (DeepSeekMath, arXiv 2402.03300): group-normalised rewards under PPO's clipped ratio, token mean.

    The paper adds a KL term to the loss (`kl_coef`, estimator k3); it is off by default. With one update per step and
    no staleness the ratio is 1 and a clip has no effect; then `clip_low` and `clip_high` must be None.
    """

    drop_degenerate: bool = True
