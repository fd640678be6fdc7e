"""Losses of tokens and pairs: values and, what counts, gradients with respect to the log-probs.

`coefficients` is the gradient of the objective, minus that of the loss: how much each token's log-prob is pushed up.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from rolljax.errors import ConfigError
from rolljax.trainer import objectives as o
from rolljax.trainer.kl import KlEstimator

B, T = 2, 8
NONE = jnp.zeros((B, T), jnp.int32)


def row(*values, dtype=jnp.float32):
    return jnp.array([values], dtype)


def coefficients(loss, logp):
    """Return the coefficients of `loss(logp)`, which has one entry per token."""
    return -jax.grad(lambda x: loss(x).sum())(logp)


def token_ratio(logp, anchor=None):
    anchor = jnp.zeros_like(logp) if anchor is None else anchor
    none = jnp.zeros(logp.shape, jnp.int32)
    return jnp.exp(o.log_ratio(logp, anchor, jnp.ones(logp.shape, bool), "token", none, none))


# segments

IDS = st.lists(st.integers(0, T), min_size=B * T, max_size=B * T).map(lambda x: np.array(x, np.int32).reshape(B, T))
BOOLS = st.lists(st.booleans(), min_size=B * T, max_size=B * T).map(lambda x: np.array(x).reshape(B, T))


def reals(low, high):
    numbers = st.lists(st.floats(low, high, width=32, allow_subnormal=False), min_size=B * T, max_size=B * T)
    return numbers.map(lambda x: np.array(x, np.float32).reshape(B, T))


def sum_loop(x, ids):
    out = np.zeros(x.shape)
    for b, t in np.ndindex(x.shape):
        if ids[b, t] > 0:
            out[b, t] = sum(x[b, u] for u in range(x.shape[1]) if ids[b, u] == ids[b, t])
    return out


def mean_loop(x, ids, mask):
    count = sum_loop(mask.astype(float), ids)
    return np.divide(sum_loop(np.where(mask, x, 0.0), ids), count, out=np.zeros(x.shape), where=count > 0)


segment_sum = jax.jit(o.segment_sum)
segment_mean = jax.jit(o.segment_mean)


@given(reals(-5, 5), IDS)
def test_segment_sum_agrees_with_a_loop(x, ids):
    np.testing.assert_allclose(segment_sum(x, ids), sum_loop(x.astype(float), ids), atol=1e-5)


@given(reals(-5, 5), IDS, BOOLS)
def test_segment_mean_agrees_with_a_loop_whatever_stands_outside_of_the_mask(x, ids, mask):
    want = mean_loop(x.astype(float), ids, mask)
    np.testing.assert_allclose(segment_mean(np.where(mask, x, np.nan), ids, mask), want, atol=1e-5)


mean_gradient = jax.jit(jax.grad(lambda x, ids, mask, g: jnp.sum(g * o.segment_mean(x, ids, mask))))


@given(reals(-5, 5), IDS, BOOLS)
def test_gradient_of_segment_mean(g, ids, mask):
    count = np.maximum(sum_loop(mask.astype(float), ids), 1)
    want = np.where(mask, sum_loop(g.astype(float), ids) / count, 0.0)
    got = mean_gradient(np.where(mask, 1.0, np.nan).astype(np.float32), ids, mask, g)
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_what_stands_at_id_0_stays_there():
    x, ids = row(1, jnp.nan, 3, 4), row(2, 0, 4, 2, dtype=jnp.int32)
    np.testing.assert_array_equal(o.segment_sum(x, ids), [[5, 0, 3, 5]])
    np.testing.assert_array_equal(jax.grad(lambda x: o.segment_sum(x, ids).sum())(x), [[2, 0, 1, 2]])


def test_rows_of_segments_stay_on_their_device():
    mesh = jax.make_mesh((8,), ("rows",))
    rows = NamedSharding(mesh, PartitionSpec("rows"))
    rng = np.random.default_rng(0)
    x, ids = rng.normal(size=(8, 16)).astype(np.float32), rng.integers(0, 17, (8, 16)).astype(np.int32)

    def loss_and_grad(x, ids):
        return jax.value_and_grad(lambda x: jnp.sum(jnp.sin(o.segment_sum(x, ids)), axis=None))(x)[1]

    compiled = jax.jit(loss_and_grad, in_shardings=(rows, rows), out_shardings=rows).lower(x, ids).compile()
    text = compiled.as_text() or ""
    assert "scatter" in text or "while" in text
    assert not [op for op in ("all-gather", "all-to-all", "all-reduce", "collective-permute") if op in text]
    want = sum_loop(np.cos(sum_loop(x.astype(float), ids)), ids)
    np.testing.assert_allclose(compiled(x, ids), want, atol=1e-4)


# ratios


def test_sequence_ratio_is_gspos():
    delta, ids = row(0.1, -0.2, 0.4, 9.0), row(3, 3, 3, 3, dtype=jnp.int32)
    mask = row(True, True, True, False, dtype=bool)
    anchor = row(-1.0, -2.0, -3.0, -1.0)
    got = jnp.exp(o.log_ratio(anchor + delta, anchor, mask, "geometric", ids, ids * 0))
    np.testing.assert_allclose(got[0, :3], [1.105171] * 3, atol=1e-6)
    tokens = jnp.exp(o.log_ratio(anchor + delta, anchor, mask, "token", ids, ids * 0))
    np.testing.assert_allclose(tokens, row(1.105171, 0.818731, 1.491825, 1.0), atol=1e-6)


def test_gspo_gradient_spreads_the_sequences_coefficient_over_its_tokens():
    anchor, ids = row(-1.0, -2.0, -3.0, -1.5, -0.5), row(1, 1, 1, 2, 2, dtype=jnp.int32)
    mask, adv = jnp.ones((1, 5), bool), row(1, 1, 1, -2, -2)

    def loss(logp):
        ratio = jnp.exp(o.log_ratio(logp, anchor, mask, "geometric", ids, ids * 0))
        return o.clipped(ratio, adv, 0.2, 0.2)

    got = coefficients(loss, anchor + row(0.1, -0.2, 0.4, 0.3, 0.1))
    np.testing.assert_allclose(got, row(1.105171, 1.105171, 1.105171, -2.442806, -2.442806), atol=1e-6)
    np.testing.assert_allclose(coefficients(loss, anchor + 0.5), row(0, 0, 0, -2 * math.exp(0.5), -2 * math.exp(0.5)))


IPA_LENGTHS = (2, 3, 1)
IPA_CHUNKS = row(1, 1, 2, 2, 2, 5, dtype=jnp.int32)
IPA_DELTA = row(0.1, 0.3, -0.2, 0.1, -0.5, 0.05)
IPA_MISMATCH = row(0, 0.1, 2, 1.5, 2, 0.01)
IPA_RETURNS = jnp.repeat(row(0.9025, 0.95, 1.0), np.array(IPA_LENGTHS), axis=1)


def ipa_chunks(delta):
    """Return the chunk's ratio at each of the six tokens, in a row with other tokens between the chunks."""
    places = np.array([0, 1, 3, 4, 5, 7])
    ids = jnp.zeros((1, T), jnp.int32).at[:, places].set(IPA_CHUNKS)
    logp = jnp.full((1, T), 9.0).at[:, places].set(delta)
    return np.exp(o.log_ratio(logp, jnp.zeros((1, T)), ids > 0, "turn", ids * 0, ids))[0, places]


