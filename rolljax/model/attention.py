"""Attention in one place: the grouped-query reference, and who may see whom in a packed row.

A decoder layer hands its rotated queries, keys and values to an `Attend` and does not know whether they come from a
packed training row or from a page of a running request: that is how sampler and trainer share one model function.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from rolljax.errors import ConfigError
from rolljax.model import splash
from rolljax.model.axes import ACTIVATION_RULES, current_mesh, spec

Implementation = Literal["auto", "xla", "splash", "cudnn"]
"""'xla' runs anywhere; 'splash' are JAX's kernels for TPU (`model.splash`; on CPU they are interpreted, for tests);
'cudnn' is NVIDIA's for GPU. 'auto': the kernels that the devices have, where the shapes suit them."""

NEG = -1e30
MIN_BLOCK, MAX_BLOCKS = 64, 6
"""Least queries of a block and most blocks of `in_blocks`: more blocks save more work, and take longer to compile."""


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


def in_blocks(
    q_BTHC: jax.Array, k_BSKC: jax.Array, v_BSKC: jax.Array, mask_BTS: jax.Array, *, causal: bool
) -> jax.Array:
    """`attention` of a few blocks of queries, one after the other.

    causal: the queries are all of their rows and see no later key: each block takes only the keys up to its end.
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
    return causal[None] & same_segment & visible


def inside(window: Window | None, query_BT: jax.Array, key_BS: jax.Array) -> jax.Array | bool:
    """Which keys are near enough, by position: `[B, T, S]`."""
    if window is None or window.size is None:
        return True
    near = query_BT[:, :, None] - key_BS[:, None, :] < window.size
    return near | ~jnp.asarray(window.on)


def packed(
    segment_ids_BT: jax.Array, branch_ids_BT: jax.Array, positions_BT: jax.Array, how: Implementation = "auto"
) -> Attend:
    """Attention inside packed training rows, on the mesh of `axes.on_mesh`. Positions count for layers with a window.

    Raises, when it is called:
      ConfigError: `how` cannot run there.
    """
    mesh = current_mesh()
    mask_BTS = packed_mask(segment_ids_BT, branch_ids_BT)
    queries, keys = splash.rows(segment_ids_BT, branch_ids_BT, positions_BT)

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
        mask = mask_BTS & inside(window, positions_BT, positions_BT)
        causal = _parts(mesh) == 1
        local: Callable[..., jax.Array] = _cudnn if found == "cudnn" else functools.partial(in_blocks, causal=causal)
        return _on_shards(mesh, local, qkv, mask), cache

    return attend


def implementation(
    how: Implementation, mesh: Mesh | None, shape_BTHC: tuple[int, ...], dtype: Any
) -> Literal["xla", "splash", "cudnn"]:
    """What attends to full rows of queries `[B, T, H, C]`: for "auto" the mesh's own kernels where they can. Without a
    mesh it is XLA, because the compiler cannot split kernels, and nobody says whether it has to.

    Raises:
      ConfigError: what is asked for cannot run.
    """
    platform, length, head_dim = _platform(mesh), shape_BTHC[1], shape_BTHC[3]
    part = length // _parts(mesh)
    no_splash = no_cudnn = ""
    if platform == "gpu":
        no_splash = "needs a TPU"
    elif part % splash.LANES:
        no_splash = f"takes parts of rows in multiples of {splash.LANES} tokens, not {part}"
    if platform != "gpu":
        no_cudnn = "needs a GPU"
    elif dtype != jnp.bfloat16:
        no_cudnn = f"computes in bfloat16, not {dtype}"
    elif part % 2 or head_dim % 8 or head_dim > 128:
        no_cudnn = f"takes heads of 8, 16, ... 128 numbers and rows in even parts, not {head_dim} and {part}"
    if how == "auto":
        if mesh is None:
            return "xla"
        if platform == "tpu" and not no_splash:
            return "splash"
        return "cudnn" if not no_cudnn else "xla"
    reason = {"splash": no_splash, "cudnn": no_cudnn}.get(how, "")
    if reason:
        raise ConfigError(reason, setting="Recipe.attention", value=how, remedy="'auto', or 'xla' which runs anywhere")
    return how


def _platform(mesh: Mesh | None) -> str:
    return mesh.devices.flat[0].platform if mesh else jax.default_backend()


def _parts(mesh: Mesh | None) -> int:
    """Into how many parts each row is split."""
    return mesh.shape.get("context", 1) if mesh else 1


def _cudnn(q_BTHC: jax.Array, k_BSKC: jax.Array, v_BSKC: jax.Array, mask_BTS: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(q_BTHC, k_BSKC, v_BSKC, mask=mask_BTS[:, None], implementation="cudnn")


def _on_shards(
    mesh: Mesh | None,
    local: Callable[..., jax.Array],
    qkv: tuple[jax.Array, jax.Array, jax.Array],
    by_query: Any,
    by_key: Any = None,
    *others: jax.Array,
) -> jax.Array:
    """`local(q, k, v, by_query, by_key, *others)`: on every device its rows and heads, its part of the queries, and all
    keys. Arrays of `by_query` are `[B, T, ...]`, of `by_key` `[B, S, ...]`; `None` is left out."""
    rest = (by_query, *((by_key,) if by_key is not None else ()), *others)
    if mesh is None or mesh.size == 1:
        return local(*qkv, *rest)
    on = lambda *names: spec(names, ACTIVATION_RULES, mesh)  # noqa: E731

    def gathered(q: jax.Array, k: jax.Array, v: jax.Array, *rest: Any) -> jax.Array:
        if _parts(mesh) > 1:
            k, v = (jax.lax.all_gather(x, "context", axis=1, tiled=True) for x in (k, v))
        return local(q, k, v, *rest)

    heads, kv_heads = (on("batch", "length", name, "head_dim") for name in ("heads", "kv_heads"))
    specs = [on("batch", "length"), *((on("batch"),) if by_key is not None else ()), *(on() for _ in others)]
    mapped = jax.shard_map(
        gathered, mesh=mesh, in_specs=(heads, kv_heads, kv_heads, *specs), out_specs=heads, check_vma=False
    )
    return mapped(*qkv, *rest)
