"""Group relative policy optimization."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

from rolljax.errors import ConfigError
from rolljax.trainer.algorithms.base import Algorithm, TokenLoss
from rolljax.trainer.batch import TokenBatch
from rolljax.trainer.credit import group_normalised
from rolljax.trainer.objectives import clipped_ratio


@dataclasses.dataclass(frozen=True)
class Grpo(Algorithm):
    """GRPO (DeepSeekMath, arXiv 2402.03300): group-normalised advantages under PPO's clipped ratio, token mean.

    The ratio's anchor is `behaviour`: the log-probs recorded while sampling. With one update per step and no staleness
    the ratio is 1 and a clip has no effect; then `clip_low` and `clip_high` must be None.
    """

    source: ClassVar[Literal["gold", "sampler"]] = "sampler"

    clip_low: float | None = 0.2
    clip_high: float | None = 0.2
    scale_by_std: bool = True
    """Divide by the group's standard deviation (off: Dr. GRPO, arXiv 2503.20783)."""
    drop_degenerate: bool = True
    """Leave out groups whose rewards are all equal: their advantages are 0 (DAPO's filter, without refilling)."""

    def __post_init__(self) -> None:
        for name in ("clip_low", "clip_high"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(
                    "must be positive, or None for no clip", setting=f"Grpo.{name}", value=value, remedy="try 0.2"
                )

    def advantages(self, rewards: Sequence[np.ndarray]) -> list[np.ndarray | None]:
        return [
            None if self.drop_degenerate and np.ptp(r) == 0 else group_normalised(r, scale=self.scale_by_std)
            for r in rewards
        ]

    def objective(self, trainer_logp_BT: jax.Array, batch: TokenBatch) -> TokenLoss:
        ratio = jnp.exp(trainer_logp_BT - batch.sampler_logp)
        loss = clipped_ratio(ratio, batch.advantages, self.clip_low, self.clip_high)
        low = -jnp.inf if self.clip_low is None else 1 - self.clip_low
        high = jnp.inf if self.clip_high is None else 1 + self.clip_high
        return TokenLoss(
            loss,
            mean={
                "policy/clip_low_frac": ((ratio < low) & (batch.advantages < 0)).astype(jnp.float32),
                "policy/clip_high_frac": ((ratio > high) & (batch.advantages > 0)).astype(jnp.float32),
            },
            largest={"policy/ratio_max": ratio},
        )

    def check(self, *, group_size: int, on_policy: bool) -> None:
        if group_size < 2:
            raise ConfigError(
                "a group of one has no baseline: every advantage would be 0",
                setting="Phase.group_size",
                value=group_size,
                remedy="set group_size to 2 or more (8 is usual)",
            )
        clip = next((n for n in ("clip_high", "clip_low") if getattr(self, n) is not None), None)
        if on_policy and clip:
            raise ConfigError(
                "can have no effect: with one update per step and no staleness the ratio is 1",
                setting=f"Grpo.{clip}",
                value=getattr(self, clip),
                remedy="set Phase.updates_per_step to 2 or more, or Grpo.clip_low = None and Grpo.clip_high = None",
            )
