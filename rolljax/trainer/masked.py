"""Masked reductions: the only place where per-token arrays are summed under a mask or weight.

Values under a zero weight are replaced before anything else touches them, so that a NaN there can reach neither the
sum nor its gradient (`where` after the fact lets NaN through the backward pass).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def clean(values: jax.Array, weights: jax.Array, fill: float = 0.0) -> jax.Array:
    """Return `values` with `fill` wherever the weight is zero."""
    return jnp.where(weights != 0, values, jnp.asarray(fill, values.dtype))


def total(values: jax.Array, weights: jax.Array) -> jax.Array:
    """Compute the weighted sum over all axes, float32 scalar."""
    return jnp.sum(clean(values, weights).astype(jnp.float32) * weights)


def maximum(values: jax.Array, weights: jax.Array, initial: float = 0.0) -> jax.Array:
    """Return the largest value with a non-zero weight, at least `initial`; float32 scalar."""
    return jnp.max(clean(values.astype(jnp.float32), weights, initial), initial=initial)
