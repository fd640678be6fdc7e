"""What a reward is. A `RewardConfig` is a setting, a frozen dataclass; `open` makes the `Scorer` of it.

A run scores every trajectory when its episode has ended, beside all other work, and trains on what comes back. Rewards
are composed of rewards (`compose.py`); `Recipe.reward` is the outermost.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from rolljax.types import Task, Trajectory

if TYPE_CHECKING:
    from rolljax.envs.base import EnvSpec


@dataclasses.dataclass(frozen=True, slots=True)
class Reward:
    """What an episode is worth.

    value: what is trained on. parts: numbers by name that it was made of, for the record (they need not add up to it).
    success: whether the task is solved; None: this reward does not say, and what the environment says stays.
    by_turn: what of the value belongs to each turn, in their order; the rest belongs to the last one. Empty: all does.
    """

    value: float
    parts: Mapping[str, float] = dataclasses.field(default_factory=dict)
    success: bool | None = None
    by_turn: tuple[float, ...] = ()


class Scorer(Protocol):
    """A reward that is open. Many calls are under way at a time, on one event loop; none may block it."""

    async def score(self, task: Task, trajectory: Trajectory) -> Reward:
        """The reward of an episode that did not fail (`trajectory.status` is ok or truncated).

        Raises:
          InfraError: the machine, a judge or a server gave no verdict, after the retries of the settings: the
            trajectory has failed then and takes no part in training, which is never a wrong answer.
          EnvError: the reward itself is broken (its code raised, its value is no finite number).
        """

    def counts(self) -> Mapping[str, int]:
        """`calls`, `requests`, `answers`, `cached` (answers from a cache), and every fault under its kind, since it was
        opened; 0 may be left out."""

    async def close(self) -> None:
        """Let go of what it holds."""


@dataclasses.dataclass(frozen=True)
class Surroundings:
    """What a reward may look at when it is opened.

    env: whose tasks are scored: it knows the recorded answers. seed: of the run. cache_dir: a folder where verdicts may
      be kept for a run that goes on; empty: nowhere.
    """

    env: EnvSpec
    seed: int = 0
    cache_dir: str = ""


class RewardConfig(abc.ABC):
    """Settings of a reward. Subclasses are frozen dataclasses."""

    @abc.abstractmethod
    def open(self, around: Surroundings) -> Scorer:
        """The reward, ready to score.

        Raises:
          ConfigError: it cannot work here: the environment records no answers, a folder or server is not there.
        """

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """A short word for `reward_parts` and messages."""

    @property
    def is_free(self) -> bool:
        """Whether scoring takes no more than this machine's processor: such a reward is rehearsed before a run."""
        return False

    def check(self, around: Surroundings) -> None:  # noqa: B027  # most can be seen when they are opened
        """Look for what is wrong before anything is allocated, loaded or asked.

        Raises:
          ConfigError: it cannot work here.
        """
