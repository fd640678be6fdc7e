"""Log-probs, entropies and divergences over a blocked vocabulary, against the same figures from whole logits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolljax.errors import ConfigError
from rolljax.trainer import vocab, vocab_blocks

ONE = vocab.BLOCK_BYTES
TINY = 1  # bytes: blocks get their least size, 128 columns
CUTS = {  # leading shape, V, D, shards, block_bytes
    "one block": ((6,), 300, 16, 1, ONE),
    "one block of two parts": ((6,), 300, 16, 2, ONE),
    "blocks and a rest": ((6,), 301, 16, 1, TINY),
    "whole blocks": ((6,), 512, 16, 1, TINY),
    "rows and tokens": ((2, 3), 701, 16, 1, TINY),
    "parts with rests": ((2, 3), 903, 16, 3, TINY),
    "parts smaller than a block": ((6,), 303, 16, 3, TINY),
}


def law_of(hidden, head, temperature, cap=None):
    """Compute the log-probs of the whole vocabulary."""
    logits = jnp.einsum("...d,vd->...v", hidden, head.astype(hidden.dtype), preferred_element_type=jnp.float32)
    logits = logits if cap is None else cap * jnp.tanh(logits / cap)
    return jax.nn.log_softmax(logits / temperature)


def naive(hidden, head, ids, temperature, cap=None):
    logp = law_of(hidden, head, temperature, cap)
    return jnp.take_along_axis(logp, ids, -1), -jnp.sum(jnp.exp(logp) * logp, -1)


def inputs(lead, V, D, seed=0, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    hidden, head = rng.normal(size=(*lead, D)), rng.normal(size=(V, D))
    return jnp.asarray(hidden, dtype), jnp.asarray(head, jnp.float32), rng


@functools.partial(jax.jit, static_argnames=("kind", "tau", "alpha", "block_bytes"))
def divergence(*args, **kwargs):
    return vocab.divergence(*args, **kwargs)


def assert_close(got, want, atol=1e-5, rtol=1e-5):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        np.testing.assert_allclose(a.astype(jnp.float32), b.astype(jnp.float32), atol=atol, rtol=rtol)


def value_and_grads(fn, weights):
    """Return a function to the outputs of `fn`, and the gradients of their weighted sum for hidden and head."""

    def loss(hidden, head, *args):
        out = fn(hidden, head, *args)
        return sum(jnp.sum(w * x) for w, x in zip(weights, jax.tree.leaves(out), strict=True)), out

    return jax.jit(jax.grad(loss, (0, 1), has_aux=True))


@pytest.mark.parametrize("name", CUTS)
def test_token_logp_and_entropy_equal_those_of_whole_logits(name):
    lead, V, D, shards, block_bytes = CUTS[name]
    hidden, head, rng = inputs(lead, V, D)
    targets = jnp.asarray(rng.integers(0, V, lead)).at[..., 0].set(V - 1)
    weights = [jnp.asarray(rng.normal(size=lead), jnp.float32) for _ in range(2)]

    def blocked(hidden, head, temperature):
        cut = {"shards": shards, "block_bytes": block_bytes}
        return vocab.token_logp(hidden, head, targets, temperature, entropy_grad=True, **cut)

    def whole(hidden, head, temperature):
        logp, entropy = naive(hidden, head, targets[..., None], temperature)
        return logp[..., 0], entropy

    got, want = (value_and_grads(f, weights)(hidden, head, jnp.float32(1.4)) for f in (blocked, whole))
    assert_close(got, want)


@pytest.mark.parametrize("block_bytes", [ONE, TINY])
def test_no_gradient_passes_through_the_entropy_unless_asked_for(block_bytes):
    hidden, head, rng = inputs((5,), 256, 8)
    targets = jnp.asarray(rng.integers(0, 256, 5))

    def grads(wants, entropy_grad):
        def loss(hidden, head):
            return vocab.token_logp(hidden, head, targets, block_bytes=block_bytes, entropy_grad=entropy_grad)[
                wants
            ].sum()

        return jax.jit(jax.grad(loss, (0, 1)))(hidden, head)

    assert all(jnp.abs(g).max() > 0.01 for g in grads(1, True))
    assert all(not g.any() for g in grads(1, False))
    assert_close(grads(0, False), grads(0, True))


@given(width=st.integers(1, 2000), size=st.integers(1, 700))
def test_blocks_cover_every_column_once(width, size):
    size = min(size, width)
    blocks = []

    def step(algorithm_state, start, count):
        blocks.append(range(int(start), int(start) + count))
        return algorithm_state

    with jax.disable_jit():  # the loop in Python: nothing to compile
        vocab_blocks.walk(width, size, step, 0)
    assert [column for block in blocks for column in block] == list(range(width))
    assert {len(block) for block in blocks[:-1]} <= {size} and len(blocks[-1]) <= size


@given(
    positions=st.integers(1, 100_000),
    width=st.integers(1, 200_000),
    shards=st.sampled_from([1, 4]),
    block_bytes=st.integers(1, 2**30),
)
def test_blocks_stay_within_their_bytes(positions, width, shards, block_bytes):
    size = vocab_blocks.Blocks(shards, block_bytes).size(jax.ShapeDtypeStruct((positions, 8), jnp.float32), width)
    assert 1 <= size <= width
    assert size <= 128 or size * shards * positions * 4 <= block_bytes
    assert size == width or size % 128 == 0


@pytest.mark.sampled(2)
@pytest.mark.parametrize("k", [3, 19])
@pytest.mark.parametrize("name", ["one block", "blocks and a rest", "parts with rests"])
def test_log_probs_of_several_tokens(name, k):
    lead, V, D, shards, block_bytes = CUTS[name]
    hidden, head, rng = inputs(lead, V, D)
    ids = jnp.asarray(rng.integers(0, V, (*lead, k))).at[..., 1].set(0).at[..., 2].set(0)  # one of them twice
    weights = [jnp.asarray(rng.normal(size=ids.shape), jnp.float32)]
    got = value_and_grads(lambda h, w, t: vocab.logp_at(h, w, ids, t, shards=shards, block_bytes=block_bytes), weights)
    want = value_and_grads(lambda h, w, t: naive(h, w, ids, t)[0], weights)
    assert_close(got(hidden, head, 0.7), want(hidden, head, 0.7))


@pytest.mark.parametrize(
    ("name", "k"), [("one block", 5), ("parts smaller than a block", 150), ("parts with rests", 8)]
)
def test_likeliest_tokens(name, k):
    lead, V, D, shards, block_bytes = CUTS[name]
    hidden, head, _ = inputs(lead, V, D)
    head = head.at[V // 2].set(head[0]).at[V - 1].set(head[0])  # equals, in three parts
    hidden = hidden.at[0].set(head[0])  # whose likeliest tokens these are
    ids, logp = jax.jit(lambda h, w: vocab.topk(h, w, k, 0.9, shards=shards, block_bytes=block_bytes))(hidden, head)
    want_logp, want_ids = jax.lax.top_k(law_of(hidden, head, 0.9), k)
    np.testing.assert_array_equal(ids, want_ids)
    assert ids.dtype == jnp.int32 and ids.reshape(-1, k)[0, :3].tolist() == [0, V // 2, V - 1]
    np.testing.assert_allclose(logp, want_logp, atol=1e-5)


def test_divergences_by_hand():
    """Student logits (1, 0, -1), teacher's (2, 0, -2)."""
    logits = lambda *z: (jnp.array([z]), jnp.eye(3))  # noqa: E731
    args = *logits(1.0, 0.0, -1.0), *logits(2.0, 0.0, -2.0)
    p_s, p_t = np.array([0.665241, 0.244728, 0.090031]), np.array([0.866813, 0.117310, 0.015876])
    want = {
        "forward": 0.115611,
        "reverse": 0.160115,
        "js": 0.032433,
        # the head is the first token alone: its gap is half of all gaps, as the others give what it takes
        "adaptive": (0.115611 + 0.160115) / 2,
        "skewed": p_t @ np.log(p_t / (0.1 * p_t + 0.9 * p_s)),
    }
    for kind, value in want.items():
        np.testing.assert_allclose(divergence(*args, kind=kind), [value], atol=2e-6)
    twice = *logits(2.0, 0.0, -2.0), *logits(4.0, 0.0, -4.0)
    np.testing.assert_allclose(divergence(*twice, kind="forward", tau=2.0), [4 * 0.115611], atol=4e-6)


