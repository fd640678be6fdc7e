"""Rewards before credit, and which trajectories take part, against hand-computed numbers and loops."""

import difflib
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rolljax.trainer.credit.shaping import (
    best_and_worst,
    degenerate,
    difficulty_mask,
    length_reward,
    overlong_penalty,
    sample_weights,
    select_for_imitation,
)

R = np.array([1, 0, 0, 1, 0, 0, 0, 1.0])
PAIR = np.repeat([0, 1], 4)


@st.composite
def grouped(draw):
    groups = draw(hnp.arrays(np.int64, st.integers(1, 12), elements=st.integers(0, 3)))
    rewards = st.sampled_from([0.0, 0.25, 0.5, 1.0, -1.0])
    return draw(hnp.arrays(np.float64, groups.shape, elements=rewards)), groups


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
