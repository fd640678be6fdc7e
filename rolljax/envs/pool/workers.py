"""Workers as the dispatcher sees them, the episodes in them and the calls on their way."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
from typing import TYPE_CHECKING, Any

from rolljax.envs.pool import wire
from rolljax.envs.pool.episode_runner import Argument, Verb
from rolljax.envs.pool.link import Cause

if TYPE_CHECKING:
    from rolljax.envs.pool.dispatch import Dispatcher


@dataclasses.dataclass(eq=False, slots=True)
class WorkerCall:
    """A request of an episode on its way to a worker and back."""

    number: int
    slot: RemoteSlot
    verb: Verb
    argument: Argument
    limit_s: float
    future: asyncio.Future[Any] | None  # None: no caller waits

    @property
    def request(self) -> wire.Request:
        return self.number, self.slot.number, self.verb, self.argument


@dataclasses.dataclass(eq=False)
class PoolWorker:
    """A worker process or actor as the dispatcher sees it."""

    generation: int
    worker_slot: WorkerSlot
    since_s: float
    """Time at which the worker's start began, or at which its oldest call became the oldest."""
    ready: bool = False
    lost: str = ""
    """The reason why the worker has ended; empty while it runs."""
    cause: Cause = "machine"
    culprit: RemoteSlot | None = None
    """The slot whose call ended the worker, if known."""
    answered: bool = False
    hosted: int = 0
    is_apart: bool = False
    """Whether it runs the episode of a suspect, alone."""
    episodes: dict[int, RemoteSlot] = dataclasses.field(default_factory=dict)
    calls: collections.deque[WorkerCall] = dataclasses.field(default_factory=collections.deque)
    unsent: list[WorkerCall] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(eq=False)
class WorkerSlot:
    """Holds one worker after another."""

    worker: PoolWorker | None = None
    failures: int = 0
    start_at_s: float = 0.0


class RemoteSlot:
    """An episode in some worker; the dispatcher picks the worker when there is one with room."""

    def __init__(self, dispatcher: Dispatcher, number: int) -> None:
        self.number = number
        self.started_s = 0.0
        self.task = ""
        self.worker: PoolWorker | None = None
        self.closing = False
        self._dispatcher = dispatcher

    def call(self, verb: Verb, argument: Argument, limit_s: float) -> asyncio.Future[Any]:
        self.closing = self.closing or verb == "close"
        future = asyncio.get_running_loop().create_future()
        self._dispatcher.post(self, verb, argument, limit_s, future)
        return future

    def discard(self) -> None:
        if not self.closing:
            self.closing = True
            self._dispatcher.post(self, "close", None, self._dispatcher.cfg.close_s, None)
