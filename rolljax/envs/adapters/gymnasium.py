"""Environments of gymnasium with numbered actions, in text."""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import re
import threading
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from rolljax.envs.adapters.border import MAX_ACTION_CHARS, library
from rolljax.envs.base import Env, EnvSpec, Runs, StepResult
from rolljax.envs.pool.episode_runner import flag, number
from rolljax.errors import ConfigError, EnvError, Range, boundary, check_fields
from rolljax.types import Message, Task

ACTIONS: Mapping[str, tuple[str, ...]] = {
    "FrozenLake": ("left", "down", "right", "up"),
    "CliffWalking": ("up", "right", "down", "left"),
    "Taxi": ("south", "north", "east", "west", "pickup", "dropoff"),
    "Blackjack": ("stick", "hit"),
}
"""Names of the actions 0, 1, ..., by the beginning of the id; elsewhere the numbers are the names."""

RULES: Mapping[str, str] = {
    "FrozenLake": "Walk from S to G over the ice F, not into a hole H. You stand in the brackets.",
    "CliffWalking": "Walk from x to T in as few moves as you can. A step onto the cliff C takes you back to the start.",
    "Taxi": "Fetch the passenger and bring it where it wants to go. Walls are |; a : can be crossed.",
    "Blackjack": "Come closer to 21 than the dealer, but not above it.",
}
"""Introduction in the first message, by the beginning of the id."""

MAX_NUMBERS = 16
"""Observations of at most this many numbers are shown as numbers."""

_COLOUR = re.compile(r"\x1b\[([0-9;]*)m")
_TAXI_STANDS = ("R", "G", "Y", "B")


@dataclasses.dataclass(frozen=True)
class Gymnasium(EnvSpec):
    """One environment of gymnasium (https://gymnasium.farama.org) whose actions are numbered and whose state is text
    or a few numbers: FrozenLake-v1, Taxi-v4, CliffWalking-v1, Blackjack-v1, and others of that kind.

    An answer that is no action changes nothing and costs a turn. Solved: the goal of FrozenLake, CliffWalking and Taxi,
    a hand of Blackjack that is won; elsewhere a whole episode (gymnasium's own limit of steps, so `max_turns` must
    allow it) whose rewards sum to the `reward_threshold` that gymnasium gives.
    """

    runs: ClassVar[Runs] = "process"

    id: str = "FrozenLake-v1"
    """Id of the environment in gymnasium; `module:Id-v0` first imports the module, which registers the id (as
    `gymnasium.make` reads it)."""
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Keyword arguments of `gymnasium.make` (`{'is_slippery': False}`)."""
    reward: Literal["env", "success"] = "env"
    """Reward of the policy. `env`: the environment's own, step by step; `success`: 1 for a solved task, else 0."""
    max_turns: Annotated[int, Range(low=1)] = 32
    """Actions before the episode is cut."""
    seed: int = 0
    """Seed of the tasks."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.reward not in ("env", "success"):
            raise ConfigError("is neither env nor success", setting="Gymnasium.reward", value=self.reward)
        _shape(self.id, self._key)

    @property
    def name(self) -> str:
        return _bare(self.id)

    @property
    def actions(self) -> tuple[str, ...]:
        """The policy's possible answers; action 0 first."""
        return _shape(self.id, self._key).actions

    def task(self, index: int) -> Task:
        """Return a task. Without randomness equal first observations are one task; otherwise the seed is part of it."""
        shape = _shape(self.id, self._key)
        with shape.lock:
            state, _ = shape.env.reset(seed=self._seed(index))
            opening = _show(self.id, shape.env, state)
        return Task(self.name, index, opening if shape.certain else f"{opening}\nseed {self._seed(index)}")

    def warm(self) -> None:
        self.make().reset(self.task(0))

    def make(self) -> Env:
        return GymnasiumEnv(self)

    @property
    def _key(self) -> str:
        return repr(sorted(self.settings.items()))

    def _seed(self, index: int) -> int:
        return (self.seed * 1_000_003 + index) % 2**31


@dataclasses.dataclass(frozen=True, eq=False)
class _Shape:
    """Properties of an id: a sample environment, action names, and whether it is deterministic."""

    env: Any
    actions: tuple[str, ...]
    certain: bool
    num_steps: int | None
    """Gymnasium's own limit of steps."""
    threshold: float | None
    """Sum of rewards from which on gymnasium counts an episode as solved."""
    lock: threading.Lock


