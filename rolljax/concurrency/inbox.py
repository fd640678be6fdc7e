"""Queues between threads of this process, and the delivery of answers to the event loops that wait for them."""

from __future__ import annotations

import asyncio
import collections
import itertools
import queue
import threading
import time
from collections.abc import Hashable
from typing import Any, Generic, TypeVar

from rolljax.errors import RolljaxError

T = TypeVar("T")


class Inbox(Generic[T]):
    """Items from any thread for the threads that take them, in their order.

    A wait ends at its time-out however late its thread gets to run. `queue.SimpleQueue` of CPython up to 3.12 cannot be
    waited on with a time-out: a thread that is preempted for longer than that between finding the queue's lock free and
    waiting for it continues with the rest of its time, which is negative by then and means forever. Here the rest is
    checked before every wait.

    name: of the thread that takes, for reports (`rolljax.concurrency.watchdog`).
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
        """See `watchdog.Sleeper`: the first item and the longest of the waits that it should have ended."""
        try:
            return id(self._items[0]), min(list(self._waits.values()))
        except (IndexError, ValueError):  # no item, or no thread waits
            return None

    def wake(self) -> None:
        """Have every thread that waits look again."""
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
