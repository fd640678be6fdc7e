"""The host pool: an asyncio interface to episodes, wherever they run.

`EnvPool.open` gives an `Episode`; its methods are coroutines that never block the event loop. Below are two backends,
which give each episode a slot: threads of this process (`threads.py`), and workers elsewhere (`dispatch.py` with
`processes.py` or `ray_actors.py`). This module has the rules for both: the wall clock of an episode, the cleanup
after cancelled callers, the counters, and when the pool stops because too much fails.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from rolljax import sandbox
from rolljax.concurrency.waits import Mailbox, Sleeper
from rolljax.envs.base import Action, EnvSpec, ProgramLaunch, StepResult
from rolljax.envs.pool.blame import Blame
from rolljax.envs.pool.episode_runner import Argument, Verb
from rolljax.envs.pool.settings import PoolConfig
from rolljax.envs.pool.threads import ThreadBackend
from rolljax.errors import ConfigError, EnvError, InfraError, NeighbourError
from rolljax.types import Message, Task

NUM_THREADS = 2
"""Threads for environments that compute: more would only wait for the interpreter's lock."""


class EpisodeSlot(Protocol):
    """The place where one episode runs. `started_s`: when its reset began, on the event loop's clock
    (`time.monotonic`)."""

    started_s: float

    def call(self, verb: Verb, argument: Argument, limit_s: float) -> asyncio.Future[Any]: ...
    def discard(self) -> None: ...


class Backend(Protocol):
    """The place where the episodes of a pool run."""

    timeouts: collections.Counter[str]
    restarts: int

    @property
    def blame(self) -> Blame | None:
        """Crashes by task; None if a crash of an episode would end this process."""

    def slot(self) -> EpisodeSlot: ...
    def close(self) -> None: ...


@dataclasses.dataclass(frozen=True, slots=True)
class PoolStats:
    """Counts since the pool was made; `opened == closed + open`."""

    opened: int
    """Number of episodes whose reset succeeded."""
    closed: int
    open: int
    failed: int
    """Number of episodes whose reset failed or was cancelled."""
    steps: int
    """Number of successful steps."""
    restarts: int
    """Number of workers, actors or threads that were replaced."""
    timeouts: Mapping[str, int]
    """Limits that were exceeded, by stage (start, reset, step, reference_answer, rejected, close, episode)."""
    faults: Mapping[str, int]
    """Number of episodes by the kind of their first fault (env, infra, limit)."""
    crashes: int
    """Number of workers whose end a task is blamed for."""
    set_aside: int
    """Number of tasks that are set aside because of too many crashes."""
    under_way: Mapping[str, int]
    """Number of calls without an answer, by verb."""


