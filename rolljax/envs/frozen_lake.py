"""Gymnasium's FrozenLake in text, one move per turn."""

from __future__ import annotations

import dataclasses
import functools
from collections import deque
from typing import Any

from rolljax.envs.base import Env, EnvSpec, StepResult
from rolljax.errors import ConfigError, EnvError
from rolljax.types import Message, Task

MOVES = {"left": 0, "down": 1, "right": 2, "up": 3}


@dataclasses.dataclass(frozen=True)
class FrozenLake(EnvSpec):
    """Random lakes of `size` x `size` cells: walk from S to G over F, not into H. No slipping.

    The grid is shown with the player as P, row by row; the policy answers left, down, right or up. Reward is 1 at the
    goal. An answer that is no move changes nothing and costs a turn.

    frozen_prob: share of cells that are frozen, as gymnasium's map generator takes it. max_turns: moves before the
    episode is cut.
    """

    size: int = 4
    frozen_prob: float = 0.8
    max_turns: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        if self.size < 2:
            raise ConfigError("must be at least 2", setting="FrozenLake.size", value=self.size)
        if not 0 < self.frozen_prob <= 1:
            raise ConfigError("must be in (0, 1]", setting="FrozenLake.frozen_prob", value=self.frozen_prob)
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
        return Task(self.name, index, "\n".join(_lake(self.size, self.frozen_prob, self.seed, index)))

    def make(self) -> Env:
        return FrozenLakeEnv(self)


class FrozenLakeEnv(Env):
    """One walk over one lake."""

    def __init__(self, spec: FrozenLake) -> None:
        self._spec = spec
        self._env: Any = None
        self._over = True

    def reset(self, task: Task) -> tuple[Message, ...]:
        from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv as Lake

        self._lake = task.content.split("\n")
        if [len(row) for row in self._lake] != [self._spec.size] * self._spec.size:
            raise EnvError(f"task {task.index} is not a lake of {self._spec.size} x {self._spec.size}")
        self._env = Lake(desc=self._lake, is_slippery=False)
        self._cell, _ = self._env.reset(seed=task.index % 2**31)
        self._turns, self._over = 0, False
        return (self._observe(),)

    def step(self, action: str) -> StepResult:
        if self._over:
            raise EnvError("step before reset, or after the episode's end")
        self._turns += 1
        move = MOVES.get(action.strip().lower())
        reward, terminated = 0.0, False
        if move is not None:
            self._cell, reward, terminated, _, _ = self._env.step(move)
            self._cell = int(self._cell)
        truncated = not terminated and self._turns == self._spec.max_turns
        self._over = terminated or truncated
        return StepResult(
            () if self._over else (self._observe(),),
            float(reward),
            terminated=bool(terminated),
            truncated=truncated,
            success=reward > 0,
            reward_parts={"goal": float(reward), "no_move": float(move is None)},
        )

    def gold(self) -> str:
        """The first move of a shortest way to the goal."""
        size = self._spec.size
        goal = size * size - 1
        came: dict[int, tuple[int, str]] = {self._cell: (self._cell, "")}
        todo = deque([self._cell])
        while todo and goal not in came:
            cell = todo.popleft()
            for name, move in MOVES.items():
                _, after, _, _ = self._env.P[cell][move][0]
                after = int(after)
                if after not in came and self._lake[after // size][after % size] != "H":
                    came[after] = (cell, name)
                    todo.append(after)
        cell, name = goal, ""
        while cell != self._cell:
            cell, name = came[cell]
        return name

    def close(self) -> None:
        if self._env is not None:
            self._env.close()

    def _observe(self) -> Message:
        size = self._spec.size
        rows = [list(row) for row in self._lake]
        rows[self._cell // size][self._cell % size] = "P"
        return Message("user", "\n".join("".join(row) for row in rows))


@functools.lru_cache(maxsize=65536)
def _lake(size: int, frozen_prob: float, seed: int, index: int) -> tuple[str, ...]:
    from gymnasium.envs.toy_text.frozen_lake import generate_random_map

    return tuple(generate_random_map(size, frozen_prob, seed=(seed * 1_000_003 + index) % 2**31))
