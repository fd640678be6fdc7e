"""Groups in flight, by the step that will train them.

Tasks are dealt to steps in the order of the task stream, so which group belongs to which step does not depend on how
long anything takes. Groups of step `s` may be started once the trainer is at step `s - staleness`: that bounds the age
of every token, and nothing that was started is ever lost: started = trained + dropped + waiting.

With spares a step ends when enough of its groups are complete, and the slowest are put off. To begin them anew with
other random numbers would be to draw until an answer is short. They come back under their old addresses, with the
random numbers that made them slow, at the next step to begin; that step has no spares and waits for all it began. Every
address is trained once, so that lengths are those of a run without spares.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from rolljax.envs.tasks import TaskStream
from rolljax.run.groups import GroupDue
from rolljax.threads.event_loop import EventLoop
from rolljax.types import Group


@dataclasses.dataclass(eq=False)
class _Step:
    """A step's groups in flight.

    position: of the task stream before they were drawn. back: those that were put off before. new: the others.
    """

    position: str
    back: list[GroupDue]
    new: list[GroupDue]
    future: concurrent.futures.Future[list[Group]]

    @property
    def all(self) -> list[GroupDue]:
        return self.back + self.new


class Buffer:
    """The steps whose groups are in flight.

    Args:
      start: makes `wanted` of the groups that are due, those that are complete first: `(due, wanted) -> coroutine`.
      spares: so many more groups are begun than a step needs, where the step after can take back those that are put
        off. put_off: groups that come back first.
    """

    def __init__(
        self,
        event_loop: EventLoop,
        stream: TaskStream,
        start: Callable[[list[GroupDue], int], Coroutine[Any, Any, list[Group]]],
        *,
        prompts_per_step: int,
        staleness: int,
        num_steps: int,
        spares: int = 0,
        put_off: Sequence[GroupDue] = (),
    ) -> None:
        self._event_loop, self._stream, self._start = event_loop, stream, start
        self._prompts, self._staleness, self._num_steps = prompts_per_step, staleness, num_steps
        self._spares, self._put_off = spares, list(put_off)
        self._steps: dict[int, _Step] = {}
        self._numbered, self._row = 0, {"groups/cancelled_n": 0, "groups/back_n": 0}

    def fill(self, step: int) -> None:
        """Start the groups of every step up to `step + staleness` that are not started yet."""
        for s in range(step, min(step + self._staleness + 1, self._num_steps)):
            if s not in self._steps:
                self._steps[s] = self._begin(s)

    def _begin(self, step: int) -> _Step:
        position = self._stream.state()
        back, self._put_off = self._put_off[: self._prompts], self._put_off[self._prompts :]
        taken_back = step + self._staleness + 1 < self._num_steps
        spares = self._spares if taken_back and not back else 0
        new = self._draw(step, self._prompts + spares - len(back), 0)
        return _Step(position, back, new, self._event_loop.start(self._start(back + new, self._prompts)))

    def _draw(self, step: int, num_groups: int, first: int) -> list[GroupDue]:
        return [GroupDue(next(self._stream), step, first + i) for i in range(num_groups)]

    def collect(self, step: int, deadline_s: float) -> list[Group]:
        """The groups of `step`, once enough of them are done."""
        entry = self._steps[step]
        groups = self._event_loop.wait(entry.future, f"the groups of step {step + 1}", deadline_s)
        del self._steps[step]
        done = {(g.step, g.index) for g in groups}
        late = [due for due in entry.all if (due.step, due.index) not in done]
        self._put_off += late
        self._numbered = len(entry.new)
        self._row = {"groups/cancelled_n": len(late), "groups/back_n": len(entry.back)}
        return groups

    def more(self, step: int, num_groups: int, deadline_s: float) -> list[Group]:
        """`num_groups` further groups for the step that was collected last."""
        due = self._draw(step, num_groups, self._numbered)
        self._numbered += num_groups
        future = self._event_loop.start(self._start(due, num_groups))
        return self._event_loop.wait(future, f"further groups of step {step + 1}", deadline_s)

    def row(self) -> dict[str, float]:
        """What became of the groups of the step that was collected last, and how many were started for later ones."""
        return {**self._row, "groups/waiting_n": sum(len(entry.all) for entry in self._steps.values())}

    def position(self) -> str:
        """Where the task stream stands for the first step that is not collected: what a checkpoint needs."""
        return self._steps[min(self._steps)].position if self._steps else self._stream.state()

    def put_off(self) -> list[GroupDue]:
        """The groups that come back from the first step on that is not collected: what a checkpoint needs."""
        in_flight = [due for step in sorted(self._steps) for due in self._steps[step].back]
        return in_flight + self._put_off

    def cancel(self) -> None:
        """Let go of what is in flight, and put the stream back to where those steps begin."""
        position, self._put_off = self.position(), self.put_off()
        for entry in self._steps.values():
            entry.future.cancel()
        self._steps.clear()
        self._stream.restore(position)
