"""Run a function in a separate thread while the calling thread waits. The caller may be inside a running event loop, as
a notebook's cell is, and the function may start its own event loops."""

from __future__ import annotations

import concurrent.futures
import contextvars
from collections.abc import Callable
from typing import TypeVar

from rolljax.concurrency import signals

T = TypeVar("T")
POLL_S = 0.1


def run_apart(work: Callable[[Callable[[], bool]], T], on_wait: Callable[[], None] = lambda: None) -> T:
    """Run `work(told_to_stop)` in a thread; return its result or raise its exception.

    An interrupt (Ctrl-C, or a notebook's stop button) makes `told_to_stop` return True and waits until `work` ends. A
    second one abandons it and raises `KeyboardInterrupt`. SIGTERM also asks it to stop, and has its usual effect
    afterwards.

    Args:
      on_wait: called in the calling thread, repeatedly.
    """
    executor = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="rolljax-library")
    with signals.stop_requests(_interrupt, then_terminate=True) as told_to_stop:
        future = executor.submit(contextvars.copy_context().run, work, told_to_stop)
        executor.shutdown(wait=False)
        while not future.done():
            concurrent.futures.wait([future], POLL_S)
            on_wait()
        return future.result()


def _interrupt() -> None:
    raise KeyboardInterrupt
