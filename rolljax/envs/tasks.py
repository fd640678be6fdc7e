"""Tasks for training and for evaluation: a shuffle of an environment's tasks, split by content.

Whether a task is held out is decided by the hash of its content, so that the two splits can share no task however
small the family is and wherever the same question turns up again.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any, Literal

from rolljax.envs.base import NUM_INDICES, EnvSpec
from rolljax.envs.mixture import Mixture, shared_out
from rolljax.envs.task_order import shuffled
from rolljax.errors import DataError
from rolljax.types import Task

REPEATS, MIN_REPEATS = 20, 5000
"""A family is taken to be exhausted after this many indices without a new task: `REPEATS` for each task seen,
and `MIN_REPEATS`. If another task exists, all being equally likely, the chance of missing it is e^-20."""


def is_held_out(task: Task, frac: float) -> bool:
    """Return whether a task belongs to the held-out split, from its hash alone."""
    return int(task.id, 16) / 16**16 < frac


def held_out(spec: EnvSpec, num_tasks: int, frac: float) -> list[Task]:
    """Return the first `num_tasks` different held-out tasks, in index order; of a mixture, each domain's share by its
    weight, one domain after the other.

    Raises:
      DataError: the family does not have that many.
    """
    if isinstance(spec, Mixture):
        return [
            spec.outer(name, task)
            for name, num in _numbers(spec, num_tasks).items()
            for task in held_out(spec.of[name].env, num, frac)
        ]
    found, seen, index = _different(spec, num_tasks, frac)
    if len(found) == num_tasks:
        return found
    most = f"Evaluation.tasks = {len(found)} at most, or " if found else ""
    raise DataError(
        f"{spec.name} has only {len(found)} different held-out tasks among the {seen} different ones of its first "
        f"{index} indices, {num_tasks} were asked for: set {most}Evaluation.held_out_frac (now {frac:g}) higher, or "
        f"{_more_tasks(spec)}"
    )


def _more_tasks(spec: EnvSpec) -> str:
    """Return advice for a user on how to get more tasks: by more rows, or by the generator's settings."""
    return "widen the family's settings" if spec.num_tasks is None else "name files with more rows"


def first_tasks(spec: EnvSpec, num_tasks: int, frac: float = 1.0) -> list[Task]:
    """Return the first different tasks in index order: `num_tasks`, or all if there are fewer. In a mixture
    each domain has its share by its weight.

    Args:
      frac: share of all tasks to take them from: 1: all tasks; less: the held-out ones (`is_held_out`).

    Raises:
      DataError: there is none.
    """
    if isinstance(spec, Mixture):
        numbers = _numbers(spec, num_tasks).items()
        return [spec.outer(name, task) for name, n in numbers for task in first_tasks(spec.of[name].env, n, frac)]
    found, seen, index = _different(spec, num_tasks, frac)
    if not found:
        raise DataError(f"{spec.name} has no held-out task among the {seen} different ones of {index} indices")
    return found


def training_indices(
    spec: EnvSpec, held_out_frac: float, num_tasks: int, among: range = range(NUM_INDICES)
) -> list[int]:
    """Return the index of each different task that is not held out, in order.

    Args:
      num_tasks: most tasks. among: the indices to look at, until the environment seems to be exhausted (`REPEATS`).
    """
    found: dict[str, int] = {}
    newest = 0
    for looked_at, index in enumerate(among):
        if len(found) == num_tasks or looked_at - newest > REPEATS * len(found) + MIN_REPEATS:
            break
        task = spec.task(index)
        if not is_held_out(task, held_out_frac) and task.id not in found:
            found[task.id], newest = index, looked_at
    return list(found.values())


def _numbers(spec: Mixture, num_tasks: int) -> dict[str, int]:
    """Return the number of tasks of each domain, by weight: at least one for every domain whose weight is not 0."""
    weights = {name: weight for name, weight in spec.weights.items() if weight}
    if num_tasks < len(weights):
        raise DataError(f"{num_tasks} tasks are not enough for the {len(weights)} domains of {spec.name}: ask for more")
    rest = shared_out(num_tasks - len(weights), weights)
    numbers = shared_out(num_tasks, weights)
    return numbers if min(numbers.values()) else {name: 1 + rest[name] for name in weights}


