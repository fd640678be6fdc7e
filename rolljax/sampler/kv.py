"""Keys and values in pages, and attention over them: one meaning, one implementation per kind of device.

A `Path` owns the layout of the pool (one flat array of layers x pages, so that layer l finds page p at `l * pages + p`)
and how new tokens are written to it and attend to earlier tokens. Both programs of the engine use it the same way:

    reading, cache = path.open(pool, table, length, room, read)      before the model runs
    decoder(..., path.attend(reading, first, count), cache)          once (prefill), or once per decode step
    pool = path.close(pool, reading, cache, count)                   after

`table [B, W]` are the page ids of each row, in order; `length [B]` the tokens that are in them already; `room` how many
new tokens a row may get until `close`; `read` how many pages of the table hold earlier tokens at most (0: no row has
any); `first` which of the new tokens come now; `count [B]` how many of them hold (of those that come now; of all).

`DensePath` is for CPU and GPU: it copies the rows' context out of the pages once, in the layout that matrix products
need, keeps the new tokens in a separate array, and writes them to their pages at the end. The cost of the copy comes
once per prefill or per dispatch of many decode steps.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from rolljax.model.attention import NEG, Attend, Window, inside
from rolljax.model.decoder import DecoderConfig
from rolljax.model.implementations import cudnn


class Path(Protocol):
    """The layout of keys and values in the pool of pages, and the attention of new tokens to them."""

    head_axis: int
    """The dimension of the pool that counts key/value heads."""
    sized: bool
    """Whether the amount of computation grows with the width of the page tables and the number of rows, so that
    programs for smaller sizes are worth compiling."""

    @property
    def pool_dtype(self) -> str: ...
    def pool_shape(self, num_pages: int) -> tuple[int, ...]: ...
    def copy_pages(self, pool: jax.Array, source: jax.Array, target: jax.Array) -> jax.Array: ...

    def open(
        self, pool: jax.Array, table_BW: jax.Array, length_B: jax.Array, room: int, read: int
    ) -> tuple[Any, Any]: ...
    def attend(self, reading: Any, first: jax.Array | int, count_B: jax.Array) -> Attend: ...
    def close(self, pool: jax.Array, reading: Any, cache: Any, count_B: jax.Array) -> jax.Array: ...


@functools.partial(jax.tree_util.register_dataclass, data_fields=["table", "length"], meta_fields=["context"])
@dataclasses.dataclass(frozen=True)
class Reading:
    """The places that `DensePath` reads: in its cache the first `context` positions are the rows' earlier tokens."""

    table: jax.Array
    length: jax.Array
    context: int


