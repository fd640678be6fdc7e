"""Losses of single tokens and of single pairs: the pure functions that algorithms are composed of.

Per-token functions take float32 arrays `[B, T]` and return the loss of every token, to be minimised; they neither mask
nor average: the caller multiplies by its weights and sums. `logp` always carries the gradient. All other inputs
(`anchor_logp`, `ref_logp`, advantages, returns) are constants.

Where `log_ratio` is large, exponentials would leave float32; it is therefore held inside +-`LOG_RATIO_LIMIT`, far
outside of what training meets. Beyond the limit the ratio is constant and its gradient 0.
"""

from __future__ import annotations

from typing import Literal, get_args

import jax
import jax.numpy as jnp

from rolljax.errors import ConfigError
from rolljax.trainer.credit.mismatch import RatioLevel
from rolljax.trainer.kl import LOG_RATIO_LIMIT, KlEstimator, kl_estimate

Divergence = Literal["tv", "kl"]


def segment_sum(x_BT: jax.Array, ids_BT: jax.Array) -> jax.Array:
    """Sum `x`, for every token, over the tokens of its row that have its id.

    Args:
      x_BT: `[B, T]` float32. Values at id 0 never reach another token.
      ids_BT: `[B, T]` int32 in 0..T, in any order; 0 belongs to no segment.

    Returns: `[B, T]`, 0 where the id is 0. Time and memory are linear in T, and rows stay on their shard.
    """
    num_segments = ids_BT.shape[-1] + 1
    sums_BS = jax.vmap(lambda x_T, ids_T: jax.ops.segment_sum(x_T, ids_T, num_segments))(x_BT, ids_BT)
    return jnp.where(ids_BT == 0, 0.0, jnp.take_along_axis(sums_BS, ids_BT, axis=-1))


def segment_mean(x_BT: jax.Array, ids_BT: jax.Array, mask_BT: jax.Array) -> jax.Array:
    """Average `x`, for every token, over the tokens of its row that have its id and are in the mask.

    `mask` is `[B, T]` bool; `x` may be anything outside of it. The result is `[B, T]`: 0 where the id is 0 and in
    segments without a token in the mask; tokens outside the mask get their segment's mean too.
    """
    total_BT = segment_sum(jnp.where(mask_BT, x_BT, 0.0), ids_BT)
    count_BT = segment_sum(mask_BT.astype(x_BT.dtype), ids_BT)
    return total_BT / jnp.maximum(count_BT, 1.0)


