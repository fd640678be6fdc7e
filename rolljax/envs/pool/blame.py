"""Whose doing the end of a worker is, by task.

The first call without an answer is the one that ran. When the code in the worker ended it, its task is to blame for a
crash. When nobody can tell (it was killed from outside, memory ran out, no call ran) that task is a suspect, or every
task that had an episode there. The next episode of a suspect has a worker to itself: if that ends too there is nobody
else to blame, and if the episode comes to its end in order, the suspicion is gone. A task that has crashed too often is
set aside.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable

SET_ASIDE = "set_aside"
"""Stage of the errors of tasks that are set aside."""


class Blame:
    """Crashes and suspects, by `Task.id`.

    max_crashes: a task with so many is set aside; 0: never.
    """

    def __init__(self, max_crashes: int) -> None:
        self.crashes: collections.Counter[str] = collections.Counter()
        self._max_crashes = max_crashes
        self._suspects: set[str] = set()
        self._last: dict[str, str] = {}

    def crashed(self, task: str, why: str) -> None:
        """An episode of `task` ended its worker."""
        self.crashes[task] += 1
        self._last[task] = why
        self._suspects.add(task)

    def suspect(self, tasks: Iterable[str]) -> None:
        """One of these may have done it."""
        self._suspects.update(tasks)

    def acquit(self, task: str) -> None:
        """An episode of `task` that had a worker to itself came to its end in order."""
        self._suspects.discard(task)

    def is_suspect(self, task: str) -> bool:
        """Whether an episode of `task` must have a worker to itself."""
        return task in self._suspects

    def set_aside(self, task: str) -> str:
        """Why no more episodes of `task` are opened; empty while they are."""
        if not 0 < self._max_crashes <= self.crashes[task]:
            return ""
        return (
            f"it is set aside after PoolConfig.max_crashes = {self._max_crashes} ends of its worker; "
            f"the last: {self._last[task]}"
        )

    @property
    def num_set_aside(self) -> int:
        return sum(0 < self._max_crashes <= count for count in self.crashes.values())
