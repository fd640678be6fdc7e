"""Log-probs, entropies and divergences over a vocabulary whose logits are never all held.

Logits of all positions over all columns are the largest array of a training step (T = 8192, V = 151,936: 5 GB in
float32). Here they exist one block of columns at a time: the forward pass walks the blocks once with a running maximum
and running sums, the backward pass computes every block again and adds up the gradients. Where all logits fit one
block, they are kept for the backward pass instead, and nothing is computed twice.

Soft-capped logits (`softcap`) are `cap * tanh(logits / cap)`, before the temperature.

Shapes: `hidden [..., D]` in the computing dtype, with any leading axes (`...` is N, or B, T); `head [V, D]` in any
floating dtype, cast to the hidden states' dtype block by block; logits and all results float32, natural logs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import lax

from rolljax.errors import ConfigError
from rolljax.trainer.vocab_blocks import (
    BLOCK_BYTES,
    Blocks,
    KeptScores,
    Logits,
    Normaliser,
    Pieces,
    VocabScorer,
    head_block,
    normalisers,
    pick,
    scatter,
    score_gradients,
    walk,
    walk_pieces,
)

_HEAD_K, _HEAD_MASS, _TIE = 64, 0.5, 1e-4  # of adaptive divergences
_REST = 1e-5

Kind = Literal["forward", "reverse", "js", "skewed", "adaptive"]
KINDS: tuple[Kind, ...] = get_args(Kind)


def token_logp(
    hidden: jax.Array,
    head_VD: jax.Array,
    targets: jax.Array,
    temperature: jax.Array | float = 1.0,
    *,
    softcap: float | None = None,
    entropy_grad: bool = False,
    scored: jax.Array | None = None,
    shards: int = 1,
    block_bytes: int = BLOCK_BYTES,
) -> tuple[jax.Array, jax.Array]:
    """Compute the log-prob of every target under `softmax(hidden @ head.T / temperature)`, and the entropy of that
    distribution.

    Differentiable in `hidden` and `head_VD` (whose gradient has the head's dtype), not in the temperature.

    Args:
      hidden: `[..., D]`. targets: `[...]` int, 0 to V - 1.
      temperature: scalar, above 0.
      softcap: bound of the logits' absolute value, above 0; None: no bound.
      entropy_grad: whether gradients also flow through the entropy.
      scored: bool, where results are asked for, of rows `[B, T]` that no mesh splits along T; other results may be 0,
        without gradients. Where not all logits fit one block, the work follows the row with most such positions.
        None: everywhere.
      shards: number of parts of the head (`trainer.vocab_blocks`); a multiple of the mesh axis that splits the
        vocabulary.
      block_bytes: most bytes of a block of logits, over all devices.

    Returns:
      `(logp [...], entropy [...])`, float32, nats.

    Raises:
      ConfigError: `shards` does not divide V; a `softcap` of 0 or less.
    """
    blocks, scale = Blocks(shards, block_bytes, entropy_grad), Logits.of(temperature, softcap)
    logp, entropy = _logp_entropy(blocks, hidden, head_VD, targets[..., None], scale, scored)
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
    """Compute the log-probs of several tokens per position; `ids [..., k]` in, `[..., k]` float32 out. As
    `token_logp`."""
    blocks, scale = Blocks(shards, block_bytes, False), Logits.of(temperature, softcap)
    return _logp_entropy(blocks, hidden, head_VD, ids, scale, None)[0]


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
    """Return the `k` likeliest tokens per position, likeliest first (of equals the lower id), and their log-probs.

    A teacher sends these in place of its logits. No gradient; other arguments as in `token_logp`.

    Returns:
      `(ids [..., k] int32, logp [..., k] float32)`.

    Raises:
      ConfigError: `k` is not in 1 to V.
    """
    if not 1 <= k <= len(head_VD):
        raise ConfigError(f"must be 1 to {len(head_VD)}, the size of the vocabulary", setting="k", value=k)
    blocks, scale = Blocks(shards, block_bytes), Logits.of(temperature, softcap)
    norms, best = normalisers(blocks, [VocabScorer(lax.stop_gradient(hidden), lax.stop_gradient(head_VD), scale)], k)
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
    """Compute the divergence of the student's distribution s from the teacher's t per position, `tau^2
    D(softmax(z/tau))`; nats.

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
    settings = _Divergence(Blocks(shards, block_bytes), kind, alpha)
    student, teacher = Logits.of(tau, softcap), Logits.of(tau, teacher_softcap)
    return _divergence(settings, hidden, head_VD, student, teacher_hidden, teacher_head_VE, teacher)


def topk_divergence(
    logp: jax.Array, teacher_logp: jax.Array, remainder: Literal["renormalise", "bucket"] = "bucket"
) -> jax.Array:
    """Compute KL(teacher || student) from the teacher's k likeliest tokens alone, `[..., k]` to `[...]`; nats.

    - renormalise: both distributions over the k tokens only. It ignores the student's probability of other tokens.
    - bucket: all other tokens are one more outcome, on both sides; a lower bound of the full divergence. Remainders
      below 1e-5 count as 1e-5, the precision of a float32 sum of probabilities.

    For distributions at a temperature tau, the caller multiplies the result by tau^2.

    Args:
      logp: the student's, of the same tokens (`logp_at`). Gradients flow here only.
      teacher_logp: the teacher's (`topk`); for "renormalise" scaled logits do as well.

    Raises:
      ConfigError: unknown `remainder`.
    """
    if remainder not in ("renormalise", "bucket"):
        raise ConfigError("must be 'renormalise' or 'bucket'", setting="remainder", value=remainder)

    def outcomes(logp: jax.Array) -> jax.Array:
        if remainder == "renormalise":
            return jax.nn.log_softmax(logp)
        rest = jnp.log(jnp.maximum(1 - jnp.exp(logp).sum(-1, keepdims=True), _REST))
        return jnp.concatenate([logp, rest], -1)

    t, s = outcomes(lax.stop_gradient(teacher_logp)), outcomes(logp)
    return (jnp.exp(t) * (t - s)).sum(-1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _logp_entropy(
    blocks: Blocks, hidden: jax.Array, head_VD: jax.Array, ids: jax.Array, logits: Logits, scored: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Compute `(log-probs at ids [..., k], entropy [...])`."""
    return _logp_entropy_forward(blocks, hidden, head_VD, ids, logits, scored)[0]


def _logp_entropy_forward(
    blocks: Blocks, hidden: jax.Array, head_VD: jax.Array, ids: jax.Array, logits: Logits, scored: jax.Array | None
) -> tuple[tuple[jax.Array, jax.Array], tuple[Any, ...]]:
    blocks.check(len(head_VD))
    keeps = blocks.shards == 1 and blocks.size(hidden, len(head_VD)) == len(head_VD)
    pieces = None if keeps or scored is None else Pieces.of(scored)
    if pieces is not None:
        hidden, ids = pieces.sort(hidden), pieces.sort(ids)

    def of_shard(first: Any, head_VD: jax.Array) -> tuple[Normaliser, jax.Array]:
        def step(carry: tuple[Normaliser, jax.Array], start: Any, size: int) -> tuple[Normaliser, jax.Array]:
            block = head_block(head_VD, start, size, hidden.dtype, logits.temperature)

            def of_piece(
                carry: tuple[Normaliser, jax.Array], own: tuple[jax.Array, jax.Array]
            ) -> tuple[tuple[Normaliser, jax.Array], tuple[()]]:
                (norm, picked), (hidden, ids) = carry, own
                z = logits.scores(hidden, block)
                return (norm.add(z), picked + pick(z, first + start, ids)), ()

            return walk_pieces(pieces, of_piece, carry, (hidden, ids))[0]

        start = Normaliser.start(ids.shape[:-1]), jnp.zeros(ids.shape, jnp.float32)
        return walk(len(head_VD), blocks.size(hidden, len(head_VD), pieces=pieces), step, start)

    kept = None
    if keeps:
        z = logits.scores(hidden, head_VD.astype(hidden.dtype))
        peak = z.max(-1, keepdims=True)
        below = z - peak
        kept = KeptScores(below, None if logits.cap is None else peak)
        norm, picked = Normaliser.below_zero(below), jnp.take_along_axis(below, ids, -1)
    else:
        norm, picked = blocks.map_shards(of_shard, blocks.by_shard(head_VD))
        norm = norm.merge_shards(blocks)
    out = norm.logp(blocks.sum_shards(picked)), norm.entropy()
    if pieces is not None:
        out = pieces.unsort(out[0]), pieces.unsort(out[1])
    return out, (hidden, head_VD, ids, logits, norm, kept, pieces)


def _logp_entropy_backward(
    blocks: Blocks, saved: tuple[Any, ...], grads: tuple[jax.Array, jax.Array]
) -> tuple[Any, ...]:
    hidden, head_VD, ids, logits, norm, kept, pieces = saved
    of_logp, of_entropy = grads
    if pieces is not None:
        of_logp = pieces.sort(jnp.where(pieces.mask[..., None], of_logp, 0))
        of_entropy = pieces.sort(jnp.where(pieces.mask, of_entropy, 0))
    tokens = norm, norm.entropy()[..., None], of_logp.sum(-1, keepdims=True), of_logp, of_entropy, ids

    def slope(z: jax.Array, start: Any, first: Any, tokens: tuple[Any, ...]) -> jax.Array:
        norm, entropy, total, of_logp, of_entropy, ids = tokens
        logp = norm.logp(z)
        weight = total + of_entropy[..., None] * (logp + entropy) if blocks.entropy_grad else total
        return scatter(of_logp, first + start, z.shape[-1], ids) - jnp.exp(logp) * weight

    reader = VocabScorer(hidden, head_VD, logits)
    return *score_gradients(blocks, reader, slope, kept, tokens=tokens, pieces=pieces), None, None, None


_logp_entropy.defvjp(_logp_entropy_forward, _logp_entropy_backward)


class _Divergence(NamedTuple):
    """The static parameters of a divergence."""

    blocks: Blocks
    kind: Kind
    alpha: float

    def terms(self) -> tuple[Callable[[jax.Array, jax.Array], jax.Array], ...]:
        """Return functions of the log-probs `(t, s)` of teacher and student at one token, to be summed over tokens."""

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
    settings: _Divergence,
    hidden: jax.Array,
    head_VD: jax.Array,
    logits: Logits,
    teacher_hidden: jax.Array,
    teacher_head_VE: jax.Array,
    teacher_logits: Logits,
) -> jax.Array:
    return _divergence_forward(settings, hidden, head_VD, logits, teacher_hidden, teacher_head_VE, teacher_logits)[0]


def _divergence_forward(
    settings: _Divergence,
    hidden: jax.Array,
    head_VD: jax.Array,
    logits: Logits,
    teacher_hidden: jax.Array,
    teacher_head_VE: jax.Array,
    teacher_logits: Logits,
) -> tuple[jax.Array, tuple[Any, ...]]:
    """Walk over the vocabulary twice: first for the normalisers, then for the terms."""
    blocks, adaptive, terms = settings.blocks, settings.kind == "adaptive", settings.terms()
    student, teacher = (
        VocabScorer(hidden, head_VD, logits),
        VocabScorer(teacher_hidden, teacher_head_VE, teacher_logits),
    )
    norms, best = normalisers(blocks, [student, teacher], min(_HEAD_K, len(head_VD)) if adaptive else 0)
    lowest = _lowest_of_head(norms[1].logp(best.z)) if adaptive else None

    def of_shard(first: Any, head_VD: jax.Array, teacher_head_VE: jax.Array) -> tuple[jax.Array, ...]:
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
        return walk(len(head_VD), blocks.size(hidden, len(head_VD), 2), step, start)

    sums = [
        blocks.sum_shards(x)
        for x in blocks.map_shards(of_shard, blocks.by_shard(head_VD), blocks.by_shard(teacher_head_VE))
    ]
    shares: tuple[jax.Array, ...] = (jnp.ones_like(sums[0]),)
    if adaptive:
        *sums, gap, head_gap = sums
        share = jnp.where(gap > 0, head_gap / jnp.where(gap > 0, gap, 1), 0.5)
        shares = share, 1 - share
    value = sum(share * x for share, x in zip(shares, sums[::2], strict=True))
    total = sum(share * x for share, x in zip(shares, sums[1::2], strict=True))
    return jnp.square(logits.temperature) * value, (student, teacher, norms, shares, total)


def _divergence_backward(settings: _Divergence, saved: tuple[Any, ...], grad: jax.Array) -> tuple[Any, ...]:
    student, teacher, norms, shares, total = saved
    grad = (jnp.square(student.logits.temperature) * grad)[..., None]

    def slope(z: jax.Array, start: Any, first: Any, tokens: Any, teacher_head_VE: jax.Array) -> jax.Array:
        s = norms[0].logp(z)
        t = norms[1].logp(teacher._replace(head_VD=teacher_head_VE).scores(start, z.shape[-1]))
        slopes = (_value_and_slope(term, t, s)[1] for term in settings.terms())
        direct = sum(share[..., None] * x for share, x in zip(shares, slopes, strict=True))
        return grad * (direct - jnp.exp(s) * total[..., None])

    others = settings.blocks.by_shard(teacher.head_VD)
    return *score_gradients(settings.blocks, student, slope, None, others, num_logits=2), None, None, None, None


_divergence.defvjp(_divergence_forward, _divergence_backward)


def _value_and_slope(term: Callable[..., jax.Array], t: jax.Array, s: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return a term and its derivative in the student's log-prob."""
    return jax.jvp(lambda s: term(t, s), (s,), (jnp.ones_like(s),))


def _lowest_of_head(logp: jax.Array) -> jax.Array:
    """Return the lowest log-prob `[..., 1]` that belongs to the head, from the likeliest ones `[..., k]` in falling
    order."""
    mass = jnp.exp(logp)
    inside = jnp.cumsum(mass, -1) - mass < _HEAD_MASS
    return jnp.where(inside, logp, jnp.inf).min(-1, keepdims=True) - _TIE
