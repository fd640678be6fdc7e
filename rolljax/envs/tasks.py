"""Tasks for training and for evaluation: a Grain pipeline over an environment's tasks, split by content.

Whether a task is held out is decided by the hash of its content, so that the two splits can share no task however
small the family is and wherever the same question turns up again.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

from rolljax.envs.base import NUM_INDICES, EnvSpec
from rolljax.errors import DataError
from rolljax.types import Task

REPEATS, MIN_REPEATS = 20, 5000
"""A family is taken to have no more tasks after so many indices without a new one: `REPEATS` for each that was seen,
and `MIN_REPEATS`. Of one that has another, all equally likely, that is a chance of e^-20."""


def is_held_out(task: Task, frac: float) -> bool:
    """Whether a task belongs to the held-out split, from its hash alone."""
    return int(task.id, 16) / 16**16 < frac


def held_out(spec: EnvSpec, num_tasks: int, frac: float) -> list[Task]:
    """The first `num_tasks` different held-out tasks, in index order.

    Raises:
      DataError: the family does not have that many.
    """
    found, seen, index = _different(spec, num_tasks, frac)
    if len(found) == num_tasks:
        return found
    most = f"Evaluation.tasks = {len(found)} at most, " if found else ""
    raise DataError(
        f"{spec.name} has only {len(found)} different held-out tasks among the {seen} different ones of its first "
        f"{index} indices, {num_tasks} were asked for: set {most}or Evaluation.held_out_frac (now {frac:g}) higher, or "
        "widen the family's settings"
    )


def first_tasks(spec: EnvSpec, num_tasks: int, frac: float = 1.0) -> list[Task]:
    """The first different tasks in index order: `num_tasks`, or all where there are fewer.

    Args:
      frac: of the split that they are taken from: 1 takes them all, less the held-out ones (`is_held_out`).

    Raises:
      DataError: there is none.
    """
    found, seen, index = _different(spec, num_tasks, frac)
    if not found:
        raise DataError(f"{spec.name} has no held-out task among the {seen} different ones of {index} indices")
    return found


def _different(spec: EnvSpec, num_tasks: int, frac: float) -> tuple[list[Task], int, int]:
    """Up to `num_tasks` different tasks of the split, how many different ones were seen, and among how many indices."""
    found: dict[str, Task] = {}
    seen: set[str] = set()
    limit, newest, index = min(NUM_INDICES, int(100 * num_tasks / frac) + 1000), 0, 0
    while index < limit and index - newest <= REPEATS * len(seen) + MIN_REPEATS and len(found) < num_tasks:
        task = spec.task(index)
        if task.id not in seen:
            seen.add(task.id)
            newest = index
            if is_held_out(task, frac):
                found[task.id] = task
        index += 1
    return list(found.values()), len(seen), index


@dataclasses.dataclass
class TaskStream:
    """Endless training tasks in a shuffled order that depends on the seed alone; its position can be saved.

    Grain does the work: shuffle, generate, filter, repeat, and the position as a small JSON state.
    """

    spec: EnvSpec
    seed: int
    frac: float

    def __post_init__(self) -> None:
        import grain

        spec, frac = self.spec, self.frac
        if all(is_held_out(spec.task(i), frac) for i in range(1000)):
            raise DataError(f"{spec.name} has no task left to train on: all of its first 1000 are held out")
        data = (
            grain.MapDataset.range(NUM_INDICES)
            .shuffle(seed=self.seed % 2**31)
            .repeat()
            .map(spec.task)
            .filter(lambda task: not is_held_out(task, frac))
        )
        self._iterator: Any = iter(data.to_iter_dataset(grain.ReadOptions(num_threads=0)))

    def __iter__(self) -> Iterator[Task]:
        return self

    def __next__(self) -> Task:
        return next(self._iterator)

    def state(self) -> str:
        """The position, as JSON text."""
        return json.dumps(self._iterator.get_state())

    def restore(self, state: str) -> None:
        """Go to a saved position: the next task is the one that would have come next."""
        self._iterator.set_state(json.loads(state))
