"""One group of trajectories: environment and policy taking turns.

A policy is whoever answers: the sampler, or the gold answers that come with an environment. Both go through the same
function, so supervised and reinforced phases see the same token streams.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import time
from typing import Protocol

import numpy as np

from rolljax.envs.base import Env, EnvSpec, StepResult
from rolljax.envs.pool import EnvPool
from rolljax.errors import DataError, EnvError, RolljaxError
from rolljax.model.tokenizer import Chat
from rolljax.sampler.client import Sampler
from rolljax.types import Completion, Group, Key, Message, Sampled, SamplingParams, Status, Task, Trajectory, Turn


class Policy(Protocol):
    """Whoever answers."""

    async def act(self, prompt_ids: np.ndarray, env: Env, key: Key, turn: int) -> Completion:
        """The tokens that follow `prompt_ids [P]`, the whole stream of the episode so far."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class SamplerPolicy:
    """The model, through the sampler; randomness is addressed by run seed, key and turn."""

    sampler: Sampler
    params: SamplingParams
    seed: int

    async def act(self, prompt_ids: np.ndarray, env: Env, key: Key, turn: int) -> Completion:
        address = (self.seed % 2**31, key.stream, key.step, key.group, key.sibling, turn)
        return await self.sampler.generate(prompt_ids, self.params, address)


@dataclasses.dataclass(frozen=True, eq=False)
class GoldPolicy:
    """The environment's own answers, as tokens; their log-probs are 0 and their version is -1.

    max_answer_tok: a longer answer is an error, and its trajectory lost. pairs: every second sibling gives the rejected
    answer instead of the gold one.
    """

    pool: EnvPool
    chat: Chat
    max_answer_tok: int
    pairs: bool = False

    async def act(self, prompt_ids: np.ndarray, env: Env, key: Key, turn: int) -> Completion:
        if self.pairs and key.sibling % 2:
            text = await self.pool.call(env.rejected, "rejected answer")
        else:
            text = await self.pool.call(env.gold, "gold answer")
        tokens = self.chat.answer_ids(text)
        if len(tokens) > self.max_answer_tok:
            raise DataError(f"an answer of {len(tokens)} tokens, Recipe.max_answer_tok is {self.max_answer_tok}")
        n = len(tokens)
        return Completion(Sampled.of(tokens, np.zeros(n, np.float32), np.full(n, -1, np.int32)), "stop")


@dataclasses.dataclass(frozen=True, eq=False)
class Rollouts:
    """Everything a rollout needs beside its task.

    max_context: most tokens of one episode; an episode that would outgrow it is truncated.
    """

    spec: EnvSpec
    pool: EnvPool
    chat: Chat
    policy: Policy
    max_context: int

    async def group(self, task: Task, *, stream: int, step: int, index: int, group_size: int) -> Group:
        """`group_size` trajectories of the same start, side by side."""
        keys = [Key(stream, step, index, sibling) for sibling in range(group_size)]
        trajectories = await asyncio.gather(*(self.trajectory(task, key) for key in keys))
        return Group(task, step, index, tuple(trajectories))

    async def trajectory(self, task: Task, key: Key) -> Trajectory:
        """One episode. A failure of environment or sampler comes back as its status and owner; nothing is raised."""
        episode = _Episode(task, key)
        try:
            start = time.perf_counter()
            env, messages = await self.pool.call(
                functools.partial(_open, self.spec, task), f"reset of {self.spec.name}"
            )
            episode.env_s += time.perf_counter() - start
            try:
                await self._play(env, messages, episode)
            finally:
                await self._close(env)
        except RolljaxError as e:
            episode.status, episode.error, episode.owner = "failed", str(e), e.owner
        return episode.trajectory()

    async def _play(self, env: Env, messages: tuple[Message, ...], episode: _Episode) -> None:
        new_ids = self.chat.prompt_ids(messages)
        stream = new_ids
        for turn in range(self.spec.max_turns):
            if len(stream) >= self.max_context:
                episode.status = "truncated"
                return
            answer = await self.policy.act(stream, env, episode.key, turn)
            episode.sample_s += answer.queue_s + answer.sample_s
            closed = answer.finish_reason == "stop"
            text = self.chat.text(answer.tokens)
            start = time.perf_counter()
            result = await self.pool.call(functools.partial(_step, env, text), f"step of {self.spec.name}")
            episode.env_s += time.perf_counter() - start
            episode.add(new_ids, answer, text, result)
            if not closed or result.truncated:
                episode.status = "truncated"
            if not closed or result.terminated or result.truncated:
                return
            new_ids = self.chat.delta_ids(result.messages, closed=True)
            stream = np.concatenate([stream, answer.tokens, new_ids])
        episode.status = "truncated"

    async def _close(self, env: Env) -> None:
        if type(env).close is Env.close:
            return
        try:
            await self.pool.call(env.close, f"close of {self.spec.name}")
        except EnvError:
            pass  # the episode is over; a failing close is not its failure


def _open(spec: EnvSpec, task: Task) -> tuple[Env, tuple[Message, ...]]:
    env = spec.make()
    try:
        return env, env.reset(task)
    except BaseException:
        env.close()
        raise


def _step(env: Env, text: str) -> StepResult:
    result = env.step(text)
    if not np.isfinite(result.reward):
        raise EnvError(f"a reward of {result.reward} is not a number")
    return result


@dataclasses.dataclass(eq=False)
class _Episode:
    """A trajectory in the making."""

    task: Task
    key: Key
    turns: list[Turn] = dataclasses.field(default_factory=list)
    parts: dict[str, float] = dataclasses.field(default_factory=dict)
    reward: float = 0.0
    success: bool = False
    status: Status = "ok"
    error: str = ""
    owner: str = ""
    env_s: float = 0.0
    sample_s: float = 0.0

    def add(self, prompt_ids: np.ndarray, answer: Completion, text: str, result: StepResult) -> None:
        self.turns.append(
            Turn(
                prompt_ids,
                answer.tokens,
                answer.sampler_logp,
                answer.versions,
                answer.finish_reason,
                result.reward,
                text,
                result.weight,
            )
        )
        self.reward += result.reward
        self.success = self.success or result.success
        for name, value in result.reward_parts.items():
            self.parts[name] = self.parts.get(name, 0.0) + value

    def trajectory(self) -> Trajectory:
        return Trajectory(
            self.key,
            self.task,
            tuple(self.turns),
            self.reward,
            self.parts,
            self.success,
            self.status,
            self.error,
            self.owner,
            self.env_s,
            self.sample_s,
        )
