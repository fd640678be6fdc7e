"""Nim with one heap, for two roles that the policy plays by turns."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Annotated

from rolljax.envs.base import Env, EnvSpec
from rolljax.envs.games.game import Game, Outcome, number
from rolljax.errors import ConfigError, EnvError, Range, check_fields
from rolljax.types import Task


@dataclasses.dataclass(frozen=True)
class Nim(EnvSpec):
    """A heap of up to `stones` stones, from which both roles take 1 to `most` by turns; who takes the last one wins.

    The policy plays both roles (`Spiral`). Observation: the stones that are left, `11?`. Actions: a number. Reward: 1
    if the first role wins and -1 if the second does; an illegal answer loses. Heaps are such that the first role can
    win. Games of the same heap are different tasks, as in `GuessNumber`.
    """

    runs = "inline"

    stones: Annotated[int, Range(low=2, high=99)] = 11
    """Most stones at the beginning."""
    most: Annotated[int, Range(low=2, high=9)] = 3
    """Most stones that a turn takes."""
    seed: int = 0
    """Seed of the tasks."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.stones <= self.most:
            remedy = f"at least {self.most + 1}"
            raise ConfigError("are taken in one turn", setting="Nim.stones", value=self.stones, remedy=remedy)

    @property
    def name(self) -> str:
        return "nim"

    @property
    def max_turns(self) -> int:
        """Turns of the longest game."""
        return self.stones

    def task(self, index: int) -> Task:
        heaps = [n for n in range(self.most, self.stones + 1) if n % (self.most + 1)]
        return Task(self.name, index, f"{random.Random(f'{self.seed} {index}').choice(heaps)} game {index}")

    def make(self) -> Env:
        return NimEnv(self)

    def bad_actions(self) -> Sequence[str]:
        return (*super().bad_actions(), "0", "-1", str(self.most + 1), "9" * 5000, "\u0661", "1 2")


class NimEnv(Game[Nim]):
    """One game."""

    def _begin(self, task: Task) -> str:
        left = number(task.content.partition(" game ")[0])
        if left is None or not 1 <= left <= self._spec.stones:
            raise EnvError(f"task {task.index} is no heap of 1 to {self._spec.stones} stones")
        self._left = left
        return self._ask()

    def _play(self, action: str) -> Outcome:
        mover = 1.0 if self._turns % 2 else -1.0  # the first role's turns are the odd ones
        taken = number(action.strip())
        if taken is None or not 1 <= taken <= min(self._spec.most, self._left):
            return Outcome("", -mover, over=True, success=mover < 0, legal=False)
        self._left -= taken
        if not self._left:
            return Outcome("", mover, over=True, success=mover > 0)
        return Outcome(self._ask())

    def _reference_answer(self) -> str:
        return str(self._left % (self._spec.most + 1) or 1)

    def _random(self, rng: random.Random) -> str:
        return str(rng.randint(1, min(self._spec.most, self._left)))

    def _ask(self) -> str:
        return f"{self._left}?"