def test_chunk_ratio_is_ipas():
    np.testing.assert_allclose(ipa_chunks(IPA_DELTA)[[0, 2, 5]], [1.221403, 0.818731, 1.051271], atol=1e-6)
    np.testing.assert_allclose(ipa_chunks(IPA_MISMATCH)[[0, 2, 5]], [1.051271, 6.254701, 1.010050], atol=1e-6)
    assert np.ptp(ipa_chunks(IPA_DELTA)[2:5]) == 0  # the same at every token of the chunk


@pytest.mark.parametrize(
    "limit, reward, want", [(5, 1, (0.9025, 0, 1)), (5, -1, (-0.9025, 0, -1)), (10, -1, (-0.9025, -0.777794, -1))]
)
def test_ipa_coefficients(limit, reward, want):
    keep = jnp.asarray(ipa_chunks(IPA_MISMATCH) <= limit, jnp.float32)[None]
    mask, ids = jnp.ones((1, 6), bool), IPA_CHUNKS

    def loss(logp):
        ratio = jnp.exp(o.log_ratio(logp, jnp.zeros((1, 6)), mask, "turn", ids * 0, ids))
        return keep * o.topr(ratio, reward * IPA_RETURNS, logp)

    got = coefficients(loss, IPA_DELTA)
    np.testing.assert_allclose(got[0], np.repeat(want, IPA_LENGTHS), atol=1e-6)