@functools.cache
def _shape(id: str, settings: str) -> _Shape:
    if _bare(id).startswith(("phys2d/", "tabular/")):
        raise ConfigError("computes with JAX, which belongs to the trainer", setting="Gymnasium.id", value=id)
    gymnasium = library("gymnasium", "gymnasium>=1.4")
    spaces = gymnasium.spaces
    with boundary(ConfigError, f"gymnasium does not make {id}"):
        spec = _registered(id)
        env = _make(id, settings)
    if not isinstance(env.action_space, spaces.Discrete) or env.action_space.start != 0:
        raise ConfigError(
            f"has actions {env.action_space}, not a number of named ones", setting="Gymnasium.id", value=id
        )
    if _numbers(spaces, env.observation_space) > MAX_NUMBERS and env.render_mode != "ansi":
        raise ConfigError(
            f"shows {env.observation_space}, which is neither text nor at most {MAX_NUMBERS} numbers",
            setting="Gymnasium.id",
            value=id,
        )
    count = int(env.action_space.n)
    named = next(
        (names for start, names in ACTIONS.items() if _bare(id).startswith(start) and len(names) == count), None
    )
    table = getattr(env.unwrapped, "P", None)
    certain = table is not None and all(len(ways) == 1 for moves in table.values() for ways in moves.values())
    names = named or tuple(map(str, range(count)))
    return _Shape(env, names, certain, spec.max_episode_steps, spec.reward_threshold, threading.Lock())


def _make(id: str, settings: str) -> Any:
    """Make the environment, rendering text if it can, without gymnasium's checks and turn limit.

    settings: the `repr` of its items.
    """
    import gymnasium

    options = {**dict(ast.literal_eval(settings)), "disable_env_checker": True, "max_episode_steps": -1}
    creator = _registered(id).entry_point
    cls = gymnasium.envs.registration.load_env_creator(creator) if isinstance(creator, str) else creator
    if "ansi" in getattr(cls, "metadata", {}).get("render_modes", ()):
        options.setdefault("render_mode", "ansi")
    return gymnasium.make(_bare(id), **options)


def _bare(id: str) -> str:
    """Return an id without the module that registers it."""
    return id.rpartition(":")[2]


def _registered(id: str) -> Any:
    """Return gymnasium's registration of an id, after importing the module before its colon."""
    import gymnasium

    module, _, bare = id.rpartition(":")
    if module:
        try:
            importlib.import_module(module)
        except ImportError as e:
            raise ConfigError(
                f"names a module that cannot be imported: {e}",
                setting="Gymnasium.id",
                value=id,
                remedy=f"install {module}, or put its folder into PYTHONPATH (python -c 'import {module}' shows where)",
            ) from e
    return gymnasium.spec(bare)


def _numbers(spaces: Any, space: Any) -> int:
    """Return the number of numbers in an observation; a very large one if it is no plain tuple of numbers."""
    if isinstance(space, spaces.Discrete):
        return 1
    if isinstance(space, (spaces.Box, spaces.MultiDiscrete, spaces.MultiBinary)):
        count = 1
        for side in space.shape:
            count *= side
        return count
    if isinstance(space, spaces.Tuple):
        return sum(_numbers(spaces, part) for part in space.spaces)
    return 10**9


def _show(id: str, env: Any, state: Any) -> str:
    """Return the state as text. Brackets mark the parts that the library highlights by a colour."""
    if _bare(id).startswith("Taxi"):
        return _taxi(env, int(state))
    if _bare(id).startswith("Blackjack"):
        mine, dealer, ace = (int(n) for n in state)
        return f"Your cards sum to {mine}{' with a usable ace' if ace else ''}. The dealer shows {dealer}."
    if env.render_mode == "ansi":
        lines = [line.rstrip() for line in _bracketed(env.render()).split("\n")]
        return "\n".join(line for line in lines if line and not line.strip().startswith("("))
    flat = library("numpy", "numpy").atleast_1d(state).ravel().tolist() if not isinstance(state, tuple) else state
    return ", ".join(f"{n:.4g}" if isinstance(n, float) else str(n) for n in flat)


def _bracketed(text: str) -> str:
    """Put the coloured part of a text in brackets."""
    first, *rest = _COLOUR.split(text)
    said, coloured = [first], False
    for code, part in zip(rest[::2], rest[1::2], strict=True):
        ends = code in ("", "0")
        said += ["]" if ends and coloured else "[" if not ends and not coloured else "", part]
        coloured = not ends
    return "".join([*said, "]" if coloured else ""])


