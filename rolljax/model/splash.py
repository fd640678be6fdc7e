"""Attention of packed rows by JAX's splash kernels (Pallas, TPU), forward and backward.

In a packed row a token attends to two stretches of keys: its own branch up to itself, and the prompt that it shares
with its siblings. The kernels know equal ids and one comparison, which is either stretch but not both. So each stretch
is a separate call, and the log-sum-exps combine the two results. The backward pass of attention is a sum over keys once
the log-sum-exp of all of them is known, so the backward kernels run once for each stretch, with the combined output and
log-sum-exp.

Blocks in which no query attends to a key are found from the rows and skipped. The first sibling directly follows the
prompt and treats it as part of its own stretch, so rows without siblings pay nothing for sharing.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo

LANES = 128
"""Rows, and the parts that a mesh cuts them into, are multiples of this."""
BLOCKS = (512, 256, 128)
"""Queries, and keys, that a kernel takes at once: the first that fits."""
_MASKED = kernels.DEFAULT_MASK_VALUE
_Compare = Callable[[jax.Array, jax.Array], jax.Array] | None


class Queries(NamedTuple):
    """Properties of tokens as queries for the kernels, int32 `[B, T]`; indices count in the full row."""

    row_index: jax.Array
    run: jax.Array
    """Number of the token's stretch of keys. Every padding token has a number of its own below 0 and so attends only to
    itself."""
    run_start: jax.Array
    group: jax.Array
    """The token's segment if the token attends to a shared prompt, else -1."""
    prompt_start: jax.Array
    prompt_end: jax.Array
    after_prompt: jax.Array
    """Index that the token would have if its branch directly followed the prompt; distances to the prompt's tokens are
    measured from here."""


class Keys(NamedTuple):
    """Properties of tokens as keys for the kernels, int32 `[B, S]`."""

    run: jax.Array
    prompt: jax.Array
    """Segment of a prompt's tokens, -2 for others."""


def rows(segment_ids_BT: jax.Array, branch_ids_BT: jax.Array, positions_BT: jax.Array) -> tuple[Queries, Keys]:
    """Describe packed rows for the kernels; see `attention.packed_mask`. Branches are unbroken runs of a row."""
    segment, branch = (x.astype(jnp.int32) for x in (segment_ids_BT, branch_ids_BT))
    index = jnp.broadcast_to(jnp.arange(segment.shape[1], dtype=jnp.int32), segment.shape)
    stretch = jnp.maximum(branch, 1)

    def starts(*ids: jax.Array) -> jax.Array:
        changes = [jnp.concatenate([jnp.ones_like(x[:, :1], bool), x[:, 1:] != x[:, :-1]], 1) for x in ids]
        return functools.reduce(jnp.logical_or, changes)

    def latest(is_start: jax.Array) -> jax.Array:
        return jax.lax.cummax(jnp.where(is_start, index, 0), axis=1)

    padding, shares = segment == 0, stretch > 1
    new_run, new_segment = starts(segment, stretch), starts(segment)
    run = jnp.where(padding, -1 - index, jnp.cumsum(new_run, axis=1, dtype=jnp.int32))
    start = latest(new_segment)
    end = latest((branch > 0) & starts(segment, jnp.minimum(branch, 1)))
    queries = Queries(
        row_index=index,
        run=run,
        run_start=jnp.where(padding, index, latest(new_run)),
        group=jnp.where(shares, segment, -1),
        prompt_start=jnp.where(shares, start, 0),
        prompt_end=jnp.where(shares, end, 0),
        after_prompt=start + positions_BT - jnp.take_along_axis(positions_BT, start, 1),
    )
    return queries, Keys(run, jnp.where((branch == 0) & ~padding, segment, -2))


