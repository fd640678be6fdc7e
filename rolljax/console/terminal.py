"""The terminal: standard streams that never end the work, text made safe to show, and curves in one line.

The reader of a console may exit, its terminal may close, its disk may be full, and it may be closed from the start. A
failed write to the console is ignored; a failed write of results is an error with a message.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from rolljax import reading
from rolljax.errors import StorageError


class Unfailing:
    """A text stream whose writes are dropped where they fail; everything else is the stream's own. None drops all."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write a text, or drop it."""
        with contextlib.suppress(OSError, ValueError):  # ValueError: it is closed
            if self._stream is not None:
                self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Write the buffer if possible."""
        with contextlib.suppress(OSError, ValueError):
            if self._stream is not None:
                self._stream.flush()

    def isatty(self) -> bool:
        """Return whether the stream is a terminal."""
        with contextlib.suppress(OSError, ValueError):
            return self._stream is not None and bool(self._stream.isatty())
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class ReaderGone(BrokenPipeError):
    """The reader has closed the pipe, as after `| head`."""


class Results(Unfailing):
    """A text stream of results: a write that fails is an error.

    Raises (in `write` and `flush`):
      StorageError: the stream cannot be written. ReaderGone: the reader has closed the pipe.
    """

    def write(self, text: str) -> int:
        with _of_results():
            return len(text) if self._stream is None else int(self._stream.write(text))

    def flush(self) -> None:
        with _of_results():
            if self._stream is not None:
                self._stream.flush()


@contextlib.contextmanager
def _of_results() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError as e:
        raise ReaderGone(*e.args) from None
    except OSError as e:
        text = f"the results cannot be written to standard output: {reading.reason(e)}"
        raise StorageError(f"{text}\n  fix:   send them elsewhere") from e


@contextlib.contextmanager
def safe() -> Iterator[None]:
    """Replace `sys.stderr` by `Unfailing` and `sys.stdout` by `Results` inside this context.

    No opened file takes the descriptor of a closed stream. Unwritten buffers at the end do not change the exit code.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
    out, err = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = Results(out), Unfailing(err)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = out, err
        for stream in (out, err):
            try:
                if stream is not None:
                    stream.flush()
            except (OSError, ValueError):
                _drain(stream)


def _drain(stream: Any) -> None:
    """Discard the buffer of a stream, so that Python does not fail to write it as the process ends."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
        stream.flush()


BARS = "▁▂▃▄▅▆▇█"


def visible(text: str, *, lines: bool = True) -> str:
    """Write out every character that a terminal would obey or hide: control characters (escape sequences begin with
    one), directional marks, other invisible ones, lone surrogates.

    Args:
      lines: whether line breaks stay.
    """
    return "".join(c if c.isprintable() or (lines and c == "\n") else repr(c)[1:-1] for c in text)


def sparkline(values: Sequence[float], width: int = 60) -> str:
    """Return the values as bars of eight heights, from lowest to highest value; neighbours are averaged if there are
    more than `width`. Non-finite values give a space; equal values all get the lowest bar.
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
    """Return at most `width` values: means over stretches of equal length."""
    n = len(values)
    if n <= width:
        return list(values)
    edges = [i * n // width for i in range(width + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in zip(edges, edges[1:], strict=False)]


def duration(seconds: float) -> str:
    """Format seconds as `9 s`, `4 m 05 s`, `2 h 07 m`, `3 d 04 h`."""
    s = max(round(seconds), 0)
    if s < 60:
        return f"{s} s"
    if s < 3600:
        return f"{s // 60} m {s % 60:02d} s"
    if s < 86400:
        return f"{s // 3600} h {s % 3600 // 60:02d} m"
    return f"{s // 86400} d {s % 86400 // 3600:02d} h"
