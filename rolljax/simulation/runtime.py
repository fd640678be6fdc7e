"""A run's parts that only take time: runtime, trainer and recorder for the loop on a virtual clock."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import numpy as np

from rolljax.concurrency.waits import Watchdog
from rolljax.envs.pool import EnvPool
from rolljax.errors import ConfigError
from rolljax.recipe import Phase, Recipe
from rolljax.rollout.episodes import Policy, Rollouts
from rolljax.rollout.mixture_rules import Perplexities
from rolljax.run.consumed import ConsumedStep
from rolljax.run.progress import RunProgress
from rolljax.run.step_metrics import StepGroups, StepReport, token_ages
from rolljax.simulation.coserving import CoServing
from rolljax.simulation.episodes import GroupSpan, ObservedRollouts, SimulatedEnvs, SimulatedPolicy, TokenCounts
from rolljax.simulation.paths import push_s
from rolljax.simulation.sampler import SimulatedSampler
from rolljax.simulation.streaming import StreamTrainer
from rolljax.simulation.timings import ClusterTimings, Timings
from rolljax.trainer.algorithms.base import AlgorithmState
from rolljax.trainer.phase_trainer import TrainedStep
from rolljax.types import EVAL_STREAM, Group, Task, Trajectory

T = TypeVar("T")
P = ParamSpec("P")


@dataclasses.dataclass(frozen=True)
class Span:
    """An interval of the trainer's time: update, publish."""

    name: str
    start_s: float
    end_s: float


