"""Protocols of the loop's parts, in a run (`Runtime`, `Recorder`) or a simulation, and the types that they exchange."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, ParamSpec, Protocol, TypeVar

from rolljax.envs.pool import Pool
from rolljax.recipe import Phase, Recipe
from rolljax.rollout.episodes import Rollouts
from rolljax.rollout.mixture_rules import Perplexities
from rolljax.rollout.policies import Policy
from rolljax.rollout.starts import StartCurriculum
from rolljax.run.consumed import ConsumedStep
from rolljax.run.progress import RunProgress
from rolljax.run.step_metrics import StepTimer
from rolljax.sampler.request import SamplerStats
from rolljax.threads.watchdog import Watchdog
from rolljax.trainer.algorithms.base import Carry
from rolljax.trainer.phase_trainer import TrainedStep
from rolljax.types import Group, Key, Task, TokenColumn, Trajectory

T = TypeVar("T")
P = ParamSpec("P")


@dataclasses.dataclass(frozen=True)
class StepGroups:
    """The groups of a step.

    trained: groups to train, in the order of their draws. start_ages: their ages in versions. dropped: groups without a
    signal, dropped since the step before. waits_s: seconds between each group's completion and this step. logged: the
    line of the log that this step was read from; None if its groups were played.
    """

    trained: list[Group]
    start_ages: list[int]
    dropped: list[Group]
    waits_s: list[float]
    logged: ConsumedStep | None = None

    def with_columns(self, columns: Mapping[Key, Mapping[str, TokenColumn]]) -> StepGroups:
        """Return the same groups with training's numbers for each token, for the record."""
        return dataclasses.replace(self, trained=[_with_columns(g, columns) for g in self.trained])

    @property
    def all(self) -> list[Group]:
        """Every group that was completed for the step."""
        return self.trained + self.dropped


def _with_columns(group: Group, columns: Mapping[Key, Mapping[str, TokenColumn]]) -> Group:
    trajectories = (dataclasses.replace(t, trained=columns.get(t.key)) for t in group.trajectories)
    return dataclasses.replace(group, trajectories=tuple(trajectories))


class TaskSource(Protocol):
    """Tasks of domains, from a position that can be saved; see `envs.tasks.open_stream`."""

    def of(self, domain: str) -> Task: ...
    def state(self) -> str: ...
    def restore(self, state: str) -> None: ...


class LoopTrainer(Protocol):
    """The methods of the trainer that the loop calls; see `run.trainer.Trainer`."""

    def open_phase(self, progress: RunProgress) -> None: ...
    def step(self, groups: Sequence[Sequence[Trajectory]], carry: Carry, step: int) -> TrainedStep: ...
    def perplexities(self, groups: Mapping[str, Sequence[Group]]) -> dict[str, Perplexities]: ...


class LoopSampler(Protocol):
    """The methods of the sampler that the loop calls; see `sampler.client.Sampler`."""

    @property
    def stats(self) -> SamplerStats: ...
    def hold(self) -> Callable[[], None]: ...


class Waits(Protocol):
    """Waits with a name and a deadline; see `threads.event_loop.EventLoop`."""

    async def within(self, work: Awaitable[T], name: str, deadline_s: float, *, interruptible: bool = True) -> T: ...


class LoopRuntime(Protocol):
    """Sampler, environments and the event loop they share; see `runtime.Runtime`."""

    @property
    def recipe(self) -> Recipe: ...
    @property
    def watchdog(self) -> Watchdog: ...
    @property
    def sampler(self) -> LoopSampler: ...
    @property
    def pool(self) -> Pool: ...
    @property
    def agents(self) -> Any: ...
    @property
    def event_loop(self) -> Waits: ...

    async def call(self, blocking: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T: ...
    def check_stop(self) -> None: ...
    def publish(self, version: int) -> dict[str, float]: ...
    def sleep(self, phase: Phase) -> None: ...
    def actor(self, phase: Phase) -> Policy: ...
    def rollouts(self, policy: Policy, *, hash_observations: bool = False) -> Rollouts: ...
    def reward_row(self, groups: Sequence[Group]) -> dict[str, float]: ...
    def start_curriculum(self, phase: Phase, progress: RunProgress) -> StartCurriculum | None: ...
    async def evaluate(self, step: int, *, interruptible: bool = True) -> list[Trajectory]: ...


class StepSource(Protocol):
    """Where the groups of steps come from; see `phase_rollouts.PhaseRollouts` and `replay.ReplayedRollouts`."""

    def has_step(self) -> bool: ...
    async def measure(self, trainer: LoopTrainer) -> None: ...
    def start(self, version: int) -> None: ...
    async def take(self, version: int) -> StepGroups: ...
    def end_step(self, step: StepGroups) -> tuple[dict[str, float], ConsumedStep]: ...


class LoopConsole(Protocol):
    """What the loop tells a person."""

    def warn(self, text: str) -> None: ...
    def wait(self, what: str) -> None: ...


class LoopRecorder(Protocol):
    """Writes and shows the results of a run, step by step; see `recorder.Recorder`."""

    @property
    def progress(self) -> RunProgress: ...
    @property
    def console(self) -> LoopConsole: ...

    def start_phase(self, phase: Phase) -> None: ...
    def keeping_crashes(self) -> contextlib.AbstractContextManager[None]: ...
    def warn(self, groups: Sequence[Group]) -> None: ...
    def check_alive(self, groups: Sequence[Group]) -> None: ...
    def commit(
        self, phase: Phase, step: StepGroups, logged: ConsumedStep, row: dict[str, float], timer: StepTimer
    ) -> None: ...
    def save(self) -> None: ...
    def put_evaluation(self, name: str, trajectories: Sequence[Trajectory]) -> None: ...
    def show_evaluation(self, trajectories: Sequence[Trajectory]) -> None: ...
    def end_phase(self, phase: Phase) -> None: ...
