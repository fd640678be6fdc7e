"""The interface of rewards. A `RewardConfig` is a frozen dataclass of settings; its `open` makes the `Scorer`.

A run scores every trajectory when its episode has ended, while other episodes continue, and trains on the result.
Rewards can be composed of other rewards (`compose.py`); `Recipe.reward` is the outermost.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rolljax.judging.calls import CallLimits, Calls
from rolljax.judging.prompts import digest
from rolljax.storage.journal import Journal
from rolljax.types import Task, Trajectory

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from rolljax.envs.base import EnvSpec
    from rolljax.model.tokenizer import Chat
    from rolljax.rewards.row_scores import TrainedValue


@dataclasses.dataclass(frozen=True, slots=True)
class Reward:
    """The reward of an episode."""

    value: float
    """The number to train on."""
    parts: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Named numbers it was computed from, for the record (they need not sum to it)."""
    success: bool | None = None
    """Whether the task is solved. None: this reward does not decide, and the environment's verdict stays."""
    by_turn: tuple[float, ...] = ()
    """The share of the value that belongs to each turn, in order. The last turn gets the rest; empty: everything."""


class Scorer(Protocol):
    """An open reward. Many calls run concurrently on one event loop; none may block it."""

    async def score(self, task: Task, trajectory: Trajectory) -> Reward:
        """Return the reward of an episode that did not fail (`trajectory.status` is ok or truncated).

        Raises:
          InfraError: the machine, a judge or a server gave no verdict after the configured retries. The
            trajectory then counts as failed and is not trained on; it never counts as a wrong answer.
          EnvError: the reward itself is broken (its code raised, its value is no finite number).
        """

    def counts(self) -> Mapping[str, int]:
        """Return the counts since opening: `calls`, `requests`, `answers`, `cached` (answers from a cache), and every
        fault under its kind. Counts of 0 may be missing."""

    async def close(self) -> None:
        """Release all resources."""


class TrainedModels(Protocol):
    """Reward models that runs have trained."""

    def check(self, phase: str, run: str) -> int:
        """Return the index of a phase of this run that trains a reward model; -1 for a finished `run`.

        Raises:
          ConfigError: there is no such phase, or that run has trained none.
        """

    def load(self, mesh: Mesh, phase: str, run: str) -> TrainedValue:
        """Return the reward model that a phase of this run had trained when the phase ended, or the one that the
        finished `run` trained.

        Raises:
          CheckpointError: it is not there, or damaged.
        """


@dataclasses.dataclass(frozen=True)
class RewardContext:
    """The surroundings a reward can use when it is opened."""

    env: EnvSpec
    """The environment whose tasks are scored; it has the reference answers."""
    seed: int = 0
    """Random seed of the run."""
    cache_dir: str = ""
    """Folder that keeps verdicts for a resumed run; empty: verdicts are not kept."""
    chat: Chat | None = None
    """The policy's tokenizer."""
    trained: TrainedModels | None = None
    """Reward models of runs; None: outside of a run."""

    def calls(self, name: str, identity: str, limits: CallLimits) -> Calls:
        """Return the calls of a reward, with the answers that `cache_dir` has of earlier ones. See `Calls`."""
        path = Path(self.cache_dir) / f"{name}-{digest(identity)[:16]}.jsonl" if self.cache_dir else None
        return Calls(name, identity, limits, Journal(path))


class RewardConfig(abc.ABC):
    """Settings of a reward. Subclasses are frozen dataclasses."""

    @abc.abstractmethod
    def open(self, around: RewardContext) -> Scorer:
        """Open the reward.

        Raises:
          ConfigError: it cannot work here: the environment has no reference answers, a folder or server is missing.
        """

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """Return a short name for `reward_parts` and messages."""

    @property
    def is_free(self) -> bool:
        """Return whether scoring needs only this machine's CPU. Such a reward is rehearsed before a run."""
        return False

    def check(self, around: RewardContext) -> None:  # noqa: B027  # most can be seen when they are opened
        """Check the settings before anything is allocated, loaded or requested.

        Raises:
          ConfigError: the reward cannot work here.
        """
