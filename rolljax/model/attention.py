"""Attention in one place: the grouped-query reference, and who may see whom in a packed row.

A decoder layer hands its rotated queries, keys and values to an `Attend` and does not know whether they come from a
packed training row or from a page of a running request: that is how sampler and trainer share one model function.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from rolljax.model import splash
from rolljax.model.axes import ACTIVATION_RULES, current_mesh, spec
from rolljax.model.implementations import Implementation, cudnn, implementation, parts, tokamax

NEG = -1e30
MIN_BLOCK, MAX_BLOCKS = 128, 6
"""Least queries of a block and most blocks of `in_blocks`: more blocks save more work, and take longer to compile."""
SCORE_BYTES, PIECE_BYTES = 2**30, 2**28
"""Bytes of a layer's float32 scores on one device: up to the first, XLA keeps all of them for the backward pass. Above,
it computes them in pieces of at most the second, and again in the backward pass."""


class Window(NamedTuple):
    """A sliding window: where `on` is True, a token attends only to itself and to the `size - 1` positions before it.

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
    """Compute grouped-query attention with a boolean mask, softmax in float32. Return `[B, T, H, C]` in q's dtype.

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


def in_blocks(
    q_BTHC: jax.Array, k_BSKC: jax.Array, v_BSKC: jax.Array, mask_BTS: jax.Array, *, causal: bool
) -> jax.Array:
    """Compute `attention` for a few blocks of queries, one after the other.

    causal: the queries are all tokens of their rows and do not attend to later keys: each block takes only the keys up
    to its end.
    """
    T = q_BTHC.shape[1]
    size = max(MIN_BLOCK, -(-T // MAX_BLOCKS))
    mixed = []
    for start in range(0, T, size):
        end = min(start + size, T)
        keys = end if causal else k_BSKC.shape[1]
        block = q_BTHC[:, start:end], k_BSKC[:, :keys], v_BSKC[:, :keys], mask_BTS[:, start:end, :keys]
        mixed.append(attention(*block))
    return jnp.concatenate(mixed, axis=1)


class TokenPositions(NamedTuple):
    """Positions of the tokens of packed rows, `[B, T]` each."""

    indices: jax.Array
    """Index in the row."""
    positions: jax.Array
    """Position in the sequence."""
    segment_ids: jax.Array
    branch_ids: jax.Array

    @staticmethod
    def of(positions_BT: jax.Array, segment_ids_BT: jax.Array, branch_ids_BT: jax.Array) -> TokenPositions:
        """Take whole rows."""
        indices = jnp.broadcast_to(jnp.arange(positions_BT.shape[1]), positions_BT.shape)
        return TokenPositions(indices, positions_BT, segment_ids_BT, branch_ids_BT)


def visible(query: TokenPositions, key: TokenPositions, window: Window | None = None) -> jax.Array:
    """Return who sees whom, `[B, T, S]`: `packed_mask` of some queries `[B, T]` and keys `[B, S]`, and a window."""
    before = query.indices[:, :, None] >= key.indices[:, None]
    same_segment = query.segment_ids[:, :, None] == key.segment_ids[:, None]
    own = query.branch_ids[:, :, None] == key.branch_ids[:, None]
    shared = key.branch_ids[:, None] == 0
    return before & same_segment & (shared | own) & inside(window, query.positions, key.positions)


def pieces(x: Any, size: int) -> Any:
    """Return every leaf `[B, T, ...]` as `[pieces, B, size, ...]`, with zeros after the last row."""

    def one(a: jax.Array) -> jax.Array:
        B, T = a.shape[:2]
        padded = jnp.pad(a, [(0, 0), (0, -T % size)] + [(0, 0)] * (a.ndim - 2))
        return jnp.moveaxis(padded.reshape(B, -1, size, *a.shape[2:]), 1, 0)

    return jax.tree.map(one, x)


def in_pieces(
    q_BTHC: jax.Array,
    k_BSKC: jax.Array,
    v_BSKC: jax.Array,
    query: TokenPositions,
    key: TokenPositions,
    window: Window | None = None,
    *,
    size: int,
    causal: bool,
) -> jax.Array:
    """Compute `attention` for `size` queries at a time.

    Memory is linear in the length of a row, also in the backward pass, which recomputes the scores of each piece.

    causal: as in `in_blocks`; a few blocks then differ in their keys.
    """
    B, T, H, C = q_BTHC.shape
    k_BSKC, v_BSKC = (x.astype(jnp.float32) for x in (k_BSKC, v_BSKC))  # so their gradients are summed in float32
    block = -(-T // (MAX_BLOCKS * size)) * size if causal else T

    def mix_block(start: int, end: int) -> jax.Array:
        here = slice(start, end), slice(end if causal else None)
        queries, places = jax.tree.map(lambda x: x[:, here[0]], (q_BTHC, query))
        seen, keys, values = jax.tree.map(lambda x: x[:, here[1]], (key, k_BSKC, v_BSKC))

        @jax.checkpoint
        def mix(piece: tuple[jax.Array, TokenPositions]) -> jax.Array:
            near = visible(piece[1], seen, window)
            return attention(piece[0], keys.astype(q_BTHC.dtype), values.astype(q_BTHC.dtype), near)

        mixed = jax.lax.map(mix, pieces((queries, places), size))
        return jnp.moveaxis(mixed, 0, 1).reshape(B, -1, H, C)[:, : end - start]

    return jnp.concatenate([mix_block(start, min(start + block, T)) for start in range(0, T, block)], axis=1)


def packed_mask(segment_ids_BT: jax.Array, branch_ids_BT: jax.Array) -> jax.Array:
    """Return which tokens of packed rows see each other: `[B, T, T]`, True where query t may see key s.

    A segment is one group: its shared prompt (branch 0) comes first, then each sibling's own tokens (branch 1, 2, ...).
    A token sees the earlier tokens of its segment that belong to the shared prompt or to its own branch. Padding is
    segment 0 and sees only padding.
    """
    tokens = TokenPositions.of(jnp.zeros_like(segment_ids_BT), segment_ids_BT, branch_ids_BT)
    return visible(tokens, tokens)


def inside(window: Window | None, query_BT: jax.Array, key_BS: jax.Array) -> jax.Array | bool:
    """Return which keys are inside the window of each query, by position: `[B, T, S]`."""
    if window is None or window.size is None:
        return True
    near = query_BT[:, :, None] - key_BS[:, None, :] < window.size
    return near | ~jnp.asarray(window.on)


def packed(
    segment_ids_BT: jax.Array, branch_ids_BT: jax.Array, positions_BT: jax.Array, how: Implementation = "auto"
) -> Attend:
    """Return the attention inside packed training rows, on the mesh of `axes.on_mesh`. Layers with a window use the
    positions.

    Raises, when it is called:
      ConfigError: `how` cannot run there.
    """
    mesh = current_mesh()
    mask_BTS = packed_mask(segment_ids_BT, branch_ids_BT)
    tokens = TokenPositions.of(positions_BT, segment_ids_BT, branch_ids_BT)
    queries, keys = splash.rows(segment_ids_BT, branch_ids_BT, positions_BT)
    causal = parts(mesh) == 1

    def attend(
        q_BTHC: jax.Array,
        k_BTKC: jax.Array,
        v_BTKC: jax.Array,
        cache: Any,
        layer: jax.Array | int,
        window: Window | None = None,
    ) -> tuple[jax.Array, Any]:
        del layer
        qkv = q_BTHC, k_BTKC, v_BTKC
        size, on = (window.size, window.on) if window else (None, True)
        found = implementation(how, mesh, q_BTHC.shape, q_BTHC.dtype)
        if found == "splash":
            kernels = functools.partial(splash.mix, size=size, interpret=_platform(mesh) == "cpu")
            return _on_shards(mesh, kernels, qkv, queries, keys, jnp.asarray(on)), cache
        if found == "xla" and (rows := _piece_rows(mesh, q_BTHC.shape)):
            local = functools.partial(_windowed_pieces, window_size=size, size=rows, causal=causal)
            return _on_shards(mesh, local, qkv, tokens, tokens, jnp.asarray(on)), cache
        mask = mask_BTS & inside(window, positions_BT, positions_BT)
        kernel = {"xla": in_blocks, "cudnn": cudnn, "tokamax": tokamax}[found]
        return _on_shards(mesh, functools.partial(kernel, causal=causal), qkv, mask), cache

    return attend


def _platform(mesh: Mesh | None) -> str:
    return mesh.devices.flat[0].platform if mesh else jax.default_backend()


def _piece_rows(mesh: Mesh | None, shape_BTHC: tuple[int, ...]) -> int:
    """Return how many queries XLA computes at a time; 0: all, their scores fit `SCORE_BYTES`."""
    local = shape_BTHC
    if mesh is not None:
        axes = spec(("batch", "length", "heads", "head_dim"), ACTIVATION_RULES, mesh)
        local = NamedSharding(mesh, axes).shard_shape(shape_BTHC)
    per_query = 4 * local[0] * local[2] * shape_BTHC[1]
    return 0 if local[1] * per_query <= SCORE_BYTES else min(local[1], max(1, PIECE_BYTES // per_query))


def _windowed_pieces(
    q_BTHC: jax.Array,
    k_BSKC: jax.Array,
    v_BSKC: jax.Array,
    query: TokenPositions,
    key: TokenPositions,
    on: jax.Array,
    *,
    window_size: int | None,
    size: int,
    causal: bool,
) -> jax.Array:
    """Call `in_pieces` with a window given as array and size, the form that `_on_shards` passes on."""
    return in_pieces(q_BTHC, k_BSKC, v_BSKC, query, key, Window(window_size, on), size=size, causal=causal)


def _on_shards(
    mesh: Mesh | None,
    local: Callable[..., jax.Array],
    qkv: tuple[jax.Array, jax.Array, jax.Array],
    by_query: Any,
    by_key: Any = None,
    *others: jax.Array,
) -> jax.Array:
    """Compute `local(q, k, v, by_query, by_key, *others)` on every device for its rows and heads, its part of the
    queries and all keys.

    Arrays of `by_query` are `[B, T, ...]`, of `by_key` `[B, S, ...]`; a `by_key` of None is not passed.
    """
    rest = (by_query, *((by_key,) if by_key is not None else ()), *others)
    if mesh is None or mesh.size == 1:
        return local(*qkv, *rest)
    on = lambda *names: spec(names, ACTIVATION_RULES, mesh)  # noqa: E731

    def gathered(q: jax.Array, k: jax.Array, v: jax.Array, *rest: Any) -> jax.Array:
        if parts(mesh) > 1:
            k, v = (jax.lax.all_gather(x, "context", axis=1, tiled=True) for x in (k, v))
        return local(q, k, v, *rest)

    heads, kv_heads = (on("batch", "length", name, "head_dim") for name in ("heads", "kv_heads"))
    specs = [on("batch", "length"), *((on("batch"),) if by_key is not None else ()), *(on() for _ in others)]
    mapped = jax.shard_map(
        gathered, mesh=mesh, in_specs=(heads, kv_heads, kv_heads, *specs), out_specs=heads, check_vma=False
    )
    return mapped(*qkv, *rest)
