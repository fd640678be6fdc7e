"""Keys and values in pages, and attention over them: one meaning, one implementation per kind of device.

A `Path` owns the layout of the pool (one flat array of layers x pages, so that layer l finds page p at `l * pages + p`)
and how new tokens are written to it and attend to earlier tokens. Both programs of the engine use it the same way:

    reading, cache = path.open(pool, pages, room, read)         before the model runs
    decoder(..., path.attend(reading, first, count), cache)     once (prefill), or once per decode step
    pool = path.close(pool, reading, cache, count)              after

`pages` is the `PageTable` of the rows; `room` how many new tokens a row may get until `close`; `read` how many pages of
the table hold earlier tokens at most (0: no row has any); `first` which of the new tokens come now; `count [B]` how
many of them hold (of those that come now; of all).

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

FP8 = "float8_e4m3fn"
FP8_MAX = 448.0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PageTable:
    """The pages of some rows, and how many tokens are in them.

    Rows that begin with the same pages can read them once (Hydragen, arXiv 2402.05099; "cascade attention"). The B rows
    are then N blocks of B / N rows. Attention is one softmax over the shared pages and a row's own.
    """

    own: jax.Array
    """`[B, W]` page ids of each row, in order, without the shared pages."""
    length: jax.Array
    """`[B]` tokens in all pages of a row."""
    shared: jax.Array | None = None
    """`[N, W]` pages that all rows of a block begin with, -1 after the last; None: none are shared."""

    def shared_length(self, page_size: int) -> jax.Array:
        """Return the tokens in the shared pages of each block, `[N]`."""
        assert self.shared is not None
        return jnp.sum(self.shared >= 0, axis=1) * page_size

    def split_length(self, page_size: int) -> tuple[jax.Array, jax.Array]:
        """Return how many tokens of each row lie in shared pages, and how many in its own."""
        if self.shared is None:
            return jnp.zeros_like(self.length), self.length
        before_B = jnp.repeat(self.shared_length(page_size), len(self.length) // len(self.shared))
        return before_B, jnp.maximum(self.length - before_B, 0)


class Path(Protocol):
    """The layout of keys and values in the pool of pages, and the attention of new tokens to them."""

    head_axis: int
    """The dimension of the pool that counts key/value heads."""
    cascades: bool
    """Whether rows can read shared pages once."""
    sized: bool
    """Whether the amount of computation grows with the width of the page tables and the number of rows, so that
    programs for smaller sizes are worth compiling."""

    @property
    def pool_dtype(self) -> str: ...
    def pool_shape(self, num_pages: int) -> tuple[int, ...]: ...
    def copy_pages(self, pool: jax.Array, source: jax.Array, target: jax.Array) -> jax.Array: ...

    def open(self, pool: jax.Array, pages: PageTable, room: int, read: int) -> tuple[Any, Any]: ...
    def attend(self, reading: Any, first: jax.Array | int, count_B: jax.Array) -> Attend: ...
    def close(self, pool: jax.Array, reading: Any, cache: Any, count_B: jax.Array) -> jax.Array: ...


@dataclasses.dataclass(frozen=True)
class Reading:
    """The places that `DensePath` reads: in its cache the first `context` positions are the rows' earlier tokens."""

    table: jax.Array
    length: jax.Array
    """`[B]` earlier tokens in the pages of `table`."""
    context: int
    before: jax.Array
    """`[B]` tokens in shared pages, which come before."""
    shared: Any
    """Keys and values of the shared pages, as in the cache and with N blocks for B rows; None: there are none."""


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
    """The pool holds the bits of bfloat16 as uint16, and those of float8 as uint8. XLA's CPU compiler computes in
    float32 what it is given in these types, also where nothing is computed: a scatter of a few tokens would make a
    float32 copy of the whole pool."""
    fp8: bool = dataclasses.field(default=False, kw_only=True)
    """The pool holds float8 numbers (`in_pool`)."""
    head_axis = 1
    cascades = True
    sized = True

    @property
    def pool_dtype(self) -> str:
        return {"bfloat16": "uint16", FP8: "uint8"}.get(self.stored, self.stored) if self.as_bits else self.stored

    @property
    def stored(self) -> str:
        """The type of the numbers in the pool."""
        return FP8 if self.fp8 else self.dtype

    def pool_shape(self, num_pages: int) -> tuple[int, ...]:
        """Return `[L * pages, 2 * K, page, C]`: for each key/value head its keys, then its values."""
        cfg = self.cfg
        return (cfg.num_layers * num_pages, 2 * cfg.num_kv_heads, self.page_size, cfg.head_dim)

    def copy_pages(self, pool: jax.Array, source: jax.Array, target: jax.Array) -> jax.Array:
        return copy_pages(pool, self.cfg.num_layers, source, target)

    def open(self, pool: jax.Array, pages: PageTable, room: int, read: int) -> tuple[Reading, Any]:
        before_B, own_B = pages.split_length(self.page_size)
        shared = None if pages.shared is None else self._copied(pool, pages.shared, 0)
        cache = self._copied(pool, pages.own[:, :read], room)
        return Reading(pages.own, own_B, read * self.page_size, before_B, shared), cache

    def _copied(self, pool: jax.Array, table_BW: jax.Array, room: int) -> Any:
        """Return keys `[B, K, C, S + room]` and values `[B, K, S + room, C]` of every layer; the last `room` are
        free."""
        (B, W), K, P, C = table_BW.shape, pool.shape[1] // 2, self.page_size, self.cfg.head_dim
        table = jnp.maximum(table_BW, 0)

        def of(layer: jax.Array | int) -> tuple[jax.Array, jax.Array]:
            pages = _same_bits(pool[table + layer * self.num_pages], self.stored).astype(self.dtype)
            pages = pages.reshape(B, W, K, 2, P, C)
            keys = pages[:, :, :, 0].transpose(0, 2, 4, 1, 3).reshape(B, K, C, W * P)
            values = pages[:, :, :, 1].transpose(0, 2, 1, 3, 4).reshape(B, K, W * P, C)
            return _pad(keys, 3, room), _pad(values, 2, room)

        L = self.cfg.num_layers
        return tuple(zip(*map(of, range(L)), strict=True)) if self.unroll else jax.lax.map(of, jnp.arange(L))

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
            k_BTKC, v_BTKC = (rounded_to_pool(x, self.stored) for x in (k_BTKC, v_BTKC))
            keys, all_keys = _write(cache[0], k_BTKC.transpose(0, 2, 3, 1), layer, S + first, 3)
            values, all_values = _write(cache[1], v_BTKC.swapaxes(1, 2), layer, S + first, 2)
            K = keys.shape[1]
            index_S = jnp.arange(keys.shape[-1])
            old_BS = (index_S < jnp.minimum(reading.length, S)[:, None])[:, None]
            new_TS = (index_S >= S) & (index_S - S <= first + jnp.arange(T)[:, None])
            start_B1 = (reading.before + reading.length)[:, None]
            position_BS = jnp.where(index_S < S, reading.before[:, None] + index_S, start_B1 + index_S - S)
            query_BT = start_B1 + first + jnp.arange(T)
            seen_BTS = (old_BS | new_TS) & inside(window, query_BT, position_BS)
            if self.chunks_by_cudnn and T > 1:
                # with an empty context the keys are the queries' own tokens, so cuDNN can leave out later ones
                mixed = cudnn(q_BTHC, keys.transpose(0, 3, 1, 2), values.swapaxes(1, 2), seen_BTS, causal=S == 0)
                return mixed, (all_keys, all_values)
            parts = [(keys, values, seen_BTS)]
            if reading.shared is not None:
                shared_keys, shared_values = (_layer(x, layer) for x in reading.shared)
                index_S = jnp.arange(shared_keys.shape[-1])
                shared_BTS = (index_S < reading.before[:, None])[:, None] & inside(window, query_BT, index_S[None])
                parts.append((shared_keys, shared_values, shared_BTS))
            q = q_BTHC.reshape(B, T, K, H // K, C).transpose(0, 2, 3, 1, 4)  # heads of one key head, then time
            q, scores = q.reshape(B, K, -1, C), []
            for k, _, seen in parts:
                x = jnp.einsum("bkxc,bkcs->bkxs", by_block(q, len(k)), k, preferred_element_type=jnp.float32)
                seen = seen.reshape(len(k), 1, -1, 1, *seen.shape[1:])
                apart = x.reshape(len(k), K, -1, H // K, *seen.shape[4:])
                scores.append(jnp.where(seen, apart * C**-0.5, NEG).reshape(x.shape))
            largest = functools.reduce(jnp.maximum, [by_row(jnp.max(x, axis=3), B) for x in scores])
            total, mixed = jnp.zeros_like(largest), jnp.zeros(q.shape)
            for x, (_, v, _) in zip(scores, parts, strict=True):
                weights = jnp.exp(x - by_block(largest, len(v))[..., None])
                total += by_row(jnp.sum(weights, axis=3), B)
                mixed += by_row(
                    jnp.einsum("bkxs,bksc->bkxc", weights.astype(v.dtype), v, preferred_element_type=jnp.float32), B
                )
            mixed = (mixed / total[..., None]).astype(q.dtype).reshape(B, K, H // K, T, C)
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
        new = _same_bits(in_pool(new.transpose(0, 1, 3, 2, 4), self.stored), self.pool_dtype)
        return pool.at[rows, :, offset].set(new, mode="drop")


def in_pool(x: jax.Array, stored: str) -> jax.Array:
    """Return keys or values as a pool of that type holds them. Float8 numbers have no scale: they reach to 448, with a
    relative error of at most 1/16, and what is larger becomes 448."""
    return (jnp.clip(x, -FP8_MAX, FP8_MAX) if stored == FP8 else x).astype(stored)


def rounded_to_pool(x: jax.Array, stored: str) -> jax.Array:
    """Round new keys or values to what the pool will hold, so that what a token attends to does not depend on which
    tokens are computed in one program."""
    return x if x.dtype == stored else jax.lax.optimization_barrier(in_pool(x, stored)).astype(x.dtype)


def by_block(x: jax.Array, blocks: int) -> jax.Array:
    """Turn `[B, K, x, ...]` of rows into `[blocks, K, B / blocks * x, ...]`, all queries of a block side by side."""
    B, K, n = x.shape[:3]
    rows = x.reshape(blocks, B // blocks, K, n, *x.shape[3:]).swapaxes(1, 2)
    return rows.reshape(blocks, K, B // blocks * n, *x.shape[3:])


def by_row(x: jax.Array, rows: int) -> jax.Array:
    """Undo `by_block`: `[N, K, x, ...]` of blocks becomes `[rows, K, N * x / rows, ...]`."""
    N, K, n = x.shape[:3]
    blocks = x.reshape(N, K, rows // N, n * N // rows, *x.shape[3:]).swapaxes(1, 2)
    return blocks.reshape(rows, K, n * N // rows, *x.shape[3:])


def _layer(layers: Any, layer: jax.Array | int) -> jax.Array:
    """Return one layer's array."""
    if isinstance(layers, tuple):
        return layers[layer]
    return jax.lax.dynamic_index_in_dim(layers, layer, keepdims=False)


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
