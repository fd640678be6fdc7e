"""The KL to a reference policy: its estimates, and the terms that hold a policy near the reference."""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import Annotated, Any, Literal, get_args

import numpy as np

from rolljax.errors import Checked, ConfigError, Range

PolicySource = str
"""The source of a reference policy: `phase_start`, `run_start`, or a local Hugging Face folder."""

KlEstimator = Literal["k1", "abs", "k2", "k3"]

LOG_RATIO_LIMIT = 30.0
"""Nats. exp(30) = 1e13 leaves room for an advantage and for the square in the gradient's norm."""

K3_LIMIT = 10.0
"""Nats. A token whose k3 estimate is beyond it counts as this much and has no gradient."""


def k3(log_ratio: Any, xp: ModuleType) -> Any:
    """Compute `exp(-x) + x - 1` for `x = logp - ref_logp`, nats: unbiased for KL(policy || reference) and never
    negative.

    Args:
      log_ratio: an array of `xp`, which is `numpy` or `jax.numpy`.
    """
    # only the exponent is capped: where the cap applies, the estimate is beyond any limit anyway
    return xp.expm1(xp.minimum(-log_ratio, LOG_RATIO_LIMIT)) + log_ratio


def kl_estimate(log_ratio: Any, estimator: KlEstimator, xp: ModuleType) -> Any:
    """Estimate KL(policy || reference) at tokens sampled from the policy (Schulman's estimators), nats; the shape of
    the input.

    With `x = logp - ref_logp`: k1 `x` (unbiased, any sign), abs `|x|`, k2 `x^2/2`, k3 `exp(-x) + x - 1` (unbiased and
    never negative), k3 clipped to +-`K3_LIMIT`.

    Args:
      log_ratio: x, an array of `xp`, which is `numpy` or `jax.numpy`.

    Raises:
      ConfigError: an unknown estimator.
    """
    if estimator == "k1":
        return log_ratio
    if estimator == "abs":
        return xp.sign(log_ratio) * log_ratio  # unlike that of jnp.abs, its gradient at 0 is 0
    if estimator == "k2":
        return 0.5 * xp.square(log_ratio)
    if estimator == "k3":
        return xp.clip(k3(log_ratio, xp), -K3_LIMIT, K3_LIMIT)
    remedy = f"one of {', '.join(get_args(KlEstimator))}"
    raise ConfigError("is not an estimate of the KL", setting="estimator", value=estimator, remedy=remedy)


@dataclasses.dataclass(frozen=True)
class AdaptiveKl(Checked):
    """A KL coefficient that follows the KL (Fine-Tuning Language Models from Human Preferences, arXiv 1909.08593)."""

    target: Annotated[float, Range(above=0, remedy="adaptive = None keeps the coefficient as it is")]
    """The KL to the reference, in nats per token, that the coefficient is adapted to."""
    horizon: Annotated[int, Range(above=0, remedy="adaptive = None keeps the coefficient as it is")] = 10_000
    """Horizon of the adaptation in trajectories; the longer, the slower the coefficient moves."""

    def following(self, coef: float, kl: float, num_trajectories: int) -> float:
        """Return the next coefficient: `coef (1 + clip(kl / target - 1, -0.2, 0.2) num_trajectories / horizon)`.

        Args:
          kl: measured in this step, nats per token.
        """
        return float(coef * (1.0 + float(np.clip(kl / self.target - 1.0, -0.2, 0.2)) * num_trajectories / self.horizon))


@dataclasses.dataclass(frozen=True)
class KlTerm(Checked):
    """A term that keeps a policy near a reference: `KlLoss` or `KlReward`."""

    coef: Annotated[float, Range(above=0, remedy="leave the term out (kl = None) for none")]
    """Weight of the KL term."""
    adaptive: AdaptiveKl | None = None
    """Rule by which the weight follows the KL (None: the weight is constant)."""
    reference: PolicySource = "phase_start"
    """The policy that the KL is to: `phase_start`, `run_start`, or a local Hugging Face folder."""


@dataclasses.dataclass(frozen=True)
class KlLoss(KlTerm):
    """A KL term in the loss."""

    estimator: Literal["k2", "k3", "full"] = "k3"
    """K2, k3, or full = KL(policy || reference) over the full vocabulary. Of tokens that the policy drew, k2 has the
    gradient of `full` on average, k3 that of KL(reference || policy)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.estimator not in ("k2", "k3", "full"):
            whys = {
                "k1": "has a gradient of 0 on average: as a loss it is nothing but noise",
                "abs": "has the gradient of another distance (total variation), which does not fade near the reference",
            }
            raise ConfigError(
                whys.get(self.estimator, "is not an estimate of the KL"),
                setting="KlLoss.estimator",
                value=self.estimator,
                remedy="choose 'k2', 'k3' or 'full', or put it into the reward: kl = @kl.KlReward()",
            )
        if self.estimator == "full" and self.adaptive is not None:
            raise ConfigError(
                "needs log-probs of the reference on every token",
                setting="KlLoss.adaptive",
                value=self.adaptive,
                remedy="choose estimator = 'k3'",
            )


@dataclasses.dataclass(frozen=True)
class KlReward(KlTerm):
    """A KL penalty in the reward of every token."""

    estimator: KlEstimator = "k1"
    """K1 (unbiased, any sign), abs, k2 or k3 (`kl_estimate`)."""
