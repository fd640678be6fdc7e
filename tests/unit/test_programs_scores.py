"""pass@k and avg@k against the published numbers and against counting."""

import itertools
import math

import pytest

from rolljax.envs.scores import avg_at_k, pass_at_k
from rolljax.errors import DataError


def test_the_worked_examples():
    assert pass_at_k(8, 2, 4) == pytest.approx(0.785714, abs=1e-6)
    assert avg_at_k([(1, 0, 1), (0, 0, 1)]) == 0.5


@pytest.mark.parametrize("n", [1, 2, 5, 7])
def test_pass_at_k_is_the_share_of_draws_with_a_right_one(n):
    for c, k in itertools.product(range(n + 1), range(1, n + 1)):
        draws = list(itertools.combinations([1] * c + [0] * (n - c), k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_pass_at_1_is_the_mean_and_many_attempts_do_not_overflow():
    assert pass_at_k(10, 3, 1) == pytest.approx(0.3)
    assert math.isclose(pass_at_k(5000, 1, 2500), 0.5)


@pytest.mark.parametrize("n, c, k", [(4, 5, 1), (4, -1, 1), (4, 2, 5), (4, 2, 0), (0, 0, 1)])
def test_what_cannot_be_estimated(n, c, k):
    with pytest.raises(DataError):
        pass_at_k(n, c, k)


def test_a_mean_of_nothing():
    for attempts in ([], [(1, 0), ()]):
        with pytest.raises(DataError, match="at least one task"):
            avg_at_k(attempts)
