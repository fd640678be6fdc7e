"""Mixtures of experts: routing of tokens, computation of the experts, and the balance of their load.

Nothing is dropped and nothing has a capacity: tokens are sorted by expert and multiplied group by group. On a mesh the
experts are split over its `expert` axis. The devices of that axis share their tokens (`all_gather`: with several
experts per token hardly more traffic than sending each token only to its experts), each device runs its experts on the
tokens that are routed to them, and the sums return to the devices that the tokens came from (`psum_scatter`).

Shape letters besides the model's: N tokens, A = N * k assignments of a token to an expert, R rows computed at once.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu import megablox
from jax.sharding import PartitionSpec

from rolljax.errors import ConfigError
from rolljax.model.axes import ACTIVATION_RULES, PARAM_RULES, current_mesh, spec
from rolljax.model.layers import ExpertRouting

SLACK = 1.25
"""Rows that a device holding some of the experts computes in one round, as a multiple of its even share. Rows that do
not fit are computed in further rounds: unbalanced routing costs time, but no memory, and drops no token."""
ROW_TILES, TILE = (128, 512), 1024
"""Tiles of the TPU kernel: rows of one where experts have few tokens, or many; most columns of one."""


@dataclasses.dataclass(frozen=True)
class Routing:
    """The routing of tokens to experts: the `per_token` likeliest of `num_experts` by the router's probabilities."""

    num_experts: int
    per_token: int
    normalise: bool
    """The weights of a token's experts sum to 1."""
    aux_coef: float
    """Coefficient of the load-balancing loss in the training loss (0: no such loss)."""

    def __post_init__(self) -> None:
        if not 1 <= self.per_token <= self.num_experts:
            raise ConfigError(
                f"must be between 1 and the number of experts, {self.num_experts}",
                setting="experts_per_token",
                value=self.per_token,
            )
        if self.aux_coef < 0:
            raise ConfigError("must not be negative", setting="router_aux_coef", value=self.aux_coef)

    @property
    def dtype(self) -> type[np.signedinteger]:
        """The smallest NumPy integers that hold an expert's number, and -1."""
        return np.int8 if self.num_experts <= 128 else np.int16

    def choose(self, logits_BTE: jax.Array, expert_ids_BTk: jax.Array | None) -> tuple[ExpertRouting, jax.Array]:
        """Choose the experts of each token. Return them with the router's probabilities, and the experts' weights `[B,
        T, k]`.

        expert_ids_BTk: experts to take instead of the likeliest; -1 takes the likeliest. Their weights are the router's
        probabilities.
        """
        probs = jax.nn.softmax(logits_BTE.astype(jnp.float32), axis=-1)
        weights, expert_ids = jax.lax.top_k(probs, self.per_token)
        if expert_ids_BTk is not None:
            expert_ids = jnp.where(expert_ids_BTk < 0, expert_ids, expert_ids_BTk.astype(expert_ids.dtype))
            weights = jnp.take_along_axis(probs, expert_ids, axis=-1)
        if self.normalise:
            weights = weights / weights.sum(-1, keepdims=True)
        return ExpertRouting(expert_ids, probs), weights.astype(logits_BTE.dtype)


# ---- what experts compute -------------------------------------------------------------------------------------------


class ExpertWeights(NamedTuple):
    """Weights of a layer's experts: gate and up `[E, D, F]`, down `[E, F, D]`."""

    gate: Any
    up: Any
    down: Any
    layer: Any = None
    """Index of the layer, where the three hold all layers `[L, ...]`: kernels then read them in place."""

    def each(self, change: Callable[..., Any], *others: Any) -> ExpertWeights:
        """Return these weights, each of the three replaced by `change(weight, *its entries of others)`."""
        gate, up, down = map(change, self[:3], *others)
        return ExpertWeights(gate, up, down, self.layer)

    @property
    def num(self) -> int:
        """Number of experts, E."""
        return self.gate.shape[-3]


