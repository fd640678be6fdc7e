"""Work in a thread of its own while the calling thread waits: a caller may stand in an event loop, as a notebook's cell
does, or in any thread, and what works may start event loops of its own."""

from __future__ import annotations

import concurrent.futures
import contextvars
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
POLL_S = 0.1


def run_apart(work: Callable[[Callable[[], bool]], T], on_wait: Callable[[], None] = lambda: None) -> T:
    """What `work(told_to_stop)` returns or raises.

    An interrupt (Ctrl-C, or a notebook's stop button) makes `told_to_stop` true, and the wait goes on: `work` ends in
    its own way. A second one leaves it alone and raises `KeyboardInterrupt`.

    Args:
      on_wait: called in the calling thread, again and again, and once behind the end.
    """
    told = threading.Event()
    executor = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="rolljax-library")
    future = executor.submit(contextvars.copy_context().run, work, told.is_set)
    try:
        while not future.done():
            try:
                concurrent.futures.wait([future], POLL_S)
                on_wait()
            except KeyboardInterrupt:
                if told.is_set():
                    raise
                told.set()
        on_wait()
        return future.result()
    finally:
        executor.shutdown(wait=False)
