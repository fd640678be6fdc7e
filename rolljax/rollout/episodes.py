"""Rollouts: environment and policy take turns until an episode is over, group by group.

A `Policy` is the model through the sampler, or the environment's own scripted player.

A trajectory's token stream is the opening prompt, then sampled tokens and observations in turn, joined by the chat
template's own separators. Nothing that was sampled is ever tokenised again. Episodes of a step may begin together
(`Barrier`).
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Literal, Protocol

import numpy as np

from rolljax.envs.base import StepResult
from rolljax.envs.pool import Episode, Pool
from rolljax.envs.run_limits import RunLimits
from rolljax.envs.text import clean, linear_pattern
from rolljax.errors import ConfigError, DataError, EnvError, NeighbourError, Range, RolljaxError, boundary, check_fields
from rolljax.model.tokenizer import Chat
from rolljax.rewards.scoring import Scoring
from rolljax.rollout.builder import TokenStream, TrajectoryBuilder, fault_of
from rolljax.rollout.guidance import Guide
from rolljax.rollout.start_states import Start, digest
from rolljax.sampler.client import SamplerClient
from rolljax.types import (
    EVAL_STREAM,
    EXPERT,
    Completion,
    Group,
    Key,
    Sampled,
    SamplingParams,
    Task,
    Trajectory,
)

EVALUATION_FIRST = -1
"""Priority of requests of evaluations; those of training have their prompt index, which is 0 or more."""


class Policy(Protocol):
    """A source of answers: a model, or a scripted player."""

    @property
    def version(self) -> int:
        """Policy version with which a group begins that starts now."""
        ...

    async def act(
        self, prompt_ids: np.ndarray, episode: Episode, key: Key, turn: int, min_version: int = 0
    ) -> Completion:
        """Return the tokens that follow `prompt_ids [P]`, the whole stream of the episode so far.

        min_version: the policy version with which the episode's group began.
        """
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class SamplerPolicy:
    """The model, through the sampler; randomness is addressed by run seed, key and turn. Requests of groups that began
    earlier are served first, those of evaluations before all."""

    sampler: SamplerClient
    params: SamplingParams
    seed: int
    may_ask: asyncio.Event | None = None
    """Requests wait until it is set."""
    domains: Mapping[str, SamplingParams] = dataclasses.field(default_factory=dict)
    """Sampling parameters of the domains of a mixture that differ from `params`, by domain."""

    @property
    def version(self) -> int:
        return self.sampler.version

    async def act(
        self, prompt_ids: np.ndarray, episode: Episode, key: Key, turn: int, min_version: int = 0
    ) -> Completion:
        address = (self.seed % 2**31, key.stream, key.prompt_index, key.sibling, turn)
        if self.may_ask:
            await self.may_ask.wait()
        priority = EVALUATION_FIRST if key.stream == EVAL_STREAM else key.prompt_index
        params = self.domains.get(episode.domain, self.params)
        return await self.sampler.generate(prompt_ids, params, address, priority=priority, min_version=min_version)


@dataclasses.dataclass(frozen=True, eq=False)
class ScriptedPolicy:
    """The environment's own answers, as tokens; their log-probs are 0 and their version is -1."""

    chat: Chat
    max_answer_tok: int
    """A longer answer is an error, and its trajectory lost."""
    pairs: bool = False
    """Every second sibling gives the rejected answer instead of the reference answer."""

    @property
    def version(self) -> int:
        return EXPERT

    async def act(
        self, prompt_ids: np.ndarray, episode: Episode, key: Key, turn: int, min_version: int = 0
    ) -> Completion:
        text = await (episode.rejected() if self.pairs and key.sibling % 2 else episode.reference_answer())
        return expert(self.chat.answer_ids(text), self.max_answer_tok)


def expert(tokens: np.ndarray, max_answer_tok: int) -> Completion:
    """Return a given answer as a completion that was not sampled.

    Raises:
      DataError: the answer is too long.
    """
    if len(tokens) > max_answer_tok:
        raise DataError(f"an answer of {len(tokens)} tokens, Recipe.max_answer_tok is {max_answer_tok}")
    n = len(tokens)
    return Completion(Sampled.of(tokens, np.zeros(n, np.float32), np.full(n, EXPERT, np.int32)), "stop")


