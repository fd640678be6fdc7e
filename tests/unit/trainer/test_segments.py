"""Segment-level rewards: cuts, means and the mask of agreement, against hand-computed numbers and a loop."""

import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rolljax.trainer.credit.segments import agreement_mask, pivots, segment_rewards

Q = np.array([[0.1, 0.12, 0.08, -0.6, -0.55, -0.5, 0.4, 0.45]])
ALL = np.ones((1, 8), bool)


@st.composite
def cases(draw):
    """Generate (q, mask), NaN outside the mask; holes anywhere, rows may be empty."""
    shape = draw(st.tuples(st.integers(1, 4), st.integers(1, 12)))
    mask = draw(hnp.arrays(bool, shape))
    values = st.sampled_from([0.0, 0.05, -0.05, 0.25, -0.25, 0.75, -1.0, 2.0])
    return np.where(mask, draw(hnp.arrays(np.float64, shape, elements=values)), np.nan), mask


def naive_smooth(q, width):
    half, last = width // 2, len(q) - 1
    return [statistics.median(q[min(max(t + k, 0), last)] for k in range(-half, half + 1)) for t in range(len(q))]


def naive_starts(q, delta, min_len, flip):
    starts = [0] if q else []
    for t in range(1, len(q)):
        flips = np.sign(q[t]) != np.sign(q[t - 1]) and abs(q[t]) > flip
        if (abs(q[t] - q[t - 1]) > delta or flips) and t - starts[-1] >= min_len:
            starts.append(t)
    return starts


def naive_pivots(q, mask, delta, min_len, smooth, flip=0.1):
    rows = [naive_smooth(q[n, row].tolist(), smooth) for n, row in enumerate(mask)]
    if delta is None:
        changes = [abs(b - a) for row in rows for a, b in zip(row, row[1:], strict=False)]
        delta = statistics.pstdev(changes) if changes else 0.0
    out = np.zeros(mask.shape, bool)
    for n, row in enumerate(rows):
        out[n, np.flatnonzero(mask[n])[naive_starts(row, delta, min_len, flip)]] = True
    return out


@pytest.mark.parametrize("smooth", [1, 3])
def test_cuts_and_means(smooth):
    starts = pivots(Q, ALL, delta=0.3, smooth=smooth)
    np.testing.assert_array_equal(np.flatnonzero(starts), [0, 3, 6])
    rewards, number = segment_rewards(Q, ALL, starts)
    np.testing.assert_allclose(rewards, [[0.1] * 3 + [-0.55] * 3 + [0.425] * 2], atol=1e-12)
    np.testing.assert_array_equal(number, [[0, 0, 0, 1, 1, 1, 2, 2]])


def test_only_segments_that_agree():
    right = agreement_mask(Q, ALL, np.array([1]), delta=0.3, baseline=0.0)
    np.testing.assert_array_equal(right, [[1, 1, 1, 0, 0, 0, 1, 1]])
    assert right.sum() == 5
    wrong = agreement_mask(Q, ALL, np.array([-1]), delta=0.3, baseline=0.0)
    np.testing.assert_array_equal(wrong, ~right)
    assert wrong.sum() == 3


def test_baseline_is_the_mean_of_the_batch():
    """The mean is -.075, so a second trajectory of .5 moves it above the first segment's .1."""
    both = np.concatenate([Q, np.full((1, 8), 0.5)])
    mask = np.ones((2, 8), bool)
    alone = agreement_mask(Q, ALL, np.array([1]), delta=0.3)
    np.testing.assert_array_equal(alone, [[1, 1, 1, 0, 0, 0, 1, 1]])
    shared = agreement_mask(both, mask, np.array([1, 1]), delta=0.3)
    np.testing.assert_array_equal(shared, [[0, 0, 0, 0, 0, 0, 1, 1], [1] * 8])


def test_too_little_left_keeps_all():
    signs = np.array([1])
    np.testing.assert_array_equal(agreement_mask(Q, ALL, signs, delta=0.3, baseline=0.2), [[0] * 6 + [1, 1]])
    assert agreement_mask(Q, ALL, signs, delta=0.3, baseline=0.2, min_keep=0.26).all()
    assert agreement_mask(Q, ALL, signs, delta=0.3, baseline=0.5).all()  # nothing agrees
    assert not agreement_mask(Q, ALL, signs, delta=0.3, baseline=0.5, min_keep=0.0).any()
    assert agreement_mask(Q, ALL, np.array([0]), delta=0.3).all()


def test_change_of_sign_is_a_cut_when_it_is_large_enough():
    q = np.array([[0.2, 0.2, 0.2, -0.09, -0.09, -0.09, 0.15, 0.15, 0.15]])
    got = pivots(q, np.ones_like(q), delta=9.0, smooth=1)
    np.testing.assert_array_equal(np.flatnonzero(got), [0, 6])
    assert pivots(q, np.ones_like(q), delta=9.0, smooth=1, flip=0.2).sum() == 1


def test_smoothing_ignores_one_odd_token():
    q = np.array([[0.2, 0.2, 0.2, 0.2, -5.0, 0.2, 0.2, 0.2]])
    assert pivots(q, ALL, delta=0.3, smooth=3).sum() == 1
    assert pivots(q, ALL, delta=0.3, smooth=1, min_len=1).sum() == 3


