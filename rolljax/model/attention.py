"""Attention in one place: the grouped-query reference, and who may see whom in a packed row.

A decoder layer hands its rotated queries, keys and values to an `Attend` and does not know whether they come from a
packed training row or from a page of a running request: that is how sampler and trainer share one model function.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

NEG = -1e30
MIN_BLOCK, MAX_BLOCKS = 64, 6
"""Of queries in `causal_attention`: more blocks save more work, and take longer to compile."""


class Window(NamedTuple):
    """A layer that looks back only so far: at its own position and the `size - 1` before it, where `on` is True.

    `on` may be traced: layers of both kinds run in one scan. No size: no layer has a window.
    """

    size: int | None
    on: jax.Array | bool


class Attend(Protocol):
    """Attention of one layer; queries are scaled by `head_dim ** -0.5`.

    Args:
      q_BTHC: rotated queries.  k_BTKC, v_BTKC: rotated keys, and values, of the same tokens.
      cache: pytree carried from layer to layer (None where there is none).
      layer: index of the layer: an int32 scalar (traced) under `lax.scan`, an int where the layers are written out.
      window: how far back the layer looks, None: to the beginning.

    Returns:
      The mixed values `[B, T, H, C]` and the cache.
    """

    def __call__(
        self,
        q_BTHC: jax.Array,
        k_BTKC: jax.Array,
        v_BTKC: jax.Array,
        cache: Any,
        layer: jax.Array | int,
        window: Window | None = None,
    ) -> tuple[jax.Array, Any]: ...


def attention(q_BTHC: jax.Array, k_BSKC: jax.Array, v_BSKC: jax.Array, mask_BTS: jax.Array) -> jax.Array:
    """Grouped-query attention with a boolean mask; softmax in float32. Returns `[B, T, H, C]` in q's dtype.

    The queries that share a key head are rows of one matrix, and the softmax is divided after the values are mixed: a
    pass over `[T, S]` less.
    """
    B, T, H, C = q_BTHC.shape
    S, K = k_BSKC.shape[1:3]
    q = (q_BTHC.reshape(B, T, K, H // K, C) * C**-0.5).transpose(0, 2, 3, 1, 4).reshape(B, K, -1, C)
    logits = jnp.einsum("bktc,bskc->bkts", q, k_BSKC, preferred_element_type=jnp.float32)
    logits = jnp.where(mask_BTS[:, None, None], logits.reshape(B, K, H // K, T, S), NEG).reshape(B, K, -1, S)
    weights = jnp.exp(logits - jax.lax.stop_gradient(logits.max(-1, keepdims=True)))
    mixed = jnp.einsum("bkts,bskc->bktc", weights.astype(q.dtype), v_BSKC, preferred_element_type=jnp.float32)
    mixed = (mixed / weights.sum(-1, keepdims=True)).astype(q.dtype)
    return mixed.reshape(B, K, H // K, T, C).transpose(0, 3, 1, 2, 4).reshape(B, T, H, C)


def causal_attention(q_BTHC: jax.Array, k_BTKC: jax.Array, v_BTKC: jax.Array, mask_BTT: jax.Array) -> jax.Array:
    """`attention` where no query sees a later key: a few blocks of queries, each with only the keys up to its end."""
    T = q_BTHC.shape[1]
    size = max(MIN_BLOCK, -(-T // MAX_BLOCKS))
    ends = [(start, min(start + size, T)) for start in range(0, T, size)]
    mixed = [
        attention(q_BTHC[:, start:end], k_BTKC[:, :end], v_BTKC[:, :end], mask_BTT[:, start:end, :end])
        for start, end in ends
    ]
    return jnp.concatenate(mixed, axis=1)


def packed_mask(segment_ids_BT: jax.Array, branch_ids_BT: jax.Array) -> jax.Array:
    """Who sees whom in packed rows: `[B, T, T]`, True where query t may see key s.

    A segment is one group: its shared prompt (branch 0) comes first, then each sibling's own tokens (branch 1, 2, ...).
    A token sees what stands before it in its own segment, if that is the shared prompt or its own branch. Padding is
    segment 0 and sees only padding.
    """
    T = segment_ids_BT.shape[1]
    causal = jnp.arange(T)[:, None] >= jnp.arange(T)[None]
    same_segment = segment_ids_BT[:, :, None] == segment_ids_BT[:, None, :]
    visible = (branch_ids_BT[:, None, :] == 0) | (branch_ids_BT[:, :, None] == branch_ids_BT[:, None, :])
    return causal & same_segment & visible


def inside(window: Window | None, query_BT: jax.Array, key_BS: jax.Array) -> jax.Array | bool:
    """Which keys are near enough, by position: `[B, T, S]`."""
    if window is None or window.size is None:
        return True
    near = query_BT[:, :, None] - key_BS[:, None, :] < window.size
    return near | ~jnp.asarray(window.on)


def packed(segment_ids_BT: jax.Array, branch_ids_BT: jax.Array, positions_BT: jax.Array) -> Attend:
    """Attention inside packed training rows. Positions count for layers that have a window."""
    mask_BTS = packed_mask(segment_ids_BT, branch_ids_BT)

    def attend(q, k, v, cache, layer, window=None):
        del layer
        return causal_attention(q, k, v, mask_BTS & inside(window, positions_BT, positions_BT)), cache

    return attend