class EnvPool:
    """A pool for the episodes of one environment. Used by one event loop at a time.

    Args:
      backend: the backend that runs the episodes, instead of the one that `cfg` sets.
    """

    def __init__(self, cfg: PoolConfig, spec: EnvSpec, backend: Backend | None = None) -> None:
        self.cfg, self.spec = cfg, spec
        if cfg.sandboxes is not None:
            sandbox.configure(cfg.sandboxes)
        self.broken = ""
        """The reason why no more episodes are opened; empty while they are."""
        self._backend = backend or _backend_of(cfg, spec)
        self._open: set[Episode] = set()
        self._counts: collections.Counter[str] = collections.Counter()
        self._faults: collections.Counter[str] = collections.Counter()
        self._under_way: collections.Counter[str] = collections.Counter()
        self._late = 0
        self._recent: collections.deque[bool] = collections.deque(maxlen=cfg.fault_window)
        self._closed = False

    async def open(self, task: Task) -> Episode:
        """Make an environment and reset it to `task`.

        Raises:
          InfraError: no worker could be started, or it was lost; with stage "pool": the pool opens no more episodes.
          EnvError: the environment failed, or passed `reset_s`.
        """
        if self._closed or self.broken:
            raise InfraError(self.broken or "the pool is closed", stage="pool")
        slot = self._backend.slot()
        opened = False
        try:
            with self._counted("reset"):
                initial_messages = await slot.call("reset", task, self.cfg.reset_s)
            opened = True
        except EnvError as e:
            self._record(e)
            raise
        finally:  # also when the caller was cancelled
            self._counts["opened" if opened else "failed"] += 1
            if not opened:
                slot.discard()
        return Episode(self, slot, initial_messages)

    @property
    def opens_at_once(self) -> bool:
        """Return whether opening an episode takes microseconds, because it runs in this process and does not wait."""
        here = self.cfg.where == "thread" or (self.cfg.where == "auto" and self.spec.runs == "inline")
        return here and self.spec.runs != "thread"

    @property
    def inboxes(self) -> tuple[Sleeper, ...]:
        """The inboxes on which threads of this pool wait without a deadline (`rolljax.concurrency.waits`)."""
        return (self._backend.calls,) if isinstance(self._backend, ThreadBackend) else ()

    @property
    def stats(self) -> PoolStats:
        counts = {name: self._counts[name] for name in ("opened", "closed", "failed", "steps")}
        blame, timeouts = self._backend.blame, self._backend.timeouts + collections.Counter({"episode": self._late})
        return PoolStats(
            open=len(self._open),
            restarts=self._backend.restarts,
            timeouts=dict(timeouts),
            faults=dict(self._faults),
            crashes=blame.crashes.total() if blame else 0,
            set_aside=blame.num_set_aside if blame else 0,
            under_way=dict(+self._under_way),
            **counts,
        )

    def close(self) -> None:
        """Close the open episodes and end the workers, within little more than `close_s`. Calls in progress raise."""
        if self._closed:
            return
        self._closed = True
        for episode in list(self._open):
            episode._discard()
        self._backend.close()

    @contextlib.contextmanager
    def _counted(self, verb: Verb) -> Iterator[None]:
        """Count a call as running inside this context."""
        self._under_way[verb] += 1
        try:
            yield
        finally:
            self._under_way[verb] -= 1

    def _record(self, error: EnvError | None) -> None:
        """Record the result of an episode; stop the pool when too many fail through the infrastructure."""
        infra = isinstance(error, InfraError)
        if error is not None:
            kind = "infra" if infra else "limit" if error.stage == "episode" else "env"
            self._faults[kind] += 1
        if isinstance(error, NeighbourError):
            return
        self._recent.append(infra)
        share, window = sum(self._recent) / self.cfg.fault_window, self.cfg.fault_window
        if not self.broken and len(self._recent) == window and share > self.cfg.max_fault_frac:
            self.broken = (
                f"{sum(self._recent)} of the last {window} episodes of {self.spec.name} were lost to the machine, more "
                f"than PoolConfig.max_fault_frac = {self.cfg.max_fault_frac:g}. The last: {error}. Mend the cause; or "
                "lower PoolConfig.episodes_per_worker, so that a worker takes fewer with it; or raise max_fault_frac"
            )


