"""Estimates of the KL to a reference, as a reward and with a coefficient that follows it, against hand-computed numbers."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rolljax.errors import ConfigError
from rolljax.trainer.credit.shaping import kl_penalty
from rolljax.trainer.kl import AdaptiveKl, kl_estimate

ESTIMATORS = ["k1", "abs", "k2", "k3"]


@pytest.mark.parametrize(
    ("estimator", "want"),
    [("k1", (0.2, -0.3)), ("abs", (0.2, 0.3)), ("k2", (0.02, 0.045)), ("k3", (0.018731, 0.049859))],
)
def test_estimates(estimator, want):
    np.testing.assert_allclose(kl_estimate(np.array([0.2, -0.3]), estimator, np), want, atol=5e-7)


@given(st.floats(-1000, 1000), st.sampled_from(ESTIMATORS))
def test_an_estimate_is_the_formula(x, estimator):
    got = float(kl_estimate(np.array(x), estimator, np))
    k3 = math.exp(-x) + x - 1 if x > -700 else math.inf
    want = {"k1": x, "abs": abs(x), "k2": x * x / 2, "k3": min(k3, 10.0)}[estimator]
    assert got == pytest.approx(want, rel=1e-9, abs=1e-12)
    assert estimator == "k1" or got >= 0


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_host_and_device_have_one_formula(estimator):
    x = np.linspace(-40, 40, 401, dtype=np.float32)
    host, device = kl_estimate(x, estimator, np), np.asarray(kl_estimate(jnp.asarray(x), estimator, jnp))
    np.testing.assert_allclose(device, host, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_two_estimates_are_unbiased(estimator):
    """Their expectation under the policy is the divergence itself (here small enough that the clamp is far away)."""
    policy, ref = np.array([0.5, 0.3, 0.2]), np.array([0.3, 0.3, 0.4])
    mean = (policy * kl_estimate(np.log(policy) - np.log(ref), estimator, np)).sum()
    assert mean == pytest.approx((policy * np.log(policy / ref)).sum(), rel=1e-12)


@given(hnp.arrays(bool, st.tuples(st.integers(1, 4), st.integers(1, 7))), st.data(), st.sampled_from(ESTIMATORS))
def test_a_penalty_is_minus_the_estimate_under_the_mask(mask, data, estimator):
    logp, ref = (data.draw(hnp.arrays(np.float32, mask.shape, elements=st.floats(-9, 0, width=32))) for _ in range(2))
    logp, ref = np.where(mask, logp, np.float32(np.nan)), np.where(mask, ref, np.float32(np.nan))
    got = kl_penalty(logp, ref, mask, 0.1, estimator)
    for n, row in enumerate(mask):
        want = np.zeros(len(row))
        for t in np.flatnonzero(row):
            want[t] = -0.1 * float(kl_estimate(np.float64(logp[n, t]) - np.float64(ref[n, t]), estimator, np))
        np.testing.assert_allclose(got[n], want, atol=1e-12)


def test_unknown_estimate():
    with pytest.raises(ConfigError, match="not an estimate of the KL"):
        kl_estimate(np.zeros(1), "k4", np)


@pytest.mark.parametrize(
    ("kl", "factor"), [(0.1, 1.0), (0.11, 1 + 0.1 * 0.05), (9.0, 1 + 0.2 * 0.05), (0.0, 1 - 0.2 * 0.05)]
)
def test_an_adaptive_coefficient(kl, factor):
    assert AdaptiveKl(0.1, horizon=1000).following(0.2, kl, 50) == pytest.approx(0.2 * factor)


def test_an_adaptive_coefficient_steers_towards_the_target():
    """With a divergence that falls as the coefficient grows, the loop settles at the target."""
    coef = 0.01
    for _ in range(2000):
        coef = AdaptiveKl(4.0, horizon=10).following(coef, 1 / coef, 1)
    assert 1 / coef == pytest.approx(4.0, rel=1e-3)