def test_a_long_chunks_ratio_is_geometric_not_the_product():
    delta, ids = jnp.full((1, 40), math.log(1.1)), jnp.full((1, 40), 40, jnp.int32)
    got = o.log_ratio(delta, jnp.zeros((1, 40)), ids > 0, "turn", ids * 0, ids)
    np.testing.assert_allclose(jnp.exp(got), np.full((1, 40), 1.1), rtol=1e-5)
    np.testing.assert_allclose(jnp.exp(got.sum()), 45.26, atol=5e-3)


@pytest.mark.parametrize("level", ["token", "turn", "geometric"])
def test_log_ratio_reads_nothing_outside_of_the_mask(level):
    mask, ids = row(True, False, True, True, dtype=bool), row(1, 1, 1, 2, dtype=jnp.int32)
    logp, anchor = row(-1.0, jnp.nan, -2.0, -3.0), row(-1.5, jnp.inf, -1.0, -1.0)

    def picked(logp, anchor):
        return jnp.sum(jnp.where(mask, o.log_ratio(logp, anchor, mask, level, ids, ids), 0.0))

    value, grads = jax.value_and_grad(picked, argnums=(0, 1))(logp, anchor)
    assert value == {"token": -2.5, "turn": -2.5, "geometric": -2.5}[level]
    np.testing.assert_array_equal(grads[0], [[1, 0, 1, 1]])
    np.testing.assert_array_equal(grads[1], np.zeros((1, 4)))


@given(reals(-20, 20), reals(-20, 0))
def test_token_ratios_are_exact_up_to_20_nats(delta, anchor):
    logp = anchor + delta
    got = np.array(token_ratio(jnp.array(logp), jnp.array(anchor)))
    np.testing.assert_allclose(got, np.exp(logp.astype(float) - anchor), rtol=1e-4)


def test_ratios_never_overflow_and_are_flat_beyond_the_limit():
    logp = row(-300.0, -20.0, 20.0, 300.0)
    got, slope = jax.value_and_grad(lambda x: token_ratio(x).sum())(logp)
    assert np.isfinite(got)
    np.testing.assert_allclose(slope, row(0, math.exp(-20), math.exp(20), 0), rtol=1e-5)


def test_unknown_names_are_refused():
    no_logp = NONE.astype(jnp.float32)
    with pytest.raises(ConfigError, match="token, turn, geometric, trajectory"):
        o.log_ratio(no_logp, no_logp, NONE == 0, "segment", NONE, NONE)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="k1, abs, k2, k3"):
        o.kl(no_logp, no_logp, "k4")  # type: ignore[arg-type]


# PPO

