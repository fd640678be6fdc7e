"""Settings with which training treats each domain of a mixture differently."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Annotated, Protocol

from rolljax.envs.base import EnvSpec
from rolljax.envs.mixture import Mixture
from rolljax.errors import ConfigError, Range, check_fields
from rolljax.rewards.base import RewardConfig
from rolljax.rollout.filters import FilterConfig, GroupFilters
from rolljax.rollout.group_buffer import TailBatching
from rolljax.rollout.mixture_rules import MixtureRule, MixtureShares, check_domains
from rolljax.trainer.algorithms.base import Algorithm
from rolljax.types import SamplingParams


class MixturePhase(Protocol):
    """The part of a `recipe.Phase` that concerns a mixture."""

    @property
    def mixture(self) -> MixtureRule | None: ...
    @property
    def tail_batching(self) -> TailBatching | None: ...
    @property
    def algorithm(self) -> Algorithm: ...
    @property
    def samples(self) -> bool: ...


@dataclasses.dataclass(frozen=True)
class DomainSettings:
    """Settings of a domain's sampling, rewards and filters that differ from the phase's or the recipe's. The
    temperature is the phase's: the trainer's log-probs are taken at it."""

    max_answer_tok: Annotated[int, Range(low=0)] = 0
    """Maximum number of tokens in one answer, at most `Recipe.max_answer_tok` (0: equal to it)."""
    top_k: int | None = None
    """Top-k limit of sampling in training: tokens outside of it are left out. None: the phase's setting."""
    top_p: float | None = None
    """Top-p limit of sampling in training: tokens outside of it are left out. None: the phase's setting."""
    min_p: float | None = None
    """Min-p limit of sampling in training: tokens below it are left out. None: the phase's setting."""
    filters: FilterConfig | None = None
    """Rules that decide which of the domain's trajectories take part; None: `Recipe.filters`. `max_failed_frac` refers
    to the domain's own trajectories, and exceeding it leaves out the domain's part of a step."""
    reward: RewardConfig | None = None
    """Reward of the domain's episodes; None: `Recipe.reward`, or the environment's reward."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.top_k is not None:
            Range(low=0).check(self, "top_k")
        if self.top_p is not None:
            Range(above=0, high=1).check(self, "top_p")
        if self.min_p is not None:
            Range(low=0, below=1).check(self, "min_p")

    @property
    def truncates(self) -> bool:
        """Return whether tokens are left out of the sampling distribution of this domain."""
        return (self.top_k or 0) > 0 or (self.top_p or 1.0) < 1 or (self.min_p or 0.0) > 0

    def sampling(self, params: SamplingParams, *, in_training: bool) -> SamplingParams:
        """Return this domain's sampling parameters where the others use `params`.

        Args:
          in_training: otherwise only the length of answers is the domain's own.
        """
        changes: dict[str, float] = {"max_tokens": self.max_answer_tok} if self.max_answer_tok else {}
        if in_training:
            own = {name: getattr(self, name) for name in ("top_k", "top_p", "min_p")}
            changes |= {name: value for name, value in own.items() if value is not None}
        return dataclasses.replace(params, **changes)  # type: ignore[arg-type]


Domains = Mapping[str, DomainSettings]
"""Settings by the names of `Mixture.domains`; a domain without an entry uses the phase's and the recipe's."""


def group_filters(cfg: FilterConfig, domains: Domains) -> GroupFilters:
    """Return the filters of a recipe and of its domains."""
    return GroupFilters(cfg, {name: settings.filters for name, settings in domains.items() if settings.filters})


def open_shares(env: EnvSpec, phase: MixturePhase) -> MixtureShares | None:
    """Return the shares of a phase; None without a mixture."""
    return MixtureShares(env.weights, phase.mixture) if isinstance(env, Mixture) else None


def check(env: EnvSpec, domains: Domains, phases: Sequence[MixturePhase], max_answer_tok: int, *, agent: bool) -> None:
    """Raise `ConfigError` for settings of unknown domains, and for settings that cannot be combined with mixtures."""
    names = tuple(env.specs)
    if not isinstance(env, Mixture):
        for phase in phases:
            if phase.mixture is not None:
                raise ConfigError(
                    f"can have no effect: {env.name} is no mixture",
                    setting="Phase.mixture",
                    value=phase.mixture,
                    remedy="leave it out, or set Recipe.env = @mixture.Mixture()",
                )
        if domains:
            raise ConfigError(
                f"can have no effect: {env.name} is no mixture",
                setting="Recipe.domains",
                value=list(domains),
                remedy="leave it out, or set Recipe.env = @mixture.Mixture()",
            )
        return
    check_domains("Recipe.domains", domains, names)
    for settings in domains.values():
        if settings.max_answer_tok > max_answer_tok:
            raise ConfigError(
                f"is more than Recipe.max_answer_tok = {max_answer_tok}",
                setting="DomainSettings.max_answer_tok",
                value=settings.max_answer_tok,
                remedy="lower it, or raise Recipe.max_answer_tok",
            )
        if agent and (settings.truncates or settings.max_answer_tok):
            raise ConfigError(
                "samples by itself: the agent program asks for its answers as it likes",
                setting="Recipe.domains",
                value=settings,
                remedy="leave out max_answer_tok, top_k, top_p and min_p",
            )
    for phase in phases:
        _check_phase(phase, names)


def _check_phase(phase: MixturePhase, names: Sequence[str]) -> None:
    if phase.tail_batching:
        raise ConfigError(
            "knows no domains: its long rounds train whatever was slow, so that shares could not be kept",
            setting="Phase.tail_batching",
            value=phase.tail_batching,
            remedy="leave it out; async_ratio, or late = 'resample' with spare_prompts, keep shares",
        )
    if phase.mixture is None:
        return
    phase.mixture.check(names)
    needs = phase.algorithm.needs()
    if phase.mixture.measure_every and (phase.samples or needs.divergence is None):
        raise ConfigError(
            f"compares a student with its teacher on reference answers, and {type(phase.algorithm).__name__} has no "
            "such teacher",
            setting="Phase.mixture",
            value=phase.mixture,
            remedy="use it with distill.Distill",
        )
