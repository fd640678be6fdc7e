"""Rewards to advantages, against hand-computed groups and a float64 loop."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rolljax.trainer.algorithms.grpo import Grpo
from rolljax.trainer.credit import group_normalised

R = np.array([[1, 0, 0, 1], [0, 0, 0, 1]], np.float32)


def naive(group, scale, eps=1e-6):
    mean = math.fsum(group) / len(group)
    centred = [r - mean for r in group]
    if not scale or len(group) == 1:
        return centred
    std = math.sqrt(math.fsum(c * c for c in centred) / (len(group) - 1))
    return [c / (std + eps) for c in centred]


def test_grpo_oracle():
    want = [[0.866024, -0.866024, -0.866024, 0.866024], [-0.499999, -0.499999, -0.499999, 1.499997]]
    got = group_normalised(R)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, want, atol=1.5e-6)


def test_without_std_oracle():
    want = [[0.5, -0.5, -0.5, 0.5], [-0.25, -0.25, -0.25, 0.75]]
    np.testing.assert_allclose(group_normalised(R, scale=False), want, atol=1e-7)


def test_seven_ones_and_a_zero():
    got = group_normalised(np.array([1] * 7 + [0]))
    np.testing.assert_allclose(got, [0.353552] * 7 + [-2.474867], atol=1e-6)


def test_group_of_one_is_zero():
    np.testing.assert_array_equal(group_normalised(np.array([[3.0], [-1.0]])), [[0.0], [0.0]])


@given(
    hnp.arrays(np.float64, hnp.array_shapes(min_dims=2, max_dims=2, max_side=9), elements=st.floats(-100, 100)),
    st.booleans(),
)
def test_agrees_with_a_float64_loop(rewards, scale):
    got = group_normalised(rewards, scale=scale)
    np.testing.assert_allclose(got, [naive(group, scale) for group in rewards.tolist()], rtol=2e-6, atol=1e-5)
    np.testing.assert_allclose(got.sum(-1), 0, atol=1e-3)


@given(st.lists(st.floats(-1, 1, width=32), min_size=2, max_size=8), st.floats(-10, 10), st.floats(0.5, 10))
def test_shift_changes_nothing_and_scale_only_eps(group, shift, factor):
    rewards = np.array(group)
    if rewards.std() < 1e-2:
        return
    np.testing.assert_allclose(group_normalised(rewards * factor + shift), group_normalised(rewards), atol=1e-3)


def test_grpo_drops_groups_that_teach_nothing():
    equal, mixed = np.full(4, 0.3, np.float32), R[0]
    dropped, kept = Grpo().advantages([equal, mixed])
    assert dropped is None
    np.testing.assert_array_equal(kept, group_normalised(mixed))
    (zeros,) = Grpo(drop_degenerate=False).advantages([equal])
    np.testing.assert_allclose(zeros, 0, atol=1e-6)


@pytest.mark.parametrize("rewards", [np.array([1, 0, 0], np.float32), np.array([0.25, 0.5], np.float32)])
def test_grpo_without_std(rewards):
    (got,) = Grpo(scale_by_std=False).advantages([rewards])
    np.testing.assert_allclose(got, rewards - rewards.mean(), atol=1e-7)
