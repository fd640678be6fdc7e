"""The shared base of games: turns, ends, illegal answers, and the parsing of answers."""

from __future__ import annotations

import abc
import dataclasses
import random
import re
from collections.abc import Mapping
from typing import Generic, TypeVar

from rolljax.envs.base import EnvSpec, PureEnv, StepResult
from rolljax.errors import EnvError
from rolljax.types import Message, Task

S = TypeVar("S", bound=EnvSpec)

MAX_ANSWER = 4096
"""Maximum number of characters of an answer; a longer answer is read as an empty one."""

_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
_NUMBER = re.compile(r"[+-]?[0-9]{1,9}")


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """The effect of an answer."""

    text: str
    """The reply to the policy, if the episode continues."""
    reward: float = 0.0
    over: bool = False
    success: bool = False
    legal: bool = True
    """Whether the answer was valid."""
    parts: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Parts of the reward, by name."""


class Game(PureEnv, Generic[S]):
    """An episode of a game. It is cut after `max_turns` answers; an illegal answer costs a turn and is counted in the
    metric `illegal_n`. Subclasses define the beginning, the effect of an answer, and the answers of a perfect and a
    random player."""

    def __init__(self, spec: S) -> None:
        self._spec = spec
        self._turns, self._over = 0, True

    @abc.abstractmethod
    def _begin(self, task: Task) -> str:
        """Set the state up; return the opening text. Content that is not a task of these settings: `EnvError`."""

    @abc.abstractmethod
    def _play(self, action: str) -> Outcome:
        """Apply an answer of at most `MAX_ANSWER` characters, and return its outcome."""

    @abc.abstractmethod
    def _reference_answer(self) -> str:
        """Return a perfect player's answer."""

    @abc.abstractmethod
    def _random(self, rng: random.Random) -> str:
        """Return a random legal answer."""

    def reset(self, task: Task) -> tuple[Message, ...]:
        text = self._begin(task)
        self._turns, self._over = 0, False
        return (Message("user", text),)

    def step(self, action: str) -> StepResult:
        self._check()
        self._turns += 1
        done = self._play(action if len(action) <= MAX_ANSWER else "")
        truncated = not done.over and self._turns >= self._spec.max_turns
        self._over = done.over or truncated
        return StepResult(
            () if self._over else (Message("user", done.text),),
            done.reward,
            terminated=done.over,
            truncated=truncated,
            success=done.success,
            reward_parts=done.parts,
            metrics={"illegal_n": float(not done.legal)},
        )

    def reference_answer(self) -> str:
        self._check()
        return self._reference_answer()

    def random_action(self, rng: random.Random) -> str:
        """Return the answer of a player who knows the rules and nothing else."""
        self._check()
        return self._random(rng)

    @property
    def _turns_left(self) -> int:
        return self._spec.max_turns - self._turns

    def _check(self) -> None:
        if self._over:
            raise EnvError("step before reset, or after the episode's end")


def word(action: str) -> str:
    """Return the answer in lower case, without space around it."""
    return action.strip().lower()


def unboxed(action: str, boxed: bool) -> str | None:
    r"""Return the answer itself: the content of the last `\boxed{...}` (None without one), or all of the text."""
    if not boxed:
        return action.strip()
    found = _BOXED.findall(action)
    return found[-1].strip() if found else None


def number(text: str | None) -> int | None:
    """Parse a text that is a decimal number of at most nine ASCII digits; return None for any other text."""
    return int(text) if text is not None and _NUMBER.fullmatch(text) else None
