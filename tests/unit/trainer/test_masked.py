"""Masked reductions: equal to a float64 loop, and blind to whatever stands under a zero weight."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rolljax.trainer import masked

SHAPE = (3, 5)
VALUES = hnp.arrays(np.float32, SHAPE, elements=st.floats(-100, 100, width=32, allow_subnormal=False))
WEIGHTS = hnp.arrays(np.float32, SHAPE, elements=st.sampled_from([0.0, 0.0, 0.5, 1.0, 2.0]))


@given(VALUES, WEIGHTS)
def test_total_and_maximum_agree_with_a_float64_loop(values, weights):
    total, largest = 0.0, 0.0
    for v, w in zip(values.ravel().tolist(), weights.ravel().tolist(), strict=True):
        total += v * w
        largest = max(largest, v) if w else largest
    np.testing.assert_allclose(masked.total(jnp.array(values), jnp.array(weights)), total, rtol=1e-5, atol=1e-3)
    assert float(masked.maximum(jnp.array(values), jnp.array(weights))) == largest


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("reduce", [masked.total, masked.maximum])
def test_nothing_under_a_zero_weight_reaches_value_or_gradient(bad, reduce):
    values = jnp.array([1.0, 2.0, 3.0, 4.0])
    weights = jnp.array([1.0, 0.0, 0.5, 0.0])

    def f(values):
        return reduce(jnp.exp(masked.clean(values, weights)) ** 2, weights)

    want, want_grad = jax.value_and_grad(f)(values)
    got, grad = jax.value_and_grad(f)(jnp.where(weights == 0, bad, values))
    assert got == want and jnp.isfinite(got)
    np.testing.assert_array_equal(grad, want_grad)
    assert reduce(jnp.where(weights == 0, bad, values), weights) == reduce(values, weights)


def test_a_nan_under_a_weight_is_not_hidden():
    values, weights = jnp.array([1.0, jnp.nan]), jnp.ones(2)
    assert jnp.isnan(masked.total(values, weights)) and jnp.isnan(masked.maximum(values, weights))


def test_zero_weights_give_exactly_zero():
    values = jnp.full(4, jnp.nan)
    value, grad = jax.value_and_grad(lambda v: masked.total(v, jnp.zeros(4)))(values)
    assert value == 0 and (grad == 0).all()
    assert masked.maximum(values, jnp.zeros(4)) == 0


def test_sums_of_bfloat16_are_float32():
    values = jnp.full(4096, 1.0, jnp.bfloat16)  # bfloat16 cannot count past 256
    total = masked.total(values, jnp.ones(4096))
    assert total.dtype == jnp.float32 and total == 4096


def test_clean_keeps_dtype_and_takes_a_fill():
    got = masked.clean(jnp.array([1.0, jnp.nan], jnp.bfloat16), jnp.array([1.0, 0.0]), fill=-3)
    assert got.dtype == jnp.bfloat16 and got.tolist() == [1, -3]