class Barrier:
    """Lets episodes begin together, in the order of their keys, when all of them are open.

    The last bits of a dispatch's results depend on which requests share the dispatch. Where opening an episode takes
    microseconds, a step's prompts therefore wait for each other, and a repeated run is the same to the bit.

    episodes: number of episodes to wait for. hold: keeps the sampler from starting requests until the function that
    `hold` returns is called.
    """

    def __init__(self, episodes: int, hold: Callable[[], Callable[[], None]] | None = None) -> None:
        self._expected, self._hold = episodes, hold
        self._waiting: list[tuple[tuple[int, int], asyncio.Future[None]]] = []

    async def arrive(self, key: Key) -> None:
        """Wait for the others."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(((key.prompt_index, key.sibling), future))
        self._open()
        await future

    def leave(self, episodes: int = 1) -> None:
        """Expect this many episodes fewer: they will not arrive."""
        self._expected -= episodes
        self._open()

    def _open(self) -> None:
        if len(self._waiting) >= self._expected:
            release = self._hold() if self._hold else None
            for _, future in sorted(self._waiting, key=lambda w: w[0]):
                if not future.done():
                    future.set_result(None)
            if release:  # after the episodes, which submit their first prompts now
                asyncio.get_running_loop().call_soon(release)


class EpisodeCounts:
    """Episodes done and under way, by stream, of the streams that have any under way."""

    def __init__(self) -> None:
        self._counts: dict[int, tuple[int, int]] = {}

    @contextlib.contextmanager
    def counted(self, key: Key) -> Iterator[None]:
        """Count an episode as running inside this context, and as done afterwards."""
        done, under_way = self._counts.get(key.stream, (0, 0))
        self._counts[key.stream] = done, under_way + 1
        try:
            yield
        finally:
            done, under_way = self._counts[key.stream]
            self._counts[key.stream] = done + 1, under_way - 1
            if under_way == 1:
                del self._counts[key.stream]

    def __str__(self) -> str:
        """Return one clause for each stream: `training: 448 episodes done, 64 under way`."""
        return "; ".join(
            f"{'evaluation' if stream == EVAL_STREAM else 'training'}: {done} episodes done, {under_way} under way"
            for stream, (done, under_way) in list(self._counts.items())
        )


FORMAT_SETTING = "RolloutConfig.answer_format"
MAX_ATTEMPTS = 100
"""Attempts at an episode that fails again and again because of other episodes in its worker."""


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
    """Settings of episodes."""

    context: Literal["truncate", "drop_oldest"] = "truncate"
    """Behaviour if the next answer might not fit into the context. truncate: the episode continues until the context is
    full and ends there. drop_oldest: the oldest exchanges after the opening are left out, and a new sequence starts
    with the rest, at most `restarts` times in an episode."""
    restarts: Annotated[int, Range(low=0)] = 3
    """Maximum number of restarts of the token stream in an episode, with context = 'drop_oldest'."""
    keep_frac: Annotated[float, Range(above=0, below=1)] = 0.5
    """Share of the context that the kept part may take."""
    retries: Annotated[int, Range(low=0)] = 2
    """Maximum number of times that an episode is restarted from the same start: with the same randomness after a fault
    of the infrastructure, with other randomness after a loop. A restart because of another episode in the same worker
    is not counted."""
    repeats: Annotated[int, Range(low=0)] = 0
    """A loop is an answer that the policy gives, and the environment answers, in the same way this many times in a row
    (0: off). In training the episode is then discarded and restarted, and left out if it loops each time; in an
    evaluation it ends there, and counts."""
    answer_format: str = ""
    """A regular expression that the whole answer must match; otherwise `format_penalty` is added to the turn's reward,
    as the part `format`. The syntax is RE2's, which takes time linear in any answer: no look-ahead, no back-references.
    `.` is any character."""
    format_penalty: float = 0.0
    """Penalty added to a turn's reward if its answer does not match `answer_format`; 0 or less."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.repeats == 1:
            raise ConfigError(
                "would end every episode after its first answer",
                setting="RolloutConfig.repeats",
                value=1,
                remedy="3 is usual, 0 is off",
            )
        if self.answer_format:
            linear_pattern(self.answer_format, FORMAT_SETTING)
        if bool(self.answer_format) != bool(self.format_penalty):
            raise ConfigError(
                "has no effect without the other of format_penalty and answer_format",
                setting="RolloutConfig.answer_format",
                value=self.answer_format,
                remedy="set both, or neither",
            )

    @property
    def max_restarts(self) -> int:
        """The most restarts of a trajectory's stream."""
        return self.restarts if self.context == "drop_oldest" else 0


