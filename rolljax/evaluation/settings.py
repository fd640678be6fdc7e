"""Settings of evaluations: environments with their tasks and limits, attempts, sampling, statistics."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Annotated

from rolljax.envs.base import EnvSpec
from rolljax.envs.pool import PoolConfig
from rolljax.envs.tasks import first_tasks
from rolljax.errors import Checked, ConfigError, Range, check_fields
from rolljax.recipe import Recipe
from rolljax.rewards.base import RewardConfig
from rolljax.rollout.agents.program import AgentProgram
from rolljax.rollout.domains import DomainSettings
from rolljax.rollout.episodes import RolloutConfig
from rolljax.types import Task


@dataclasses.dataclass(frozen=True)
class Benchmark(Checked):
    """Tasks of one environment, and the limits within which they are played."""

    env: EnvSpec
    num_tasks: Annotated[int, Range(low=1)] = 256
    """Number of tasks: the first `num_tasks` different ones in index order, or all if there are fewer. Tasks that
    compare two answers are asked in both orders of the answers (`EnvSpec.variants`)."""
    held_out_frac: Annotated[float, Range(above=0, high=1)] = 1.0
    """Share of all tasks that forms the split from which the tasks are taken, chosen by the hash of their content;
    training with the same `Evaluation.held_out_frac` never sees these tasks. 1: all tasks."""
    max_answer_tok: Annotated[int, Range(low=1)] = 512
    """Maximum number of tokens in one answer (one turn)."""
    rollout: RolloutConfig = RolloutConfig()
    pool: PoolConfig = PoolConfig()
    agent: AgentProgram | None = None
    """The program that plays the episodes, if one does."""
    reward: RewardConfig | None = None
    """The reward of episodes; None: the environment's own."""
    domains: Mapping[str, DomainSettings] = dataclasses.field(default_factory=dict)
    """Settings of single domains of a mixture, by name (see `Recipe.domains`)."""
    thinking: bool = False
    """Whether to put a server's `reasoning_content` before its answer, between <think> and </think>, as models of this
    process write it."""

    @staticmethod
    def of_recipe(recipe: Recipe) -> Benchmark:
        """Return the held-out tasks of a run, as its own evaluations play them."""
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
        """Return the tasks, in order, each in all of its forms (`EnvSpec.variants`).

        Raises:
          DataError: the split is empty, or a task cannot be made.
        """
        found = first_tasks(self.env, self.num_tasks, self.held_out_frac)
        return [variant for task in found for variant in self.env.variants(task)]


@dataclasses.dataclass(frozen=True)
class Attempts:
    """Settings of the attempts at every task."""

    num: Annotated[int, Range(low=1)] = 1
    """Number of attempts per task."""
    at: tuple[int, ...] = ()
    """The k of pass@k and maj@k; empty: 1, 2, 4, ... and `num`."""
    temperature: Annotated[float, Range(low=0)] = 1.0
    """Sampling temperature; 0: greedy."""
    top_p: Annotated[float, Range(above=0, high=1)] = 1.0
    """Nucleus sampling: the smallest set of tokens with at least this probability; 1: all tokens."""
    top_k: Annotated[int, Range(low=0)] = 0
    """Number of most probable tokens that are sampled from; 0: all."""
    min_p: Annotated[float, Range(low=0, high=1)] = 0.0
    """Smallest probability of a sampled token, as a share of the highest one; 0: no limit."""
    seed: int = 0
    """Seed of everything that is sampled."""
    confidence: Annotated[float, Range(above=0, below=1)] = 0.95
    """Confidence level of the intervals."""
    resamples: Annotated[int, Range(low=100)] = 10_000
    """Number of bootstrap resamples for the intervals."""
    concurrency: Annotated[int, Range(low=1)] = 256
    """Maximum number of concurrent episodes."""
    stall_s: Annotated[float, Range(above=0)] = 3600.0
    """Longest time in seconds without a completed answer while answers are under way."""
    weights: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Weights of environments by name, in any unit, for a weighted mean in the table. Give weights for all
    environments, or for none."""

    def __post_init__(self) -> None:
        check_fields(self)
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
