"""Rewards to advantages: pure functions over NumPy arrays, float64 inside and out.

Shapes: N trajectories, T sampled tokens of one (padded; `mask_NT` is True where a token exists), K turns, M critics.
Values under a False mask, even NaN, never affect a result; results there are 0. Inputs are not changed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Literal, get_args

import numpy as np

Mean = Literal["none", "batch", "group", "leave_one_out", "running"]
Std = Literal["none", "batch", "group", "group_mean", "running"]
Shard = Literal["response", "prompt"]
_ROUNDING = 1e-12  # values this close to each other, relative to their size, are equal


class GroupStats:
    """Statistics within groups, each handed back per member `[N]`. Ids are any integers; members need not be adjacent.

    Attributes:
      index_N: position of the group of each member in the sorted distinct ids.
      size_N: number of members of that group.
    """

    def __init__(self, groups_N: np.ndarray) -> None:
        _, index, count = np.unique(np.asarray(groups_N), return_inverse=True, return_counts=True)
        self.index_N, self._groups = index.reshape(-1), len(count)
        self.size_N = count[self.index_N]

    def sum(self, values_N: np.ndarray) -> np.ndarray:
        """Sum over the group of each member, `[N]`."""
        return np.bincount(self.index_N, values_N, self._groups)[self.index_N]

    def low(self, values_N: np.ndarray) -> np.ndarray:
        """Return the smallest value of each member's group, `[N]`."""
        lowest = np.full(self._groups, np.inf)
        np.minimum.at(lowest, self.index_N, values_N)
        return lowest[self.index_N]

    def high(self, values_N: np.ndarray) -> np.ndarray:
        """Return the largest value of each member's group, `[N]`."""
        return -self.low(-values_N)

    def flat(self, values_N: np.ndarray) -> np.ndarray:
        """Return whether all values of the group are equal, up to rounding; bool `[N]`."""
        low, high = self.low(values_N), self.high(values_N)
        return high - low <= _ROUNDING * np.maximum(np.abs(low), np.abs(high))

    def mean(self, values_N: np.ndarray) -> np.ndarray:
        """Return the mean of each member's group, `[N]`."""
        # the clip makes equal values differ from their mean by exactly 0
        return np.clip(self.sum(values_N) / self.size_N, self.low(values_N), self.high(values_N))

    def std(self, values_N: np.ndarray, ddof: int = 1) -> np.ndarray:
        """Return the standard deviation of each member's group; 0 in groups of one and where all values are equal."""
        squares = self.sum((values_N - self.mean(values_N)) ** 2)
        return np.where(self.flat(values_N), 0.0, np.sqrt(squares / np.maximum(self.size_N - ddof, 1)))

    def sibling(self) -> np.ndarray:
        """Return the number of earlier members in the group of each one; int `[N]`."""
        order = np.argsort(self.index_N, kind="stable")
        index = self.index_N[order]
        sibling = np.empty(len(index), np.int64)
        sibling[order] = np.arange(len(index)) - np.searchsorted(index, index)
        return sibling


@dataclasses.dataclass(frozen=True)
class RunningMoments:
    """Count, mean and sum of squared deviations of everything seen so far: three floats to keep between steps."""

    count: float = 0.0
    mean: float = 0.0
    m2: float = 0.0

    def add(self, values: np.ndarray | Iterable[float]) -> RunningMoments:
        """Return the moments with `values` added (the parallel update of Chan, Golub and LeVeque)."""
        new = np.asarray(values if isinstance(values, np.ndarray) else list(values), np.float64).reshape(-1)
        if not new.size:
            return self
        mean = float(new.mean())
        count, gap = self.count + new.size, mean - self.mean
        m2 = self.m2 + float(((new - mean) ** 2).sum()) + gap * gap * self.count * new.size / count
        return RunningMoments(float(count), self.mean + gap * new.size / count, m2)

    @property
    def std(self) -> float:
        """Unbiased (ddof 1); 0 before the second value."""
        return math.sqrt(self.m2 / (self.count - 1)) if self.count > 1 else 0.0


