"""Run a function in a separate thread while the calling thread waits. The caller may be inside a running event loop, as
a notebook's cell is, and the function may start event loops of its own."""

from __future__ import annotations

import concurrent.futures
import contextlib
import contextvars
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

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
    told = threading.Event()
    executor = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="rolljax-library")
    with _signals(told):
        future = executor.submit(contextvars.copy_context().run, work, told.is_set)
        executor.shutdown(wait=False)
        while not future.done():
            concurrent.futures.wait([future], POLL_S)
            on_wait()
        return future.result()


@contextlib.contextmanager
def _signals(told: threading.Event) -> Iterator[None]:
    """While inside: signals set `told`, where this is the main thread, whose affair they are."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    terminated = threading.Event()

    def handle(number: int, _: Any) -> None:
        if number == signal.SIGTERM:
            terminated.set()
        elif told.is_set():
            raise KeyboardInterrupt
        told.set()

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # one that Python did not set stays lost
                signal.signal(number, handler)
        if terminated.is_set():
            signal.raise_signal(signal.SIGTERM)
