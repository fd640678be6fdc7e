"""The published formulas of RecGPT (arXiv 2507.22879), as pure functions of float64."""

from __future__ import annotations

import math
from collections.abc import Sequence


def hit_rate(ranks: Sequence[int | None], k: int) -> float:
    """Compute HR@k: the fraction of users whose held-out item is among their first `k`.

    Args:
      ranks: of the item, from 1; None: it is not in the list.
    """
    if not ranks:
        raise ValueError("no user")
    return sum(rank is not None and rank <= k for rank in ranks) / len(ranks)


def novelty(shares: Sequence[float]) -> float:
    """Compute the mean self-information of recommended items, `-log2(share)`, in bits (Zhou et al. 2010, PNAS 107).

    Args:
      shares: of each item among all interactions, above 0.
    """
    return math.fsum(-math.log2(share) for share in shares) / len(shares) if shares else 0.0


def accuracy_f1(judged: Sequence[bool], reference: Sequence[bool]) -> tuple[float, float]:
    """Compare a judge with people: the fraction of equal verdicts, and F1 of "pass" (0 if neither ever passes)."""
    if len(judged) != len(reference) or not reference:
        raise ValueError(f"{len(judged)} verdicts and {len(reference)} labels")
    pairs = list(zip(judged, reference, strict=True))
    both, either = sum(a and b for a, b in pairs), sum(judged) + sum(reference)
    return sum(a == b for a, b in pairs) / len(pairs), 2 * both / either if either else 0.0
