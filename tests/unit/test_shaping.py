"""Rewards before credit, and which trajectories take part, against hand-computed numbers and loops."""

import difflib
import math
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rolljax.trainer.credit.shaping import (
    adaptive_beta,
    best_and_worst,
    degenerate,
    difficulty_mask,
    kl_estimate,
    kl_in_reward,
    length_reward,
    overlong_penalty,
    sample_weights,
    select_for_imitation,
)

KINDS = ["k1", "abs", "k2", "k3"]
R = np.array([1, 0, 0, 1, 0, 0, 0, 1.0])
PAIR = np.repeat([0, 1], 4)


@st.composite
def grouped(draw):
    groups = draw(hnp.arrays(np.int64, st.integers(1, 12), elements=st.integers(0, 3)))
    rewards = st.sampled_from([0.0, 0.25, 0.5, 1.0, -1.0])
    return draw(hnp.arrays(np.float64, groups.shape, elements=rewards)), groups


# ---- distance to the reference


@pytest.mark.parametrize(
    ("kind", "want"),
    [("k1", (0.2, -0.3)), ("abs", (0.2, 0.3)), ("k2", (0.02, 0.045)), ("k3", (0.018731, 0.049859))],
)
def test_kl_estimates(kind, want):
    ref = np.array([-1.5, -0.7])
    np.testing.assert_allclose(kl_estimate(ref + [0.2, -0.3], ref, kind), want, atol=5e-7)


@given(st.floats(-1000, 1000), st.sampled_from(KINDS))
def test_kl_estimate_is_the_formula(x, kind):
    got = float(kl_estimate(np.array(x), np.array(0.0), kind))
    k3 = math.exp(-x) + x - 1 if x > -700 else math.inf
    want = {"k1": x, "abs": abs(x), "k2": x * x / 2, "k3": min(k3, 10.0)}[kind]
    assert got == pytest.approx(want, rel=1e-9, abs=1e-12)
    assert kind == "k1" or got >= 0


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_two_estimates_are_unbiased(kind):
    """Their expectation under the policy is the divergence itself (here small enough that the clamp is far away)."""
    policy, ref = np.array([0.5, 0.3, 0.2]), np.array([0.3, 0.3, 0.4])
    mean = (policy * kl_estimate(np.log(policy), np.log(ref), kind)).sum()
    assert mean == pytest.approx((policy * np.log(policy / ref)).sum(), rel=1e-12)


def test_on_policy_distillation_advantage():
    student, teacher = np.array([-1.0, -2.0]), np.array([-1.5, -1.8])
    np.testing.assert_allclose(-kl_estimate(student, teacher, "k1"), [-0.5, 0.2], atol=1e-12)


@given(hnp.arrays(bool, st.tuples(st.integers(1, 4), st.integers(1, 7))), st.data(), st.sampled_from(KINDS))
def test_kl_in_reward(mask, data, kind):
    logp, ref = (data.draw(hnp.arrays(np.float32, mask.shape, elements=st.floats(-9, 0, width=32))) for _ in range(2))
    rewards = data.draw(hnp.arrays(np.float64, len(mask), elements=st.floats(-5, 5)))
    logp, ref = np.where(mask, logp, np.float32(np.nan)), np.where(mask, ref, np.float32(np.nan))
    got = kl_in_reward(rewards, logp, ref, mask, 0.1, kind)
    for n, row in enumerate(mask):
        want = np.zeros(len(row))
        for t in np.flatnonzero(row):
            want[t] = -0.1 * float(kl_estimate(logp[n, t], ref[n, t], kind))
        want[np.flatnonzero(row)[-1:]] += rewards[n]
        np.testing.assert_allclose(got[n], want, atol=1e-12)


def test_unknown_estimate():
    with pytest.raises(ValueError, match="kind is one of"):
        kl_estimate(np.zeros(1), np.zeros(1), "k4")


@pytest.mark.parametrize(
    ("kl", "factor"), [(0.1, 1.0), (0.11, 1 + 0.1 * 0.05), (9.0, 1 + 0.2 * 0.05), (0.0, 1 - 0.2 * 0.05)]
)
def test_adaptive_beta(kl, factor):
    assert adaptive_beta(0.2, kl, target=0.1, horizon=1000, num_samples=50) == pytest.approx(0.2 * factor)


