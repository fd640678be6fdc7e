"""Aggregates token losses to one number: every scheme is a sum with one scale per token, counted over the whole update.

The scales are made on the host while a batch is packed, when every length is known; micro-batches and shards can then
add up in any order and cannot get a denominator wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

Aggregation = Literal[
    "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-sum-norm", "turn-sum-norm", "group-mean"
]
"""token-mean: every token counts the same. seq-mean-token-sum, seq-mean-token-mean: mean over sequences of the sum or
the mean over their tokens. seq-sum-norm: sum over everything, divided by sequences times the longest allowed answer
(Dr. GRPO, arXiv 2503.20783): no length bias. turn-sum-norm: the same with turns in place of sequences (GEM, arXiv
2510.01051), each turn a sample of its own. group-mean: mean over groups of the mean over their tokens, for losses
that are one number per group (a preference pair)."""


def token_scales(
    groups: Sequence[Sequence[np.ndarray]],
    kind: Aggregation,
    limit_tok: int,
    turns: Sequence[Sequence[np.ndarray]] | None = None,
) -> list[list[np.ndarray]]:
    """Scale of every token, float64, for masks `[T]` by group and sequence; 0 where the mask is False.

    `turns`: the turn of each token, in the same order; None: every sequence is one turn. Turns, sequences and groups
    without a valid token do not count.
    """
    lengths = [[int(np.count_nonzero(m)) for m in group] for group in groups]
    tokens = sum(map(sum, lengths))
    sequences = sum(n > 0 for group in lengths for n in group)
    num_groups = sum(any(group) for group in lengths)
    num_turns = sequences
    if turns is not None:
        pairs = [pair for ms, ts in zip(groups, turns, strict=True) for pair in zip(ms, ts, strict=True)]
        num_turns = sum(len(np.unique(t[m])) for m, t in pairs)

    def scale(group: list[int], length: int) -> float:
        if not length:
            return 0.0
        match kind:
            case "token-mean":
                return 1 / tokens
            case "seq-mean-token-sum":
                return 1 / sequences
            case "seq-mean-token-mean":
                return 1 / (sequences * length)
            case "seq-sum-norm":
                return 1 / (sequences * limit_tok)
            case "turn-sum-norm":
                return 1 / (num_turns * limit_tok)
            case "group-mean":
                return 1 / (num_groups * sum(group))

    return [
        [np.where(m, scale(ns, n), 0.0) for m, n in zip(group, ns, strict=True)]
        for group, ns in zip(groups, lengths, strict=True)
    ]
