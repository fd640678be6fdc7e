"""Effects of critics on a policy, on problems of seconds: the trainer's own code with tables as policy and critics."""

import sys
from pathlib import Path

import jax
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import mini_critics


@pytest.fixture(scope="module", autouse=True)
def one_device():
    """Run the tiny programs on one device, without the passes that would cost more than they save."""
    with jax.default_device(jax.devices()[0]):
        yield


@pytest.fixture(scope="module")
def first():
    return mini_critics.learned("worth", "one critic, fitted first", seeds=5)


def test_critics_help_because_they_have_learned_from_the_step(first):
    """As in AsyPPO (arXiv 2510.01656): critics first, then values and advantages."""
    late = mini_critics.learned("worth", "one critic, fitted after", seeds=5)
    assert first.mean() > late.mean() + 0.05, (first, late)


@pytest.mark.slow
@pytest.mark.parametrize("arm", ["two, all data", "two, disjoint responses"])
def test_a_second_critic_adds_nothing_when_all_else_is_equal(first, arm):
    """Unlike in the paper; docs/algorithms.md says so."""
    two = mini_critics.learned("worth", arm, seeds=5)
    assert abs(two.mean() - first.mean()) < 0.04, (two, first)
