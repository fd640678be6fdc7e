"""Per-token losses and the statistics that go with them. Arrays `[B, T]` in, arrays `[B, T]` out; all float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def clipped_ratio(
    ratio_BT: jax.Array, advantages_BT: jax.Array, clip_low: float | None, clip_high: float | None
) -> jax.Array:
    """PPO's pessimistic surrogate as a loss: `-min(ratio A, clip(ratio, 1-low, 1+high) A)`. arXiv 1707.06347."""
    low = -jnp.inf if clip_low is None else 1 - clip_low
    high = jnp.inf if clip_high is None else 1 + clip_high
    clipped = jnp.clip(ratio_BT, low, high)
    return -jnp.minimum(ratio_BT * advantages_BT, clipped * advantages_BT)


def k3(logp_BT: jax.Array, other_logp_BT: jax.Array) -> jax.Array:
    """Schulman's k3 estimate of KL(p || other) from samples of p: `exp(-x) + x - 1` with `x = logp - other`, >= 0."""
    x = logp_BT - other_logp_BT
    return jnp.expm1(-x) + x
