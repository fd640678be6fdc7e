"""The settings of a run that its policy needs: its model, adapters, tokenizer, template and sampler.

They come from `config.resolved.json`. Neither the environment nor the reward of the run, its rows or its algorithm need
be here: a run that a notebook made with functions of its own is exported, served and evaluated on other tasks from any
process.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rolljax.envs.base import Env, EnvSpec
from rolljax.errors import ConfigError
from rolljax.recipe import Phase, Recipe
from rolljax.run.folder import RunFolder
from rolljax.trainer.algorithms.sft import Sft
from rolljax.types import Task

_OF_TRAINING = ("env", "phases", "reward", "agent", "filters", "domains", "prefixes", "trackers")
"""Fields of `Recipe` that no policy needs."""
_OF_SAMPLER = (
    *("model", "lora", "chat_template", "dtype", "attention", "router_aux_coef", "max_answer_tok", "sampler", "seed"),
    "prefixes",
)
"""Fields of `Recipe` that a sampler in another process needs."""


@dataclasses.dataclass(frozen=True)
class _NoTasks(EnvSpec):
    """Placeholder for the environment where only the policy of a run is used."""

    @property
    def name(self) -> str:
        return "no tasks"

    def task(self, index: int) -> Task:
        raise ConfigError("cannot be used here: only the run's policy was read", setting="Recipe.env")

    def make(self) -> Env:
        raise ConfigError("cannot be used here: only the run's policy was read", setting="Recipe.env")


def policy_recipe(run: str | Path) -> Recipe:
    """Return the settings of the policy in a run folder, with an environment without tasks and a phase of no use.

    Raises:
      CheckpointError: it is not a run folder, or its settings are damaged. ConfigError: the class of the model is not
        here.
    """
    folder = RunFolder(run)
    folder.config_file()
    given = folder.stored_fields(Recipe, leave_out=_OF_TRAINING)
    return _untrained(given)


def _untrained(given: Mapping[str, Any]) -> Recipe:
    return Recipe(_NoTasks(), (Phase("policy", Sft(), 1, prompts_per_step=1),), **given)


def sampler_settings(recipe: Recipe) -> dict[str, Any]:
    """Return the settings of a recipe that a sampler in another process needs, resolved (`config.resolved`)."""
    from rolljax.config import resolved

    return {key: value for name in _OF_SAMPLER for key, value in resolved.flatten(getattr(recipe, name), name).items()}


def sampler_recipe(settings: Mapping[str, Any]) -> Recipe:
    """Return the recipe of `sampler_settings`, with an environment without tasks and a phase of no use.

    Raises:
      ConfigError: a class is not here, or a value does not fit.
    """
    from rolljax.config import resolved

    others = {field.name for field in dataclasses.fields(Recipe)} - set(_OF_SAMPLER)
    return _untrained(resolved.build_fields(settings, Recipe, others))


def stored_phases(run: str | Path) -> tuple[Phase, ...]:
    """Return the phases of a run. Raises as `policy_recipe` does, and `ConfigError` if an algorithm is not here."""
    others = {field.name for field in dataclasses.fields(Recipe)} - {"phases"}
    return tuple(RunFolder(run).stored_fields(Recipe, leave_out=others)["phases"])
