"""Episodes in workers that are not this process: who runs what, limits, and whose fault an end is.

One thread owns everything here; event loops put calls into its inbox. A `Link` carries requests to workers and tells
what comes back. A worker answers its calls one after the other, so the first call without an answer is the one that
runs: its limit counts from the moment it became the first, and when the worker hangs or dies, it is the one to blame.
Its neighbours lose their episodes to an `InfraError`.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import itertools
import math
import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol

from rolljax.envs.pool import wire
from rolljax.envs.pool.checks import Verb, describe
from rolljax.envs.pool.mailbox import Mailbox
from rolljax.envs.pool.settings import PoolConfig
from rolljax.errors import EnvError, InfraError, RolljaxError
from rolljax.types import Task

MAX_START_FAILURES = 5
"""Starts in a row that may fail before the episodes that wait for a worker fail too."""

SOON_S = 2.0
"""Episodes wait this long for a worker that is being started, rather than crowd the others."""

BACKOFF_S, MAX_BACKOFF_S = 0.1, 5.0
"""Pause after a start that failed; it doubles each time."""


class Link(Protocol):
    """Starts, feeds and kills workers, each named by a generation. All but `wake` is for the dispatcher's thread."""

    num_workers: int
    num_warm: int
    """Workers that are started before any episode needs them."""

    def start(self, generation: int) -> None:
        """Begin to start a worker; `Dispatcher.ready` or `ended` follows."""

    def send(self, generation: int, requests: Sequence[wire.Request]) -> None: ...

    def kill(self, generation: int) -> None:
        """End it now; nothing more is told of it."""

    def poll(self, timeout_s: float, sink: Dispatcher) -> None:
        """Wait until something happens or `wake` is called, and tell `sink`."""

    def wake(self) -> None:
        """From any thread."""

    def close(self) -> None:
        """Kill all workers and free everything, in bounded time."""


@dataclasses.dataclass(eq=False, slots=True)
class _Call:
    number: int
    seat: WorkerSeat
    verb: Verb
    argument: Task | str | None
    limit_s: float
    future: asyncio.Future[Any] | None  # None: nobody waits

    @property
    def request(self) -> wire.Request:
        return self.number, self.seat.number, self.verb, self.argument


@dataclasses.dataclass(eq=False)
class _Worker:
    generation: int
    slot: _Slot
    since_s: float
    """When its start began, or when the first of its calls became the first."""
    ready: bool = False
    lost: str = ""
    """Why it is no more."""
    answered: bool = False
    hosted: int = 0
    episodes: set[int] = dataclasses.field(default_factory=set)
    calls: collections.deque[_Call] = dataclasses.field(default_factory=collections.deque)
    unsent: list[_Call] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(eq=False)
class _Slot:
    """A place for one worker after another."""

    worker: _Worker | None = None
    failures: int = 0
    start_at_s: float = 0.0


class WorkerSeat:
    """An episode in some worker, which is chosen when there is one with room."""

    def __init__(self, dispatcher: Dispatcher, number: int) -> None:
        self.number = number
        self.started_s = 0.0
        self.worker: _Worker | None = None
        self._dispatcher = dispatcher
        self._closing = False

    def call(self, verb: Verb, argument: Task | str | None, limit_s: float) -> asyncio.Future[Any]:
        self._closing = self._closing or verb == "close"
        future = asyncio.get_running_loop().create_future()
        self._dispatcher.post(self, verb, argument, limit_s, future)
        return future

    def discard(self) -> None:
        if not self._closing:
            self._closing = True
            self._dispatcher.post(self, "close", None, self._dispatcher.cfg.close_s, None)