_AXES = ExpertWeights(
    ("experts", "expert_embed", "expert_ffn"),
    ("experts", "expert_embed", "expert_ffn"),
    ("experts", "expert_ffn", "expert_embed"),
)
"""Logical axes of the parameters of a layer."""


def declare(layers: Any, rngs: Any, num_experts: int, ffn_size: int) -> None:
    """Give `layers` (`layers.Layers`) a norm, a router `[D, E]` and experts in place of the feed-forward."""
    cfg, p = layers.cfg, layers.stacked
    D, E, F = cfg.hidden_size, num_experts, ffn_size
    layers.ffn_norm = p(rngs, (D,), ("norm",), cfg.norm_std)
    layers.router = p(rngs, (D, E), ("embed", "router"), cfg.init_std)
    layers.gate = p(rngs, (E, D, F), _AXES.gate, cfg.init_std)
    layers.up = p(rngs, (E, D, F), _AXES.up, cfg.init_std)
    layers.down = p(rngs, (E, F, D), _AXES.down, layers.out_std)


def mixed(x_BTD: jax.Array, expert_ids_BTk: jax.Array, weights_BTk: jax.Array, experts: ExpertWeights) -> jax.Array:
    """Return the weighted sum of the experts' outputs for each token, `[B, T, D]`.

    When traced for a mesh (`axes.on_mesh`), the experts are sharded by `axes.PARAM_RULES`. Inside a `shard_map` (the
    sampler's) a device has a part of the experts if the axis `expert` is manual, and a part of the feed-forward if the
    axis `tensor` is not.
    """
    outer, mesh = jax.sharding.get_abstract_mesh(), current_mesh()
    experts = experts.each(lambda w: w.astype(x_BTD.dtype))
    if outer.manual_axes:
        axes = set(outer.axis_names) - set(outer.manual_axes)
        split = _Split(
            expert=tuple(a for a in ("expert",) if a not in axes and outer.shape.get(a, 1) > 1),
            tensor=tuple(a for a in ("tensor",) if a in axes and outer.shape[a] > 1),
        )
        mesh, tokens = None, PartitionSpec()  # also where nothing is split: kernels want every axis to be manual
        where = _AXES.each(lambda names: PartitionSpec(*(split.tensor if n == "expert_ffn" else None for n in names)))
    elif mesh is not None and mesh.size > 1:
        axes, tokens = set(mesh.axis_names), spec(("batch", "length", None), ACTIVATION_RULES, mesh)
        split = _Split(*((a,) if mesh.shape[a] > 1 else () for a in _Split._fields))
        where = _AXES.each(lambda names: spec(names, PARAM_RULES, mesh))
    else:
        axes, split, where = set(), _Split(), _AXES
    if not axes:
        return _on_device(x_BTD, expert_ids_BTk, weights_BTk, experts, split)
    if experts.layer is not None:
        where = where.each(lambda names: PartitionSpec(None, *names))._replace(layer=PartitionSpec())
    run = jax.shard_map(
        functools.partial(_on_device, split=split),
        mesh=mesh,
        in_specs=(tokens, tokens, tokens, where),
        out_specs=tokens,
        axis_names=axes,
        check_vma=False,
    )
    return run(x_BTD, expert_ids_BTk, weights_BTk, experts)


class _Split(NamedTuple):
    """Mesh axes over which experts, their hidden and their feed-forward sizes are split; empty: they are not."""

    expert: tuple[str, ...] = ()
    fsdp: tuple[str, ...] = ()
    tensor: tuple[str, ...] = ()