def log_ratio(
    logp_BT: jax.Array,
    anchor_logp_BT: jax.Array,
    mask_BT: jax.Array,
    level: RatioLevel,
    sequence_ids_BT: jax.Array,
    turn_ids_BT: jax.Array,
) -> jax.Array:
    """Log of the policy's probability over the anchor's, nats, `[B, T]`; differentiable in `logp`.

    Args:
      logp_BT, anchor_logp_BT: `[B, T]` float32, nats; may be anything outside of the mask.
      mask_BT: `[B, T]` bool, the tokens that count.
      level: "token", each token its own; "turn" and "geometric", the mean over the tokens of the turn (ratio: geometric
        mean; IPA) or of the trajectory (GSPO, arXiv 2507.18071), the same at each of its tokens; "trajectory", the sum
        over the trajectory (ratio: product; TOPR).
      sequence_ids_BT, turn_ids_BT: `[B, T]` int32 as in `segment_sum`; read by the level that needs them.

    Returns: within +-`LOG_RATIO_LIMIT`. At level "token" 0 outside of the mask.

    Raises:
      ConfigError: an unknown level.
    """
    anchor_BT = jax.lax.stop_gradient(anchor_logp_BT)
    delta_BT = jnp.where(mask_BT, logp_BT - anchor_BT, 0.0)
    if level == "turn":
        delta_BT = segment_mean(delta_BT, turn_ids_BT, mask_BT)
    elif level == "geometric":
        delta_BT = segment_mean(delta_BT, sequence_ids_BT, mask_BT)
    elif level == "trajectory":
        delta_BT = segment_sum(delta_BT, sequence_ids_BT)
    elif level != "token":
        remedy = f"one of {', '.join(get_args(RatioLevel))}"
        raise ConfigError("is not a level of the ratio", setting="level", value=level, remedy=remedy)
    return jnp.clip(delta_BT, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


# Policy gradients. `ratio` is exp(log_ratio(...)).


def clipped(
    ratio_BT: jax.Array,
    advantages_BT: jax.Array,
    low: float | None,
    high: float | None,
    dual: float | None = None,
) -> jax.Array:
    """Compute the loss of PPO (arXiv 1707.06347): `-min(ratio A, clip(ratio, 1-low, 1+high) A)`, the gradient through
    the ratio.

    Args:
      low, high: clip range; outside of it the gradient is 0. None: no bound.
      dual: for negative advantages the ratio counts as at most this, > 1 (dual-clip PPO, arXiv 1912.09729; usual 3).
    """
    # min over the two products is, for A > 0, a ceiling of the ratio, and for A < 0 a floor
    upper_BT = ratio_BT if high is None else jnp.minimum(ratio_BT, 1.0 + high)
    lower_BT = ratio_BT if low is None else jnp.maximum(ratio_BT, 1.0 - low)
    if dual is not None:
        lower_BT = jnp.minimum(lower_BT, dual)
    return -jnp.where(advantages_BT < 0, lower_BT, upper_BT) * advantages_BT


def clip_stats(
    ratio_BT: jax.Array, advantages_BT: jax.Array, low: float | None, high: float | None
) -> dict[str, jax.Array]:
    """Return 1 for each token that `clipped` cut from below (A < 0) or above (A > 0), else 0; `[B, T]` float32 by
    metric."""
    below_BT = _below(ratio_BT, low) & (advantages_BT < 0)
    above_BT = _above(ratio_BT, high) & (advantages_BT > 0)
    return {
        "policy/clip_low_frac": below_BT.astype(jnp.float32),
        "policy/clip_high_frac": above_BT.astype(jnp.float32),
    }


def vanilla(advantages_BT: jax.Array, logp_BT: jax.Array) -> jax.Array:
    """Compute the loss of REINFORCE: `-A logp`, no ratio."""
    return -advantages_BT * logp_BT


def truncated_is(ratio_BT: jax.Array, advantages_BT: jax.Array, logp_BT: jax.Array, cap: float = 1.0) -> jax.Array:
    """Compute REINFORCE weighted by the truncated importance ratio: `-stop(min(ratio, cap)) A logp`.

    The truncation is that of V-trace (IMPALA, arXiv 1802.01561).
    """
    weight_BT = jax.lax.stop_gradient(jnp.minimum(ratio_BT, cap))
    return -weight_BT * advantages_BT * logp_BT


def cispo(
    ratio_BT: jax.Array,
    advantages_BT: jax.Array,
    logp_BT: jax.Array,
    low: float | None,
    high: float | None,
    unified_mask: bool = False,
) -> jax.Array:
    """Compute the loss of CISPO (MiniMax-M1, arXiv 2506.13585): `-stop(clip(ratio, 1-low, 1+high)) A logp`.

    Every token keeps a gradient.

    Args:
      low, high: None: no bound on that side.
      unified_mask: drop the tokens that PPO's clip would drop (that paper's unified formulation).
    """
    weight_BT = ratio_BT if low is None else jnp.maximum(ratio_BT, 1.0 - low)
    weight_BT = weight_BT if high is None else jnp.minimum(weight_BT, 1.0 + high)
    if unified_mask:
        stale_BT = jnp.where(advantages_BT < 0, _below(ratio_BT, low), _above(ratio_BT, high))
        weight_BT = jnp.where(stale_BT, 0.0, weight_BT)
    return -jax.lax.stop_gradient(weight_BT) * advantages_BT * logp_BT


def dppo(
    ratio_BT: jax.Array,
    advantages_BT: jax.Array,
    logp_BT: jax.Array,
    anchor_logp_BT: jax.Array,
    divergence: Divergence = "tv",
    low: float | None = None,
    high: float | None = None,
    cap: float = 10.0,
    square_coef: float = 0.0,
) -> jax.Array:
    """Compute the loss of DPPO (arXiv 2602.04879): `-stop(min(ratio, cap)) A logp` of the tokens in the trust region,
    and `square_coef (logp - anchor)^2` of all.

    A token is outside if its probability fell with A <= 0, or rose with A > 0, by more than a bound.

    Args:
      divergence: distance of the two probabilities p of the token: "tv", `|p - p_anchor|`; "kl", the KL divergence of
        the anchor's yes-or-no distribution to the policy's, nats.
      low, high: bounds of the two cases; None: no bound.

    Raises:
      ConfigError: an unknown divergence.
    """
    anchor_BT = jax.lax.stop_gradient(anchor_logp_BT)
    old_BT, new_BT = jnp.exp(anchor_BT), jnp.exp(jax.lax.stop_gradient(logp_BT))
    if divergence == "tv":
        distance_BT = jnp.abs(new_BT - old_BT)
    elif divergence == "kl":
        others_BT = jnp.log((1.0 - old_BT + 1e-8) / (1.0 - new_BT + 1e-8))
        distance_BT = old_BT * (anchor_BT - jax.lax.stop_gradient(logp_BT)) + (1.0 - old_BT) * others_BT
    else:
        remedy = f"one of {', '.join(get_args(Divergence))}"
        raise ConfigError("is not a divergence", setting="Dppo.divergence", value=divergence, remedy=remedy)
    fell_BT = (new_BT < old_BT) & _exceeds(distance_BT, low)
    rose_BT = (new_BT > old_BT) & _exceeds(distance_BT, high)
    is_out_BT = jnp.where(advantages_BT > 0, rose_BT, fell_BT)
    weight_BT = jax.lax.stop_gradient(jnp.where(is_out_BT, 0.0, jnp.minimum(ratio_BT, cap)))
    loss_BT = -weight_BT * advantages_BT * logp_BT
    return loss_BT + square_coef * jnp.square(logp_BT - anchor_BT) if square_coef else loss_BT


def topr(
    ratio_BT: jax.Array,
    advantages_BT: jax.Array,
    logp_BT: jax.Array,
    positive: float = 1.0,
    negative: float = 1.0,
    cap: float = 1.0,
    good_BT: jax.Array | None = None,
) -> jax.Array:
    """Compute the loss of TOPR (arXiv 2503.14286): `-positive A logp` where `good`, else `-negative stop(min(ratio,
    cap)) A logp`.

    With the ratio of turns and discounted outcomes as advantages it is the policy gradient of IPA (ROME).

    Args:
      good_BT: `[B, T]` bool; None: where the advantage is positive.
    """
    good_BT = advantages_BT > 0 if good_BT is None else good_BT
    tapered_BT = negative * jnp.minimum(ratio_BT, cap)
    weight_BT = jax.lax.stop_gradient(jnp.where(good_BT, positive, tapered_BT))
    return -weight_BT * advantages_BT * logp_BT


def kimi(
    advantages_BT: jax.Array,
    logp_BT: jax.Array,
    anchor_logp_BT: jax.Array,
    tau: float,
    sequences: tuple[jax.Array, jax.Array] | None = None,
) -> jax.Array:
    """Compute the loss of Kimi k1.5 (arXiv 2501.12599, eq. 3): `-A logp + tau/2 d^2`, REINFORCE regularised towards the
    anchor.

    Args:
      sequences: ids and mask `[B, T]` as in `log_ratio`: d is the sum of `logp - anchor` over the sequence, and each of
        its tokens has an equal share of the square. None: d is the token's own.
    """
    delta_BT = logp_BT - jax.lax.stop_gradient(anchor_logp_BT)
    if sequences is None:
        return -advantages_BT * logp_BT + 0.5 * tau * jnp.square(delta_BT)
    ids_BT, mask_BT = sequences
    sum_BT = segment_sum(jnp.where(mask_BT, delta_BT, 0.0), ids_BT)
    count_BT = segment_sum(mask_BT.astype(logp_BT.dtype), ids_BT)
    return -advantages_BT * logp_BT + 0.5 * tau * jnp.square(sum_BT) / jnp.maximum(count_BT, 1.0)


def _below(ratio_BT: jax.Array, low: float | None) -> jax.Array:
    return jnp.zeros(ratio_BT.shape, bool) if low is None else ratio_BT < 1.0 - low


def _above(ratio_BT: jax.Array, high: float | None) -> jax.Array:
    return jnp.zeros(ratio_BT.shape, bool) if high is None else ratio_BT > 1.0 + high


def _exceeds(distance_BT: jax.Array, bound: float | None) -> jax.Array:
    return jnp.zeros(distance_BT.shape, bool) if bound is None else distance_BT > bound


# Distance to a reference, and critics.


def kl(logp_BT: jax.Array, ref_logp_BT: jax.Array, estimator: KlEstimator) -> jax.Array:
    """Estimate (`trainer.kl.kl_estimate`) of KL(policy || reference) at tokens sampled from the policy; `[B, T]`, nats.

    Raises:
      ConfigError: an unknown estimator.
    """
    return kl_estimate(logp_BT - jax.lax.stop_gradient(ref_logp_BT), estimator, jnp)


def value_loss(values: jax.Array, returns: jax.Array, old_values: jax.Array, clip: float | None = None) -> jax.Array:
    """Compute a critic's loss `(V - return)^2 / 2`; arrays of any one shape, which the loss has too.

    Args:
      clip: take the worse of V and of V clipped to within this of `old_values` (PPO's clipped value loss); None: off.
    """
    returns = jax.lax.stop_gradient(returns)
    error = jnp.square(values - returns)
    if clip is not None:
        old_values = jax.lax.stop_gradient(old_values)
        near = jnp.clip(values, old_values - clip, old_values + clip)
        error = jnp.maximum(error, jnp.square(near - returns))
    return 0.5 * error


# Preferences: the loss of a pair from what its two answers scored. Arrays of any one shape.


def dpo(
    chosen_logratio: jax.Array, rejected_logratio: jax.Array, beta: float, label_smoothing: float = 0.0
) -> jax.Array:
    """Compute the loss of DPO (arXiv 2305.18290): `-log sigmoid(beta (chosen - rejected))`.

    Args:
      chosen_logratio, rejected_logratio: log-prob of the answer minus that of the reference, summed over tokens, nats.
      label_smoothing: probability that a label is the wrong way round (conservative DPO); 0 to 0.5.
    """
    margin = beta * (chosen_logratio - rejected_logratio)
    right, wrong = jax.nn.log_sigmoid(margin), jax.nn.log_sigmoid(-margin)
    return -(1.0 - label_smoothing) * right - label_smoothing * wrong


def ipo(h: jax.Array, beta: float) -> jax.Array:
    """Compute the loss of IPO (arXiv 2310.12036): `(h - 1/(2 beta))^2`, with `h` the chosen minus the rejected
    log-ratio, nats."""
    return jnp.square(h - 0.5 / beta)


def simpo(chosen_mean_logp: jax.Array, rejected_mean_logp: jax.Array, beta: float, gamma: float) -> jax.Array:
    """Compute the loss of SimPO (arXiv 2405.14734): `-log sigmoid(beta (chosen - rejected) - gamma)`.

    It takes mean log-probs per token, nats, and has no reference. `gamma` is the target margin.
    """
    return -jax.nn.log_sigmoid(beta * (chosen_mean_logp - rejected_mean_logp) - gamma)


def kto(gain: jax.Array, good: jax.Array, beta: float) -> jax.Array:
    """Compute the loss of KTO (arXiv 2402.01306): `1 - sigmoid(beta gain)` of good answers, `1 -
    sigmoid(-beta gain)` of bad ones.

    Args:
      gain: log-ratio of the answer to the reference minus the reference point, nats. good: bool.
    """
    return jax.nn.sigmoid(jnp.where(good, -beta, beta) * gain)


def bradley_terry(chosen_score: jax.Array, rejected_score: jax.Array) -> jax.Array:
    """Compute the loss of a reward model: `-log sigmoid(chosen - rejected)`."""
    return -jax.nn.log_sigmoid(chosen_score - rejected_score)