RHO = [0.5, 0.9, 1.1, 1.5, 4.0]
PPO = [
    # advantage, low, high, dual, objective, coefficients
    (+1, 0.2, 0.2, None, [0.5, 0.9, 1.1, 1.2, 1.2], [0.5, 0.9, 1.1, 0, 0]),
    (+1, 0.2, 0.28, None, [0.5, 0.9, 1.1, 1.28, 1.28], [0.5, 0.9, 1.1, 0, 0]),
    (-1, 0.2, 0.2, None, [-0.8, -0.9, -1.1, -1.5, -4], [0, -0.9, -1.1, -1.5, -4]),
    (-1, 0.2, 0.28, None, [-0.8, -0.9, -1.1, -1.5, -4], [0, -0.9, -1.1, -1.5, -4]),
    (-1, 0.2, 0.2, 3.0, [-0.8, -0.9, -1.1, -1.5, -3], [0, -0.9, -1.1, -1.5, 0]),
    (+1, 0.2, 0.2, 3.0, [0.5, 0.9, 1.1, 1.2, 1.2], [0.5, 0.9, 1.1, 0, 0]),
    (+1, None, None, 3.0, [0.5, 0.9, 1.1, 1.5, 4], [0.5, 0.9, 1.1, 1.5, 4]),
    (+2, None, None, None, [1, 1.8, 2.2, 3, 8], [1, 1.8, 2.2, 3, 8]),
    (-1, None, None, None, [-0.5, -0.9, -1.1, -1.5, -4], [-0.5, -0.9, -1.1, -1.5, -4]),
    (+1, None, 0.2, None, [0.5, 0.9, 1.1, 1.2, 1.2], [0.5, 0.9, 1.1, 0, 0]),
    (-1, 0.2, None, None, [-0.8, -0.9, -1.1, -1.5, -4], [0, -0.9, -1.1, -1.5, -4]),
    (0, 0.2, 0.2, None, [0, 0, 0, 0, 0], [0, 0, 0, 0, 0]),
]


@pytest.mark.parametrize("advantage, low, high, dual, objective, want", PPO)
def test_ppo_table(advantage, low, high, dual, objective, want):
    logp, adv = jnp.log(row(*RHO)), jnp.full((1, 5), advantage, jnp.float32)

    def loss(x):
        return o.clipped(token_ratio(x), adv, low, high, dual)

    np.testing.assert_allclose(-loss(logp), [objective], rtol=1e-5)
    np.testing.assert_allclose(coefficients(loss, logp), [want], rtol=1e-5, atol=1e-7)


def test_on_policy_the_gradient_is_the_advantage():
    adv, logp = row(-2, -1, 0, 1, 3), row(-1, -2, -3, -4, -5)
    got = coefficients(lambda x: o.clipped(token_ratio(x, logp), adv, 0.2, 0.2, 3.0), logp)
    np.testing.assert_array_equal(got, adv)


def test_clip_stats_mark_the_tokens_whose_gradient_clipping_ended():
    ratio = row(*RHO, *RHO, *RHO)
    adv = row(*[1] * 5, *[-1] * 5, *[0] * 5)
    got = o.clip_stats(ratio, adv, 0.2, 0.28)
    np.testing.assert_array_equal(got["policy/clip_high_frac"], row(0, 0, 0, 1, 1, *[0] * 10))
    np.testing.assert_array_equal(got["policy/clip_low_frac"], row(*[0] * 5, 1, 0, 0, 0, 0, *[0] * 5))
    assert set(got) == {"policy/clip_high_frac", "policy/clip_low_frac"}
    unbounded = o.clip_stats(ratio, adv, None, None)
    assert not any(x.any() for x in unbounded.values())


# off-policy corrections

