"""Rejection fine-tuning."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, ClassVar

import numpy as np

from rolljax.errors import Checked, Range
from rolljax.trainer.algorithms.base import Algorithm, AlgorithmState, PolicyOutputs, Setup, TokenLoss
from rolljax.trainer.batch import TokenBatch
from rolljax.trainer.credit import shaping
from rolljax.trainer.credit.episodes import Credit, Episodes
from rolljax.trainer.paper import Stated


@dataclasses.dataclass(frozen=True)
class Rft(Checked, Algorithm):
    """Rejection fine-tuning (RFT, arXiv 2308.01825): the policy samples `group_size` answers and is trained on the
    correct ones: at most `cap` of a prompt, whose texts have pairwise similarities below `similarity`."""

    cap: Annotated[int, Range(low=1, remedy="4 is usual")] = 4
    """Maximum number of answers to a prompt that are trained on."""
    similarity: Annotated[float, Range(above=0, high=1, remedy="1 drops exact repetitions only")] = 0.9
    """Similarity of two texts, 0 to 1, from which on they count as the same answer."""

    paper: ClassVar[Mapping[str, Stated]] = {
        "cap": Stated(
            None,
            "arXiv 2308.01825, section 3.3: every distinct path among 100 samples",
            "a step has few answers to a prompt, and prompts that are solved often would drown the others",
        ),
        "similarity": Stated(
            "distinct lists of equations",
            "arXiv 2308.01825, section 3.3; github.com/OFA-Sys/gsm8k-ScRel, collect_rejection_sampling.py",
            "not every task has equations: texts are compared",
        ),
    }

    def credit(self, e: Episodes, algorithm_state: AlgorithmState) -> Credit:
        chosen = shaping.select_for_imitation(e.success, e.groups, e.texts, self.cap, self.similarity)
        return Credit(np.where(e.mask, 1.0, 0.0), keep=chosen)

    def objective(self, policy: PolicyOutputs, batch: TokenBatch) -> TokenLoss:
        return TokenLoss(-policy.logp)

    def check(self, setup: Setup) -> list[str]:
        if setup.group_size < self.cap:
            return [f"Rft.cap = {self.cap} can have no effect: there are {setup.group_size} answers to a prompt"]
        return []