def test_adaptive_beta_steers_towards_the_target():
    """With a divergence that falls as the coefficient grows, the loop settles at the target."""
    beta = 0.01
    for _ in range(2000):
        beta = adaptive_beta(beta, 1 / beta, target=4.0, horizon=10, num_samples=1)
    assert 1 / beta == pytest.approx(4.0, rel=1e-3)
    with pytest.raises(ValueError, match="positive"):
        adaptive_beta(0.1, 1.0, target=0.0, horizon=10, num_samples=1)


# ---- lengths


def test_overlong_penalty():
    got = overlong_penalty(np.array([0, 79, 80, 90, 95, 100, 101, 500]), limit=100, cache=20)
    np.testing.assert_allclose(got, [0, 0, 0, -0.5, -0.75, -1, -1, -1])
    np.testing.assert_array_equal(overlong_penalty(np.array([99, 100, 101]), 100, 0), [0, 0, -1])
    with pytest.raises(ValueError, match="cache"):
        overlong_penalty(np.array([1]), 100, 101)


@given(hnp.arrays(np.int64, 9, elements=st.integers(0, 300)), st.integers(1, 200))
def test_overlong_penalty_falls_with_length(lengths, cache):
    lengths = np.sort(lengths)
    got = overlong_penalty(lengths, 200, cache)
    assert (np.diff(got) <= 0).all() and got.min() >= -1 and got.max() <= 0
    np.testing.assert_array_equal(got == 0, lengths <= 200 - cache)
    np.testing.assert_array_equal(got == -1, lengths >= 200)


# ---- who takes part


def test_difficulty_mask():
    rewards = np.array([0, 0.1, 0, 0.3, 1, 0.9, 1, 1, 0.2, 0.1])
    groups = np.array([0, 0, 1, 1, 2, 2, 3, 3, 4, 4])
    # means .05, .15, .95 (not inside), 1, .15
    np.testing.assert_array_equal(difficulty_mask(rewards, groups), np.isin(groups, [1, 4]))
    np.testing.assert_array_equal(difficulty_mask(rewards, groups, low=-1, high=2), np.ones(10, bool))


@given(grouped())
def test_difficulty_and_degenerate_are_the_loops(case):
    rewards, groups = case
    for n, g in enumerate(groups):
        own = rewards[groups == g]
        assert difficulty_mask(rewards, groups)[n] == (0.1 < own.mean() < 0.95)
        assert degenerate(rewards, groups)[n] == (len(set(own)) == 1)


def test_degenerate_ignores_rounding():
    rewards, groups = np.array([0.3, 0.1 + 0.2, 1e-9, 0.0]), np.array([0, 0, 1, 1])
    np.testing.assert_array_equal(degenerate(rewards, groups), [True, True, False, False])


def test_length_reward_is_kimis():
    """arXiv 2501.12599, section 2.3.3; the same in github.com/huggingface/open-r1, src/open_r1/rewards.py, len_reward."""
    lengths, groups = np.array([10, 20, 40, 10, 40, 7, 7]), np.array([0, 0, 0, 1, 1, 2, 2])
    solved = np.array([1, 1, 1, 0, 0, 1, 0], bool)
    np.testing.assert_allclose(length_reward(lengths, solved, groups), [0.5, 0.5 - 1 / 3, -0.5, 0, -0.5, 0, 0])


def test_sample_weights():
    difficulty = np.array([0.0, 0.5, 1.0])
    np.testing.assert_allclose(sample_weights(difficulty), np.array([0.5, 1.25, 2.0]) / 1.25)
    lengths = np.array([10, 20, 30])
    np.testing.assert_allclose(sample_weights(lengths_N=lengths), [1.5, 1.0, 0.5])
    both = np.array([0.5 * 1.5, 1.25 * 1.0, 2.0 * 0.5])
    np.testing.assert_allclose(sample_weights(difficulty, lengths), both / both.mean())
    np.testing.assert_array_equal(sample_weights(lengths_N=np.array([7, 7])), 1)
    for bad in ((None, None), (np.array([1.2]), None)):
        with pytest.raises(ValueError):
            sample_weights(*bad)


