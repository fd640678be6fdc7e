"""Interaction-perceptive agentic policy optimization."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import jax
import numpy as np

from rolljax.errors import Range, check_fields
from rolljax.trainer import objectives
from rolljax.trainer.algorithms.base import AlgorithmState, Setup
from rolljax.trainer.algorithms.policy_gradient import PolicyGradient
from rolljax.trainer.batch import TokenBatch
from rolljax.trainer.credit import estimators as credits
from rolljax.trainer.credit.episodes import Credit, Episodes
from rolljax.trainer.credit.mismatch import Correction, RatioLevel
from rolljax.trainer.kl import KlReward
from rolljax.trainer.paper import Stated

ROLL = "github.com/alibaba/ROLL at 53fce5a, examples/agentic_demo/openreward_endless_terminals_IPA_qwen35_2b.yaml"
"""The only settings of it that were published, by a contributor, not by the paper's authors. A later commit took the
file out; no code of ROLL reads its `pg_variant: ipa_chunk` and its `ipa_failure_reward`."""


@dataclasses.dataclass(frozen=True)
class Ipa(PolicyGradient):
    """IPA (ALE and ROME, arXiv 2512.24873): credit, ratios and masks per turn, which the paper calls an interaction
    chunk: everything that the policy samples between two observations.

    The outcome is discounted by `gamma` per turn to the end. Turns of successful episodes are imitated; those of failed
    ones are pushed away, if `failure` is negative, with the turn's ratio (geometric mean) as a weight, cut at 1. A turn
    whose trainer-to-sampler ratio is outside the band of `correction` is left out.

    Fresh turns have weight `fresh`, an expert's (`Phase.start_states`) weight `imitation`: those that are replayed, up
    to its crucial one, and the crucial one itself where a group starts before it and none of it succeeds. These are
    discounted to the end of the expert's own episode, whose outcome is 1.
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
            Correction(level="turn", weight_cap=None, ratio_band=(0.0, 5.0)),
            f"{ROLL}, train_infer_correction; arXiv 2512.24873, below eq. 8, H without a number",
        ),
        "aggregation": Stated(
            "seq-mean-token-sum",
            "arXiv 2512.24873, eq. 9: a sum over all tokens",
            "the same sum of a step, over its number of tokens: the size of an update does not depend on lengths",
        ),
        "whiten": Stated(False, f"{ROLL}, whiten_advantages"),
        "kl": Stated(None, f"{ROLL}, init_kl_coef"),
        "entropy_coef": Stated(0.0, f"{ROLL}, entropy_loss_coef"),
    }

    gamma: Annotated[float, Range(low=0, high=1, remedy="0.95 is the paper's")] = 0.95
    """Discount of a turn."""
    failure: float = 0.0
    """Outcome of an episode whose reward is not positive. 0: only successes teach. A negative value has no baseline to
    offset it: where most episodes fail, the policy unlearns everything that they have in common, the format of answers
    first."""
    imitation: Annotated[float, Range(low=0, remedy="0 leaves these turns out")] = 0.1
    """Weight of an expert's turns."""
    fresh: Annotated[float, Range(low=0, remedy="0 leaves these turns out")] = 1.0
    """Weight of the policy's own."""
    anchor: Literal["behaviour", "proximal"] = "proximal"
    correction: Correction | None = Correction(level="turn", weight_cap=None, ratio_band=(0.0, 5.0))
    level: ClassVar[RatioLevel] = "turn"

    def advantages(self, e: Episodes, rewards: np.ndarray, algorithm_state: AlgorithmState) -> np.ndarray:
        outcome = np.where(rewards > 0, rewards, self.failure)
        own = credits.spread_turns(credits.discounted_outcomes(outcome, e.num_turns, self.gamma), e.turns, e.mask)
        # an expert's turns led to success once, regardless of the policy's turns after them
        return np.where(e.expert, credits.expert_returns(e.expert_turns, e.turns, e.expert, self.gamma), own)

    def finish(
        self,
        e: Episodes,
        rewards: np.ndarray,
        keep: np.ndarray,
        advantages: np.ndarray,
        algorithm_state: AlgorithmState,
        stats: Mapping[str, float],
    ) -> Credit:
        credit = super().finish(e, rewards, keep, advantages, algorithm_state, stats)
        # turns that are left out still count in the denominator
        kept = e.mask if credit.mask is None else credit.mask
        own = self.fresh * kept * credit.weights
        weights = np.where(e.expert, self.imitation * credits.spread_turns(e.turn_weights, e.turns, e.mask), own)
        # a demonstration has no outcome of its own that could tell against it
        shown = (e.expert | ~e.mask).all(1)
        return dataclasses.replace(credit, mask=e.mask, weights=weights, keep=keep | shown)

    @property
    def imitates(self) -> bool:
        return self.imitation > 0

    def uses_ratio(self) -> bool:
        return self.failure < 0 or isinstance(self.kl, KlReward)

    def surrogate(self, logp: jax.Array, ratio: jax.Array, batch: TokenBatch) -> jax.Array:
        return objectives.topr(ratio, batch.advantages, logp)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self)
        if self.failure > 0:
            raise self.refuse("failure", "would reward failed episodes", "0 to learn from successes only, or -1")

    def check(self, setup: Setup) -> list[str]:
        if setup.max_turns == 1:
            raise self.refuse(
                "gamma",
                "discounts per turn, but the episodes of this environment have one turn",
                "use topr.SequenceTopr, or an environment with several turns",
            )
        return super().check(setup)
