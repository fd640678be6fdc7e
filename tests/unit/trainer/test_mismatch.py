"""Mismatch of trainer and sampler: levels, weights and filters, against hand-computed numbers and a loop."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rolljax.errors import ConfigError
from rolljax.trainer.credit.mismatch import Correction, effective_frac, log_ratio

LEVELS = ["token", "turn", "geometric", "trajectory"]
# one trajectory: two sampled tokens, one of a tool (outside the mask), two sampled tokens
MASK = np.array([[1, 1, 0, 1, 1]], bool)
TURNS = np.array([[0, 0, -1, 1, 1]])
SAMPLER = np.array([[-1.0, -2.0, np.nan, -0.5, -1.5]])
TRAINER = SAMPLER + np.array([[0.1, 0.3, np.nan, 0.0, -0.4]])


@st.composite
def cases(draw, size=3.0):
    shape = draw(st.tuples(st.integers(1, 4), st.integers(1, 8)))
    mask = draw(hnp.arrays(bool, shape))
    steps = draw(hnp.arrays(np.int64, shape, elements=st.integers(0, 1)))
    turns = np.where(mask, np.cumsum(steps, axis=1), -1)
    gap = draw(hnp.arrays(np.float64, shape, elements=st.floats(-size, size)))
    sampler = draw(hnp.arrays(np.float64, shape, elements=st.floats(-6, 0)))
    return np.where(mask, sampler + gap, np.nan), np.where(mask, sampler, np.nan), mask, turns


def pooled(values, mask, turns, level):
    """Pool values by level, token by token and the slow way."""
    out = np.zeros(mask.shape)
    for n, t in zip(*np.nonzero(mask), strict=True):
        if level == "token":
            own = [values[n, t]]
        else:
            own = [values[n, u] for u in np.flatnonzero(mask[n]) if level != "turn" or turns[n, u] == turns[n, t]]
        out[n, t] = math.fsum(own) / (1 if level == "trajectory" else len(own))
    return out


@pytest.mark.parametrize(
    ("level", "want"),
    [
        ("token", [math.exp(0.1), math.exp(0.3), 0, 1, math.exp(-0.4)]),
        ("turn", [1.221403, 1.221403, 0, 0.818731, 0.818731]),
        ("geometric", [1, 1, 0, 1, 1]),
        ("trajectory", [1, 1, 0, 1, 1]),
    ],
)
def test_levels(level, want):
    got = log_ratio(TRAINER, SAMPLER, MASK, TURNS, level)
    assert got[0, 2] == 0
    np.testing.assert_allclose(np.where(MASK, np.exp(got), 0)[0], want, atol=1e-6)


def test_band_leaves_one_segment_out():
    weights, keep = Correction("turn", ratio_band=(0.8, 1.2)).apply(TRAINER, SAMPLER, MASK, TURNS)
    np.testing.assert_array_equal(keep, [[False, False, False, True, True]])
    np.testing.assert_allclose(weights, [[1.2, 1.2, 0, 0.818731, 0.818731]], atol=1e-6)


def test_chunk_filter_of_ipa():
    """Chunks of 2, 3 and 1 tokens; only the middle one is more than five times likelier per token."""
    gap = np.array([[0, 0.1, 2, 1.5, 2, 0.01]])
    turns, mask = np.array([[0, 0, 1, 1, 1, 2]]), np.ones((1, 6), bool)
    sampler = np.full((1, 6), -3.0)
    ratio = np.exp(log_ratio(sampler + gap, sampler, mask, turns, "turn"))
    np.testing.assert_allclose(ratio[0, [0, 2, 5]], [1.051271, 6.254701, 1.010050], atol=1e-6)
    ipa = Correction(level="turn", weight_cap=None, ratio_band=(0, 5))
    weights, keep = ipa.apply(sampler + gap, sampler, mask, turns)
    np.testing.assert_array_equal(keep, [[True, True, False, False, False, True]])
    np.testing.assert_array_equal(weights, 1)
    wider = Correction(level="turn", weight_cap=None, ratio_band=(0, 10)).apply(sampler + gap, sampler, mask, turns)
    assert wider[1].all()


def test_a_long_chunk_explodes_only_as_a_product():
    mask, turns = np.ones((1, 40), bool), np.zeros((1, 40), int)
    sampler = np.full((1, 40), -1.0)
    trainer = sampler + math.log(1.1)
    for level in ("turn", "geometric"):
        np.testing.assert_allclose(np.exp(log_ratio(trainer, sampler, mask, turns, level)), 1.1)
    np.testing.assert_allclose(np.exp(log_ratio(trainer, sampler, mask, turns, "trajectory")), 45.26, atol=5e-3)


@given(cases(), st.sampled_from(LEVELS))
def test_log_ratio_is_the_loop(case, level):
    trainer, sampler, mask, turns = case
    want = pooled(trainer - sampler, mask, turns, level)
    np.testing.assert_allclose(log_ratio(trainer, sampler, mask, turns, level), want, atol=1e-9)


bands = st.none() | st.sampled_from([(0.8, 1.2), (-0.2, 0.2), (0, 5), (-1, 1)])


@given(cases(), st.sampled_from(LEVELS), st.sampled_from([None, 1.2, 0.5]), bands, bands)
def test_corrections_are_the_loop(case, level, cap, ratio_band, prob_band):
    trainer, sampler, mask, turns = case
    before = trainer.copy(), sampler.copy(), mask.copy(), turns.copy()
    weights, keep = Correction(level, cap, ratio_band, prob_band).apply(trainer, sampler, mask, turns)
    ratio = np.exp(pooled(trainer - sampler, mask, turns, level))
    diff = pooled(np.exp(trainer) - np.exp(sampler), mask, turns, level)
    for place in np.ndindex(mask.shape):
        if not mask[place]:
            assert weights[place] == 0 and not keep[place]
            continue
        assert weights[place] == pytest.approx(1 if cap is None else min(ratio[place], cap), rel=1e-9)
        away = [
            abs(x - end) for x, band in ((ratio[place], ratio_band), (diff[place], prob_band)) if band for end in band
        ]
        if min(away, default=1) > 1e-9:
            inside = ratio_band is None or ratio_band[0] <= ratio[place] <= ratio_band[1]
            inside &= prob_band is None or prob_band[0] <= diff[place] <= prob_band[1]
            assert keep[place] == inside
    np.testing.assert_array_equal(before[0], trainer)
    np.testing.assert_array_equal(before[1], sampler)
    assert (before[2] == mask).all() and (before[3] == turns).all()


@given(cases(), st.sampled_from(LEVELS))
def test_a_sampler_that_agrees_is_not_corrected(case, level):
    _, sampler, mask, turns = case
    weights, keep = Correction(level, 1.2, (0.8, 1.2), (-0.2, 0.2)).apply(sampler, sampler, mask, turns)
    np.testing.assert_array_equal(weights, mask)
    np.testing.assert_array_equal(keep, mask)


@given(cases())
def test_several_at_once(case):
    """Each sees the tokens that all see; weights are multiplied, and every filter must keep a token."""
    trainer, sampler, mask, turns = case
    settings = (("token", 1.2, (0.5, 2)), ("turn", None, (0.9, 1.1)), ("trajectory", 3.0, None))
    alone = [Correction(*s).apply(trainer, sampler, mask, turns) for s in settings]
    first, *others = (Correction(*s) for s in settings)
    weights, keep = dataclasses.replace(first, also=tuple(others)).apply(trainer, sampler, mask, turns)
    np.testing.assert_allclose(weights, np.prod([w for w, _ in alone], axis=0))
    np.testing.assert_array_equal(keep, np.all([k for _, k in alone], axis=0))


def test_weights_anywhere_are_weights():
    filters = Correction(weight_cap=None, ratio_band=(0, 5))
    assert not filters.weighs and not dataclasses.replace(filters, also=(filters,)).weighs
    assert dataclasses.replace(filters, also=(Correction("trajectory"),)).weighs


def test_differences_of_probabilities_are_rolls():
    """github.com/alibaba/ROLL, roll/utils/train_infer_corrections.py: token differences, their mean over a segment or a
    trajectory ("geometric"), or their sum over it."""
    apart = np.exp(TRAINER[0]) - np.exp(SAMPLER[0])
    first, second = apart[:2].mean(), apart[3:].mean()
    assert not np.isclose(first, np.exp(TRAINER[0, :2].mean()) - np.exp(SAMPLER[0, :2].mean()), rtol=1e-2)
    for level, numbers in (
        ("turn", [first, first, second, second]),
        ("geometric", [apart[[0, 1, 3, 4]].mean()] * 4),
        ("trajectory", [apart[[0, 1, 3, 4]].sum()] * 4),
    ):
        for number in numbers:
            kept = Correction(level, None, prob_band=(number - 1e-9, number + 1e-9)).apply(
                TRAINER, SAMPLER, MASK, TURNS
            )[1]
            np.testing.assert_array_equal(kept[0, [0, 1, 3, 4]], np.isclose(numbers, number))


@given(cases(size=1000.0))
def test_stays_finite_however_far_apart(case):
    trainer, sampler, mask, turns = case
    for level in LEVELS:
        weights, keep = Correction(level, ratio_band=(0, 5), prob_band=(-1, 1)).apply(trainer, sampler, mask, turns)
        assert np.isfinite(weights).all() and (weights <= 1.2).all() and not (keep & ~mask).any()


def test_float32_log_probs_are_subtracted_in_float64():
    trainer, sampler = np.float32([[-1.0000001, -20.0]]), np.float32([[-1.0, -3e-8]])
    got = log_ratio(trainer, sampler, np.ones((1, 2)), np.zeros((1, 2), int), "token")
    np.testing.assert_array_equal(got, trainer.astype(np.float64) - sampler.astype(np.float64))
    assert got[0, 1] != -20


@pytest.mark.parametrize(
    ("setting", "bad"),
    [
        ("level", {"level": "chunk"}),
        ("weight_cap", {"weight_cap": 0.0}),
        ("ratio_band", {"ratio_band": (1.2, 0.8)}),
        ("prob_band", {"prob_band": (0.1,)}),
    ],
)
def test_bad_settings_are_refused(setting, bad):
    with pytest.raises(ConfigError, match=f"Correction.{setting}"):
        Correction(**bad)


def test_unknown_level():
    with pytest.raises(ValueError, match="level is one of"):
        log_ratio(TRAINER, SAMPLER, MASK, TURNS, "chunk")


# ---- effective sample size ------------------------------------------------------------------------------------------


@given(hnp.arrays(np.float64, st.integers(1, 30), elements=st.floats(-20, 20)))
def test_effective_sample_size(log_weights):
    weights = [math.exp(x) for x in log_weights]
    want = math.fsum(weights) ** 2 / (len(weights) * math.fsum(w * w for w in weights))
    assert effective_frac(log_weights) == pytest.approx(want, rel=1e-9)
    assert 1 / len(weights) - 1e-9 <= effective_frac(log_weights) <= 1 + 1e-9


def test_effective_sample_size_at_its_ends():
    assert effective_frac(np.full(7, -3.0)) == pytest.approx(1)
    assert effective_frac(np.array([0.0, -800.0, -900.0, -1000.0])) == pytest.approx(1 / 4)
    assert effective_frac(np.array([900.0, 900.0])) == pytest.approx(1)
    assert effective_frac(np.zeros(0)) == 1
