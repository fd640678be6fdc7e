"""Rewards made of other rewards: sums, gates, bounds, vetoes and curves. They can be nested.

Parts are recorded under the names given in the settings; the parts of a nested reward follow after a slash
(`{"right": 1.0, "short": 0.4, "short/outside_tok": 24.0}`).
"""

from __future__ import annotations

import asyncio
import bisect
import collections
import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence

from rolljax.errors import ConfigError, Range
from rolljax.rewards.base import Reward, RewardConfig, RewardContext, Scorer
from rolljax.types import Task, Trajectory

Combine = Callable[[Trajectory, Sequence[Reward]], Reward]
"""Computes one reward from several rewards of the same trajectory."""


class Composed:
    """A scorer that combines other scorers, which run concurrently."""

    def __init__(self, scorers: Sequence[Scorer], combine: Combine) -> None:
        self._scorers, self._combine = scorers, combine

    async def score(self, task: Task, trajectory: Trajectory) -> Reward:
        """Return the reward of an episode that did not fail."""
        asked = [asyncio.ensure_future(scorer.score(task, trajectory)) for scorer in self._scorers]
        try:
            return self._combine(trajectory, await asyncio.gather(*asked))
        finally:  # if one has no verdict, the others are not needed
            for future in asked:
                future.cancel()

    def counts(self) -> Mapping[str, int]:
        """Return the number of calls, and of their faults by kind."""
        found: collections.Counter[str] = collections.Counter()
        for scorer in self._scorers:
            found.update(scorer.counts())
        return found

    async def close(self) -> None:
        """Release all resources."""
        for scorer in self._scorers:
            await scorer.close()


class Composition(RewardConfig):
    """A reward made of others."""

    @property
    def inner(self) -> Mapping[str, RewardConfig]:
        """Return the inner rewards by the names that their parts get."""
        raise NotImplementedError

    def combine(self, trajectory: Trajectory, found: Sequence[Reward]) -> Reward:
        """Combine the rewards of `inner`, given in order, into one."""
        raise NotImplementedError

    @property
    def is_free(self) -> bool:
        return all(reward.is_free for reward in self.inner.values())

    def check(self, around: RewardContext) -> None:
        for reward in self.inner.values():
            reward.check(around)

    def open(self, around: RewardContext) -> Composed:
        return Composed([reward.open(around) for reward in self.inner.values()], self.combine)

    def named(self, found: Sequence[Reward]) -> dict[str, float]:
        """Return the parts of all rewards, under the names of `inner`."""
        parts: dict[str, float] = {}
        for name, reward in zip(self.inner, found, strict=True):
            parts[name] = reward.value
            parts |= {f"{name}/{part}": value for part, value in reward.parts.items()}
        return parts


@dataclasses.dataclass(frozen=True)
class Sum(Composition):
    """A weighted sum of named terms. `success` is taken from the first term that defines it."""

    terms: Mapping[str, RewardConfig]
    """Rewards by the names that they get in `reward_parts`."""
    weights: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Weights of the terms by name; a term that is not named has weight 1."""

    def __post_init__(self) -> None:
        if not self.terms:
            raise ConfigError("has no term", setting="Sum.terms", value=self.terms, remedy="give at least one")
        unknown = sorted(self.weights.keys() - self.terms.keys())
        if unknown:
            raise ConfigError(
                f"weighs what is no term: {', '.join(unknown)}",
                setting="Sum.weights",
                value=dict(self.weights),
                remedy=f"one of {', '.join(self.terms)}",
            )

    @property
    def name(self) -> str:
        return "sum"

    @property
    def inner(self) -> Mapping[str, RewardConfig]:
        return self.terms

    def combine(self, trajectory: Trajectory, found: Sequence[Reward]) -> Reward:
        weights = [self.weights.get(name, 1.0) for name in self.terms]
        by_turn = [0.0] * len(trajectory.turns)
        for weight, reward in zip(weights, found, strict=True):
            for turn, share in enumerate(reward.by_turn):
                by_turn[turn] += weight * share
        value = sum(weight * reward.value for weight, reward in zip(weights, found, strict=True))
        success = next((reward.success for reward in found if reward.success is not None), None)
        return Reward(value, self.named(found), success, tuple(by_turn) if any(r.by_turn for r in found) else ())


@dataclasses.dataclass(frozen=True)
class Gate(Composition):
    """A reward that counts only if another reward is high enough, or if the episode succeeded."""

    reward: RewardConfig
    """The reward to gate."""
    by: RewardConfig | None = None
    """The reward that opens the gate; None: the environment's `success` opens it."""
    at_least: float = 1.0
    """Least value of `by` that opens it."""
    otherwise: float = 0.0
    """The value while it is closed."""

    @property
    def name(self) -> str:
        return self.reward.name

    @property
    def inner(self) -> Mapping[str, RewardConfig]:
        return {"gated": self.reward} | ({"gate": self.by} if self.by else {})

    def combine(self, trajectory: Trajectory, found: Sequence[Reward]) -> Reward:
        is_open = found[1].value >= self.at_least if self.by else trajectory.success
        parts = self.named(found) | {"open": float(is_open)}
        if not is_open:
            return Reward(self.otherwise, parts, found[0].success)
        return dataclasses.replace(found[0], parts=parts)


