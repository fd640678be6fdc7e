"""Log-probs, entropies and divergences over a vocabulary that is never held whole.

Logits of all positions over all columns are the largest array of a training step (T = 8192, V = 151,936: 5 GB in
float32). Here they exist one block of columns at a time: the forward pass walks the blocks once with a running maximum
and running sums, the backward pass computes every block again and adds up the gradients. Where all logits fit one
block, they are kept for the backward pass instead, and nothing is computed twice.

Heads are walked as `[S, V/S, D]`, S parts that a mesh may split, all parts at once: no block crosses a part, every
running figure is one per part, and the parts meet in the end. Blocks are cut inside a part, the last one shorter. A
gradient row of the head is complete after its block, so that it is rounded once and written once, in place.

Soft-capped logits (`softcap`) are `cap * tanh(logits / cap)`, before the temperature.

Shapes: `hidden [..., D]` in the computing dtype, with any leading axes (`...` is N, or B, T); `head [V, D]` in any
floating dtype, cast to the hidden states' dtype block by block; logits and all results float32, natural logs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import jax
import jax.numpy as jnp
from jax import lax

from rolljax.errors import ConfigError
from rolljax.model.axes import COMPUTED_RULES, PARAM_RULES, constrain

BLOCK_BYTES = 32 * 2**20
"""Most bytes of one block of float32 logits, over all devices together."""
_LANES = 128
_WHOLE = (None, "embed")
"""Axes of a block of the head. It is computed with whole: TPU compilers would otherwise pass parts of hidden states, or
of sums, around a ring of devices, which read far more memory than a block has."""
_LOWEST = -1e30  # a maximum of nothing that can still be subtracted from
_UNROLL = 8
_HEAD_K, _HEAD_MASS, _TIE = 64, 0.5, 1e-4  # of adaptive divergences
_REST = 1e-5

Kind = Literal["forward", "reverse", "js", "skewed", "adaptive"]
KINDS: tuple[Kind, ...] = get_args(Kind)

Carry = TypeVar("Carry")


def token_logp(
    hidden: jax.Array,
    head_VD: jax.Array,
    targets: jax.Array,
    temperature: jax.Array | float = 1.0,
    *,
    softcap: float | None = None,
    entropy_grad: bool = False,
    shards: int = 1,
    block_bytes: int = BLOCK_BYTES,
) -> tuple[jax.Array, jax.Array]:
    """Log-prob of every target under `softmax(hidden @ head.T / temperature)`, and that law's entropy.

    Differentiable in `hidden` and `head_VD` (whose gradient has the head's dtype), not in the temperature.

    Args:
      hidden: `[..., D]`. targets: `[...]` int, 0 to V - 1.
      temperature: scalar, above 0.
      softcap: what no logit passes, above 0; None: they stay as they are.
      entropy_grad: whether gradients flow through the entropy, too.
      shards: parts the head is walked in; a multiple of the mesh axis the vocabulary is split over.
      block_bytes: most bytes of a block of logits, over all devices.

    Returns:
      `(logp [...], entropy [...])`, float32, nats.

    Raises:
      ConfigError: `shards` does not divide V; a `softcap` of 0 or less.
    """
    cut, law = _Cut(shards, block_bytes, entropy_grad), _Logits.of(temperature, softcap)
    logp, entropy = _law(cut, hidden, head_VD, targets[..., None], law)
    return logp[..., 0], entropy if entropy_grad else lax.stop_gradient(entropy)


def logp_at(
    hidden: jax.Array,
    head_VD: jax.Array,
    ids: jax.Array,
    temperature: jax.Array | float = 1.0,
    *,
    softcap: float | None = None,
    shards: int = 1,
    block_bytes: int = BLOCK_BYTES,
) -> jax.Array:
    """Log-probs of several tokens per position; `ids [..., k]` in, `[..., k]` float32 out. As `token_logp`."""
    return _law(_Cut(shards, block_bytes, False), hidden, head_VD, ids, _Logits.of(temperature, softcap))[0]


def topk(
    hidden: jax.Array,
    head_VD: jax.Array,
    k: int,
    temperature: jax.Array | float = 1.0,
    *,
    softcap: float | None = None,
    shards: int = 1,
    block_bytes: int = BLOCK_BYTES,
) -> tuple[jax.Array, jax.Array]:
    """The `k` likeliest tokens per position, likeliest first (of equals the lower id), and their log-probs.

    What a teacher ships in place of its logits. No gradient; arguments otherwise as in `token_logp`.

    Returns:
      `(ids [..., k] int32, logp [..., k] float32)`.

    Raises:
      ConfigError: `k` is not in 1 to V.
    """
    if not 1 <= k <= len(head_VD):
        raise ConfigError(f"must be 1 to {len(head_VD)}, the size of the vocabulary", setting="k", value=k)
    cut, law = _Cut(shards, block_bytes), _Logits.of(temperature, softcap)
    norms, best = _norms(cut, [_Reader(lax.stop_gradient(hidden), lax.stop_gradient(head_VD), law)], k)
    return best.ids, norms[0].logp(best.z)


def divergence(
    hidden: jax.Array,
    head_VD: jax.Array,
    teacher_hidden: jax.Array,
    teacher_head_VE: jax.Array,
    kind: Kind = "forward",
    tau: jax.Array | float = 1.0,
    *,
    softcap: float | None = None,
    teacher_softcap: float | None = None,
    alpha: float = 0.1,
    shards: int = 1,
    block_bytes: int = BLOCK_BYTES,
) -> jax.Array:
    """Divergence of the student's law s from the teacher's t at every position, `tau^2 D(softmax(z/tau))`; nats.

    - forward: KL(t || s), arXiv 1503.02531 for the factor tau^2. reverse: KL(s || t).
    - js: half of KL(t || m) plus half of KL(s || m), with m the mean of both; at most ln 2.
    - skewed: KL(t || alpha t + (1 - alpha) s), skew KL of DistiLLM, arXiv 2402.03898; at most ln(1 / alpha).
    - adaptive: AKL, arXiv 2404.02657: `w KL(t || s) + (1 - w) KL(s || t)` with w the head's share of all `|t - s|`.
      The head is the fewest tokens that hold half of the teacher's mass; beyond 64 tokens it is the 64 likeliest, and
      tokens within 1e-4 nats of its last one belong to it. w passes no gradient.

    Gradients flow into `hidden` and `head_VD` only.

    Args:
      hidden: `[..., D]`. teacher_hidden: `[..., E]`, with a head `[V, E]` over the same vocabulary.
      tau: scalar temperature of both, above 0. softcap, teacher_softcap: as in `token_logp`.
      alpha: share of the teacher in the skewed mean.
      shards, block_bytes: as in `token_logp`; two blocks of logits share the bytes.

    Returns:
      `[...]` float32.

    Raises:
      ConfigError: unknown `kind`, `alpha` outside 0 to 1, vocabularies of different sizes.
    """
    if kind not in KINDS:
        raise ConfigError("is no divergence", setting="kind", value=kind, remedy=f"one of {', '.join(KINDS)}")
    if not 0 < alpha < 1:
        raise ConfigError("must lie between 0 and 1", setting="alpha", value=alpha)
    if len(head_VD) != len(teacher_head_VE):
        raise ConfigError(
            f"student and teacher differ in vocabulary: {len(head_VD)} and {len(teacher_head_VE)} tokens",
            setting="teacher_head",
            remedy="a teacher of the same tokenizer, its head cut to the student's rows",
        )
    law = _Divergence(_Cut(shards, block_bytes), kind, alpha)
    student, teacher = _Logits.of(tau, softcap), _Logits.of(tau, teacher_softcap)
    return _divergence(law, hidden, head_VD, student, teacher_hidden, teacher_head_VE, teacher)


def topk_divergence(
    logp: jax.Array, teacher_logp: jax.Array, remainder: Literal["renormalise", "bucket"] = "bucket"
) -> jax.Array:
    """KL(teacher || student) from the teacher's k likeliest tokens alone, `[..., k]` to `[...]`; nats.

    - renormalise: both laws over the k tokens only. Sees nothing of what the student says elsewhere.
    - bucket: all other tokens are one more outcome, on both sides; a lower bound of the full divergence. Remainders
      below 1e-5 count as 1e-5, as a float32 sum of probabilities knows no better.

    Taken from laws at a temperature tau, it wants a factor of tau^2, which is the caller's.

    Args:
      logp: the student's, of the same tokens (`logp_at`). Gradients flow here only.
      teacher_logp: the teacher's (`topk`); for "renormalise" scaled logits do as well.

    Raises:
      ConfigError: unknown `remainder`.
    """
    if remainder not in ("renormalise", "bucket"):
        raise ConfigError("must be 'renormalise' or 'bucket'", setting="remainder", value=remainder)

    def whole(logp: jax.Array) -> jax.Array:
        if remainder == "renormalise":
            return jax.nn.log_softmax(logp)
        rest = jnp.log(jnp.maximum(1 - jnp.exp(logp).sum(-1, keepdims=True), _REST))
        return jnp.concatenate([logp, rest], -1)

    t, s = whole(lax.stop_gradient(teacher_logp)), whole(logp)
    return (jnp.exp(t) * (t - s)).sum(-1)


class _Cut(NamedTuple):
    """What is static about a walk over a head."""

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

    def size(self, hidden: jax.Array, width: int, logits: int = 1) -> int:
        """Columns of a block in each of the parts, of `width` columns; all but the last block have as many.

        `logits`: how many blocks of logits are held at a time.
        """
        column_bytes = 4 * logits * self.shards * math.prod(hidden.shape[:-1])
        if column_bytes * width <= self.block_bytes:
            return width
        most = max(self.block_bytes // (column_bytes * _LANES), 1) * _LANES
        even = -(-width // -(-width // most))  # as few blocks, of about the same size
        return min(-(-even // _LANES) * _LANES, width)

    def parts(self, head_VD: jax.Array) -> jax.Array:
        """`[S, V/S, D]`, or the head itself if it is one part: CPU compilers are slow with axes of size 1."""
        return head_VD if self.shards == 1 else head_VD.reshape(self.shards, -1, head_VD.shape[1])

    def each(self, part: Callable[..., Any], *args: Any) -> Any:
        """`part(first token id, *args of the part)` for all parts at once; arguments and results as in `parts`."""
        if self.shards == 1:
            return part(0, *args)
        width = jax.tree.leaves(args)[0].shape[1]
        return jax.vmap(part)(jnp.arange(self.shards) * width, *args)

    def total(self, x: jax.Array) -> jax.Array:
        """Sum over parts."""
        return x.sum(0) if self.shards > 1 else x


def _walk(width: int, size: int, step: Callable[[Carry, Any, int], Carry], carry: Carry) -> Carry:
    """`step(carry, first column, columns)` over all blocks of a part."""
    full = width // size
    carry = lax.fori_loop(0, full, lambda i, c: step(c, i * size, size), carry) if full > 1 else step(carry, 0, size)
    return step(carry, full * size, width - full * size) if width > full * size else carry


class _Logits(NamedTuple):
    """What becomes of `hidden @ head.T`. Nothing here is differentiable."""

    temperature: jax.Array
    cap: jax.Array | None

    @classmethod
    def of(cls, temperature: jax.Array | float, softcap: float | None) -> _Logits:
        if softcap is not None and softcap <= 0:
            raise ConfigError("must be above 0, or None", setting="softcap", value=softcap)
        return cls(jnp.float32(temperature), None if softcap is None else jnp.float32(softcap))

    def scores(self, hidden: jax.Array, block_VD: jax.Array) -> jax.Array:
        """Logits over the temperature, `[..., V]`."""
        logits = jnp.einsum("...d,vd->...v", hidden, block_VD, preferred_element_type=jnp.float32)
        if self.cap is not None:
            logits = self.cap * jnp.tanh(logits / self.cap)
        return logits * (1 / self.temperature)

    def slope(self, z: jax.Array) -> jax.Array:
        """Derivative of scores `z` in the matrix product."""
        slope = 1 / self.temperature
        return slope if self.cap is None else slope * (1 - jnp.square(z * (self.temperature / self.cap)))


def _block(head_VD: jax.Array, start: Any, size: int, dtype: Any, temperature: jax.Array) -> jax.Array:
    """Rows of a head, cast; NaN for temperatures that are not positive.

    Compilers like to cast all of the head once, before the loop, and hold the copy. The barrier keeps CPU compilers
    from it. TPU compilers drop barriers before they look for such casts; a factor of 1 that they cannot know to be the
    same for every block keeps the cast in the loop.
    """
    head_VD, start = lax.optimization_barrier((head_VD, start))
    # first as it lies: or a head that needs no cast would be gathered, and then sliced
    block_VD = constrain(lax.dynamic_slice_in_dim(head_VD, start, size), *_WHOLE, rules=PARAM_RULES)
    if block_VD.dtype != dtype:
        factor = jnp.where((start + 1) * temperature > 0, 1, jnp.nan).astype(block_VD.dtype)
        block_VD = (block_VD * factor).astype(dtype)
    return constrain(block_VD, *_WHOLE, rules=COMPUTED_RULES)


class _Norm(NamedTuple):
    """Of `exp(z)` over the columns seen so far; `[...]` each."""

    peak: jax.Array
    """The largest z."""
    mass: jax.Array
    """Sum of `exp(z - peak)`."""
    tilt: jax.Array
    """Sum of `exp(z - peak) (z - peak)`."""

    @classmethod
    def start(cls, shape: tuple[int, ...]) -> _Norm:
        zeros = jnp.zeros(shape, jnp.float32)
        return cls(zeros + _LOWEST, zeros, zeros)

    @classmethod
    def below_zero(cls, z: jax.Array) -> _Norm:
        """Of scores `[..., V]` with a peak of 0."""
        mass = jnp.exp(z)
        return cls(jnp.zeros(z.shape[:-1], jnp.float32), mass.sum(-1), _dot(mass, z))

    def lift(self, peak: jax.Array) -> _Norm:
        """The same sums, taken from another peak."""
        scale = jnp.exp(self.peak - peak)
        return _Norm(peak, scale * self.mass, scale * (self.tilt + (self.peak - peak) * self.mass))

    def add(self, z: jax.Array) -> _Norm:
        """With a block `[..., V]` more."""
        peak = jnp.maximum(self.peak, z.max(-1))
        below = z - peak[..., None]
        mass = jnp.exp(below)
        old = self.lift(peak)
        return _Norm(peak, old.mass + mass.sum(-1), old.tilt + _dot(mass, below))

    def meet(self, cut: _Cut) -> _Norm:
        """All parts together."""
        if cut.shards == 1:
            return self
        peak, mass, tilt = self.lift(self.peak.max(0))
        return _Norm(peak, mass.sum(0), tilt.sum(0))

    def logp(self, z: jax.Array) -> jax.Array:
        """Log-probs of scores `[..., k]`. The peak goes first: its difference to a large z is exact."""
        return (z - self.peak[..., None]) - jnp.log(self.mass)[..., None]

    def entropy(self) -> jax.Array:
        return jnp.log(self.mass) - self.tilt / self.mass


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """Sum of products over the last axis. Unlike a second sum over the same block, CPU compilers vectorise it."""
    return jnp.einsum("...v,...v->...", a, b, precision="highest")


def _pick(z: jax.Array, first: Any, ids: jax.Array) -> jax.Array:
    """Of scores `[..., V]` of the tokens from `first` on, those of `ids [..., k]`, 0 for tokens elsewhere; `[..., k]`.

    By comparison, as gathers of single numbers are slow on TPU.
    """
    columns_V = first + jnp.arange(z.shape[-1])
    one = lambda carry, token: (carry, jnp.where(columns_V == token[..., None], z, 0).sum(-1))  # noqa: E731
    _, picked = lax.scan(one, None, jnp.moveaxis(ids, -1, 0), unroll=min(ids.shape[-1], _UNROLL))
    return jnp.moveaxis(picked, 0, -1)


def _place(values: jax.Array, first: Any, size: int, ids: jax.Array) -> jax.Array:
    """The transpose of `_pick`: `values [..., k]` in the columns of `ids [..., k]`; `[..., size]`."""
    columns_V = first + jnp.arange(size)

    def one(block: jax.Array, entry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        token, value = entry
        return block + jnp.where(columns_V == token[..., None], value[..., None], 0), None

    entries = jnp.moveaxis(ids, -1, 0), jnp.moveaxis(values, -1, 0)
    zeros = jnp.zeros((*ids.shape[:-1], size), jnp.float32)
    return lax.scan(one, zeros, entries, unroll=min(ids.shape[-1], _UNROLL))[0]


class _Best(NamedTuple):
    """The largest scores seen so far, largest first, and their tokens; `[..., k]` each."""

    z: jax.Array
    ids: jax.Array

    @classmethod
    def start(cls, shape: tuple[int, ...]) -> _Best:
        return cls(jnp.full(shape, -jnp.inf), jnp.zeros(shape, jnp.int32))

    def cut(self, k: int) -> _Best:
        """The best `k` of them."""
        z, at = lax.top_k(self.z, k)
        return _Best(z, jnp.take_along_axis(self.ids, at, -1))

    def add(self, z: jax.Array, first: Any) -> _Best:
        """With scores `[..., V]` of the tokens from `first` on."""
        k = self.z.shape[-1]
        new, at = lax.top_k(z, min(k, z.shape[-1]))
        return _Best(jnp.concatenate([self.z, new], -1), jnp.concatenate([self.ids, at + first], -1)).cut(k)

    def meet(self, cut: _Cut) -> _Best:
        """All parts together."""
        if cut.shards == 1:
            return self
        k = self.z.shape[-1]
        return _Best(*(jnp.moveaxis(x, 0, -2).reshape(*x.shape[1:-1], -1) for x in self)).cut(k)


class _Reader(NamedTuple):
    """Who turns hidden states into scores."""

    hidden: jax.Array
    head_VD: jax.Array
    logits: _Logits

    def scores(self, start: Any, size: int) -> jax.Array:
        block_VD = _block(self.head_VD, start, size, self.hidden.dtype, self.logits.temperature)
        return self.logits.scores(self.hidden, block_VD)


def _norms(cut: _Cut, readers: Sequence[_Reader], k: int) -> tuple[tuple[_Norm, ...], _Best]:
    """Every reader's norm, and the `k` best scores of the last one. No gradient passes."""
    cut.check(len(readers[0].head_VD))
    hidden = readers[0].hidden

    def part(first: Any, *heads: jax.Array) -> tuple[tuple[_Norm, ...], _Best]:
        def step(carry: tuple[tuple[_Norm, ...], _Best], start: Any, size: int) -> tuple[tuple[_Norm, ...], _Best]:
            norms, best = carry
            zs = [r._replace(head_VD=head).scores(start, size) for r, head in zip(readers, heads, strict=True)]
            norms = tuple(norm.add(z) for norm, z in zip(norms, zs, strict=True))
            return norms, best.add(zs[-1], first + start) if k else best

        width, lead = len(heads[0]), hidden.shape[:-1]
        start = (_Norm.start(lead),) * len(readers), _Best.start((*lead, k))
        return _walk(width, cut.size(hidden, width, len(readers)), step, start)

    norms, best = cut.each(part, *(cut.parts(r.head_VD) for r in readers))
    return tuple(norm.meet(cut) for norm in norms), best.meet(cut) if k else best


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _law(
    cut: _Cut, hidden: jax.Array, head_VD: jax.Array, ids: jax.Array, logits: _Logits
) -> tuple[jax.Array, jax.Array]:
    """`(log-probs at ids [..., k], entropy [...])`."""
    return _law_forward(cut, hidden, head_VD, ids, logits)[0]


def _law_forward(
    cut: _Cut, hidden: jax.Array, head_VD: jax.Array, ids: jax.Array, logits: _Logits
) -> tuple[tuple[jax.Array, jax.Array], tuple[Any, ...]]:
    cut.check(len(head_VD))

    def part(first: Any, head_VD: jax.Array) -> tuple[_Norm, jax.Array]:
        def step(carry: tuple[_Norm, jax.Array], start: Any, size: int) -> tuple[_Norm, jax.Array]:
            norm, picked = carry
            z = _Reader(hidden, head_VD, logits).scores(start, size)
            return norm.add(z), picked + _pick(z, first + start, ids)

        start = _Norm.start(ids.shape[:-1]), jnp.zeros(ids.shape, jnp.float32)
        return _walk(len(head_VD), cut.size(hidden, len(head_VD)), step, start)

    kept = None
    if cut.shards == 1 and cut.size(hidden, len(head_VD)) == len(head_VD):
        z = logits.scores(hidden, head_VD.astype(hidden.dtype))
        peak = z.max(-1, keepdims=True)
        below = z - peak
        kept = _Kept(below, None if logits.cap is None else peak)
        norm, picked = _Norm.below_zero(below), jnp.take_along_axis(below, ids, -1)
    else:
        norm, picked = cut.each(part, cut.parts(head_VD))
        norm = norm.meet(cut)
    out = norm.logp(cut.total(picked)), norm.entropy()
    return out, (hidden, head_VD, ids, logits, norm, kept)


def _law_backward(cut: _Cut, saved: tuple[Any, ...], grads: tuple[jax.Array, jax.Array]) -> tuple[Any, ...]:
    hidden, head_VD, ids, logits, norm, kept = saved
    of_logp, of_entropy = grads
    entropy, total = norm.entropy()[..., None], of_logp.sum(-1, keepdims=True)

    def slope(z: jax.Array, start: Any, first: Any) -> jax.Array:
        logp = norm.logp(z)
        weight = total + of_entropy[..., None] * (logp + entropy) if cut.entropy_grad else total
        return _place(of_logp, first + start, z.shape[-1], ids) - jnp.exp(logp) * weight

    return *_pull(cut, _Reader(hidden, head_VD, logits), slope, kept), None, None


_law.defvjp(_law_forward, _law_backward)


class _Kept(NamedTuple):
    """All scores of one part, where the forward pass kept them."""

    below: jax.Array
    """Less the peak, `[..., V]`."""
    peak: jax.Array | None
    """`[..., 1]`; None where no slope asks for it."""


def _pull(
    cut: _Cut,
    reader: _Reader,
    slope: Callable[..., jax.Array],
    kept: _Kept | None,
    *others: Any,
    blocks: int = 1,
) -> tuple[jax.Array, jax.Array]:
    """Gradients of hidden states and head.

    Args:
      slope: `(z, first column, first token id of the part, *others of the part)` to the loss's gradient in z; z is
        less its peak where scores were kept.
      others: as in `_Cut.each`. blocks: of logits, held at a time.
    """
    hidden, head_VD, logits = reader

    def part(first: Any, head_VD: jax.Array, *others: Any) -> tuple[jax.Array, jax.Array]:
        def step(carry: tuple[jax.Array, jax.Array], start: Any, size: int) -> tuple[jax.Array, jax.Array]:
            of_hidden, of_head = carry
            block = _block(head_VD, start, size, hidden.dtype, logits.temperature)
            z = logits.scores(hidden, block) if kept is None else kept.below
            whole = z if kept is None or kept.peak is None else z + kept.peak
            dz = (slope(z, start, first, *others) * logits.slope(whole)).astype(hidden.dtype)
            of_hidden += jnp.einsum("...v,vd->...d", dz, block, preferred_element_type=jnp.float32)
            over = tuple(range(hidden.ndim - 1))
            rows = lax.dot_general(dz, hidden, ((over, over), ((), ())), preferred_element_type=jnp.float32)
            rows = constrain(
                constrain(rows, *_WHOLE, rules=COMPUTED_RULES).astype(head_VD.dtype), *_WHOLE, rules=PARAM_RULES
            )
            return of_hidden, lax.dynamic_update_slice_in_dim(of_head, rows, start, axis=0)

        start = jnp.zeros(hidden.shape, jnp.float32), jnp.zeros_like(head_VD)
        return _walk(len(head_VD), cut.size(hidden, len(head_VD), blocks), step, start)

    of_hidden, of_head = cut.each(part, cut.parts(head_VD), *others)
    return cut.total(of_hidden).astype(hidden.dtype), of_head.reshape(head_VD.shape)


class _Divergence(NamedTuple):
    """What is static about a divergence."""

    cut: _Cut
    kind: Kind
    alpha: float

    def terms(self) -> tuple[Callable[[jax.Array, jax.Array], jax.Array], ...]:
        """Functions of the log-probs `(t, s)` of teacher and student at one token, to be summed over tokens."""

        def forward(t: jax.Array, s: jax.Array) -> jax.Array:
            return jnp.exp(t) * (t - s)

        def reverse(t: jax.Array, s: jax.Array) -> jax.Array:
            return jnp.exp(s) * (s - t)

        def js(t: jax.Array, s: jax.Array) -> jax.Array:
            mean = jnp.logaddexp(t, s) - math.log(2)
            return (forward(t, mean) + forward(s, mean)) / 2

        def skewed(t: jax.Array, s: jax.Array) -> jax.Array:
            return forward(t, jnp.logaddexp(t + math.log(self.alpha), s + math.log1p(-self.alpha)))

        match self.kind:
            case "adaptive":
                return forward, reverse
            case "forward":
                return (forward,)
            case "reverse":
                return (reverse,)
            case "js":
                return (js,)
            case "skewed":
                return (skewed,)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _divergence(
    law: _Divergence,
    hidden: jax.Array,
    head_VD: jax.Array,
    logits: _Logits,
    teacher_hidden: jax.Array,
    teacher_head_VE: jax.Array,
    teacher_logits: _Logits,
) -> jax.Array:
    return _divergence_forward(law, hidden, head_VD, logits, teacher_hidden, teacher_head_VE, teacher_logits)[0]


def _divergence_forward(
    law: _Divergence,
    hidden: jax.Array,
    head_VD: jax.Array,
    logits: _Logits,
    teacher_hidden: jax.Array,
    teacher_head_VE: jax.Array,
    teacher_logits: _Logits,
) -> tuple[jax.Array, tuple[Any, ...]]:
    """Two walks: what makes scores log-probs, then the terms."""
    cut, adaptive, terms = law.cut, law.kind == "adaptive", law.terms()
    student, teacher = _Reader(hidden, head_VD, logits), _Reader(teacher_hidden, teacher_head_VE, teacher_logits)
    norms, best = _norms(cut, [student, teacher], min(_HEAD_K, len(head_VD)) if adaptive else 0)
    lowest = _lowest_of_head(norms[1].logp(best.z)) if adaptive else None

    def part(first: Any, head_VD: jax.Array, teacher_head_VE: jax.Array) -> tuple[jax.Array, ...]:
        def step(carry: tuple[jax.Array, ...], start: Any, size: int) -> tuple[jax.Array, ...]:
            s = norms[0].logp(student._replace(head_VD=head_VD).scores(start, size))
            t = norms[1].logp(teacher._replace(head_VD=teacher_head_VE).scores(start, size))
            new = [x for term in terms for x in _value_and_slope(term, t, s)]
            if lowest is not None:
                gap = jnp.abs(jnp.exp(t) - jnp.exp(s))
                new += [gap, jnp.where(t >= lowest, gap, 0)]
            return tuple(old + x.sum(-1) for old, x in zip(carry, new, strict=True))

        zero = jnp.zeros(hidden.shape[:-1], jnp.float32)
        start = (zero,) * (2 * len(terms) + 2 * adaptive)
        return _walk(len(head_VD), cut.size(hidden, len(head_VD), 2), step, start)

    sums = [cut.total(x) for x in cut.each(part, cut.parts(head_VD), cut.parts(teacher_head_VE))]
    shares: tuple[jax.Array, ...] = (jnp.ones_like(sums[0]),)
    if adaptive:
        *sums, gap, head_gap = sums
        share = jnp.where(gap > 0, head_gap / jnp.where(gap > 0, gap, 1), 0.5)
        shares = share, 1 - share
    value = sum(share * x for share, x in zip(shares, sums[::2], strict=True))
    total = sum(share * x for share, x in zip(shares, sums[1::2], strict=True))
    return jnp.square(logits.temperature) * value, (student, teacher, norms, shares, total)


def _divergence_backward(law: _Divergence, saved: tuple[Any, ...], grad: jax.Array) -> tuple[Any, ...]:
    student, teacher, norms, shares, total = saved
    grad = (jnp.square(student.logits.temperature) * grad)[..., None]

    def slope(z: jax.Array, start: Any, first: Any, teacher_head_VE: jax.Array) -> jax.Array:
        s = norms[0].logp(z)
        t = norms[1].logp(teacher._replace(head_VD=teacher_head_VE).scores(start, z.shape[-1]))
        slopes = (_value_and_slope(term, t, s)[1] for term in law.terms())
        direct = sum(share[..., None] * x for share, x in zip(shares, slopes, strict=True))
        return grad * (direct - jnp.exp(s) * total[..., None])

    others = law.cut.parts(teacher.head_VD)
    return *_pull(law.cut, student, slope, None, others, blocks=2), None, None, None, None


_divergence.defvjp(_divergence_forward, _divergence_backward)


def _value_and_slope(term: Callable[..., jax.Array], t: jax.Array, s: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A term and its derivative in the student's log-prob."""
    return jax.jvp(lambda s: term(t, s), (s,), (jnp.ones_like(s),))


def _lowest_of_head(logp: jax.Array) -> jax.Array:
    """The least log-prob `[..., 1]` that belongs to the head, from the likeliest ones `[..., k]` in falling order."""
    mass = jnp.exp(logp)
    inside = jnp.cumsum(mass, -1) - mass < _HEAD_MASS
    return jnp.where(inside, logp, jnp.inf).min(-1, keepdims=True) - _TIE
