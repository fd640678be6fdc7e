"""Supervised fine-tuning on gold answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, Literal

import jax
import numpy as np

from rolljax.errors import ConfigError
from rolljax.trainer.algorithms.base import Algorithm, TokenLoss
from rolljax.trainer.batch import TokenBatch


@dataclasses.dataclass(frozen=True)
class Sft(Algorithm):
    """Cross-entropy of the gold tokens (the closing token included), token mean over the update."""

    source: ClassVar[Literal["gold", "sampler"]] = "gold"

    def advantages(self, rewards: Sequence[np.ndarray]) -> list[np.ndarray | None]:
        return [np.ones_like(r) for r in rewards]

    def objective(self, trainer_logp_BT: jax.Array, batch: TokenBatch) -> TokenLoss:
        return TokenLoss(-trainer_logp_BT)

    def check(self, *, group_size: int, on_policy: bool) -> None:
        if group_size != 1:
            raise ConfigError(
                "there is one gold answer per task, so siblings would be copies of it",
                setting="Phase.group_size",
                value=group_size,
                remedy="set group_size = 1 and raise prompts_per_step for a larger batch",
            )