def normalise(
    values_N: np.ndarray,
    groups_N: np.ndarray | None = None,
    *,
    mean: Mean = "group",
    std: Std = "group",
    ddof: int = 1,
    eps: float = 1e-6,
    running: RunningMoments | None = None,
) -> np.ndarray:
    """Return `(value - mean) / (std + eps)`, each taken over nothing, the batch, the group or all steps so far; float64
    `[N]`.

    mean and std "group": GRPO (arXiv 2402.03300). mean "group", std "none": Dr. GRPO (arXiv 2503.20783). mean
    "leave_one_out", std "none": RLOO (arXiv 2402.14740). mean and std "batch": REINFORCE++. mean "group", std "batch":
    Lite PPO. mean "group", std "group_mean" (divide by the group's mean): MaxRL (arXiv 2602.02710).

    A group of one has nothing to compare with: its centred value is 0. A standard deviation of 0 (one value, or all
    equal) does not divide.

    Args:
      values_N: rewards or returns.
      groups_N: group of each; None: one group.
      ddof: 1 for the unbiased variance; does not concern `running`.
      running: statistics for "running", this step's values already added if they are to count.
    """
    _known("mean", mean, Mean)
    _known("std", std, Std)
    values = np.asarray(values_N, np.float64)
    if "running" in (mean, std) and running is None:
        raise ValueError('mean or std "running" needs `running`')
    if not values.size:
        return values.copy()
    batch = GroupStats(np.zeros(len(values), np.int64))
    group = batch if groups_N is None else GroupStats(groups_N)
    past = running or RunningMoments()
    centred = values
    if mean == "running":
        centred = values - past.mean
    elif mean != "none":
        centred = values - (batch if mean == "batch" else group).mean(values)
    if mean == "leave_one_out":
        centred = centred * (group.size_N / np.maximum(group.size_N - 1, 1))
    if std == "none":
        return centred if centred is not values else values.copy()
    if std == "running":
        spread_N = np.full(len(values), past.std)
    elif std == "group_mean":
        spread_N = group.mean(values)
    else:
        spread_N = (batch if std == "batch" else group).std(values, ddof)
    return centred / np.where(spread_N > 0, spread_N + eps, 1.0)


def split_groups(groups_N: np.ndarray, values_N: np.ndarray) -> np.ndarray:
    """Return ids of finer groups, int `[N]`: members of a group with equal values stay together."""
    return np.unique(np.stack([groups_N, values_N]), axis=1, return_inverse=True)[1].reshape(-1)


def clean(values_NT: np.ndarray, mask_NT: np.ndarray) -> np.ndarray:
    """Return a float64 copy with 0 outside the mask."""
    return np.where(np.asarray(mask_NT, bool), np.asarray(values_NT, np.float64), 0.0)


def left_aligned(mask_NT: np.ndarray, *arrays_NT: np.ndarray) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """Move the tokens under the mask side by side to the left.

    Return their old positions (int `[N, T]`, for `put_back`), the mask after the move, and the arrays, 0 outside it.
    """
    mask = np.asarray(mask_NT, bool)
    order = np.argsort(~mask, axis=1, kind="stable")
    valid = np.take_along_axis(mask, order, axis=1)
    moved = [np.take_along_axis(np.asarray(x, np.float64), order, axis=1) for x in arrays_NT]
    return order, valid, [clean(x, valid) for x in moved]


def put_back(values_NT: np.ndarray, order_NT: np.ndarray) -> np.ndarray:
    """Undo the move of `left_aligned`."""
    out = np.empty_like(values_NT)
    np.put_along_axis(out, order_NT, values_NT, axis=1)
    return out


def spread(values_N: np.ndarray, mask_NT: np.ndarray) -> np.ndarray:
    """Return the value of a trajectory at each of its tokens, 0 elsewhere; float64 `[N, T]`."""
    return np.where(np.asarray(mask_NT, bool), np.asarray(values_N, np.float64)[:, None], 0.0)


def spread_turns(values_NK: np.ndarray, turns_NT: np.ndarray, mask_NT: np.ndarray) -> np.ndarray:
    """Return the value of a turn at each of its tokens, 0 where there is no token or its turn is -1; float64 `[N,
    T]`."""
    values, turns = np.asarray(values_NK, np.float64), np.asarray(turns_NT)
    valid = np.asarray(mask_NT, bool) & (turns >= 0)
    if not valid.any():
        return np.zeros(turns.shape)
    return np.where(valid, np.take_along_axis(values, np.where(valid, turns, 0), axis=1), 0.0)


def at_last(values_N: np.ndarray, mask_NT: np.ndarray) -> np.ndarray:
    """Return the value of a trajectory at its last token, 0 elsewhere; float64 `[N, T]`."""
    mask = np.asarray(mask_NT, bool)
    after = np.cumsum(mask[:, ::-1], axis=1)[:, ::-1]  # tokens from here on, this one included
    return spread(values_N, mask & (after == 1))


def discounted(rewards_NT: np.ndarray, mask_NT: np.ndarray, gamma: float) -> np.ndarray:
    """Compute `A_t = r_t + gamma A_{t+1}` over the tokens under the mask and skip the others; float64 `[N, T]`."""
    mask = np.asarray(mask_NT, bool)
    rewards_TN, mask_TN = _time_first(clean(rewards_NT, mask)), _time_first(mask)
    out_TN = np.zeros(rewards_TN.shape)
    carry = np.zeros(len(mask))
    for t in range(len(out_TN) - 1, -1, -1):
        carry = np.where(mask_TN[t], rewards_TN[t] + gamma * carry, carry)
        out_TN[t] = carry
    return np.where(mask, out_TN.T, 0.0)