def mix(
    q_BTHC: jax.Array,
    k_BSKC: jax.Array,
    v_BSKC: jax.Array,
    queries: Queries,
    keys: Keys,
    on: jax.Array | bool = True,
    *,
    size: int | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Return the mixed values `[B, T, H, C]`. The queries may be a part of their rows; the keys are complete.

    Args:
      size, on: as in `attention.Window`.
      interpret: run the kernels as plain JAX, on any device.
    """
    kernel = _Kernel(size, interpret)
    q_BTHC = q_BTHC * jnp.asarray(q_BTHC.shape[-1] ** -0.5, q_BTHC.dtype)
    looks = kernel.looks(queries, keys, on)
    heads_first = tuple(x.swapaxes(1, 2) for x in (q_BTHC, k_BSKC, v_BSKC))
    one = lambda row: _mix(kernel, *row)  # noqa: E731
    return jax.lax.map(one, (*heads_first, looks)).swapaxes(1, 2)


class _Look(NamedTuple):
    """The keys visible to the queries of one row: keys `low` to `high - 1` with the query's id, limited by `bound`."""

    q_ids: jax.Array
    k_ids: jax.Array
    low: jax.Array
    high: jax.Array
    bound: jax.Array | None


@dataclasses.dataclass(frozen=True)
class _Behind:
    """Keys up to the query; `bound` is twice its index, and 1 more where there is a window."""

    size: int | None

    def __call__(self, bound: jax.Array, key: jax.Array) -> jax.Array:
        if self.size is None:
            return key <= bound
        index = bound >> 1
        return (key <= index) & ((index - key < self.size) | (bound & 1 == 0))


def _from_bound(bound: jax.Array, key: jax.Array) -> jax.Array:
    return key >= bound


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """The static parameters of a call. The kernels are those of `make_splash_mha`, which has no way to give them the
    log-sum-exp of other keys too."""

    size: int | None
    interpret: bool

    def looks(self, queries: Queries, keys: Keys, on: jax.Array | bool) -> tuple[_Look, _Look]:
        """Return the look at the own branch and the look at the shared prompt."""
        own_low, own_bound = queries.run_start, queries.row_index
        prompt_low, prompt_bound = queries.prompt_start, None
        if self.size is not None:
            on = jnp.asarray(on)
            own_low = jnp.where(on, jnp.maximum(own_low, queries.row_index - self.size + 1), own_low)
            own_bound = 2 * queries.row_index + on
            near = jnp.maximum(prompt_low, queries.after_prompt - self.size + 1)
            prompt_low = prompt_bound = jnp.where(on, near, prompt_low)
        own = _Look(queries.run, keys.run, own_low, queries.row_index + 1, own_bound)
        return own, _Look(queries.group, keys.prompt, prompt_low, queries.prompt_end, prompt_bound)

    def functions(self) -> tuple[_Compare, _Compare]:
        """Return the function that compares bounds with keys, for each look."""
        return _Behind(self.size), None if self.size is None else _from_bound

    def forward(self, function: _Compare, look: _Look, q: jax.Array, k: jax.Array, v: jax.Array) -> _PartialAttention:
        sizes = _sizes(q, k)
        found: Any = kernels._splash_attention_forward(
            look_blocks(look, sizes.block_q, sizes.block_kv),
            q,
            k,
            v,
            kernels.SegmentIds(look.q_ids, look.k_ids),
            sinks=None,
            mask_value=_MASKED,
            is_mqa=False,
            block_sizes=sizes,
            residual_checkpoint_name=None,
            save_residuals=True,
            mask_function=function,
            interpret=self.interpret,
        )
        out, (lse,) = found
        return _PartialAttention(out, jnp.where(lse > _MASKED / 2, lse, -jnp.inf))

    def backward(self, function: _Compare, look: _Look, saved: tuple, grad: jax.Array) -> tuple[jax.Array, ...]:
        q, k, v, out, lse = saved
        sizes = _sizes(q, k)
        info = look_blocks(look, sizes.block_q, sizes.block_kv)
        ids = kernels.SegmentIds(look.q_ids, look.k_ids)
        by_key = look_blocks(look, sizes.block_q, sizes.block_kv, by_key=True)
        saved = (q, k, v, ids, None, out, lse, info, by_key)
        grads = kernels._splash_attention_bwd(
            False, _MASKED, False, sizes, None, function, None, self.interpret, saved, grad
        )
        return grads[3:6]


class _PartialAttention(NamedTuple):
    """Mixed values `[H, T, C]` over some keys, and their log-sum-exp `[H, T]`: -inf where there are none."""

    mixed: jax.Array
    lse: jax.Array


def _sizes(q_HTC: jax.Array, k_KSC: jax.Array) -> kernels.BlockSizes:
    def largest(length: int) -> int:
        return next(size for size in BLOCKS if length % size == 0)

    q, k = largest(q_HTC.shape[1]), largest(k_KSC.shape[1])
    return kernels.BlockSizes(block_q=q, block_kv=k, block_q_dkv=q, block_kv_dkv=k, block_q_dq=q, block_kv_dq=k)


def look_blocks(look: _Look, block_q: int, block_k: int, *, by_key: bool = False) -> MaskInfo:
    """Return which blocks a kernel computes and, for each block that it skips, which block it needs next.

    by_key: the kernel walks over queries for each block of keys, not the other way round.
    """
    first = jnp.arange(0, len(look.k_ids), block_k, dtype=jnp.int32)
    low, high = (x.reshape(-1, block_q, 1) for x in (look.low, look.high))
    seen = ((low < first + block_k) & (high > first) & (low < high)).any(1)
    walk = seen.T if by_key else seen
    flat = walk.reshape(-1)
    last = flat.size - 1
    here = jnp.where(flat, jnp.arange(flat.size, dtype=jnp.int32), last)
    upcoming = jax.lax.cummin(here, reverse=True).reshape(walk.shape) % walk.shape[1]
    return MaskInfo(
        data_next=(upcoming.T if by_key else upcoming)[None],
        mask_next=None,
        block_mask=seen[None].astype(jnp.int32),
        partial_mask_blocks=None,
        q_sequence=look.bound,  # type: ignore[arg-type]
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mix(kernel: _Kernel, q: jax.Array, k: jax.Array, v: jax.Array, looks: tuple[_Look, ...]) -> jax.Array:
    return _mix_forward(kernel, q, k, v, looks)[0]


def _mix_forward(
    kernel: _Kernel, q: jax.Array, k: jax.Array, v: jax.Array, looks: tuple[_Look, ...]
) -> tuple[jax.Array, tuple]:
    parts = [kernel.forward(f, look, q, k, v) for f, look in zip(kernel.functions(), looks, strict=True)]
    lse = functools.reduce(jnp.logaddexp, [p.lse for p in parts])
    shares = [jnp.exp(p.lse - lse)[..., None] for p in parts]
    # a part without keys is NaN
    weighted = [jnp.where(share > 0, share * p.mixed, 0) for share, p in zip(shares, parts, strict=True)]
    mixed = checkpoint_name(functools.reduce(jnp.add, weighted).astype(q.dtype), "mixed")
    return mixed, (q, k, v, mixed, checkpoint_name(lse, "mixed"), looks)


def _mix_backward(kernel: _Kernel, saved: tuple, grad: jax.Array) -> tuple:
    *arrays, looks = saved
    parts = [kernel.backward(f, look, tuple(arrays), grad) for f, look in zip(kernel.functions(), looks, strict=True)]
    dq, dk, dv = (functools.reduce(jnp.add, each) for each in zip(*parts, strict=True))
    return dq, dk, dv, None


_mix.defvjp(_mix_forward, _mix_backward)
