"""Episodes in threads of this process.

Calls are handed to threads in batches and their answers come back to the event loop in batches: a call costs
microseconds, not a thread wake-up. Threads are started when calls find none idle, up to a limit: the first few at once,
more only when all are held up, each by one call. A call that runs past its limit fails, and its thread is written off
and replaced; when the call ever returns, that thread closes the environment and ends.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import threading
import time
from typing import Any

from rolljax.concurrency.waits import Inbox, Mailbox
from rolljax.envs.base import EnvSpec
from rolljax.envs.pool.episode_runner import Argument, EpisodeRunner, Verb
from rolljax.envs.pool.settings import PoolConfig
from rolljax.errors import EnvError, InfraError, RolljaxError

AT_ONCE = 16
"""Number of threads that are started without delay; enough for calls of microseconds, which the interpreter's lock
never holds up all at once."""
HELD_S = 0.002
"""Seconds in one call after which a thread counts as waiting for another process or machine."""


@dataclasses.dataclass(eq=False, slots=True)
class _Call:
    slot: ThreadSlot
    verb: Verb
    argument: Argument
    limit_s: float
    future: asyncio.Future[Any] | None  # None: no caller waits


class ThreadSlot:
    """An episode in this process. At most one call at a time; a slot that is discarded while a call is under way is
    cleared when that call returns."""

    def __init__(self, backend: ThreadBackend, runner: EpisodeRunner) -> None:
        self.started_s = 0.0
        self.runner = runner
        self.busy = False
        self.discarded = False
        self._backend = backend

    def call(self, verb: Verb, argument: Argument, limit_s: float) -> asyncio.Future[Any]:
        future = asyncio.get_running_loop().create_future()
        if verb == "close" and not self.busy and not self.runner.closes:
            future.set_result(None)
        else:
            self._backend.submit(_Call(self, verb, argument, limit_s, future))
        return future

    def discard(self) -> None:
        self._backend.discard(self)


class _Thread(threading.Thread):
    def __init__(self, backend: ThreadBackend) -> None:
        super().__init__(name="rolljax-env", daemon=True)
        self._backend = backend
        self.call: _Call | None = None
        self.since_s = 0.0

    def run(self) -> None:
        while (call := self._backend.calls.take()) is not None:
            if not self._backend.work(self, call):
                return


class ThreadBackend:
    """Runs the calls of all episodes; one more thread watches their limits."""

    def __init__(self, cfg: PoolConfig, spec: EnvSpec, max_threads: int, mailbox: Mailbox) -> None:
        self.calls: Inbox[_Call | None] = Inbox("a thread of environments")
        self.timeouts: collections.Counter[str] = collections.Counter()
        self.restarts = 0
        self.blame = None  # a crash here is the end of this process
        self._cfg, self._spec, self._mailbox = cfg, spec, mailbox
        self._max_threads = max_threads
        self._lock = threading.Lock()
        self._threads: list[_Thread] = []
        self._under_way = 0  # calls submitted and not finished
        self._closed, self._crowded = threading.Event(), threading.Event()
        self._watcher: threading.Thread | None = None

    def slot(self) -> ThreadSlot:
        """Return a slot for a new episode."""
        return ThreadSlot(self, EpisodeRunner(self._spec, self._cfg.max_observation_bytes))

    def submit(self, call: _Call) -> None:
        """Pass a call to the threads; start one more when all of them may be blocked."""
        with self._lock:
            if self._under_way >= len(self._threads) and len(self._threads) < self._max_threads:
                if len(self._threads) < AT_ONCE:
                    self._start()
                else:
                    self._crowded.set()
            call.slot.busy = True
            self._under_way += 1
        self.calls.put(call)

    def discard(self, slot: ThreadSlot) -> None:
        with self._lock:
            late, slot.discarded = slot.discarded or slot.busy, True
        if not late and slot.runner.closes:
            self.submit(_Call(slot, "close", None, self._cfg.close_s, None))

    def work(self, thread: _Thread, call: _Call) -> bool:
        """Run one call in `thread`; return False if the thread was given up as hung in the meantime."""
        value: Any = None
        error: RolljaxError | None = None
        if call.future is None or not call.future.cancelled():
            with self._lock:
                thread.since_s, thread.call = time.monotonic(), call
            if call.verb == "reset":
                call.slot.started_s = thread.since_s
            try:
                value = call.slot.runner.call(call.verb, call.argument)
            except RolljaxError as e:
                error = e
            with self._lock:
                mine, thread.call = thread.call is call, None
            if not mine:
                call.slot.runner.close()
                return False
        self._finish(call, value, error)
        return True

    def close(self) -> None:
        """Wait at most `close_s` for calls in progress, and end the threads. Hanging calls are abandoned."""
        self._closed.set()
        self._crowded.set()
        end = time.monotonic() + self._cfg.close_s
        with self._lock:
            threads = list(self._threads)
        for _ in threads:
            self.calls.put(None)
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
        with self._lock:
            hanging = [t.call for t in threads if t.call is not None]
            for thread in threads:
                thread.call = None
        for call in hanging:
            if call.future is not None:
                self._mailbox.put(call.future, None, InfraError("the pool was closed", stage=call.verb))
        if self._watcher is not None:
            self._watcher.join(max(0.0, end - time.monotonic()))

    def _finish(self, call: _Call, value: Any, error: RolljaxError | None) -> None:
        with self._lock:
            self._under_way -= 1
            call.slot.busy = False
            clear = call.slot.discarded and call.verb != "close" and call.slot.runner.closes
        if clear and self._closed.is_set():
            call.slot.runner.close()
        elif clear:
            self.submit(_Call(call.slot, "close", None, self._cfg.close_s, None))
        if call.future is not None:
            self._mailbox.put(call.future, value, error)

    def _start(self) -> None:
        thread = _Thread(self)
        try:
            thread.start()
        except RuntimeError as e:  # the system gives no more threads
            if not self._threads:
                raise InfraError(f"no thread can be started: {e}", stage="start") from e
            self._max_threads = len(self._threads)
            return
        self._threads.append(thread)
        if self._watcher is None:
            self._watcher = threading.Thread(target=self._watch, name="rolljax-env-watch", daemon=True)
            self._watcher.start()

    def _watch(self) -> None:
        """Start threads if all are blocked, and give up threads whose call is over its limit."""
        pause_s = min(1.0, min(self._cfg.reset_s, self._cfg.step_s, self._cfg.close_s) / 4)
        while not self._closed.is_set():
            if self._crowded.wait(pause_s):
                self._crowded.clear()
                self._closed.wait(HELD_S)
                self._grow()
            self._write_off()

    def _grow(self) -> None:
        """Double the number of threads, or add as many as calls wait, if every thread is blocked."""
        with self._lock:
            waiting, held_since_s = self._under_way - len(self._threads), time.monotonic() - HELD_S
            if waiting <= 0 or self._closed.is_set() or len(self._threads) >= self._max_threads:
                return
            if all(t.call is not None and t.since_s <= held_since_s for t in self._threads):
                for _ in range(min(waiting, len(self._threads), self._max_threads - len(self._threads))):
                    self._start()
            self._crowded.set()  # look again: others may be held up by then

    def _write_off(self) -> None:
        now, lost = time.monotonic(), []
        with self._lock:
            for thread in list(self._threads):
                call = thread.call
                if call is not None and now - thread.since_s > call.limit_s:
                    thread.call = None
                    self._threads.remove(thread)
                    self._under_way -= 1
                    self.restarts += 1
                    self.timeouts[call.verb] += 1
                    lost.append(call)
            if self._under_way > len(self._threads):
                for _ in lost:
                    self._start()
        for call in lost:
            if call.future is not None:
                text = f"{call.verb} of {self._spec.name}: no answer within {call.limit_s:g} s"
                self._mailbox.put(call.future, None, EnvError(text, stage=call.verb))
