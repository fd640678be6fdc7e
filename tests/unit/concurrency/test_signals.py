"""A SIGTERM ends the work by an error, wherever it arrives."""

import contextlib
import gc
import signal

import pytest

from rolljax.concurrency import signals


class Ended(BaseException):
    pass


def test_the_first_sigterm_raises_and_the_handlers_are_restored():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGALRM)]
    with pytest.raises(Ended), signals.raised(Ended):
        signal.raise_signal(signal.SIGTERM)
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGALRM)] == before


@contextlib.contextmanager
def sigterm_in_the_collector():
    """Let SIGTERM arrive in the garbage collector, once; yield a list of its arrivals."""
    arrived = []

    def callback(phase, info):
        if phase == "start" and not arrived:
            arrived.append(phase)
            signal.raise_signal(signal.SIGTERM)

    gc.callbacks.append(callback)
    try:
        yield arrived
    finally:
        gc.callbacks.remove(callback)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_sigterm_that_arrives_in_the_garbage_collector_is_not_lost():
    """Python drops what a callback of the collector raises. The collector may start at any time, so the callback is there
    only while the signal is handled."""
    with pytest.raises(Ended), signals.raised(Ended), sigterm_in_the_collector() as arrived:
        while True:
            gc.collect(0)
    assert arrived and signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_sigterm_whose_error_is_dropped_reaches_the_next_handler():
    with signals.raised(Ended):
        with contextlib.suppress(BaseException):
            signal.raise_signal(signal.SIGTERM)
        with signals.stop_requests(lambda: None) as is_told:
            while not is_told():
                pass


def test_an_error_that_became_another_is_raised_as_it_was():
    with pytest.raises(Ended) as found, signals.raised(Ended):
        try:
            signal.raise_signal(signal.SIGTERM)
        except Ended:
            raise ImportError("an extension module") from None
    assert isinstance(found.value.__cause__, ImportError)
    with pytest.raises(ImportError), signals.raised(Ended):
        raise ImportError


def test_an_error_is_not_raised_again_while_context_managers_close():
    closed = []

    @contextlib.contextmanager
    def closes_slowly():
        try:
            yield
        finally:
            try:
                raise ValueError
            except ValueError:
                for _ in range(3):
                    signal.raise_signal(signal.SIGALRM)  # as the timer does
            signal.raise_signal(signal.SIGALRM)
            closed.append(True)

    with pytest.raises(Ended), signals.raised(Ended), closes_slowly():
        signal.raise_signal(signal.SIGTERM)
    assert closed


def test_work_that_ends_although_the_error_was_dropped_leaves_no_timer():
    with signals.raised(Ended), contextlib.suppress(Ended):
        signal.raise_signal(signal.SIGTERM)
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