class EpisodeRollouts(abc.ABC):
    """Plays groups of episodes, and restarts an episode when the infrastructure failed. Subclasses define in
    `run_episode` how an episode is played."""

    pool: Pool
    """Pool of environments."""
    cfg: RolloutConfig
    """Settings of episodes."""
    tally: EpisodeCounts
    """Counts of episodes by stream."""
    scoring: Scoring | None
    """Rewards of the episodes, in place of the environment's."""

    @property
    def version(self) -> int:
        """Policy version with which a group begins that starts now; 0 for models without versions."""
        return 0

    @abc.abstractmethod
    async def run_episode(self, episode: Episode, builder: TrajectoryBuilder, start: Start | None) -> None:
        """Play an open episode to its end, and record it on `builder`.

        Raises:
          RolljaxError: it failed; the error has an owner.
        """

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
        """Play `group_size` trajectories of the same start at the same time.

        spare: start this many more; the first `group_size` to complete make the group, and the rest is cancelled.
        """
        keys, version = [Key(stream, prompt_index, sibling) for sibling in range(group_size + spare)], self.version
        running = [asyncio.ensure_future(self.trajectory(task, key, start, barrier, version)) for key in keys]
        try:
            if not spare:
                return Group(task, prompt_index, tuple(await asyncio.gather(*running)))
            return await _first(running, group_size, Group(task, prompt_index, ()))
        finally:
            for future in running:
                future.cancel()

    async def trajectory(
        self, task: Task, key: Key, start: Start | None = None, barrier: Barrier | None = None, version: int = 0
    ) -> Trajectory:
        """Play one episode. A failure is returned as its status and fault; nothing is raised.

        version: policy version with which its group began.
        """
        with self.tally.counted(key):
            retries, loops = self.cfg.retries, 0
            for attempt in itertools.count(1):
                builder = TrajectoryBuilder(task, key, attempt - loops, start.expert if start else None, loops, version)
                error = await self._attempt(builder, start, barrier if attempt == 1 else None)
                if builder.fault is None or not builder.fault.retryable or attempt == MAX_ATTEMPTS:
                    break
                retries -= not isinstance(error, NeighbourError)
                if retries < 0:
                    break
                loops = builder.loops
            done = builder.trajectory()
            return await self.scoring.score(done, builder.last_turn) if self.scoring else done

    async def _attempt(
        self, builder: TrajectoryBuilder, start: Start | None, barrier: Barrier | None
    ) -> RolljaxError | None:
        """Play an episode; return the error that ended it, if any."""
        try:
            episode = await self._open(builder, barrier)
            try:
                with boundary(EnvError, f"reference answer of task {builder.task.index}"):
                    builder.reference = self.pool.spec.reference(builder.task)
                await self.run_episode(episode, builder, start)
            finally:
                await episode.close()
        except RolljaxError as e:
            builder.status, builder.fault = "failed", fault_of(e)
            return e
        return None

    async def _open(self, builder: TrajectoryBuilder, barrier: Barrier | None) -> Episode:
        with contextlib.ExitStack() as unless_open:
            if barrier:
                unless_open.callback(barrier.leave)
            with boundary(EnvError, f"form of task {builder.task.index}"):
                form = self.pool.spec.form(builder.task, builder.key)
            with builder.waiting_for_env():
                episode = await self.pool.open(form)
            unless_open.pop_all()
        if barrier:
            await barrier.arrive(builder.key)
        return episode

    def checked_form(self, text: str, result: StepResult) -> StepResult:
        """Return the result, with the penalty if the answer does not have the required format."""
        if not self.cfg.answer_format:
            return result
        missed = not linear_pattern(self.cfg.answer_format, FORMAT_SETTING).fullmatch(clean(text))
        penalty = self.cfg.format_penalty * missed
        parts = {**result.reward_parts, "format": penalty}
        return dataclasses.replace(result, reward=result.reward + penalty, reward_parts=parts)

    def ended(self, builder: TrajectoryBuilder, answer: Completion, result: StepResult) -> bool:
        """Return whether the episode is over with this answer; if so, `builder` records how it ended."""
        if answer.finish_reason != "stop":
            builder.truncate("answer", f"an answer was cut: {answer.finish_reason}")
        elif result.truncated:
            builder.truncate("env", "the environment ended the episode before its end")
        elif not result.terminated and self.cfg.repeats and builder.repeats >= self.cfg.repeats and answer.is_sampled:
            builder.end_in_loop()
        return builder.status != "ok" or result.terminated


