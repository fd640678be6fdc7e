"""The optimizer as a setting: optax, nothing of our own."""

from __future__ import annotations

import dataclasses
from typing import Literal

import optax

from rolljax.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class AdamW:
    """AdamW with a global-norm clip and a learning-rate schedule over the phase's optimizer updates."""

    lr: float = 1e-3
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    warmup_updates: int = 0
    """Updates of linear warm-up from 0."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """What follows the warm-up: stay, or fall to `final_lr_frac` of `lr` at the phase's last update."""
    final_lr_frac: float = 0.1

    def __post_init__(self) -> None:
        for name in ("lr", "clip_norm", "eps"):
            if getattr(self, name) <= 0:
                raise ConfigError("must be positive", setting=f"AdamW.{name}", value=getattr(self, name))

    def rate(self, num_updates: int) -> optax.Schedule:
        """Learning rate by update index."""
        after = max(num_updates - self.warmup_updates, 1)
        tails = {
            "constant": lambda: optax.constant_schedule(self.lr),
            "linear": lambda: optax.linear_schedule(self.lr, self.lr * self.final_lr_frac, after),
            "cosine": lambda: optax.cosine_decay_schedule(self.lr, after, self.final_lr_frac),
        }
        tail = tails[self.schedule]()
        if not self.warmup_updates:
            return tail
        # starts one step in: an update at rate 0 would be wasted
        ramp = optax.linear_schedule(self.lr / self.warmup_updates, self.lr, self.warmup_updates - 1 or 1)
        return optax.join_schedules([ramp, tail], [self.warmup_updates])

    def build(self, num_updates: int) -> optax.GradientTransformation:
        """The transformation for a phase of `num_updates` optimizer updates."""
        return optax.chain(
            optax.clip_by_global_norm(self.clip_norm),
            optax.adamw(self.rate(num_updates), self.b1, self.b2, self.eps, weight_decay=self.weight_decay),
        )
