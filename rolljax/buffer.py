"""Groups in flight, by the step that will train them.

Tasks are dealt to steps in the order of the task stream, so which group belongs to which step does not depend on how
long anything takes. Groups of step `s` may be started once the trainer is at step `s - staleness`: that bounds the age
of every token, and nothing that was started is ever lost: started = trained + dropped + waiting.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from rolljax.envs.tasks import TaskStream
from rolljax.errors import HangError
from rolljax.types import Group, Task
from rolljax.watchdog import Watchdog

T = TypeVar("T")
POLL_S = 0.2


class Stopped(Exception):
    """The run was told to stop while it was waiting."""


class Background:
    """An asyncio event loop in a thread: where environments and requests live while the main thread trains.

    Args:
      should_stop: asked while waiting. watchdog: is told the names of waits.
    """

    def __init__(self, should_stop: Callable[[], bool], watchdog: Watchdog | None = None) -> None:
        self._should_stop, self._watchdog = should_stop, watchdog or Watchdog()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rolljax-rollouts", daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Begin `work`; its result is for `wait`."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def wait(
        self, future: concurrent.futures.Future[T], name: str, deadline_s: float, *, interruptible: bool = True
    ) -> T:
        """The result of `future`.

        Raises:
          HangError: it took longer than `deadline_s`; the message names the wait.
          Stopped: the run was told to stop meanwhile.
        """
        with self._watchdog.waiting_for(name):
            return self._wait(future, name, deadline_s, interruptible)

    def _wait(self, future: concurrent.futures.Future[T], name: str, deadline_s: float, interruptible: bool) -> T:
        start = time.monotonic()
        while True:
            try:
                return future.result(timeout=POLL_S)
            except concurrent.futures.TimeoutError:
                if future.done():
                    return future.result()
            if interruptible and self._should_stop():
                raise Stopped
            if time.monotonic() - start > deadline_s:
                about = self._watchdog.about()
                future.cancel()
                text = f"waited {deadline_s:.0f} s for {name}" + (f" ({about})" if about else "")
                raise HangError(f"{text}; raise Recipe.wait_s if that can be normal")

    def close(self) -> None:
        """Cancel what is left and end the thread."""

        async def cancel() -> None:
            tasks = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        self.start(cancel()).result(timeout=30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=30)
        self._loop.close()


@dataclasses.dataclass(eq=False)
class _Step:
    """A step's groups in flight, and the task stream's position before they were drawn."""

    position: str
    future: concurrent.futures.Future[list[Group]]


class Buffer:
    """The steps whose groups are in flight.

    Args:
      start: makes groups of one step: `(step, tasks, number of the first) -> coroutine`.
    """

    def __init__(
        self,
        background: Background,
        stream: TaskStream,
        start: Callable[[int, list[Task], int], Coroutine[Any, Any, list[Group]]],
        *,
        prompts_per_step: int,
        staleness: int,
        num_steps: int,
    ) -> None:
        self._background, self._stream, self._start = background, stream, start
        self._prompts, self._staleness, self._num_steps = prompts_per_step, staleness, num_steps
        self._steps: dict[int, _Step] = {}

    def fill(self, step: int) -> None:
        """Start the groups of every step up to `step + staleness` that are not started yet."""
        for s in range(step, min(step + self._staleness + 1, self._num_steps)):
            if s not in self._steps:
                position = self._stream.state()
                tasks = [next(self._stream) for _ in range(self._prompts)]
                self._steps[s] = _Step(position, self._background.start(self._start(s, tasks, 0)))

    def collect(self, step: int, deadline_s: float) -> list[Group]:
        """The groups of `step`, once all of them are done."""
        groups = self._background.wait(self._steps[step].future, f"the groups of step {step + 1}", deadline_s)
        del self._steps[step]
        return groups

    def more(self, step: int, num_groups: int, first: int, deadline_s: float) -> list[Group]:
        """`num_groups` further groups for a step that was collected already, numbered from `first`."""
        tasks = [next(self._stream) for _ in range(num_groups)]
        future = self._background.start(self._start(step, tasks, first))
        return self._background.wait(future, f"further groups of step {step + 1}", deadline_s)

    @property
    def num_waiting(self) -> int:
        """Groups started for later steps."""
        return len(self._steps) * self._prompts

    def position(self) -> str:
        """Where the task stream stands for the first step that is not collected: what a checkpoint needs."""
        return self._steps[min(self._steps)].position if self._steps else self._stream.state()

    def cancel(self) -> None:
        """Let go of what is in flight, and put the stream back to where those steps begin."""
        position = self.position()
        for entry in self._steps.values():
            entry.future.cancel()
        self._steps.clear()
        self._stream.restore(position)
