"""Interaction-perceptive agentic policy optimization."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal

import jax
import numpy as np

from rolljax.trainer import objectives
from rolljax.trainer.algorithms.base import Carry, PolicyGradient
from rolljax.trainer.batch import TokenBatch
from rolljax.trainer.credit import estimators as credits
from rolljax.trainer.credit.episodes import Credit, Episodes
from rolljax.trainer.credit.mismatch import Correction
from rolljax.trainer.paper import Stated

ROLL = "github.com/alibaba/ROLL at 53fce5a, examples/agentic_demo/openreward_endless_terminals_IPA_qwen35_2b.yaml"
"""The only settings of it that were published, by a contributor, not by the paper's authors. A later commit took the
file out; no code of ROLL reads its `pg_variant: ipa_chunk` and its `ipa_failure_reward`."""


@dataclasses.dataclass(frozen=True)
class Ipa(PolicyGradient):
    """IPA (ALE and ROME, arXiv 2512.24873): credit, ratios and masks per interaction chunk, which is all a policy says
    between two looks at the environment.

    The outcome is discounted by `gamma` per chunk to the end. Chunks of successful episodes are imitated; those of
    failed ones are pushed away, if `failure` is negative, with the chunk's ratio (geometric mean) as a weight, cut at
    1. A chunk that the trainer finds more than `correction`'s band likelier than the sampler did is left out.

    Fresh chunks have weight `fresh`, an expert's (`Phase.starts`) weight `imitation`: those that are replayed, up to
    its crucial one, and the crucial one itself where a group starts before it and fails as a whole. These are
    discounted to the end of the expert's own episode, whose outcome is 1.

    failure: outcome of an episode whose reward is not positive. 0: only successes teach. Below 0 there is no baseline
      against it: where most episodes fail, whatever they have in common is unlearned, the form of answers first.
    """

    paper: ClassVar[Mapping[str, Stated]] = {
        "gamma": Stated(
            0.95, f"{ROLL}, step_reward_gamma, as ROLL's default; arXiv 2512.24873, eq. 7 without a number"
        ),
        "failure": Stated(
            0.0, f"{ROLL}, ipa_failure_reward; arXiv 2512.24873, section 3.2.4.2: R only gives positive feedback"
        ),
        "anchor": Stated(
            "proximal", "arXiv 2512.24873, eq. 8: the trainer's old policy (the file of ROLL: the sampler)"
        ),
        "correction": Stated(
            Correction(level="segment", weight_cap=None, ratio_band=(0.0, 5.0)),
            f"{ROLL}, train_infer_correction; arXiv 2512.24873, below eq. 8, H without a number",
        ),
        "aggregation": Stated(
            "seq-mean-token-sum",
            "arXiv 2512.24873, eq. 9: a sum over all tokens",
            "the same sum of a step, over its number of tokens: the size of an update does not depend on lengths",
        ),
        "whiten": Stated(False, f"{ROLL}, whiten_advantages"),
        "kl_coef": Stated(0.0, f"{ROLL}, init_kl_coef"),
        "entropy_coef": Stated(0.0, f"{ROLL}, entropy_loss_coef"),
    }

    gamma: float = 0.95
    failure: float = 0.0
    imitation: float = 0.1
    fresh: float = 1.0
    anchor: Literal["behaviour", "proximal"] = "proximal"
    correction: Correction | None = Correction(level="segment", weight_cap=None, ratio_band=(0.0, 5.0))
    level: ClassVar[Literal["token", "chunk", "sequence"]] = "chunk"

    def advantages(self, e: Episodes, rewards: np.ndarray, carry: Carry) -> np.ndarray:
        outcome = np.where(rewards > 0, rewards, self.failure)
        own = credits.spread_turns(credits.chunk_returns(outcome, e.num_turns, self.gamma), e.turns, e.mask)
        # an expert's chunks led to success once, whatever follows them here
        return np.where(e.expert, credits.expert_returns(e.expert_turns, e.turns, e.expert, self.gamma), own)

    def finish(self, e, advantages, keep, carry, stats) -> Credit:
        credit = super().finish(e, advantages, keep, carry, stats)
        # chunks that are left out still count in the denominator
        kept = e.mask if credit.mask is None else credit.mask
        own = self.fresh * kept * (1.0 if credit.weights is None else credit.weights)
        weights = np.where(e.expert, self.imitation * credits.spread_turns(e.turn_weights, e.turns, e.mask), own)
        # a demonstration has no outcome of its own that could tell against it
        shown = (e.expert | ~e.mask).all(1)
        return dataclasses.replace(credit, mask=e.mask, weights=weights, keep=keep | shown)

    @property
    def imitates(self) -> bool:
        return self.imitation > 0

    def uses_ratio(self) -> bool:
        return self.failure < 0 or self.kl_reward_coef > 0

    def surrogate(self, logp: jax.Array, ratio: jax.Array, batch: TokenBatch) -> jax.Array:
        return objectives.topr(ratio, batch.advantages, logp)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.gamma <= 1:
            raise self.refuse("gamma", "must be between 0 and 1", "0.95 is the paper's")
        if self.failure > 0:
            raise self.refuse("failure", "would reward failed episodes", "0 to learn from successes only, or -1")
        for name in ("imitation", "fresh"):
            if getattr(self, name) < 0:
                raise self.refuse(name, "must not be negative", "0 leaves these chunks out")

    def check(self, setup):
        if setup.max_turns == 1:
            raise self.refuse(
                "gamma",
                "discounts per interaction chunk, but the episodes of this environment have one turn",
                "use topr.SequenceTopr, or an environment with several turns",
            )
        return super().check(setup)
