"""Sokoban: push boxes onto targets."""

from __future__ import annotations

import dataclasses
import random
from collections import deque
from typing import Annotated

from rolljax.envs.base import Env, EnvSpec
from rolljax.envs.games.game import Game, Outcome, word
from rolljax.envs.games.search import plan
from rolljax.errors import ConfigError, DataError, EnvError, Range, check_fields
from rolljax.types import Task

MOVES = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}
_SHOWN = {"player": "@+", "box": "$*", "floor": " ."}
"""Characters off and on a target, as in the XSB level format; walls are `#`."""
_TRIES = 1000

Cell = tuple[int, int]
State = tuple[Cell, frozenset[Cell]]
"""Player and boxes."""


@dataclasses.dataclass(frozen=True)
class Sokoban(EnvSpec):
    """Rooms of `size` x `size` cells, outer wall included, with `boxes` boxes and as many targets.

    Levels are made by reverse play (as in arXiv 1707.06203): boxes start on their targets and are pulled away by at
    most `max_turns` moves, so that every level can be solved in time.

    Observation: the room in the XSB format: `#` wall, `@` player, `$` box, `.` target, `*` box on target, `+` player on
    target. Actions: left, down, right, up; a move into a wall or a box that is stuck changes nothing. Reward: 1 when
    all boxes are on targets. Gold is a shortest solution from where things stand; once a box is stuck for good there is
    none, and `reference_answer` raises.
    """

    runs = "inline"

    size: Annotated[int, Range(low=5, high=20)] = 6
    """Number of cells of a side, at least 5."""
    boxes: int = 1
    """Number of boxes in a room."""
    wall_frac: Annotated[float, Range(low=0, high=0.4)] = 0.1
    """Share of inner cells that are walls."""
    distance: Annotated[int, Range(low=1)] = 2
    """Lower bound on the sum, over all boxes, of the distance to the nearest target (rows plus columns); the larger,
    the fewer levels a random walk solves."""
    max_turns: int = 20
    """Moves before the episode is cut."""
    shaped: bool = False
    """Whether to use the rewards of arXiv 1707.06203: -0.1 per turn, +1 for a box pushed onto a target, -1 for one
    pushed off, +10 when solved."""
    seed: int = 0
    """Seed of the tasks."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not 1 <= self.boxes <= (self.size - 2) ** 2 // 4:
            raise ConfigError(
                f"must be 1 to {(self.size - 2) ** 2 // 4} in this room", setting="Sokoban.boxes", value=self.boxes
            )
        if self.max_turns < self.distance + 1:
            raise ConfigError(
                "is too few to push that far",
                setting="Sokoban.max_turns",
                value=self.max_turns,
                remedy=f"more than Sokoban.distance = {self.distance}",
            )

    @property
    def name(self) -> str:
        return "sokoban"

    def task(self, index: int) -> Task:
        return Task(self.name, index, _level(self, random.Random(f"{self.seed} {index}")))

    def make(self) -> Env:
        return SokobanEnv(self)


class SokobanEnv(Game[Sokoban]):
    """One level."""

    def _begin(self, task: Task) -> str:
        self._room = Level.read(task)
        player, boxes = self._room.at("@+"), self._room.at("$*")
        if len(player) != 1 or len(boxes) != len(self._room.targets):
            raise EnvError(f"task {task.index} is no level of Sokoban")
        (cell,) = player
        self._state: State = (cell, boxes)
        self._plan: dict[State, str] = {}
        return self._room.show(self._state)

    def _play(self, action: str) -> Outcome:
        move, before = word(action), self._state
        if move in MOVES:
            self._state = self._room.push(before, move) or before
        placed = len(self._state[1] & self._room.targets) - len(before[1] & self._room.targets)
        solved = self._state[1] == self._room.targets
        parts = {"step": -0.1, "box": float(placed), "solved": 10.0 * solved}
        if not self._spec.shaped:
            parts = {"solved": float(solved)}
        text = self._room.show(self._state)
        return Outcome(text, sum(parts.values()), over=solved, success=solved, legal=move in MOVES, parts=parts)

    def _reference_answer(self) -> str:
        if self._state not in self._plan:
            found = self._room.solve(self._state)
            if found is None:
                raise EnvError("this level can no longer be solved")
            self._plan = dict(found)
        return self._plan[self._state]

    def _random(self, rng: random.Random) -> str:
        return rng.choice(list(MOVES))


@dataclasses.dataclass(frozen=True)
class Level:
    """The fixed parts of a level."""

    rows: tuple[str, ...]
    """The level's text."""
    walls: frozenset[Cell]
    targets: frozenset[Cell]

    @staticmethod
    def read(task: Task) -> Level:
        rows = tuple(task.content.split("\n"))
        edge = rows[0] + rows[-1] + "".join(row[:1] + row[-1:] for row in rows)
        if {len(row) for row in rows} != {len(rows[0])} or set(edge) != {"#"}:
            raise EnvError(f"task {task.index} is no walled room")
        room = Level(rows, frozenset(), frozenset())
        return Level(rows, room.at("#"), room.at(".*+"))

    def at(self, chars: str) -> frozenset[Cell]:
        """Return the cells that show one of these characters in the level."""
        return frozenset((r, c) for r, row in enumerate(self.rows) for c, char in enumerate(row) if char in chars)

    def show(self, state: State) -> str:
        rows = [[_SHOWN["floor"][(r, c) in self.targets] for c in range(len(row))] for r, row in enumerate(self.rows)]
        for r, c in self.walls:
            rows[r][c] = "#"
        for r, c in state[1]:
            rows[r][c] = _SHOWN["box"][(r, c) in self.targets]
        (r, c) = state[0]
        rows[r][c] = _SHOWN["player"][(r, c) in self.targets]
        return "\n".join("".join(row) for row in rows)

    def push(self, state: State, move: str) -> State | None:
        """Return the state after a move; None if the move changes nothing."""
        player, boxes = state
        to = _add(player, MOVES[move])
        if to in self.walls:
            return None
        if to in boxes:
            beyond = _add(to, MOVES[move])
            if beyond in self.walls or beyond in boxes:
                return None
            boxes = boxes - {to} | {beyond}
        return to, boxes

    def solve(self, state: State) -> list[tuple[State, str]] | None:
        """Return a shortest solution: states, and the move to make in each; None if there is none."""
        far = self.pushes()

        def moves(state: State) -> list[tuple[str, State]]:
            return [(move, after) for move in MOVES if (after := self.push(state, move)) is not None]

        def estimate(state: State) -> float:
            return sum(far.get(box, float("inf")) for box in state[1])

        if estimate(state) == float("inf"):
            return None
        return plan(state, moves, lambda state: state[1] == self.targets, estimate)

    def pushes(self) -> dict[Cell, int]:
        """Return the fewest pushes from each cell to a target, by pulling a lone box away from the targets. Cells from
        which a box cannot reach a target are missing."""
        far = dict.fromkeys(self.targets, 0)
        todo = deque(self.targets)
        while todo:
            box = todo.popleft()
            for back in MOVES.values():
                to, player = _add(box, back), _add(_add(box, back), back)
                if to not in far and to not in self.walls and player not in self.walls:
                    far[to] = far[box] + 1
                    todo.append(to)
        return far


