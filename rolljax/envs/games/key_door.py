"""Rooms in a row: find the key, open the door, reach the goal."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Annotated

from rolljax.envs.base import Env, EnvSpec
from rolljax.envs.games.game import Game, Outcome, word
from rolljax.envs.games.search import plan
from rolljax.errors import ConfigError, EnvError, Range, check_fields
from rolljax.types import Task

MOVES = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}

Cell = tuple[int, int]
State = tuple[Cell, frozenset[Cell], frozenset[Cell]]
"""Player, and keys and doors that are still there."""


@dataclasses.dataclass(frozen=True)
class KeyDoor(EnvSpec):
    """`doors` + 1 rooms of `room` x `room` cells in a row, with a locked door between neighbours and the key to it in
    the room before it; the goal is in the last one, at the right or at the left (after MiniGrid's DoorKey, arXiv
    2306.13831).

    Observation: the grid row by row: `P` player, `K` key, `D` locked door, `G` goal, `#` wall, `.` floor. Actions:
    left, down, right, up. A key is taken by walking onto it, a door is opened by walking into it with a key, which is
    used up; both then look like floor. Reward: 1 at the goal. Gold is a shortest way.
    """

    runs = "inline"

    doors: Annotated[int, Range(low=1, high=8)] = 1
    """Number of locked doors."""
    room: Annotated[int, Range(low=2, high=12)] = 3
    """Number of cells of a room's side."""
    max_turns: int = 20
    """Moves after which the episode is cut; at least the length of the longest possible path."""
    seed: int = 0
    """Seed of the tasks."""

    def __post_init__(self) -> None:
        check_fields(self)
        longest = 2 * (self.room - 1) + 2 * self.doors * (2 * self.room - 1)
        if self.max_turns < longest:
            raise ConfigError(
                "is too few for the longest way",
                setting="KeyDoor.max_turns",
                value=self.max_turns,
                remedy=f"at least {longest}",
            )

    @property
    def name(self) -> str:
        return "key_door"

    def task(self, index: int) -> Task:
        return Task(self.name, index, _grid(self, random.Random(f"{self.seed} {index}")))

    def make(self) -> Env:
        return KeyDoorEnv(self)

    def bad_actions(self) -> Sequence[str]:
        return (*super().bad_actions(), "up", "right down", "G")


class KeyDoorEnv(Game[KeyDoor]):
    """One walk."""

    def _begin(self, task: Task) -> str:
        self._rows = task.content.split("\n")
        at = {c: frozenset(_find(self._rows, c)) for c in "PKDG"}
        if {len(row) for row in self._rows} != {len(self._rows[0])} or (len(at["P"]), len(at["G"])) != (1, 1):
            raise EnvError(f"task {task.index} is no grid of rooms")
        (player,), (self._goal,) = at["P"], at["G"]
        self._all_keys, self._all_doors = at["K"], at["D"]
        self._state: State = (player, at["K"], at["D"])
        return self._show()

    def _play(self, action: str) -> Outcome:
        move = word(action)
        if move in MOVES:
            self._state = self._after(self._state, move)
        goal = self._state[0] == self._goal
        return Outcome(self._show(), float(goal), goal, goal, move in MOVES, {"goal": float(goal)})

    def _reference_answer(self) -> str:
        way = plan(
            self._state,
            lambda state: [(move, self._after(state, move)) for move in MOVES],
            lambda state: state[0] == self._goal,
        )
        if way is None:
            raise EnvError("there is no way to this goal")
        return way[0][1]

    def _random(self, rng: random.Random) -> str:
        return rng.choice(list(MOVES))

    def _after(self, state: State, move: str) -> State:
        (row, col), keys, doors = state
        to = (row + MOVES[move][0], col + MOVES[move][1])
        inside = 0 <= to[0] < len(self._rows) and 0 <= to[1] < len(self._rows[0])
        if not inside or self._rows[to[0]][to[1]] == "#":
            return state
        if to in doors:
            held = len(self._all_keys - keys) - len(self._all_doors - doors)
            return (to, keys, doors - {to}) if held else state
        return to, keys - {to}, doors

    def _show(self) -> str:
        player, keys, doors = self._state
        rows = [["#" if char == "#" else "." for char in row] for row in self._rows]
        for char, cells in (("K", keys), ("D", doors), ("G", [self._goal]), ("P", [player])):
            for row, col in cells:
                rows[row][col] = char
        return "\n".join("".join(row) for row in rows)


def _find(rows: list[str], char: str) -> list[Cell]:
    return [(r, c) for r, row in enumerate(rows) for c, found in enumerate(row) if found == char]


def _grid(spec: KeyDoor, rng: random.Random) -> str:
    wide = spec.room + 1
    rows = [["."] * (wide * (spec.doors + 1) - 1) for _ in range(spec.room)]
    for room in range(spec.doors + 1):
        cells = [(r, room * wide + c) for r in range(spec.room) for c in range(spec.room)]
        things = "P" * (room == 0) + ("G" if room == spec.doors else "K")
        for char, (row, col) in zip(things, rng.sample(cells, len(things)), strict=True):
            rows[row][col] = char
        if room < spec.doors:
            door = rng.randrange(spec.room)
            for row in range(spec.room):
                rows[row][room * wide + spec.room] = "D" if row == door else "#"
    way = rng.choice((1, -1))
    return "\n".join("".join(row[::way]) for row in rows)
