"""Settings of evaluations: environments with their tasks and limits, attempts, sampling, statistics."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from rolljax.envs.base import EnvSpec
from rolljax.envs.pool import PoolConfig
from rolljax.envs.tasks import first_tasks
from rolljax.errors import ConfigError, check_range
from rolljax.recipe import Recipe
from rolljax.rewards.base import RewardConfig
from rolljax.rollout.agents.program import AgentProgram
from rolljax.rollout.domains import DomainSettings
from rolljax.rollout.episodes import RolloutConfig
from rolljax.types import Task


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """Tasks of one environment, and the limits within which they are played.

    num_tasks: the first `num_tasks` different tasks in index order, or all if there are fewer. A judge's are asked in
      both orders of the answers (`EnvSpec.variants`).
    held_out_frac: of the split they are taken from: that share of all tasks, by the hash of their content, which
      training with the same `Evaluation.held_out_frac` never sees. 1: all tasks.
    max_answer_tok: most tokens of one answer (one turn). agent: the program that plays the episodes, if one does.
    reward: the reward of episodes; None: the environment's own. domains: of a mixture, see `Recipe.domains`.
    thinking: have a server's `reasoning_content` before its answer, between <think> and </think>, as models of this
      process write it.
    """

    env: EnvSpec
    num_tasks: int = 256
    held_out_frac: float = 1.0
    max_answer_tok: int = 512
    rollout: RolloutConfig = RolloutConfig()
    pool: PoolConfig = PoolConfig()
    agent: AgentProgram | None = None
    reward: RewardConfig | None = None
    domains: Mapping[str, DomainSettings] = dataclasses.field(default_factory=dict)
    thinking: bool = False

    def __post_init__(self) -> None:
        check_range(self, "num_tasks", "max_answer_tok", low=1)
        check_range(self, "held_out_frac", above=0, high=1)

    @staticmethod
    def of_recipe(recipe: Recipe) -> Benchmark:
        """The held-out tasks of a run, as its own evaluations play them."""
        return Benchmark(
            recipe.env,
            recipe.evaluation.tasks,
            recipe.evaluation.held_out_frac,
            recipe.max_answer_tok,
            recipe.rollout,
            recipe.pool,
            recipe.agent,
            recipe.reward,
            recipe.domains,
        )

    def tasks(self) -> list[Task]:
        """The tasks, in order, each in all of its forms (`EnvSpec.variants`).

        Raises:
          DataError: the split is empty, or a task cannot be made.
        """
        found = first_tasks(self.env, self.num_tasks, self.held_out_frac)
        return [variant for task in found for variant in self.env.variants(task)]


@dataclasses.dataclass(frozen=True)
class Attempts:
    """How every task is tried.

    num: attempts at each task. at: the k of pass@k and maj@k; empty: 1, 2, 4, ... and `num`.
    temperature (0: greedy), top_p, top_k, min_p: of sampling. seed: of everything that is sampled.
    confidence, resamples: of the intervals. concurrency: most episodes at a time.
    weights: of environments by name, in any unit: the table then has their weighted mean. All of them, or none.
    stall_s: longest that no answer may become complete while some are under way.
    """

    num: int = 1
    at: tuple[int, ...] = ()
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    confidence: float = 0.95
    resamples: int = 10_000
    concurrency: int = 256
    stall_s: float = 3600.0
    weights: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        check_range(self, "num", "concurrency", low=1)
        check_range(self, "temperature", "top_k", low=0)
        check_range(self, "top_p", above=0, high=1)
        check_range(self, "min_p", low=0, high=1)
        check_range(self, "confidence", above=0, below=1)
        check_range(self, "resamples", low=100)
        check_range(self, "stall_s", above=0)
        for name, weight in self.weights.items():
            if not (weight > 0 and math.isfinite(weight)):
                raise ConfigError(
                    f"is no weight for {name}", setting="Attempts.weights", value=weight, remedy="a number above 0"
                )
        for k in self.at:
            if not 1 <= k <= self.num:
                raise ConfigError(
                    f"cannot be estimated from {self.num} attempts at a task",
                    setting="Attempts.at",
                    value=k,
                    remedy=f"1 to {self.num}, or more attempts",
                )

    @property
    def ks(self) -> tuple[int, ...]:
        """The k of pass@k and maj@k, in order."""
        powers = [2**i for i in range(self.num.bit_length()) if 2**i < self.num]
        return tuple(sorted({*(self.at or (*powers, self.num))}))