def turn_returns(turn_rewards_NK: np.ndarray, num_turns_N: np.ndarray, gamma: float) -> np.ndarray:
    """Compute `G_k = r_k + gamma G_{k+1}` over the turns of each trajectory, 0 beyond them; float64 `[N, K]`."""
    rewards = np.asarray(turn_rewards_NK, np.float64)
    return discounted(rewards, _turn_mask(num_turns_N, rewards.shape[1]), gamma)


def discounted_outcomes(rewards_N: np.ndarray, num_turns_N: np.ndarray, gamma: float) -> np.ndarray:
    """Compute `gamma^(K-1-k) R` for turn k of K: the final reward, discounted per turn; float64 `[N, K]`.

    Interaction-Perceptive Agentic policy optimisation (the ROME report, whose interaction chunks are turns). 0 beyond
    the turns of a trajectory.
    """
    turns = np.asarray(num_turns_N)
    mask = _turn_mask(turns, int(turns.max(initial=0)))
    distance = np.where(mask, turns[:, None] - 1 - np.arange(mask.shape[1]), 0)
    return spread(rewards_N, mask) * np.power(float(gamma), distance)


def expert_returns(expert_turns_N: np.ndarray, turns_NT: np.ndarray, expert_NT: np.ndarray, gamma: float) -> np.ndarray:
    """Compute `gamma^(K*-1-k)` at an expert's tokens in turn k, K* the turns of the expert's own episode; float64 `[N,
    T]`.

    The outcome of an expert is 1. Only the distance to the expert's own success counts, so the length of the episode
    that replays its first turns does not matter. 0 at all other tokens.
    """
    expert = np.asarray(expert_NT, bool)
    distance = np.asarray(expert_turns_N)[:, None] - 1 - np.asarray(turns_NT)
    return np.where(expert, np.power(float(gamma), np.where(expert, distance, 0)), 0.0)


def gae(
    rewards_NT: np.ndarray, values_NT: np.ndarray, mask_NT: np.ndarray, gamma: float, lam: float
) -> tuple[np.ndarray, np.ndarray]:
    """Compute generalised advantage estimation (arXiv 1506.02438): advantages and returns, float64 `[N, T]` each.

    `delta_t = r_t + gamma V_{t+1} - V_t`, `A_t = delta_t + gamma lam A_{t+1}`, `returns = A + V`. The value after the
    last token is 0. Tokens outside the mask (the output of a tool) are skipped: A and V are carried across them.
    """
    mask = np.asarray(mask_NT, bool)
    values = clean(values_NT, mask)
    rewards_TN, values_TN, mask_TN = (_time_first(x) for x in (clean(rewards_NT, mask), values, mask))
    out_TN = np.zeros(rewards_TN.shape)
    advantage = next_value = np.zeros(len(mask))
    for t in range(len(out_TN) - 1, -1, -1):
        delta = rewards_TN[t] + gamma * next_value - values_TN[t]
        advantage = np.where(mask_TN[t], delta + gamma * lam * advantage, advantage)
        next_value = np.where(mask_TN[t], values_TN[t], next_value)
        out_TN[t] = advantage
    advantages = np.where(mask, out_TN.T, 0.0)
    return advantages, advantages + values


def whiten(
    advantages_NT: np.ndarray, mask_NT: np.ndarray, *, ddof: int = 1, eps: float = 1e-8, shift: bool = True
) -> np.ndarray:
    """Compute `(A - mean) / sqrt(variance + eps)` over the tokens under the mask; float64 `[N, T]`.

    `shift=False` adds the mean back. Unchanged where there is at most one token.
    """
    mask = np.asarray(mask_NT, bool)
    advantages = clean(advantages_NT, mask)
    count = int(mask.sum())
    if count <= 1:
        return advantages
    mean = advantages.sum() / count
    centred = np.where(mask, advantages - mean, 0.0)
    scaled = centred / math.sqrt((centred**2).sum() / (count - ddof) + eps)
    return scaled if shift else np.where(mask, scaled + mean, 0.0)


def batch_return_normalised(turn_returns_NK: np.ndarray, num_turns_N: np.ndarray, eps: float = 1e-9) -> np.ndarray:
    """Return batch normalisation (GEM): `(G - mean) / (std + eps)` over all turns of the batch; float64 `[N, K]`.

    The standard deviation is that of the population (ddof 0). 0 beyond the turns of a trajectory.
    """
    returns = np.asarray(turn_returns_NK, np.float64)
    mask = _turn_mask(num_turns_N, returns.shape[1])
    out = np.zeros(returns.shape)
    out[mask] = normalise(returns[mask], mean="batch", std="batch", ddof=0, eps=eps)
    return out


