"""Attention-rhythm factors, against hand-computed numbers and a loop over one trajectory at a time."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rolljax.trainer.credit.rhythm import coupled_gamma, global_gamma, local_gamma

# of a six-token trajectory with attention rows [1], [.5 .5], [.6 .2 .2], ...
WAAD = np.array([[0, 0.5, 1.4, 1.0, 1.5, 1.8]])
FAI = np.array([[0.4, 0.1, 0.366667, 0.1, 0, 0]])
ALL = np.ones((1, 6), bool)


@st.composite
def cases(draw):
    """Generate (waad, fai, mask), NaN outside the mask; few different values, so that ties are common."""
    shape = draw(st.tuples(st.integers(1, 4), st.integers(1, 12)))
    mask = draw(hnp.arrays(bool, shape))
    values = st.sampled_from([0.0, 0.125, 0.25, 0.5, 1.0, 3.0])
    waad, fai = (np.where(mask, draw(hnp.arrays(np.float64, shape, elements=values)), np.nan) for _ in range(2))
    return waad, fai, mask


def top_of(values, frac):
    """Return the indices of the `floor(frac * len)` largest, the earlier of equal ones."""
    ranked = sorted(range(len(values)), key=lambda i: (-values[i], i))
    return set(ranked[: math.floor(frac * len(values) + 1e-9)])


def per_row(mask, gamma_of, *arrays):
    out = np.ones(mask.shape)
    for n, row in enumerate(mask):
        out[n, row] = gamma_of(*(x[n, row].tolist() for x in arrays))
    return out


def naive_local(waad, amp, top):
    jumps = [abs(a - b) for a, b in zip(waad, waad[1:], strict=False)] + [-1.0] * bool(waad)
    chosen = top_of(jumps, top)
    return [amp if t in chosen else 1.0 for t in range(len(waad))]


def naive_global(fai, amp, top):
    chosen = top_of(fai, top)
    return [amp if t in chosen else 1.0 for t in range(len(fai))]


def naive_coupled(waad, fai, amp, top, alpha, window, waad_pct, delta_pct):
    jumps = [abs(a - b) for a, b in zip(waad, waad[1:], strict=False)]
    anchors, dominated, openers = top_of(fai, top), set(), set()
    for t in anchors:
        before = list(range(max(0, t - window), t))
        if not before:
            continue
        opener = max(before, key=lambda u: (jumps[u], -u))
        if waad[t] <= np.quantile(waad, waad_pct) + 1e-12 and jumps[opener] >= np.quantile(jumps, delta_pct) - 1e-12:
            dominated.add(t)
            openers.add(opener)
    gamma = [1.0] * len(waad)
    for t in range(len(waad)):
        gamma[t] += (amp - 1) * (t in anchors - dominated)
        gamma[t] += (1 - alpha) * (amp - 1) * (t in dominated) + alpha * (amp - 1) * (t in openers)
    return gamma


def test_local():
    """Jumps .5 .9 .4 .5 .3; two of six tokens: the largest, and the earlier of the two halves."""
    np.testing.assert_allclose(np.abs(np.diff(WAAD)), [[0.5, 0.9, 0.4, 0.5, 0.3]], atol=1e-12)
    np.testing.assert_array_equal(local_gamma(WAAD, ALL), [[1.5, 1.5, 1, 1, 1, 1]])
    np.testing.assert_array_equal(local_gamma(WAAD, ALL, top=0.2), [[1, 1.5, 1, 1, 1, 1]])


def test_global():
    np.testing.assert_array_equal(global_gamma(FAI, ALL), [[1.5, 1, 1.5, 1, 1, 1]])


def test_coupled():
    """Two anchors, 0 and 3. The second looks back little and follows a large jump at 1: it shares with token 1."""
    waad = np.array([[3.0, 4.0, 0.0, 1.0, 3.0, 4.0]])  # jumps 1 4 1 2 1
    fai = np.array([[9.0, 0, 0, 8, 0, 0]])
    got = coupled_gamma(waad, fai, ALL, amp=1.5, top=0.4, alpha=0.25)
    np.testing.assert_allclose(got, [[1.5, 1.125, 1, 1.375, 1, 1]])
    near = coupled_gamma(waad, fai, ALL, amp=1.5, top=0.4, alpha=0.25, window=1)
    # the only jump in reach is at 2; the 60 % quantile of the jumps 1 1 1 2 4 lies between 1 and 2
    np.testing.assert_allclose(near, [[1.5, 1, 1, 1.5, 1, 1]])


def test_an_opener_that_is_an_anchor_gets_both_shares():
    waad = np.array([[3.0, 4.0, 0.0, 1.0, 3.0, 4.0]])
    fai = np.array([[0.0, 9, 8, 0, 0, 0]])
    got = coupled_gamma(waad, fai, ALL, amp=2.0, top=0.4, alpha=0.5)
    np.testing.assert_allclose(got, [[1, 2.5, 1.5, 1, 1, 1]])


def test_of_equal_jumps_the_earlier_opened():
    waad = np.array([[4.0, 0, 4, 0, 4, 4]])  # jumps 4 4 4 4 0
    fai = np.array([[0, 0, 0, 9.0, 0, 0]])
    for window, opener in ((1, 2), (2, 1), (3, 0)):
        got = coupled_gamma(waad, fai, ALL, top=0.2, window=window)
        np.testing.assert_array_equal(np.flatnonzero(got > 1), [opener, 3])


amps, tops = st.sampled_from([1.0, 1.5, 3.0]), st.sampled_from([0.0, 0.2, 0.4, 0.5, 1.0])


@given(cases(), amps, tops)
def test_local_and_global_are_the_loops(case, amp, top):
    waad, fai, mask = case
    np.testing.assert_allclose(
        local_gamma(waad, mask, amp, top), per_row(mask, lambda w: naive_local(w, amp, top), waad)
    )
    np.testing.assert_allclose(
        global_gamma(fai, mask, amp, top), per_row(mask, lambda f: naive_global(f, amp, top), fai)
    )


@given(cases(), amps, tops, st.sampled_from([0.0, 0.25, 0.5, 1.0]), st.integers(1, 3), st.sampled_from([0.4, 1.0]))
def test_coupled_is_the_loop(case, amp, top, alpha, window, waad_pct):
    waad, fai, mask = case
    got = coupled_gamma(waad, fai, mask, amp, top, alpha, window, waad_pct)
    want = per_row(mask, lambda w, f: naive_coupled(w, f, amp, top, alpha, window, waad_pct, 0.6), waad, fai)
    np.testing.assert_allclose(got, want)


@given(cases())
def test_amp_one_is_exactly_no_change(case):
    waad, fai, mask = case
    for got in (local_gamma(waad, mask, 1.0), global_gamma(fai, mask, 1.0), coupled_gamma(waad, fai, mask, 1.0)):
        np.testing.assert_array_equal(got, 1.0)


@given(cases(), tops)
def test_how_many_and_how_much(case, top):
    waad, fai, mask = case
    count = np.floor(top * mask.sum(1) + 1e-9)
    for got in (local_gamma(waad, mask, 1.5, top), global_gamma(fai, mask, 1.5, top)):
        np.testing.assert_array_equal((got == 1.5).sum(1), count)
        assert set(np.unique(got)) <= {1.0, 1.5} and (got[~mask] == 1).all()
    coupled = coupled_gamma(waad, fai, mask, 1.5, top)
    assert (coupled >= 1).all() and (coupled[~mask] == 1).all()
    assert ((coupled - 1).sum(1) <= 0.5 * count + 1e-9).all()  # sharing never adds to the sum


@given(cases())
def test_rows_do_not_see_each_other_nor_the_padding(case):
    waad, fai, mask = case
    whole = coupled_gamma(waad, fai, mask)
    for n in range(len(mask)):
        only = mask[n : n + 1]
        np.testing.assert_array_equal(coupled_gamma(waad[n : n + 1], fai[n : n + 1], only)[0], whole[n])
    wide = [np.pad(x, ((0, 0), (0, 3)), constant_values=np.nan) for x in (waad, fai)]
    padded = coupled_gamma(*wide, np.pad(mask, ((0, 0), (0, 3))))
    np.testing.assert_array_equal(padded[:, : mask.shape[1]], whole)


@pytest.mark.parametrize("percent", [7, 14, 40, 55, 57, 60])  # 0.07 * 100 > 7 and 0.57 * 100 < 57 in floats
def test_a_quantile_that_is_a_value_counts(percent):
    """With 100 k + 1 jumps every percentile is one of them: that jump reaches it, the next smaller one does not."""
    for k in (1, 2, 3):
        at = percent * k + 1  # of the jumps 1, 2, ... 100 k + 1
        for jump, factor in ((at, 1.25), (at - 1, 1.5)):
            jumps = [j for j in range(1, 100 * k + 2) if j != jump] + [jump]
            waad = np.cumsum([0.0, *jumps])[None]
            fai = np.arange(waad.size)[None]
            settings = {"top": 1 / waad.size, "window": 1, "waad_pct": 1.0, "delta_pct": percent / 100}
            assert coupled_gamma(waad, fai, np.ones(waad.shape), **settings)[0, -1] == factor


@pytest.mark.parametrize(
    "bad", [{"amp": 0.9}, {"top": 1.2}, {"top": 40}, {"alpha": -0.1}, {"alpha": 2.0}, {"window": 0}]
)
def test_bad_settings_are_refused(bad):
    with pytest.raises(ValueError):
        coupled_gamma(WAAD, FAI, ALL, **bad)


# ---- the paper's controls: as many tokens of the other end, or any --------------------------------------------------


def test_the_bottom_is_what_ranks_lowest():
    """FAI .4 .1 .367 .1 0 0: the two zeros. Jumps .5 .9 .4 .5 .3 and none for the last token: that one, and .3."""
    np.testing.assert_array_equal(global_gamma(FAI, ALL, pick="bottom"), [[1, 1, 1, 1, 1.5, 1.5]])
    np.testing.assert_array_equal(local_gamma(WAAD, ALL, pick="bottom"), [[1, 1, 1, 1, 1.5, 1.5]])


@pytest.mark.parametrize("gamma", [local_gamma, global_gamma])
@given(case=cases(), seed=st.integers(0, 9))
def test_any_tokens_are_as_many_and_follow_from_the_seed_alone(gamma, case, seed):
    waad, fai, mask = case
    values = waad if gamma is local_gamma else fai
    found = gamma(values, mask, pick="random", seed=seed)
    np.testing.assert_array_equal((found > 1).sum(1), (gamma(values, mask) > 1).sum(1))
    np.testing.assert_array_equal(found, gamma(np.where(mask, 1.0, np.nan), mask, pick="random", seed=seed))


def test_any_tokens_are_chosen_equally_often():
    found = np.mean([global_gamma(FAI, ALL, top=0.5, pick="random", seed=s) > 1 for s in range(2000)], axis=0)
    np.testing.assert_allclose(found, 0.5, atol=0.05)
