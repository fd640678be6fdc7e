"""Rewards to advantages: pure functions over NumPy arrays `[G]` or `[N, G]`."""

from __future__ import annotations

import numpy as np


def group_normalised(rewards_NG: np.ndarray, *, scale: bool = True, eps: float = 1e-6) -> np.ndarray:
    """`(R - mean) / (std + eps)` within each group, `[N, G]` float32; std is unbiased (ddof 1). GRPO, arXiv 2402.03300.

    `scale=False` leaves the division out (Dr. GRPO, arXiv 2503.20783). Groups of one get 0.
    """
    rewards = np.asarray(rewards_NG, np.float64)
    centred = rewards - rewards.mean(-1, keepdims=True)
    if scale and rewards.shape[-1] > 1:
        centred = centred / (rewards.std(-1, ddof=1, keepdims=True) + eps)
    return centred.astype(np.float32)
