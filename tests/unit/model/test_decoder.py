"""The decoder and its attention: who sees whom, and that only relative positions matter."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rolljax.errors import ConfigError
from rolljax.model.attention import attention, packed, packed_mask
from rolljax.model.decoder import Model
from rolljax.model.families.qwen3 import Qwen3Config

B, T = 2, 12
ONES = jnp.ones((B, T), jnp.int32)
POSITIONS = jnp.tile(jnp.arange(T), (B, 1))


@pytest.fixture(scope="module")
def logits(model, params):
    """Return logits(tokens, positions=..., segments=..., branches=...), `[B, T, V]`."""

    @jax.jit
    def run(tokens, positions, segments, branches):
        decoder = model.bind(params)
        return decoder.logits(decoder(tokens, positions, packed(segments, branches, positions)).hidden)

    return lambda tokens, positions=POSITIONS, segments=ONES, branches=ONES: np.asarray(
        run(tokens, positions, segments, branches)
    )


@pytest.fixture(scope="module")
def tokens(model):
    return jax.random.randint(jax.random.key(1), (B, T), 0, model.cfg.vocab_size)


@pytest.mark.parametrize("at", [1, 5, T - 1])
def test_a_later_token_leaves_earlier_logits_bitwise_equal(logits, tokens, at):
    before, after = logits(tokens), logits(tokens.at[:, at].add(1))
    np.testing.assert_array_equal(after[:, :at], before[:, :at])
    assert (np.abs(after[:, at:] - before[:, at:]).max(-1) > 1e-4).all()


def test_only_relative_positions_matter(logits, tokens):
    np.testing.assert_allclose(logits(tokens, POSITIONS + 137), logits(tokens), atol=1e-4)
    gap = jnp.where(POSITIONS >= 6, POSITIONS + 137, POSITIONS)
    assert np.abs(logits(tokens, gap) - logits(tokens))[:, 6:].max() > 1e-3


def test_rows_do_not_see_each_other(logits, tokens):
    before, after = logits(tokens), logits(tokens.at[1].add(1))
    np.testing.assert_array_equal(after[0], before[0])


def test_segments_and_branches_do_not_see_each_other(logits, tokens):
    segments = jnp.tile(jnp.array([1] * 9 + [2] * 3), (B, 1))
    branches = jnp.tile(jnp.array([0] * 4 + [1] * 2 + [2] * 3 + [0] + [1] * 2), (B, 1))
    before = logits(tokens, POSITIONS, segments, branches)
    sibling = logits(tokens.at[:, 4].add(1), POSITIONS, segments, branches)
    np.testing.assert_array_equal(sibling[:, 6:], before[:, 6:])
    prompt = logits(tokens.at[:, 0].add(1), POSITIONS, segments, branches)
    assert (np.abs(prompt - before)[:, :9].max(-1) > 1e-4).all()
    np.testing.assert_array_equal(prompt[:, 9:], before[:, 9:])


def test_packed_mask_by_hand():
    #           prompt  branch 1  branch 2  next group  padding
    segments = [[1, 1, 1, 1, 1, 2, 2, 0]]
    branches = [[0, 0, 1, 2, 2, 0, 1, 0]]
    want = [
        [1, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0, 0],
        [1, 1, 0, 1, 0, 0, 0, 0],
        [1, 1, 0, 1, 1, 0, 0, 0],
        [0, 0, 0, 0, 0, 1, 0, 0],
        [0, 0, 0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 0, 0, 0, 1],
    ]
    np.testing.assert_array_equal(packed_mask(jnp.array(segments), jnp.array(branches))[0], np.array(want, bool))


def test_grouped_query_attention_against_a_float64_loop():
    rng = np.random.default_rng(0)
    H, K, C = 4, 2, 6
    q, k, v = (rng.normal(size=(1, 5, n, C)) for n in (H, K, K))
    mask = np.tril(np.ones((5, 5), bool))
    mask[3, 1] = False
    want = np.zeros((5, H, C))
    for t in range(5):
        for h in range(H):
            kv = h // (H // K)
            scores = np.where(mask[t], k[0, :, kv] @ q[0, t, h] / np.sqrt(C), -np.inf)
            weights = np.exp(scores - scores.max())
            want[t, h] = weights / weights.sum() @ v[0, :, kv]
    got = attention(jnp.float32(q), jnp.float32(k), jnp.float32(v), jnp.array(mask)[None])
    np.testing.assert_allclose(got[0], want, atol=1e-5)


@pytest.mark.parametrize("tied", [True, False])
def test_tied_and_untied_heads(tied):
    small = Model(Qwen3Config(vocab_size=20, num_layers=1, hidden_size=8, ffn_size=8, tie_embeddings=tied))
    params = jax.jit(lambda: small.init(0))()
    assert ("head" in params) is not tied
    assert small.num_params() == sum(x.size for x in jax.tree.leaves(params))
    decoder = small.bind(params)
    hidden = jnp.ones((3, 8))
    head = params["embed"] if tied else params["head"]
    np.testing.assert_allclose(decoder.logits(hidden), hidden @ head.T, rtol=1e-5)
    other = dataclasses.replace(small, cfg=dataclasses.replace(small.cfg, tie_embeddings=not tied))
    assert abs(small.num_params() - other.num_params()) == 20 * 8


def test_parameters_axes_and_shapes_are_one_tree(model, params):
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), model.abstract())
    assert shapes == jax.tree.map(lambda x: (x.shape, x.dtype), params)
    pairs = jax.tree.map(lambda n, p: len(n) == p.ndim, model.axes(), params, is_leaf=lambda x: isinstance(x, tuple))
    assert all(jax.tree.leaves(pairs))
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(params))


def test_seeds_make_the_weights():
    small = Model(Qwen3Config(vocab_size=20, num_layers=1, hidden_size=8, ffn_size=8))
    init = jax.jit(small.init, static_argnums=0)
    assert (init(0)["embed"] == init(0)["embed"]).all() and (init(0)["embed"] != init(1)["embed"]).any()


@pytest.mark.parametrize(
    "wrong, name", [({"num_heads": 3}, "num_kv_heads"), ({"head_dim": 15}, "Qwen3Config.head_dim")]
)
def test_impossible_shapes_are_refused(wrong, name):
    with pytest.raises(ConfigError, match=name):
        Qwen3Config(**wrong)