thresholds, odd = st.sampled_from([None, 0.0, 0.3, 1.0]), st.sampled_from([1, 3, 5])


@given(cases(), thresholds, st.integers(1, 4), odd)
def test_pivots_are_the_loop(case, delta, min_len, smooth):
    q, mask = case
    got = pivots(q, mask, delta=delta, min_len=min_len, smooth=smooth)
    np.testing.assert_array_equal(got, naive_pivots(q, mask, delta, min_len, smooth))


def test_thresholds_of_the_batch_are_those_of_its_tokens():
    """Padding counts neither in the spread of the changes nor in the baseline."""
    rng = np.random.default_rng(1)
    mask = np.arange(60) < rng.integers(2, 12, 16)[:, None]
    q = np.where(mask, rng.normal(0.5, 0.2, mask.shape), np.nan)
    starts = pivots(q, mask, min_len=1, smooth=1)
    np.testing.assert_array_equal(starts, naive_pivots(q, mask, None, 1, 1))
    assert starts[:, 1:].any() and (starts != mask).any()
    rewards, _ = segment_rewards(q, mask, starts)
    agree = agreement_mask(q, mask, np.ones(16), min_len=1, smooth=1, min_keep=0.0)
    np.testing.assert_array_equal(agree, mask & (rewards > np.nanmean(q)))


def test_a_segment_at_the_baseline_agrees_with_nobody():
    for sign in (-1, 1):
        assert not agreement_mask(np.zeros((1, 8)), ALL, np.array([sign]), baseline=0.0, min_keep=0.0).any()


@given(cases(), thresholds, st.integers(1, 4))
def test_segments_cover_every_token_once(case, delta, min_len):
    q, mask = case
    starts = pivots(q, mask, delta=delta, min_len=min_len)
    rewards, number = segment_rewards(q, mask, starts)
    assert (number[~mask] == -1).all() and not rewards[~mask].any() and not (starts & ~mask).any()
    for n, row in enumerate(mask):
        ids = number[n, row]
        assert starts[n].sum() == len(set(ids)) and (np.diff(ids) >= 0).all()
        for s in set(ids):
            np.testing.assert_allclose(rewards[n][number[n] == s], q[n][number[n] == s].mean(), atol=1e-12)
            assert (ids == s).sum() >= min_len or s == ids.max()
    assert rewards.sum() == pytest.approx(q[mask].sum(), abs=1e-9)


@given(cases(), st.data(), st.sampled_from([None, 0.0, 0.3]), st.sampled_from([None, 0.0, 0.1]))
def test_agreement_is_the_loop(case, data, delta, baseline):
    q, mask = case
    signs = data.draw(hnp.arrays(np.int64, len(mask), elements=st.sampled_from([-1, 1])))
    got = agreement_mask(q, mask, signs, delta=delta, baseline=baseline)
    # a segment mean that equals the baseline up to rounding may fall on either side
    base = q[mask].sum() / max(mask.sum(), 1) if baseline is None else baseline
    rewards, _ = segment_rewards(q, mask, naive_pivots(q, mask, delta, 3, 3))
    for n, row in enumerate(mask):
        if (np.abs(rewards[n, row] - base) < 1e-9).any():
            continue
        agree = np.array([row[t] and signs[n] * (rewards[n, t] - base) > 0 for t in range(len(row))], bool)
        want = agree if agree.sum() >= 0.2 * row.sum() - 1e-9 else row
        np.testing.assert_array_equal(got[n], want)
    assert not (got & ~mask).any() and (got.sum(1) >= np.floor(0.2 * mask.sum(1))).all()


@given(cases(), st.data())
def test_what_stands_outside_the_mask_never_matters(case, data):
    q, mask = case
    other = np.where(mask, q, data.draw(hnp.arrays(np.float64, q.shape, elements=st.floats(-9, 9))))
    before, signs = q.copy(), np.resize([1, -1], len(mask))
    np.testing.assert_array_equal(pivots(q, mask), pivots(other, mask))
    np.testing.assert_array_equal(agreement_mask(q, mask, signs), agreement_mask(other, mask, signs))
    np.testing.assert_array_equal(segment_rewards(q, mask, mask)[0], segment_rewards(other, mask, mask)[0])
    np.testing.assert_array_equal(q, before)


def test_finds_the_span_that_decides():
    """Noise everywhere, and in one span per trajectory a shift whose sign is that of the trajectory."""
    rng = np.random.default_rng(0)
    signs = np.where(np.arange(64) % 2, 1, -1)
    span = (np.arange(40) - rng.integers(0, 31, 64)[:, None]) // 10 == 0
    q = rng.normal(0, 0.05, span.shape) + span * signs[:, None] * 0.8
    # the baseline of each sign lies half way up the shift
    found = np.zeros(span.shape, bool)
    for sign in (-1, 1):
        own = signs == sign
        found[own] = agreement_mask(q[own], np.ones_like(span[own]), signs[own], delta=0.4, baseline=sign * 0.4)
    f1 = 2 * (found & span).sum() / (found.sum() + span.sum())
    assert f1 > 0.95


@pytest.mark.parametrize("bad", [{"min_len": 0}, {"smooth": 2}, {"smooth": 0}])
def test_bad_settings_are_refused(bad):
    with pytest.raises(ValueError):
        pivots(Q, ALL, **bad)
