"""Decides whether a step without trained tokens is due to its rewards, or to settings under which no step could train.
NumPy only.

A step whose rewards are all equal gives no signal, but a later step may. Settings that exclude every token regardless
of the samples (a filter that nothing passes, weights that are all 0) never give one: the run would continue to its end
and learn nothing.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from rolljax.trainer.algorithms.base import Algorithm, AlgorithmState
from rolljax.trainer.credit.episodes import Credit, Episodes


def is_empty(result: Credit, e: Episodes) -> bool:
    """Return whether credit left no token to train on."""
    return not result.trained(e.mask).any()


def could_teach(algorithm: Algorithm, e: Episodes, algorithm_state: AlgorithmState) -> bool:
    """Return whether credit would keep any token of these episodes under the best conditions: answers short and
    complete, successes and failures in every group, equal log-probs in sampler and trainer."""
    return not is_empty(algorithm.credit(at_best(algorithm, e), algorithm_state), e)


def at_best(algorithm: Algorithm, e: Episodes) -> Episodes:
    """Return only the first sampled token of each episode, with rewards evenly spaced over 1 in every group, around the
    middle of the range that a filter accepts."""
    sampled = e.mask & ~e.expert
    first = np.where(sampled.any(1, keepdims=True), sampled, e.mask)
    first &= first.cumsum(1) == 1
    low, high = algorithm.solve_range or (0.0, 1.0)
    rewards = np.zeros(e.num)
    for group in np.unique(e.groups):
        members = np.flatnonzero(e.groups == group)
        spaced = np.linspace(-0.5, 0.5, len(members)) if len(members) > 1 else np.array([0.5])
        rewards[members] = (low + high) / 2 + spaced
    by_turn = np.zeros_like(e.turn_rewards)
    by_turn[np.arange(e.num), e.num_turns - 1] = rewards
    return dataclasses.replace(
        e,
        mask=first,
        turns=np.where(first, e.turns, -1),
        rewards=rewards,
        turn_rewards=by_turn,
        success=rewards >= rewards.mean(),
        truncated=np.zeros(e.num, bool),
        trainer_logp=None if e.trainer_logp is None else e.sampler_logp,
    )
