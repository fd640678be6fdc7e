"""Rollouts: environment and policy taking turns until an episode is over, group by group.

A trajectory's token stream is the opening prompt, then sampled tokens and observations in turn, joined by the chat
template's own separators. Nothing that was sampled is ever tokenised again.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import numpy as np

from rolljax.envs.base import StepResult
from rolljax.envs.pool import EnvPool, Episode
from rolljax.envs.text import clean
from rolljax.errors import ConfigError, DataError, EnvError, InfraError, NeighbourError, RolljaxError
from rolljax.model.tokenizer import Chat
from rolljax.rollout.policies import Policy, expert
from rolljax.rollout.starts import Start, digest
from rolljax.types import (
    EVAL_STREAM,
    Completion,
    Expert,
    Fault,
    FaultKind,
    Group,
    Key,
    Message,
    Status,
    Task,
    Trajectory,
    Turn,
)

MAX_ATTEMPTS = 100
"""At an episode that is lost to its neighbours again and again."""


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
    """How episodes are conducted.

    context: what happens when the next answer might not fit into the context any more. truncate: the episode goes on
      until it is full and ends there; drop_oldest: the oldest exchanges behind the opening are left out and the stream
      starts anew with the rest, at most `restarts` times in an episode. keep_frac: share of the context that the kept
      part may take then.
    retries: how often an episode is begun again from the same start: after a fault of the infrastructure with the same
      randomness, after a loop with other. Those that another episode took with it are not counted.
    repeats: an answer that was given, and answered, in the same way this many times in a row is a loop (0: off). In
      training the episode is then discarded and begun again, and left out if it loops each time; in an evaluation it
      ends there, and counts.
    answer_format: a regular expression that a whole answer must match; else `format_penalty` is added to the turn's
      reward, as the part `format`. It is RE2's kind, which takes time linear in any answer: no look-ahead, no
      back-references. `.` is any character.
    """

    context: Literal["truncate", "drop_oldest"] = "truncate"
    restarts: int = 3
    keep_frac: float = 0.5
    retries: int = 2
    repeats: int = 0
    answer_format: str = ""
    format_penalty: float = 0.0

    def __post_init__(self) -> None:
        for name in ("restarts", "retries", "repeats"):
            if getattr(self, name) < 0:
                raise ConfigError("must not be negative", setting=f"RolloutConfig.{name}", value=getattr(self, name))
        if self.repeats == 1:
            raise ConfigError(
                "would end every episode after its first answer",
                setting="RolloutConfig.repeats",
                value=1,
                remedy="3 is usual, 0 is off",
            )
        if not 0 < self.keep_frac < 1:
            raise ConfigError(
                "must be between 0 and 1, both excluded", setting="RolloutConfig.keep_frac", value=self.keep_frac
            )
        if self.answer_format:
            linear_pattern(self.answer_format)
        if bool(self.answer_format) != bool(self.format_penalty):
            raise ConfigError(
                "has no effect without the other of format_penalty and answer_format",
                setting="RolloutConfig.answer_format",
                value=self.answer_format,
                remedy="set both, or neither",
            )

    @property
    def max_restarts(self) -> int:
        """How often a trajectory's stream may start anew."""
        return self.restarts if self.context == "drop_oldest" else 0


@functools.lru_cache(maxsize=16)
def linear_pattern(pattern: str) -> Any:
    """A user's regular expression, compiled by RE2: Python's own can take hours over an answer made for it.

    Raises:
      ConfigError: it is none, or the package is missing.
    """
    setting = "RolloutConfig.answer_format"
    try:
        import re2
    except ModuleNotFoundError as e:
        remedy = "pip install 'rolljax[format]'"
        raise ConfigError("needs the package google-re2", setting=setting, value=pattern, remedy=remedy) from e
    options = re2.Options()
    options.dot_nl, options.log_errors = True, False
    try:
        return re2.compile(pattern, options)
    except re2.error as e:
        said = e.args[0].decode() if isinstance(e.args[0], bytes) else e
        raise ConfigError(f"is not a regular expression of RE2: {said}", setting=setting, value=pattern) from e


