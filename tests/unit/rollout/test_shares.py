"""Exact shares: the numbers of one step, of many, and the order within a step."""

import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolljax.errors import ConfigError
from rolljax.rollout.shares import StepPlan, apportion, normalised, spread

ROLL = {"math": 0.4, "code": 0.3, "general": 0.3}
"""ROLL's RLVR mixture (arXiv 2506.06122)."""


@pytest.mark.parametrize(("groups", "want"), [(10, (4, 3, 3)), (7, (3, 2, 2)), (1, (1, 0, 0)), (64, (26, 19, 19))])
def test_the_first_step_goes_by_largest_remainders(groups, want):
    assert tuple(apportion(groups, ROLL, {}).values()) == want


def test_what_remains_is_carried_over():
    carried = {}
    steps = [tuple(apportion(7, ROLL, carried).values()) for _ in range(10)]
    assert [sum(column) for column in zip(*steps, strict=True)] == [28, 21, 21]
    assert all(abs(owed) < 1e-6 for owed in carried.values())
    assert len(set(steps)) > 1


WEIGHTS = st.lists(st.integers(1, 40), min_size=1, max_size=8)


@settings(max_examples=150, deadline=None)
@given(WEIGHTS, st.integers(1, 40))
def test_totals_are_exact_and_every_step_is_near(weights, groups):
    shares = normalised({str(i): float(w) for i, w in enumerate(weights)})
    carried, total = {}, Counter()
    for step in range(1, 1 + sum(weights)):
        found = apportion(groups, shares, carried)
        total.update(found)
        assert all(abs(found[d] - groups * share) < 1 for d, share in shares.items())
        assert all(abs(total[d] - step * groups * share) < 1 for d, share in shares.items())
    assert [total[d] for d in shares] == [groups * w for w in weights]  # each is a whole number now


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 20), min_size=1).filter(lambda n: sum(n.values()) > 0))
def test_the_places_of_a_step_are_mixed(numbers):
    places = spread(numbers)
    assert Counter(places) == +Counter(numbers)
    for first in range(len(places)):
        for name, number in numbers.items():
            assert abs(places[:first].count(name) - first * number / len(places)) < max(2, len(numbers) / 2)


def test_a_step_stays_as_it_was_planned():
    shares = dict(ROLL)
    plan = StepPlan(10, lambda step: shares)
    before = list(plan.first(0, 25))
    shares |= {"math": 0.0, "code": 1.0, "general": 0.0}
    assert list(plan.first(0, 25)) == before and set(plan.places(3)) == {"code"}
    plan.forget(2)
    again = StepPlan(10, lambda step: shares)
    again.restore(json.loads(json.dumps(plan.state())))
    assert again.places(2) == plan.places(2) and again.places(7) == plan.places(7)


def test_weights_that_are_none_are_refused():
    for weights in ({"a": -1.0, "b": 2.0}, {"a": 0.0}, {"a": float("nan")}):
        with pytest.raises(ConfigError, match="weights"):
            normalised(weights)
