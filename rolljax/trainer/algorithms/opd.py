"""On-policy distillation."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import jax
import numpy as np

from rolljax.errors import ConfigError
from rolljax.trainer import objectives
from rolljax.trainer.algorithms.base import AlgorithmState, Needs, Setup
from rolljax.trainer.algorithms.checks import CUT_SAMPLING
from rolljax.trainer.algorithms.policy_gradient import NormalisedReward, PolicyGradient
from rolljax.trainer.batch import TokenBatch
from rolljax.trainer.credit.episodes import Episodes
from rolljax.trainer.kl import PolicySource
from rolljax.trainer.paper import Stated


@dataclasses.dataclass(frozen=True)
class Teacher:
    """A reference policy to learn from: a local Hugging Face folder with the student's tokenizer (or `run_start`), how
    much it counts, and the environments (names) it teaches; empty: all."""

    policy: PolicySource
    """The teacher policy."""
    coef: float = 1.0
    """Weight of its advantages."""
    domains: tuple[str, ...] = ()
    """Names of the environments it teaches."""


@dataclasses.dataclass(frozen=True)
class Opd(NormalisedReward, PolicyGradient):
    """On-policy distillation (GKD, arXiv 2306.13649, as a policy gradient): the student samples, and each token's
    advantage is how much likelier the teachers find it, `-sum coef (student_logp - teacher_logp)`; nothing is
    discounted."""

    teachers: tuple[Teacher, ...] = ()
    """Whom to learn from; several are added up."""
    reward_coef: float = 0.0
    """Weight of the group-normalised reward that is added to it (0: pure distillation)."""

    paper: ClassVar[Mapping[str, Stated]] = {
        "reward_coef": Stated(
            0.0,
            "github.com/thinking-machines-lab/tinker-cookbook, tinker_cookbook/distillation/datasets.py: rewards are 0",
        ),
        "aggregation": Stated(
            "seq-mean-token-mean",
            "arXiv 2306.13649, equation 2: the divergence of a sequence is the mean over its tokens",
            "every token has a teacher's word, so every token counts the same; as in the policy-gradient form of "
            "github.com/thinking-machines-lab/tinker-cookbook, where a loss is a sum over tokens",
        ),
    }

    def needs(self) -> Needs:
        return dataclasses.replace(super().needs(), teachers=tuple(t.policy for t in self.teachers))

    def advantages(self, e: Episodes, rewards: np.ndarray, algorithm_state: AlgorithmState) -> np.ndarray:
        student = e.trainer_logp if e.trainer_logp is not None else e.sampler_logp
        total = (
            self.reward_coef * super().advantages(e, rewards, algorithm_state)
            if self.reward_coef
            else np.zeros(e.mask.shape)
        )
        for teacher, logp in zip(self.teachers, e.required("teacher_logp"), strict=True):
            taught = np.array([not teacher.domains or d in teacher.domains for d in e.domains], bool)
            total = total - teacher.coef * np.where(e.mask & taught[:, None], student - logp, 0.0)
        return total

    def prepare(self, e: Episodes) -> tuple[np.ndarray, np.ndarray]:
        rewards, keep = super().prepare(e)
        taught = [any(not t.domains or d in t.domains for t in self.teachers) for d in e.domains]
        return rewards, keep & (np.array(taught, bool) | bool(self.reward_coef))

    def surrogate(self, logp: jax.Array, ratio: jax.Array, batch: TokenBatch) -> jax.Array:
        return objectives.vanilla(batch.advantages, logp)

    def uses_ratio(self) -> bool:
        return False

    def uses_groups(self) -> bool:
        return bool(self.reward_coef) and super().uses_groups()

    def _check_domains(self, known: tuple[str, ...]) -> None:
        """Refuse teachers of unknown domains, and domains without a teacher."""
        if not known:
            return
        named = ", ".join(map(repr, known))
        for teacher in self.teachers:
            for domain in teacher.domains:
                if domain not in known:
                    raise ConfigError(
                        f"names {domain!r}, which is no domain of this run: the teacher {teacher.policy!r} would teach "
                        "nothing there",
                        setting="Teacher.domains",
                        value=teacher.domains,
                        remedy=f"name of {named}, or leave it empty for all",
                    )
        untaught = [d for d in known if not any(not t.domains or d in t.domains for t in self.teachers)]
        if untaught and not self.reward_coef:
            raise ConfigError(
                f"leave out {', '.join(map(repr, untaught))}: nothing would be learned there, because reward_coef is 0",
                setting="Teacher.domains",
                value=[teacher.domains for teacher in self.teachers],
                remedy="give it a teacher, or set Opd.reward_coef",
            )

    def check(self, setup: Setup) -> list[str]:
        if not self.teachers:
            raise ConfigError(
                "is empty: there is no teacher to learn from",
                setting="Opd.teachers",
                value=(),
                remedy="give at least one @Teacher() with policy = a local Hugging Face folder",
            )
        if not self.reward_coef and not any(teacher.coef for teacher in self.teachers):
            raise ConfigError(
                "is 0 for every teacher, and Opd.reward_coef too: every advantage would be 0",
                setting="Teacher.coef",
                value=0.0,
                remedy="1 is usual",
            )
        self._check_domains(setup.environments)
        if setup.truncated_sampling:
            raise self.refuse(
                "teachers",
                f"would be compared with {CUT_SAMPLING}",
                "sample from the full distribution",
            )
        if not self.reward_coef:
            for name in ("shaping", "filter", "mean", "std"):
                if getattr(self, name) != getattr(Opd(), name):
                    raise self.refuse(name, "can have no effect: reward_coef is 0", "set reward_coef")
        return super().check(setup)