def naive_divergence(hidden, head, teacher_hidden, teacher_head, kind, tau, alpha, caps=(None, None)):
    s, t = law_of(hidden, head, tau, caps[0]), law_of(teacher_hidden, teacher_head, tau, caps[1])
    p_s, p_t = jnp.exp(s), jnp.exp(t)
    kl = lambda p, q: jnp.sum(p * (jnp.log(p) - jnp.log(q)), -1)  # noqa: E731
    if kind == "js":
        value = (kl(p_s, (p_s + p_t) / 2) + kl(p_t, (p_s + p_t) / 2)) / 2
    elif kind == "adaptive":
        falling, order = jax.lax.top_k(p_t, p_t.shape[-1])
        gap = jax.lax.stop_gradient(jnp.take_along_axis(jnp.abs(p_t - p_s), order, -1))
        inside = (jnp.cumsum(falling, -1) - falling < 0.5) & (jnp.arange(gap.shape[-1]) < 64)
        share = jnp.sum(gap * inside, -1) / jnp.sum(gap, -1)
        value = share * kl(p_t, p_s) + (1 - share) * kl(p_s, p_t)
    else:
        value = {"forward": kl(p_t, p_s), "reverse": kl(p_s, p_t), "skewed": kl(p_t, alpha * p_t + (1 - alpha) * p_s)}[
            kind
        ]
    return tau**2 * value


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ["one block", "parts with rests"])
@pytest.mark.parametrize("kind", vocab.KINDS)
def test_divergences_equal_those_of_whole_logits(kind, name):
    lead, V, D, shards, block_bytes = CUTS[name]
    hidden, head, rng = inputs(lead, V, D)
    teacher_hidden, teacher_head, _ = inputs(lead, V, D + 8, seed=1)
    hidden, teacher_hidden = hidden / 2, teacher_hidden / 2
    weights = [jnp.asarray(rng.normal(size=lead), jnp.float32)]
    cut = {"shards": shards, "block_bytes": block_bytes}
    got = value_and_grads(lambda h, w, *t: vocab.divergence(h, w, *t, kind, 1.7, alpha=0.3, **cut), weights)
    want = value_and_grads(lambda h, w, *t: naive_divergence(h, w, *t, kind, 1.7, 0.3), weights)
    got, want = (f(hidden, head, teacher_hidden, teacher_head) for f in (got, want))
    assert jnp.abs(want[1]).min() > 0.01
    assert_close(got, want)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "cap"), [("one block", 3.0), ("one block", 30.0), ("parts with rests", 3.0)])