@dataclasses.dataclass(frozen=True)
class DensePath:
    """Attention by XLA over a copy of the context."""

    cfg: DecoderConfig
    dtype: str
    page_size: int
    num_pages: int
    """Pages of one shard."""
    unroll: bool
    """The decoder's layers are written out, so everything per layer is a tuple; else it is one array with a leading
    L."""
    chunks_by_cudnn: bool = dataclasses.field(default=False, kw_only=True)
    """Attention of several new tokens a row, as in prefill, by cuDNN."""
    as_bits: bool = dataclasses.field(default=False, kw_only=True)
    """The pool holds the bits of bfloat16 as uint16. XLA's CPU compiler computes in float32 what it is given in
    bfloat16, also where nothing is computed: a scatter of a few tokens would make a float32 copy of the whole pool."""
    head_axis = 1
    sized = True

    @property
    def pool_dtype(self) -> str:
        return "uint16" if self.as_bits and self.dtype == "bfloat16" else self.dtype

    def pool_shape(self, num_pages: int) -> tuple[int, ...]:
        """Return `[L * pages, 2 * K, page, C]`: for each key/value head its keys, then its values."""
        cfg = self.cfg
        return (cfg.num_layers * num_pages, 2 * cfg.num_kv_heads, self.page_size, cfg.head_dim)

    def copy_pages(self, pool: jax.Array, source: jax.Array, target: jax.Array) -> jax.Array:
        return copy_pages(pool, self.cfg.num_layers, source, target)

    def open(
        self, pool: jax.Array, table_BW: jax.Array, length_B: jax.Array, room: int, read: int
    ) -> tuple[Reading, Any]:
        L, C, P, B = self.cfg.num_layers, self.cfg.head_dim, self.page_size, len(table_BW)
        K = pool.shape[1] // 2
        table = jnp.maximum(table_BW[:, :read], 0)

        def context(layer: jax.Array | int) -> tuple[jax.Array, jax.Array]:
            """Return keys `[B, K, C, S + room]` and values `[B, K, S + room, C]` of one layer; the last `room` are
            free."""
            pages = _same_bits(pool[table + layer * self.num_pages], self.dtype).reshape(B, read, K, 2, P, C)
            keys = pages[:, :, :, 0].transpose(0, 2, 4, 1, 3).reshape(B, K, C, read * P)
            values = pages[:, :, :, 1].transpose(0, 2, 1, 3, 4).reshape(B, K, read * P, C)
            return _pad(keys, 3, room), _pad(values, 2, room)

        if self.unroll:
            cache = tuple(zip(*(context(layer) for layer in range(L)), strict=True))
        else:
            cache = jax.lax.map(context, jnp.arange(L))
        return Reading(table_BW, length_B, read * P), cache

    def attend(self, reading: Reading, first: jax.Array | int, count_B: jax.Array) -> Attend:
        del count_B  # `close` writes only what holds
        S = reading.context

        def attend(
            q_BTHC: jax.Array,
            k_BTKC: jax.Array,
            v_BTKC: jax.Array,
            cache: Any,
            layer: jax.Array | int,
            window: Window | None = None,
        ) -> tuple[jax.Array, Any]:
            B, T, H, C = q_BTHC.shape
            keys, all_keys = _write(cache[0], k_BTKC.transpose(0, 2, 3, 1), layer, S + first, 3)
            values, all_values = _write(cache[1], v_BTKC.swapaxes(1, 2), layer, S + first, 2)
            K = keys.shape[1]
            index_S = jnp.arange(keys.shape[-1])
            old_BS = (index_S < jnp.minimum(reading.length, S)[:, None])[:, None]
            new_TS = (index_S >= S) & (index_S - S <= first + jnp.arange(T)[:, None])
            position_BS = jnp.where(index_S < S, index_S, reading.length[:, None] + index_S - S)
            query_BT = reading.length[:, None] + first + jnp.arange(T)
            seen_BTS = (old_BS | new_TS) & inside(window, query_BT, position_BS)
            if self.chunks_by_cudnn and T > 1:
                # with an empty context the keys are the queries' own tokens, so cuDNN can leave out later ones
                mixed = cudnn(q_BTHC, keys.transpose(0, 3, 1, 2), values.swapaxes(1, 2), seen_BTS, causal=S == 0)
                return mixed, (all_keys, all_values)
            q = q_BTHC.reshape(B, T, K, H // K, C).transpose(0, 2, 3, 1, 4)  # heads of one key head, then time
            scores = jnp.einsum("bkxc,bkcs->bkxs", q.reshape(B, K, -1, C), keys, preferred_element_type=jnp.float32)
            scores = scores.reshape(B, K, H // K, T, -1) * C**-0.5
            scores = jnp.where(seen_BTS[:, None, None], scores, NEG).reshape(B, K, (H // K) * T, -1)
            weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
            mixed = jnp.einsum("bkxs,bksc->bkxc", weights, values).reshape(B, K, H // K, T, C)
            return mixed.transpose(0, 3, 1, 2, 4).reshape(B, T, H, C), (all_keys, all_values)

        return attend

    def close(self, pool: jax.Array, reading: Reading, cache: Any, count_B: jax.Array) -> jax.Array:
        L, P = self.cfg.num_layers, self.page_size
        keys, values = (jnp.stack(x) if self.unroll else x for x in cache)
        keys, values = keys[..., reading.context :], values[..., reading.context :, :]
        _, B, K, C, room = keys.shape
        new = jnp.stack([keys.swapaxes(3, 4), values], axis=3).reshape(L, B, 2 * K, room, C)
        position_BT = reading.length[:, None] + jnp.arange(room)
        page = jnp.take_along_axis(reading.table, jnp.minimum(position_BT // P, reading.table.shape[1] - 1), axis=1)
        holds = jnp.arange(room) < count_B[:, None]
        rows = jnp.where(holds, page + (jnp.arange(L) * self.num_pages)[:, None, None], pool.shape[0])
        offset = jnp.broadcast_to(position_BT % P, rows.shape)
        new = _same_bits(new.transpose(0, 1, 3, 2, 4), self.pool_dtype)
        return pool.at[rows, :, offset].set(new, mode="drop")


def _same_bits(x: jax.Array, dtype: str) -> jax.Array:
    """Reinterpret the bits of `x` as another dtype of the same size."""
    return x if x.dtype == dtype else jax.lax.bitcast_convert_type(x, dtype)


def copy_pages(pool: jax.Array, num_layers: int, source: jax.Array, target: jax.Array) -> jax.Array:
    """Copy pages `source [n]` to `target [n]` in every layer, one after the other; target -1: nothing.

    All at once, by gather and scatter, is slower on CPU, and TPU compilers would copy the pool into another layout.
    """
    order = jnp.argsort(target < 0)  # those to copy come first

    def one(i: jax.Array, pool: jax.Array) -> jax.Array:
        page = jax.lax.dynamic_slice_in_dim(pool, source[order[i]], 1, axis=1)
        return jax.lax.dynamic_update_slice_in_dim(pool, page, target[order[i]], axis=1)

    by_layer = pool.reshape(num_layers, -1, *pool.shape[1:])
    return jax.lax.fori_loop(0, jnp.sum(target >= 0), one, by_layer).reshape(pool.shape)


def _pad(x: jax.Array, axis: int, size: int) -> jax.Array:
    return jnp.pad(x, [(0, size if i == axis else 0) for i in range(x.ndim)])


def _write(layers: Any, new: jax.Array, layer: jax.Array | int, start: jax.Array | int, axis: int) -> tuple[Any, Any]:
    """Put `new` into one layer's array at `start` of `axis`; returns that array, and all of them."""
    if isinstance(layers, tuple):
        one = jax.lax.dynamic_update_slice_in_dim(layers[layer], new.astype(layers[0].dtype), start, axis)
        return one, (*layers[:layer], one, *layers[layer + 1 :])
    starts = [layer, *(start if i == axis else 0 for i in range(new.ndim))]
    layers = jax.lax.dynamic_update_slice(layers, new[None].astype(layers.dtype), starts)
    return jax.lax.dynamic_index_in_dim(layers, layer, keepdims=False), layers
