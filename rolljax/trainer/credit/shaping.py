"""Shapes rewards before credit, and selects the trajectories that take part: pure NumPy functions, float64.

Shapes: N trajectories, T sampled tokens of one. Log-probs are natural logs; lengths are in tokens.
"""

from __future__ import annotations

import dataclasses
import difflib
import unicodedata
from collections.abc import Sequence
from typing import Annotated

import numpy as np

from rolljax.errors import ConfigError, Range, check_fields
from rolljax.trainer.credit.episodes import Episodes
from rolljax.trainer.credit.estimators import GroupStats, clean
from rolljax.trainer.kl import KlEstimator, kl_estimate

_CHARACTERS = 512  # texts longer than this are compared word by word: comparing characters takes quadratic time


@dataclasses.dataclass(frozen=True)
class RewardShaping:
    """Terms added to the rewards of trajectories, and their clip."""

    clip: Annotated[float | None, Range(above=0, remedy="None for none")] = None
    """Rewards are cut to [-c, c] once they are normalised (None: not at all)."""
    overlong_cache: Annotated[int, Range(low=0, remedy="0 switches it off")] = 0
    """Tokens before the limit over which DAPO's soft penalty falls from 0 to -1 (0: none)."""
    length_reward: Annotated[float, Range(low=0, remedy="0 switches it off")] = 0.0
    """Weight of Kimi k1.5's reward for answers that are short within their group (arXiv 2501.12599, section 2.3.3; 0:
    none)."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.clip is None and not self.overlong_cache and not self.length_reward:
            raise ConfigError(
                "shapes nothing",
                setting="RewardShaping.overlong_cache",
                value=self.overlong_cache,
                remedy="set clip, overlong_cache or length_reward, or shaping = None of the algorithm",
            )

    def shaped(self, rewards_N: np.ndarray, e: Episodes) -> np.ndarray:
        """Return rewards `[N]` with the shaping terms added."""
        if self.overlong_cache:
            rewards_N = rewards_N + overlong_penalty(e.longest_answers, e.limit_tok, self.overlong_cache)
        if self.length_reward:
            rewards_N = rewards_N + self.length_reward * length_reward(e.lengths, e.success, e.groups)
        return rewards_N

    def clipped(self, rewards_N: np.ndarray) -> np.ndarray:
        """Clip rewards `[N]` (normalised, if the algorithm does so) to `clip`."""
        return rewards_N if self.clip is None else np.clip(rewards_N, -self.clip, self.clip)


@dataclasses.dataclass(frozen=True)
class GroupFilter:
    """Drops groups whose rewards carry little or no signal."""

    drop_degenerate: bool = True
    """Groups whose rewards are all equal."""
    solve_range: tuple[float, float] | None = None
    """Groups whose mean reward is not strictly between these (None: any mean)."""
    dynamic_sampling_rounds: Annotated[int, Range(low=0, remedy="0 switches it off")] = 0
    """Most rounds of additional groups that are started while fewer groups than requested pass the filter (DAPO; 0:
    none)."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.solve_range is not None and not self.solve_range[0] < self.solve_range[1]:
            raise ConfigError(
                "is empty",
                setting="GroupFilter.solve_range",
                value=self.solve_range,
                remedy="give (low, high), for instance (0.1, 0.95)",
            )
        if not self.drop_degenerate and self.solve_range is None:
            raise ConfigError(
                "leaves no filter: no group is ever dropped",
                setting="GroupFilter.drop_degenerate",
                value=False,
                remedy="set solve_range, or filter = None of the algorithm",
            )

    def kept(self, rewards_N: np.ndarray, groups_N: np.ndarray) -> np.ndarray:
        """Return the members of the groups that pass the filter; bool `[N]`."""
        keep = np.ones(len(rewards_N), bool)
        if self.drop_degenerate:
            keep &= ~degenerate(rewards_N, groups_N)
        if self.solve_range is not None:
            keep &= difficulty_mask(rewards_N, groups_N, *self.solve_range)
        return keep


def kl_penalty(
    logp_NT: np.ndarray, ref_logp_NT: np.ndarray, mask_NT: np.ndarray, coef: float, estimator: KlEstimator
) -> np.ndarray:
    """Return token rewards `-coef * kl_t` of the KL to the reference; float64 `[N, T]`, 0 outside the mask."""
    mask = np.asarray(mask_NT, bool)
    return 0.0 - coef * kl_estimate(clean(logp_NT, mask) - clean(ref_logp_NT, mask), estimator, np)


def overlong_penalty(lengths_N: np.ndarray, limit: float, cache: float) -> np.ndarray:
    """Compute DAPO's soft penalty (arXiv 2503.14476): 0 up to `limit - cache` tokens, falling to -1 at `limit`; float64
    `[N]`.

    With `cache` 0 the penalty is -1 above `limit` and 0 otherwise.
    """
    if not 0 <= cache <= limit:
        raise ValueError(f"cache is from 0 to limit {limit!r}, not {cache!r}")
    lengths = np.asarray(lengths_N, np.float64)
    if cache == 0:
        return np.where(lengths > limit, -1.0, 0.0)
    return np.clip((limit - cache - lengths) / cache, -1.0, 0.0)


