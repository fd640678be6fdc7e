"""The process of one tracker: `python -m rolljax.trackers.worker`, started by `feed.Feed`.

Requests are pickles on standard input, a tuple of a method's name and its arguments each; the first is ("open", config,
run). Every one of them is answered by a line on standard output: `ok NUMBER` or `error TEXT`. What packages print goes
to standard error. When standard input ends without ("close", outcome), the run's process is gone: the tracker is closed
as stopped.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
from typing import Any, BinaryIO, TextIO

from rolljax.errors import RolljaxError, boundary
from rolljax.trackers.base import Tracker

ORPHAN_S = 60.0
"""Seconds to close a tracker whose run is gone."""


def serve(requests: BinaryIO, replies: TextIO) -> None:
    """Answer requests until one of them is to close, or there are no more."""
    tracker: Tracker | None = None
    while (request := _read(requests)) is not None:
        name, *args = request
        try:
            with boundary(RolljaxError, f"{name} failed"):
                if name == "open":
                    config, run = args
                    tracker = config.open(run)
                    answer = tracker.last_step()
                else:
                    answer = getattr(tracker, name)(*args) or 0
            text = f"ok {answer}"
        except RolljaxError as e:
            text = f"error {str(e)!r}"
        replies.write(text + "\n")
        replies.flush()
        if name == "close":
            return
    if tracker is not None:
        timer = threading.Timer(ORPHAN_S, os._exit, (1,))
        timer.daemon = True
        timer.start()
        tracker.close("stopped")


def _read(requests: BinaryIO) -> Any:
    """The next request; None if the other side is gone."""
    try:
        return pickle.load(requests)
    except (EOFError, pickle.UnpicklingError):
        return None


def main() -> int:
    """The process of one tracker: requests on standard input, replies on standard output, until the end of it."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "w")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)  # packages print, and start processes that do
    serve(requests, replies)
    return 0


if __name__ == "__main__":
    sys.exit(main())
