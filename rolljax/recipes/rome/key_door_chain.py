"""A corridor of locked doors: a test of exploration."""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Sequence
from typing import Annotated

from rolljax.envs.base import Env, EnvSpec
from rolljax.envs.games.game import Game, Outcome, word
from rolljax.errors import ConfigError, EnvError, Range, check_fields
from rolljax.types import Task

_TASK = re.compile(r"chain (?P<chain>[0-9]+) (?P<keys>[a-z]+) walk [0-9]+")


@dataclasses.dataclass(frozen=True)
class KeyDoorChain(EnvSpec):
    """A corridor of `length` doors; each opens to one of `actions` keys, and a wrong key ends the episode: the kind of
    long chain that IPA (arXiv 2512.24873) learns from its end.

    Observation: chain and room, `c0 r3`. Actions: a letter from a on. Reward: 1 after the last door. Nothing but
    experience says which key a door takes, so a random policy gets through with probability actions ** -length; the way
    to learn is from the last doors backwards, from states that a `snapshot` or the reference actions lead to.
    """

    runs = "inline"

    length: Annotated[int, Range(low=1, high=1000)] = 8
    """Doors of a chain."""
    actions: Annotated[int, Range(low=2, high=26)] = 4
    """Number of different keys."""
    num_tasks: Annotated[int, Range(low=1, high=10**6)] = 4
    """Different chains. Walks of one chain are different tasks with the same doors: a held-out walk shows whether the
    way was found, not whether it carries over to other doors."""
    max_turns: int = 8
    """Keys tried before the episode is cut."""
    seed: int = 0
    """Seed of the chains."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.max_turns < self.length:
            raise ConfigError(
                f"is too few for {self.length} doors",
                setting="KeyDoorChain.max_turns",
                value=self.max_turns,
                remedy=f"at least {self.length}",
            )

    @property
    def name(self) -> str:
        return "key_door_chain"

    def task(self, index: int) -> Task:
        walk, chain = divmod(index, self.num_tasks)
        keys = "".join(random.Random(f"{self.seed} {chain}").choices(_letters(self), k=self.length))
        return Task(self.name, index, f"chain {chain} {keys} walk {walk}")

    def make(self) -> Env:
        return KeyDoorChainEnv(self)

    def bad_actions(self) -> Sequence[str]:
        return (*super().bad_actions(), "abcd" * self.length, "0", "1", "\uff41")


class KeyDoorChainEnv(Game[KeyDoorChain]):
    """One walk through one corridor."""

    def _begin(self, task: Task) -> str:
        found = _TASK.fullmatch(task.content)
        if not found or len(found["keys"]) != self._spec.length or set(found["keys"]) - set(_letters(self._spec)):
            raise EnvError(f"task {task.index} is no chain of {self._spec.length} doors")
        self._chain, self._keys, self._room = int(found["chain"]), found["keys"], 0
        return self._show()

    def _play(self, action: str) -> Outcome:
        key = word(action)
        if len(key) != 1 or key not in _letters(self._spec):
            return Outcome(self._show(), legal=False)
        if key != self._keys[self._room]:
            return Outcome("", over=True)
        self._room += 1
        through = self._room == self._spec.length
        return Outcome(self._show(), float(through), through, through, parts={"through": float(through)})

    def _reference_answer(self) -> str:
        return self._keys[self._room]

    def _random(self, rng: random.Random) -> str:
        return rng.choice(_letters(self._spec))

    def _show(self) -> str:
        return f"c{self._chain} r{self._room}"


def _letters(spec: KeyDoorChain) -> str:
    return "abcdefghijklmnopqrstuvwxyz"[: spec.actions]
