"""Run a function in a separate thread while the calling thread waits. The caller may be inside a running event loop, as
a notebook's cell is, and the function may start event loops of its own."""

from __future__ import annotations

import concurrent.futures
import contextvars
from collections.abc import Callable
from typing import TypeVar

from rolljax.concurrency import signals

T = TypeVar("T")
POLL_S = 0.1


def run_apart(work: Callable[[Callable[[], bool]], T], on_wait: Callable[[], None] = lambda: None) -> T:
    """What `work(told_to_stop)` returns or raises.

    An interrupt (Ctrl-C, or a notebook's stop button) makes `told_to_stop` true, and the wait goes on: `work` ends in
    its own way. A second one leaves it alone and raises `KeyboardInterrupt`. SIGTERM asks it to stop too, and takes its
    usual effect when it has.

    Args:
      on_wait: called in the calling thread, again and again.
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
