"""Rejection fine-tuning."""

from __future__ import annotations

import dataclasses

import numpy as np

from rolljax.trainer import shaping
from rolljax.trainer.algorithms.base import Algorithm, Memory, Policy, Setup, TokenLoss
from rolljax.trainer.batch import TokenBatch
from rolljax.trainer.episodes import Credit, Episodes


@dataclasses.dataclass(frozen=True)
class Rft(Algorithm):
    """Rejection fine-tuning (RFT, arXiv 2308.01825): the policy answers `group_size` times, and is trained on what was
    right: different answers only (`similarity` of their text below this), at most `cap` of a prompt."""

    cap: int = 4
    similarity: float = 0.9

    def credit(self, e: Episodes, memory: Memory) -> Credit:
        chosen = shaping.select_for_imitation(e.success, e.groups, e.texts, self.cap, self.similarity)
        return Credit(np.where(e.mask, 1.0, 0.0), keep=chosen)

    def objective(self, policy: Policy, batch: TokenBatch) -> TokenLoss:
        return TokenLoss(-policy.logp)

    def __post_init__(self) -> None:
        if self.cap < 1:
            raise self.refuse("cap", "must be at least 1", "4 is usual")
        if not 0 < self.similarity <= 1:
            raise self.refuse("similarity", "must be above 0 and at most 1", "1 drops exact repetitions only")

    def check(self, setup: Setup) -> list[str]:
        if setup.group_size < self.cap:
            return [f"Rft.cap = {self.cap} can have no effect: there are {setup.group_size} answers to a prompt"]
        return []
