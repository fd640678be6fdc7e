"""Tasks, environments and answers of which only lengths and times are known, for the real rollouts to play."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from rolljax.envs.base import Action, StepResult
from rolljax.envs.pool import Episode
from rolljax.envs.pool.episode_runner import Verb
from rolljax.errors import EnvError
from rolljax.model.tokenizer import Chat
from rolljax.rollout.episodes import Barrier, Rollouts
from rolljax.rollout.start_states import Start
from rolljax.simulation.replica import SimulatedAnswer
from rolljax.simulation.sampler import SimulatedSampler
from rolljax.simulation.timings import Distribution, Timings
from rolljax.types import Completion, FinishReason, Group, Key, Message, Sampled, Task, Trajectory

GROUP, ANSWER, EPISODE = 0, 1, 2
"""Purpose of a random number; part of its address."""


def rng(seed: int, *address: int) -> np.random.Generator:
    """Return the random generator of an address: it does not depend on the course of the simulation."""
    return np.random.default_rng((seed % 2**31, *address))


def tokens(number: int) -> np.ndarray:
    """Return this many tokens, without memory; int32 `[P]`."""
    return np.broadcast_to(np.int32(0), number)


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

    def slot(self) -> SimulatedSlot:
        return SimulatedSlot(self)

    @functools.lru_cache(maxsize=4096)  # noqa: B019  # they live as long as their simulation
    def start(self, index: int) -> SimulatedStart:
        """Return the start that all episodes of a task share."""
        shared, t = rng(self.seed, GROUP, index), self.timings
        prompt_tok, turns = max(1, round(t.prompt_tok.draw(shared))), t.turns.of_group(shared)
        same, chance = shared.random(2)
        return SimulatedStart(prompt_tok, turns, float(chance) if same < t.no_signal_frac else None)

    def close(self) -> None: ...


class SimulatedSlot:
    """One episode."""

    def __init__(self, envs: SimulatedEnvs) -> None:
        self.started_s = asyncio.get_running_loop().time()
        self._envs, self._timings = envs, envs.timings
        self._rng = rng(envs.seed)
        self._turns = self._turn = 0
        self._step_s: float | None = None
        self._reward = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def call(self, verb: Verb, argument: Task | Action | None, limit_s: float) -> asyncio.Future[Any]:
        """Return an environment's answer after its time; an error if that is more than `limit_s`."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        if verb == "close":
            future.set_result(None)
            return future
        seconds, value = self._reset(argument) if isinstance(argument, Task) else self._step()
        if seconds > limit_s:
            self._envs.timeouts[verb] += 1
            seconds, value = limit_s, EnvError(f"{verb} took more than {limit_s:g} s", stage=verb)
        if seconds:
            self._timer = loop.call_later(seconds, _settle, future, value)
        else:
            _settle(future, value)
        return future

    def discard(self) -> None:
        if self._timer:
            self._timer.cancel()

    def _reset(self, task: Task) -> tuple[float, Any]:
        envs, t = self._envs, self._timings
        envs.opened[task.index] += 1
        start = envs.start(task.index)
        self._rng = rng(envs.seed, EPISODE, task.index, envs.opened[task.index])
        self._turns = min(envs.max_turns, max(1, round(start.turns.draw(self._rng))))
        chance = self._rng.random() if start.chance is None else start.chance
        self._reward = float(chance < t.solved_frac)
        seconds = t.env.reset_s.draw(self._rng)
        self._step_s = t.env.step_s.draw(self._rng) if t.env.alike else None
        if self._rng.random() < t.env.fail_frac:
            return seconds, EnvError("the environment fails", stage="reset")
        return seconds, (Message("user", str(start.prompt_tok)),)

    def _step(self) -> tuple[float, StepResult]:
        t = self._timings
        self._turn += 1
        is_last = self._turn >= self._turns
        seconds = t.env.step_s.draw(self._rng) if self._step_s is None else self._step_s
        seconds += t.env.score_s.draw(self._rng) if is_last else 0.0
        told = () if is_last else (Message("user", str(round(t.observation_tok.draw(self._rng)))),)
        reward = self._reward * is_last
        return seconds, StepResult(told, reward, is_last, success=bool(reward))


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
    order: dict[tuple[int, int], int]
    """Order in which groups started, by stream and prompt index; groups that started first are served first."""
    before: dict[Key, tuple[int, int]] = dataclasses.field(default_factory=dict)
    """The replica of each episode's last answer, and the context it has there."""

    @functools.lru_cache(maxsize=4096)  # noqa: B019  # one policy lives as long as its simulation
    def _lengths(self, stream: int, prompt_index: int) -> Distribution:
        """Return the distribution of the answer lengths of a group."""
        return self.timings.answer_tok.of_group(rng(self.seed, GROUP, stream, prompt_index))

    async def act(self, prompt_ids: np.ndarray, episode: Episode, key: Key, turn: int) -> Completion:
        group = (key.stream, key.prompt_index)
        own = rng(self.seed, ANSWER, key.stream, key.prompt_index, key.sibling, turn)
        drawn = round(self._lengths(*group).draw(own))
        prompt_tok, (home, known_tok) = len(prompt_ids), self.before.get(key, (-1, 0))
        limit = max(1, min(self.limit_tok, self.max_context - prompt_tok))
        loop = asyncio.get_running_loop()
        answer_tok, per = min(max(1, drawn), limit), self.steps_per_dispatch
        answer = SimulatedAnswer(
            priority=(self.order[group], key.sibling),
            group=group,
            prompt_tok=prompt_tok,
            new_tok=max(0, prompt_tok - known_tok),
            answer_tok=answer_tok,
            num_steps=-(-answer_tok // per) * per,
            done=loop.create_future(),
            asked_s=loop.time(),
            home=home,
        )
        await self.sampler.generate(answer)
        self.before[key] = answer.replica, prompt_tok + answer.answer_tok
        reason: FinishReason = "stop" if drawn <= limit else "length" if limit == self.limit_tok else "context"
        logp = np.broadcast_to(np.float32(0), answer.answer_tok)
        said = Sampled.of(tokens(answer.answer_tok), logp, answer.versions)
        return Completion(said, reason, answer.started_s - answer.asked_s, answer.ended_s - answer.started_s)


@dataclasses.dataclass(frozen=True)
class GroupSpan:
    """A group from its start to its end; end_s is infinite if it was cancelled."""

    stream: int
    prompt_index: int
    version: int
    """Policy version at the start of the group."""
    start_s: float
    end_s: float


@dataclasses.dataclass(frozen=True, eq=False)
class ObservedRollouts(Rollouts):
    """The real rollouts, with a record of their groups; `sampler` knows the number of running episodes."""

    sampler: SimulatedSampler = dataclasses.field(kw_only=True)
    order: dict[tuple[int, int], int] = dataclasses.field(kw_only=True)
    spans: list[GroupSpan] = dataclasses.field(kw_only=True)

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
        self.order[stream, prompt_index] = len(self.spans)
        place = len(self.spans)
        span = GroupSpan(stream, prompt_index, self.sampler.version, clock(), float("inf"))
        self.spans.append(span)
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
        return group

    async def trajectory(
        self, task: Task, key: Key, start: Start | None = None, barrier: Barrier | None = None
    ) -> Trajectory:
        with self.sampler.episode():
            return await super().trajectory(task, key, start, barrier)
