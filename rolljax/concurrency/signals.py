"""Installs and restores handlers of SIGTERM and SIGINT (Ctrl-C). Callers define the effect of a signal."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator

STOP = (signal.SIGTERM, signal.SIGINT)
REPEAT_S = 0.1
"""Seconds until an error is raised again that was dropped."""


@contextlib.contextmanager
def restored(*numbers: int) -> Iterator[None]:
    """Restore the handlers of these signals at the end, even if other code replaced them inside. In a thread other than
    the main thread, do nothing."""
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():  # None: the handler is not Python's, which cannot set it again
                signal.signal(number, signal.SIG_DFL if handler is None else handler)


@contextlib.contextmanager
def handled(handle: Callable[[int], object], *numbers: int) -> Iterator[None]:
    """Call `handle(number)` in the main thread when one of these signals arrives. In another thread, change nothing."""
    with restored(*numbers):
        if threading.current_thread() is threading.main_thread():
            for number in numbers:
                signal.signal(number, lambda number, _: handle(number))
        yield


@contextlib.contextmanager
def raised(error: type[BaseException]) -> Iterator[None]:
    """Raise `error` in the main thread at the first SIGTERM, so that context managers close; the next SIGTERM ends the
    process.

    Where other code drops the error, as Python does in callbacks of the garbage collector, it is raised again. Another
    error after the signal becomes this one: extension modules turn it into theirs.
    """

    def is_under_way() -> bool:
        return signal.getsignal(signal.SIGALRM) is repeat

    def handle(number: int) -> None:
        signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGALRM, repeat)
        signal.setitimer(signal.ITIMER_REAL, REPEAT_S, REPEAT_S)
        raise error

    def repeat(*_: object) -> None:
        found = sys.exc_info()[1]  # what the main thread is handling
        while found is not None and not isinstance(found, error):
            found = found.__context__
        if signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:  # there is another handler by now
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.raise_signal(signal.SIGTERM)
        elif found is None:
            raise error

    with restored(signal.SIGALRM), handled(handle, signal.SIGTERM):
        try:
            yield
        except Exception as e:  # border: any error of the work
            if is_under_way():
                raise error from e
            raise
        finally:
            if is_under_way():
                signal.setitimer(signal.ITIMER_REAL, 0)


@contextlib.contextmanager
def stop_requests(
    at_second: Callable[[], object], *, tell: Callable[[], object] = lambda: None, then_terminate: bool = False
) -> Iterator[Callable[[], bool]]:
    """Note SIGTERM and a first Ctrl-C, and yield a function that returns whether one arrived.

    Args:
      at_second: called at a later Ctrl-C. tell: called at every other signal.
      then_terminate: whether a SIGTERM has its usual effect at the end.
    """
    is_told, arrived = threading.Event(), set[int]()

    def handle(number: int) -> None:
        if arrived and number == signal.SIGINT:
            at_second()
        arrived.add(number)
        is_told.set()
        tell()

    try:
        with handled(handle, *STOP):
            yield is_told.is_set
    finally:
        if then_terminate and signal.SIGTERM in arrived:
            signal.raise_signal(signal.SIGTERM)


def in_loop(call: Callable[..., object], *args: object) -> None:
    """Call `call(*args)` in the running event loop at each SIGTERM or SIGINT, until the loop closes."""
    import asyncio

    for number in STOP:
        asyncio.get_running_loop().add_signal_handler(number, call, *args)
