"""Statistics of evaluations: pass@k, majority votes, confidence intervals, comparisons of two models on the same tasks.

Pure functions of NumPy arrays in float64. The unit that is drawn at random is the task: attempts
at one task are not independent of each other, so they are averaged before anything is resampled.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

CHUNK = 1 << 20
"""Resampled values that a bootstrap holds in memory at once."""


@dataclasses.dataclass(frozen=True, slots=True)
class Interval:
    """A two-sided confidence interval."""

    low: float
    high: float
    method: str
    """`wilson` or `bootstrap`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    """The difference of the second model to the first on the same tasks."""

    mean: float
    """Mean of the differences by task."""
    low: float
    high: float
    p: float
    """Two-sided p-value of the hypothesis that the difference is 0."""
    tasks: int
    """Number of tasks."""


# ---- several attempts at one task -----------------------------------------------------------------------------------


def pass_at_k(n: int, c: int, k: int) -> float:
    """Estimate without bias the probability that at least one of `k` attempts is right, from `n` attempts of which `c`
    are.

    The estimate is `1 - C(n - c, k) / C(n, k)`, of Chen et al. 2021 (arXiv 2107.03374, equation 1). It is computed in
    integers and rounded once.

    Raises:
      ValueError: not `0 <= c <= n` and `1 <= k <= n`.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@{k} of {c} right attempts among {n} is not defined")
    every = math.comb(n, k)
    return (every - math.comb(n - c, k)) / every


def maj_at_k(answers: Sequence[str | None], right: Sequence[bool], k: int) -> float:
    """Compute the probability that the most frequent answer among `k` attempts is right, as the mean over all choices
    of `k` of the `n` attempts without replacement (self-consistency, Wang et al. 2022, arXiv 2203.11171, without its
    dependence on order).

    An attempt whose answer is None has no vote; without votes the result is wrong. Answers with equally many votes
    share the result. If attempts with one answer disagree, the answer counts as right in their proportion.

    Args:
      answers, right: of the attempts, `[n]`.

    Raises:
      ValueError: the lengths differ, or not `1 <= k <= n`.
    """
    n = len(answers)
    if len(right) != n or not 1 <= k <= n:
        raise ValueError(f"maj@{k} of {n} answers and {len(right)} verdicts is not defined")
    votes: collections.Counter[str] = collections.Counter(a for a in answers if a is not None)
    silent = n - votes.total()
    total = 0.0
    for answer, count in votes.items():
        verdicts = [bool(r) for a, r in zip(answers, right, strict=True) if a == answer]
        share = sum(verdicts) / len(verdicts)
        if share:
            others = [c for a, c in votes.items() if a != answer]
            total += share * _chance_to_win(count, others, silent, k) / math.comb(n, k)
    return total


def _chance_to_win(count: int, others: Sequence[int], silent: int, k: int) -> float:
    """Count the choices of `k` attempts in which an answer that `count` attempts gave wins, each over the number of
    winners."""
    found = 0.0
    for votes in range(1, min(count, k) + 1):
        # ways[ties][used]: choices of `used` attempts of others, of whom `ties` have as many votes and none has more
        ways = [[1] + [0] * (k - votes)]
        for other in others:
            ways = _with_another(ways, other, votes, k - votes)
        for ties, by_used in enumerate(ways):
            chosen = sum(w * math.comb(silent, k - votes - used) for used, w in enumerate(by_used))
            found += math.comb(count, votes) * chosen / (ties + 1)
    return found


def _with_another(ways: list[list[int]], count: int, most: int, room: int) -> list[list[int]]:
    """Return `ways` with one more answer, given by `count` attempts of which at most `most` are chosen."""
    after = [[0] * (room + 1) for _ in range(len(ways) + 1)]
    for ties, by_used in enumerate(ways):
        for used, number in enumerate(by_used):
            if number:
                for taken in range(min(count, most, room - used) + 1):
                    after[ties + (taken == most)][used + taken] += number * math.comb(count, taken)
    return after


# ---- intervals ------------------------------------------------------------------------------------------------------


def wilson(mean: float, n: int, confidence: float = 0.95) -> Interval:
    """Return the score interval of a proportion `mean` among `n` independent trials (Wilson 1927). It stays within 0
    and 1 and has a width even if all or none succeed."""
    if n < 1 or not 0 <= mean <= 1:
        raise ValueError(f"no proportion: {mean} of {n} trials")
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    scale = 1 + z * z / n
    middle = (mean + z * z / (2 * n)) / scale
    half = z / scale * math.sqrt(mean * (1 - mean) / n + z * z / (4 * n * n))
    low = 0.0 if mean == 0 else max(0.0, middle - half)
    return Interval(low, 1.0 if mean == 1 else min(1.0, middle + half), "wilson")


def bootstrap(
    domains: Sequence[np.ndarray],
    *,
    weights: Sequence[float] | None = None,
    confidence: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> Interval:
    """Return the percentile interval of the mean of the means of `domains` (Efron and Tibshirani 1993, chapter 13).

    Tasks are resampled with replacement within each domain. A task is one value, whatever its attempts, so they are
    clustered by task.

    Args:
      domains: of each domain one value for each task, `[tasks]`. weights: of the domains, in any unit; None: equal.
      seed: of the resampling; equal seeds give equal intervals.

    Raises:
      ValueError: a domain is empty.
    """
    means = np.average([_resampled(v, resamples, seed + i) for i, v in enumerate(domains)], axis=0, weights=weights)
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(float(low), float(high), "bootstrap")


def paired_bootstrap(
    first: np.ndarray, second: np.ndarray, *, confidence: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> Difference:
    """Return the difference of two models on the same tasks, by resampling tasks (paired bootstrap; Koehn 2004,
    "Statistical significance tests for machine translation evaluation").

    Args:
      first, second: one value for each task, in the same order, `[tasks]`.

    Returns:
      `second - first`. p is twice the smaller fraction of resamples at or beyond 0, with one added to both counts so
      that it is never 0.

    Raises:
      ValueError: the lengths differ, or there is no task.
    """
    if len(first) != len(second):
        raise ValueError(f"{len(first)} and {len(second)} tasks cannot be paired")
    by_task = np.asarray(second, np.float64) - np.asarray(first, np.float64)
    means = _resampled(by_task, resamples, seed)
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    beyond = min(np.count_nonzero(means <= 0), np.count_nonzero(means >= 0))
    p = min(1.0, 2 * (beyond + 1) / (resamples + 1))
    return Difference(float(by_task.mean()), float(low), float(high), float(p), len(by_task))


def resampled_means(domains: Sequence[np.ndarray], resamples: int, seed: int = 0) -> np.ndarray:
    """Return means over items resampled with replacement within each domain, for statistics of several values of an
    item: their quantiles are percentile intervals.

    Args:
      domains: of each the values of its items, `[items, values]`.

    Returns:
      `[domains, resamples, values]`.

    Raises:
      ValueError: a domain is empty.
    """
    found = []
    for i, values in enumerate(domains):
        if not len(values):
            raise ValueError("nothing to resample")
        rng, rows = np.random.default_rng(seed + i), max(1, CHUNK // values.size)
        sizes = [min(rows, resamples - start) for start in range(0, resamples, rows)]
        counts = [rng.multinomial(len(values), np.full(len(values), 1 / len(values)), size) for size in sizes]
        found.append(np.concatenate([c @ np.asarray(values, np.float64) for c in counts]) / len(values))
    return np.stack(found)


def _resampled(values: np.ndarray, resamples: int, seed: int) -> np.ndarray:
    """Return the means of `resamples` samples of `values [tasks]` with replacement, `[resamples]`."""
    values = np.asarray(values, np.float64)
    if not len(values):
        raise ValueError("nothing to resample")
    rng, rows = np.random.default_rng(seed), max(1, CHUNK // len(values))
    sizes = [min(rows, resamples - start) for start in range(0, resamples, rows)]
    return np.concatenate([values[rng.integers(len(values), size=(size, len(values)))].mean(axis=1) for size in sizes])
