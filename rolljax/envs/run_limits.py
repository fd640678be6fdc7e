"""Time limits for a policy's program: a little longer than the longest correct run (RollPacker, arXiv
2509.21009)."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from rolljax.envs.base import StepResult
from rolljax.errors import Checked, Range
from rolljax.types import Task

RUN_S = "run_s"
"""Metric of a `StepResult`: seconds that the action's program ran, or was waited for."""
MAX_TASKS = 100_000
"""Tasks whose longest correct run is remembered; the oldest are forgotten first."""


@dataclasses.dataclass(frozen=True)
class AdaptiveTimeout(Checked):
    """A separate time-out for every task, from the longest run of a correct program so far; the environment's own
    time-out applies until a run was correct, and is the upper limit.

    It gives up "equal actions, equal episode": whether a slow program passes depends on the answers before it and on
    how busy the machine was. A run that is repeated or continued is then not the same to the bit.
    """

    factor: Annotated[float, Range(low=1)] = 1.5
    """The time-out, as a multiple of the task's longest correct run so far."""
    low_s: Annotated[float, Range(above=0)] = 2.0
    """The shortest time-out, seconds."""


class RunLimits:
    """Time-outs by task, computed by `cfg` from the run times that environments report.

    Args:
      most_s: the environment's own time-out, seconds.
    """

    def __init__(self, cfg: AdaptiveTimeout, most_s: float) -> None:
        self._cfg, self._most_s = cfg, most_s
        self._longest_s: dict[str, float] = {}

    def limit_s(self, task: Task) -> float | None:
        """Return the current time limit of a program for `task`, in seconds; `most_s` until a program was correct."""
        if task.id not in self._longest_s:
            return self._most_s
        return min(max(self._cfg.low_s, self._cfg.factor * self._longest_s[task.id]), self._most_s)

    def learn(self, task: Task, result: StepResult) -> None:
        """Record the run time of a program for `task`, if it was correct and the environment reports the time."""
        if not result.success or RUN_S not in result.metrics:
            return
        longest_s = max(float(result.metrics[RUN_S]), self._longest_s.get(task.id, 0.0))
        if task.id not in self._longest_s and len(self._longest_s) == MAX_TASKS:
            del self._longest_s[next(iter(self._longest_s))]
        self._longest_s[task.id] = longest_s

    def state(self) -> dict[str, float]:
        """Return the seconds of the longest correct run, by task."""
        return dict(self._longest_s)

    def restore(self, state: dict[str, float]) -> None:
        """Restore the state from `state()`."""
        self._longest_s = dict(state)
