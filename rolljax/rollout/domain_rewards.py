"""The rewards of a mixture: of each domain its own, or the recipe's, as its environment knows its tasks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path

from rolljax.envs.mixture import Mixture
from rolljax.rewards.base import Reward, RewardConfig, RewardContext, Scorer
from rolljax.rewards.scoring import Scoring, open_scoring
from rolljax.rollout.domains import Domains
from rolljax.types import Task, Trajectory


class DomainScorer:
    """A scorer of one domain's environment, for tasks of the mixture."""

    def __init__(self, mixture: Mixture, scorer: Scorer) -> None:
        self._mixture, self._scorer = mixture, scorer

    async def score(self, task: Task, trajectory: Trajectory) -> Reward:
        """See `Scorer.score`."""
        inner = self._mixture.inner(task)
        return await self._scorer.score(inner, dataclasses.replace(trajectory, task=inner))

    def counts(self) -> Mapping[str, int]:
        """See `Scorer.counts`."""
        return self._scorer.counts()

    async def close(self) -> None:
        """See `Scorer.close`."""
        await self._scorer.close()


def check_rewards(reward: RewardConfig | None, domains: Domains, around: RewardContext) -> None:
    """Check the rewards before anything is allocated; raises like `RewardConfig.check`."""
    for _, config, own in _by_domain(reward, domains, around):
        config.check(own)


def open_rewards(
    reward: RewardConfig | None,
    domains: Domains,
    around: RewardContext,
    deadline_s: float,
    *,
    only_free: bool = False,
) -> Scoring | None:
    """Open the rewards in the settings; None if there are only the environment's own.

    Args:
      reward: the recipe's, for all tasks of domains without their own. around: the recipe's; each domain gets its own
        environment and folder. only_free: leave out rewards that are not free (`RewardConfig.is_free`).

    Raises:
      ConfigError: see `RewardConfig.open`.
    """
    wanted = [found for found in _by_domain(reward, domains, around) if found[1].is_free or not only_free]
    if not isinstance(around.env, Mixture):
        return open_scoring(wanted[0][1] if wanted else None, around, deadline_s)
    by_env = {name: DomainScorer(around.env, config.open(own)) for name, config, own in wanted}
    return Scoring(None, by_env, deadline_s=deadline_s) if by_env else None


def _by_domain(
    reward: RewardConfig | None, domains: Domains, around: RewardContext
) -> Iterator[tuple[str, RewardConfig, RewardContext]]:
    """Yield the name of each domain that has a reward, that reward, and its context."""
    if not isinstance(around.env, Mixture):
        if reward is not None:
            yield "", reward, around
        return
    for name, env in around.env.specs.items():
        config = domains[name].reward if name in domains and domains[name].reward else reward
        if config is not None:
            folder = str(Path(around.cache_dir) / name.replace(":", "_")) if around.cache_dir else ""
            yield name, config, dataclasses.replace(around, env=env, cache_dir=folder)
