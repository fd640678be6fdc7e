"""pass@k, maj@k, intervals and comparisons against other ways to the same numbers: all choices written out, SciPy, the
formula of the papers' own code, and how often an interval holds what it should."""

import collections
import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from rolljax.evaluation.statistics import bootstrap, maj_at_k, paired_bootstrap, pass_at_k, wilson


def every_choice(values, k, of):
    """Average `of` over all choices of `k`, in float64."""
    found = [of(choice) for choice in itertools.combinations(values, k)]
    return math.fsum(found) / len(found)


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_pass_at_k_is_the_share_of_choices_with_a_right_attempt(n):
    for c in range(n + 1):
        for k in range(1, n + 1):
            wanted = every_choice([1] * c + [0] * (n - c), k, lambda chosen: float(any(chosen)))
            assert pass_at_k(n, c, k) == pytest.approx(wanted, abs=1e-15)


def product_form(n, c, k):
    """Compute `1 - prod(1 - k / i)` over i = n - c + 1 ... n, as published with HumanEval and in lm-eval's code
    tasks."""
    return 1.0 if n - c < k else 1.0 - float(np.prod(1.0 - k / np.arange(n - c + 1, n + 1, dtype=np.float64)))


@given(st.integers(1, 300), st.data())
def test_pass_at_k_is_what_others_compute(n, data):
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    assert pass_at_k(n, c, k) == pytest.approx(product_form(n, c, k), abs=1e-12)
    assert pass_at_k(n, c, 1) == c / n


def test_pass_at_k_known_values():
    assert pass_at_k(8, 2, 4) == pytest.approx(0.785714, abs=1e-6)
    assert pass_at_k(10_000, 1, 1) == 1e-4  # no rounding of a difference of nearly equal numbers
    for n, c, k in ((4, 5, 1), (4, -1, 1), (4, 1, 5), (4, 1, 0)):
        with pytest.raises(ValueError, match="not defined"):
            pass_at_k(n, c, k)


def majority(chosen):
    """Return whether the most frequent answer is right; ties share."""
    votes = collections.Counter(answer for answer, _ in chosen if answer is not None)
    if not votes:
        return 0.0
    winners = [answer for answer, count in votes.items() if count == max(votes.values())]
    return math.fsum(float(dict(chosen)[answer]) for answer in winners) / len(winners)


@given(st.lists(st.sampled_from(["a", "b", "c", "d", None]), min_size=1, max_size=8), st.data())
def test_maj_at_k_is_the_share_of_choices_whose_majority_is_right(answers, data):
    right = data.draw(st.sets(st.sampled_from("abcd")))
    verdicts, k = [a in right for a in answers], data.draw(st.integers(1, len(answers)))
    wanted = every_choice(list(zip(answers, verdicts, strict=True)), k, majority)
    assert maj_at_k(answers, verdicts, k) == pytest.approx(wanted, abs=1e-12)


def test_maj_at_k_known_values():
    assert maj_at_k(["1", "1", "2"], [True, True, False], 3) == 1
    assert maj_at_k(["1", "2"], [True, False], 2) == 0.5
    assert maj_at_k([None, "2"], [False, True], 2) == 1  # one that says nothing has no vote
    assert maj_at_k([None, None], [False, False], 2) == 0
    many = ["right"] * 40 + ["wrong"] * 24
    assert 0.97 < maj_at_k(many, [a == "right" for a in many], 33) < 1  # 10^18 choices, counted
    assert maj_at_k(many, [a == "right" for a in many], 1) == 40 / 64
    with pytest.raises(ValueError, match="not defined"):
        maj_at_k(["1"], [True, False], 1)


@pytest.mark.parametrize("confidence", [0.9, 0.95])
def test_wilson_is_scipys(confidence):
    for n in (1, 7, 100):
        for right in {0, 1, n // 2, n}:
            theirs = stats.binomtest(right, n).proportion_ci(confidence, method="wilson")
            ours = wilson(right / n, n, confidence)
            assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=1e-12)
    assert wilson(0.0, 10).high > 0.2 and wilson(1.0, 10).low < 0.8


def test_the_bootstrap_agrees_with_scipys_and_repeats_itself():
    values = np.random.default_rng(0).beta(0.5, 0.5, 60)
    ours = bootstrap([values], seed=3)
    theirs = stats.bootstrap(
        (values,), np.mean, n_resamples=10_000, method="percentile", rng=np.random.default_rng(1)
    ).confidence_interval
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=0.01)
    assert ours == bootstrap([values], seed=3) != bootstrap([values], seed=4)
    one_by_one = bootstrap([values[:20], values[20:]], seed=3)
    assert one_by_one.low < (values[:20].mean() + values[20:].mean()) / 2 < one_by_one.high


def test_clustered_intervals_hold_the_truth_and_unclustered_ones_do_not():
    """Tasks whose attempts are alike: an interval over single attempts would be far too narrow."""
    rng, held, held_alone = np.random.default_rng(0), 0, 0
    for _ in range(200):
        chance = rng.beta(0.3, 0.3, 40)
        attempts = rng.random((40, 8)) < chance[:, None]
        by_task, alone = bootstrap([attempts.mean(1)], resamples=400), wilson(attempts.mean(), attempts.size)
        held += by_task.low <= 0.5 <= by_task.high
        held_alone += alone.low <= 0.5 <= alone.high
    assert 0.9 <= held / 200 <= 0.99 and held_alone / 200 < 0.75


def test_pairing_sees_what_two_intervals_do_not():
    rng = np.random.default_rng(0)
    first = rng.random(300)
    second = np.clip(first + rng.normal(0.03, 0.05, 300), 0, 1)
    found = paired_bootstrap(first, second)
    assert found.mean == pytest.approx((second - first).mean()) and found.low < found.mean < found.high
    assert found.p < 0.001 and found.tasks == 300 and found.low > 0
    alone = [bootstrap([v]) for v in (first, second)]
    assert alone[0].high > alone[1].low
    assert paired_bootstrap(second, first).mean == -found.mean
    same = paired_bootstrap(first, first)
    assert (same.mean, same.p) == (0, 1)
    with pytest.raises(ValueError, match="paired"):
        paired_bootstrap(first, second[:-1])


def test_p_values_are_uniform_where_nothing_differs():
    rng = np.random.default_rng(0)
    found = [paired_bootstrap(*rng.random((2, 50)), resamples=400, seed=i).p for i in range(300)]
    assert abs(np.mean(np.array(found) < 0.1) - 0.1) < 0.05