@dataclasses.dataclass(frozen=True)
class Clip(Composition):
    """A reward within bounds."""

    reward: RewardConfig
    """The reward to bound."""
    low: float | None = None
    """Lower bound of the reward; None: no bound."""
    high: float | None = None
    """Upper bound of the reward; None: no bound."""

    def __post_init__(self) -> None:
        if self.low is None and self.high is None:
            raise ConfigError("bounds nothing", setting="Clip.low", value=None, remedy="set low, high, or both")
        if self.high is not None:
            Range(high=self.high).check(self, "low")

    @property
    def name(self) -> str:
        return self.reward.name

    @property
    def inner(self) -> Mapping[str, RewardConfig]:
        return {"unclipped": self.reward}

    def combine(self, trajectory: Trajectory, found: Sequence[Reward]) -> Reward:
        value = found[0].value
        bounded = max(value, self.low) if self.low is not None else value
        bounded = min(bounded, self.high) if self.high is not None else bounded
        by_turn = found[0].by_turn if bounded == value else ()
        return Reward(bounded, self.named(found), found[0].success, by_turn)


@dataclasses.dataclass(frozen=True)
class Veto(Composition):
    """A reward that another reward can veto: an answer with made-up facts gets `to`, however good the rest is
    (STAgent). A vetoed episode counts as not solved."""

    reward: RewardConfig
    """The reward without a veto."""
    by: RewardConfig
    """The reward that decides."""
    below: float | None = None
    """Threshold below which the reward `by` triggers the veto (None: no such threshold)."""
    above: float | None = None
    """Threshold above which the reward `by` triggers the veto (None: no such threshold)."""
    to: float = 0.0
    """Reward of a vetoed episode."""

    def __post_init__(self) -> None:
        if self.below is None and self.above is None:
            raise ConfigError(
                "can never veto", setting="Veto.below", value=None, remedy="set Veto.below, Veto.above, or both"
            )

    @property
    def name(self) -> str:
        return self.reward.name

    @property
    def inner(self) -> Mapping[str, RewardConfig]:
        return {"unless": self.reward, "by": self.by}

    def combine(self, trajectory: Trajectory, found: Sequence[Reward]) -> Reward:
        value = found[1].value
        is_vetoed = self.below is not None and value < self.below or self.above is not None and value > self.above
        parts = self.named(found) | {"vetoed": float(is_vetoed)}
        return Reward(self.to, parts, False) if is_vetoed else dataclasses.replace(found[0], parts=parts)


@dataclasses.dataclass(frozen=True)
class Shaping(Composition):
    """A reward mapped through a piecewise linear curve: another scale, a bonus near the top, a calibration."""

    reward: RewardConfig
    """The reward to shape."""
    points: tuple[tuple[float, float], ...]
    """`(before, after)` in rising order of the first; linear in between, constant beyond the ends."""

    def __post_init__(self) -> None:
        if not self.points or any(b[0] <= a[0] for a, b in itertools.pairwise(self.points)):
            raise ConfigError(
                "does not rise in its first numbers",
                setting="Shaping.points",
                value=self.points,
                remedy="like ((0, 0), (0.5, 0.1), (1, 1))",
            )

    @property
    def name(self) -> str:
        return self.reward.name

    @property
    def inner(self) -> Mapping[str, RewardConfig]:
        return {"unshaped": self.reward}

    def combine(self, trajectory: Trajectory, found: Sequence[Reward]) -> Reward:
        return Reward(on_curve(self.points, found[0].value), self.named(found), found[0].success)


def on_curve(points: Sequence[tuple[float, float]], x: float) -> float:
    """Interpolate linearly at `x` between `points`; beyond the ends return the value of the nearest point."""
    i = bisect.bisect_left([a for a, _ in points], x)
    if i == 0 or i == len(points):
        return points[min(i, len(points) - 1)][1]
    (x0, y0), (x1, y1) = points[i - 1], points[i]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
