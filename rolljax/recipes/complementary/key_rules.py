"""Rooms whose doors open to one of a few keys, or to several. The prompt does not say which: a test of experience."""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Sequence
from typing import Annotated

from rolljax.envs.base import Env, EnvSpec
from rolljax.envs.games.game import Game, Outcome, word
from rolljax.errors import EnvError, Range, check_fields
from rolljax.types import Task

KEYS = ("red", "blue", "gold", "teal")
TURNED = "turned"
"""Part of the reward with the number of first keys that are right."""
_TASK = re.compile(r"room (?P<room>[a-z]{2}) (?P<keys>[a-z]+( [a-z]+)*)(?P<shown>,?) walk [0-9]+")


@dataclasses.dataclass(frozen=True)
class KeyRules(EnvSpec):
    """A room with a name of two letters and a door that opens to one of four keys, or to several in their order.

    Observation: `room ab`. Actions: `red`, `blue`, `gold`, `teal`; with two keys `red gold`. Reward: 1 if the door
    opens. Its part `turned` (doors with several keys) is the number of first keys that are right, without the last
    key. The keys of a room are the same in every walk, and no room says anything about another.
    """

    runs = "inline"

    rooms: Annotated[int, Range(low=1, high=676)] = 32
    """Number of rooms. Walks through one room are different tasks with the same keys."""
    keys: Annotated[int, Range(low=1, high=6)] = 1
    """Number of keys of a door: with n, one of 4^n answers opens it."""
    rule: int = 0
    """Seed of the keys."""
    fixed: bool = True
    """Whether the keys of a room stay the same; if not, every walk has its own, and a warm start learns no rule."""
    shown: bool = False
    """Whether every second walk shows its keys as an experience, of several all but the last: a warm start learns to
    read them."""

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def name(self) -> str:
        return "key_rules"

    def task(self, index: int) -> Task:
        walk, room = divmod(index, self.rooms)
        letters = chr(97 + room // 26) + chr(97 + room % 26)
        keys = _any_keys(random.Random(f"{self.rule} {room if self.fixed else index}"), self.keys)
        shown = "," if self.shown and walk % 2 else ""
        return Task(self.name, index, f"room {letters} {keys}{shown} walk {walk}")

    def reference(self, task: Task) -> str | None:
        """Return the keys of a door with several: an experience may say some of them, and not all."""
        found = _TASK.fullmatch(task.content)
        return found["keys"] if found and self.keys > 1 else None

    def make(self) -> Env:
        return KeyRulesEnv(self)

    def bad_actions(self) -> Sequence[str]:
        return (*super().bad_actions(), " ".join(KEYS), "key", "\uff52ed")


class KeyRulesEnv(Game[KeyRules]):
    """One try at one door."""

    def _begin(self, task: Task) -> str:
        found = _TASK.fullmatch(task.content)
        if not found or not _are_keys(found["keys"], self._spec.keys):
            raise EnvError(f"task {task.index} is no room")
        self._keys, room = found["keys"], f"room {found['room']}"
        return f"{room}\n{room}: {all_but_one(self._keys)}" if found["shown"] else room

    def _play(self, action: str) -> Outcome:
        said, keys = word(action), self._keys.split(" ")
        opened, legal = said == self._keys, _are_keys(said, len(keys))
        same = [a == b for a, b in zip(said.split(" "), keys[:-1], strict=False)]
        first_wrong = [*same, False].index(False)
        parts = {TURNED: first_wrong} if legal and len(keys) > 1 else {}
        return Outcome("", float(opened), over=True, success=opened, legal=legal, parts=parts)

    def _reference_answer(self) -> str:
        return self._keys

    def _random(self, rng: random.Random) -> str:
        return _any_keys(rng, self._spec.keys)


def all_but_one(keys: str) -> str:
    """Return all keys of a door but the last; its only one."""
    return keys.rpartition(" ")[0] or keys


def _any_keys(rng: random.Random, num: int) -> str:
    return " ".join(rng.choice(KEYS) for _ in range(num))


def _are_keys(answer: str, num: int) -> bool:
    """Return whether an answer names this number of keys."""
    words = answer.split(" ")
    return len(words) == num and all(word in KEYS for word in words)
