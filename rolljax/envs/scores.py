"""Scores of repeated attempts at the same tasks."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rolljax.errors import DataError


def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that at least one of `k` attempts is right, estimated without bias from `c` right ones among `n`:
    1 - C(n - c, k) / C(n, k) (Chen et al. 2021, "Evaluating Large Language Models Trained on Code").

    Raises:
      DataError: not 0 <= c <= n, or not 1 <= k <= n: fewer attempts than `k` give no unbiased estimate.
    """
    if not 0 <= c <= n:
        raise DataError(f"{c} of {n} attempts cannot be right")
    if not 1 <= k <= n:
        raise DataError(f"pass@{k} cannot be estimated from {n} attempts: take at least {k}")
    return 1 - math.comb(n - c, k) / math.comb(n, k)


def avg_at_k(attempts: Sequence[Sequence[float]]) -> float:
    """Mean over tasks of the mean over each task's attempts.

    Raises:
      DataError: no task, or a task with no attempt.
    """
    if not attempts or not all(len(a) for a in attempts):
        raise DataError("a mean needs at least one task, and an attempt at each")
    return sum(sum(a) / len(a) for a in attempts) / len(attempts)
