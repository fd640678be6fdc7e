"""A task with several strategies: words to reverse, in letters, capitals or digits."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Mapping
from typing import Annotated, ClassVar

from rolljax.envs.base import Env, EnvSpec, PureEnv, Runs, StepResult
from rolljax.errors import ConfigError, EnvError, Range, check_fields
from rolljax.types import Message, Task

STYLES: Mapping[str, str] = {"letters": "abcdefgh", "capitals": "ABCDEFGH", "digits": "12345678"}
"""The characters of each style, in the order of the letters."""


@dataclasses.dataclass(frozen=True)
class StyledWords(EnvSpec):
    """A word to write backwards in a style: `bad` is `dab` in letters, `DAB` in capitals, `412` in digits.

    The style of a task is drawn by `weights`, and only a hint tells it: up to 8 random characters of the style in front
    of the colon before the word, where a latent prefix will be. A share of the tasks has one. The reward is 1 for the
    answer in the style, and `other` for the answer in another one. The reference answer has the style.
    """

    runs: ClassVar[Runs] = "inline"

    length: Annotated[int, Range(low=1, high=16)] = 3
    """Letters of a word."""
    weights: Mapping[str, float] = dataclasses.field(default_factory=lambda: dict.fromkeys(STYLES, 1.0))
    """Weights of the styles (`STYLES`) of tasks without a hint. With one they are equal."""
    hint_frac: Annotated[float, Range(low=0, high=1)] = 0.0
    """Share of the tasks that have a hint."""
    other: Annotated[float, Range(low=0, below=1)] = 0.0
    """Reward of the right word in another style."""
    seed: int = 0
    """Seed of the tasks."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.weights or set(self.weights) - set(STYLES) or min(self.weights.values()) < 0:
            raise ConfigError(
                f"must be weights of {', '.join(STYLES)}", setting="StyledWords.weights", value=self.weights
            )

    @property
    def name(self) -> str:
        return "styled_words"

    def task(self, index: int) -> Task:
        rng = random.Random(f"{self.seed} {index}")
        word = "".join(rng.choices(STYLES["letters"], k=self.length))
        hinted = rng.random() < self.hint_frac
        weights = dict.fromkeys(STYLES, 1.0) if hinted else self.weights
        style = rng.choices(list(weights), list(weights.values()))[0]
        hint = "".join(rng.choices(STYLES[style], k=rng.randint(1, 8))) if hinted else ""
        return Task(self.name, index, json.dumps([word, style, hint]))

    def category(self, task: Task) -> str:
        return str(json.loads(task.content)[1])

    def reference(self, task: Task) -> str:
        word, style, _ = json.loads(task.content)
        return backwards(word, style)

    def make(self) -> Env:
        return _Episode(self)


class _Episode(PureEnv):
    def __init__(self, spec: StyledWords) -> None:
        self._spec = spec
        self.word = self.style = ""  # empty: no episode is open

    def reset(self, task: Task) -> tuple[Message, ...]:
        self.word, self.style, hint = json.loads(task.content)
        return (Message("user", f"{hint}:{self.word}"),)

    def step(self, action: str) -> StepResult:
        word, own = self._open()
        self.word = self.style = ""
        style = next((name for name in STYLES if action == backwards(word, name)), "")
        right = style == own
        reward = 1.0 if right else self._spec.other if style else 0.0
        written = {f"style_{name}_n": float(style == name) for name in STYLES}
        return StepResult((), reward, True, reward_parts={"score": reward}, success=right, metrics=written)

    def reference_answer(self) -> str:
        return backwards(*self._open())

    def _open(self) -> tuple[str, str]:
        if not self.word:
            raise EnvError("no episode is open: call reset first", stage="step")
        return self.word, self.style


def backwards(word: str, style: str) -> str:
    """Return a word of letters backwards, in a style."""
    return word[::-1].translate(str.maketrans(STYLES["letters"], STYLES[style]))
