"""An asyncio event loop in a thread of its own, and waits for what runs there: each has a name and a deadline."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from rolljax.errors import HangError
from rolljax.threads.watchdog import Watchdog

T = TypeVar("T")
POLL_S = 0.2


class Stopped(Exception):
    """The run was told to stop while it was waiting."""


class EventLoop:
    """An asyncio event loop in a thread: where environments and requests live while the main thread trains.

    Args:
      should_stop: asked while waiting. watchdog: is told the names of waits.
    """

    def __init__(self, should_stop: Callable[[], bool], watchdog: Watchdog | None = None) -> None:
        self._should_stop, self._watchdog = should_stop, watchdog or Watchdog()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rolljax-rollouts", daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Begin `work`; its result is for `wait`."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def wait(
        self, future: concurrent.futures.Future[T], name: str, deadline_s: float, *, interruptible: bool = True
    ) -> T:
        """The result of `future`.

        Raises:
          HangError: it took longer than `deadline_s`; the message names the wait.
          Stopped: the run was told to stop meanwhile.
        """
        with self._watchdog.waiting_for(name):
            return self._wait(future, name, deadline_s, interruptible)

    def _wait(self, future: concurrent.futures.Future[T], name: str, deadline_s: float, interruptible: bool) -> T:
        start = time.monotonic()
        while True:
            try:
                return future.result(timeout=POLL_S)
            except concurrent.futures.TimeoutError:
                if future.done():
                    return future.result()
            if interruptible and self._should_stop():
                raise Stopped
            if time.monotonic() - start > deadline_s:
                about = self._watchdog.about()
                future.cancel()
                text = f"waited {deadline_s:.0f} s for {name}" + (f" ({about})" if about else "")
                raise HangError(f"{text}; raise Recipe.wait_s if that can be normal")

    def close(self) -> None:
        """Cancel what is left and end the thread."""

        async def cancel() -> None:
            tasks = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        self.start(cancel()).result(timeout=30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=30)
        self._loop.close()
