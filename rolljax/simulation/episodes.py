"""Tasks, environments and answers of which only lengths and times are known, for the real rollouts to play."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from rolljax.envs.base import StepResult
from rolljax.envs.pool import Episode
from rolljax.envs.pool.episode_runner import Argument, Verb
from rolljax.errors import EnvError
from rolljax.model.tokenizer import Chat
from rolljax.rollout.episodes import Barrier, Rollouts
from rolljax.rollout.start_states import Start
from rolljax.simulation.replica import FIRST_TURN, GONE, SimulatedAnswer, same
from rolljax.simulation.reward_workers import RewardWorkers
from rolljax.simulation.sampler import SIBLINGS, SimulatedSampler
from rolljax.simulation.streaming import StreamTrainer
from rolljax.simulation.timings import Distribution, Timings
from rolljax.types import Completion, FinishReason, Group, Key, Message, Sampled, Task, Trajectory

GROUP, ANSWER, EPISODE = 0, 1, 2
"""Purpose of a random number; part of its address."""
TOKENS, LOGPS = same(np.int32(0)), same(np.float32(0))


def rng(seed: int, *address: int) -> np.random.Generator:
    """Return the random generator of an address: it does not depend on the course of the simulation."""
    return np.random.default_rng((seed % 2**31, *address))


def tokens(number: int) -> np.ndarray:
    """Return this many tokens, without memory; int32 `[P]`."""
    return TOKENS[:number]


class SimulatedTasks:
    """An endless stream of tasks, of which only the number is known, and the domain where there are any."""

    def __init__(self) -> None:
        self._next = 0

    def __iter__(self) -> Iterator[Task]:
        return self

    def __next__(self) -> Task:
        return self.of("")

    def of(self, domain: str) -> Task:
        """Return the next task, of a mixture's domain or without one (empty)."""
        self._next += 1
        return Task(domain or "simulated", self._next - 1, str(self._next - 1))

    def state(self) -> str:
        return str(self._next)

    def restore(self, state: str) -> None:
        self._next = int(state)


class TokenCounts(Chat):
    """A chat whose messages are numbers of tokens."""

    def __init__(self) -> None:
        object.__setattr__(self, "tokenizer", None)

    def __post_init__(self) -> None: ...

    def prompt_ids(self, messages: Sequence[Message]) -> np.ndarray:
        return tokens(sum(int(m.content) for m in messages))

    def delta_ids(self, messages: Sequence[Any], *, closed: bool, **how: Any) -> np.ndarray:
        return self.prompt_ids(messages)

    def text(self, ids: Any, behind: Any) -> str:
        return ""


# ---- environments


@dataclasses.dataclass(frozen=True)
class SimulatedStart:
    """A task."""

    timings: Timings
    """With the lengths of its domain."""
    prompt_tok: int
    turns: Distribution
    """Distribution of the number of turns of the task's episodes."""
    chance: float | None
    """Random number of the task: below `Timings.solved_frac` all answers are right, else all are wrong; None: each
    answer has its own."""


class SimulatedEnvs:
    """Simulated environments for an `EnvPool`: they take time, fail, and give a reward at their end."""

    def __init__(self, timings: Timings, max_turns: int, seed: int) -> None:
        self.timeouts: collections.Counter[str] = collections.Counter()
        self.restarts, self.blame = 0, None
        self.timings, self.max_turns, self.seed = timings, max_turns, seed
        self.opened: collections.Counter[int] = collections.Counter()
        """Episodes of each task."""
        self.rewards = RewardWorkers(timings.rewards)

    def slot(self) -> SimulatedSlot:
        return SimulatedSlot(self)

    @functools.lru_cache(maxsize=4096)  # noqa: B019  # they live as long as their simulation
    def start(self, domain: str, index: int) -> SimulatedStart:
        """Return the start that all episodes of a task share."""
        shared, t = rng(self.seed, GROUP, index), self.timings.of_domain(domain)
        prompt_tok, turns = max(1, round(t.prompt_tok.draw(shared))), t.turns.of_group(shared)
        same, chance = shared.random(2)
        return SimulatedStart(t, prompt_tok, turns, float(chance) if same < t.no_signal_frac else None)

    def close(self) -> None: ...