def _on_device(
    x_BTD: jax.Array, expert_ids_BTk: jax.Array, weights_BTk: jax.Array, experts: ExpertWeights, split: _Split
) -> jax.Array:
    """Compute `mixed` for the tokens of a device, with its part of the experts."""
    gather = functools.partial(jax.lax.all_gather, tiled=True)
    k = expert_ids_BTk.shape[-1]
    x, expert_ids, weights = (
        x_BTD.reshape(-1, x_BTD.shape[-1]),
        expert_ids_BTk.reshape(-1, k),
        weights_BTk.reshape(-1, k),
    )
    if split.fsdp:
        experts = experts.each(lambda w, axis: gather(w, split.fsdp, axis=w.ndim + axis), (-2, -2, -1))
    parts = 1
    if split.expert:
        x, expert_ids, weights = (gather(a, split.expert) for a in (x, expert_ids, weights))
        parts = jax.lax.axis_size(split.expert)
        expert_ids -= jax.lax.axis_index(split.expert) * experts.num
    out = _sum_over_experts(parts, x, weights, experts, expert_ids)
    if split.expert:
        out = jax.lax.psum_scatter(out, split.expert, tiled=True)
    if split.tensor:
        out = jax.lax.psum(out, split.tensor)
    return out.reshape(x_BTD.shape)


