"""An asyncio event loop whose time is virtual: where nothing is ready to run, it goes to the next timer at once."""

from __future__ import annotations

import asyncio
import gc
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

from rolljax.errors import HangError

T = TypeVar("T")
ALLOCATIONS = 50_000
"""Allocations between two garbage collections: a large simulation has many objects, and few in cycles."""


class _NextTimer(selectors.SelectSelector):
    """Selector that adds the seconds of each requested wait to a virtual clock instead of waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise HangError("the simulation has come to a stop: everything waits, and nothing is under way")
        self.now_s += max(timeout, 0.0)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop that begins at second 0. One thread alone may use it, and nothing of it may block."""

    def __init__(self) -> None:
        self._timers = _NextTimer()
        super().__init__(self._timers)

    def time(self) -> float:
        """Return the virtual seconds since the loop was made."""
        return self._timers.now_s


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` in a `VirtualLoop` and return its result.

    Raises:
      HangError: `work` waits for an event that will never happen.
    """
    often = gc.get_threshold()
    gc.set_threshold(ALLOCATIONS, *often[1:])
    try:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            return runner.run(work)
    finally:
        gc.set_threshold(*often)