def _different(spec: EnvSpec, num_tasks: int, frac: float) -> tuple[list[Task], int, int]:
    """Return up to `num_tasks` different tasks of the split, the number of different tasks seen, and the number of
    indices."""
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
    """Training tasks in a shuffled order that depends on the seed alone; its position can be saved.

    `task_order.shuffled` does the work: shuffle, generate, filter, repeat, and the position as a small JSON state.
    Without the settings of a `Domain` there is no end to them.
    """

    spec: EnvSpec
    seed: int
    frac: float
    """Held-out share of the tasks, which the stream never returns."""
    num_tasks: int = 0
    """Number of different tasks to train on, the first ones (0: all tasks); see `envs.mixture.Domain`."""
    when_dry: Literal["renew", "error", ""] = ""
    """Action after the last task of a finite training set: `renew` repeats the tasks in another order, `error` ends the
    run; see `envs.mixture.Domain`."""

    def __post_init__(self) -> None:
        spec, frac = self.spec, self.frac
        self._drawn = 0
        rows = self._rows = self._training_set() if self.when_dry else None
        if rows is None and all(is_held_out(spec.task(i), frac) for i in range(1000)):
            raise DataError(
                f"{spec.name} has no task left to train on: all of its first 1000 are held out. Set "
                f"Evaluation.held_out_frac (now {frac:g}) lower, or {_more_tasks(spec)}"
            )
        num = NUM_INDICES if rows is None else len(rows)
        item = lambda i: spec.task(i if rows is None else rows[i])  # noqa: E731
        keep = lambda task: rows is not None or not is_held_out(task, frac)  # noqa: E731
        self._iterator: Any = shuffled(num, self.seed % 2**31, item, keep)

    def _training_set(self) -> list[int] | None:
        """Return the indices of a finite training set; None: it is infinite. Without `num_tasks` these are all rows
        that are not held out (two may have the same prompt and different answers); with it, different tasks only."""
        most = self.spec.num_tasks
        if self.num_tasks:
            among = range(NUM_INDICES if most is None else most)
            found = training_indices(self.spec, self.frac, self.num_tasks, among)
        elif most is not None:
            found = [i for i in range(most) if not is_held_out(self.spec.task(i), self.frac)]
        else:
            return None
        if not found:
            raise DataError(
                f"{self.spec.name} has no task left to train on: all are held out. Set Evaluation.held_out_frac (now "
                f"{self.frac:g}) lower, or {_more_tasks(self.spec)}"
            )
        return found

    def __iter__(self) -> Iterator[Task]:
        return self

    def __next__(self) -> Task:
        if self.when_dry == "error" and self._rows is not None and self._drawn == len(self._rows):
            raise DataError(
                f"{self.spec.name} is dry: training has gone through all its {self._drawn} tasks. Give it "
                "more (Domain.num_tasks, its files), a lower Domain.weight, fewer steps, or Domain.when_dry = 'renew'"
            )
        self._drawn += 1
        return next(self._iterator)

    def of(self, domain: str) -> Task:
        """Return the next task; there is one domain only."""
        return next(self)

    def state(self) -> str:
        """Return the position as JSON text."""
        position = self._iterator.get_state()
        return json.dumps({"drawn": self._drawn, "at": position} if self.when_dry else position)

    def restore(self, state: str) -> None:
        """Go to a saved position: the next task is the one that would have come next."""
        position = json.loads(state)
        if self.when_dry:
            self._drawn, position = position["drawn"], position["at"]
        self._iterator.set_state(position)


class MixtureStream:
    """The training tasks of a mixture: a `TaskStream` for each domain.

    Args:
      spec: the mixture. seed, frac: as of `TaskStream`.
    """

    def __init__(self, spec: Mixture, seed: int, frac: float) -> None:
        self.spec = spec
        self._streams = {
            name: TaskStream(domain.env, seed, frac, domain.num_tasks, domain.when_dry)
            for name, domain in spec.of.items()
        }

    def of(self, domain: str) -> Task:
        """Return the next task of a domain.

        Raises:
          DataError: the domain has no more tasks, and `Domain.when_dry` makes this an error.
        """
        return self.spec.outer(domain, next(self._streams[domain]))

    def state(self) -> str:
        """Return the position of every domain as JSON text."""
        return json.dumps({name: stream.state() for name, stream in self._streams.items()})

    def restore(self, state: str) -> None:
        """Go to saved positions."""
        for name, position in json.loads(state).items():
            self._streams[name].restore(position)


def open_stream(spec: EnvSpec, seed: int, frac: float) -> TaskStream | MixtureStream:
    """Open the training tasks of an environment.

    Args:
      seed: of their order. frac: the held-out fraction of the tasks, which is left out.
    """
    return MixtureStream(spec, seed, frac) if isinstance(spec, Mixture) else TaskStream(spec, seed, frac)