@given(hnp.arrays(np.float64, st.integers(1, 9), elements=st.floats(0, 1)), st.data())
def test_sample_weights_have_mean_one_and_favour_hard_and_short(difficulty, data):
    lengths = data.draw(hnp.arrays(np.int64, difficulty.shape, elements=st.integers(0, 1000)))
    got = sample_weights(difficulty, lengths)
    assert got.mean() == pytest.approx(1) and (got > 0).all()
    assert (np.diff(sample_weights(difficulty)[np.argsort(difficulty)]) >= -1e-12).all()
    assert (np.diff(sample_weights(lengths_N=lengths)[np.argsort(lengths)]) <= 1e-12).all()


def test_imitation_keeps_successes_that_differ():
    texts = [
        "The answer is 42.",
        "the   ANSWER is 42.",  # the same but for case and white space
        "the answer is 42 .",  # nearly the same
        "Seven times six makes forty-two, so 42.",
        "The answer is 41.",  # wrong
        "The answer is 42.",  # another group
        "2 * 21 = 42",
    ]
    success = np.array([1, 1, 1, 1, 0, 1, 1], bool)
    groups = np.array([0, 0, 0, 0, 0, 1, 0])
    keep = select_for_imitation(success, groups, texts, cap=4)
    np.testing.assert_array_equal(np.flatnonzero(keep), [0, 3, 5, 6])
    np.testing.assert_array_equal(np.flatnonzero(select_for_imitation(success, groups, texts, cap=1)), [0, 5])
    strict = select_for_imitation(success, groups, texts, cap=9, similarity=1.0)
    np.testing.assert_array_equal(np.flatnonzero(strict), [0, 2, 3, 5, 6])
    half = [select_for_imitation(np.ones(2), np.zeros(2), ["ab", "ac"], 2, similarity=s)[1] for s in (0.5, 0.51)]
    assert half == [False, True]  # a ratio of one half
    with pytest.raises(ValueError, match="cap"):
        select_for_imitation(success, groups, texts, cap=0)


words = st.lists(st.sampled_from(["a", "b", "ab", "B", "ccc"]), max_size=5).map("  ".join)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 2), words), max_size=9), st.integers(1, 3))
def test_imitation_is_the_loop(case, cap):
    success, groups, texts = (list(x) for x in zip(*case, strict=True)) if case else ([], [], [])
    kept = []
    for n in range(len(case)):
        mine = [m for m in kept if groups[m] == groups[n]]
        plain = [" ".join(texts[m].lower().split()) for m in [*mine, n]]
        near = [difflib.SequenceMatcher(None, plain[-1], p, autojunk=False).ratio() >= 0.8 for p in plain[:-1]]
        if success[n] and len(mine) < cap and not any(near):
            kept.append(n)
    got = select_for_imitation(np.array(success, bool), np.array(groups, int), texts, cap, similarity=0.8)
    np.testing.assert_array_equal(np.flatnonzero(got), kept)


def test_long_answers_are_compared_by_words_and_quickly():
    rng = np.random.default_rng(0)
    vocabulary = [f"word{i}" for i in range(50)]
    long = [" ".join(rng.choice(vocabulary, 2000)) for _ in range(3)]
    near = long[0].replace("word7 ", "other ", 5)
    start = time.process_time()
    keep = select_for_imitation(np.ones(4, bool), np.zeros(4, int), [*long, near], cap=4)
    np.testing.assert_array_equal(keep, [True, True, True, False])
    assert time.process_time() - start < 20


def test_best_and_worst():
    rewards = np.array([0.5, 1, 1, 0, 0, 3, 3, 3, 7])
    groups = np.array([0, 0, 0, 0, 0, 1, 1, 1, 2])
    chosen, rejected = best_and_worst(rewards, groups)
    np.testing.assert_array_equal(np.flatnonzero(chosen), [1])
    np.testing.assert_array_equal(np.flatnonzero(rejected), [3])


@given(grouped())
def test_pairs_are_the_loop(case):
    rewards, groups = case
    chosen, rejected = best_and_worst(rewards, groups)
    for g in set(groups):
        own = np.flatnonzero(groups == g)
        flat = len(set(rewards[own])) == 1
        want = [] if flat else [own[np.argmax(rewards[own])]], [] if flat else [own[np.argmin(rewards[own])]]
        assert [n for n in own if chosen[n]] == want[0] and [n for n in own if rejected[n]] == want[1]


def test_reward_oracle_groups_are_worth_comparing():
    assert not degenerate(R, PAIR).any() and difficulty_mask(R, PAIR).all()
    assert degenerate(np.ones(8), PAIR).all()
