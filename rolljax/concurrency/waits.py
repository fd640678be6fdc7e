"""Waits between the threads of a run, and the watchdog over them.

A thread takes from an `Inbox`; a `Mailbox` delivers answers to event loops. The `Watchdog` looks for two things. A
thread that still waits although there is work for it has overslept. That must not happen: the watchdog reports it with
the stacks of all threads, and wakes the thread. A run that waits for a slow model, environment or disk is in order;
after a while without progress, the watchdog shows the name of the wait.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import itertools
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from rolljax.errors import HangError, RolljaxError, boundary

T = TypeVar("T")
CHECK_EVERY_S = 1.0
LOOKS = 3
"""Checks in a row that find a thread in the same sleep, before the same work, until it has overslept."""
QUIET_S = 10.0
"""A wait without progress is named after this time, and again whenever it has doubled."""
MAX_REPORTS = 20
"""Most files that one watchdog writes."""


class Sleeper(Protocol):
    """Threads that wait for work (`Inbox`)."""

    name: str

    def overslept(self) -> Hashable | None:
        """Return None if all is in order: no work, or no thread sleeps. Otherwise identify the work and the sleep; the
        value stays the same until one of them has changed. Called from another thread."""

    def wake(self) -> None:
        """Make the threads look for work. Harmless for threads that are awake."""


class Inbox(Generic[T]):
    """Items from any thread for the threads that take them, in their order.

    A wait ends at its time-out however late its thread gets to run. `queue.SimpleQueue` of CPython up to 3.12 cannot be
    waited on with a time-out: a thread that is preempted for longer than that between finding the queue's lock free and
    waiting for it continues with the rest of its time, which is negative by then and means forever. Here the rest is
    checked before every wait.

    name: of the thread that takes, for reports (see `Watchdog`).
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._items: collections.deque[T] = collections.deque()
        self._filled = threading.Condition(threading.Lock())
        self._waits: dict[int, int] = {}  # number of the wait by the waiting thread
        self._numbers = itertools.count()

    def put(self, item: T) -> None:
        with self._filled:
            self._items.append(item)
            self._filled.notify()

    def take(self, timeout_s: float | None = None) -> T:
        """Return the next item; wait for it as long as it takes, or for `timeout_s`.

        Raises:
          queue.Empty: none came in time.
        """
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        with self._filled:
            if not self._items:
                self._wait(end_s)
            return self._items.popleft()

    def __len__(self) -> int:
        return len(self._items)

    def overslept(self) -> Hashable | None:
        """See `Sleeper`: the first item and the longest of the waits that it should have ended."""
        try:
            return id(self._items[0]), min(list(self._waits.values()))
        except (IndexError, ValueError):  # no item, or no thread waits
            return None

    def wake(self) -> None:
        """Make every waiting thread look again."""
        with self._filled:
            self._filled.notify_all()

    def _wait(self, end_s: float | None) -> None:
        self._waits[threading.get_ident()] = next(self._numbers)
        try:
            while not self._items:
                left_s = None if end_s is None else end_s - time.monotonic()
                if left_s is not None and left_s <= 0:
                    raise queue.Empty
                self._filled.wait(left_s)
        finally:
            del self._waits[threading.get_ident()]


Delivery = tuple["asyncio.Future[Any]", Any, RolljaxError | None]