def length_reward(lengths_N: np.ndarray, success_N: np.ndarray, groups_N: np.ndarray) -> np.ndarray:
    """Compute Kimi k1.5's length reward (arXiv 2501.12599, section 2.3.3), -0.5 to 0.5; float64 `[N]`.

    It falls linearly in tokens from 0.5 for the shortest trajectory of a group to -0.5 for the longest. Unsolved
    trajectories never get a positive reward. 0 in groups of one length.
    """
    lengths, groups = np.asarray(lengths_N, np.float64), GroupStats(groups_N)
    shortest, longest = groups.low(lengths), groups.high(lengths)
    width = longest - shortest
    reward = np.where(width > 0, 0.5 - (lengths - shortest) / np.where(width > 0, width, 1.0), 0.0)
    return np.where(np.asarray(success_N, bool), reward, np.minimum(reward, 0.0))


def difficulty_mask(rewards_N: np.ndarray, groups_N: np.ndarray, low: float = 0.1, high: float = 0.95) -> np.ndarray:
    """Mark the members of groups whose mean reward is between `low` and `high`, both excluded; bool `[N]`."""
    mean = GroupStats(groups_N).mean(np.asarray(rewards_N, np.float64))
    return (mean > low) & (mean < high)


def degenerate(rewards_N: np.ndarray, groups_N: np.ndarray) -> np.ndarray:
    """Mark the members of groups whose rewards are all equal (also groups of one): nothing to compare; bool `[N]`."""
    return GroupStats(groups_N).flat(np.asarray(rewards_N, np.float64))


def sample_weights(difficulty_N: np.ndarray | None = None, lengths_N: np.ndarray | None = None) -> np.ndarray:
    """Return loss weights of mean 1: the product of `0.5 + 1.5 difficulty` and `1.5 - length`; float64 `[N]`.

    Args:
      difficulty_N: 0 (every sibling succeeds) to 1 (none does); None: all alike.
      lengths_N: tokens; scaled here so that the shortest of the batch is 0 and the longest 1. None: all alike.
    """
    if difficulty_N is None and lengths_N is None:
        raise ValueError("sample_weights needs difficulty_N or lengths_N")
    weights = np.ones(len(np.asarray(lengths_N if difficulty_N is None else difficulty_N)))
    if difficulty_N is not None:
        difficulty = np.asarray(difficulty_N, np.float64)
        if ((difficulty < 0) | (difficulty > 1)).any():
            raise ValueError("difficulty is from 0 to 1")
        weights *= 0.5 + 1.5 * difficulty
    if lengths_N is not None and weights.size:
        lengths = np.asarray(lengths_N, np.float64)
        width = lengths.max() - lengths.min()
        weights *= 1.5 - (lengths - lengths.min()) / (width if width > 0 else 1.0)
    return weights / weights.mean() if weights.size else weights


def select_for_imitation(
    success_N: np.ndarray, groups_N: np.ndarray, texts: Sequence[str], cap: int, similarity: float = 0.9
) -> np.ndarray:
    """Select the successes worth imitating, at most `cap` per group (rejection sampling, RFT, arXiv 2308.01825); bool
    `[N]`.

    In the order of each group, a success is dropped if its text, without case and white space, is as similar as
    `similarity` (`difflib` ratio, 0 to 1) to one that was kept. Long texts are compared word by word.
    """
    if cap < 1:
        raise ValueError(f"cap must be at least 1, not {cap!r}")
    success, groups = np.asarray(success_N, bool), np.asarray(groups_N)
    keep = np.zeros(len(success), bool)
    kept: dict[int, list[str]] = {}
    for n in np.flatnonzero(success).tolist():
        mine = kept.setdefault(int(groups[n]), [])
        text = _normal(texts[n])
        if len(mine) < cap and not any(_similar(text, other, similarity) for other in mine):
            mine.append(text)
            keep[n] = True
    return keep


def best_and_worst(rewards_N: np.ndarray, groups_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mark one pair per group: its best trajectory (chosen) and its worst (rejected), the first of equals; bool `[N]`
    each.

    Groups whose rewards are all equal give no pair.
    """
    rewards = np.asarray(rewards_N, np.float64)
    groups = GroupStats(groups_N)
    differ = ~groups.flat(rewards)
    return _first(differ & (rewards == groups.high(rewards)), groups), _first(
        differ & (rewards == groups.low(rewards)), groups
    )


def _first(among_N: np.ndarray, groups: GroupStats) -> np.ndarray:
    """Mark the first of `among_N` in each group."""
    places = np.flatnonzero(among_N)
    out = np.zeros(len(among_N), bool)
    out[places[np.unique(groups.index_N[places], return_index=True)[1]]] = True
    return out


def _normal(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def _similar(text: str, other: str, similarity: float) -> bool:
    if text == other:
        return True
    a: Sequence[str] = text
    b: Sequence[str] = other
    if max(len(text), len(other)) > _CHARACTERS:
        a, b = text.split(), other.split()
    match = difflib.SequenceMatcher(None, a, b, autojunk=False)
    return all(ratio() >= similarity for ratio in (match.real_quick_ratio, match.quick_ratio, match.ratio))
