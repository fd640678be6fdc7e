"""A custom function as a reward."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any, cast

from rolljax.envs.base import EnvSpec
from rolljax.envs.pool import PoolConfig
from rolljax.envs.pool.episode_runner import flag, number
from rolljax.errors import Checked, EnvError, Range, boundary
from rolljax.judging.calls import CallLimits
from rolljax.rewards.base import Reward, RewardContext, Scorer
from rolljax.rewards.workers import Rule, RuleWhere, Said
from rolljax.types import Task, Trajectory

Value = float | Mapping[str, float] | Reward
Plain = Callable[[Task, Said], Value]
"""`fn(task, said)`: returns the reward as a number, as named parts that are summed, or as a `Reward`."""
Waiting = Callable[[Task, Said], Awaitable[Value]]
"""The same as a coroutine, which may wait for another process or machine."""


@dataclasses.dataclass(frozen=True)
class Function(Checked, Rule):
    """A custom function: plain Python, or a coroutine that waits for something outside of this process.

    An exception, or a result that is not finite, is a fault of the function and gives no reward. `InfraError` says that
    the machine failed; the function is called again. The same arguments must give the same result.
    """

    fn: Plain | Waiting
    """The function, `fn(task, said)`, which receives a `types.Task` and a `rewards.workers.Said`."""
    part: str = "function"
    """Name of this reward in `reward_parts`."""
    where: RuleWhere = "process"
    """Place where plain functions run. `thread`: threads of this process; `process`: worker processes, which are
    replaced when they hang or crash; `ray`: Ray actors. A coroutine always runs on the run's event loop and must not
    block it."""
    timeout_s: Annotated[float, Range(above=0)] = 30.0
    """Longest time in seconds that a call of a plain function may take."""
    workers: Annotated[int, Range(low=0)] = 0
    """Number of threads, processes or actors; 0: the default of `PoolConfig.workers`."""
    limits: CallLimits = CallLimits()
    """Limits on the calls of a coroutine."""
    version: str = ""
    """Change it when the function has changed: verdicts of coroutines are kept in the run's folder."""

    @property
    def name(self) -> str:
        return self.part

    @property
    def is_free(self) -> bool:
        return not self._waits

    @property
    def pool(self) -> PoolConfig:
        return PoolConfig(where=self.where, workers=self.workers, step_s=self.timeout_s)

    def open(self, around: RewardContext) -> Scorer:
        return FunctionScorer(self, around) if self._waits else super().open(around)

    def reward(self, env: EnvSpec, task: Task, said: Said) -> Reward:
        with boundary(EnvError, name_of(self.fn)):
            return reward_of(cast(Plain, self.fn)(task, said), name_of(self.fn))

    @property
    def _waits(self) -> bool:
        fn = self.fn.func if isinstance(self.fn, functools.partial) else self.fn
        return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(getattr(fn, "__call__", None))  # noqa: B004


class FunctionScorer:
    """A scorer that awaits a coroutine."""

    def __init__(self, cfg: Function, around: RewardContext) -> None:
        self._cfg = cfg
        self._calls = around.calls(cfg.name, f"{name_of(cfg.fn)} {cfg.version}", cfg.limits)

    async def score(self, task: Task, trajectory: Trajectory) -> Reward:
        """Return the reward of an episode that did not fail."""
        said, name = Said.of(trajectory), name_of(self._cfg.fn)

        async def ask(_: int) -> Any:
            value = await cast(Waiting, self._cfg.fn)(task, said)
            reward = reward_of(value, name)
            return dataclasses.asdict(read_reward(dataclasses.asdict(reward), name))

        what = json.dumps([task.id, task.index, dataclasses.asdict(said)])
        return await self._calls.answer(what, ask, lambda kept: read_reward(kept, name))

    def counts(self) -> Mapping[str, int]:
        """Return the number of calls, and of their faults by kind."""
        return self._calls.counts()

    async def close(self) -> None:
        """Release all resources."""
        await self._calls.close()


def name_of(fn: Callable[..., Any]) -> str:
    """Return a function's module and name."""
    fn = fn.func if isinstance(fn, functools.partial) else fn
    return f"{fn.__module__}.{getattr(fn, '__qualname__', type(fn).__qualname__)}"


def reward_of(value: Any, name: str) -> Reward:
    """Convert the result of a function to a reward.

    Raises:
      EnvError: it is not a reward.
    """
    if isinstance(value, Reward):
        return value
    parts = dict(value) if isinstance(value, Mapping) else {}
    for part, found in [*parts.items(), *([] if parts else [("its value", value)])]:
        if isinstance(found, str | bytes) or not hasattr(found, "__float__"):
            raise EnvError(f"{name}: {part} is {found!r}, no number")
    parts = {str(part): float(found) for part, found in parts.items()}
    return Reward(sum(parts.values()) if parts else float(value), parts)


def read_reward(kept: Any, name: str) -> Reward:
    """Convert kept fields back to a reward.

    Raises:
      EnvError: they are not a reward, or a number is not finite.
    """
    with boundary(EnvError, f"{name}: no reward"):
        parts = {str(part): number(value, f"{name}: {part}") for part, value in kept["parts"].items()}
        by_turn = tuple(number(value, f"{name}: a turn") for value in kept["by_turn"])
        success = None if kept["success"] is None else flag(kept["success"], f"{name}: success")
        return Reward(number(kept["value"], f"{name}: its value"), parts, success, by_turn)