class SimulatedClock:
    """The loop's clock: waits of any length, of which the longest is kept with its name, and calls that take time.

    A blocking call `spend`s its seconds, and the caller waits for that time while the event loop keeps running.
    """

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.longest_s, self.name = 0.0, ""
        self._spent_s = 0.0

    def spend(self, name: str, seconds: float) -> None:
        """Set the duration of the current call."""
        now = asyncio.get_running_loop().time()
        self.spans.append(Span(name, now, now + seconds))
        self._spent_s += seconds

    async def call(self, blocking: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        result = blocking(*args, **kwargs)
        seconds, self._spent_s = self._spent_s, 0.0
        if seconds:
            await asyncio.sleep(seconds)
        return result

    async def within(self, work: Awaitable[T], name: str, deadline_s: float, *, interruptible: bool = True) -> T:
        clock = asyncio.get_running_loop().time
        start = clock()
        result = await work
        if clock() - start > self.longest_s:
            self.longest_s, self.name = clock() - start, name
        return result

    def check_stop(self) -> None:
        """Do nothing: a simulation is not stopped."""


class SimulatedPlayer:
    """The loop's player: episodes that take time, without a model."""

    def __init__(self, recipe: Recipe, timings: Timings, sampler: SimulatedSampler) -> None:
        self.envs = SimulatedEnvs(timings, recipe.env.max_turns, recipe.seed)
        self.pool = EnvPool(recipe.pool, recipe.env, self.envs)
        self.agents = None
        self.groups: list[GroupSpan] = []
        self._recipe, self._timings, self._sampler = recipe, timings, sampler
        self._started: dict[tuple[int, int], GroupSpan] = {}
        stream, kv_tok = timings.stream, timings.engine.kv_tok
        self.stream = StreamTrainer(stream, sampler, kv_tok) if stream else None

    def actor(self, phase: Phase) -> Policy:
        recipe = self._recipe
        limits = (recipe.max_answer_tok, recipe.sampler.max_context, recipe.sampler.steps_per_dispatch)
        return SimulatedPolicy(self._sampler, self._timings, *limits, recipe.seed, self._started)

    def rollouts(self, policy: Policy, *, hash_observations: bool = False) -> Rollouts:
        r = self._recipe
        return ObservedRollouts(
            self.pool,
            TokenCounts(),
            policy,
            r.env.max_turns,
            r.sampler.max_context,
            r.max_answer_tok,
            r.rollout,
            sampler=self._sampler,
            started=self._started,
            spans=self.groups,
            stream=self.stream,
        )

    def reward_row(self, groups: Sequence[Group]) -> dict[str, float]:
        """Return no metrics: nothing is scored here."""
        return {}

    def guide(self, phase: Phase) -> None:
        """Return none: a simulation knows no latent prefixes."""

    def start_curriculum(self, phase: Phase, progress: RunProgress) -> None:
        """Return none: a simulation knows no start states."""

    async def evaluate(self, step: int, *, interruptible: bool = True) -> list[Trajectory]:
        """Play held-out tasks in the midst of a phase; those at its ends are left out."""
        if not any(0 < step < p.steps for p in self._recipe.phases):
            return []
        number = self._recipe.evaluation.tasks
        rollouts = self.rollouts(self.actor(self._recipe.phases[0]))
        tasks = [Task("held out", 10**9 + i, str(i)) for i in range(number)]
        groups = (
            rollouts.group(t, stream=EVAL_STREAM, prompt_index=step * number + i, group_size=1)
            for i, t in enumerate(tasks)
        )
        return [t for group in await asyncio.gather(*groups) for t in group.trajectories]


class SimulatedRuntime:
    """The parts of a run without weights and processes: the loop's sampler, player, clock and channel (`publish`)."""

    def __init__(self, recipe: Recipe, timings: Timings) -> None:
        self.recipe, self.timings, self.clock = recipe, timings, SimulatedClock()
        if timings.stream:
            check_streaming(recipe, timings)
        group = max(p.group_size for p in recipe.phases)
        settings = recipe.sampler
        self.sampler = SimulatedSampler(timings, settings.slots, group, settings.steps_per_dispatch, recipe.seed)
        self.player = SimulatedPlayer(recipe, timings, self.sampler)
        served = timings.serving
        self.serving = [
            CoServing(replica, self.sampler.fleet, timings.engine, served, recipe.seed)
            for replica in self.sampler.replicas
            if served
        ]
        self.beside = [asyncio.get_running_loop().create_task(s.run()) for s in self.serving]
        """Tasks that run at the same time as the loop."""
        network = timings.network
        self._publish_s = push_s(network, timings.engine.replicas) if network else timings.trainer.publish_s

    def publish(self, version: int) -> dict[str, float]:
        seconds, pause_s = self._publish_s, self.timings.trainer.pause_s
        if version == self.sampler.version:
            return {}
        self.clock.spend("publish", seconds)
        recompute = self.recipe.sampler.on_publish == "recompute"

        def swap() -> None:
            self.sampler.publish(version, pause_s=pause_s, recompute=recompute)

        if seconds:
            asyncio.get_running_loop().call_later(seconds, swap)
        else:
            swap()
        return {}

    def sleep(self, phase: Phase) -> None:
        """Do nothing: a simulation has no memory to free, and freeing takes no time."""

    def parts(
        self,
    ) -> tuple[SimulatedPlayer, SimulatedSampler, SimulatedTrainer, SimulatedRuntime, SimulatedClock]:
        """Return the loop's player, sampler, trainer, channel and clock."""
        return self.player, self.sampler, SimulatedTrainer(self), self, self.clock


class SimulatedTrainer:
    """The loop's trainer, which trains nothing in the time that training would take."""

    def __init__(self, runtime: SimulatedRuntime) -> None:
        self._runtime, self._timings = runtime, runtime.timings

    def step(self, groups: Sequence[Sequence[Trajectory]], algorithm_state: AlgorithmState, step: int) -> TrainedStep:
        t, stream = self._timings.trainer, self._runtime.player.stream
        packed = {group[0].key.prompt_index: packed_tok(group) for group in groups}
        tokens = sum(packed.values())
        seconds = t.step_s + t.token_s * tokens
        if stream:
            seconds -= stream.end_step({index: t.token_s * tok for index, tok in packed.items()})
        self._runtime.clock.spend("update", seconds)
        if self._timings.shared_devices:
            self._runtime.sampler.pause(seconds)
        same = [len({t.reward for t in g}) == 1 for g in groups]
        row = {"train/tokens_n": float(tokens), "reward/zero_std_frac": float(np.mean(same)) if same else 0.0}
        return TrainedStep({}, row, len(groups))

    def open_phase(self, progress: RunProgress) -> None: ...

    def compile_ahead(self) -> None: ...

    def perplexities(self, groups: Mapping[str, Sequence[Group]]) -> dict[str, Perplexities]:
        raise NotImplementedError("a simulation has no models")


def check_streaming(recipe: Recipe, timings: Timings) -> None:
    """Check that devices of the sampler can train before a step has ended.

    Raises:
      ConfigError: the trainer has devices of its own, steps overlap anyway, or replicas get lost.
    """
    if not timings.shared_devices:
        raise ConfigError("needs devices that sample and train", setting="Timings.shared_devices", value=False)
    if any(p.async_ratio for p in recipe.phases):
        ratios = [p.async_ratio for p in recipe.phases]
        raise ConfigError("must be 0 where a step streams", setting="Phase.async_ratio", value=ratios)
    if timings.cluster != ClusterTimings() or timings.engine.scheduling == "group":
        raise ConfigError(
            "goes with replicas that are alike and not lost, and with scheduling = 'queue'",
            setting="Timings.stream",
            value=timings.stream,
        )


def packed_tok(group: Sequence[Trajectory]) -> int:
    """Return the tokens that a group takes in packed rows, where siblings share their prompt."""
    shared = max((len(t.turns[0].prompt_ids) for t in group), default=0)
    own = sum(len(turn.prompt_ids) + len(turn.tokens) for t in group for turn in t.turns)
    return own - sum(len(t.turns[0].prompt_ids) for t in group) + shared


class RecordedAlerts:
    """Keeps the loop's warnings instead of showing them."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def warn(self, text: str) -> None:
        self.texts.append(text)

    def wait(self, what: str) -> None: ...


class SimulatedRecorder:
    """Keeps in memory the data that a run would write: metrics rows in `rows`, token ages in `ages`, trained groups in
    `trained`."""

    def __init__(self, runtime: SimulatedRuntime) -> None:
        self.progress, self.console, self._runtime = RunProgress(), RecordedAlerts(), runtime
        self.rows: list[dict[str, Any]] = []
        self.ages: Counter[int] = Counter()
        """Tokens that were trained at each age, in versions."""
        self.trained: dict[tuple[int, int], float] = {}
        """When each group, by stream and prompt index, was trained."""

    @contextlib.contextmanager
    def keeping_crashes(self) -> Iterator[None]:
        yield

    def start_step(self) -> StepReport:
        return StepReport(Watchdog(), asyncio.get_running_loop().time)

    def commit(self, phase: Phase, step: StepGroups, logged: ConsumedStep, report: StepReport) -> None:
        groups, version, save_s = step.all, self.progress.version - 1, self._runtime.timings.trainer.save_s
        self._runtime.clock.spend("save", save_s)
        now = asyncio.get_running_loop().time() + save_s
        for group in groups:
            self.trained[self.progress.phase, group.prompt_index] = now
            self.ages.update(dict(enumerate(token_ages(group.trajectories, version).tolist())))
        report.add("time/step_s", report.total_s() + save_s)
        report.add("time/save_s", save_s)
        row = report.row()
        sampled = row["rollout/len_tok"] * len(groups) * phase.group_size
        row["tput/sample_tok_s"] = sampled / max(row["time/rollout_s"], 1e-9)
        place = {"step": self.progress.total_steps, "phase": phase.name, "end_s": now, "sampled_tok": sampled}
        self.rows.append(place | row)

    def start_phase(self, phase: Phase) -> None: ...
    def save(self) -> None: ...
    def put_evaluation(self, name: str, trajectories: Sequence[Trajectory]) -> None: ...
    def show_evaluation(self, trajectories: Sequence[Trajectory]) -> None: ...
    def end_phase(self, phase: Phase) -> None: ...