def test_soft_capped_laws_equal_those_of_whole_logits(name, cap):
    """Of logits that go to 15: a cap of 3 bends most of them, one of 30 few."""
    lead, V, D, shards, block_bytes = CUTS[name]
    hidden, head, rng = inputs(lead, V, D)
    ids = jnp.asarray(rng.integers(0, V, (*lead, 3)))
    weights = [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in (lead, lead, ids.shape, (*lead, 5))]
    cut = {"shards": shards, "block_bytes": block_bytes, "softcap": cap}

    def blocked(hidden, head, temperature):
        logp, entropy = vocab.token_logp(hidden, head, ids[..., 0], temperature, entropy_grad=True, **cut)
        likeliest = vocab.topk(hidden, head, 5, temperature, **cut)[1]
        return logp, entropy, vocab.logp_at(hidden, head, ids, temperature, **cut), likeliest

    def whole(hidden, head, temperature):
        logp, entropy = naive(hidden, head, ids, temperature, cap)
        likeliest = jax.lax.top_k(law_of(hidden, head, temperature, cap), 5)[0]
        return logp[..., 0], entropy, logp, jax.lax.stop_gradient(likeliest)

    got, want = (value_and_grads(f, weights)(hidden, head, jnp.float32(1.4)) for f in (blocked, whole))
    assert_close(got, want)
    without = naive(hidden, head, ids, 1.4)[0]
    assert jnp.abs(want[1][2] - without).max() > 0.1  # the cap is felt


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("kind", "caps"), [("adaptive", (2.0, 5.0)), ("js", (2.0, None)), ("js", (None, 5.0))])
def test_student_and_teacher_may_differ_in_their_cap(kind, caps):
    lead, V, D, shards, _ = CUTS["parts with rests"]
    hidden, head, rng = inputs(lead, V, D)
    teacher_hidden, teacher_head, _ = inputs(lead, V, D + 8, seed=1)
    weights = [jnp.asarray(rng.normal(size=lead), jnp.float32)]
    how = {"softcap": caps[0], "teacher_softcap": caps[1], "shards": shards, "block_bytes": TINY}
    got = value_and_grads(lambda h, w, *t: vocab.divergence(h, w, *t, kind, 1.7, **how), weights)
    want = value_and_grads(lambda h, w, *t: naive_divergence(h, w, *t, kind, 1.7, 0.1, caps), weights)
    got, want = (f(hidden, head, teacher_hidden, teacher_head) for f in (got, want))
    assert jnp.abs(want[1]).min() > 0.01
    assert_close(got, want)


