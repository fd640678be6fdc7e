"""Rewards that are Python functions: in threads, worker processes or Ray actors, by the pool that runs environments.

Rules follow the same terms as environments: a call has a limit; a worker that hangs or crashes is killed and
replaced; a fault names its cause; the event loop never waits for any of it.
"""

from __future__ import annotations

import abc
import collections
import dataclasses
import json
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from rolljax.envs.base import Env, EnvSpec, Runs, StepResult
from rolljax.envs.pool import EnvPool, PoolConfig
from rolljax.envs.text import MAX_ANSWER_CHARS, clean
from rolljax.errors import EnvError, InfraError
from rolljax.rewards.base import Reward, RewardConfig, RewardContext, Scorer
from rolljax.types import FinishReason, Message, Task, Trajectory

RuleWhere = Literal["thread", "process", "ray"]
SAYS = "says_success"
ROOM = 4096
"""Characters for everything in addition to the texts of an episode."""


@dataclasses.dataclass(frozen=True)
class Said:
    """The view that a rule gets of an episode."""

    texts: tuple[str, ...]
    """The policy's answers, turn by turn; only the end of an answer beyond a million characters."""
    num_tok: tuple[int, ...]
    """Number of tokens of each answer."""
    ends: tuple[FinishReason, ...]
    """Finish reason of each answer."""
    reward: float
    """Reward from the environment."""
    reward_parts: Mapping[str, float]
    """Parts of the reward by name, from the environment."""
    success: bool
    """Whether the environment counts the task as solved."""
    metrics: Mapping[str, float]
    """Metrics from the environment."""

    @property
    def text(self) -> str:
        """Return the last answer."""
        return self.texts[-1]

    @property
    def is_cut(self) -> bool:
        """Return whether an answer was cut by a limit."""
        return any(end != "stop" for end in self.ends)

    @staticmethod
    def of(trajectory: Trajectory) -> Said:
        """Extract the view of a trajectory."""
        turns = trajectory.turns
        return Said(
            tuple(clean(turn.text) for turn in turns),
            tuple(len(turn.tokens) for turn in turns),
            tuple(turn.finish_reason for turn in turns),
            trajectory.reward,
            dict(trajectory.reward_parts),
            trajectory.success,
            dict(trajectory.metrics),
        )

    def to_json(self) -> str:
        """Encode as a text that an environment's worker accepts."""
        most = MAX_ANSWER_CHARS
        while True:
            text = json.dumps(dataclasses.asdict(self.ending(most)), ensure_ascii=False)
            if len(text) <= MAX_ANSWER_CHARS:
                return text
            most //= 2

    def ending(self, most: int) -> Said:
        """Return a copy with the last `most` characters of every text."""
        return dataclasses.replace(self, texts=tuple(text[-most:] for text in self.texts))

    @staticmethod
    def from_json(text: str) -> Said:
        """Decode the output of `to_json`."""
        said = json.loads(text)
        lists = {name: tuple(said[name]) for name in ("texts", "num_tok", "ends")}
        return Said(**{**said, **lists})


class Rule(RewardConfig):
    """A reward that plain Python computes from an episode.

    `runs` says where: inline: reading it takes time linear in the text; thread: it waits for something outside of this
    process; process: an answer could keep it busy.
    """

    runs: ClassVar[Runs] = "inline"

    @property
    def is_free(self) -> bool:
        return True

    @abc.abstractmethod
    def reward(self, env: EnvSpec, task: Task, said: Said) -> Reward:
        """Compute the reward of an episode. It may block. The same episode must get the same reward.

        Raises:
          InfraError: the machine failed; the call is repeated. Any other exception is a fault of the rule.
        """

    def warm(self, env: EnvSpec) -> None:  # noqa: B027  # most need nothing
        """Load everything that all calls share. Called once, in the process that workers are forked from."""

    @property
    def pool(self) -> PoolConfig:
        """Return where it runs, and its time limit."""
        return PoolConfig()

    def open(self, around: RewardContext) -> Scorer:
        return RuleScorer(EnvPool(self.pool, _RuleSpec(around.env, self, self.runs)))


class RuleScorer:
    """A rule and its calls in a pool. retries: how often a call that the machine lost is repeated."""

    def __init__(self, pool: EnvPool, retries: int = 2) -> None:
        self._pool, self._retries = pool, retries
        self._counts: collections.Counter[str] = collections.Counter()

    async def score(self, task: Task, trajectory: Trajectory) -> Reward:
        """Return the reward of an episode that did not fail."""
        said = Said.of(trajectory).to_json()
        for attempt in range(self._retries + 1):
            try:
                return await self._ask(task, said)
            except InfraError as e:
                self._counts["worker"] += 1
                if attempt == self._retries or e.stage == "pool":
                    raise
                self._counts["retries"] += 1
        raise AssertionError

    async def _ask(self, task: Task, said: str) -> Reward:
        episode = await self._pool.open(task)
        try:
            found = await episode.step(said)
        finally:
            await episode.close()
        parts = dict(found.reward_parts)
        return Reward(found.reward, parts, found.success if SAYS in found.metrics else None)

    def counts(self) -> Mapping[str, int]:
        """Return the number of calls, and of their faults by kind."""
        late = {"timeout": n} if (n := sum(self._pool.stats.timeouts.values())) else {}
        return self._counts + collections.Counter(late)

    async def close(self) -> None:
        """Release all resources."""
        self._pool.close()


@dataclasses.dataclass(frozen=True)
class _RuleSpec(EnvSpec):
    """A rule as the environment pool runs it: the episode is the action, and the step's reward is the rule's."""

    env: EnvSpec
    """The environment whose tasks are scored."""
    rule: Rule
    """Rule that scores the episodes."""
    runs: Runs = "inline"  # type: ignore[misc]  # of the rule
    """The place where the rule runs, as declared by the rule."""

    @property
    def name(self) -> str:
        return f"the reward {self.rule.name}"

    @property
    def needs_worker(self) -> str:
        return "an answer can keep it busy" if self.runs == "process" else ""

    def task(self, index: int) -> Task:
        return self.env.task(index)

    def warm(self) -> None:
        self.rule.warm(self.env)

    def make(self) -> Env:
        return _RuleEnv(self)


class _RuleEnv(Env):
    """One call of a rule."""

    def __init__(self, spec: _RuleSpec) -> None:
        self._spec = spec

    def reset(self, task: Task) -> tuple[Message, ...]:
        self._task = task
        return (Message("user", "an episode"),)

    def step(self, action: str) -> StepResult:
        spec = self._spec
        found: Any = spec.rule.reward(spec.env, self._task, Said.from_json(action))
        if not isinstance(found, Reward):
            raise EnvError(f"{spec.name} gave a {type(found).__name__}, not a Reward")
        says = {} if found.success is None else {SAYS: 1.0}
        parts = {str(name): value for name, value in found.parts.items()}
        return StepResult((), found.value, True, success=bool(found.success), reward_parts=parts, metrics=says)

    def reference_answer(self) -> str:
        raise EnvError("a reward has no answers")