class Dispatcher:
    """Places episodes on workers and keeps them alive."""

    def __init__(self, cfg: PoolConfig, name: str, link: Link, mailbox: Mailbox) -> None:
        self.cfg = cfg
        self.timeouts: collections.Counter[str] = collections.Counter()
        self.restarts = 0
        self._name, self._link, self._mailbox = name, link, mailbox
        self._numbers = itertools.count(1)
        self._generations = itertools.count(1)
        self._inbox: collections.deque[_Call] = collections.deque()
        self._backlog: collections.deque[_Call] = collections.deque()
        self._slots = [_Slot() for _ in range(link.num_workers)]
        self._workers: dict[int, _Worker] = {}
        self._awake = False
        self._closing = threading.Event()
        self._end_s = math.inf
        self._over = ""
        """Why nothing is done any more."""
        self._thread = threading.Thread(target=self._run, name="rolljax-env-dispatch", daemon=True)
        self._thread.start()

    # what event loops call

    def seat(self) -> WorkerSeat:
        return WorkerSeat(self, next(self._numbers))

    def post(
        self,
        seat: WorkerSeat,
        verb: Verb,
        argument: Task | str | None,
        limit_s: float,
        future: asyncio.Future[Any] | None,
    ) -> None:
        self._inbox.append(_Call(next(self._numbers), seat, verb, argument, limit_s, future))
        if self._over:
            self._settle()
        elif not self._awake:
            self._awake = True
            self._link.wake()

    def close(self) -> None:
        """Give the calls under way `close_s`, then end all workers."""
        self._end_s = time.monotonic() + self.cfg.close_s
        self._closing.set()
        self._link.wake()
        self._thread.join(self.cfg.close_s + 10.0)

    # what the link calls

    def ready(self, generation: int) -> None:
        """The worker takes requests."""
        if (worker := self._workers.get(generation)) is not None:
            worker.ready = True

    def replied(self, generation: int, payload: bytes) -> None:
        """A frame came from the worker."""
        worker = self._workers.get(generation)
        if worker is None:
            return
        try:
            number, outcome, plain = wire.parse(payload)
            call = worker.calls[0] if worker.calls else None
            if call is None or call.number != number:
                self._lose(worker, "it answered a call that nobody waits for", own=False)
                return
            value = wire.value_of(call.verb, outcome, plain, self.cfg.max_observation_bytes)
        except wire.ProtocolError as e:
            self._lose(worker, f"it sent {e}", own=True)
            return
        worker.calls.popleft()
        worker.since_s, worker.answered, worker.slot.failures = time.monotonic(), True, 0
        self._after(call, worker)
        failed = isinstance(value, RolljaxError)
        self._report(call, None if failed else value, value if failed else None)

    def ended(self, generation: int, why: str, own: bool, output: str = "") -> None:
        """The worker is gone. own: the code that ran in it did it, as opposed to someone outside."""
        if (worker := self._workers.get(generation)) is not None:
            self._lose(worker, why, own, output)

    # the thread

    def _run(self) -> None:
        try:
            self._start_workers()
            while not self._closing.is_set() or (time.monotonic() < self._end_s and self._under_way()):
                self._turn()
        except Exception as e:  # border: whoever waits must hear of it
            self._over = f"the pool's dispatcher failed: {describe(e)}"
            raise
        finally:
            self._over = self._over or "the pool was closed"
            self._settle()
            self._link.close()

    def _turn(self) -> None:
        """Whatever is to be done now, or the wait for it."""
        self._link.poll(self._pause_s(), self)
        self._awake = False
        while self._inbox:
            self._take(self._inbox.popleft())
        self._check_limits()
        self._place()
        self._start_workers()
        for worker in self._workers.values():
            if worker.ready and worker.unsent:
                self._link.send(worker.generation, [c.request for c in worker.unsent])
                worker.unsent.clear()

    def _settle(self) -> None:
        """Tell everyone who waits that it is over."""
        calls = [*self._backlog, *(c for w in self._workers.values() for c in w.calls)]
        self._backlog.clear()
        self._workers.clear()
        while self._inbox:
            calls.append(self._inbox.popleft())
        for call in calls:
            self._report(call, None, InfraError(self._over, stage=call.verb))

    def _under_way(self) -> bool:
        return bool(self._inbox) or any(w.calls for w in self._workers.values())

    def _pause_s(self) -> float:
        """Until the next limit or start, at most 1 s."""
        if self._inbox:
            return 0.0
        now = time.monotonic()
        times = [now + 1.0, self._end_s]
        for slot in self._slots:
            if slot.worker is None and slot.start_at_s > now:
                times.append(slot.start_at_s)
            elif slot.worker is not None:
                times.append(slot.worker.since_s + self._limit_s(slot.worker))
        return max(0.0, min(times) - now)

    def _limit_s(self, worker: _Worker) -> float:
        if not worker.ready:
            return self.cfg.start_s
        return worker.calls[0].limit_s if worker.calls else math.inf

    def _start_workers(self) -> None:
        """As many as there are episodes, as far as there are slots: alone, an episode is nobody's neighbour."""
        now = time.monotonic()
        episodes = len(self._backlog) + sum(len(w.episodes) for w in self._workers.values())
        for slot in self._slots[: max(self._link.num_warm, episodes)]:
            if slot.worker is None and now >= slot.start_at_s and not self._closing.is_set():
                worker = slot.worker = _Worker(next(self._generations), slot, now)
                self._workers[worker.generation] = worker
                self._link.start(worker.generation)

    def _take(self, call: _Call) -> None:
        worker = call.seat.worker
        if call.verb == "reset":
            self._backlog.append(call)
        elif worker is None:  # discarded before it was placed
            self._backlog = collections.deque(c for c in self._backlog if c.seat is not call.seat)
            self._report(call, None, None)
        elif worker.lost:
            error = InfraError(f"{call.verb} of {self._name}: its worker is gone: {worker.lost}", stage=call.verb)
            self._report(call, None, None if call.verb == "close" else error)
        else:
            self._enqueue(call, worker)

    def _place(self) -> None:
        """Give the episodes that wait to the workers with the most room."""
        while self._backlog:
            most = self._most_per_worker()
            room = [
                w
                for w in self._workers.values()
                if w.ready and len(w.episodes) < most and w.hosted < self.cfg.worker_lifetime
            ]
            if not room:
                return
            call = self._backlog.popleft()
            if call.future is not None and call.future.cancelled():
                continue
            worker = min(room, key=lambda w: len(w.episodes))
            worker.episodes.add(call.seat.number)
            worker.hosted += 1
            call.seat.worker, call.seat.started_s = worker, time.monotonic()
            self._enqueue(call, worker)

    def _most_per_worker(self) -> int:
        """Episodes a worker may hold: its share only, while others are about to be ready."""
        soon = time.monotonic() - SOON_S
        if all(w.ready or w.since_s < soon for w in self._workers.values()):
            return self.cfg.episodes_per_worker
        total = len(self._backlog) + sum(len(w.episodes) for w in self._workers.values())
        return min(self.cfg.episodes_per_worker, math.ceil(total / len(self._workers)))

    def _enqueue(self, call: _Call, worker: _Worker) -> None:
        if not worker.calls:
            worker.since_s = time.monotonic()
        worker.calls.append(call)
        worker.unsent.append(call)

    def _after(self, call: _Call, worker: _Worker) -> None:
        """Free the room of a closed episode; a worker at the end of its life goes with its last episode."""
        if call.verb == "close":
            worker.episodes.discard(call.seat.number)
            if worker.hosted >= self.cfg.worker_lifetime and not worker.episodes:
                self._lose(worker, "it had hosted PoolConfig.worker_lifetime episodes", own=False)

    def _check_limits(self) -> None:
        now = time.monotonic()
        for worker in list(self._workers.values()):
            limit_s = self._limit_s(worker)
            if now - worker.since_s <= limit_s:
                continue
            if worker.ready:
                self.timeouts[worker.calls[0].verb] += 1
            else:
                self.timeouts["start"] += 1
            self._lose(worker, f"no answer within {limit_s:g} s", own=True)

    def _lose(self, worker: _Worker, why: str, own: bool, output: str = "") -> None:
        """Settle the calls of a worker that ended, or that must end, and have it replaced."""
        self._link.kill(worker.generation)
        del self._workers[worker.generation]
        worker.lost, slot = why, worker.slot
        slot.worker = None
        self.restarts += 1
        if not worker.ready or not (worker.answered or worker.calls):  # of no use, and nobody's doing
            slot.failures += 1
            slot.start_at_s = time.monotonic() + min(MAX_BACKOFF_S, BACKOFF_S * 2.0 ** (slot.failures - 1))
            if slot.failures >= MAX_START_FAILURES and not any(w.ready for w in self._workers.values()):
                self._give_up(why, slot.failures, output)
        for i, call in enumerate(worker.calls):
            doing = f"{call.verb} of {self._name}"
            error: EnvError
            if own and i == 0:
                error = EnvError(f"{doing}: {why}{_last_lines(output)}", stage=call.verb)
            else:
                error = InfraError(f"{doing}: its worker is gone: {why}", stage=call.verb)
            if output:
                error.add_note(f"the last output of the worker:\n{output}")
            self._report(call, None, error)

    def _give_up(self, why: str, failures: int, output: str) -> None:
        """Fail what waits for a worker."""
        error = f"no worker for {self._name}: {failures} starts in a row failed: {why}{_last_lines(output)}"
        for call in self._backlog:
            self._report(call, None, InfraError(error, stage="start"))
        self._backlog.clear()

    def _report(self, call: _Call, value: Any, error: RolljaxError | None) -> None:
        if call.future is not None:
            self._mailbox.put(call.future, value, error)


def _last_lines(output: str) -> str:
    """The end of an output, short enough for the text of an error."""
    text = output.strip()[-1000:]
    return f"; its last output: {text}" if text else ""