OFF_POLICY = [
    # A, ratio, vanilla, ppo, tis, topr, cispo, cispo with the unified mask, kimi
    (+1, 0.50, 1, 0.5, 0.5, 1, 0.9, 0.9, 1.069315),
    (+1, 0.95, 1, 0.95, 0.95, 1, 0.95, 0.95, 1.005129),
    (+1, 1.05, 1, 1.05, 1, 1, 1.05, 1.05, 0.995121),
    (+1, 1.50, 1, 0, 1, 1, 1.1, 0, 0.959453),
    (-1, 0.50, -1, 0, -0.5, -0.5, -0.9, 0, -0.930685),
    (-1, 0.95, -1, -0.95, -0.95, -0.95, -0.95, -0.95, -0.994871),
    (-1, 1.50, -1, -1.5, -1, -1, -1.1, -1.1, -1.040547),
]
VARIANTS = {
    "vanilla": lambda ratio, adv, logp, anchor: o.vanilla(adv, logp),
    "ppo": lambda ratio, adv, logp, anchor: o.clipped(ratio, adv, 0.2, 0.2),
    "tis": lambda ratio, adv, logp, anchor: o.truncated_is(ratio, adv, logp),
    "topr": lambda ratio, adv, logp, anchor: o.topr(ratio, adv, logp),
    "cispo": lambda ratio, adv, logp, anchor: o.cispo(ratio, adv, logp, 0.1, 0.1),
    "cispo_mask": lambda ratio, adv, logp, anchor: o.cispo(ratio, adv, logp, 0.1, 0.1, unified_mask=True),
    "kimi": lambda ratio, adv, logp, anchor: o.kimi(adv, logp, anchor, 0.1),
}


@pytest.mark.parametrize("place, name", list(enumerate(VARIANTS, start=2)))
def test_off_policy_table(place, name):
    table = np.array(OFF_POLICY, np.float32)
    adv, anchor = jnp.array(table[None, :, 0]), row(-0.1, -1, -2, -3, -4, -5, -6)
    logp = anchor + jnp.log(table[None, :, 1])
    got = coefficients(lambda x: VARIANTS[name](token_ratio(x, anchor), adv, x, anchor), logp)
    np.testing.assert_allclose(got, table[None, :, place], atol=1e-6)


def test_bounds_weights_and_caps():
    logp, adv = jnp.log(row(0.5, 1.5, 4, 0.5, 1.5, 4)), row(2, 2, 2, -2, -2, -2)

    def c(loss):
        return coefficients(lambda x: loss(token_ratio(x), x), logp)

    np.testing.assert_allclose(c(lambda r, x: o.truncated_is(r, adv, x, cap=2.0)), row(1, 3, 4, -1, -3, -4), rtol=1e-5)
    weighted = c(lambda r, x: o.topr(r, adv, x, positive=0.5, negative=3.0, cap=1.2))
    np.testing.assert_allclose(weighted, row(1, 1, 1, -3, -7.2, -7.2), rtol=1e-5)
    no_floor = c(lambda r, x: o.cispo(r, adv, x, None, 0.28, unified_mask=True))
    np.testing.assert_allclose(no_floor, row(1, 0, 0, -1, -2.56, -2.56), rtol=1e-5)
    no_ceiling = c(lambda r, x: o.cispo(r, adv, x, 0.2, None, unified_mask=True))
    np.testing.assert_allclose(no_ceiling, row(1.6, 3, 8, 0, -3, -8), rtol=1e-5)


def test_decoupled_ppo_is_a_weight_times_clipped():
    prox, behaviour, adv = row(-1.1), row(-1.4), row(1.0)
    weight = jnp.minimum(token_ratio(prox, behaviour), 2.0)
    np.testing.assert_allclose(weight, [[1.349859]], atol=1e-6)
    np.testing.assert_allclose(token_ratio(row(-1.0), prox), [[1.105171]], atol=1e-6)

    def decoupled(logp):
        return weight * o.clipped(token_ratio(logp, prox), adv, 0.2, 0.2)

    def naive(logp):
        return o.clipped(token_ratio(logp, behaviour), adv, 0.2, 0.2)

    np.testing.assert_allclose(-decoupled(row(-1.0)), [[1.491825]], atol=1e-6)
    np.testing.assert_allclose(coefficients(decoupled, row(-1.0)), [[1.491825]], atol=1e-6)
    np.testing.assert_allclose(-naive(row(-1.0)), [[1.2]], atol=1e-6)
    assert coefficients(naive, row(-1.0)) == 0


