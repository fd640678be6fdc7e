"""Supervised fine-tuning."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np

from rolljax.errors import ConfigError
from rolljax.trainer.algorithms.base import Algorithm, AlgorithmState, PolicyOutputs, Setup, Source, TokenLoss
from rolljax.trainer.batch import TokenBatch
from rolljax.trainer.credit import estimators as credits
from rolljax.trainer.credit.episodes import Credit, Episodes


@dataclasses.dataclass(frozen=True)
class Sft(Algorithm):
    """Cross-entropy of the reference answers' tokens, closing token included; prompts and observations are never
    trained on.

    Turns of recorded conversations with weight 0 (an execution error, a dead end) are left out, of the denominator too.
    """

    source: ClassVar[Source] = "reference"

    def credit(self, e: Episodes, algorithm_state: AlgorithmState) -> Credit:
        weights = credits.spread_turns(e.turn_weights, e.turns, e.mask)
        return Credit(np.where(e.mask, 1.0, 0.0), weights=weights, mask=e.mask & (weights != 0))

    def objective(self, policy: PolicyOutputs, batch: TokenBatch) -> TokenLoss:
        return TokenLoss(-policy.logp * (1.0 if batch.weights is None else batch.weights))

    def check(self, setup: Setup) -> list[str]:
        if setup.group_size != 1:
            raise ConfigError(
                "there is one reference answer per task, so siblings would be copies of it",
                setting="Phase.group_size",
                value=setup.group_size,
                remedy="set group_size = 1 and raise prompts_per_step for a larger batch",
            )
        return []