@pytest.mark.parametrize("scale", [0.0, 0.05])
def test_a_head_of_many_tokens_ends_at_the_64_likeliest(scale):
    hidden, head, _ = inputs((4,), 512, 16)
    teacher_hidden, teacher_head, _ = inputs((4,), 512, 16, seed=1)
    args = hidden / 2, head, teacher_hidden * scale, teacher_head
    got = divergence(*args, kind="adaptive", block_bytes=TINY)
    if scale:  # half of the mass lies on more than 200 tokens
        np.testing.assert_allclose(got, naive_divergence(*args, "adaptive", 1.0, 0.1), atol=1e-5)
    else:  # all tokens are ties: all of them are the head
        np.testing.assert_allclose(got, divergence(*args, kind="forward"), atol=1e-5)


@pytest.mark.parametrize("kind", vocab.KINDS)
def test_equal_laws_diverge_by_nothing_and_teachers_get_no_gradient(kind):
    hidden, head, _ = inputs((4,), 256, 8)

    def loss(hidden, head, teacher_hidden, teacher_head):
        return vocab.divergence(hidden, head, teacher_hidden, teacher_head, kind, block_bytes=TINY).sum()

    judge = jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3)))
    value, grads = judge(hidden, head, hidden, head)
    assert abs(value) < 1e-5 and all(jnp.abs(g).max() < 1e-5 for g in grads)
    value, grads = judge(hidden, head, 2 * hidden, head)
    assert value > 0.1 and all(jnp.abs(g).max() > 0.01 for g in grads[:2])
    assert not any(g.any() for g in grads[2:])


