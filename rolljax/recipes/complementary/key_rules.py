"""Rooms whose doors open to one of a few keys. The prompt does not say which key: a test of experience."""

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
_TASK = re.compile(r"room (?P<room>[a-z]{2}) (?P<key>[a-z]+)(?P<shown>,?) walk [0-9]+")


@dataclasses.dataclass(frozen=True)
class KeyRules(EnvSpec):
    """A room with a name of two letters and a door that opens to one of four keys.

    Observation: `room ab`. Actions: `red`, `blue`, `gold`, `teal`. Reward: 1 if the door opens. The key of a room is
    the same in every walk, and no room says anything about another.
    """

    runs = "inline"

    rooms: Annotated[int, Range(low=1, high=676)] = 32
    """Number of rooms. Walks through one room are different tasks with the same key."""
    rule: int = 0
    """Seed of the keys."""
    rehearse: bool = False
    """Whether every walk has its own key, which every second walk shows as an experience: for a warm start that teaches
    to read experiences and no rule."""

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def name(self) -> str:
        return "key_rules"

    def task(self, index: int) -> Task:
        walk, room = divmod(index, self.rooms)
        letters = chr(97 + room // 26) + chr(97 + room % 26)
        key = random.Random(f"{self.rule} {index if self.rehearse else room}").choice(KEYS)
        shown = "," if self.rehearse and walk % 2 else ""
        return Task(self.name, index, f"room {letters} {key}{shown} walk {walk}")

    def make(self) -> Env:
        return KeyRulesEnv(self)

    def bad_actions(self) -> Sequence[str]:
        return (*super().bad_actions(), " ".join(KEYS), "key", "\uff52ed")


class KeyRulesEnv(Game[KeyRules]):
    """One try at one door."""

    def _begin(self, task: Task) -> str:
        found = _TASK.fullmatch(task.content)
        if not found or found["key"] not in KEYS:
            raise EnvError(f"task {task.index} is no room")
        self._key, room = found["key"], f"room {found['room']}"
        return f"{room}\n{room}: {self._key}" if found["shown"] else room

    def _play(self, action: str) -> Outcome:
        opened = word(action) == self._key
        return Outcome("", float(opened), over=True, success=opened, legal=word(action) in KEYS)

    def _reference_answer(self) -> str:
        return self._key

    def _random(self, rng: random.Random) -> str:
        return rng.choice(KEYS)
