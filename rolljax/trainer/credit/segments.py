"""Segment-level rewards: token rewards cut where they change, and the segments that agree with the trajectory's sign.

Adaptive message-wise (segment-level) reward. The token reward is `q_t = beta (logp_t - ref_logp_t)` of a frozen scorer
(the implicit reward of DPO), or a difference of values. A segment takes part in the gradient only where its mean
reward, less a baseline, has the sign of the trajectory: +1 chosen or correct, -1 rejected or wrong.

Tokens outside the mask are skipped over. Shapes: N trajectories, T sampled tokens of one. float64.
"""

from __future__ import annotations

import numpy as np

from rolljax.trainer.credit.estimators import clean, left_aligned, put_back


def pivots(
    q_NT: np.ndarray,
    mask_NT: np.ndarray,
    *,
    delta: float | None = None,
    min_len: int = 3,
    smooth: int = 3,
    flip: float = 0.1,
) -> np.ndarray:
    """Mark the first token of every segment; bool `[N, T]`.

    A segment begins where the token reward moves by more than `delta`, or changes sign and exceeds `flip` in absolute
    value, at least `min_len` tokens after the previous segment began (so only the last of a trajectory can be shorter).

    Args:
      q_NT: token rewards.
      delta: None: one standard deviation of |q_t - q_{t-1}| over the batch.
      smooth: odd width of the running median that smooths `q_NT` first (a median keeps steps where they are); 1: none.
    """
    if min_len < 1 or smooth < 1 or smooth % 2 == 0:
        raise ValueError(f"min_len is at least 1 and smooth odd, not {min_len!r} and {smooth!r}")
    order, valid, (q,) = left_aligned(mask_NT, q_NT)
    q = _median(q, valid, smooth)
    change = np.abs(np.diff(q, axis=1))
    pairs = valid[:, 1:]
    if delta is None:
        delta = float(change[pairs].std()) if pairs.any() else 0.0
    flips = (np.sign(q[:, 1:]) != np.sign(q[:, :-1])) & (np.abs(q[:, 1:]) > flip)
    begins = np.concatenate([valid[:, :1], pairs & ((change > delta) | flips)], axis=1)
    return put_back(_apart(begins, min_len), order)


def segment_rewards(q_NT: np.ndarray, mask_NT: np.ndarray, pivots_NT: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean token reward of each token's segment (float64 `[N, T]`, 0 outside the mask) and its number (-1
    outside)."""
    mask = np.asarray(mask_NT, bool)
    number = np.cumsum(np.asarray(pivots_NT, bool) & mask, axis=1)
    ids = np.arange(len(mask))[:, None] * (mask.shape[1] + 1) + number
    size = len(mask) * (mask.shape[1] + 1)
    total = np.bincount(ids[mask], np.asarray(q_NT, np.float64)[mask], size)
    mean = total / np.maximum(np.bincount(ids[mask], minlength=size), 1)
    return np.where(mask, mean[ids], 0.0), np.where(mask, number - 1, -1)


def agreement_mask(
    q_NT: np.ndarray,
    mask_NT: np.ndarray,
    signs_N: np.ndarray,
    *,
    delta: float | None = None,
    baseline: float | None = None,
    min_len: int = 3,
    min_keep: float = 0.2,
    smooth: int = 3,
) -> np.ndarray:
    """Mark the tokens of segments that agree: `sign * (segment reward - baseline) > 0`; bool `[N, T]`, inside the mask.

    Args:
      signs_N: +1 chosen or correct, -1 rejected or wrong; 0 agrees with nothing.
      baseline: None: the mean token reward of the batch.
      min_keep: a trajectory left with a smaller share of its tokens than this keeps all of them.
      delta, min_len, smooth: as for `pivots`.
    """
    mask = np.asarray(mask_NT, bool)
    q = clean(q_NT, mask)
    if baseline is None:
        baseline = float(q.sum() / max(int(mask.sum()), 1))
    rewards, _ = segment_rewards(q, mask, pivots(q, mask, delta=delta, min_len=min_len, smooth=smooth))
    agree = mask & (np.asarray(signs_N, np.float64)[:, None] * (rewards - baseline) > 0)
    enough = agree.sum(1) >= min_keep * mask.sum(1) - 1e-9
    return np.where(enough[:, None], agree, mask)


def _median(q_NT: np.ndarray, valid_NT: np.ndarray, width: int) -> np.ndarray:
    """Compute the running median over `width` tokens, the first and last token repeated beyond the ends."""
    if width == 1 or not q_NT.size:
        return q_NT
    last = np.maximum(valid_NT.sum(1) - 1, 0)[:, None]
    places = np.arange(q_NT.shape[1])
    shifted = [
        np.take_along_axis(q_NT, np.clip(places + move, 0, last), axis=1)
        for move in range(-(width // 2), width // 2 + 1)
    ]
    return np.where(valid_NT, np.median(np.stack(shifted), axis=0), 0.0)


def _apart(begins_NT: np.ndarray, distance: int) -> np.ndarray:
    """Keep, from left to right, only beginnings at least `distance` after the last one kept."""
    out_TN = np.zeros(begins_NT.shape[::-1], bool)
    previous = np.full(len(begins_NT), -distance)
    for t, begins in enumerate(np.ascontiguousarray(begins_NT.T)):
        out_TN[t] = begins & (t - previous >= distance)
        previous = np.where(out_TN[t], t, previous)
    return out_TN.T
