"""Models to evaluate: loaded into this process, or on a server (`endpoint.py`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, Self

import jax

from rolljax.concurrency.waits import Sleeper
from rolljax.envs.base import EnvSpec
from rolljax.envs.pool import Pool
from rolljax.errors import ConfigError, RolljaxError, needed
from rolljax.evaluation.settings import Attempts, Benchmark
from rolljax.model import hf
from rolljax.model.decoder import Dtype, Params
from rolljax.model.files import folder_digest
from rolljax.model.folder import folder_remedy
from rolljax.recipe import Phase, Recipe
from rolljax.rewards.scoring import Scoring
from rolljax.rollout.agents.program import own_program
from rolljax.rollout.episodes import EpisodeRollouts, Rollouts, SamplerPolicy
from rolljax.run.checkpoint import Step
from rolljax.run.preflight import ResolvedRecipe, load_chat, resolve
from rolljax.run.runtime import open_sampler
from rolljax.run.trained_weights import initial_params, trained_checkpoint
from rolljax.sampler.settings import SamplerConfig
from rolljax.trainer.algorithms.sft import Sft
from rolljax.types import SamplingParams

MAX_CONTEXT = 4096
"""Default limit on the context of a model folder."""


class EvaluatedModel(Protocol):
    """A model under evaluation. Use as a context manager.

    name: for people. identity: must be the same for an evaluation to resume. version: of the weights.
    """

    @property
    def name(self) -> str: ...
    @property
    def identity(self) -> Mapping[str, Any]: ...
    @property
    def version(self) -> int: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *error: object) -> None: ...
    def rollouts(
        self, benchmark: Benchmark, pool: Pool, attempts: Attempts, scoring: Scoring | None = None
    ) -> EpisodeRollouts:
        """Return episodes of a benchmark with this model as their policy. scoring: see `EpisodeRollouts`."""
        ...

    def counts(self) -> Mapping[str, int]:
        """Return transport errors by kind; empty for in-process models."""
        ...

    def fatal(self) -> RolljaxError | None:
        """Return the error because of which no further answer can be expected; None otherwise."""
        ...

    def inboxes(self) -> tuple[Sleeper, ...]:
        """Return the threads that a watchdog watches."""
        ...

    async def close(self) -> None:
        """Release resources that belong to the event loop of the episodes."""


class SamplerModel:
    """A model whose weights are in this process, sampled with the sampler of training.

    Args:
      weights: as `Model.bind` takes them. run: the run folder that they come from.
    """

    def __init__(
        self,
        resolved: ResolvedRecipe,
        weights: Params,
        name: str,
        identity: Mapping[str, Any],
        version: int = 0,
        run: str | Path | None = None,
    ) -> None:
        self.name, self.identity, self.version = name, identity, version
        self.resolved, self.chat = resolved, load_chat(resolved, run)
        self.sampler, _ = open_sampler(resolved, lambda: weights, version, self.chat.vocabulary, longest_prompt=0)
        self._hosts: list[Any] = []

    def __enter__(self) -> SamplerModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.sampler.close()

    def rollouts(
        self, benchmark: Benchmark, pool: Pool, attempts: Attempts, scoring: Scoring | None = None
    ) -> EpisodeRollouts:
        context = self.resolved.recipe.sampler.max_context
        if benchmark.max_answer_tok >= context:
            raise ConfigError(
                f"leaves no room for a prompt in a context of {context} tokens",
                setting="max_answer_tok",
                value=benchmark.max_answer_tok,
                remedy="lower it, or raise max_context",
            )
        params = SamplingParams(
            attempts.temperature,
            benchmark.max_answer_tok,
            self.chat.stop_ids,
            top_k=attempts.top_k,
            top_p=attempts.top_p,
            min_p=attempts.min_p,
        )
        own = {name: d.sampling(params, in_training=False) for name, d in benchmark.domains.items()}
        policy = SamplerPolicy(self.sampler, params, attempts.seed, domains=own)
        limits = (benchmark.env.max_turns, context, benchmark.max_answer_tok)
        agent = benchmark.agent or own_program(benchmark.env)
        chat = self.chat.for_streams() if benchmark.env.max_turns > 1 or agent else self.chat
        if agent is None:
            return Rollouts(pool, chat, policy, *limits, benchmark.rollout, scoring=scoring)
        with needed("uvicorn", "Recipe.agent"):
            from rolljax.rollout.agents.host import AgentHost, AgentRollouts

        host = AgentHost(agent.for_env(benchmark.env), self.sampler, chat, context)
        self._hosts.append(host)
        return AgentRollouts(pool, chat, policy, *limits, benchmark.rollout, scoring=scoring, host=host)

    def counts(self) -> Mapping[str, int]:
        return {}

    def fatal(self) -> RolljaxError | None:
        return self.sampler.error

    def inboxes(self) -> tuple[Sleeper, ...]:
        return (self.sampler.inbox,)

    async def close(self) -> None:
        for host in self._hosts:
            await host.close()
        self._hosts.clear()


def of_run(recipe: Recipe, run: str | Path, step: Step | None = None) -> SamplerModel:
    """Return the policy of a run folder.

    Args:
      recipe: of the run. step: of a kept checkpoint, or `best` (`Checkpoints.find`); None: the newest.
    """
    resolved = resolve(recipe.in_this_process)
    params, saved = trained_checkpoint(resolved, run, step)
    steps = saved.progress.total_steps
    name = f"{Path(run).resolve().name} step {steps}"
    identity = {"kind": "run", "path": str(Path(run).resolve()), "checkpoint": saved.name, **_precision(recipe)}
    return SamplerModel(resolved, params, name, identity, saved.progress.version, run)


def of_folder(recipe: Recipe) -> SamplerModel:
    """Return the untrained model of `Recipe.model`, a Hugging Face folder."""
    resolved = resolve(recipe.in_this_process)
    folder = Path(str(recipe.model)).resolve()
    identity = {"kind": "folder", "path": str(folder), "digest": folder_digest(folder), **_precision(recipe)}
    return SamplerModel(resolved, initial_params(resolved), folder.name, identity)


def folder_recipe(
    folder: str, env: EnvSpec, *, max_context: int | None = None, max_answer_tok: int = 512, dtype: Dtype | None = None
) -> Recipe:
    """Return settings for sampling from a Hugging Face folder that belongs to no run.

    Args:
      max_context: tokens of prompt and answer; None: the model's, at most `MAX_CONTEXT`.
      dtype: of computations; None: float32 on CPU, else bfloat16.

    Raises:
      ConfigError: the folder is no Hugging Face folder.
    """
    if not (Path(folder) / "config.json").is_file():
        raise ConfigError(
            "is not a Hugging Face folder: it has no config.json",
            setting="--model",
            value=folder,
            remedy=folder_remedy(folder),
        )
    positions = hf.read_config(folder).max_position
    return Recipe(
        env,
        (Phase("evaluation", Sft(), 1, prompts_per_step=1),),
        model=folder,
        dtype=dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16"),
        max_answer_tok=max_answer_tok,
        sampler=SamplerConfig(max_context=max_context or min(positions, MAX_CONTEXT)),
        agent=own_program(env),
    )


def with_context(recipe: Recipe, max_context: int | None) -> Recipe:
    """Return the recipe with another context of its sampler, if one is given."""
    if max_context is None:
        return recipe
    return dataclasses.replace(recipe, sampler=dataclasses.replace(recipe.sampler, max_context=max_context))


def _precision(recipe: Recipe) -> dict[str, Any]:
    """Return the settings that change a model's answers."""
    found = {"dtype": recipe.dtype, "max_context": recipe.sampler.max_context}
    return found | ({"chat_template": recipe.chat_template} if recipe.chat_template else {})
