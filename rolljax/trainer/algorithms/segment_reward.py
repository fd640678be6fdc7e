"""Segment-level reward."""

from __future__ import annotations

import dataclasses

import numpy as np

from rolljax.trainer import segments
from rolljax.trainer.algorithms.base import Frozen, Memory, Needs
from rolljax.trainer.algorithms.grpo import Grpo
from rolljax.trainer.episodes import Credit, Episodes


@dataclasses.dataclass(frozen=True)
class SegmentReward(Grpo):
    """Adaptive segment-wise reward: GRPO (arXiv 2402.03300) whose gradient is kept to the segments that agree with the
    sign of the trajectory's advantage.

    A token's reward is `beta (scorer_logp - base_logp)`, the implicit reward of a policy that was trained on
    preferences (arXiv 2305.18290). It jumps where a segment ends; a segment's reward is its mean.

    scorer, base: the two frozen policies: `phase_start`, `run_start` or a local Hugging Face folder.
    delta: the least jump (None: one standard deviation of all of them). min_segment: tokens. min_keep: an answer of
    which less would be left is not masked at all.
    """

    scorer: Frozen = "phase_start"
    base: Frozen = "run_start"
    beta: float = 0.1
    delta: float | None = None
    min_segment: int = 3
    min_keep: float = 0.2

    def needs(self) -> Needs:
        needs = super().needs()
        return dataclasses.replace(needs, scorer=self.scorer, teachers=(self.base,))

    def finish(self, e: Episodes, advantages: np.ndarray, keep, memory: Memory, stats) -> Credit:
        credit = super().finish(e, advantages, keep, memory, stats)
        q = self.beta * (e.given("scorer_logp") - e.given("teacher_logp")[0])
        signs = np.sign(np.where(e.mask, credit.advantages, 0).sum(1))
        agree = segments.agreement_mask(
            q, e.mask, signs, delta=self.delta, min_len=self.min_segment, min_keep=self.min_keep
        )
        valid = e.mask if credit.mask is None else credit.mask
        share = float(agree[valid].mean()) if valid.any() else 0.0
        # tokens of other segments lose their advantage, not their place in the denominator
        weights = agree * (1.0 if credit.weights is None else credit.weights)
        return dataclasses.replace(credit, weights=weights, stats={**credit.stats, "credit/segment_frac": share})

    def check(self, setup):
        if self.scorer == self.base:
            raise self.refuse("scorer", "is the base: every token's reward is 0", "name two different policies")
        if setup.first_phase and {self.scorer, self.base} == {"phase_start", "run_start"}:
            raise self.refuse(
                "scorer",
                "is the base: the first phase starts where the run does, so every token's reward is 0",
                "put a Dpo phase before it, or name a local Hugging Face folder",
            )
        return super().check(setup)
