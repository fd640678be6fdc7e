"""FrozenLake in text, one move per turn."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Sequence
from typing import Annotated

from rolljax.envs.base import Env, EnvSpec
from rolljax.envs.games.game import Game, Outcome, word
from rolljax.envs.games.search import plan
from rolljax.errors import ConfigError, EnvError, Range, check_fields
from rolljax.types import Task

MOVES = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}
"""Moves in an order in which the neighbours of a direction are its two perpendicular ones."""
_NAMES = list(MOVES)
_TRIES = 100


@dataclasses.dataclass(frozen=True)
class FrozenLake(EnvSpec):
    """Random lakes of `size` x `size` cells: walk from S to G over F, not into H (Gymnasium's FrozenLake in text).

    Observation: the lake row by row, with the player as P. Actions: left, down, right, up; a move off the lake stays
    where it is. Reward: 1 at the goal; a hole ends the episode with 0. An answer that is no move changes nothing and
    costs a turn.
    """

    runs = "inline"

    size: Annotated[int, Range(low=2)] = 4
    """Number of cells of a side."""
    frozen_prob: Annotated[float, Range(above=0, high=1)] = 0.8
    """Share of cells that are frozen, among lakes that can be crossed in `max_turns` moves."""
    max_turns: int = 8
    """Moves before the episode is cut."""
    seed: int = 0
    """Seed of the tasks."""
    slippery: bool = False
    """Whether the ice is slippery: a move goes in its direction or to one of the two sides, each with probability 1/3.
    Then even the best player (`reference_answer`: the move with the highest chance to reach the goal in the turns left)
    may fail."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.max_turns < 2 * (self.size - 1):
            raise ConfigError(
                f"is too few to cross a lake of {self.size} x {self.size}",
                setting="FrozenLake.max_turns",
                value=self.max_turns,
                remedy=f"at least {2 * (self.size - 1)}",
            )

    @property
    def name(self) -> str:
        return "frozen_lake"

    def task(self, index: int) -> Task:
        return Task(self.name, index, "\n".join(_lake(self, index)))

    def make(self) -> Env:
        return FrozenLakeEnv(self)

    def bad_actions(self) -> Sequence[str]:
        return (*super().bad_actions(), "left", "right down", "0", "G", "r\u0131ght")


class FrozenLakeEnv(Game[FrozenLake]):
    """One walk over one lake."""

    def _begin(self, task: Task) -> str:
        self._lake = tuple(task.content.split("\n"))
        size = self._spec.size
        if [len(row) for row in self._lake] != [size] * size or task.content.count("S") != 1:
            raise EnvError(f"task {task.index} is not a lake of {size} x {size}")
        self._cell = divmod("".join(self._lake).index("S"), size)
        self._slips = random.Random(f"{self._spec.seed} {task.content}")
        return self._show()

    def _play(self, action: str) -> Outcome:
        move = word(action)
        legal = move in MOVES
        if legal:
            if self._spec.slippery:
                move = self._slips.choice(_ways(move))
            self._cell = _after(self._cell, move, self._spec.size)
        here = self._lake[self._cell[0]][self._cell[1]]
        goal = float(here == "G")
        parts = {"goal": goal, "no_move": float(not legal)}
        return Outcome(self._show(), goal, over=here in "GH", success=here == "G", legal=legal, parts=parts)

    def _reference_answer(self) -> str:
        if self._spec.slippery:
            return _surest(self._lake, self._cell, self._turns_left, self._spec.max_turns)
        way = _crossing(self._lake, self._cell)
        if way is None:
            raise EnvError("there is no way over this lake")
        return way[0][1]

    def _random(self, rng: random.Random) -> str:
        return rng.choice(_NAMES)

    def _show(self) -> str:
        rows = [list(row) for row in self._lake]
        rows[self._cell[0]][self._cell[1]] = "P"
        return "\n".join("".join(row) for row in rows)


Cell = tuple[int, int]


def _after(cell: Cell, move: str, size: int) -> Cell:
    down, right = MOVES[move]
    return min(max(cell[0] + down, 0), size - 1), min(max(cell[1] + right, 0), size - 1)


def _ways(move: str) -> list[str]:
    """Return the three directions that a move on slippery ice may take, each with probability 1/3."""
    i = _NAMES.index(move)
    return [_NAMES[i - 1], move, _NAMES[(i + 1) % 4]]


def _crossing(lake: Sequence[str], start: Cell) -> list[tuple[Cell, str]] | None:
    """Return the cells and moves of a shortest path to the goal; None if there is none."""

    def moves(cell: Cell) -> list[tuple[str, Cell]]:
        ways = ((name, _after(cell, name, len(lake))) for name in MOVES)
        return [(name, (row, col)) for name, (row, col) in ways if lake[row][col] != "H"]

    return plan(start, moves, lambda cell: lake[cell[0]][cell[1]] == "G")


def _surest(lake: tuple[str, ...], cell: Cell, turns: int, max_turns: int) -> str:
    """Return the move most likely to end at the goal in `turns` slippery turns."""
    arrive = _arrivals(lake, max_turns)[turns - 1]
    return max(MOVES, key=lambda move: sum(arrive[_after(cell, way, len(lake))] for way in _ways(move)))


@functools.lru_cache(maxsize=256)
def _arrivals(lake: tuple[str, ...], max_turns: int) -> list[dict[Cell, float]]:
    """Compute the best player's chance to arrive from every cell in 0, 1, ... slippery turns, by dynamic
    programming."""
    size = len(lake)
    cells = [(row, col) for row in range(size) for col in range(size)]
    ice = [cell for cell in cells if lake[cell[0]][cell[1]] not in "GH"]
    after = {cell: [[_after(cell, way, size) for way in _ways(move)] for move in MOVES] for cell in ice}
    chances = [{cell: float(lake[cell[0]][cell[1]] == "G") for cell in cells}]
    for _ in range(max_turns - 1):
        last = chances[-1]
        best = {cell: max(last[x] + last[y] + last[z] for x, y, z in after[cell]) / 3 for cell in ice}
        chances.append({**last, **best})
    return chances


def _lake(spec: FrozenLake, index: int) -> list[str]:
    """Generate a random lake that can be crossed in time. If none is found, clear a random straight path."""
    rng = random.Random(f"{spec.seed} {index}")
    size = spec.size
    for _ in range(_TRIES):
        cells = ["F" if rng.random() < spec.frozen_prob else "H" for _ in range(size * size)]
        cells[0], cells[-1] = "S", "G"
        lake = ["".join(cells[row : row + size]) for row in range(0, size * size, size)]
        way = _crossing(lake, (0, 0))
        if way is not None and len(way) <= spec.max_turns:
            return lake
    rows = [list(row) for row in lake]
    cell = (0, 0)
    for move in rng.sample(["down", "right"] * (size - 1), 2 * (size - 1))[:-1]:
        cell = _after(cell, move, size)
        rows[cell[0]][cell[1]] = "F"
    return ["".join(row) for row in rows]
