"""Break a code of digits from black and white pegs."""

from __future__ import annotations

import dataclasses
import itertools
import random
import re
from collections import Counter
from collections.abc import Sequence
from typing import Annotated

from rolljax.envs.base import Env, EnvSpec
from rolljax.envs.games.game import Game, Outcome, unboxed
from rolljax.errors import ConfigError, EnvError, Range, check_fields
from rolljax.types import Task

MAX_CODES = 10_000


@dataclasses.dataclass(frozen=True)
class Mastermind(EnvSpec):
    r"""A secret code of `length` digits from 1 to `digits`, which may repeat (Mastermind; also a game of GEM, arXiv
    2510.01051, with lengths 2 and 4).

    Observation: at first length and largest digit, `3 of 1-6`; then the pegs, `1b 2w`: 1 digit is in its place (black),
    and 2 more are in the code at another place (white). Actions: a code, `1234`. Reward: 1 for the
    secret. Gold is the first code that agrees with all answers so far; it breaks every
    default code in 8 turns or fewer.
    """

    runs = "inline"

    length: int = 3
    """Number of digits of the code."""
    digits: Annotated[int, Range(low=2, high=9)] = 6
    """The largest one."""
    max_turns: Annotated[int, Range(low=1)] = 8
    """Guesses before the episode is cut."""
    boxed: bool = False
    r"""Whether to read the code from `\boxed{}`."""
    seed: int = 0
    """Seed of the tasks."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.length < 1 or self.digits**self.length > MAX_CODES:
            raise ConfigError(
                f"must be at least 1, with at most {MAX_CODES} codes", setting="Mastermind.length", value=self.length
            )

    @property
    def name(self) -> str:
        return "mastermind"

    def task(self, index: int) -> Task:
        return Task(self.name, index, _draw(self, random.Random(f"{self.seed} {index}")))

    def make(self) -> Env:
        return MastermindEnv(self)

    def bad_actions(self) -> Sequence[str]:
        return (*super().bad_actions(), "0" * self.length, "1" * 5000, "\u0661" * self.length, "1" * (self.length + 1))


class MastermindEnv(Game[Mastermind]):
    """One code."""

    def _begin(self, task: Task) -> str:
        if not self._is_code(task.content):
            raise EnvError(f"task {task.index} is no code of {self._spec.length} digits up to {self._spec.digits}")
        self._secret = task.content
        self._answers: list[tuple[str, tuple[int, int]]] = []
        return self._ask()

    def _play(self, action: str) -> Outcome:
        code = unboxed(action, self._spec.boxed)
        if code is None or not self._is_code(code):
            return Outcome(self._ask(), legal=False)
        if code == self._secret:
            return Outcome("", 1.0, over=True, success=True, parts={"found": 1.0})
        black, white = pegs(code, self._secret)
        self._answers.append((code, (black, white)))
        return Outcome(f"{black}b {white}w")

    def _reference_answer(self) -> str:
        codes = map("".join, itertools.product(_alphabet(self._spec), repeat=self._spec.length))
        return self._say(next(c for c in codes if all(pegs(guess, c) == answer for guess, answer in self._answers)))

    def _random(self, rng: random.Random) -> str:
        return self._say(_draw(self._spec, rng))

    def _is_code(self, text: str) -> bool:
        return re.fullmatch(f"[1-{self._spec.digits}]{{{self._spec.length}}}", text) is not None

    def _say(self, code: str) -> str:
        return f"\\boxed{{{code}}}" if self._spec.boxed else code

    def _ask(self) -> str:
        return f"{self._spec.length} of 1-{self._spec.digits}"


def pegs(guess: str, secret: str) -> tuple[int, int]:
    """Return the number of black and white pegs of a guess."""
    black = sum(a == b for a, b in zip(guess, secret, strict=True))
    return black, sum((Counter(guess) & Counter(secret)).values()) - black


def _alphabet(spec: Mastermind) -> str:
    return "123456789"[: spec.digits]


def _draw(spec: Mastermind, rng: random.Random) -> str:
    return "".join(rng.choices(_alphabet(spec), k=spec.length))
