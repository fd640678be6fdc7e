"""What happens to rewards before credit, and which trajectories take part: pure NumPy functions, float64.

Shapes: N trajectories, T sampled tokens of one. Log-probs are natural logs; lengths are in tokens.
"""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np

from rolljax.trainer.credit.estimators import Groups, at_last, clean

Kl = Literal["k1", "abs", "k2", "k3"]
_CHARACTERS = 512  # texts longer than this are compared word by word: comparing characters takes quadratic time


def kl_estimate(logp: np.ndarray, ref_logp: np.ndarray, kind: Kl) -> np.ndarray:
    """Estimates of KL(policy || reference) from tokens of the policy, nats per token; float64, the shape of the inputs.

    With `x = logp - ref_logp`: k1 is x, abs |x|, k2 x^2/2, k3 exp(-x) + x - 1 clamped to [-10, 10]
    (Schulman, "Approximating KL divergence").
    """
    if kind not in get_args(Kl):
        raise ValueError(f"kind is one of {', '.join(get_args(Kl))}, not {kind!r}")
    x = np.asarray(logp, np.float64) - np.asarray(ref_logp, np.float64)
    if kind == "k1":
        return x
    if kind == "abs":
        return np.abs(x)
    if kind == "k2":
        return x * x / 2
    x = np.clip(x, -20, 20)  # beyond, k3 is clamped anyway and exp may overflow
    return np.clip(np.expm1(-x) + x, -10, 10)


def kl_in_reward(
    rewards_N: np.ndarray, logp_NT: np.ndarray, ref_logp_NT: np.ndarray, mask_NT: np.ndarray, beta: float, kind: Kl
) -> np.ndarray:
    """Token rewards `-beta * kl_t`, plus the reward of the trajectory at its last token; float64 `[N, T]`."""
    mask = np.asarray(mask_NT, bool)
    kl = kl_estimate(clean(logp_NT, mask), clean(ref_logp_NT, mask), kind)
    return at_last(rewards_N, mask) - beta * kl


def adaptive_beta(beta: float, kl: float, target: float, horizon: float, num_samples: float) -> float:
    """The next KL coefficient: `beta * (1 + clip(kl / target - 1, -0.2, 0.2) * num_samples / horizon)`.

    Fine-Tuning Language Models from Human Preferences (arXiv 1909.08593). `kl` and `target` in nats, `horizon` and
    `num_samples` in the same unit (steps or samples).
    """
    if target <= 0 or horizon <= 0:
        raise ValueError(f"target and horizon must be positive, not {target!r} and {horizon!r}")
    return float(beta * (1.0 + float(np.clip(kl / target - 1.0, -0.2, 0.2)) * num_samples / horizon))


def overlong_penalty(lengths_N: np.ndarray, limit: float, cache: float) -> np.ndarray:
    """DAPO's soft penalty (arXiv 2503.14476): 0 up to `limit - cache` tokens, falling to -1 at `limit`; float64 `[N]`.

    With `cache` 0 the penalty is -1 above `limit` and 0 otherwise.
    """
    if not 0 <= cache <= limit:
        raise ValueError(f"cache is from 0 to limit {limit!r}, not {cache!r}")
    lengths = np.asarray(lengths_N, np.float64)
    if cache == 0:
        return np.where(lengths > limit, -1.0, 0.0)
    return np.clip((limit - cache - lengths) / cache, -1.0, 0.0)


def length_reward(lengths_N: np.ndarray, success_N: np.ndarray, groups_N: np.ndarray) -> np.ndarray:
    """Kimi k1.5's length reward (arXiv 2501.12599, section 2.3.3), -0.5 to 0.5; float64 `[N]`.

    From 0.5 for the shortest trajectory of its group down to -0.5 for the longest, linear in the tokens between. What
    is unsolved is never rewarded for being short. 0 in groups of one length.
    """
    lengths, groups = np.asarray(lengths_N, np.float64), Groups(groups_N)
    shortest, longest = groups.low(lengths), groups.high(lengths)
    width = longest - shortest
    reward = np.where(width > 0, 0.5 - (lengths - shortest) / np.where(width > 0, width, 1.0), 0.0)
    return np.where(np.asarray(success_N, bool), reward, np.minimum(reward, 0.0))


def difficulty_mask(rewards_N: np.ndarray, groups_N: np.ndarray, low: float = 0.1, high: float = 0.95) -> np.ndarray:
    """Members of groups whose mean reward is between `low` and `high`, neither included; bool `[N]`."""
    mean = Groups(groups_N).mean(np.asarray(rewards_N, np.float64))
    return (mean > low) & (mean < high)


def degenerate(rewards_N: np.ndarray, groups_N: np.ndarray) -> np.ndarray:
    """Members of groups whose rewards are all equal (groups of one too): nothing to compare; bool `[N]`."""
    return Groups(groups_N).flat(np.asarray(rewards_N, np.float64))


def sample_weights(difficulty_N: np.ndarray | None = None, lengths_N: np.ndarray | None = None) -> np.ndarray:
    """Loss weights of mean 1: the product of `0.5 + 1.5 difficulty` and `1.5 - length`; float64 `[N]`.

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
    """Rejection sampling (RFT, arXiv 2308.01825): the successes worth imitating, at most `cap` per group; bool `[N]`.

    In order within each group, a success is left out when its text, case and white space apart, is as similar as
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
    """One pair per group: its best trajectory (chosen) and its worst (rejected), the first of equals; bool `[N]` each.

    Groups whose rewards are all equal give no pair.
    """
    rewards = np.asarray(rewards_N, np.float64)
    groups = Groups(groups_N)
    differ = ~groups.flat(rewards)
    return _first(differ & (rewards == groups.high(rewards)), groups), _first(
        differ & (rewards == groups.low(rewards)), groups
    )


def _first(among_N: np.ndarray, groups: Groups) -> np.ndarray:
    """The first of `among_N` in each group."""
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
