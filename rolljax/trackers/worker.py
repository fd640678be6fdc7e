"""The process of one tracker: `python -m rolljax.trackers.worker`, started by `feed.Feed`.

A request is a pickle: a tuple of a method's name and its arguments; the first is ("open", config, run). The
answer is a number, or the text of an error. When the requests end without ("close", outcome), the run's process is
gone: the tracker is closed as stopped.
"""

from __future__ import annotations

from rolljax.concurrency.child import answer_messages, unpickled
from rolljax.errors import RolljaxError, boundary
from rolljax.trackers.base import Tracker


def main() -> None:
    """Open a tracker, call its methods as requested, and close it."""
    tracker: Tracker | None = None

    def reply(request: str) -> int | str:
        nonlocal tracker
        name, *args = unpickled(request)
        try:
            with boundary(RolljaxError, f"{name} failed"):
                if name == "open":
                    config, run = args
                    tracker = config.open(run)
                    return int(tracker.last_step())
                opened = tracker
                if name == "close":
                    tracker = None
                getattr(opened, name)(*args)
                return 0
        except RolljaxError as e:
            return repr(str(e))

    answer_messages(reply)
    if tracker is not None:
        tracker.close("stopped")


if __name__ == "__main__":
    main()