@pytest.mark.parametrize("name", VARIANTS)
def test_nothing_flows_into_the_anchor(name):
    logp, adv = row(-1.0, -2.0, -1.0, -2.0), row(1, 1, -1, -1)

    def loss(anchor):
        return VARIANTS[name](token_ratio(logp, anchor), adv, logp, anchor).sum()

    np.testing.assert_array_equal(jax.grad(loss)(logp + row(0.05, -0.5, 0.05, -0.5)), np.zeros((1, 4)))


@pytest.mark.parametrize("name", ["tis", "topr", "cispo", "cispo_mask"])
def test_nothing_flows_through_the_ratio_of_weighted_log_probs(name):
    logp, adv = row(-1.0, -2.0, -1.0, -2.0), row(1, 1, -1, -1)
    anchor = logp + row(0.05, -0.05, 0.05, -0.05)

    def loss(behind_the_ratio):
        return VARIANTS[name](token_ratio(behind_the_ratio, anchor), adv, logp, anchor).sum()

    np.testing.assert_array_equal(jax.grad(loss)(logp), np.zeros((1, 4)))


def loop_coefficient(name, a, d):
    """Compute the table's columns as formulas, float64."""
    r = math.exp(d)
    outside = (a > 0 and r > 1.1) or (a < 0 and r < 0.9)
    return {
        "vanilla": a,
        "ppo": 0.0 if (a > 0 and r > 1.2) or (a < 0 and r < 0.8) else r * a,
        "tis": min(r, 1) * a,
        "topr": a if a > 0 else min(r, 1) * a,
        "cispo": min(max(r, 0.9), 1.1) * a,
        "cispo_mask": 0.0 if outside else min(max(r, 0.9), 1.1) * a,
        "kimi": a - 0.1 * d,
    }[name]


@jax.jit
def all_variants(logp, anchor, adv):
    def loss(name, logp):
        return VARIANTS[name](token_ratio(logp, anchor), adv, logp, anchor)

    return {name: (loss(name, logp), coefficients(lambda x, n=name: loss(n, x), logp)) for name in VARIANTS}


@given(reals(-20, 20), reals(-20, 0), reals(-1e4, 1e4))
def test_policy_gradients_are_finite_and_those_of_the_formulas(delta, anchor, adv):
    logp = anchor + delta
    exact = logp.astype(float) - anchor
    bounds = np.log([0.8, 0.9, 1.1, 1.2])
    assume(np.abs(exact[..., None] - bounds).min() > 1e-5)  # on a bound either side is right
    for name, (loss, got) in all_variants(logp, anchor, adv).items():
        assert np.isfinite(loss).all(), name
        want = [loop_coefficient(name, float(a), float(d)) for a, d in zip(adv.flat, exact.flat, strict=True)]
        np.testing.assert_allclose(np.ravel(got), want, rtol=1e-4, atol=1e-5, err_msg=name)


# a policy without baseline, fed with what it sampled 32 steps ago: nearly all of it negative (the target is 1 of 512)


def largest_logit_after_stale_training(name, steps=300, lag=32, rows=64, rate=4.0):
    """Train a tabular policy of three symbols out of eight, +1 for the one right string and -1 for all others."""

    def loss(logits, behaviour, symbols):
        def logp(x):
            return jnp.take_along_axis(jax.nn.log_softmax(x)[None], symbols[..., None], axis=-1)[..., 0]

        adv = jnp.where(jnp.all(symbols == 0, axis=1, keepdims=True), 1.0, -1.0)
        ours, anchor = logp(logits), logp(behaviour)
        return VARIANTS[name](token_ratio(ours, anchor), adv, ours, anchor).sum() / rows

    def step(history, key):
        symbols = jax.random.categorical(key, history[-1], shape=(rows, 3))
        logits = history[0] - rate * jax.grad(loss)(history[0], history[-1], symbols)
        return jnp.concatenate([logits[None], history[:-1]]), None

    keys = jax.random.split(jax.random.key(0), steps)
    history, _ = jax.jit(lambda: jax.lax.scan(step, jnp.zeros((lag + 1, 3, 8)), keys))()
    return float(jnp.abs(history[0]).max())


