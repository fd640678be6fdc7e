"""Segment-level reward."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from rolljax.trainer.algorithms.base import Algorithm, AlgorithmState, Needs, Setup, Source
from rolljax.trainer.algorithms.dpo import Dpo
from rolljax.trainer.algorithms.grpo import Grpo
from rolljax.trainer.algorithms.policy_gradient import PolicyGradient
from rolljax.trainer.algorithms.ppo import Ppo
from rolljax.trainer.algorithms.rft import Rft
from rolljax.trainer.credit import segments
from rolljax.trainer.credit.episodes import Credit, Episodes
from rolljax.trainer.kl import PolicySource
from rolljax.trainer.paper import Reproduction, Stated

REPRODUCTION = Reproduction(
    paper="2411.00809",
    name="Segment rewards",
    claim="rewards by segment protect from adversarial answers",
    there="10 % better on adversarial ones, 1.3 % elsewhere",
    here="in GRPO, PPO, DPO and rejection tuning faster than rewards for whole answers, on every seed",
    state="partly",
    seeds=10,
    config="algorithms/segment_reward",
    figure="docs/segments.png",
    why="on a table of logits, with a scorer that knows the answer; no adversarial answers",
)


STATED = {"reward_beta": Stated(0.1, "arXiv 2305.18290, appendix B: that of the policy whose implicit reward it is")}


@dataclasses.dataclass(frozen=True)
class _Segmented(Algorithm):
    """The common parts of segment-level rewards: token rewards, segments, and the segments that agree with a sign."""

    scorer: PolicySource = "phase_start"
    """Policy whose log-prob raises a token's reward, `reward_beta (scorer_logp - base_logp)`: `phase_start`,
    `run_start` or a local Hugging Face folder."""
    base: PolicySource = "run_start"
    """Policy whose log-prob lowers a token's reward, with the choices of `scorer`."""
    reward_beta: float = 0.1
    """Scale of the token rewards."""
    delta: float | None = None
    """Least jump of the reward where a segment ends (None: one standard deviation of all of them)."""
    min_segment: int = 3
    """Tokens of the shortest segment."""
    min_keep: float = 0.2
    """An answer of which a smaller share would be left is not masked at all."""

    def needs(self) -> Needs:
        return dataclasses.replace(super().needs(), scorer=self.scorer, teachers=(self.base,))

    def agreeing(self, e: Episodes, signs_N: np.ndarray) -> np.ndarray:
        """Return the tokens `[N, T]` of segments whose reward has the trajectory's sign."""
        q = self.reward_beta * (e.required("scorer_logp") - e.required("teacher_logp")[0])
        return segments.agreement_mask(
            q, e.mask, signs_N, delta=self.delta, min_len=self.min_segment, min_keep=self.min_keep
        )

    def share(self, agree: np.ndarray, e: Episodes, credit: Credit) -> dict[str, float]:
        """Return the metrics of `credit` with the fraction of its tokens that agree."""
        trained = credit.trained(e.mask)
        return {**credit.stats, "credit/segment_frac": float(agree[trained].mean()) if trained.any() else 0.0}

    def check(self, setup: Setup) -> list[str]:
        if self.scorer == self.base:
            raise self.refuse("scorer", "is the base: every token's reward is 0", "name two different policies")
        if setup.first_phase and {self.scorer, self.base} == {"phase_start", "run_start"}:
            raise self.refuse(
                "scorer",
                "is the base: the first phase starts where the run does, so every token's reward is 0",
                "put a Dpo phase before it, or name a local Hugging Face folder",
            )
        return super().check(setup)


class _SegmentedGradient(_Segmented, PolicyGradient):
    """Of a policy gradient: a token of another segment loses its advantage, not its place in the denominator. No
    dataclass: its fields would hide other defaults of the algorithms it is mixed into."""

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
        agree = self.agreeing(e, np.sign(np.where(e.mask, credit.advantages, 0).sum(1)))
        stats = self.share(agree, e, dataclasses.replace(credit, keep=None))
        return dataclasses.replace(credit, weights=agree * credit.weights, stats=stats)


@dataclasses.dataclass(frozen=True)
class SegmentReward(_SegmentedGradient, Grpo):
    """Adaptive segment-wise reward (arXiv 2411.00809): GRPO (arXiv 2402.03300) whose gradient is kept to the segments
    that agree with the sign of the trajectory's advantage.

    A token's reward is `reward_beta (scorer_logp - base_logp)`, the implicit reward of a policy that was trained on
    preferences (arXiv 2305.18290). It jumps where a segment ends; a segment's reward is its mean.
    """

    paper: ClassVar[Mapping[str, Stated]] = STATED


@dataclasses.dataclass(frozen=True)
class SegmentPpo(_SegmentedGradient, Ppo):
    """PPO (arXiv 1707.06347) with adaptive segment-wise reward (arXiv 2411.00809): its gradient is kept to the segments
    that agree with the sign of the trajectory's advantage; the critic learns from every token.
    """

    paper: ClassVar[Mapping[str, Stated]] = STATED


@dataclasses.dataclass(frozen=True)
class SegmentDpo(_Segmented, Dpo):
    """DPO (arXiv 2305.18290) with adaptive segment-wise reward (arXiv 2411.00809): the log-ratio of each answer to the
    reference is summed only over the segments that agree with the preference: the rewarded segments of the better
    answer, and the unrewarded segments of the worse one.
    """

    paper: ClassVar[Mapping[str, Stated]] = STATED

    def credit(self, e: Episodes, algorithm_state: AlgorithmState) -> Credit:
        credit = super().credit(e, algorithm_state)
        signs = np.sign(credit.advantages.sum(1))
        agree = self.agreeing(e, signs)
        stats = self.share(agree, e, credit)
        return dataclasses.replace(credit, advantages=np.where(agree, credit.advantages, 0.0), stats=stats)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.loss == "simpo":
            raise self.refuse("loss", "is a mean over answers, of which segments are left out", "choose sigmoid or ipo")


@dataclasses.dataclass(frozen=True)
class SegmentPairDpo(SegmentDpo):
    """DPO (arXiv 2305.18290) with adaptive segment-wise reward (arXiv 2411.00809) on recorded pairs of answers."""

    paper: ClassVar[Mapping[str, Stated]] = STATED

    source: ClassVar[Source] = "pairs"


@dataclasses.dataclass(frozen=True)
class SegmentRft(_Segmented, Rft):
    """Rejection fine-tuning (arXiv 2308.01825) with adaptive segment-wise reward (arXiv 2411.00809): of right answers
    only the segments that are rewarded are imitated, and a step's loss is the mean over their tokens.
    """

    paper: ClassVar[Mapping[str, Stated]] = STATED

    def credit(self, e: Episodes, algorithm_state: AlgorithmState) -> Credit:
        credit = super().credit(e, algorithm_state)
        agree = self.agreeing(e, np.ones(e.num))
        return dataclasses.replace(credit, mask=agree, stats=self.share(agree, e, credit))
