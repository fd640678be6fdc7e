"""Keys and values in pages, and attention over them: one meaning, one implementation per kind of device.

A `Path` owns the layout of the pool (one flat array of layers x pages, so that layer l finds page p at `l * pages + p`)
and how new tokens are written to it and attend to what is there. Both programs of the engine use it the same way:

    reading, cache = path.open(pool, table, length, room, read)      before the model runs
    decoder(..., path.attend(reading, first, count), cache)          once (prefill), or once per decode step
    pool = path.close(pool, reading, cache, count)                   after

`table [B, W]` are the page ids of each row, in order; `length [B]` the tokens that are in them already; `room` how many
new tokens a row may get until `close`; `read` how many pages of the table hold earlier tokens at most (0: no row has
any); `first` which of the new tokens come now; `count [B]` how many of them hold (of those that come now; of all).

`DensePath` is for CPU and GPU: it copies the rows' context out of the pages once, in the layout that matrix products
want, keeps the new tokens beside it, and writes them to their pages at the end. What is copied is paid once per
prefill or per dispatch of many decode steps.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from rolljax.model.attention import NEG, Attend
from rolljax.model.decoder import DecoderConfig


class Path(Protocol):
    """See the module's text. `head_axis`: the dimension of the pool that counts key/value heads."""

    head_axis: int

    def pool_shape(self, num_pages: int) -> tuple[int, ...]: ...
    def copy_pages(self, pool: jax.Array, source: jax.Array, target: jax.Array) -> jax.Array: ...
    def open(
        self, pool: jax.Array, table_BW: jax.Array, length_B: jax.Array, room: int, read: int
    ) -> tuple[Any, Any]: ...
    def attend(self, reading: Any, first: jax.Array | int, count_B: jax.Array) -> Attend: ...
    def close(self, pool: jax.Array, reading: Any, cache: Any, count_B: jax.Array) -> jax.Array: ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Reading:
    """What `DensePath.attend` reads: context keys `[B, K, C, S]` and values `[B, K, S, C]` of every layer."""

    keys: Any
    values: Any
    table: jax.Array
    length: jax.Array


