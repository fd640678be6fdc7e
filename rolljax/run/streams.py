"""The standard streams of a command: a console that cannot be written never ends the work, and results that cannot be
written are an error with a message.

Whoever reads a console may go, its terminal may close, the disk behind it may be full, and it may be closed from the
start.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
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
        """Write what is buffered, or leave it."""
        with contextlib.suppress(OSError, ValueError):
            if self._stream is not None:
                self._stream.flush()

    def isatty(self) -> bool:
        """Whether the stream is a terminal."""
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
    """While inside: `sys.stderr` is `Unfailing`, `sys.stdout` is `Results`, and no file that is opened takes the place
    of a stream that was closed. What is left in their buffers at the end does not change the exit code."""
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
    """Have what a stream holds go nowhere, so that Python does not fail to write it as the process ends."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
        stream.flush()