@dataclasses.dataclass(frozen=True, eq=False)
class Rollouts(EpisodeRollouts):
    """The parts of a rollout other than its task."""

    pool: Pool
    chat: Chat
    policy: Policy
    max_turns: int
    """Maximum number of answers in an episode."""
    max_context: int
    """Maximum number of tokens in a sequence."""
    max_answer_tok: int
    """Maximum number of tokens in one answer."""
    cfg: RolloutConfig = RolloutConfig()
    hash_observations: bool = False
    """Keep a hash of the environment's messages (`Trajectory.observation_hashes`)."""
    tally: EpisodeCounts = dataclasses.field(default_factory=EpisodeCounts)
    """Counter of episodes."""
    scoring: Scoring | None = None
    """Scoring that gives the episodes' rewards; None: the environment's rewards."""
    guide: Guide | None = None
    """Latent prefixes in front of the prompts; None: no trajectory has one."""
    run_limits: RunLimits | None = None
    """Time limits of the policy's programs, for environments that use them (`EnvSpec.run_limits`)."""

    @property
    def version(self) -> int:
        return self.policy.version

    async def run_episode(self, episode: Episode, builder: TrajectoryBuilder, start: Start | None) -> None:
        opening, prefix = self.chat.prompt_ids(episode.initial_messages), np.zeros(0, np.int32)
        if self.guide:
            prefix = self.guide.prefix(builder.key)
            opening = np.concatenate([prefix, opening])
        stream = TokenStream(opening)
        replay = start.chunks if start else ()
        if self.hash_observations:
            builder.observation_hashes = [digest(episode.initial_messages)]
        if start and replay and start.initial_messages != digest(episode.initial_messages):
            raise EnvError("replay diverged: the opening differs from the expert's", stage="replay")
        max_turns = min(self.max_turns, self.pool.spec.turns_of(builder.task))
        for turn in range(max_turns):
            if not self._has_room(stream):
                builder.truncate("context", f"the context of {self.max_context} tokens is full")
                return
            if turn < len(replay):
                answer, text = expert(replay[turn].tokens, self.max_answer_tok), replay[turn].text
            else:
                # after a loop, other randomness: with the same it would loop again
                number = turn + builder.loops * self.max_turns
                answer = await self.policy.act(stream.ids, episode, builder.key, number, builder.version)
                text = self.chat.text(answer.tokens, stream.ids[len(prefix) :])
            result = self.checked_form(text, await self.env_step(episode, text, builder))
            weight = float(start is None or turn >= len(replay) or turn < start.imitate)
            builder.add(stream, answer, text, result, weight)
            if self.hash_observations:
                builder.observation_hashes.append(digest(result.messages))
            if turn < len(replay) and replay[turn].digest != digest(result.messages):
                said = f"replay diverged: the observation after action {turn + 1} differs from the expert's"
                raise EnvError(said, stage="replay")
            if self.ended(builder, answer, result):
                return
            if turn + 1 < max_turns:
                stream.grow(answer.tokens, self.chat.delta_ids(result.messages, closed=True))
        builder.truncate("turns", f"{max_turns} turns are over")

    async def env_step(self, episode: Episode, text: str, builder: TrajectoryBuilder) -> StepResult:
        """Return the environment's answer to the policy's text."""
        limits, task = self.run_limits, builder.task
        with builder.waiting_for_env():
            result = await episode.step(text, limits.limit_s(task) if limits else None)
        if limits:
            limits.learn(task, result)
        return result

    def _has_room(self, stream: TokenStream) -> bool:
        """Return whether another answer may start; with 'drop_oldest', make room for it first."""
        if self.cfg.context == "drop_oldest" and len(stream.ids) + self.max_answer_tok > self.max_context:
            limit = min(int(self.cfg.keep_frac * self.max_context), self.max_context - self.max_answer_tok)
            if stream.restarts < self.cfg.restarts:
                stream.drop_oldest(limit)
        return len(stream.ids) < self.max_context


async def _first(running: Sequence[asyncio.Future[Trajectory]], wanted: int, group: Group) -> Group:
    """Return the group of the first `wanted` complete trajectories, filled up with failed ones if there are too few."""
    done: list[Trajectory] = []
    failed: list[Trajectory] = []
    for future in asyncio.as_completed(running):
        trajectory = await future
        (failed if trajectory.status == "failed" else done).append(trajectory)
        if len(done) == wanted:
            break
    members = sorted((done + failed[: wanted - len(done)]), key=lambda t: t.key.sibling)
    return dataclasses.replace(group, trajectories=tuple(members), cancelled=len(running) - len(members))
