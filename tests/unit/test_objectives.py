"""Per-token losses: values and, what counts, gradients with respect to the log-probs."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolljax.trainer.objectives import clipped_ratio, k3

RHO = [0.5, 0.9, 1.1, 1.5, 4.0]
TABLE = [
    # advantage, clip_low, clip_high, objective, c: the objective's gradient with respect to logp
    (+1.0, 0.2, 0.2, [0.5, 0.9, 1.1, 1.2, 1.2], [0.5, 0.9, 1.1, 0, 0]),
    (+1.0, 0.2, 0.28, [0.5, 0.9, 1.1, 1.28, 1.28], [0.5, 0.9, 1.1, 0, 0]),
    (-1.0, 0.2, 0.2, [-0.8, -0.9, -1.1, -1.5, -4], [0, -0.9, -1.1, -1.5, -4]),
    (-1.0, 0.2, 0.28, [-0.8, -0.9, -1.1, -1.5, -4], [0, -0.9, -1.1, -1.5, -4]),
    (+2.0, None, None, [1, 1.8, 2.2, 3, 8], [1, 1.8, 2.2, 3, 8]),
    (-1.0, None, None, [-0.5, -0.9, -1.1, -1.5, -4], [-0.5, -0.9, -1.1, -1.5, -4]),
    (+1.0, None, 0.2, [0.5, 0.9, 1.1, 1.2, 1.2], [0.5, 0.9, 1.1, 0, 0]),
    (-1.0, 0.2, None, [-0.8, -0.9, -1.1, -1.5, -4], [0, -0.9, -1.1, -1.5, -4]),
]


@pytest.mark.parametrize("advantage, low, high, objective, c", TABLE)
def test_ppo_table(advantage, low, high, objective, c):
    logp = jnp.log(jnp.array(RHO))

    def loss(logp):
        return clipped_ratio(jnp.exp(logp), jnp.full(5, advantage), low, high)

    np.testing.assert_allclose(loss(logp), -np.array(objective), rtol=1e-5)
    np.testing.assert_allclose(jax.grad(lambda x: loss(x).sum())(logp), -np.array(c), rtol=1e-5, atol=1e-7)


def naive_clipped(ratio, advantage, low, high):
    clipped = min(max(ratio, 1 - low), 1 + high)
    return -min(ratio * advantage, clipped * advantage)


FLOATS = st.floats(-5, 5, width=32)


@given(st.lists(st.tuples(FLOATS, FLOATS), min_size=6, max_size=6), st.floats(0.01, 0.9), st.floats(0.01, 3))
def test_clipped_ratio_agrees_with_a_float64_loop(pairs, low, high):
    log_ratio, advantage = (np.array(x) for x in zip(*pairs, strict=True))
    got = clipped_ratio(jnp.exp(jnp.float32(log_ratio)), jnp.float32(advantage), low, high)
    want = [naive_clipped(math.exp(x), a, low, high) for x, a in zip(log_ratio, advantage, strict=True)]
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6)


def test_k3_oracle():
    got = k3(jnp.array([0.2, -0.3]), jnp.zeros(2))
    np.testing.assert_allclose(got, [0.018731, 0.049859], atol=1e-6)
    np.testing.assert_allclose(k3(jnp.array([-1.0, -1.5]), jnp.array([-1.2, -1.2])), got, atol=1e-6)


@given(st.lists(st.tuples(st.floats(-20, 0, width=32), st.floats(-20, 0, width=32)), min_size=6, max_size=6))
def test_k3_agrees_with_float64_and_is_not_negative(pairs):
    p, q = (np.array(x) for x in zip(*pairs, strict=True))
    got = np.array(k3(jnp.float32(p), jnp.float32(q)))
    np.testing.assert_allclose(got, np.expm1(q - p) + (p - q), rtol=1e-4, atol=1e-5)
    assert (got >= -1e-6).all()


def test_k3_of_tiny_differences_is_not_lost_to_rounding():
    got = k3(jnp.array([1e-3], jnp.float32), jnp.zeros(1))
    np.testing.assert_allclose(got, 0.5e-6, rtol=1e-3)
