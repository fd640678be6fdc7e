"""The host pool: environments behind asyncio, in worker threads, under deadlines.

Every call of an environment (reset, step, gold, close) is a job. Jobs are handed to a fixed set of threads in lots and
their results come back to the event loop in lots: a job costs microseconds, not a thread wake-up each. A job that runs
past its deadline fails with an `EnvError` and its thread is written off and replaced; the event loop never blocks.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from rolljax.errors import ConfigError, EnvError, RolljaxError

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class PoolConfig:
    """workers: threads. step_timeout_s: longest one call of an environment may take."""

    workers: int = 2
    step_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ConfigError("must be at least 1", setting="PoolConfig.workers", value=self.workers)
        if self.step_timeout_s <= 0:
            raise ConfigError("must be positive", setting="PoolConfig.step_timeout_s", value=self.step_timeout_s)


@dataclasses.dataclass(eq=False, slots=True)
class _Job:
    fn: Callable[[], Any]
    doing: str
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]


class _Worker(threading.Thread):
    """Runs jobs one after the other; `since_s` and `job` say what it is busy with, for the watchdog."""

    def __init__(self, pool: EnvPool) -> None:
        super().__init__(name="rolljax-env", daemon=True)
        self._pool = pool
        self.job: _Job | None = None
        self.since_s = 0.0
        self.written_off = False

    def run(self) -> None:
        while not self.written_off:
            job = self._pool._jobs.get()
            if job is None:
                return
            self.since_s, self.job = time.monotonic(), job
            try:
                result, error = job.fn(), None
            except RolljaxError as e:
                result, error = None, e
            except Exception as e:  # border: whatever an environment throws is that environment's failure
                result, error = None, EnvError(f"{job.doing}: {type(e).__name__}: {e}")
            self.job = None
            self._pool._report(job, result, error)


class EnvPool:
    """A pool of worker threads for environment calls."""

    def __init__(self, cfg: PoolConfig) -> None:
        self.cfg = cfg
        self.num_timeouts = 0
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._done: dict[asyncio.AbstractEventLoop, collections.deque[tuple[_Job, Any, Exception | None]]] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._workers = [_Worker(self) for _ in range(cfg.workers)]
        for worker in self._workers:
            worker.start()
        threading.Thread(target=self._watch, name="rolljax-env-watch", daemon=True).start()

    async def call(self, fn: Callable[[], T], doing: str) -> T:
        """Run `fn` in a worker.

        Raises:
          EnvError: it failed, or it ran past `step_timeout_s` (time in the queue does not count).
        """
        if self._closed.is_set():
            raise EnvError(f"{doing}: the pool is closed")
        loop = asyncio.get_running_loop()
        job = _Job(fn, doing, loop, loop.create_future())
        self._jobs.put(job)
        return await job.future

    def close(self) -> None:
        """Let the workers go."""
        self._closed.set()
        for _ in self._workers:
            self._jobs.put(None)

    def _report(self, job: _Job, result: Any, error: Exception | None) -> None:
        """Hand a result to its loop; results that pile up before the loop looks share one wake-up."""
        with self._lock:
            waiting = self._done.setdefault(job.loop, collections.deque())
            waiting.append((job, result, error))
            if len(waiting) > 1:
                return
        try:
            job.loop.call_soon_threadsafe(self._flush, job.loop)
        except RuntimeError:  # the loop is closed: nobody waits
            with self._lock:
                self._done.pop(job.loop, None)

    def _flush(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            done = self._done.pop(loop, ())
        for job, result, error in done:
            if job.future.done():
                continue
            if error is not None:
                job.future.set_exception(error)
            else:
                job.future.set_result(result)

    def _watch(self) -> None:
        """Write off workers whose job is over its deadline."""
        limit = self.cfg.step_timeout_s
        while not self._closed.wait(min(1.0, limit / 4)):
            for i, worker in enumerate(self._workers):
                job = worker.job
                if job is not None and time.monotonic() - worker.since_s > limit:
                    worker.written_off = True
                    self.num_timeouts += 1
                    self._workers[i] = _Worker(self)
                    self._workers[i].start()
                    self._report(job, None, EnvError(f"{job.doing}: no answer within {limit:g} s"))
