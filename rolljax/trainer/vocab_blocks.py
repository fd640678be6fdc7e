"""The walk over a head's columns that `trainer.vocab` makes: blocks, scores, running sums, and gradients.

Heads are walked as `[S, V/S, D]`, S shards that a mesh may split, all shards at once: no block crosses a shard, every
running figure is one per shard, and the shards are merged in the end. Blocks are cut inside a shard, the last one
shorter. A gradient row of the head is complete after its block, so that it is rounded once and written once, in place.

Of rows `[B, T]` in which some positions alone are scored (`Pieces`), a block of columns meets only those.

Scores `z` are logits over the temperature, float32. Shapes as in `trainer.vocab`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from rolljax.errors import ConfigError
from rolljax.model.axes import COMPUTED_RULES, PARAM_RULES, constrain

BLOCK_BYTES = 32 * 2**20
"""Most bytes of one block of float32 logits, over all devices together."""
_LANES = 128
_UNSHARDED = (None, "embed")
"""Axes of a block of the head, which every device computes with in full: TPU compilers would otherwise pass parts of
hidden states, or of sums, around a ring of devices, which read far more memory than a block has."""
PIECES = 4
"""Parts of a row that may be left out."""
_LOWEST = -1e30  # a maximum of nothing that can still be subtracted from
_UNROLL = 8

Carry = TypeVar("Carry")


class Blocks(NamedTuple):
    """The static parameters of a walk over a head."""

    shards: int
    block_bytes: int
    entropy_grad: bool = False

    def check(self, vocab: int) -> None:
        if self.shards < 1 or vocab % self.shards:
            raise ConfigError(
                f"does not divide the vocabulary of {vocab}",
                setting="shards",
                value=self.shards,
                remedy="a divisor of the head's first dimension",
            )

    def size(self, hidden: jax.Array, width: int, logits: int = 1, pieces: Pieces | None = None) -> int:
        """Return the columns of a block in each shard of `width` columns; only the last block may have fewer.

        `logits`: number of blocks of logits that are held at a time. `pieces`: of the rows, if they are walked.
        """
        parts = 1 if pieces is None else PIECES
        column_bytes = 4 * logits * self.shards * math.prod(hidden.shape[:-1]) // parts
        if column_bytes * width <= self.block_bytes:
            return width
        most = max(self.block_bytes // (column_bytes * _LANES), 1) * _LANES
        even = -(-width // -(-width // most))  # as few blocks, of about the same size
        return min(-(-even // _LANES) * _LANES, width)

    def by_shard(self, head_VD: jax.Array) -> jax.Array:
        """Return `[S, V/S, D]`, or the head itself if it is one shard: CPU compilers are slow with axes of size 1."""
        return head_VD if self.shards == 1 else head_VD.reshape(self.shards, -1, head_VD.shape[1])

    def map_shards(self, of_shard: Callable[..., Any], *args: Any) -> Any:
        """Compute `of_shard(first token id, *args of the shard)` for all shards at once. Arguments and results have the
        leading axes that `by_shard` gives."""
        if self.shards == 1:
            return of_shard(0, *args)
        width = jax.tree.leaves(args)[0].shape[1]
        return jax.vmap(of_shard)(jnp.arange(self.shards) * width, *args)

    def sum_shards(self, x: jax.Array) -> jax.Array:
        """Sum over shards."""
        return x.sum(0) if self.shards > 1 else x


def walk(width: int, size: int, step: Callable[[Carry, Any, int], Carry], carry: Carry) -> Carry:
    """Fold `step(carry, first column, columns)` over all blocks of a shard."""
    full = width // size
    carry = lax.fori_loop(0, full, lambda i, c: step(c, i * size, size), carry) if full > 1 else step(carry, 0, size)
    return step(carry, full * size, width - full * size) if width > full * size else carry


class Pieces(NamedTuple):
    """Rows `[B, T]` in another order, the scored positions of each first, in pieces that a walk takes until no row has
    any left."""

    mask: jax.Array
    """`[B, T]` bool, the scored positions."""
    position: jax.Array
    """`[B, T]` int32: position of each place in the new order."""
    place: jax.Array
    """`[B, T]` int32: place of each position."""
    num: jax.Array
    """Number of pieces with a scored position in any row."""

    @classmethod
    def of(cls, mask: jax.Array) -> Pieces | None:
        """Return the pieces of rows; None if there are none: T is no multiple of their number."""
        length = mask.shape[1]
        if length % PIECES:
            return None
        count = mask.sum(1)
        place = jnp.where(mask, jnp.cumsum(mask, 1), count[:, None] + jnp.cumsum(~mask, 1)) - 1
        # a sort stays inside its row; a scatter would send indices to all devices
        position = jnp.argsort(~mask, axis=1, stable=True)
        return cls(mask, position, place, -(-count.max() // (length // PIECES)))

    def sort(self, x: jax.Array) -> jax.Array:
        """Return `x [B, T, ...]` in the new order."""
        return _take(x, self.position)

    def unsort(self, x: jax.Array) -> jax.Array:
        """Return `x [B, T, ...]` in the old order, with 0 where nothing is scored."""
        found = _take(x, self.place)
        return jnp.where(self.mask.reshape(self.mask.shape + (1,) * (x.ndim - 2)), found, 0)


def _take(x: jax.Array, index_BT: jax.Array) -> jax.Array:
    return jnp.take_along_axis(x, index_BT.reshape(index_BT.shape + (1,) * (x.ndim - 2)), 1)


def walk_pieces(
    pieces: Pieces | None, step: Callable[[Carry, Any], tuple[Carry, Any]], carry: Carry, tokens: Any
) -> tuple[Carry, Any]:
    """Fold `step(carry, tokens)`, both of arrays `[B, T, ...]`, over the pieces; it returns the carry of the piece, and
    what is summed over all. Without pieces it is called once, with everything."""
    if pieces is None:
        return step(carry, tokens)
    size = pieces.place.shape[1] // PIECES

    def piece(i: Any, carry: Carry) -> tuple[Carry, Any]:
        return step(*jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, i * size, size, 1), (carry, tokens)))

    def one(state: tuple[Any, Carry, Any]) -> tuple[Any, Carry, Any]:
        i, carry, total = state
        part, addend = piece(i, carry)
        put = lambda old, new: lax.dynamic_update_slice_in_dim(old, new, i * size, 1)  # noqa: E731
        return i + 1, jax.tree.map(put, carry, part), jax.tree.map(jnp.add, total, addend)

    like = jax.eval_shape(functools.partial(piece, 0), carry)[1]
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
    # the second limit is for readers of the compiled program, who learn from it how often the loop may run
    left = lambda state: (state[0] < pieces.num) & (state[0] < PIECES)  # noqa: E731
    return lax.while_loop(left, one, (jnp.int32(0), carry, zeros))[1:]


class Logits(NamedTuple):
    """The transformation of `hidden @ head.T` into scores. Nothing here is differentiable."""

    temperature: jax.Array
    cap: jax.Array | None

    @classmethod
    def of(cls, temperature: jax.Array | float, softcap: float | None) -> Logits:
        if softcap is not None and softcap <= 0:
            raise ConfigError("must be above 0, or None", setting="softcap", value=softcap)
        return cls(jnp.float32(temperature), None if softcap is None else jnp.float32(softcap))

    def scores(self, hidden: jax.Array, block_VD: jax.Array) -> jax.Array:
        """Compute the logits over the temperature, `[..., V]`."""
        logits = jnp.einsum("...d,vd->...v", hidden, block_VD, preferred_element_type=jnp.float32)
        if self.cap is not None:
            logits = self.cap * jnp.tanh(logits / self.cap)
        return logits * (1 / self.temperature)

    def slope(self, z: jax.Array) -> jax.Array:
        """Return the derivative of scores `z` in the matrix product."""
        slope = 1 / self.temperature
        return slope if self.cap is None else slope * (1 - jnp.square(z * (self.temperature / self.cap)))


def head_block(head_VD: jax.Array, start: Any, size: int, dtype: Any, temperature: jax.Array) -> jax.Array:
    """Return rows of a head, cast to `dtype`; NaN for temperatures that are not positive.

    Compilers like to cast all of the head once, before the loop, and hold the copy. The barrier prevents this on CPU.
    TPU compilers drop barriers before they look for such casts; a factor of 1 that they cannot prove equal for every
    block keeps the cast in the loop.
    """
    head_VD, start = lax.optimization_barrier((head_VD, start))
    # sliced in the stored sharding: otherwise a head that needs no cast would be gathered first, and then sliced
    block_VD = constrain(lax.dynamic_slice_in_dim(head_VD, start, size), *_UNSHARDED, rules=PARAM_RULES)
    if block_VD.dtype != dtype:
        factor = jnp.where((start + 1) * temperature > 0, 1, jnp.nan).astype(block_VD.dtype)
        block_VD = (block_VD * factor).astype(dtype)
    return constrain(block_VD, *_UNSHARDED, rules=COMPUTED_RULES)


class Normaliser(NamedTuple):
    """Sums of `exp(z)` over the columns seen so far; `[...]` each."""

    peak: jax.Array
    """The largest z."""
    mass: jax.Array
    """Sum of `exp(z - peak)`."""
    tilt: jax.Array
    """Sum of `exp(z - peak) (z - peak)`."""

    @classmethod
    def start(cls, shape: tuple[int, ...]) -> Normaliser:
        zeros = jnp.zeros(shape, jnp.float32)
        return cls(zeros + _LOWEST, zeros, zeros)

    @classmethod
    def below_zero(cls, z: jax.Array) -> Normaliser:
        """Return the normaliser of scores `[..., V]` with a peak of 0."""
        mass = jnp.exp(z)
        return cls(jnp.zeros(z.shape[:-1], jnp.float32), mass.sum(-1), _dot(mass, z))

    def lift(self, peak: jax.Array) -> Normaliser:
        """Return the same sums relative to another peak."""
        scale = jnp.exp(self.peak - peak)
        return Normaliser(peak, scale * self.mass, scale * (self.tilt + (self.peak - peak) * self.mass))

    def add(self, z: jax.Array) -> Normaliser:
        """Add a block `[..., V]`."""
        peak = jnp.maximum(self.peak, z.max(-1))
        below = z - peak[..., None]
        mass = jnp.exp(below)
        old = self.lift(peak)
        return Normaliser(peak, old.mass + mass.sum(-1), old.tilt + _dot(mass, below))

    def merge_shards(self, blocks: Blocks) -> Normaliser:
        """Merge all shards."""
        if blocks.shards == 1:
            return self
        peak, mass, tilt = self.lift(self.peak.max(0))
        return Normaliser(peak, mass.sum(0), tilt.sum(0))

    def logp(self, z: jax.Array) -> jax.Array:
        """Return the log-probs of scores `[..., k]`. The peak is subtracted first: its difference to a large z is
        exact."""
        return (z - self.peak[..., None]) - jnp.log(self.mass)[..., None]

    def entropy(self) -> jax.Array:
        return jnp.log(self.mass) - self.tilt / self.mass


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """Sum of products over the last axis. Unlike a second sum over the same block, CPU compilers vectorise it."""
    return jnp.einsum("...v,...v->...", a, b, precision="highest")


def pick(z: jax.Array, first: Any, ids: jax.Array) -> jax.Array:
    """Return the scores of `ids [..., k]` from scores `[..., V]` of the tokens from `first` on, 0 for other tokens;
    `[..., k]`.

    It compares ids, as gathers of single numbers are slow on TPU.
    """
    columns_V = first + jnp.arange(z.shape[-1])

    def one(carry: None, token: jax.Array) -> tuple[None, jax.Array]:
        return carry, jnp.where(columns_V == token[..., None], z, 0).sum(-1)

    _, picked = lax.scan(one, None, jnp.moveaxis(ids, -1, 0), unroll=min(ids.shape[-1], _UNROLL))
    return jnp.moveaxis(picked, 0, -1)


def scatter(values: jax.Array, first: Any, size: int, ids: jax.Array) -> jax.Array:
    """Put `values [..., k]` in the columns of `ids [..., k]`, the transpose of `pick`; `[..., size]`."""
    columns_V = first + jnp.arange(size)

    def one(block: jax.Array, entry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        token, value = entry
        return block + jnp.where(columns_V == token[..., None], value[..., None], 0), None

    entries = jnp.moveaxis(ids, -1, 0), jnp.moveaxis(values, -1, 0)
    zeros = jnp.zeros((*ids.shape[:-1], size), jnp.float32)
    return lax.scan(one, zeros, entries, unroll=min(ids.shape[-1], _UNROLL))[0]


class TopK(NamedTuple):
    """The largest scores seen so far, largest first, and their tokens; `[..., k]` each."""

    z: jax.Array
    ids: jax.Array

    @classmethod
    def start(cls, shape: tuple[int, ...]) -> TopK:
        return cls(jnp.full(shape, -jnp.inf), jnp.zeros(shape, jnp.int32))

    def best(self, k: int) -> TopK:
        """Return the best `k` of them."""
        z, columns = lax.top_k(self.z, k)
        return TopK(z, jnp.take_along_axis(self.ids, columns, -1))

    def add(self, z: jax.Array, first: Any) -> TopK:
        """Add scores `[..., V]` of the tokens from `first` on."""
        k = self.z.shape[-1]
        new, columns = lax.top_k(z, min(k, z.shape[-1]))
        return TopK(jnp.concatenate([self.z, new], -1), jnp.concatenate([self.ids, columns + first], -1)).best(k)

    def merge_shards(self, blocks: Blocks) -> TopK:
        """Merge all shards."""
        if blocks.shards == 1:
            return self
        k = self.z.shape[-1]
        return TopK(*(jnp.moveaxis(x, 0, -2).reshape(*x.shape[1:-1], -1) for x in self)).best(k)


class VocabScorer(NamedTuple):
    """Turns hidden states into scores."""

    hidden: jax.Array
    head_VD: jax.Array
    logits: Logits

    def scores(self, start: Any, size: int) -> jax.Array:
        block_VD = head_block(self.head_VD, start, size, self.hidden.dtype, self.logits.temperature)
        return self.logits.scores(self.hidden, block_VD)


def normalisers(blocks: Blocks, scorers: Sequence[VocabScorer], k: int) -> tuple[tuple[Normaliser, ...], TopK]:
    """Return every scorer's normaliser, and the `k` best scores of the last one. No gradient passes."""
    blocks.check(len(scorers[0].head_VD))
    hidden = scorers[0].hidden

    def of_shard(first: Any, *heads: jax.Array) -> tuple[tuple[Normaliser, ...], TopK]:
        def step(
            carry: tuple[tuple[Normaliser, ...], TopK], start: Any, size: int
        ) -> tuple[tuple[Normaliser, ...], TopK]:
            norms, best = carry
            zs = [r._replace(head_VD=head).scores(start, size) for r, head in zip(scorers, heads, strict=True)]
            norms = tuple(norm.add(z) for norm, z in zip(norms, zs, strict=True))
            return norms, best.add(zs[-1], first + start) if k else best

        width, lead = len(heads[0]), hidden.shape[:-1]
        start = (Normaliser.start(lead),) * len(scorers), TopK.start((*lead, k))
        return walk(width, blocks.size(hidden, width, len(scorers)), step, start)

    norms, best = blocks.map_shards(of_shard, *(blocks.by_shard(r.head_VD) for r in scorers))
    return tuple(norm.merge_shards(blocks) for norm in norms), best.merge_shards(blocks) if k else best


