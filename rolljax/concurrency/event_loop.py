"""Asyncio event loops in separate threads: a run's loop, whose waits have names and deadlines (`EventLoop`), and a
loop that only runs while a caller waits for it (`SteppedLoop`)."""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import itertools
import threading
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Sequence
from typing import Any, ParamSpec, Self, TypeVar

from rolljax.concurrency.waits import Watchdog
from rolljax.errors import HangError

S = TypeVar("S")
T = TypeVar("T")
P = ParamSpec("P")
POLL_S = 0.2


class Stopped(Exception):
    """The run was asked to stop while it was waiting."""


class EventLoop:
    """An asyncio event loop in a thread: environments, requests and the loop of a run live there. Blocking work, such
    as a training step, runs in a second thread (`call`), so that everything else continues meanwhile.

    Args:
      should_stop: asked while waiting. watchdog: gets the names of waits.
    """

    def __init__(self, should_stop: Callable[[], bool], watchdog: Watchdog | None = None) -> None:
        self._should_stop, self._watchdog = should_stop, watchdog or Watchdog()
        self._loop = asyncio.new_event_loop()
        self._ended_by: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, name="rolljax-rollouts", daemon=True)
        self._thread.start()
        self._blocking = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="rolljax-trainer")

    def _serve(self) -> None:
        try:
            self._loop.run_forever()
        except (SystemExit, KeyboardInterrupt) as e:  # asyncio lets these of any task end its loop
            self._ended_by = e

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` in the loop while the calling thread waits, and return its result; `work` names its own waits.

        Raises:
          SystemExit, KeyboardInterrupt: something in the loop raised it, and ended the loop with it.
        """
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            while True:
                try:
                    return future.result(timeout=POLL_S)  # an end, so that signals are handled
                except concurrent.futures.TimeoutError:
                    if future.done():
                        return future.result()
                    if self._ended_by is not None:
                        raise self._ended_by from None
        finally:
            future.cancel()

    def check_stop(self) -> None:
        """Raise `Stopped` if the run is to stop."""
        if self._should_stop():
            raise Stopped

    async def call(self, blocking: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `blocking` in the thread for blocking calls, one call at a time; return its result. Not interrupted."""
        future = self._blocking.submit(blocking, *args, **kwargs)
        return await asyncio.shield(asyncio.wrap_future(future))

    async def within(self, work: Awaitable[T], name: str, deadline_s: float, *, interruptible: bool = True) -> T:
        """Await `work` in the loop and return its result. If the wait is given up, `work` is cancelled.

        Raises:
          HangError: it took longer than `deadline_s`; the message names the wait.
          Stopped: the run was asked to stop meanwhile.
        """

        async def result() -> T:  # `gather` returns a future, which would log its cancellation
            return await work

        task, clock = asyncio.ensure_future(result()), asyncio.get_running_loop().time
        start = clock()
        with self._watchdog.waiting_for(name):
            try:
                while not (await asyncio.wait({task}, timeout=POLL_S))[0]:
                    if interruptible and self._should_stop():
                        raise Stopped
                    if clock() - start > deadline_s:
                        about = self._watchdog.about()
                        text = f"waited {deadline_s:.0f} s for {name}" + (f" ({about})" if about else "")
                        raise HangError(f"{text}; raise Recipe.wait_s if that can be normal")
                return task.result()
            finally:
                task.cancel()

    def close(self) -> None:
        """Cancel the remaining tasks and end the threads."""

        async def cancel() -> None:
            tasks = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        if self._ended_by is None:
            asyncio.run_coroutine_threadsafe(cancel(), self._loop).result(timeout=30)
            self._loop.call_soon_threadsafe(self._loop.stop)
        else:
            self._loop.run_until_complete(cancel())
        self._thread.join(timeout=30)
        self._blocking.shutdown(wait=False, cancel_futures=True)
        self._loop.close()


class SteppedLoop:
    """An asyncio event loop that only runs while `run` waits for it: nothing in it ever runs concurrently with
    the calling thread. Its own thread allows callers that are in an event loop themselves, as a notebook's cell is.

    Use it as a context manager, by one thread at a time; unfinished work is cancelled at the end.
    """

    def __init__(self) -> None:
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="rolljax-asking")

    def __enter__(self) -> Self:
        self._thread.submit(self._runner.get_loop).result()  # the thread is there before an interrupt can make it two
        return self

    def __exit__(self, *_: object) -> None:
        self._wait(self._thread.submit(self._runner.close))
        self._thread.shutdown()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` and return its result; an interrupt of the wait cancels it."""
        loop = self._runner.get_loop()
        task = loop.create_task(work)
        try:
            future = self._thread.submit(loop.run_until_complete, task)
            self._wait(future)
            return future.result()
        finally:
            if not task.done():  # interrupted, perhaps before the loop ran
                loop.call_soon_threadsafe(task.cancel)
                self._wait(self._thread.submit(self._end, task))

    def each(
        self, source: Iterable[S], work: Callable[[S], Awaitable[T]], window: int
    ) -> Generator[tuple[S, T], None, None]:
        """Yield every item of `source` with the result of `work`, in order, with at most `window` items under way.

        When the iterator is closed or `work` raises, all items under way are cancelled.
        """
        waiting, under_way = iter(source), collections.deque[tuple[S, asyncio.Task[T]]]()

        async def begin(items: Sequence[S]) -> None:
            under_way.extend((item, asyncio.ensure_future(awaited(work(item)))) for item in items)

        async def awaited(result: Awaitable[T]) -> T:
            return await result

        async def cancel() -> None:
            for _, task in under_way:
                task.cancel()
            await asyncio.gather(*(task for _, task in under_way), return_exceptions=True)

        try:
            self.run(begin(list(itertools.islice(waiting, window))))
            while under_way:
                item, task = under_way.popleft()
                yield item, self.run(awaited(task))
                self.run(begin(list(itertools.islice(waiting, 1))))
        finally:
            self.run(cancel())

    def _end(self, task: asyncio.Task[Any]) -> None:
        if not task.done():
            self._runner.get_loop().run_until_complete(asyncio.wait({task}))

    @staticmethod
    def _wait(future: concurrent.futures.Future[Any]) -> None:
        while not future.done():
            concurrent.futures.wait([future], POLL_S)  # an end, so that signals are handled
