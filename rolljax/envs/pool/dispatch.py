"""Episodes in workers outside of this process: placement, limits, and who is to blame when a worker ends.

One thread owns all state here; event loops put calls into its inbox. A `WorkerLink` carries requests to workers and
reports their replies. A worker answers its calls one after the other, so the first call without an answer is the one
that runs: its limit counts from the moment it became the first, and when the worker hangs or dies, it is the one to
blame (`blame.py`). Neighbours whose reset was not answered are placed again and notice nothing; the others lose their
episodes to a `NeighbourError`.
"""

from __future__ import annotations

import asyncio
import collections
import itertools
import math
import sys
import threading
import time
from typing import Any

from rolljax.concurrency.waits import Mailbox
from rolljax.envs.pool import wire
from rolljax.envs.pool.blame import SET_ASIDE, Blame
from rolljax.envs.pool.episode_runner import Argument, Verb, describe
from rolljax.envs.pool.link import Cause, WorkerLink
from rolljax.envs.pool.settings import PoolConfig
from rolljax.envs.pool.workers import PoolWorker, RemoteSlot, WorkerCall, WorkerSlot
from rolljax.errors import EnvError, InfraError, NeighbourError, RolljaxError
from rolljax.types import Task

MAX_START_FAILURES = 5
"""Number of failed starts in a row after which the episodes that wait for a worker fail too."""

SOON_S = 2.0
"""Seconds that episodes wait for a worker that is being started before they join workers that already hold their
share."""

BACKOFF_S, MAX_BACKOFF_S = 0.1, 5.0
"""First and longest pause in seconds after a failed start; the pause doubles each time."""