@dataclasses.dataclass(frozen=True)
class DensePath:
    """Attention by XLA over a copy of the context.

    num_pages: pages of one shard. unroll: the decoder's layers are written out, so everything per layer is a tuple;
    else it is one array with a leading L.
    """

    cfg: DecoderConfig
    dtype: str
    page_size: int
    num_pages: int
    unroll: bool
    head_axis = 1

    def pool_shape(self, num_pages: int) -> tuple[int, ...]:
        """`[L * pages, 2 * K, page, C]`: of each key/value head its keys, then its values."""
        cfg = self.cfg
        return (cfg.num_layers * num_pages, 2 * cfg.num_kv_heads, self.page_size, cfg.head_dim)

    def copy_pages(self, pool: jax.Array, source: jax.Array, target: jax.Array) -> jax.Array:
        """Copy pages `source [n]` to `target [n]` in every layer; target -1: nothing."""
        layers = jnp.arange(self.cfg.num_layers)[:, None] * self.num_pages
        target = jnp.where(target >= 0, target + layers, pool.shape[0])
        return pool.at[target].set(pool[jnp.maximum(source, 0) + layers], mode="drop")

    def open(
        self, pool: jax.Array, table_BW: jax.Array, length_B: jax.Array, room: int, read: int
    ) -> tuple[Reading, Any]:
        cfg, B, W = self.cfg, len(table_BW), read
        L, C, P = cfg.num_layers, cfg.head_dim, self.page_size
        K = pool.shape[1] // 2
        pages = pool[jnp.maximum(table_BW[:, :W], 0) + (jnp.arange(L) * self.num_pages)[:, None, None]]
        pages = pages.reshape(L, B, W, K, 2, P, C)
        keys = pages[:, :, :, :, 0].transpose(0, 1, 3, 5, 2, 4).reshape(L, B, K, C, W * P)
        values = pages[:, :, :, :, 1].transpose(0, 1, 3, 2, 4, 5).reshape(L, B, K, W * P, C)
        new_keys, new_values = jnp.zeros((L, B, K, C, room), self.dtype), jnp.zeros((L, B, K, room, C), self.dtype)
        split = (lambda x: tuple(x[i] for i in range(L))) if self.unroll else (lambda x: x)
        return Reading(split(keys), split(values), table_BW, length_B), (split(new_keys), split(new_values))

    def attend(self, reading: Reading, first: jax.Array | int, count_B: jax.Array) -> Attend:
        del count_B  # `close` writes only what holds
        S = reading.keys[0].shape[-1]
        old_BS = jnp.arange(S) < reading.length[:, None]

        def attend(q_BTHC, k_BTKC, v_BTKC, cache, layer):
            B, T, H, C = q_BTHC.shape
            keys, values = (_at(x, layer) for x in cache)
            keys = jax.lax.dynamic_update_slice_in_dim(keys, k_BTKC.astype(keys.dtype).transpose(0, 2, 3, 1), first, 3)
            values = jax.lax.dynamic_update_slice_in_dim(values, v_BTKC.astype(keys.dtype).swapaxes(1, 2), first, 2)
            cache = (_put(cache[0], layer, keys), _put(cache[1], layer, values))
            K, room = keys.shape[1], keys.shape[-1]
            q = (
                q_BTHC.reshape(B, T, K, H // K, C).transpose(0, 2, 3, 1, 4).reshape(B, K, -1, C)
            )  # queries of one head: groups x time
            new_T = jnp.arange(room) <= first + jnp.arange(T)[:, None]
            weights_new = _scores(q, keys, jnp.broadcast_to(new_T, (B, T, room)))
            if S:
                old = _scores(q, _at(reading.keys, layer), jnp.broadcast_to(old_BS[:, None], (B, T, S)))
                weights = jax.nn.softmax(jnp.concatenate([old, weights_new], axis=-1), axis=-1).astype(q.dtype)
                mixed = jnp.einsum("bkts,bksc->bktc", weights[..., :S], _at(reading.values, layer))
                mixed = mixed + jnp.einsum("bkts,bksc->bktc", weights[..., S:], values)
            else:
                mixed = jnp.einsum("bkts,bksc->bktc", jax.nn.softmax(weights_new, axis=-1).astype(q.dtype), values)
            mixed = mixed.reshape(B, K, H // K, T, C).transpose(0, 3, 1, 2, 4)
            return mixed.reshape(B, T, H, C), cache

        return attend

    def close(self, pool: jax.Array, reading: Reading, cache: Any, count_B: jax.Array) -> jax.Array:
        L, P = self.cfg.num_layers, self.page_size
        keys, values = (jnp.stack(x) if self.unroll else x for x in cache)
        _, B, K, C, room = keys.shape
        new = jnp.stack([keys.swapaxes(3, 4), values], axis=3).reshape(L, B, 2 * K, room, C)
        at = reading.length[:, None] + jnp.arange(room)
        page = jnp.take_along_axis(reading.table, jnp.minimum(at // P, reading.table.shape[1] - 1), axis=1)
        holds = jnp.arange(room) < count_B[:, None]
        rows = jnp.where(holds, page + (jnp.arange(L) * self.num_pages)[:, None, None], pool.shape[0])
        offset = jnp.broadcast_to(at % P, rows.shape)
        return pool.at[rows, :, offset].set(new.transpose(0, 1, 3, 2, 4), mode="drop")


def _scores(q_BKXC: jax.Array, keys_BKCS: jax.Array, mask_BTS: jax.Array) -> jax.Array:
    """Masked scores `[B, K, groups x time, S]` in float32."""
    B, K, X, C = q_BKXC.shape
    T, S = mask_BTS.shape[1:]
    scores = jnp.einsum("bkxc,bkcs->bkxs", q_BKXC, keys_BKCS, preferred_element_type=jnp.float32) * C**-0.5
    scores = jnp.where(mask_BTS[:, None, None], scores.reshape(B, K, X // T, T, S), NEG)
    return scores.reshape(B, K, X, S)


def _at(layers: Any, layer: jax.Array | int) -> jax.Array:
    if isinstance(layers, tuple):
        return layers[layer]  # type: ignore[index]
    return jax.lax.dynamic_index_in_dim(layers, layer, keepdims=False)


def _put(layers: Any, layer: jax.Array | int, value: jax.Array) -> Any:
    if isinstance(layers, tuple):
        return (*layers[:layer], value, *layers[layer + 1 :])  # type: ignore[operator, misc]
    return jax.lax.dynamic_update_index_in_dim(layers, value, layer, 0)
