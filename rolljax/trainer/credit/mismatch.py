"""Train-sampler mismatch: the sampler and the trainer give the same token different probabilities; weigh or leave out.

`d = trainer_logp - sampler_logp` per sampled token, both natural logs of the weights at the start of the step. Levels,
each broadcast to the tokens it covers: "token" d, "turn" the mean of d over a turn (a run of sampled tokens between
two observations), "geometric" its mean over the trajectory, "trajectory" its sum over the trajectory.

Shapes: N trajectories, T sampled tokens of one, `turns_NT` the turn of each token. float64.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal, get_args

import numpy as np

from rolljax.errors import ConfigError, Range, check_fields
from rolljax.trainer.credit.estimators import clean

RatioLevel = Literal["token", "turn", "geometric", "trajectory"]
"""The level of a ratio of two policies' probabilities: a token; the geometric mean over a turn; the geometric mean over
the trajectory; the product over the trajectory."""
_MOST = 80.0  # exponents are cut here: exp(80) still is a float32, and no filter or cap lies beyond


def log_ratio(
    trainer_logp_NT: np.ndarray,
    sampler_logp_NT: np.ndarray,
    mask_NT: np.ndarray,
    turns_NT: np.ndarray,
    level: RatioLevel,
) -> np.ndarray:
    """Log of the trainer's over the sampler's probability at `level`, at every token; float64 `[N, T]`, 0 elsewhere."""
    mask = np.asarray(mask_NT, bool)
    gap = clean(trainer_logp_NT, mask) - clean(sampler_logp_NT, mask)
    return _pooled(gap, mask, turns_NT, level)


@dataclasses.dataclass(frozen=True)
class Correction:
    """Truncated importance weights and filters, at one level or at several.

    `Correction("turn", weight_cap=None, ratio_band=(0, 5))` leaves out the turns that the trainer finds five times
    likelier per token than the sampler did (Interaction-Perceptive Agentic policy optimisation).
    """

    level: RatioLevel = "token"
    """Scope over which ratio and probability are taken."""
    weight_cap: Annotated[float | None, Range(above=0, remedy="None leaves the weights at 1")] = 1.2
    """Weights are ratios cut here; None: weights are 1."""
    ratio_band: tuple[float, float] | None = None
    """Tokens with a ratio outside are left out, the ends belong to the band; None: no filter."""
    prob_band: tuple[float, float] | None = None
    """The same for the difference of probabilities, trainer's less sampler's: for "turn" and "geometric" the mean of
    the tokens' differences, for "trajectory" their sum (ROLL, roll/utils/train_infer_corrections.py)."""
    also: tuple[Correction, ...] = ()
    """Further corrections, each at its own level. All see the same tokens; a token stays if every filter keeps it, and
    weights are multiplied."""

    @property
    def weighs(self) -> bool:
        """Return whether any part of it has weights."""
        return self.weight_cap is not None or any(one.weighs for one in self.also)

    def __post_init__(self) -> None:
        if self.level not in get_args(RatioLevel):
            raise ConfigError(
                "is not a level",
                setting="Correction.level",
                value=self.level,
                remedy=f"one of {', '.join(get_args(RatioLevel))}",
            )
        check_fields(self)
        for name in ("ratio_band", "prob_band"):
            band = getattr(self, name)
            if band is not None and (len(band) != 2 or not band[0] <= band[1]):
                raise ConfigError(
                    "is a pair (lowest, highest)",
                    setting=f"Correction.{name}",
                    value=band,
                    remedy="the lower end first; None switches the filter off",
                )

    def apply(
        self, trainer_logp_NT: np.ndarray, sampler_logp_NT: np.ndarray, mask_NT: np.ndarray, turns_NT: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the weights (float64 `[N, T]`, 0 outside the mask) and which tokens of the mask stay (bool `[N, T]`).

        Removed tokens keep their weight: multiply by both.
        """
        mask = np.asarray(mask_NT, bool)
        trainer, sampler = clean(trainer_logp_NT, mask), clean(sampler_logp_NT, mask)
        ratio = _exp(_pooled(trainer - sampler, mask, turns_NT, self.level))
        weights = np.ones(mask.shape) if self.weight_cap is None else np.minimum(ratio, self.weight_cap)
        keep = mask.copy()
        if self.ratio_band is not None:
            keep &= _within(ratio, self.ratio_band)
        if self.prob_band is not None:
            apart = np.where(mask, _exp(trainer) - _exp(sampler), 0.0)
            keep &= _within(_pooled(apart, mask, turns_NT, self.level), self.prob_band)
        for one in self.also:
            more, kept = one.apply(trainer, sampler, mask, turns_NT)
            weights, keep = weights * more, keep & kept
        return np.where(mask, weights, 0.0), keep


def effective_frac(log_weights: np.ndarray) -> float:
    """Return the effective sample size of weights `[K]`, given as logs, as a fraction of K: `(sum w)^2 / (K sum w^2)`.

    It is 1 if all weights are equal or there are none, and 1/K if one outweighs the others (Kong, 1992).
    """
    if not log_weights.size:
        return 1.0
    weights = np.exp(log_weights - log_weights.max())
    return float(weights.sum() ** 2 / (weights.size * (weights**2).sum()))


def _pooled(values_NT: np.ndarray, mask_NT: np.ndarray, turns_NT: np.ndarray, level: RatioLevel) -> np.ndarray:
    """Return token values, or their mean or sum over the part of the trajectory that `level` names; 0 outside the
    mask."""
    if level not in get_args(RatioLevel):
        raise ValueError(f"level is one of {', '.join(get_args(RatioLevel))}, not {level!r}")
    if level == "token" or not mask_NT.any():
        return values_NT
    ids = np.broadcast_to(np.arange(len(mask_NT))[:, None], mask_NT.shape)
    if level == "turn":
        turns = np.asarray(turns_NT).astype(np.int64)
        turns = np.where(mask_NT, turns - turns[mask_NT].min(), 0)
        ids = ids * (int(turns.max()) + 1) + turns
    size = int(ids.max()) + 1
    total: np.ndarray = np.bincount(ids[mask_NT], values_NT[mask_NT], size)
    if level != "trajectory":
        total = total / np.maximum(np.bincount(ids[mask_NT], minlength=size), 1)
    return np.where(mask_NT, total[ids], 0.0)


def _exp(values: np.ndarray) -> np.ndarray:
    return np.exp(np.minimum(values, _MOST))


def _within(values: np.ndarray, band: tuple[float, float]) -> np.ndarray:
    return (values >= band[0]) & (values <= band[1])
