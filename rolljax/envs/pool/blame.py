"""Decide which task is to blame for the end of a worker.

The first call without an answer is the one that ran. When the code in the worker ended it, its task is to blame for a
crash. When the cause is unknown (killed from outside, out of memory, no call ran), that task is a suspect, or every
task that had an episode there. The next episode of a suspect has a worker to itself: if that worker ends too, the task
is to blame, and if the episode ends in order, the suspicion is gone. A task that has crashed too often is
set aside.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable

SET_ASIDE = "set_aside"
"""Stage of the errors of tasks that are set aside."""


class Blame:
    """Crashes and suspects, by `Task.id`.

    max_crashes: a task with this many crashes is set aside; 0: never.
    """

    def __init__(self, max_crashes: int) -> None:
        self.crashes: collections.Counter[str] = collections.Counter()
        self._max_crashes = max_crashes
        self._suspects: set[str] = set()
        self._last: dict[str, str] = {}

    def crashed(self, task: str, why: str) -> None:
        """Record that an episode of `task` ended its worker."""
        self.crashes[task] += 1
        self._last[task] = why
        self._suspects.add(task)

    def suspect(self, tasks: Iterable[str]) -> None:
        """Record that one of these tasks may have ended a worker."""
        self._suspects.update(tasks)

    def acquit(self, task: str) -> None:
        """Record that an episode of `task` that ran alone in a worker ended without a crash."""
        self._suspects.discard(task)

    def is_suspect(self, task: str) -> bool:
        """Return whether an episode of `task` must run alone in a worker."""
        return task in self._suspects

    def set_aside(self, task: str) -> str:
        """Return why no more episodes of `task` are opened; empty while they are."""
        if not 0 < self._max_crashes <= self.crashes[task]:
            return ""
        return (
            f"it is set aside after PoolConfig.max_crashes = {self._max_crashes} ends of its worker; "
            f"the last: {self._last[task]}"
        )

    @property
    def num_set_aside(self) -> int:
        return sum(0 < self._max_crashes <= count for count in self.crashes.values())
