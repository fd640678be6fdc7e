"""Score finished episodes of a run with its rewards."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

from rolljax.errors import EnvError, InfraError, RolljaxError
from rolljax.metrics import REWARD_FAULTS, REWARD_PARTS
from rolljax.rewards.base import Reward, RewardConfig, RewardContext, Scorer
from rolljax.types import Fault, Group, Task, Trajectory

STAGE = "reward"
"""The stage that faults of episodes without a reward name."""
COUNTED = ("calls", "requests", "answers", "cached", "retries")
"""Counts of a scorer that are not faults."""


class Scoring:
    """The open rewards of a run, and their assignment to tasks. Used from one event loop.

    Args:
      scorer: for all tasks except those of `by_env`, which holds scorers by `Task.env`. None: the environment's own
      reward stays.
    """

    def __init__(
        self, scorer: Scorer | None, by_env: Mapping[str, Scorer] | None = None, *, deadline_s: float = math.inf
    ) -> None:
        self._scorer, self._by_env, self._deadline_s = scorer, dict(by_env or {}), deadline_s
        self._waited_s, self._scored = 0.0, 0
        self._before: collections.Counter[str] = collections.Counter()

    def scorer(self, task: Task) -> Scorer | None:
        """Return the scorer of a task; None: the environment's own reward stays."""
        return self._by_env.get(task.env, self._scorer)

    async def score(self, trajectory: Trajectory, last: int = -1) -> Trajectory:
        """Return the trajectory of a finished episode with its reward; never raises. A failed trajectory is returned
        unchanged. If there is no verdict, the trajectory becomes a failed one, and its fault names the cause.

        Args:
          last: the turn that receives the episode's reward, apart from shares that the reward gives to other turns.
        """
        scorer = self.scorer(trajectory.task)
        if scorer is None or trajectory.status == "failed" or not trajectory.turns:
            return trajectory
        clock = asyncio.get_running_loop().time
        start_s = clock()
        try:
            async with asyncio.timeout(None if math.isinf(self._deadline_s) else self._deadline_s):
                found = _checked(await scorer.score(trajectory.task, trajectory), trajectory)
        except TimeoutError:
            return _failed(trajectory, InfraError(f"no reward after {self._deadline_s:g} s", stage=STAGE))
        except RolljaxError as e:
            return _failed(trajectory, e)
        except Exception as e:  # border: a reward may be the user's code
            return _failed(trajectory, EnvError(f"{type(e).__name__}: {e}", stage=STAGE))
        finally:
            self._waited_s, self._scored = self._waited_s + clock() - start_s, self._scored + 1
        return rewarded(trajectory, found, last)

    def row(self, groups: Iterable[Group]) -> dict[str, float]:
        """Return a step's metrics: the parts of its episodes' rewards, and counts of the calls since the last step."""
        every = [t for g in groups for t in g.trajectories]
        scored = [t for t in every if t.status != "failed"]
        now, waited_s, num = self._counts(), self._waited_s, self._scored
        since, self._before, self._waited_s, self._scored = now - self._before, now, 0.0, 0
        return {
            **{f"{REWARD_PARTS}{name}": value for name, value in sorted(_means_of_parts(scored).items())},
            **{f"rewards/{name}_n": float(since[name]) for name in COUNTED},
            **{f"{REWARD_FAULTS}{kind}_n": float(n) for kind, n in sorted(since.items()) if kind not in COUNTED},
            "rewards/lost_n": float(sum(t.fault is not None and t.fault.stage == STAGE for t in every)),
            "rewards/wait_s": waited_s / max(num, 1),
        }

    def _counts(self) -> collections.Counter[str]:
        found: collections.Counter[str] = collections.Counter()
        for scorer in self._scorers():
            found.update(scorer.counts())
        return found

    def _scorers(self) -> list[Scorer]:
        return [*self._by_env.values(), *([self._scorer] if self._scorer else [])]

    async def close(self) -> None:
        """Release the rewards' resources."""
        for scorer in self._scorers():
            await scorer.close()


def _means_of_parts(scored: Sequence[Trajectory]) -> dict[str, float]:
    """Return each part's mean over the trajectories of the environments that report it; a missing part counts 0."""
    by_env: dict[str, list[Trajectory]] = collections.defaultdict(list)
    for t in scored:
        by_env[t.task.env].append(t)
    values: dict[str, list[float]] = collections.defaultdict(list)
    for of_env in by_env.values():
        for name in dict.fromkeys(name for t in of_env for name in t.reward_parts):
            values[name] += [t.reward_parts.get(name, 0.0) for t in of_env]
    return {name: sum(found) / len(found) for name, found in values.items()}


def open_scoring(reward: RewardConfig | None, around: RewardContext, deadline_s: float) -> Scoring | None:
    """Open a reward; return None where only the environment's own is used.

    Raises:
      ConfigError: see `RewardConfig.open`.
    """
    return None if reward is None else Scoring(reward.open(around), deadline_s=deadline_s)


def rewarded(trajectory: Trajectory, found: Reward, last: int = -1) -> Trajectory:
    """Return a copy of the trajectory with the reward `found`. The rewards of the turns add up to it: turn `last`
    receives the part that `found.by_turn` does not assign."""
    turns, last = list(trajectory.turns), last % len(trajectory.turns)
    shares = list(found.by_turn) or [0.0] * len(turns)
    given = 0.0
    for share in shares:  # in the order in which episodes add them up, so that an unchanged sum is equal to the bit
        given += share
    shares[last] += found.value - given
    turns = [dataclasses.replace(turn, reward=share) for turn, share in zip(turns, shares, strict=True)]
    success = trajectory.success if found.success is None else found.success
    parts = {name: float(value) for name, value in found.parts.items()}
    return dataclasses.replace(
        trajectory, turns=tuple(turns), reward=float(found.value), reward_parts=parts, success=success
    )


def _checked(found: Reward, trajectory: Trajectory) -> Reward:
    """Return the reward if it is valid, else raise `EnvError`."""
    if not isinstance(found, Reward):
        raise EnvError(f"the reward is a {type(found).__name__}, not a Reward", stage=STAGE)
    for name, value in [("the reward", found.value), *found.parts.items(), *(("a turn", x) for x in found.by_turn)]:
        if isinstance(value, str) or not math.isfinite(value):
            raise EnvError(f"{name} is {value!r}, not a finite number", stage=STAGE)
    if found.by_turn and len(found.by_turn) != len(trajectory.turns):
        raise EnvError(f"rewards of {len(found.by_turn)} turns for {len(trajectory.turns)}", stage=STAGE)
    return found


def _failed(trajectory: Trajectory, error: RolljaxError) -> Trajectory:
    """Return the trajectory of an episode without a reward."""
    fault = Fault("infra" if isinstance(error, InfraError) else "env", STAGE, str(error))
    return dataclasses.replace(trajectory, status="failed", fault=fault)