class Mailbox:
    """Delivers answers to futures. Answers that arrive before the event loop runs share one wake-up."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[asyncio.AbstractEventLoop, collections.deque[Delivery]] = {}

    def put(self, future: asyncio.Future[Any], value: Any, error: RolljaxError | None) -> None:
        """Deliver an answer. Thread-safe. An answer for a cancelled future or a closed loop is dropped."""
        loop = future.get_loop()
        with self._lock:
            waiting = self._waiting.setdefault(loop, collections.deque())
            waiting.append((future, value, error))
            if len(waiting) > 1:
                return
        try:
            loop.call_soon_threadsafe(self._deliver, loop)
        except RuntimeError:  # the loop is closed: no future waits
            with self._lock:
                self._waiting.pop(loop, None)

    def _deliver(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            answers = self._waiting.pop(loop, ())
        for future, value, error in answers:
            if future.done():
                continue
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(value)


@dataclasses.dataclass(eq=False)
class _Wait:
    what: str


class Watchdog:
    """A thread that checks every second, from `start` to `close`. Until then it only keeps the names of waits.

    Args:
      warn: shows a permanent line. wait: shows the name of the current wait. folder: for reports, made at the first
        report; None: reports go to stderr.
    """

    def __init__(
        self,
        warn: Callable[[str], None] | None = None,
        wait: Callable[[str], None] | None = None,
        folder: Path | None = None,
    ) -> None:
        self.state: Callable[[], str] = lambda: ""
        """Return a description of the work under way. A change of this text counts as progress."""
        self._warn, self._wait, self._folder = warn or _to_stderr, wait or _to_stderr, folder
        self._sleepers: list[Sleeper] = []
        self._seen: dict[Sleeper, tuple[Hashable, int]] = {}
        self._waits: list[_Wait] = []
        self._mark: tuple[_Wait | None, str] = (None, "")
        self._since_s, self._named_s = 0.0, QUIET_S
        self._reports = 0
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self, *sleepers: Sleeper) -> None:
        """Watch these as well."""
        self._sleepers = [*self._sleepers, *sleepers]

    def start(self) -> None:
        """Start watching."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="rolljax-watchdog", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(timeout=10)

    @contextlib.contextmanager
    def waiting_for(self, what: str) -> Iterator[None]:
        """Label the current wait of the calling thread in reports. Labels nest; only one thread may set them."""
        wait = _Wait(what)
        self._waits.append(wait)
        try:
            yield
        finally:
            self._waits.remove(wait)

    def about(self) -> str:
        """Return `state`, which reads values that other threads are changing and may therefore fail."""
        try:
            with boundary(RolljaxError, "not known"):
                return self.state()
        except RolljaxError as e:
            return f"({e})"

    def hung(self, error: HangError) -> None:
        """Report that a wait ran past its deadline, and that the run ends."""
        self._warn(f"the stacks of all threads are in {self.report('hang', str(error))}")

    def report(self, name: str, text: str) -> str:
        """Write `text` and the stacks of all threads to `name`-N.txt; return its path, for a message."""
        text = f"{text}\n\n{self.about()}\n\n{stacks()}"
        self._reports += 1
        if self._folder is not None and self._reports <= MAX_REPORTS:
            path = self._folder / f"{name}-{self._reports}.txt"
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
                return str(path)
            except OSError as e:  # the report must not fail for it
                text = f"{path} cannot be written: {e}\n{text}"
        print(text, file=sys.stderr)  # noqa: T201
        return "the lines above"

    def check(self, now_s: float) -> None:
        """Check everything once, at a time of `time.monotonic`."""
        for sleeper in self._sleepers:
            self._check_sleeper(sleeper)
        self._check_wait(now_s)

    def _run(self) -> None:
        while not self._over.wait(CHECK_EVERY_S):
            try:
                self.check(time.monotonic())
            except Exception as e:  # border: the watchdog must not end before the run
                self._warn(f"the watchdog failed: {type(e).__name__}: {e}")

    def _check_sleeper(self, sleeper: Sleeper) -> None:
        sleep = sleeper.overslept()
        before, times = self._seen.get(sleeper, (None, 0))
        times = times + 1 if sleep is not None and sleep == before else 1
        self._seen[sleeper] = sleep, times
        if sleep is None or times < LOOKS:
            return
        self._seen[sleeper] = None, 0
        text = f"{sleeper.name} slept for {LOOKS * CHECK_EVERY_S:.0f} s while work waited for it"
        where = self.report("asleep", text)
        sleeper.wake()
        self._warn(f"warning: {text}; it was woken. This is a bug: the stacks of all threads are in {where}")

    def _check_wait(self, now_s: float) -> None:
        wait = self._waits[-1] if self._waits else None
        mark = (wait, self.about() if wait else "")
        if mark != self._mark:
            self._mark, self._since_s, self._named_s = mark, now_s, QUIET_S
        elif wait is not None and now_s - self._since_s >= self._named_s:
            self._named_s *= 2
            about = f": {mark[1]}" if mark[1] else ""
            self._wait(f"nothing has moved for {now_s - self._since_s:.0f} s; waiting for {wait.what}{about}")


def stacks() -> str:
    """Return the stacks of all threads of this process, innermost call last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = [
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    ]
    return "\n".join(parts)


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr)  # noqa: T201