class Barrier:
    """Lets episodes begin together, in the order of their keys, when all of them are open.

    What a dispatch computes depends in its last bits on which requests share it. Where opening an episode takes
    microseconds, a step's prompts wait for each other, and a run that is repeated is the same to the bit.

    episodes: how many there will be. hold: keeps the sampler from beginning until what it returns is called.
    """

    def __init__(self, episodes: int, hold: Callable[[], Callable[[], None]] | None = None) -> None:
        self._expected, self._hold = episodes, hold
        self._waiting: list[tuple[tuple[int, int, int], asyncio.Future[None]]] = []

    async def arrive(self, key: Key) -> None:
        """Wait for the others."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(((key.step, key.group, key.sibling), future))
        self._open()
        await future

    def leave(self, episodes: int = 1) -> None:
        """So many will not come."""
        self._expected -= episodes
        self._open()

    def _open(self) -> None:
        if len(self._waiting) >= self._expected:
            release = self._hold() if self._hold else None
            for _, future in sorted(self._waiting, key=lambda w: w[0]):
                if not future.done():
                    future.set_result(None)
            if release:  # behind the episodes, which submit their first prompts now
                asyncio.get_running_loop().call_soon(release)


class Tally:
    """Episodes done and under way, by stream and step, of the steps that have any under way."""

    def __init__(self) -> None:
        self._counts: dict[tuple[int, int], tuple[int, int]] = {}

    @contextlib.contextmanager
    def counted(self, key: Key) -> Iterator[None]:
        """Around one episode."""
        place = (key.stream, key.step)
        done, under_way = self._counts.get(place, (0, 0))
        self._counts[place] = done, under_way + 1
        try:
            yield
        finally:
            done, under_way = self._counts[place]
            self._counts[place] = done + 1, under_way - 1
            if under_way == 1:
                del self._counts[place]

    def __str__(self) -> str:
        """One clause for each step: `step 12: 448 episodes done, 64 under way`."""
        return "; ".join(
            f"{'evaluation' if stream == EVAL_STREAM else f'step {step + 1}'}: "
            f"{done} episodes done, {under_way} under way"
            for (stream, step), (done, under_way) in list(self._counts.items())
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Rollouts:
    """Everything a rollout needs beside its task.

    max_turns, max_context, max_answer_tok: most answers of an episode, tokens of a sequence, tokens of an answer.
    listen: keep a hash of what the environment says (`Trajectory.observation_hashes`). tally: counts
    episodes.
    """

    pool: EnvPool
    chat: Chat
    policy: Policy
    max_turns: int
    max_context: int
    max_answer_tok: int
    cfg: RolloutConfig = RolloutConfig()
    listen: bool = False
    tally: Tally = dataclasses.field(default_factory=Tally)

    async def group(
        self,
        task: Task,
        *,
        stream: int,
        step: int,
        index: int,
        group_size: int,
        spare: int = 0,
        start: Start | None = None,
        barrier: Barrier | None = None,
    ) -> Group:
        """`group_size` trajectories of the same start, side by side.

        With `spare` more are begun; the first `group_size` that are complete make the group and the rest is cancelled.
        """
        keys = [Key(stream, step, index, sibling) for sibling in range(group_size + spare)]
        running = [asyncio.ensure_future(self.trajectory(task, key, start, barrier)) for key in keys]
        try:
            if not spare:
                return Group(task, step, index, tuple(await asyncio.gather(*running)))
            return await _first(running, group_size, Group(task, step, index, ()))
        finally:
            for future in running:
                future.cancel()

    async def trajectory(
        self, task: Task, key: Key, start: Start | None = None, barrier: Barrier | None = None
    ) -> Trajectory:
        """One episode. Whatever fails comes back as its status and fault; nothing is raised."""
        with self.tally.counted(key):
            retries, loops = self.cfg.retries, 0
            for attempt in itertools.count(1):
                record = Record(task, key, attempt - loops, start.expert if start else None, loops)
                error = await self._attempt(record, start, barrier if attempt == 1 else None)
                if record.fault is None or not record.fault.retryable or attempt == MAX_ATTEMPTS:
                    break
                retries -= not isinstance(error, NeighbourError)
                if retries < 0:
                    break
                loops = record.loops
        return record.trajectory()

    async def _attempt(self, record: Record, start: Start | None, barrier: Barrier | None) -> RolljaxError | None:
        """Play an episode; returns what it failed with."""
        try:
            episode = await self._open(record.task, record, barrier)
            try:
                await self.run_episode(episode, record, start)
            finally:
                await episode.close()
        except RolljaxError as e:
            record.status, record.fault = "failed", fault_of(e)
            return e
        return None

    async def _open(self, task: Task, record: Record, barrier: Barrier | None) -> Episode:
        try:
            with record.waiting_for_env():
                episode = await self.pool.open(task)
        except BaseException:
            if barrier:
                barrier.leave()
            raise
        if barrier:
            await barrier.arrive(record.key)
        return episode

    async def run_episode(self, episode: Episode, record: Record, start: Start | None) -> None:
        talk = TokenStream(self.chat.prompt_ids(episode.opening))
        replay = start.chunks if start else ()
        if self.listen:
            record.observation_hashes = [digest(episode.opening)]
        if start and replay and start.opening != digest(episode.opening):
            raise EnvError("opens with other words than it did for the expert", stage="replay")
        for turn in range(self.max_turns):
            if not self._room(talk):
                record.cut("context", f"the context of {self.max_context} tokens is full")
                return
            if turn < len(replay):
                answer, text = expert(replay[turn].tokens, self.max_answer_tok), replay[turn].text
            else:
                # what looped would loop again with the same randomness
                answer = await self.policy.act(talk.stream, episode, record.key, turn + record.loops * self.max_turns)
                text = self.chat.text(answer.tokens, talk.stream)
            with record.waiting_for_env():
                result = self._judged(text, await episode.step(text))
            weight = float(start is None or turn >= len(replay) or turn < start.imitate)
            record.add(talk, answer, text, result, weight)
            if self.listen:
                record.observation_hashes.append(digest(result.messages))
            if turn < len(replay) and replay[turn].digest != digest(result.messages):
                raise EnvError(f"says something else after action {turn + 1} than it did to the expert", stage="replay")
            if self._ended(record, answer, result):
                return
            talk.grow(answer.tokens, self.chat.delta_ids(result.messages, closed=True))
        record.cut("turns", f"{self.max_turns} turns are over")

    def _room(self, talk: TokenStream) -> bool:
        """Whether another answer may begin; makes room for it if that is wanted."""
        if self.cfg.context == "drop_oldest" and len(talk.stream) + self.max_answer_tok > self.max_context:
            limit = min(int(self.cfg.keep_frac * self.max_context), self.max_context - self.max_answer_tok)
            if talk.restarts < self.cfg.restarts:
                talk.drop_oldest(limit)
        return len(talk.stream) < self.max_context

    def _judged(self, text: str, result: StepResult) -> StepResult:
        """The result with the penalty for an answer of another form than was asked for."""
        if not self.cfg.answer_format:
            return result
        missed = not linear_pattern(self.cfg.answer_format).fullmatch(clean(text))
        penalty = self.cfg.format_penalty * missed
        parts = {**result.reward_parts, "format": penalty}
        return dataclasses.replace(result, reward=result.reward + penalty, reward_parts=parts)

    def _ended(self, record: Record, answer: Completion, result: StepResult) -> bool:
        if answer.finish_reason != "stop":
            record.cut("answer", f"an answer was cut: {answer.finish_reason}")
        elif result.truncated:
            record.cut("env", "the environment ended the episode before its end")
        elif not result.terminated and self.cfg.repeats and record.repeats >= self.cfg.repeats and answer.is_sampled:
            record.loop()
        return record.status != "ok" or result.terminated


async def _first(running: Sequence[asyncio.Future[Trajectory]], wanted: int, group: Group) -> Group:
    """The group of the first `wanted` that are complete; of those that failed as well, if there are too few."""
    done: list[Trajectory] = []
    failed: list[Trajectory] = []
    for future in asyncio.as_completed(running):
        trajectory = await future
        (failed if trajectory.status == "failed" else done).append(trajectory)
        if len(done) == wanted:
            break
    members = sorted((done + failed[: wanted - len(done)]), key=lambda t: t.key.sibling)
    return dataclasses.replace(group, trajectories=tuple(members), cancelled=len(running) - len(members))


def fault_of(error: RolljaxError) -> Fault:
    """Whose failure it was."""
    if isinstance(error, EnvError):
        infra = isinstance(error, InfraError)
        kind: FaultKind = "infra" if infra else "limit" if error.stage == "episode" else "env"
        return Fault(kind, error.stage, str(error), retryable=infra and error.stage != "pool")
    return Fault("env" if isinstance(error, DataError) else "infra", error.owner, str(error))


class TokenStream:
    """The token stream of an episode.

    stream: all that the model sees. new_ids: its end that no turn has on record yet. restarted: it has just begun anew.
    """

    def __init__(self, opening_ids: np.ndarray) -> None:
        self.stream = self.new_ids = self._opening = opening_ids
        self._exchanges: list[np.ndarray] = []
        self.restarted, self.restarts = False, 0

    def grow(self, answer: np.ndarray, observation: np.ndarray) -> None:
        """An answer, and what follows it."""
        self._exchanges.append(np.concatenate([answer, observation]))
        self.stream, self.new_ids = np.concatenate([self.stream, answer, observation]), observation
        self.restarted = False

    def drop_oldest(self, limit: int) -> None:
        """Begin anew with the opening and as many of the last exchanges, at least one, as `limit` tokens hold."""
        if len(self._exchanges) < 2:
            return
        room, kept = limit - len(self._opening), self._exchanges
        while len(kept) > 1 and sum(map(len, kept)) > room:
            kept = kept[1:]
        if len(kept) < len(self._exchanges):
            self._exchanges = kept
            self.stream = self.new_ids = np.concatenate([self._opening, *kept])
            self.restarted, self.restarts = True, self.restarts + 1


@dataclasses.dataclass(eq=False)
class Record:
    """A trajectory in the making."""

    task: Task
    key: Key
    attempt: int
    expert: Expert | None = None
    loops: int = 0
    turns: list[Turn] = dataclasses.field(default_factory=list)
    parts: dict[str, float] = dataclasses.field(default_factory=dict)
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    reward: float = 0.0
    success: bool = False
    status: Status = "ok"
    fault: Fault | None = None
    observation_hashes: list[str] = dataclasses.field(default_factory=list)
    env_s: float = 0.0
    sample_s: float = 0.0
    repeats: int = 0
    last: tuple[str, tuple[Message, ...]] | None = None

    @contextlib.contextmanager
    def waiting_for_env(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.env_s += time.perf_counter() - start

    def add(self, talk: TokenStream, answer: Completion, text: str, result: StepResult, weight: float) -> None:
        self.turns.append(
            Turn(
                talk.new_ids,
                answer.tokens,
                answer.sampler_logp,
                answer.versions,
                answer.finish_reason,
                result.reward,
                text,
                result.weight * weight,
                talk.restarted,
                answer.experts,
            )
        )
        self.sample_s += answer.queue_s + answer.sample_s
        self.reward += result.reward
        self.success = self.success or result.success
        for total, values in ((self.parts, result.reward_parts), (self.metrics, result.metrics)):
            for name, value in values.items():
                total[name] = total.get(name, 0.0) + value
        self.repeats = self.repeats + 1 if self.last == (text, result.messages) else 1
        self.last = (text, result.messages)

    def cut(self, stage: str, why: str, kind: Literal["limit", "agent"] = "limit") -> None:
        """The episode ends before its end, and counts."""
        self.status, self.fault = "truncated", Fault(kind, stage, why)

    def loop(self) -> None:
        """The policy repeats itself: a failure in an evaluation, and nothing to learn from."""
        why = f"the same answer {self.repeats} times in a row, to no effect"
        if self.key.stream == EVAL_STREAM:
            return self.cut("repeat", why, kind="agent")
        self.status, self.fault = "failed", Fault("agent", "repeat", why, retryable=True)
        self.loops += 1

    def trajectory(self) -> Trajectory:
        return Trajectory(
            self.key,
            self.task,
            tuple(self.turns),
            self.reward,
            self.parts,
            self.success,
            self.status,
            self.fault,
            self.metrics,
            tuple(self.observation_hashes) if self.observation_hashes else None,
            self.attempt,
            self.loops,
            self.expert,
            self.env_s,
            self.sample_s,
        )
