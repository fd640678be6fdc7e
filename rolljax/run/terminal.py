"""Text and numbers for a terminal: what a model wrote, made safe to show, and curves in one line."""

from __future__ import annotations

import math
from collections.abc import Sequence

BARS = "▁▂▃▄▅▆▇█"


def visible(text: str, *, lines: bool = True) -> str:
    """Text with every character that a terminal would obey or hide written out: control characters (escape sequences
    begin with one), directional marks, other invisible ones, lone surrogates.

    Args:
      lines: whether line breaks stay.
    """
    return "".join(c if c.isprintable() or (lines and c == "\n") else repr(c)[1:-1] for c in text)


def sparkline(values: Sequence[float], width: int = 60) -> str:
    """The values as bars of eight heights, lowest to highest, means of neighbours where there are more than `width`.

    A space stands for a value that is not finite; equal values are all low.
    """
    shown = _thinned(values, width)
    finite = [v for v in shown if math.isfinite(v)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    span = high - low
    if not 0 < span < math.inf:
        return "".join(BARS[0] if math.isfinite(v) else " " for v in shown)
    top = len(BARS) - 1
    return "".join(BARS[round((v - low) / span * top)] if math.isfinite(v) else " " for v in shown)


def _thinned(values: Sequence[float], width: int) -> list[float]:
    """At most `width` values: means over stretches of equal length."""
    n = len(values)
    if n <= width:
        return list(values)
    edges = [i * n // width for i in range(width + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in zip(edges, edges[1:], strict=False)]


def duration(seconds: float) -> str:
    """`9 s`, `4 m 05 s`, `2 h 07 m`, `3 d 04 h`."""
    s = max(round(seconds), 0)
    if s < 60:
        return f"{s} s"
    if s < 3600:
        return f"{s // 60} m {s % 60:02d} s"
    if s < 86400:
        return f"{s // 3600} h {s % 3600 // 60:02d} m"
    return f"{s // 86400} d {s % 86400 // 3600:02d} h"