def _add(cell: Cell, by: Cell) -> Cell:
    return cell[0] + by[0], cell[1] + by[1]


def _level(spec: Sokoban, rng: random.Random) -> str:
    """Generate the text of a level: a random room, and the state of a random reverse play whose boxes are farthest
    away."""
    inner = [(r, c) for r in range(1, spec.size - 1) for c in range(1, spec.size - 1)]
    edge = {(r, c) for r in range(spec.size) for c in range(spec.size)} - set(inner)
    for attempt in range(_TRIES):
        walls = set(edge)
        if attempt < _TRIES // 2:  # inner walls make long pulls rare
            walls |= {cell for cell in inner if rng.random() < spec.wall_frac}
        free = [cell for cell in inner if cell not in walls]
        if len(free) < 2 * spec.boxes + 2:
            continue
        targets = frozenset(rng.sample(free, spec.boxes))
        player = rng.choice([cell for cell in free if cell not in targets])
        state = _pulled((player, targets), walls, targets, spec.max_turns, rng)
        if _far(state, targets) >= spec.distance:
            rows = ("#" * spec.size,) * spec.size
            return Level(rows, frozenset(walls), targets).show(state)
    raise DataError(f"no level with boxes {spec.distance} cells away turned up: lower Sokoban.distance or .boxes")


def _pulled(state: State, walls: set[Cell], targets: frozenset[Cell], moves: int, rng: random.Random) -> State:
    """Return the state with the boxes farthest from targets on a random reverse play of at most `moves` moves. In each
    round the player walks to a side of a box and pulls it a few cells that way."""
    best = state
    while True:
        player, boxes = state
        steps = _walk(player, walls, boxes)
        pulls = [
            (box, way)
            for box in sorted(boxes)
            for way in MOVES.values()
            if _add(box, way) in steps and (to := _add(_add(box, way), way)) not in walls and to not in boxes
        ]
        if not pulls:
            return best
        box, way = rng.choice(pulls)
        player = _add(box, way)
        moves -= steps[player]
        for _ in range(rng.randint(1, 3)):
            to = _add(player, way)
            moves -= 1
            if moves < 0 or to in walls or to in boxes:
                break
            boxes = boxes - {box} | {player}
            player, box = to, player
            state = (player, boxes)
            if _far(state, targets) > _far(best, targets):
                best = state
        if moves <= 0:
            return best


def _walk(player: Cell, walls: set[Cell], boxes: frozenset[Cell]) -> dict[Cell, int]:
    """Return the number of moves to every reachable cell."""
    steps = {player: 0}
    todo = deque([player])
    while todo:
        cell = todo.popleft()
        for way in MOVES.values():
            to = _add(cell, way)
            if to not in steps and to not in walls and to not in boxes:
                steps[to] = steps[cell] + 1
                todo.append(to)
    return steps


def _far(state: State, targets: frozenset[Cell]) -> int:
    """Return the sum over boxes of rows plus columns to the nearest target."""
    return sum(min(abs(r - y) + abs(c - x) for y, x in targets) for r, c in state[1])
