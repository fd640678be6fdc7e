"""A trajectory in the making: the tokens that the model sees, and the turns that are recorded."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Literal

import numpy as np

from rolljax.envs.base import StepResult
from rolljax.errors import DataError, EnvError, InfraError, RolljaxError
from rolljax.types import (
    EVAL_STREAM,
    Completion,
    Expert,
    Fault,
    FaultKind,
    Key,
    Message,
    Status,
    Task,
    Trajectory,
    Turn,
)


class TokenStream:
    """The token stream of an episode.

    ids: all tokens of the model's context, int32 `[P]`. new_ids: its last tokens, which no turn has on record yet.
    restarted: the stream has just restarted.
    """

    def __init__(self, opening_ids: np.ndarray) -> None:
        self.ids = self.new_ids = self._opening = opening_ids
        self._exchanges: list[np.ndarray] = []
        self.restarted, self.restarts = False, 0

    def grow(self, answer: np.ndarray, observation: np.ndarray) -> None:
        """Append an answer and the observation that follows it."""
        self._exchanges.append(np.concatenate([answer, observation]))
        self.ids, self.new_ids = np.concatenate([self.ids, answer, observation]), observation
        self.restarted = False

    def drop_oldest(self, limit: int) -> None:
        """Restart with the opening and as many of the last exchanges, at least one, as `limit` tokens hold."""
        if len(self._exchanges) < 2:
            return
        room, kept = limit - len(self._opening), self._exchanges
        while len(kept) > 1 and sum(map(len, kept)) > room:
            kept = kept[1:]
        if len(kept) < len(self._exchanges):
            self._exchanges = kept
            self.ids = self.new_ids = np.concatenate([self._opening, *kept])
            self.restarted, self.restarts = True, self.restarts + 1


@dataclasses.dataclass(eq=False)
class TrajectoryBuilder:
    """A trajectory in the making."""

    task: Task
    key: Key
    attempt: int
    expert: Expert | None = None
    loops: int = 0
    version: int = 0
    """Policy version with which the group began."""
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
    last_turn: int = -1
    """Index of the turn that was sampled last, if the turns are in another order."""
    reference: str | None = None

    @contextlib.contextmanager
    def waiting_for_env(self) -> Iterator[None]:
        clock = asyncio.get_running_loop().time
        start = clock()
        try:
            yield
        finally:  # also time that it waited in vain
            self.env_s += clock() - start

    def add(self, stream: TokenStream, answer: Completion, text: str, result: StepResult, weight: float) -> None:
        self.turns.append(
            Turn(
                stream.new_ids,
                answer.tokens,
                answer.sampler_logp,
                answer.versions,
                answer.finish_reason,
                result.reward,
                text,
                result.weight * weight,
                stream.restarted,
                answer.experts,
                answer.alternatives,
                answer.sampler,
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

    def truncate(self, stage: str, why: str, kind: Literal["limit", "agent"] = "limit") -> None:
        """Cut the episode short; it still counts."""
        self.status, self.fault = "truncated", Fault(kind, stage, why)

    def end_in_loop(self) -> None:
        """End an episode whose policy repeats itself: a failure in an evaluation, and dropped in training."""
        why = f"the same answer {self.repeats} times in a row, to no effect"
        if self.key.stream == EVAL_STREAM:
            return self.truncate("repeat", why, kind="agent")
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
            reference=self.reference,
        )


def fault_of(error: RolljaxError) -> Fault:
    """Return the fault, with its owner, that an error of an episode amounts to."""
    if isinstance(error, EnvError):
        infra = isinstance(error, InfraError)
        kind: FaultKind = "infra" if infra else "limit" if error.stage == "episode" else "env"
        return Fault(kind, error.stage, str(error), retryable=infra and error.stage != "pool")
    return Fault("env" if isinstance(error, DataError) else "infra", error.owner, str(error))
