"""An environment that takes its time, to measure asynchrony with: seconds per call are drawn, some episodes hang."""

import collections
import dataclasses
import random
import time
from typing import ClassVar

from rolljax.envs.base import Env, EnvSpec, Runs, StepResult
from rolljax.types import Message, Task

BEGUN: collections.Counter[int] = collections.Counter()
"""Episodes of each task so far, by its index: the n-th takes as long in every run."""


@dataclasses.dataclass(frozen=True)
class Latency(EnvSpec):
    """Says the same after every answer, `turns` times; rewards answers whose bytes sum up to an even number.

    mean_s, std_s: of the normal distribution that seconds per call are drawn from (none are below 0). hang_frac: share
      of the episodes of which one call takes `hang_s` more.
    """

    runs: ClassVar[Runs] = "thread"
    turns: int = 5
    mean_s: float = 1.0
    std_s: float = 1.0
    hang_frac: float = 0.01
    hang_s: float = 30.0

    @property
    def name(self) -> str:
        return "latency"

    @property
    def max_turns(self) -> int:
        return self.turns

    def task(self, index: int) -> Task:
        return Task(self.name, index, f"{index}?")

    def make(self) -> Env:
        return LatencyEnv(self)


class LatencyEnv(Env):
    def __init__(self, spec: Latency) -> None:
        self._spec, self._rng, self._turn, self._hangs_at = spec, random.Random(), 0, -1

    def reset(self, task: Task) -> tuple[Message, ...]:
        BEGUN[task.index] += 1
        self._turn, self._rng = 0, random.Random(f"{task.index}/{BEGUN[task.index]}")
        hangs = self._rng.random() < self._spec.hang_frac
        self._hangs_at = self._rng.randrange(self._spec.turns) if hangs else -1
        return (Message("user", task.content),)

    def step(self, action: str) -> StepResult:
        hang_s = self._spec.hang_s * (self._turn == self._hangs_at)
        time.sleep(max(0.0, self._rng.gauss(self._spec.mean_s, self._spec.std_s)) + hang_s)
        self._turn += 1
        even = sum(action.encode()) % 2 == 0
        done = self._turn == self._spec.turns
        said = () if done else (Message("user", "?"),)
        return StepResult(said, even / self._spec.turns, terminated=done, success=even)

    def reference_answer(self) -> str:
        return "b"