def _taxi(env: Any, state: int) -> str:
    row, column, passenger, goal = (int(n) for n in env.unwrapped.decode(state))
    board = [[cell.decode() for cell in line] for line in env.unwrapped.desc]
    x, y = 1 + row, 1 + 2 * column
    board[x][y] = "T" if board[x][y] == " " else board[x][y].lower()
    where = "in the taxi" if passenger == len(_TAXI_STANDS) else f"at {_TAXI_STANDS[passenger]}"
    return (
        "\n".join("".join(line) for line in board)
        + f"\nThe taxi (T, or a small letter at a stand) is in row {row}, column {column}. "
        + f"The passenger is {where} and wants to go to {_TAXI_STANDS[goal]}."
    )


class GymnasiumEnv(Env):
    """One episode."""

    def __init__(self, spec: Gymnasium) -> None:
        self._spec = spec
        self._env: Any = None
        self._over = True

    def reset(self, task: Task) -> tuple[Message, ...]:
        if task != self._spec.task(task.index):
            raise EnvError(f"task {task.index} is not one of {self._spec.id} with these settings")
        self._env = _make(self._spec.id, self._spec._key)
        self._state, _ = self._env.reset(seed=self._spec._seed(task.index))
        self._turns, self._total, self._over = 0, 0.0, False
        return (self._observe(),)

    def step(self, action: str) -> StepResult:
        if self._over:
            raise EnvError("step before reset, or after the episode's end")
        self._turns += 1
        word = action.strip().lower() if len(action) <= MAX_ACTION_CHARS else ""
        reward, terminated, truncated = 0.0, False, False
        known = word in self._spec.actions
        if known:
            with boundary(EnvError, f"step of {self._spec.id}"):
                result = self._env.step(self._spec.actions.index(word))
            self._state, own, terminated, truncated, _ = result
            reward = number(own)
            terminated, truncated = flag(terminated, "terminated"), flag(truncated, "truncated")
        self._total += reward
        truncated = not terminated and (truncated or self._turns == self._spec.max_turns)
        self._over = terminated or truncated
        success = self._over and self._solved(reward, terminated)
        return StepResult(
            () if self._over else (self._observe(),),
            reward if self._spec.reward == "env" else float(success),
            terminated=terminated,
            truncated=truncated,
            success=success,
            reward_parts={"env": reward},
            metrics={"no_moves_n": float(not known)},
        )

    def _solved(self, reward: float, terminated: bool) -> bool:
        if self._spec.name.startswith(tuple(RULES)):
            return terminated and (reward > 0 or self._spec.name.startswith("CliffWalking"))
        shape = _shape(self._spec.id, self._spec._key)
        complete = terminated or shape.num_steps is not None and self._turns >= shape.num_steps
        return complete and shape.threshold is not None and self._total >= shape.threshold

    def reference_answer(self) -> str:
        """Return the action of greatest value, from the environment's transition table."""
        if self._over:
            raise EnvError("reference_answer before reset, or after the episode's end")
        if getattr(self._env.unwrapped, "P", None) is None:
            raise EnvError(f"{self._spec.id} has no table of what follows what: no reference actions")
        best = _best(self._spec.id, self._spec._key)
        return self._spec.actions[best[int(self._state)]]

    def close(self) -> None:
        if self._env is not None:
            self._env.close()

    def _observe(self) -> Message:
        text = _show(self._spec.id, self._env, self._state)
        if self._turns == 0:
            rules = next((text for start, text in RULES.items() if self._spec.name.startswith(start)), "")
            text = f"{rules} Each turn, answer with one of: {', '.join(self._spec.actions)}.\n{text}".lstrip()
        return Message("user", text)


@functools.cache
def _best(id: str, settings: str) -> list[int]:
    """Return the best action of every state by value iteration, discount 0.99, to 1e-9 or 10,000 sweeps."""
    import numpy as np

    table = _make(id, settings).unwrapped.P
    states, actions = len(table), len(table[0])
    width = max(len(ways) for moves in table.values() for ways in moves.values())
    chance, reward, alive = (np.zeros((states, actions, width)) for _ in range(3))
    after = np.zeros((states, actions, width), int)
    for s, moves in table.items():
        for a, ways in moves.items():
            for k, (p, s2, r, over) in enumerate(ways):
                chance[s, a, k], after[s, a, k], reward[s, a, k], alive[s, a, k] = p, s2, r, not over
    value = np.zeros(states)
    for _ in range(10_000):
        worth = (chance * (reward + 0.99 * alive * value[after])).sum(-1)
        new = worth.max(-1)
        if np.abs(new - value).max() < 1e-9:
            break
        value = new
    return worth.argmax(-1).tolist()