class SimulatedSlot:
    """One episode."""

    def __init__(self, envs: SimulatedEnvs) -> None:
        self.started_s = asyncio.get_running_loop().time()
        self._envs, self._timings = envs, envs.timings
        self._rng: np.random.Generator
        self._turns = self._turn = 0
        self._step_s: float | None = None
        self._reward = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def call(self, verb: Verb, argument: Argument, limit_s: float) -> asyncio.Future[Any]:
        """Return an environment's answer after its time; an error if that is more than `limit_s`."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        if verb == "close":
            future.set_result(None)
            return future
        began_s = loop.time()

        def answer(at_s: float, value: Any) -> None:
            if at_s - began_s > limit_s:
                self._envs.timeouts[verb] += 1
                at_s, value = began_s + limit_s, EnvError(f"{verb} took more than {limit_s:g} s", stage=verb)
            self._at(at_s, lambda: _settle(future, value))

        if isinstance(argument, Task):
            seconds, value = self._reset(argument)
            answer(began_s + seconds, value)
            return future
        seconds, score_s, result = self._step()
        if score_s and seconds <= limit_s:
            workers = self._envs.rewards
            self._at(began_s + seconds, lambda: answer(workers.score(loop.time(), score_s), result))
        else:
            answer(began_s + seconds, result)
        return future

    def _at(self, at_s: float, what: Callable[[], None]) -> None:
        """Do something at a time; at once if that is now."""
        loop = asyncio.get_running_loop()
        if at_s > loop.time():
            self._timer = loop.call_at(at_s, what)
        else:
            what()

    def discard(self) -> None:
        if self._timer:
            self._timer.cancel()

    def _reset(self, task: Task) -> tuple[float, Any]:
        envs = self._envs
        envs.opened[task.index] += 1
        start = envs.start(task.env, task.index)
        t = self._timings = start.timings
        self._rng = rng(envs.seed, EPISODE, task.index, envs.opened[task.index])
        self._turns = min(envs.max_turns, max(1, round(start.turns.draw(self._rng))))
        chance = self._rng.random() if start.chance is None else start.chance
        self._reward = float(chance < t.solved_frac)
        seconds = t.env.reset_s.draw(self._rng)
        self._step_s = t.env.step_s.draw(self._rng) if t.env.alike else None
        if self._rng.random() < t.env.fail_frac:
            return seconds, EnvError("the environment fails", stage="reset")
        return seconds, (Message("user", str(start.prompt_tok)),)

    def _step(self) -> tuple[float, float, StepResult]:
        """Return the seconds of an action, those of its score, and its result."""
        t = self._timings
        self._turn += 1
        is_last = self._turn >= self._turns
        seconds = t.env.step_s.draw(self._rng) if self._step_s is None else self._step_s
        score_s = t.env.score_s.draw(self._rng) if is_last else 0.0
        told = () if is_last else (Message("user", str(round(t.observation_tok.draw(self._rng)))),)
        reward = self._reward * is_last
        return seconds, score_s, StepResult(told, reward, is_last, success=bool(reward))


def _settle(future: asyncio.Future[Any], value: Any) -> None:
    if future.done():
        return
    if isinstance(value, Exception):
        future.set_exception(value)
    else:
        future.set_result(value)


# ---- answers


@dataclasses.dataclass(frozen=True, eq=False)
class SimulatedPolicy:
    """Policy whose answers have random lengths and take time in the simulated sampler."""

    sampler: SimulatedSampler
    timings: Timings
    limit_tok: int
    max_context: int
    steps_per_dispatch: int
    seed: int
    started: dict[tuple[int, int], GroupSpan]
    """The last start of each group, by stream and prompt index; groups that started first are served first."""
    before: dict[Key, tuple[int, int, float]] = dataclasses.field(default_factory=dict)
    """The replica of each episode's last answer, the context it had there, and when."""

    @functools.lru_cache(maxsize=4096)  # noqa: B019  # one policy lives as long as its simulation
    def _lengths(self, stream: int, prompt_index: int) -> Distribution:
        """Return the distribution of the answer lengths of a group."""
        lengths = self.timings.of_domain(self.started[stream, prompt_index].domain).answer_tok
        return lengths.of_group(rng(self.seed, GROUP, stream, prompt_index))

    @property
    def version(self) -> int:
        return self.sampler.version

    async def act(
        self, prompt_ids: np.ndarray, episode: Episode, key: Key, turn: int, min_version: int = 0
    ) -> Completion:
        group = (key.stream, key.prompt_index)
        span = self.started[group]
        own = rng(self.seed, ANSWER, key.stream, key.prompt_index, key.sibling, turn)
        drawn = round(self._lengths(*group).draw(own))
        prompt_tok, (home, known_tok, at_s) = len(prompt_ids), self.before.get(key, (FIRST_TURN, 0, 0.0))
        if home >= 0 and not self.sampler.has_cache(home, at_s):
            home = GONE
        limit = max(1, min(self.limit_tok, self.max_context - prompt_tok))
        loop = asyncio.get_running_loop()
        answer_tok, per = min(max(1, drawn), limit), self.steps_per_dispatch
        answer = SimulatedAnswer(
            priority=span.order * SIBLINGS + key.sibling,
            group=group,
            prompt_tok=prompt_tok,
            new_tok=max(0, prompt_tok - known_tok),
            answer_tok=answer_tok,
            num_steps=-(-answer_tok // per) * per,
            done=loop.create_future(),
            asked_s=loop.time(),
            home=home,
        )
        await self.sampler.generate(answer, sibling=key.sibling, min_version=span.version, tag=span.domain)
        self.before[key] = answer.replica, prompt_tok + answer_tok, answer.ended_s
        reason: FinishReason = "stop" if drawn <= limit else "length" if limit == self.limit_tok else "context"
        versions = np.concatenate([*answer.kept, answer.versions]) if answer.kept else answer.versions
        said = Sampled.of(tokens(answer_tok), LOGPS[:answer_tok], versions)
        return Completion(said, reason, answer.started_s - answer.asked_s, answer.ended_s - answer.started_s)


@dataclasses.dataclass(frozen=True)
class GroupSpan:
    """A group from its start to its end; end_s is infinite if it was cancelled."""

    order: int
    """Number of groups that started before."""
    stream: int
    prompt_index: int
    domain: str
    version: int
    """Policy version at the start of the group."""
    start_s: float
    end_s: float


@dataclasses.dataclass(frozen=True, eq=False)
class ObservedRollouts(Rollouts):
    """The real rollouts, with a record of their groups; `sampler` knows the number of running episodes."""

    sampler: SimulatedSampler = dataclasses.field(kw_only=True)
    started: dict[tuple[int, int], GroupSpan] = dataclasses.field(kw_only=True)
    spans: list[GroupSpan] = dataclasses.field(kw_only=True)
    stream: StreamTrainer | None = dataclasses.field(kw_only=True, default=None)

    async def group(
        self,
        task: Task,
        *,
        stream: int,
        prompt_index: int,
        group_size: int,
        spare: int = 0,
        start: Start | None = None,
        barrier: Barrier | None = None,
    ) -> Group:
        clock = asyncio.get_running_loop().time
        place, version = len(self.spans), self.sampler.version
        span = GroupSpan(place, stream, prompt_index, task.env, version, clock(), float("inf"))
        self.spans.append(span)
        self.started[stream, prompt_index] = span
        group = await super().group(
            task,
            stream=stream,
            prompt_index=prompt_index,
            group_size=group_size,
            spare=spare,
            start=start,
            barrier=barrier,
        )
        self.spans[place] = dataclasses.replace(span, end_s=clock())
        if self.stream:
            self.stream.ends[prompt_index] = clock()
        return group

    async def trajectory(
        self, task: Task, key: Key, start: Start | None = None, barrier: Barrier | None = None, version: int = 0
    ) -> Trajectory:
        beside = self.stream.episode() if self.stream else contextlib.nullcontext()
        with self.sampler.episode(), beside:
            return await super().trajectory(task, key, start, barrier, version)
