"""Delivers rows to trackers, none of which can stop or slow down a run.

    Recorder -> Trackers -> a bounded queue -> thread -> pipe -> process with the package (`worker`)

Each tracker has a thread and a process of its own. One that raises, hangs or dies costs rows of that tracker, which are
counted (`trackers/lost_n`) and reported once. Rows lost with a process are sent again after its restart, or
when the run resumes: rows come from metrics.jsonl, and a tracker knows the newest that it holds. Rows sent
while a tracker cannot be opened counts as lost at once, and reaches it late if it can be opened later.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import queue
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rolljax.concurrency.child import Child, ChildError, pickled, python_path
from rolljax.errors import InfraError
from rolljax.trackers.base import Outcome, Row, RunInfo, TrackerConfig

QUEUE = 4096
"""Rows, texts and figures that wait for a tracker; more are lost."""
OPEN_S, TAKE_S, CLOSE_S = 180.0, 60.0, 30.0
"""Longest that a tracker may take to open a run, for one row, and to end."""
SURVIVES_S = 60.0
"""Seconds that a tracker whose run was killed has to close."""
REFUSALS = 3
"""Errors of a tracker in a row after which its process is started again."""
RESTARTS_S = (1.0, 30.0, 300.0)
"""Seconds before a process that failed is started again; after the last of them it is not."""


class _Refused(Exception):
    """A tracker raised."""


class _NotOpened(Exception):
    """A tracker cannot be opened."""


def start(log: Path) -> Child:
    """Start the process of a tracker (`worker`)."""
    env = os.environ | {"PYTHONPATH": python_path()}
    return Child([sys.executable, "-m", "rolljax.trackers.worker"], env, log=log, survives_s=SURVIVES_S)


def ask(child: Child, request: Sequence[Any], deadline_s: float) -> int:
    """Send a request and return the number in the answer.

    Raises:
      ChildError: the process has ended, or has not answered in time. _Refused: it answered with an error.
    """
    try:
        answer = child.ask(pickled(tuple(request)), deadline_s)
    except ChildError as e:
        raise ChildError(f"{e} (asked to {request[0]})", e.kind) from e
    if isinstance(answer, str):
        raise _Refused(answer)
    return answer


class Feed:
    """One tracker of a run: gives rows to its process from a thread, in their order.

    Args:
      rows: returns all rows of metrics.jsonl, to send the missing ones. warn: called once for each kind of trouble.
    """

    def __init__(
        self,
        name: str,
        config: TrackerConfig,
        run: RunInfo,
        rows: Callable[[], Sequence[Row]],
        warn: Callable[[str], None],
    ) -> None:
        self.name, self.lost = name, 0
        self._handed, self._counted, self._can_open, self._lock = 0, 0, True, threading.Lock()
        self._config, self._run, self._rows, self._warn = config, run, rows, warn
        self._sent, self._refusals = -1, 0
        self._waiting: queue.Queue[tuple[Any, ...]] = queue.Queue(QUEUE)
        self._closing, self._over = threading.Event(), threading.Event()
        self._process: Child | None = None
        self._outcome: Outcome = "stopped"
        self._said: set[str] = set()
        self._thread = threading.Thread(target=self._run_thread, name=f"rolljax-{name}", daemon=True)
        self._thread.start()

    def put(self, method: str, step: int, *args: Any) -> None:
        """Queue an item; never waits."""
        with self._lock:
            if not self._thread.is_alive():
                self.lost += 1
                return
            try:
                self._waiting.put_nowait((method, step, *args))
            except queue.Full:
                self.lost += 1
            else:
                self._handed += 1
                if not self._can_open:
                    self._count_waiting()
                return
        self._say("slow", f"takes rows more slowly than the run makes them; {QUEUE} wait, and newer ones are lost")

    def close(self, outcome: Outcome, deadline_s: float) -> None:
        """End the feed; items not sent by the deadline are dropped."""
        self._outcome = outcome
        self._closing.set()
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait(("close", 0))
        self._thread.join(deadline_s)
        if self._thread.is_alive():
            with self._lock:
                left = self._handed
                self._count_waiting()
            self._say("close", f"did not end within {deadline_s:.0f} s; {left} rows, texts or figures did not reach it")
            self._over.set()
            if self._process is not None:
                self._process.kill()

    def _lose(self, kind: str, text: str) -> None:
        with self._lock:
            self.lost += 1
        self._say(kind, text)

    def _count_waiting(self) -> None:
        """Count everything that waits as lost, each item once. The lock is held."""
        self.lost += self._handed - self._counted
        self._counted = self._handed

    def _opens(self, can_open: bool) -> None:
        with self._lock:
            self._can_open = can_open
            if not can_open:
                self._count_waiting()

    def _say(self, kind: str, text: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            self._warn(f"tracker {self.name} {text}; the run continues, and metrics.jsonl has everything")

    def _run_thread(self) -> None:
        try:
            self._serve_again()
        finally:  # what still waits is lost
            self._opens(False)

    def _serve_again(self) -> None:
        for wait_s in (*RESTARTS_S, None):
            try:
                self._serve()
                return
            except _NotOpened as e:
                self._opens(False)
                if not self._over.is_set():
                    self._say("gone", str(e))
            except (InfraError, OSError) as e:
                if not self._over.is_set():
                    self._lose("gone", str(e))
            finally:
                if self._process is not None:
                    self._process.stop()
            if wait_s is None or self._over.is_set():
                return
            self._closing.wait(wait_s)

    def _serve(self) -> None:
        """Start the process, send the missing rows, then new items, until the run ends."""
        run = dataclasses.replace(self._run, done=max(self._run.done, self._sent))
        try:
            self._run.folder.mkdir(parents=True, exist_ok=True)
            process = self._process = start(self._run.folder / "log.txt")
            self._refusals = 0
            self._sent = ask(process, ("open", self._config, run), OPEN_S)
        except (_Refused, ChildError, OSError) as e:
            raise _NotOpened(f"cannot be opened: {e}") from e
        self._opens(True)
        for row in self._rows():
            self._give(process, "log", row["step"], row)
        while (item := self._next()) is not None:
            self._give(process, *item)
        self._tell(process, ("close", self._outcome), CLOSE_S)
        process.stop(CLOSE_S)

    def _next(self) -> tuple[Any, ...] | None:
        """Return the next item; None when the run is over and everything was sent."""
        while True:
            try:
                item = self._waiting.get(timeout=1.0)
            except queue.Empty:
                if self._closing.is_set():
                    return None
                continue
            if item[0] == "close":
                return None
            with self._lock:
                self._handed -= 1
                self._counted = max(0, self._counted - 1)
            return item

    def _give(self, process: Child, method: str, step: int, *args: Any) -> None:
        if method == "log":
            if step <= self._sent:
                return
            self._sent = step
        self._tell(process, (method, step, *args), TAKE_S)

    def _tell(self, process: Child, request: Sequence[Any], deadline_s: float) -> None:
        try:
            ask(process, request, deadline_s)
            self._refusals = 0
        except _Refused as e:
            self._lose(f"error {request[0]}", f"refused what it was given: {e}")
            self._refusals += 1
            if self._refusals == REFUSALS:
                raise InfraError(f"refused {REFUSALS} things in a row") from e


class Trackers:
    """All trackers of a run; where there are none, nothing is done."""

    def __init__(self, feeds: Sequence[Feed] = ()) -> None:
        self._feeds, self._told = feeds, 0

    def __bool__(self) -> bool:
        return bool(self._feeds)

    def row(self) -> dict[str, float]:
        """Return the number of items that trackers have lost since the last call, for the next row; empty without
        trackers."""
        if not self._feeds:
            return {}
        lost, told = sum(feed.lost for feed in self._feeds), self._told
        self._told = lost
        return {"trackers/lost_n": float(lost - told)}

    def log(self, step: int, row: Row) -> None:
        """Hand every tracker the row of a step."""
        self._put("log", step, row)

    def text(self, step: int, name: str, text: str) -> None:
        """Hand every tracker a text."""
        self._put("text", step, name, text)

    def figure(self, step: int, name: str, png: bytes) -> None:
        """Hand every tracker a picture."""
        self._put("figure", step, name, png)

    def _put(self, method: str, step: int, *args: Any) -> None:
        for feed in self._feeds:
            feed.put(method, step, *args)

    def close(self, outcome: Outcome, deadline_s: float) -> None:
        """End them all at the same time, at the latest after `deadline_s`."""
        closing = [threading.Thread(target=feed.close, args=(outcome, deadline_s)) for feed in self._feeds]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()