@pytest.mark.parametrize("name, low, high", [("vanilla", 80, 150), ("ppo", 0, 5), ("tis", 0, 20), ("topr", 0, 20)])
def test_stale_negatives_blow_up_only_where_their_weight_cannot_vanish(name, low, high):
    assert low < largest_logit_after_stale_training(name) < high


# distance to a reference

KINDS: tuple[KlEstimator, ...] = ("k1", "abs", "k2", "k3")


@pytest.mark.parametrize(
    "kind, want", [("k1", (0.2, -0.3)), ("abs", (0.2, 0.3)), ("k2", (0.02, 0.045)), ("k3", (0.018731, 0.049859))]
)
def test_kl_oracle(kind, want):
    np.testing.assert_allclose(o.kl(row(0.2, -0.3), row(0, 0), kind), [want], atol=1e-6)
    np.testing.assert_allclose(o.kl(row(-1.0, -1.5), row(-1.2, -1.2), kind), [want], atol=1e-6)


@jax.jit
def all_kinds(logp, ref):
    """Return value, gradient for the policy, and gradient for the reference, by kind."""
    grad = {k: jax.grad(lambda x, r, k=k: o.kl(x, r, k).sum(), argnums=(0, 1))(logp, ref) for k in KINDS}
    return {k: (o.kl(logp, ref, k), *grad[k]) for k in KINDS}


@given(reals(-20, 20), reals(-20, 0))
def test_kl_agrees_with_float64(delta, ref):
    logp = ref + delta
    x = logp.astype(float) - ref
    k3 = np.expm1(-x) + x
    assume(np.abs(k3 - 10).min() > 1e-4)
    want = {
        "k1": (x, np.ones_like(x)),
        "abs": (np.abs(x), np.sign(x)),
        "k2": (x * x / 2, x),
        "k3": (np.clip(k3, -10, 10), np.where(k3 > 10, 0, -np.expm1(-x))),
    }
    for kind, (value, slope, ref_slope) in all_kinds(logp, ref).items():
        np.testing.assert_allclose(value, want[kind][0], rtol=1e-4, atol=1e-5, err_msg=kind)
        np.testing.assert_allclose(slope, want[kind][1], rtol=1e-4, atol=1e-5, err_msg=kind)
        assert not ref_slope.any()
    assert (np.array(all_kinds(logp, ref)["k3"][0]) >= -1e-6).all()


def test_k3_of_tiny_differences_is_not_lost_to_rounding():
    np.testing.assert_allclose(o.kl(row(1e-3), row(0.0), "k3"), [[0.5e-6]], rtol=1e-3)


def test_k3_estimates_the_kl_and_far_tokens_do_not_overflow():
    p, q = jax.nn.log_softmax(row(1.0, 0.0, -1.0)), jax.nn.log_softmax(row(2.0, 0.0, -2.0))
    for kind in ("k1", "k3"):
        np.testing.assert_allclose(jnp.sum(jnp.exp(p) * o.kl(p, q, kind)), 0.160115, atol=1e-6)
    value, slope = jax.value_and_grad(lambda x: o.kl(x, row(0.0, 0.0), "k3").sum())(row(-400.0, 400.0))
    assert value == 20
    np.testing.assert_array_equal(slope, [[0, 0]])


# critics


@pytest.mark.parametrize(
    "value, old, clip, want, slope",
    [
        (0.5, 0.0, None, 0.125, -0.5),
        (0.5, 0.4, 0.2, 0.125, -0.5),  # not moved far
        (0.5, 0.0, 0.2, 0.32, 0.0),  # moved too far towards the return
        (-0.5, 0.0, 0.2, 1.125, -1.5),  # moved away: the plain error is worse and stands
    ],
)
def test_value_loss(value, old, clip, want, slope):
    def loss(v, ret, old):
        return o.value_loss(v, ret, old, clip)

    args = (jnp.float32(value), jnp.float32(1.0), jnp.float32(old))
    np.testing.assert_allclose(loss(*args), want, rtol=1e-6)
    grads = jax.grad(loss, argnums=(0, 1, 2))(*args)
    np.testing.assert_allclose(grads, (slope, 0, 0), rtol=1e-6)


