"""Attention-rhythm credit: factors of at least 1 for the advantages of tokens that attention marks.

"Attention Illuminates LLM Reasoning: The Preplan-and-Anchor Rhythm". The inputs are two measurements per sampled token:
WAAD (windowed average attention distance), how far back the token attends, and FAI (future attention influence), how
much later tokens attend to it. The factors multiply advantages of either sign and are not scaled to a mean of 1.

Tokens are ranked within their own trajectory, only those under the mask, as if they were adjacent. The number chosen is
`floor(top * tokens)`, the earlier of equal ones first. Shapes: N trajectories, T tokens. float64.

As the paper's controls the factors can also go to as many tokens of the other end, or to any (`Pick`).
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from rolljax.trainer.credit.estimators import left_aligned, put_back, share

Pick = Literal["top", "random", "bottom"]
"""The tokens that get the factors: the highest-ranking, random ones, or the lowest-ranking."""


def local_gamma(
    waad_NT: np.ndarray, mask_NT: np.ndarray, amp: float = 1.5, top: float = 0.4, pick: Pick = "top", seed: int = 0
) -> np.ndarray:
    """Return `amp` where WAAD jumps most to the next token (a plan begins), else 1; float64 `[N, T]`.

    The last token has no next one and ranks last.

    Args:
      seed: of the random generator, if `pick` is "random".
    """
    _check(amp, top)
    order, valid, (waad,) = left_aligned(mask_NT, waad_NT)
    return put_back(1.0 + (amp - 1.0) * _top(_ranks(_jumps(waad, valid), pick, seed), valid, top), order)


def global_gamma(
    fai_NT: np.ndarray, mask_NT: np.ndarray, amp: float = 1.5, top: float = 0.4, pick: Pick = "top", seed: int = 0
) -> np.ndarray:
    """Return `amp` where FAI is highest (an anchor later tokens return to), else 1; float64 `[N, T]`.

    Args:
      seed: of the random generator, if `pick` is "random".
    """
    _check(amp, top)
    order, valid, (fai,) = left_aligned(mask_NT, fai_NT)
    return put_back(1.0 + (amp - 1.0) * _top(_ranks(fai, pick, seed), valid, top), order)


def coupled_gamma(
    waad_NT: np.ndarray,
    fai_NT: np.ndarray,
    mask_NT: np.ndarray,
    amp: float = 1.5,
    top: float = 0.4,
    alpha: float = 0.5,
    window: int = 2,
    waad_pct: float = 0.4,
    delta_pct: float = 0.6,
) -> np.ndarray:
    """Compute `global_gamma`, but an anchor inside a planned stretch shares its factor with the token that opened it.

    An anchor is locally dominated when its WAAD is at most the `waad_pct` quantile of its trajectory and the largest
    jump of WAAD among the `window` tokens before it is at least the `delta_pct` quantile of the jumps. It then gets `1
    + (1 - alpha)(amp - 1)`, and `alpha (amp - 1)` is added to the token with that largest jump (the earlier of equal
    ones), once however many anchors it opened. float64 `[N, T]`.
    """
    _check(amp, top)
    if not 0 <= alpha <= 1 or window < 1:
        raise ValueError(f"alpha is from 0 to 1 and window at least 1, not {alpha!r} and {window!r}")
    order, valid, (waad, fai) = left_aligned(mask_NT, waad_NT, fai_NT)
    delta, pairs = _jumps(waad, valid), _pairs(valid)
    anchors = _top(fai, valid, top)
    largest, where = _before(delta, window)
    dominated = anchors & (waad <= _quantile(waad, valid, waad_pct)) & (largest >= _quantile(delta, pairs, delta_pct))
    openers = np.zeros(valid.shape, bool)
    openers[np.nonzero(dominated)[0], where[dominated]] = True
    shares = np.where(dominated, 1.0 - alpha, anchors) + alpha * openers
    return put_back(1.0 + (amp - 1.0) * shares, order)


def _check(amp: float, top: float) -> None:
    if amp < 1 or not 0 <= top <= 1:
        raise ValueError(f"amp is at least 1 and top from 0 to 1, not {amp!r} and {top!r}")


def _ranks(values_NT: np.ndarray, pick: Pick, seed: int) -> np.ndarray:
    """Return the values by which tokens are ranked, highest first."""
    if pick == "random":
        return np.random.default_rng(seed).random(values_NT.shape)
    return -values_NT if pick == "bottom" else values_NT


def _pairs(valid_NT: np.ndarray) -> np.ndarray:
    """Mark the tokens that have a next one."""
    return np.concatenate([valid_NT[:, 1:], np.zeros((len(valid_NT), 1), bool)], axis=1)[:, : valid_NT.shape[1]]


def _jumps(values_NT: np.ndarray, valid_NT: np.ndarray) -> np.ndarray:
    """Return `|v_t - v_{t+1}|`, 0 for the last token."""
    following = np.roll(values_NT, -1, axis=1)
    return np.where(_pairs(valid_NT), np.abs(values_NT - following), 0.0)


def _top(values_NT: np.ndarray, valid_NT: np.ndarray, frac: float) -> np.ndarray:
    """Mark the highest `floor(frac * tokens)` of each row, the earlier of equal ones."""
    order = np.argsort(np.where(valid_NT, -values_NT, np.inf), axis=1, kind="stable")
    chosen = np.arange(valid_NT.shape[1]) < share(frac, valid_NT.sum(1))[:, None]
    out = np.zeros(valid_NT.shape, bool)
    np.put_along_axis(out, order, chosen, axis=1)
    return out


def _before(values_NT: np.ndarray, window: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the largest of the `window` values before each token, -inf without one, and its index."""
    largest = np.full(values_NT.shape, -np.inf)
    where = np.zeros(values_NT.shape, np.int64)
    places = np.arange(values_NT.shape[1])
    for back in range(1, min(window, values_NT.shape[1] - 1) + 1):
        candidate = values_NT[:, :-back]
        better = candidate >= largest[:, back:]  # going back in time, so that the earlier of equal ones stays
        largest[:, back:] = np.where(better, candidate, largest[:, back:])
        where[:, back:] = np.where(better, places[:-back], where[:, back:])
    return largest, where


def _quantile(values_NT: np.ndarray, valid_NT: np.ndarray, frac: float) -> np.ndarray:
    """Return the linear-interpolation quantile of each row, `[N, 1]`; 0 for a row without values."""
    count = valid_NT.sum(1)[:, None]
    ordered = np.sort(np.where(valid_NT, values_NT, np.inf), axis=1)
    # rounded: a quantile that falls on a value must equal it, or rounding errors decide comparisons with it
    place = np.round(frac * np.maximum(count - 1, 0), 9)
    below = np.floor(place).astype(np.int64)
    above = np.minimum(below + 1, np.maximum(count - 1, 0))
    low, high = (np.where(count > 0, np.take_along_axis(ordered, at, axis=1), 0.0) for at in (below, above))
    return low + (place - below) * (high - low)
