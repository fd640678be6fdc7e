"""Samples one token: its distribution, log-probs, and noise that is a function of the request alone.

Noise is Gumbel noise from the hash of (request key, position, token id): the argmax of logits plus noise is a draw
from the softmax, and it does not depend on slot, batch, schedule or restarts. The hash is Threefry-2x32 with 20 rounds
(Salmon et al. 2011, https://doi.org/10.1145/2063384.2063405), written out so that XLA fuses it into one loop.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from rolljax.sampler.arrays import SamplingDistribution

MAX_TOP_LOGPROBS = 20


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Draw:
    """One token per row `[S]`, and the most likely tokens `[S, n]`, with log-probs."""

    token: jax.Array
    sampler_logp: jax.Array
    """Log-prob of the token under the distribution that was sampled from."""
    model_logp: jax.Array
    """Log-prob of the token under the model's own distribution."""
    top_ids: jax.Array
    top_sampler_logp: jax.Array
    top_model_logp: jax.Array


def draw(
    logits_SV: jax.Array,
    distribution: SamplingDistribution,
    key_S2: jax.Array,
    position_S: jax.Array,
    truncate: bool,
    top: bool,
) -> Draw:
    """Draw the token at `position` of each row.

    Temperature 0 takes the largest logit; log-probs are then those of the model's distribution.

    Args:
      key_S2: uint32, see `fold_address`.
      truncate: False where no row has top-k, top-p or min-p (static: it saves a sort). top: report likely tokens, too.
    """
    V = logits_SV.shape[1]
    greedy_S1 = (distribution.temperature == 0)[:, None]
    scaled = logits_SV / jnp.where(greedy_S1, 1.0, distribution.temperature[:, None])
    if truncate:
        scaled = jnp.where(scaled >= jnp.where(greedy_S1, -jnp.inf, threshold(scaled, distribution)), scaled, -jnp.inf)
    noise = gumbel(key_S2, position_S, V)
    noisy = scaled + jnp.where(greedy_S1, 0.0, noise)
    best = jnp.max(noisy, axis=1, keepdims=True)  # largest, then its first place: faster than argmax on CPU
    token = jnp.min(jnp.where(noisy == best, jnp.arange(V), V - 1), axis=1).astype(jnp.int32)
    sampler_lse, model_lse = jax.nn.logsumexp(scaled, axis=1), jax.nn.logsumexp(logits_SV, axis=1)
    pick = lambda x, i: jnp.take_along_axis(x, i, axis=1)  # noqa: E731
    if top:
        _, ids = jax.lax.top_k(logits_SV, min(MAX_TOP_LOGPROBS, V))
    else:
        ids = jnp.zeros((len(token), 0), jnp.int32)
    return Draw(
        token=token,
        sampler_logp=pick(scaled, token[:, None])[:, 0] - sampler_lse,
        model_logp=pick(logits_SV, token[:, None])[:, 0] - model_lse,
        top_ids=ids.astype(jnp.int32),
        top_sampler_logp=pick(scaled, ids) - sampler_lse[:, None],
        top_model_logp=pick(logits_SV, ids) - model_lse[:, None],
    )


def threshold(scaled_SV: jax.Array, distribution: SamplingDistribution) -> jax.Array:
    """Return the smallest scaled logit that can be sampled `[S, 1]`: top-k, then top-p of the rest, then min-p."""
    V = scaled_SV.shape[1]
    ordered = jnp.sort(scaled_SV, axis=1, descending=True)
    kept_k = jnp.where(distribution.top_k > 0, jnp.minimum(distribution.top_k, V), V)[:, None]
    p = jax.nn.softmax(jnp.where(jnp.arange(V) < kept_k, ordered, -jnp.inf), axis=1)
    top_p = distribution.top_p[:, None]
    inside_p = (jnp.cumsum(p, axis=1) - p < top_p) | (top_p >= 1)
    inside = inside_p & (p >= distribution.min_p[:, None] * p[:, :1]) & (jnp.arange(V) < kept_k)
    return jnp.take_along_axis(ordered, jnp.maximum(jnp.sum(inside, axis=1, keepdims=True) - 1, 0), axis=1)


def gumbel(key_S2: jax.Array, position_S: jax.Array, size: int) -> jax.Array:
    """Return Gumbel noise `[S, size]` addressed by key and position."""
    ids = jnp.arange(size, dtype=jnp.uint32)[None]
    bits, _ = threefry(key_S2[:, :1], key_S2[:, 1:], position_S.astype(jnp.uint32)[:, None], ids)
    uniform = ((bits >> 9).astype(jnp.float32) + 0.5) * 2.0**-23  # never 0, never 1
    return -jnp.log(-jnp.log(uniform))


def fold_address(address_SA: jax.Array) -> jax.Array:
    """Return the keys `[S, 2]` of addresses `[S, ADDRESS_LEN]`: their integers hashed in one after the other."""
    zero = jnp.zeros(len(address_SA), jnp.uint32)

    def fold(key: tuple[jax.Array, jax.Array], value_S: jax.Array) -> tuple[tuple[jax.Array, jax.Array], None]:
        return threefry(key[0], key[1], value_S, zero), None

    (a, b), _ = jax.lax.scan(fold, (zero, zero), address_SA.astype(jnp.uint32).T)
    return jnp.stack([a, b], axis=1)


def threefry(key0: jax.Array, key1: jax.Array, x0: jax.Array, x1: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Compute Threefry-2x32-20 of the counter (x0, x1) under the key, elementwise over uint32 arrays."""
    keys = (key0, key1, key0 ^ key1 ^ np.uint32(0x1BD11BDA))
    x0, x1 = x0 + keys[0], x1 + keys[1]
    for i in range(5):
        for r in ((13, 15, 26, 6), (17, 29, 16, 24))[i % 2]:
            x0 = x0 + x1
            x1 = ((x1 << np.uint32(r)) | (x1 >> np.uint32(32 - r))) ^ x0
        x0, x1 = x0 + keys[(i + 1) % 3], x1 + keys[(i + 2) % 3] + np.uint32(i + 1)
    return x0, x1
