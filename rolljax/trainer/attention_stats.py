"""Attention of the sampled tokens: the attention statistics of attention-rhythm credit, head by head.

Source: "Attention Illuminates LLM Reasoning: The Preplan-and-Anchor Rhythm Enables Fine-Grained Policy Optimization"
(arXiv 2510.13554). With A[t, s] the attention of query t to key s, and distances in positions of the sequence:

    span of a head  mean over sampled t of sum_s A[t, s] (t - s)
    WAAD_t          sum_s A[t, s] min(t - s, W), averaged over the local heads (the smallest spans)
    FAI_s           mean over sampled t of the same sequence with low <= t - s <= high of A[t, s], averaged over the
                    global heads (the largest spans); 0 where there is no such t

Which heads are local or global is known only after all of the batch, and both statistics are linear in A: the device
program (`make_attention_stats`) therefore reports them per head of the selected layers, and `reduce` picks the heads
and averages. No full attention matrix ever exists: one layer at a time, one block of query rows at a time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from rolljax.errors import ConfigError, Range, check_fields
from rolljax.model import attention
from rolljax.model.attention import NEG, Attend, Window, in_pieces, pieces, visible
from rolljax.model.axes import on_mesh
from rolljax.model.decoder import Model, Params
from rolljax.trainer.mesh import replicated, rows

AttendFor = Callable[[jax.Array, jax.Array, jax.Array], Attend]
"""From segment ids, branch ids and positions `[B, T]` to the attention of such rows, like `model.attention.packed`."""


@dataclasses.dataclass(frozen=True)
class AttentionMaps:
    """Settings of the measurement: windows, layers and heads."""

    waad_window: Annotated[int, Range(low=1)] = 10
    """W, the distance in tokens at which WAAD stops to count further."""
    fai_low: Annotated[int, Range(low=0)] = 10
    """Nearest distance in tokens, included, of the later tokens that FAI averages over."""
    fai_high: int = 100
    """Farthest distance in tokens, included, of the later tokens that FAI averages over."""
    head_frac: Annotated[
        float, Range(above=0, high=0.5, remedy="local and global heads are two disjoint parts of all heads")
    ] = 0.3
    """Share of the selected layers' heads that is local, and that is global; at least one head each."""
    num_layers: Annotated[int, Range(low=1)] = 5
    """Layers measured, spread evenly from depth/3 to 2 depth/3, both included (all if there are fewer)."""
    block_rows: Annotated[int, Range(low=1)] = 128
    """Query rows handled at once; memory grows with it, results do not depend on it."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.fai_high < self.fai_low:
            raise ConfigError(
                f"is below fai_low={self.fai_low}: no token would be averaged over",
                setting="AttentionMaps.fai_high",
                value=self.fai_high,
            )

    def layers(self, depth: int) -> tuple[int, ...]:
        """Return the indices of the measured layers of a model of `depth` layers, ascending."""
        first, last = depth // 3, 2 * depth // 3
        if last - first < self.num_layers:
            return tuple(range(first, last + 1))
        if self.num_layers == 1:
            return ((first + last) // 2,)
        return tuple(first + round(i * (last - first) / (self.num_layers - 1)) for i in range(self.num_layers))


class TokenRoles(NamedTuple):
    """Roles of the tokens of packed rows; arrays `[B, T]`."""

    places: attention.TokenPositions
    sampled: jax.Array
    """bool."""

    @staticmethod
    def of(positions: jax.Array, segment_ids: jax.Array, branch_ids: jax.Array, sampled: jax.Array) -> TokenRoles:
        return TokenRoles(attention.TokenPositions.of(positions, segment_ids, branch_ids), sampled != 0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class HeadStats:
    """Statistics of one micro-batch per head of the measured layers (here L are only these)."""

    span_sums_LH: jax.Array
    """Sum over sampled tokens of the mean distance they look back, in tokens."""
    num_tokens: jax.Array
    """Number of sampled tokens, int32: the divisor of `span_sums_LH`."""
    waad_LHBT: jax.Array
    """0 where not sampled, like `fai_LHBT`."""
    fai_LHBT: jax.Array

    @staticmethod
    def empty(num_layers: int, num_heads: int, tokens: TokenRoles) -> HeadStats:
        """Return statistics without any measured layer."""
        zeros = jnp.zeros((num_layers, num_heads, *tokens.sampled.shape), jnp.float32)
        return HeadStats(zeros[..., 0, 0], tokens.sampled.sum(dtype=jnp.int32), zeros, zeros)

    def put(self, layer: jax.Array | int, span_H: jax.Array, waad_BHT: jax.Array, fai_BHT: jax.Array) -> HeadStats:
        """Return these statistics with a measured layer filled in; `layer` counts measured layers only."""
        return dataclasses.replace(
            self,
            span_sums_LH=self.span_sums_LH.at[layer].set(span_H),
            waad_LHBT=self.waad_LHBT.at[layer].set(waad_BHT.swapaxes(0, 1)),
            fai_LHBT=self.fai_LHBT.at[layer].set(fai_BHT.swapaxes(0, 1)),
        )


def attention_weights(q_BTHC: jax.Array, k_BSKC: jax.Array, mask_BTS: jax.Array) -> jax.Array:
    """Return the softmax that `model.attention.attention` mixes with: `[B, H, T, S]` float32."""
    B, T, H, C = q_BTHC.shape
    S, K = k_BSKC.shape[1:3]
    q = q_BTHC.reshape(B, T, K, H // K, C)
    logits = jnp.einsum("btkgc,bskc->bkgts", q, k_BSKC, preferred_element_type=jnp.float32) * C**-0.5
    weights = jax.nn.softmax(jnp.where(mask_BTS[:, None, None], logits, NEG), axis=-1)
    return weights.reshape(B, H, T, S)


def block_stats(
    weights_BHTS: jax.Array, query: TokenRoles, key: TokenRoles, cfg: AttentionMaps
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Compute the statistics of a block of T query rows over all S keys.

    Returns:
      Sums over the block's sampled tokens of the span `[H]`; WAAD `[B, H, T]`, 0 where not sampled; the sums over
      queries that FAI averages `[B, H, S]`, and the number of these queries `[B, S]`.
    """
    distance_BTS = query.places.positions[:, :, None] - key.places.positions[:, None]
    sampled_B1T = query.sampled[:, None]
    # products and sums instead of matrix products: these are float32 on every device
    span_BHT = jnp.sum(weights_BHTS * distance_BTS[:, None], axis=-1)
    waad_BHT = jnp.sum(weights_BHTS * jnp.minimum(distance_BTS, cfg.waad_window)[:, None], axis=-1)
    counts_BTS = query.sampled[:, :, None] & (cfg.fai_low <= distance_BTS) & (distance_BTS <= cfg.fai_high)
    counts_BTS &= query.places.segment_ids[:, :, None] == key.places.segment_ids[:, None]
    counts_BTS &= query.places.branch_ids[:, :, None] == key.places.branch_ids[:, None]
    return (
        jnp.where(sampled_B1T, span_BHT, 0).sum((0, 2)),
        jnp.where(sampled_B1T, waad_BHT, 0),
        jnp.where(counts_BTS[:, None], weights_BHTS, 0).sum(2),
        counts_BTS.sum(1),
    )


