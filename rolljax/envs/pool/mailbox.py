"""Delivers answers from other threads to the event loops that wait for them."""

from __future__ import annotations

import asyncio
import collections
import threading
from typing import Any

from rolljax.errors import RolljaxError

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
