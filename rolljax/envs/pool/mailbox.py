"""Answers on their way from other threads to the event loops that wait for them."""

from __future__ import annotations

import asyncio
import collections
import threading
from typing import Any

from rolljax.errors import RolljaxError

Delivery = tuple["asyncio.Future[Any]", Any, RolljaxError | None]


class Mailbox:
    """Hands answers to futures. Those that pile up before a loop looks share one wake-up."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[asyncio.AbstractEventLoop, collections.deque[Delivery]] = {}

    def put(self, future: asyncio.Future[Any], value: Any, error: RolljaxError | None) -> None:
        """From any thread. What comes too late, or to a loop that is closed, reaches nobody."""
        loop = future.get_loop()
        with self._lock:
            waiting = self._waiting.setdefault(loop, collections.deque())
            waiting.append((future, value, error))
            if len(waiting) > 1:
                return
        try:
            loop.call_soon_threadsafe(self._deliver, loop)
        except RuntimeError:  # the loop is closed: nobody waits
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
