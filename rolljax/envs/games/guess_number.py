"""Guess a number from the answers higher and lower."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Annotated

from rolljax.envs.base import Env, EnvSpec
from rolljax.envs.games.game import Game, Outcome, number, unboxed
from rolljax.errors import ConfigError, EnvError, Range, check_fields
from rolljax.types import Task


@dataclasses.dataclass(frozen=True)
class GuessNumber(EnvSpec):
    r"""A secret number from 1 to `largest` (GuessTheNumber of GEM, arXiv 2510.01051; its easy form is `largest=10,
    max_turns=4`, its hard form the default).

    Observation: `1-50?` at first, then `higher` or `lower`: where the secret lies from the guess. Actions: a number.
    Reward: 1 for the secret. Games with the same secret are different tasks: what is learned is how to ask, and a
    secret that training never saw would only teach that it never is one.
    """

    runs = "inline"

    largest: Annotated[int, Range(low=2, high=10**8)] = 50
    """Largest number that the secret can be."""
    max_turns: int = 7
    """Guesses before the episode is cut."""
    boxed: bool = False
    r"""Whether to read the number from `\boxed{}`."""
    shaped: bool = False
    """Whether a legal last guess gets the reward 1 - |guess - secret| / (largest - 1) when the episode is cut."""
    format_reward: float = 0.0
    """Reward for an answer without a number."""
    format_ends: bool = False
    """Whether an answer without a number ends the episode (GEM: `format_reward` -0.1, and True). A number outside the
    range is illegal too, but changes nothing."""
    seed: int = 0
    """Seed of the tasks."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.max_turns < self.largest.bit_length():
            raise ConfigError(
                f"is too few to find a number of {self.largest}",
                setting="GuessNumber.max_turns",
                value=self.max_turns,
                remedy=f"at least {self.largest.bit_length()}",
            )
        if self.format_reward > 0:
            raise ConfigError("rewards nonsense", setting="GuessNumber.format_reward", value=self.format_reward)

    @property
    def name(self) -> str:
        return "guess_number"

    def task(self, index: int) -> Task:
        secret = random.Random(f"{self.seed} {index}").randint(1, self.largest)
        return Task(self.name, index, f"{secret} game {index}")

    def make(self) -> Env:
        return GuessNumberEnv(self)

    def bad_actions(self) -> Sequence[str]:
        return (*super().bad_actions(), "0", str(self.largest + 1), "9" * 5000, "\u0661", "1 2", "1" + "\u00b2", "-1")


class GuessNumberEnv(Game[GuessNumber]):
    """One number."""

    def _begin(self, task: Task) -> str:
        secret = number(task.content.partition(" game ")[0])
        if secret is None or not 1 <= secret <= self._spec.largest:
            raise EnvError(f"task {task.index} is no number from 1 to {self._spec.largest}")
        self._secret, self._low, self._high = secret, 1, self._spec.largest
        return self._ask()

    def _play(self, action: str) -> Outcome:
        guess = number(unboxed(action, self._spec.boxed))
        if guess is None:
            reward = self._spec.format_reward
            return Outcome(self._ask(), reward, over=self._spec.format_ends, legal=False, parts={"format": reward})
        if not 1 <= guess <= self._spec.largest:
            return Outcome(self._ask(), legal=False)
        if guess == self._secret:
            return Outcome("", 1.0, over=True, success=True, parts={"found": 1.0})
        if guess < self._secret:
            self._low = max(self._low, guess + 1)
        else:
            self._high = min(self._high, guess - 1)
        near = 0.0
        if self._spec.shaped and self._turns_left == 0:
            near = 1 - abs(guess - self._secret) / (self._spec.largest - 1)
        return Outcome("higher" if guess < self._secret else "lower", near, parts={"near": near})

    def _reference_answer(self) -> str:
        return self._say((self._low + self._high) // 2)

    def _random(self, rng: random.Random) -> str:
        return self._say(rng.randint(1, self._spec.largest))

    def _say(self, guess: int) -> str:
        return f"\\boxed{{{guess}}}" if self._spec.boxed else str(guess)

    def _ask(self) -> str:
        return f"1-{self._spec.largest}?"