class _Rounds(NamedTuple):
    """A device's assignments in the order of its experts, in rounds of `rows` of them."""

    order_A: jax.Array
    """Assignments, those of this device's experts first; as many as all rounds have."""
    ends_E: jax.Array
    """Index in `order_A` after each expert's last assignment."""
    rows: int
    needed: jax.Array | int
    """Rounds that hold anything."""

    @staticmethod
    def of(expert_ids_Nk: jax.Array, num_experts: int, parts: int) -> _Rounds:
        """Plan the rounds. expert_ids_Nk: counted from the device's first expert; ids outside belong to other
        devices."""
        A = expert_ids_Nk.size
        rows = math.ceil(min(A, A / parts * SLACK))
        rows += -rows % _row_tile(rows, num_experts)
        flat = expert_ids_Nk.reshape(-1)
        key = jnp.where((flat >= 0) & (flat < num_experts), flat, num_experts)
        order = _order(key, num_experts + 1)
        ends = jnp.cumsum(jnp.bincount(key, length=num_experts + 1)[:num_experts]).astype(jnp.int32)
        rounds = -(-A // rows)
        needed = rounds if rounds == 1 else -(-ends[-1] // rows)
        return _Rounds(jnp.pad(order, (0, rounds * rows - A)), ends, rows, needed)

    def __call__(self, i: jax.Array | int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Round `i`: assignments `[R]`, which of them hold anything `[R]`, and how many each expert has `[E]`."""
        start = i * self.rows
        order = jax.lax.dynamic_slice_in_dim(self.order_A, start, self.rows)
        ends = jnp.clip(self.ends_E - start, 0, self.rows)
        return order, jnp.arange(self.rows) < ends[-1], jnp.diff(ends, prepend=0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sum_over_experts(
    parts: int, x_ND: jax.Array, weights_Nk: jax.Array, experts: ExpertWeights, expert_ids_Nk: jax.Array
) -> jax.Array:
    """Return `[N, D]`, the part of a device that has one of `parts` equal shares of the experts; `expert_ids_Nk` counts
    from the first of them.

    The backward pass recomputes the experts' outputs: `k` rows per token would be by far the largest activation of a
    layer.
    """
    rounds, k = _Rounds.of(expert_ids_Nk, experts.num, parts), expert_ids_Nk.shape[-1]

    def one(i: jax.Array, out_ND: jax.Array) -> jax.Array:
        order, holds, sizes = rounds(i)
        y_RD = _gated(x_ND[order // k], weights_Nk.reshape(-1)[order], experts, sizes)
        return _add_rows(out_ND, order // k, holds, y_RD)

    return jax.lax.fori_loop(0, rounds.needed, one, jnp.zeros(x_ND.shape, jnp.float32)).astype(x_ND.dtype)


def _forward(
    parts: int, x_ND: jax.Array, weights_Nk: jax.Array, experts: ExpertWeights, expert_ids_Nk: jax.Array
) -> Any:
    return _sum_over_experts(parts, x_ND, weights_Nk, experts, expert_ids_Nk), (
        x_ND,
        weights_Nk,
        experts,
        expert_ids_Nk,
    )


def _backward(parts: int, kept: Any, d_out_ND: jax.Array) -> Any:
    x_ND, weights_Nk, experts, expert_ids_Nk = kept
    rounds, k = _Rounds.of(expert_ids_Nk, experts.num, parts), expert_ids_Nk.shape[-1]

    def one(i: jax.Array, sums: Any) -> Any:
        d_x, d_weights, d_experts = sums
        order, holds, sizes = rounds(i)
        weight = weights_Nk.reshape(-1)[order]
        _, pull = jax.vjp(functools.partial(_gated, sizes_E=sizes), x_ND[order // k], weight, experts)
        d_rows, d_weight, d_round = pull(d_out_ND[order // k])
        return (
            _add_rows(d_x, order // k, holds, d_rows),
            d_weights.at[order].add(jnp.where(holds, d_weight, 0).astype(jnp.float32)),
            jax.tree.map(jnp.add, d_experts, d_round),
        )

    zeros = (jnp.zeros(x_ND.shape, jnp.float32), jnp.zeros(weights_Nk.size, jnp.float32))
    d_x, d_weights, d_experts = jax.lax.fori_loop(
        0, rounds.needed, one, (*zeros, jax.tree.map(jnp.zeros_like, experts))
    )
    return d_x.astype(x_ND.dtype), d_weights.reshape(weights_Nk.shape).astype(weights_Nk.dtype), d_experts, None


_sum_over_experts.defvjp(_forward, _backward)


def _add_rows(out_ND: jax.Array, token_R: jax.Array, holds_R: jax.Array, rows_RD: jax.Array) -> jax.Array:
    """Add each row that holds an assignment to its token's row.

    Rows are sorted by token: TPU compilers would sort them anyway, and take far longer. Rows of no expert, which
    kernels leave unwritten, are dropped.
    """
    nowhere = len(out_ND)
    token_R = jnp.where(holds_R, token_R, nowhere)
    order = _order(token_R, nowhere + 1)
    rows_RD = rows_RD[order].astype(jnp.float32)
    return out_ND.at[token_R[order]].add(rows_RD, indices_are_sorted=True, mode="drop")


def _order(key_A: jax.Array, bound: int) -> jax.Array:
    """Return the indices that sort `key_A`, integers below `bound`. The sort is stable where key and index fit into 32
    bits."""
    A = len(key_A)
    if A * bound < 2**32:  # one array to sort: a third of the compiler's time on TPU
        packed = jnp.sort(key_A.astype(jnp.uint32) * A + jnp.arange(A, dtype=jnp.uint32), stable=False)
        return (packed % A).astype(jnp.int32)
    return jnp.argsort(key_A)


def _gated(x_RD: jax.Array, weight_R: jax.Array, experts: ExpertWeights, sizes_E: jax.Array) -> jax.Array:
    """Apply each row's expert, times the row's weight. Rows are sorted by expert, `sizes_E` for each; rows after the
    last expert's are undefined."""
    matmul = functools.partial(grouped_matmul, sizes_E=sizes_E, layer=experts.layer)
    h_RF = jax.nn.silu(matmul(x_RD, experts.gate)) * matmul(x_RD, experts.up)
    return matmul(h_RF * weight_R[:, None], experts.down)  # weighted here, its gradient needs no product again


def grouped_matmul(x_RI: jax.Array, w_EIO: jax.Array, sizes_E: jax.Array, layer: Any = None) -> jax.Array:
    """Multiply rows sorted by expert, each by its expert's matrix: `[R, O]`. Rows after the last expert's are
    undefined.

    TPUs use megablox: `lax.ragged_dot` computes the gradient of the weights there as one dense product per expert.

    Args:
      layer: index of the layer if the weights are those of all layers, `[L, E, I, O]`. Not differentiable then.
    """
    args = (x_RI, w_EIO, sizes_E) if layer is None else (x_RI, w_EIO, sizes_E, layer)
    return jax.lax.platform_dependent(*args, tpu=_megablox, default=_ragged)


def _ragged(x_RI: jax.Array, w_EIO: jax.Array, sizes_E: jax.Array, layer: Any = None) -> jax.Array:
    w = w_EIO if layer is None else jax.lax.dynamic_index_in_dim(w_EIO, layer, keepdims=False)
    return jax.lax.ragged_dot(x_RI, w, sizes_E)


def _megablox(x_RI: jax.Array, w_EIO: jax.Array, sizes_E: jax.Array, layer: Any = None) -> jax.Array:
    tiling = functools.partial(_tiling, _row_tile(len(x_RI), len(sizes_E)))
    # the kernel takes the matrix at (expert - offset): with all layers' experts in one row, those of this layer
    offset = None if layer is None else -jnp.asarray(layer, jnp.int32) * len(sizes_E)
    return megablox.gmm(x_RI, w_EIO.reshape(-1, *w_EIO.shape[-2:]), sizes_E, x_RI.dtype, tiling, offset)


def _row_tile(rows: int, num_experts: int) -> int:
    few, many = ROW_TILES
    return many if rows >= many * num_experts else few


def _tiling(rows: int, m: int, k: int, n: int) -> tuple[int, int, int]:
    return rows, min(k, TILE), min(n, TILE)


# ---- how evenly they are used ---------------------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Load:
    """Sums over tokens, float32; those of several batches add up."""

    assigned_LE: jax.Array
    """Tokens that took each expert."""
    probs_LE: jax.Array
    """The router's probabilities."""
    entropy: jax.Array
    """Entropy of the router's probabilities, summed over tokens and all layers."""
    tokens: jax.Array
    """Number of tokens."""
    replayed: jax.Array
    """Number of tokens whose experts were prescribed instead of chosen by the router."""

    @staticmethod
    def of(mixtures: ExpertRouting, counted_BT: jax.Array, expert_ids_LBTk: jax.Array | None = None) -> Load:
        """Sum all layers over the tokens where `counted_BT` (bool) is True.

        expert_ids_LBTk: the prescribed experts; -1 where the router chose.
        """
        probs, counted = mixtures.probs_BTE, counted_BT.astype(jnp.float32)
        num_experts = probs.shape[-1]
        hits = jax.nn.one_hot(mixtures.expert_ids_BTk, num_experts, dtype=jnp.float32) * counted[..., None, None]
        entropy = -jnp.sum(jax.scipy.special.xlogy(probs, probs), axis=-1)
        replayed = jnp.zeros(()) if expert_ids_LBTk is None else jnp.sum(counted * (expert_ids_LBTk[0, ..., 0] >= 0))
        return Load(
            hits.sum((1, 2, 3)),
            jnp.sum(probs * counted[..., None], axis=(1, 2)),
            jax.lax.stop_gradient(jnp.sum(entropy * counted)),
            counted.sum(),
            replayed,
        )

    def balance_loss(self) -> jax.Array:
        """Switch Transformer's load-balancing loss (arXiv:2101.03961, equations 4 to 6) as `transformers` computes it,
        over the tokens of all layers together: E * sum over experts of (share of tokens that chose it, k in all) *
        (its mean probability). Its least value is `k`, at even use."""
        total = jnp.maximum(self.tokens * len(self.assigned_LE), 1)
        share = self.assigned_LE.sum(0) / total
        return self.assigned_LE.shape[1] * jnp.sum(share * (self.probs_LE.sum(0) / total))

    def metrics(self, routing: Routing) -> dict[str, jax.Array]:
        """Return the metrics by their names in `rolljax.metrics`."""
        tokens = jnp.maximum(self.tokens, 1)
        L = len(self.assigned_LE)
        return {
            "router/balance": self.balance_loss() / routing.per_token,
            "router/max_load_frac": jnp.max(self.assigned_LE) / tokens / routing.per_token,
            "router/entropy_nat": self.entropy / (tokens * L),
            "router/unused_n": jnp.sum(self.assigned_LE == 0).astype(jnp.float32),
            "router/replayed_frac": self.replayed / tokens,
        }
