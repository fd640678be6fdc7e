"""On-policy self-distillation: the policy teaches itself with a right answer in its prompt."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import jax
import numpy as np

from rolljax.trainer import objectives
from rolljax.trainer.algorithms.base import AlgorithmState, Needs, Setup
from rolljax.trainer.algorithms.checks import CUT_SAMPLING
from rolljax.trainer.algorithms.policy_gradient import NormalisedReward, PolicyGradient
from rolljax.trainer.batch import TokenBatch
from rolljax.trainer.contexts import solved_siblings
from rolljax.trainer.credit.episodes import Episodes
from rolljax.trainer.paper import Stated


@dataclasses.dataclass(frozen=True)
class Sdpo(NormalisedReward, PolicyGradient):
    """Self-distillation (SDPO, arXiv 2601.20802; OPSD, arXiv 2601.18734): the teacher is the policy itself, which sees
    a solved attempt of a sibling before the prompt; each token's advantage is how much likelier the teacher finds it.

    The teacher's weights are those at the start of the step, and no gradient reaches them. Trajectories without another
    solved one in their group are left out, unless `reward_coef` is set.
    """

    reward_coef: float = 0.0
    """Weight of the group-normalised reward that is added to the advantage (0: pure distillation)."""

    paper: ClassVar[Mapping[str, Stated]] = {
        "reward_coef": Stated(
            0.0, "github.com/huggingface/trl, trl/experimental/sdpo/sdpo_config.py: distillation_weight 1, no reward"
        ),
        "aggregation": Stated(
            "token-mean", "github.com/huggingface/trl, trl/experimental/sdpo/sdpo_config.py: loss_type dapo"
        ),
    }

    def needs(self) -> Needs:
        return dataclasses.replace(super().needs(), context="solved_sibling")

    def advantages(self, e: Episodes, rewards: np.ndarray, algorithm_state: AlgorithmState) -> np.ndarray:
        student = e.trainer_logp if e.trainer_logp is not None else e.sampler_logp
        taught = e.mask & (solved_siblings(e.success, e.groups) >= 0)[:, None]
        gap = np.where(taught, e.required("context_logp") - student, 0.0)
        if not self.reward_coef:
            return gap
        return gap + self.reward_coef * super().advantages(e, rewards, algorithm_state)

    def prepare(self, e: Episodes) -> tuple[np.ndarray, np.ndarray]:
        rewards, keep = super().prepare(e)
        return rewards, keep & ((solved_siblings(e.success, e.groups) >= 0) | bool(self.reward_coef))

    def surrogate(self, logp: jax.Array, ratio: jax.Array, batch: TokenBatch) -> jax.Array:
        return objectives.vanilla(batch.advantages, logp)

    def uses_ratio(self) -> bool:
        return False

    def uses_groups(self) -> bool:
        return True

    def check(self, setup: Setup) -> list[str]:
        if setup.truncated_sampling:
            raise self.refuse(
                "reward_coef", f"compares the teacher with {CUT_SAMPLING}", "sample from the full distribution"
            )
        if not self.reward_coef:
            for name in ("shaping", "mean", "std"):
                if getattr(self, name) != getattr(Sdpo(), name):
                    raise self.refuse(name, "can have no effect: reward_coef is 0", "set reward_coef")
        return super().check(setup)
