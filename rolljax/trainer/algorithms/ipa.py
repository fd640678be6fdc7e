"""Interaction-perceptive agentic policy optimization."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

import jax
import numpy as np

from rolljax.trainer import credit as credits
from rolljax.trainer import objectives
from rolljax.trainer.algorithms.base import Memory, PolicyGradient
from rolljax.trainer.batch import TokenBatch
from rolljax.trainer.episodes import Credit, Episodes
from rolljax.trainer.mismatch import Correction


@dataclasses.dataclass(frozen=True)
class Ipa(PolicyGradient):
    """IPA (ALE and ROME, arXiv 2512.24873): credit, ratios and masks per interaction chunk, which is all a policy says
    between two looks at the environment.

    The outcome is discounted by `gamma` per chunk to the end. Chunks of successful episodes are imitated; those of
    failed ones are pushed away with the chunk's ratio (geometric mean) as a weight, cut at 1. A chunk that the trainer
    finds more than `correction`'s band likelier than the sampler did is left out. Replayed expert chunks
    (`Phase.starts`) up to the crucial one are imitated with weight `imitation`, fresh ones have weight `fresh`.

    failure: outcome of an episode whose reward is not positive.
    """

    gamma: float = 0.95
    failure: float = -1.0
    imitation: float = 0.1
    fresh: float = 1.0
    anchor: Literal["behaviour", "proximal"] = "proximal"
    correction: Correction | None = Correction(level="segment", weight_cap=None, ratio_band=(0.0, 5.0))
    level: ClassVar[Literal["token", "chunk", "sequence"]] = "chunk"

    def advantages(self, e: Episodes, rewards: np.ndarray, memory: Memory) -> np.ndarray:
        outcome = np.where(rewards > 0, rewards, self.failure)
        # an expert's chunks led to success once, whatever follows them here
        won, own = (credits.chunk_returns(r, e.num_turns, self.gamma) for r in (np.ones(e.num), outcome))
        return np.where(e.expert, *(credits.spread_turns(x, e.turns, e.mask) for x in (won, own)))

    def finish(self, e, advantages, keep, memory, stats) -> Credit:
        credit = super().finish(e, advantages, keep, memory, stats)
        # chunks that are left out still count in the denominator
        kept = e.mask if credit.mask is None else credit.mask
        own = self.fresh * kept * (1.0 if credit.weights is None else credit.weights)
        weights = np.where(e.expert, self.imitation * credits.spread_turns(e.turn_weights, e.turns, e.mask), own)
        return dataclasses.replace(credit, mask=e.mask, weights=weights)

    def surrogate(self, logp: jax.Array, ratio: jax.Array, batch: TokenBatch) -> jax.Array:
        return objectives.topr(ratio, batch.advantages, logp)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.gamma <= 1:
            raise self.refuse("gamma", "must be between 0 and 1", "0.95 is the paper's")
        if self.failure > 0:
            raise self.refuse("failure", "would reward failed episodes", "-1, or 0 to learn from successes only")

    def check(self, setup):
        if setup.max_turns == 1:
            raise self.refuse(
                "gamma",
                "discounts per interaction chunk, but the episodes of this environment have one turn",
                "use topr.SequenceTopr, or an environment with several turns",
            )
        return super().check(setup)