class Dispatcher:
    """Places episodes on workers and keeps them alive."""

    def __init__(self, cfg: PoolConfig, name: str, link: WorkerLink, mailbox: Mailbox) -> None:
        self.cfg = cfg
        self.timeouts: collections.Counter[str] = collections.Counter()
        self.restarts = 0
        self.blame = Blame(cfg.max_crashes)
        self._name, self._link, self._mailbox = name, link, mailbox
        self._numbers = itertools.count(1)
        self._generations = itertools.count(1)
        self._inbox: collections.deque[WorkerCall] = collections.deque()
        self._backlog: collections.deque[WorkerCall] = collections.deque()
        self._apart: collections.deque[WorkerCall] = collections.deque()
        """Resets of suspected tasks; each waits for an empty worker."""
        self._worker_slots: list[WorkerSlot] = []
        self._workers: dict[int, PoolWorker] = {}
        self._awake = False
        self._closing = threading.Event()
        self._end_s = math.inf
        self._over = ""
        """The reason why the pool gave up; empty while it works."""
        self._thread = threading.Thread(target=self._run, name="rolljax-env-dispatch", daemon=True)
        self._thread.start()

    # called by event loops

    def slot(self) -> RemoteSlot:
        """Return a slot for a new episode."""
        return RemoteSlot(self, next(self._numbers))

    def post(
        self,
        slot: RemoteSlot,
        verb: Verb,
        argument: Argument,
        limit_s: float,
        future: asyncio.Future[Any] | None,
    ) -> None:
        """Put a call into the inbox."""
        self._inbox.append(WorkerCall(next(self._numbers), slot, verb, argument, limit_s, future))
        if self._over:
            self._settle()
        elif not self._awake:
            self._awake = True
            self._link.wake()

    def close(self) -> None:
        """Wait up to `close_s` for the calls in progress, then end all workers."""
        self._end_s = time.monotonic() + self.cfg.close_s
        self._closing.set()
        self._link.wake()
        self._thread.join(self.cfg.close_s + 10.0)

    # called by the link

    def ready(self, generation: int) -> None:
        """Record that the worker accepts requests."""
        if (worker := self._workers.get(generation)) is not None:
            worker.ready = True

    def replied(self, generation: int, payload: bytes) -> None:
        """Handle a line from the worker."""
        worker = self._workers.get(generation)
        if worker is None:
            return
        try:
            number, outcome, plain = wire.parse(payload)
            call = worker.calls[0] if worker.calls else None
            if call is None or call.number != number:
                self._lose(worker, "it answered a call that was not made", "unknown")
                return
            value = wire.value_of(call.verb, outcome, plain, self.cfg.max_observation_bytes)
        except wire.ProtocolError as e:
            self._lose(worker, f"it sent {e}", "crash")
            return
        worker.calls.popleft()
        worker.since_s, worker.answered, worker.worker_slot.failures = time.monotonic(), True, 0
        self._after(call, worker)
        failed = isinstance(value, RolljaxError)
        self._report(call, None if failed else value, value if failed else None)

    def ended(self, generation: int, why: str, cause: Cause, output: str = "") -> None:
        """Record that the worker is gone."""
        if (worker := self._workers.get(generation)) is not None:
            self._lose(worker, why, cause, output)

    # the thread

    def _run(self) -> None:
        try:
            self._start_workers()
            while not self._closing.is_set() or (time.monotonic() < self._end_s and self._under_way()):
                self._run_once()
        finally:  # also after an error: the waiting callers must get an error
            failure = sys.exc_info()[1]
            self._over = f"the pool's dispatcher failed: {describe(failure)}" if failure else "the pool was closed"
            self._settle()
            self._link.close()

    def _run_once(self) -> None:
        """Do the pending work, or wait for some."""
        self._link.poll(self._pause_s(), self)
        self._awake = False
        while self._inbox:
            self._accept(self._inbox.popleft())
        self._check_limits()
        self._place()
        self._start_workers()
        for worker in self._workers.values():
            if worker.ready and worker.unsent:
                self._link.send(worker.generation, [c.request for c in worker.unsent])
                worker.unsent.clear()

    def _settle(self) -> None:
        """Fail all waiting calls."""
        calls = [*self._backlog, *self._apart, *(c for w in self._workers.values() for c in w.calls)]
        self._backlog.clear()
        self._apart.clear()
        self._workers.clear()
        while self._inbox:
            calls.append(self._inbox.popleft())
        for call in calls:
            self._report(call, None, InfraError(self._over, stage=call.verb))

    def _under_way(self) -> bool:
        return bool(self._inbox) or any(w.calls for w in self._workers.values())

    def _pause_s(self) -> float:
        """Return the time until the next limit or start, at most 1 s."""
        if self._inbox:
            return 0.0
        now = time.monotonic()
        times = [now + 1.0, self._end_s]
        for worker_slot in self._worker_slots:
            if worker_slot.worker is None and worker_slot.start_at_s > now:
                times.append(worker_slot.start_at_s)
            elif worker_slot.worker is not None:
                times.append(worker_slot.worker.since_s + self._limit_s(worker_slot.worker))
        return max(0.0, min(times) - now)

    def _limit_s(self, worker: PoolWorker) -> float:
        if not worker.ready:
            return self.cfg.start_s
        return worker.calls[0].limit_s if worker.calls else math.inf

    def _start_workers(self) -> None:
        """Start a worker for each episode while there are slots: alone in a worker it cannot harm other episodes."""
        now = time.monotonic()
        self._fit_slots()
        most = min(self._link.num_workers, max(1, self._num_wanted()))
        for worker_slot in self._worker_slots[:most]:
            if worker_slot.worker is None and now >= worker_slot.start_at_s and not self._closing.is_set():
                worker = worker_slot.worker = PoolWorker(next(self._generations), worker_slot, now)
                self._workers[worker.generation] = worker
                self._link.start(worker.generation)

    def _fit_slots(self) -> None:
        """Adjust the worker slots to the allowed number, and end idle workers beyond it."""
        number = self._link.num_workers
        self._worker_slots += [WorkerSlot() for _ in range(number - len(self._worker_slots))]
        for worker in self._leaving():
            if not worker.episodes:
                self._end(worker)
        self._worker_slots = [s for i, s in enumerate(self._worker_slots) if i < number or s.worker is not None]

    def _leaving(self) -> list[PoolWorker]:
        """Return the workers that must end with their last episode, because fewer or smaller workers are allowed
        now."""
        surplus = [s.worker for s in self._worker_slots[self._link.num_workers :] if s.worker is not None]
        oversized = [w for w in self._workers.values() if self._link.is_oversized(w.generation) and w not in surplus]
        return surplus + oversized

    def _end(self, worker: PoolWorker) -> None:
        """End a worker and free its slot."""
        self._link.kill(worker.generation)
        del self._workers[worker.generation]
        worker.worker_slot.worker = None

    def _accept(self, call: WorkerCall) -> None:
        """Accept a call from an event loop."""
        worker = call.slot.worker
        if call.verb == "reset":
            assert isinstance(call.argument, Task)
            call.slot.task = call.argument.id
            self._backlog.append(call)
        elif worker is None:  # discarded before it was placed
            for waiting in (self._backlog, self._apart):
                for other in [c for c in waiting if c.slot is call.slot]:
                    waiting.remove(other)
            self._report(call, None, None)
        elif worker.lost:
            self._report(call, None, None if call.verb == "close" else self._loss(call, worker))
        else:
            self._enqueue(call, worker)

    def _place(self) -> None:
        """Assign waiting episodes to the workers with the most free places, and each episode of a suspected task to a
        worker of its own."""
        self._place_apart()
        emptied = self._emptied()
        while self._backlog:
            most = self._most_per_worker()
            room = [w for w in self._open_workers() if not w.is_apart and w not in emptied and len(w.episodes) < most]
            if not room:
                break
            call = self._backlog.popleft()
            if self.blame.is_suspect(call.slot.task):
                self._apart.append(call)
            elif self._is_wanted(call):
                self._put(call, min(room, key=lambda w: len(w.episodes)))
        self._place_apart()

    def _place_apart(self) -> None:
        while self._apart and (empty := next((w for w in self._open_workers() if not w.episodes), None)):
            call = self._apart.popleft()
            if self._is_wanted(call):
                empty.is_apart = self.blame.is_suspect(call.slot.task)
                self._put(call, empty)

    def _open_workers(self) -> list[PoolWorker]:
        leaving = self._leaving()
        stays = [w for w in self._workers.values() if w.ready and w not in leaving]
        return [w for w in stays if w.hosted < self.cfg.worker_lifetime]

    def _emptied(self) -> list[PoolWorker]:
        """Return the workers reserved for suspects: those with the fewest episodes; chosen at most every second."""
        shared = [w for w in self._open_workers() if not w.is_apart]
        shared.sort(key=lambda w: (len(w.episodes), w.generation))
        return shared[: min(len(self._apart), max(1, len(self._worker_slots) // 2))]

    def _is_wanted(self, call: WorkerCall) -> bool:
        """Return whether to carry out a reset; if its task is set aside, its caller gets an error."""
        if call.future is not None and call.future.cancelled():
            return False
        if why := self.blame.set_aside(call.slot.task):
            assert isinstance(call.argument, Task)
            text = f"task {call.argument.index} of {self._name}: {why}"
            self._report(call, None, EnvError(text, stage=SET_ASIDE))
        return not why

    def _put(self, call: WorkerCall, worker: PoolWorker) -> None:
        worker.episodes[call.slot.number] = call.slot
        worker.hosted += 1
        call.slot.worker, call.slot.started_s = worker, time.monotonic()
        self._enqueue(call, worker)

    def _num_wanted(self) -> int:
        """Return the number of episodes that are open or wait to be."""
        return len(self._backlog) + len(self._apart) + sum(len(w.episodes) for w in self._workers.values())

    def _most_per_worker(self) -> int:
        """Return how many episodes a worker may hold: only its share while other workers are starting."""
        soon = time.monotonic() - SOON_S
        if all(w.ready or w.since_s < soon for w in self._workers.values()):
            return self.cfg.episodes_per_worker
        return min(self.cfg.episodes_per_worker, math.ceil(self._num_wanted() / len(self._workers)))

    def _enqueue(self, call: WorkerCall, worker: PoolWorker) -> None:
        if not worker.calls:
            worker.since_s = time.monotonic()
        worker.calls.append(call)
        worker.unsent.append(call)

    def _after(self, call: WorkerCall, worker: PoolWorker) -> None:
        """Free the room of a closed episode; a worker at the end of its life goes with its last episode."""
        if call.verb == "close":
            worker.episodes.pop(call.slot.number, None)
            if worker.is_apart:
                worker.is_apart = False
                self.blame.acquit(call.slot.task)
            if worker.hosted >= self.cfg.worker_lifetime and not worker.episodes:
                self._lose(worker, "it had hosted PoolConfig.worker_lifetime episodes", "machine")

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
            self._lose(worker, f"no answer within {limit_s:g} s", "hang")

    def _lose(self, worker: PoolWorker, why: str, cause: Cause, output: str = "") -> None:
        """End a lost worker: fail its calls, queue the resets it is not to blame for again, and give up the pool if no
        worker starts."""
        self._end(worker)
        worker.lost, worker.cause, worker_slot = why, cause, worker.worker_slot
        self.restarts += 1
        self._lay_blame(worker)
        if not worker.ready or not (worker.answered or worker.calls):  # it did no work, and no task is to blame
            worker_slot.failures += 1
            backoff_s = min(MAX_BACKOFF_S, BACKOFF_S * 2.0 ** (worker_slot.failures - 1))
            worker_slot.start_at_s = time.monotonic() + backoff_s
            if worker_slot.failures >= MAX_START_FAILURES and not any(w.ready for w in self._workers.values()):
                self._give_up(why, worker_slot.failures, output)
        again = []
        for call in worker.calls:
            innocent = cause != "machine" and call.slot is not worker.culprit
            if innocent and call.verb == "reset" and not call.slot.closing:
                call.slot.worker = None
                again.append(call)
            else:
                self._report(call, None, self._loss(call, worker, output))
        self._backlog.extendleft(reversed(again))

    def _lay_blame(self, worker: PoolWorker) -> None:
        """Find the task that ended a worker, or the suspects."""
        slots = list(worker.episodes.values())
        if worker.cause == "machine":
            return
        if worker.calls:
            worker.culprit = worker.calls[0].slot
        elif len(slots) == 1:
            worker.culprit = slots[0]
        alone = worker.culprit is not None and all(slot is worker.culprit for slot in slots)
        if worker.culprit is None:
            self.blame.suspect(slot.task for slot in slots)
        elif worker.cause == "crash" or (worker.cause == "unknown" and alone):
            self.blame.crashed(worker.culprit.task, worker.lost)
        else:
            self.blame.suspect([worker.culprit.task])

    def _loss(self, call: WorkerCall, worker: PoolWorker, output: str = "") -> EnvError:
        """Return the error for a call whose worker is gone."""
        doing = f"{call.verb} of {self._name}"
        error: EnvError
        if call.slot is worker.culprit and worker.cause != "unknown":
            error = EnvError(f"{doing}: {worker.lost}{_last_lines(output)}", stage=call.verb)
        else:
            innocent = worker.cause != "machine" and call.slot is not worker.culprit
            lost = NeighbourError if innocent else InfraError
            error = lost(f"{doing}: its worker is gone: {worker.lost}", stage=call.verb)
        if output:
            error.add_note(f"the last output of the worker:\n{output}")
        return error

    def _give_up(self, why: str, failures: int, output: str) -> None:
        """Fail the episodes that wait for a worker."""
        error = f"no worker for {self._name}: {failures} starts in a row failed: {why}{_last_lines(output)}"
        for call in (*self._backlog, *self._apart):
            self._report(call, None, InfraError(error, stage="start"))
        self._backlog.clear()
        self._apart.clear()

    def _report(self, call: WorkerCall, value: Any, error: RolljaxError | None) -> None:
        if call.future is not None:
            self._mailbox.put(call.future, value, error)


def _last_lines(output: str) -> str:
    """Return the end of an output, short enough for the text of an error."""
    text = output.strip()[-1000:]
    return f"; its last output: {text}" if text else ""
