"""Queues between threads of this process."""

from __future__ import annotations

import collections
import itertools
import queue
import threading
import time
from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class Inbox(Generic[T]):
    """Items from any thread for the threads that take them, in their order.

    A wait ends at its time-out however late its thread gets to run. `queue.SimpleQueue` of CPython up to 3.12 cannot be
    waited on with a time-out: a thread that is preempted for longer than that between finding the queue's lock free and
    waiting for it continues with the rest of its time, which is negative by then and means forever. Here the rest is
    checked before every wait.

    name: of the thread that takes, for reports (`rolljax.threads.watchdog`).
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