def same_state_normalised(
    returns_NK: np.ndarray,
    states_NK: np.ndarray,
    num_turns_N: np.ndarray,
    groups_N: np.ndarray,
    *,
    std: bool = True,
    eps: float = 1e-6,
) -> np.ndarray:
    """Step advantages of GiGPO (arXiv 2505.10978): they compare turns of one group that began in the same state;
    float64 `[N, K]`.

    Args:
      returns_NK: discounted return from each turn on.
      states_NK: hash of the policy's context before the turn; equal hashes mean equal states.
      std: False leaves the division out.

    A turn whose state no other turn began in gets 0.
    """
    returns, states = np.asarray(returns_NK, np.float64), np.asarray(states_NK)
    mask = _turn_mask(num_turns_N, returns.shape[1])
    group_NK = np.broadcast_to(np.asarray(groups_N, np.int64)[:, None], mask.shape)
    _, same = np.unique(np.stack([group_NK[mask], states[mask].astype(np.int64)]), axis=1, return_inverse=True)
    out = np.zeros(returns.shape)
    out[mask] = normalise(returns[mask], same.reshape(-1), mean="group", std="group" if std else "none", eps=eps)
    return out


def critic_spread(values_MNT: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and population standard deviation over critics, float64 `[N, T]` each; the latter is exactly 0 where
    all agree."""
    values = np.asarray(values_MNT, np.float64)
    agree = (values == values[:1]).all(0)
    return np.where(agree, values[0], values.mean(0)), np.where(agree, 0.0, values.std(0))


def lowest(values_NT: np.ndarray, mask_NT: np.ndarray, frac: float) -> np.ndarray:
    """Mark the `floor(frac * tokens)` lowest values of the batch under the mask, the earlier of equal ones; bool `[N,
    T]`.

    By rank and not by percentile: many equal values would otherwise all be taken.
    """
    mask = np.asarray(mask_NT, bool)
    if not 0 <= frac <= 1:
        raise ValueError(f"frac is a share from 0 to 1, not {frac!r}")
    indices = np.flatnonzero(mask)
    values = np.asarray(values_NT, np.float64).reshape(-1)[indices]
    out = np.zeros(mask.size, bool)
    out[indices[np.argsort(values, kind="stable")[: share(frac, len(indices))]]] = True
    return out.reshape(mask.shape)


def highest(values_NT: np.ndarray, mask_NT: np.ndarray, frac: float) -> np.ndarray:
    """Mark the `floor(frac * tokens)` highest values of the batch under the mask, the earlier of equals; bool `[N,
    T]`."""
    return lowest(-np.asarray(values_NT, np.float64), mask_NT, frac)


def share(frac: float, count: int | np.ndarray) -> np.ndarray:
    """Return `floor(frac * count)`, int. Rounding errors do not count: 0.29 * 100 is 29."""
    return np.floor(frac * np.asarray(count) + 1e-9).astype(np.int64)


def critic_shards(groups_N: np.ndarray, num_critics: int, by: Shard = "response", step: int = 0) -> np.ndarray:
    """Assign each trajectory to the critic, 0..num_critics-1, that learns from it; int `[N]`. AsyPPO: critics on
    disjoint data.

    "response" deals the siblings of each group evenly, so that every critic sees every prompt; the first critic rotates
    with group and step. "prompt" deals groups.
    """
    _known("by", by, Shard)
    if num_critics < 1:
        raise ValueError(f"num_critics must be at least 1, not {num_critics!r}")
    groups = GroupStats(groups_N)
    first = groups.index_N + step
    return (first + groups.sibling() if by == "response" else first) % num_critics


def explained_variance(values_NT: np.ndarray, returns_NT: np.ndarray, mask_NT: np.ndarray) -> float:
    """Compute `1 - var(returns - values) / var(returns)` over the tokens under the mask; 0 where returns do not
    vary."""
    mask = np.asarray(mask_NT, bool)
    values, returns = np.asarray(values_NT, np.float64)[mask], np.asarray(returns_NT, np.float64)[mask]
    if not returns.size or GroupStats(np.zeros(returns.size, np.int64)).flat(returns)[0]:
        return 0.0
    return float(1.0 - (returns - values).var() / returns.var())


def _known(name: str, value: str, choices: object) -> None:
    if value not in get_args(choices):
        raise ValueError(f"{name} is one of {', '.join(get_args(choices))}, not {value!r}")


def _time_first(values_NT: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values_NT.T)


def _turn_mask(num_turns_N: np.ndarray, turns: int) -> np.ndarray:
    """Return which turns exist, bool `[N, K]`."""
    return np.arange(turns) < np.asarray(num_turns_N)[:, None]
