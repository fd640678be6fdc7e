"""Combinations of a policy gradient's settings, with each other and with the phase, that cannot work or in which one is
inert."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from rolljax.errors import ConfigError, Range
from rolljax.trainer.algorithms.base import Algorithm, Setup, refusal
from rolljax.trainer.kl import KlReward

if TYPE_CHECKING:
    from rolljax.trainer.algorithms.policy_gradient import PolicyGradient

CUT_SAMPLING = "the distribution that is sampled from, from which tokens are cut (Phase.top_p, top_k or min_p)"
"""Description of log-probs of truncated sampling, for messages."""


def check_clips(settings: object, clip_low: float | None, *names: str) -> None:
    """Check that the ratio clips, fields `names` of `settings`, are positive or None, and that `clip_low` is below
    1."""
    Range(above=0, remedy="give a positive number, or None for none").check(settings, *names)
    if clip_low is not None and clip_low >= 1:
        raise refusal(settings, "clip_low", "can have no effect: a ratio is never below 0", "choose less than 1")


def check_groups(algorithm: PolicyGradient, setup: Setup) -> None:
    """Refuse a group size of one for an algorithm that compares the members of a group."""
    by_group = ["filter"] if algorithm.filter is not None else []
    by_group += ["shaping"] if algorithm.shaping is not None and algorithm.shaping.length_reward else []
    by_group += ["difficulty_weight"] if algorithm.difficulty_weight else []
    if setup.group_size < 2 and (algorithm.uses_groups() or by_group):
        raise ConfigError(
            "a group of one has no baseline: every advantage would be 0"
            if algorithm.uses_groups()
            else f"a group of one has nothing to compare, but {type(algorithm).__name__}.{by_group[0]} is set",
            setting="Phase.group_size",
            value=setup.group_size,
            remedy="set group_size to 2 or more (8 is usual)",
        )


def narrow_range(algorithm: Algorithm, setup: Setup) -> list[str]:
    """Warn if no mean of rewards 0 and 1 can lie in `solve_range`."""
    if algorithm.solve_range is None:
        return []
    low, high = algorithm.solve_range
    means = np.arange(setup.group_size + 1) / setup.group_size
    if ((means > low) & (means < high)).any():
        return []
    return [
        f"if rewards are 0 or 1, nothing is trained on: no mean of {setup.group_size} of them is between {low} "
        f"and {high} (GroupFilter.solve_range of {type(algorithm).__name__})"
    ]


def check_kl(algorithm: PolicyGradient, setup: Setup) -> None:
    """Refuse a KL between log-probs of truncated sampling and log-probs of the full distribution."""
    term = algorithm.kl
    if term is None or algorithm.needs().trainer_logp or not setup.truncated_sampling:
        return
    if isinstance(term, KlReward) or term.adaptive is not None:
        raise algorithm.refuse(
            "kl",
            f"would compare {CUT_SAMPLING}, with the reference's full distribution",
            "set anchor = 'proximal', or sample from the full distribution",
        )


def check_ratio(algorithm: PolicyGradient, setup: Setup) -> list[str]:
    """Return warnings about the ratio, its anchor, and the correction of a mismatch."""
    if setup.truncated_sampling and algorithm.correction is not None:
        raise algorithm.refuse(
            "correction",
            f"compares {CUT_SAMPLING}, with the model's full distribution: every weight and filter would be wrong",
            "set correction = None, or sample from the full distribution",
        )
    if not algorithm.uses_ratio():
        return _without_ratio(algorithm, setup)
    _check_anchor(algorithm, setup)
    if setup.staleness and algorithm.anchor == "proximal" and algorithm.correction is None:
        return [_uncorrected(algorithm, "a ratio to log-probs of its own (anchor = 'proximal') and no correction")]
    if setup.updates > 1 or (setup.staleness and algorithm.anchor == "behaviour"):
        return []
    name = type(algorithm).__name__
    at_work = [n for n in algorithm.ratio_settings if getattr(algorithm, n) is not None]
    for setting in at_work:
        if getattr(algorithm, setting) != _default(algorithm, setting):
            raise algorithm.refuse(
                setting,
                "can have no effect: with one update per step and no staleness the ratio is 1",
                "set Phase.updates_per_step to 2 or more, or "
                + " and ".join(f"{name}.{n} = None" for n in algorithm.ratio_settings),
            )
    if at_work:
        return [
            f"{name}'s {', '.join(at_work)} have no effect: the ratio is 1 with one update per step and no staleness"
        ]
    if algorithm.ratio_settings:
        return []
    return [f"{name} differs from REINFORCE by its ratio, which is 1 here: one update per step and no staleness"]


def _without_ratio(algorithm: PolicyGradient, setup: Setup) -> list[str]:
    if algorithm.anchor != _default(algorithm, "anchor"):
        raise algorithm.refuse("anchor", "can have no effect: this objective has no ratio", "leave it out")
    if setup.on_policy or algorithm.correction is not None:
        return []
    return [_uncorrected(algorithm, "no ratio")]


def _uncorrected(algorithm: Algorithm, why: str) -> str:
    source = "samples of older weights (Phase.async_ratio, several updates)"
    return f"{type(algorithm).__name__} has {why}: nothing corrects for {source}"


def _check_anchor(algorithm: PolicyGradient, setup: Setup) -> None:
    if setup.truncated_sampling and algorithm.anchor == "behaviour":
        raise algorithm.refuse(
            "anchor",
            f"compares {CUT_SAMPLING}, with the model's full distribution: the ratio would be wrong for every token",
            "set anchor = 'proximal', or sample from the full distribution",
        )
    weighs = algorithm.correction is not None and algorithm.correction.weighs
    if weighs and algorithm.anchor == "behaviour":
        raise algorithm.refuse(
            "correction",
            "would weigh the gap between sampler and trainer twice: the ratio to the behaviour policy has it",
            "set anchor = 'proximal', or weight_cap = None to filter only",
        )
    if setup.updates == 1 and algorithm.anchor == "proximal" and algorithm.correction is None:
        raise algorithm.refuse(
            "anchor",
            "makes every ratio 1: with one update per step the proximal policy is the policy",
            "set Phase.updates_per_step to 2 or more, or anchor = 'behaviour'",
        )


def _default(algorithm: PolicyGradient, name: str) -> object:
    return next(f.default for f in dataclasses.fields(algorithm) if f.name == name)