class Episode:
    """One episode, from its opening to `close`. One call at a time. opening: the conversation that the episode begins
    with. domain: its name in a mixture, else empty.
    """

    def __init__(self, pool: EnvPool, slot: EpisodeSlot, initial_messages: tuple[Message, ...]) -> None:
        self.initial_messages, self.domain = initial_messages, ""
        self._pool, self._slot = pool, slot
        self._ended = ""  # why there are no more steps
        self._fault: EnvError | None = None
        self._call: asyncio.Future[Any] | None = None
        self._is_closed = False
        loop = asyncio.get_running_loop()
        left_s = slot.started_s + pool.cfg.episode_s - loop.time()
        self._timer = loop.call_later(max(0.0, left_s), self._expire)
        pool._open.add(self)

    async def step(self, action: str, run_limit_s: float | None = None) -> StepResult:
        """Take the policy's text. run_limit_s: see `Env.run_limit_s`.

        Raises:
          InfraError: the worker was lost, through no doing of this episode.
          EnvError: the environment failed, broke the rules, passed `step_s`, or had ended; with stage "episode":
            `episode_s` is over.
        """
        return await self._act("step", Action(action, run_limit_s), self._pool.cfg.step_s)

    async def play(self, program: ProgramLaunch) -> StepResult:
        """Run an agent program in the episode's sandbox until it ends (`Env.play`). Only `episode_s` limits the call.
        Raises like `step`."""
        return await self._act("play", program, self._pool.cfg.episode_s)

    async def _act(self, verb: Verb, argument: Action | ProgramLaunch, limit_s: float) -> StepResult:
        if self._ended:
            raise EnvError(f"{verb} of {self._pool.spec.name}: {self._ended}", stage=verb)
        succeeded = False
        try:
            result: StepResult = await self._do(verb, argument, limit_s)
            succeeded = True
        finally:  # also when the caller was cancelled
            if not succeeded:
                self._ended = self._ended or "an earlier step failed"
        self._pool._counts["steps"] += 1
        if result.terminated or result.truncated:
            self._ended = "the episode is over"
        return result

    async def reference_answer(self) -> str:
        """Return the next action of a perfect policy. Raises like `step`."""
        return str(await self._do("reference_answer", None, self._pool.cfg.step_s))

    async def rejected(self) -> str:
        """Return a worse action. Raises like `step`."""
        return str(await self._do("rejected", None, self._pool.cfg.step_s))

    async def close(self) -> None:
        """Free the episode's resources. Never raises, and never waits longer than `close_s`: an episode that hangs is
        torn down in the background."""
        if self._is_closed:
            return
        if self._call is not None or self._fault is not None:
            self._discard()
            return
        self._leave()
        waiting = self._slot.call("close", None, self._pool.cfg.close_s)
        waiting.add_done_callback(lambda f: f.cancelled() or f.exception())  # a failing close is not reported
        if not waiting.done():
            with self._pool._counted("close"):
                await asyncio.wait([waiting], timeout=self._pool.cfg.close_s)

    async def _do(self, verb: Verb, argument: Argument, limit_s: float) -> Any:
        if self._is_closed or self._call is not None:
            state = "is closed" if self._is_closed else "has another call under way"
            raise self._fault or EnvError(f"{verb} of {self._pool.spec.name}: the episode {state}", stage=verb)
        self._call = self._slot.call(verb, argument, limit_s)
        try:
            with self._pool._counted(verb):
                value = await self._call
        except asyncio.CancelledError:
            self._discard()
            raise
        except EnvError as e:
            self._fault = self._fault or e
            raise
        finally:
            self._call = None
        return value

    def _expire(self) -> None:
        """Fail the episode, which was open for longer than `episode_s`, and close it."""
        limit_s = self._pool.cfg.episode_s
        text = f"an episode of {self._pool.spec.name} was open for more than PoolConfig.episode_s = {limit_s:g} s"
        self._fault = self._fault or EnvError(text, stage="episode")
        self._pool._late += 1
        if self._call is not None and not self._call.done():
            self._call.set_exception(self._fault)
        self._discard()

    def _discard(self) -> None:
        """Close without waiting."""
        if not self._is_closed:
            self._leave()
            self._slot.discard()

    def _leave(self) -> None:
        self._is_closed = True
        self._timer.cancel()
        self._pool._open.discard(self)
        self._pool._counts["closed"] += 1
        self._pool._record(self._fault)


def _backend_of(cfg: PoolConfig, spec: EnvSpec) -> Backend:
    """Return the backend that runs this pool's episodes."""
    mailbox = Mailbox()
    where = cfg.where if cfg.where != "auto" else "process" if spec.runs == "process" else "thread"
    if where == "thread":
        if spec.needs_worker:
            raise ConfigError(
                f"cannot be used with {spec.name}: {spec.needs_worker}, which could stop the whole run",
                setting="PoolConfig.where",
                value=where,
                remedy="'auto' or 'process'",
            )
        threads = cfg.io_threads if spec.runs == "thread" else cfg.workers or NUM_THREADS
        return ThreadBackend(cfg, spec, threads, mailbox)
    from rolljax.envs.pool.dispatch import Dispatcher
    from rolljax.envs.pool.link import WorkerLink
    from rolljax.envs.pool.processes import ProcessLink

    link: WorkerLink
    if where == "process":
        link = ProcessLink(cfg, spec)
    else:
        from rolljax.envs.pool.ray_actors import RayLink

        link = RayLink(cfg, spec)
    return Dispatcher(cfg, spec.name, link, mailbox)