@given(reals(-20, 20), reals(-20, 20), reals(-20, 20), st.sampled_from([None, 0.2, 1.0]))
def test_value_loss_agrees_with_float64(value, ret, old, clip):
    wide = value.astype(float), ret.astype(float), old.astype(float)
    want = (wide[0] - wide[1]) ** 2
    if clip is not None:
        want = np.maximum(want, (np.clip(wide[0], wide[2] - clip, wide[2] + clip) - wide[1]) ** 2)
    np.testing.assert_allclose(o.value_loss(value, ret, old, clip), want / 2, rtol=1e-4, atol=1e-4)


# preferences


def test_dpo_oracle():
    margin = 0.1 * ((-10 + 12) - (-20 + 19))
    assert margin == pytest.approx(0.3)
    loss, grads = jax.value_and_grad(o.dpo, argnums=(0, 1))(jnp.float32(2.0), jnp.float32(-1.0), 0.1)
    np.testing.assert_allclose(loss, 0.554355, atol=1e-6)
    slope = 0.1 / (1 + math.exp(0.3))
    np.testing.assert_allclose(grads, (-slope, slope), rtol=1e-5)


def softplus(x):
    return np.logaddexp(0, x)


SCORES = st.lists(st.floats(-200, 200, width=32), min_size=4, max_size=4).map(lambda x: np.array(x, np.float32))


@given(SCORES, SCORES, st.floats(0.01, 1), st.floats(0, 0.5), st.floats(0, 2))
def test_preferences_by_closed_form(chosen, rejected, beta, smooth, gamma):
    h = chosen.astype(float) - rejected
    cases = {
        "dpo": (o.dpo(chosen, rejected, beta), softplus(-beta * h)),
        "conservative dpo": (
            o.dpo(chosen, rejected, beta, smooth),
            (1 - smooth) * softplus(-beta * h) + smooth * softplus(beta * h),
        ),
        "ipo": (o.ipo(jnp.array(chosen - rejected), beta), (h - 1 / (2 * beta)) ** 2),
        "simpo": (o.simpo(chosen, rejected, beta, gamma), softplus(-(beta * h - gamma))),
        "bradley-terry": (o.bradley_terry(chosen, rejected), softplus(-h)),
    }
    for name, (got, want) in cases.items():
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=1e-4, err_msg=name)


SLOPES = {
    "dpo": (lambda h: o.dpo(h, 0 * h, 0.1), lambda h: -0.1 / (1 + np.exp(0.1 * h))),
    "conservative dpo": (
        lambda h: o.dpo(h, 0 * h, 0.1, 0.2),
        lambda h: -0.08 / (1 + np.exp(0.1 * h)) + 0.02 / (1 + np.exp(-0.1 * h)),
    ),
    "ipo": (lambda h: o.ipo(h, 0.1), lambda h: 2 * (h - 5)),
    "simpo": (lambda h: o.simpo(h, 0 * h, 2.0, 0.5), lambda h: -2 / (1 + np.exp(2 * h - 0.5))),
    "bradley-terry": (lambda h: o.bradley_terry(h, 0 * h), lambda h: -1 / (1 + np.exp(h))),
}


@pytest.mark.parametrize("name", SLOPES)
def test_preference_gradients(name):
    loss, slope = SLOPES[name]
    h = np.array([-100, -5, -0.3, 0, 0.3, 5, 100])
    got = jax.grad(lambda x: loss(x).sum())(jnp.array(h, jnp.float32))
    np.testing.assert_allclose(got, slope(h), rtol=1e-4, atol=1e-7)
    far = jax.grad(lambda x: loss(x).sum())(jnp.array([-1e6, 1e6], jnp.float32))
    assert np.isfinite(far).all()