_Sums = tuple[jax.Array, jax.Array, jax.Array]
"""Over blocks: spans `[H]`, FAI `[B, H, T]`, and how many queries it is the sum of `[B, T]`."""


def layer_stats(
    q_BTHC: jax.Array, k_BTKC: jax.Array, tokens: TokenRoles, cfg: AttentionMaps, window: Window | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute the span sums `[H]`, WAAD and FAI `[B, H, T]` of one layer; largest temporary `[B, H, block_rows, T]`."""
    B, T, H, _ = q_BTHC.shape

    def body(sums: _Sums, block: tuple[jax.Array, TokenRoles]) -> tuple[_Sums, jax.Array]:
        q, query = block
        weights_BHTS = attention_weights(q, k_BTKC, visible(query.places, tokens.places, window))
        span_H, waad_BHT, fai_BHS, count_BS = block_stats(weights_BHTS, query, tokens, cfg)
        return (sums[0] + span_H, sums[1] + fai_BHS, sums[2] + count_BS), waad_BHT

    zeros = (jnp.zeros(H), jnp.zeros((B, H, T)), jnp.zeros((B, T), jnp.int32))
    (span_H, fai_BHT, count_BT), waad = jax.lax.scan(body, zeros, pieces((q_BTHC, tokens), min(cfg.block_rows, T)))
    waad_BHT = jnp.moveaxis(waad, 0, 2).reshape(B, H, -1)[..., :T]
    mean_BHT = fai_BHT / jnp.maximum(count_BT, 1)[:, None]
    return span_H, waad_BHT, jnp.where(tokens.sampled[:, None], mean_BHT, 0)


def packed_in_blocks(tokens: TokenRoles, block_rows: int) -> Attend:
    """Compute `model.attention.packed` a block of query rows at a time: memory is linear in the row's length."""

    def attend(
        q_BTHC: jax.Array,
        k_BTKC: jax.Array,
        v_BTKC: jax.Array,
        cache: Any,
        layer: jax.Array | int,
        window: Window | None = None,
    ) -> tuple[jax.Array, Any]:
        del layer
        places = tokens.places
        return in_pieces(
            q_BTHC, k_BTKC, v_BTKC, places, places, window, size=min(block_rows, q_BTHC.shape[1]), causal=False
        ), cache

    return attend


def measured(mix: Attend, tokens: TokenRoles, depth: int, cfg: AttentionMaps) -> Attend:
    """Wrap `mix` so that its cache is a `HeadStats`: `mix` gets no cache, and every measured layer fills in its part.

    depth: number of layers of the model.
    """
    layers = cfg.layers(depth)
    index_of = np.full(depth, -1)
    index_of[list(layers)] = np.arange(len(layers))

    def attend(
        q_BTHC: jax.Array,
        k_BTKC: jax.Array,
        v_BTKC: jax.Array,
        cache: HeadStats,
        layer: jax.Array | int,
        window: Window | None = None,
    ) -> tuple[jax.Array, HeadStats]:
        mixed, _ = mix(q_BTHC, k_BTKC, v_BTKC, None, layer, window)

        def fill(index: jax.Array | int) -> HeadStats:
            return cache.put(index, *layer_stats(q_BTHC, k_BTKC, tokens, cfg, window))

        if isinstance(layer, int):
            return mixed, fill(index_of[layer]) if layer in layers else cache
        index = jnp.asarray(index_of)[layer]
        return mixed, jax.lax.cond(index >= 0, fill, lambda _: cache, index)

    return attend


AttentionStatsFn = Callable[[Params, jax.Array, jax.Array, jax.Array, jax.Array, jax.Array], HeadStats]
"""From parameters and tokens, positions, segment_ids, branch_ids, mask (True: sampled), each `[B, T]`."""


def make_attention_stats(
    model: Model,
    mesh: Mesh | None = None,
    cfg: AttentionMaps = AttentionMaps(),
    attend_for: AttendFor | None = None,
) -> AttentionStatsFn:
    """Jit the program that measures one micro-batch of packed rows.

    Args:
      mesh: rows are split over its batch axes, heads over `tensor`; the result is replicated. None: one device.
      attend_for: who mixes the values. None: row blocks, whose memory is linear in T.
    """

    def stats(
        params: Params,
        tokens_BT: jax.Array,
        positions_BT: jax.Array,
        segment_ids_BT: jax.Array,
        branch_ids_BT: jax.Array,
        mask_BT: jax.Array,
    ) -> HeadStats:
        tokens = TokenRoles.of(positions_BT, segment_ids_BT, branch_ids_BT, mask_BT)
        mix = packed_in_blocks(tokens, cfg.block_rows)
        if attend_for:
            mix = attend_for(segment_ids_BT, branch_ids_BT, positions_BT)
        depth = model.cfg.num_layers
        empty = HeadStats.empty(len(cfg.layers(depth)), model.cfg.num_heads, tokens)
        with on_mesh(mesh):
            return model.bind(params)(tokens_BT, positions_BT, measured(mix, tokens, depth, cfg), empty).cache

    if mesh is None:
        return jax.jit(stats)
    return jax.jit(stats, in_shardings=(None, *[rows(mesh)] * 5), out_shardings=replicated(mesh))


@dataclasses.dataclass(frozen=True, eq=False)
class Rhythm:
    """Statistics of a batch; M micro-batches of B rows of T tokens, L measured layers. NumPy float64."""

    waad_MBT: np.ndarray
    """0 where not sampled, like `fai_MBT`."""
    fai_MBT: np.ndarray
    spans_LH: np.ndarray
    """Mean span of every head, tokens; 0 if nothing was sampled."""
    local_heads: np.ndarray
    """(measured layer, head) `[n, 2]`, shortest span first."""
    global_heads: np.ndarray
    """(measured layer, head) `[n, 2]`, longest span last."""


def reduce(parts: Sequence[HeadStats], cfg: AttentionMaps = AttentionMaps()) -> Rhythm:
    """Pick local and global heads by their span over all of the batch, and average the statistics over them.

    Heads of all measured layers are ranked together, ties by layer and head.

    Args:
      parts: one per micro-batch, at least one, of equal shapes.
    """
    sums_LH = np.sum([np.asarray(p.span_sums_LH, np.float64) for p in parts], axis=0)
    spans_LH = sums_LH / max(1, sum(int(p.num_tokens) for p in parts))
    order = np.stack(np.unravel_index(np.argsort(spans_LH, axis=None, kind="stable"), spans_LH.shape), -1)
    # the small number keeps 0.29 * 100 at 29
    n = max(1, int(cfg.head_frac * len(order) + 1e-9))
    near, far = order[:n], order[-n:]

    def mean(x_LHBT: jax.Array, heads: np.ndarray) -> np.ndarray:
        return np.asarray(x_LHBT)[heads[:, 0], heads[:, 1]].mean(0, dtype=np.float64)

    waad = np.stack([mean(p.waad_LHBT, near) for p in parts])
    return Rhythm(waad, np.stack([mean(p.fai_LHBT, far) for p in parts]), spans_LH, near, far)