@pytest.mark.parametrize("head_dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("block_bytes", [ONE, TINY])
def test_bfloat16_in_float32_out(block_bytes, head_dtype):
    hidden, head, rng = inputs((6,), 301, 16, dtype=jnp.bfloat16)
    head = head.astype(head_dtype)
    targets = jnp.asarray(rng.integers(0, 301, 6))
    weights = [jnp.asarray(rng.normal(size=6), jnp.float32) for _ in range(2)]

    def blocked(hidden, head):
        return vocab.token_logp(hidden, head, targets, 0.8, block_bytes=block_bytes, entropy_grad=True)

    def whole(hidden, head):
        logp, entropy = naive(hidden, head, targets[:, None], 0.8)
        return logp[:, 0], entropy

    (got, values), (want, naive_values) = (value_and_grads(f, weights)(hidden, head) for f in (blocked, whole))
    assert_close(values, naive_values)
    assert values[0].dtype == values[1].dtype == jnp.float32
    assert_close(got, want, atol=0.02, rtol=0.02)


@pytest.fixture(scope="module")
def large():
    """Return scores up to 1e4: hidden states that are their logits `[8, V]`, a head that passes them on, and the
    logits."""
    rng = np.random.default_rng(0)
    logits = np.round(rng.uniform(-1e4, 1e4, (8, 256)))
    logits[0], logits[1, :2], logits[2] = 1e4, 1e4, -1e4
    logits[3, 7], logits[3, 8] = 1e4, 1e4 - 1
    return jnp.asarray(logits, jnp.float32), jnp.eye(256), logits


@pytest.mark.parametrize("block_bytes", [ONE, TINY])
def test_large_logits_stay_exact_and_finite(block_bytes, large):
    hidden, head, logits = large
    targets = logits.argmax(-1)
    targets[5] = logits[5].argmin()
    shifted = logits - logits.max(-1, keepdims=True)
    logp = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    entropy = -(np.exp(logp) * logp).sum(-1)

    def read(hidden, head):
        return vocab.token_logp(hidden, head, jnp.asarray(targets), block_bytes=block_bytes, entropy_grad=True)

    grads, (got_logp, got_entropy) = value_and_grads(read, [jnp.ones(8), jnp.ones(8)])(hidden, head)
    np.testing.assert_allclose(got_logp, logp[np.arange(8), targets], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(got_entropy, entropy, atol=1e-5)
    assert all(jnp.isfinite(g).all() for g in grads)


@pytest.mark.parametrize("kind", vocab.KINDS)
def test_divergences_of_large_logits_are_finite(kind, large):
    hidden, head, _ = large
    read = lambda h, w: vocab.divergence(h, w, hidden[::-1], head, kind, block_bytes=TINY)  # noqa: E731
    grads, value = value_and_grads(read, [jnp.ones(8)])(hidden, head)
    assert all(jnp.isfinite(x).all() for x in (value, *grads))
    assert (value >= -1e-6).all() and value.max() > 0.5


def test_topk_divergence_by_hand():
    """Of p_t = (.5, .3, .2) and p_s = (.4, .1, .5), the first two tokens are known."""
    t, s = jnp.log(jnp.array([[0.5, 0.3]])), jnp.log(jnp.array([[0.4, 0.1]]))
    bucket = 0.5 * np.log(0.5 / 0.4) + 0.3 * np.log(0.3 / 0.1) + 0.2 * np.log(0.2 / 0.5)
    np.testing.assert_allclose(vocab.topk_divergence(s, t), bucket, atol=1e-6)
    two = 0.625 * np.log(0.625 / 0.8) + 0.375 * np.log(0.375 / 0.2)
    np.testing.assert_allclose(vocab.topk_divergence(s, t, "renormalise"), two, atol=1e-6)
    np.testing.assert_allclose(vocab.topk_divergence(s + 3, t - 2, "renormalise"), two, atol=1e-6)


def test_the_bucket_makes_topk_a_lower_bound_that_more_tokens_raise():
    hidden, head, _ = inputs((16,), 300, 16)
    teacher_hidden, teacher_head, _ = inputs((16,), 300, 16, seed=1)
    args = hidden / 2, head, teacher_hidden / 2, teacher_head

    @functools.partial(jax.jit, static_argnums=0)
    def known(k, hidden, head, teacher_hidden, teacher_head):
        ids, teacher_logp = vocab.topk(teacher_hidden, teacher_head, k)
        return vocab.topk_divergence(vocab.logp_at(hidden, head, ids), teacher_logp)

    full, values = divergence(*args), [known(k, *args) for k in (2, 16, 128)]
    assert (values[0] < values[1]).all() and (values[1] < values[2]).all() and (values[2] < full).all()
    assert (values[2] > 0.8 * full).all()


def test_gradients_of_topk_are_finite_where_nothing_remains():
    """All of the teacher's mass, or all of the student's, on the k tokens."""
    sure, open_ = jnp.log(jnp.array([0.75, 0.25])), jnp.log(jnp.array([0.5, 0.25]))
    for teacher, student in ((sure, open_), (open_, sure), (sure, sure)):
        value, grad = jax.jit(jax.value_and_grad(vocab.topk_divergence))(student, teacher)
        assert jnp.isfinite(value) and jnp.isfinite(grad).all() and value >= 0


def test_what_cannot_be_is_refused():
    hidden, head, _ = inputs((2,), 10, 4)
    ids = jnp.zeros(2, jnp.int32)
    for call, setting in (
        (lambda: vocab.token_logp(hidden, head, ids, shards=3), "shards"),
        (lambda: vocab.divergence(hidden, head, hidden, head, shards=4), "shards"),
        (lambda: vocab.topk(hidden, head, 11), "k"),
        (lambda: vocab.token_logp(hidden, head, ids, softcap=0.0), "softcap"),
        (lambda: vocab.divergence(hidden, head, hidden, head[:9]), "teacher_head"),
        (lambda: vocab.divergence(hidden, head, hidden, head, "kl"), "kind"),
        (lambda: vocab.divergence(hidden, head, hidden, head, "skewed", alpha=1.0), "alpha"),
        (lambda: vocab.topk_divergence(hidden, hidden, "drop"), "remainder"),
    ):
        with pytest.raises(ConfigError) as error:
            call()
        assert error.value.setting == setting


@pytest.mark.parametrize("name", ["blocks", "parts", "rows of another length", "one block"])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_only_scored_positions_count(name, share):
    """Results and gradients are those of whole logits, as if no other position were there."""
    length, V, shards, block_bytes = {
        "blocks": (16, 301, 1, TINY),
        "parts": (16, 903, 3, TINY),
        "rows of another length": (15, 301, 1, TINY),
        "one block": (16, 301, 1, ONE),
    }[name]
    lead = 3, length
    hidden, head, rng = inputs(lead, V, 16)
    scored = jnp.asarray(rng.random(lead) < share).at[0].set(share == 1)
    targets = jnp.asarray(rng.integers(0, V, lead))
    weights = [jnp.where(scored, rng.normal(size=lead), 0) for _ in range(2)]
    cut = {"shards": shards, "block_bytes": block_bytes, "entropy_grad": True}

    def blocked(hidden, head):
        out = vocab.token_logp(hidden, head, targets, 1.4, scored=scored, **cut)
        return tuple(jnp.where(scored, x, 0) for x in out)

    def whole(hidden, head):
        logp, entropy = naive(hidden, head, targets[..., None], 1.4)
        return tuple(jnp.where(scored, x, 0) for x in (logp[..., 0], entropy))

    got, want = (value_and_grads(f, weights)(hidden, head) for f in (blocked, whole))
    assert_close(got, want)


def test_nothing_is_computed_in_pieces_of_rows_that_are_not_scored():
    """A NaN at every other position would reach the head's gradient. Each row has one piece of scored positions."""
    hidden, head, rng = inputs((3, 16), 301, 16)
    scored = jnp.asarray(rng.permuted(np.tile([True] * 4 + [False] * 12, (3, 1)), axis=1))
    targets = jnp.asarray(rng.integers(0, 301, (3, 16)))
    spoiled = jnp.where(scored[..., None], hidden, jnp.nan)

    def read(scored):
        return value_and_grads(
            lambda h, w: vocab.token_logp(h, w, targets, scored=scored, block_bytes=TINY),
            [jnp.where(scored, 1.0, 0)] * 2,
        )

    grads, out = read(scored)(spoiled, head)
    assert_close((grads, out), read(scored)(hidden, head))
    assert all(jnp.isfinite(x).all() and x.any() for x in (*grads, *out))
    assert not jnp.isfinite(read(scored.at[0].set(True))(spoiled, head)[0][1]).any(), "the test can fail"