class KeptScores(NamedTuple):
    """All scores of a head of one shard, where the forward pass kept them."""

    below: jax.Array
    """Less the peak, `[..., V]`."""
    peak: jax.Array | None
    """`[..., 1]`; None where no slope asks for it."""


def score_gradients(
    blocks: Blocks,
    reader: VocabScorer,
    slope: Callable[..., jax.Array],
    kept: KeptScores | None,
    *others: Any,
    num_logits: int = 1,
    tokens: Any = (),
    pieces: Pieces | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Compute the gradients of hidden states and head.

    Args:
      slope: `(z, first column, first token id of the shard, tokens, *others of the shard)` to the loss's gradient in z;
        z is relative to its peak where scores were kept.
      others: as in `Blocks.map_shards`. num_logits: blocks of logits that are held at a time.
      tokens: arrays `[..., T, ...]` that the slope reads. pieces: of the rows, if hidden states and tokens are in its
        order; the gradient of hidden states is then in the old one.
    """
    hidden, head_VD, logits = reader

    def of_shard(first: Any, head_VD: jax.Array, *others: Any) -> tuple[jax.Array, jax.Array]:
        def step(carry: tuple[jax.Array, jax.Array], start: Any, size: int) -> tuple[jax.Array, jax.Array]:
            of_hidden, of_head = carry
            block = head_block(head_VD, start, size, hidden.dtype, logits.temperature)

            def of_piece(of_hidden: jax.Array, own: tuple[jax.Array, Any]) -> tuple[jax.Array, jax.Array]:
                hidden, tokens = own
                z = logits.scores(hidden, block) if kept is None else kept.below
                scores = z if kept is None or kept.peak is None else z + kept.peak
                dz = (slope(z, start, first, tokens, *others) * logits.slope(scores)).astype(hidden.dtype)
                of_hidden += jnp.einsum("...v,vd->...d", dz, block, preferred_element_type=jnp.float32)
                over = tuple(range(hidden.ndim - 1))
                rows = lax.dot_general(dz, hidden, ((over, over), ((), ())), preferred_element_type=jnp.float32)
                return of_hidden, rows

            of_hidden, rows = walk_pieces(pieces, of_piece, of_hidden, (hidden, tokens))
            rows = constrain(
                constrain(rows, *_UNSHARDED, rules=COMPUTED_RULES).astype(head_VD.dtype), *_UNSHARDED, rules=PARAM_RULES
            )
            return of_hidden, lax.dynamic_update_slice_in_dim(of_head, rows, start, axis=0)

        start = jnp.zeros(hidden.shape, jnp.float32), jnp.zeros_like(head_VD)
        return walk(len(head_VD), blocks.size(hidden, len(head_VD), num_logits, pieces), step, start)

    of_hidden, of_head = blocks.map_shards(of_shard, blocks.by_shard(head_VD), *others)
    of_hidden = blocks.sum_shards(of_hidden).astype(hidden.dtype)
    return of_hidden if pieces is None else pieces.unsort(of_hidden), of_head.reshape(head_VD.shape)
