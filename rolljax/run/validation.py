"""Fixed validation tasks of a mixture's domains, with the reference answers on which perplexities are measured."""

from __future__ import annotations

import asyncio

from rolljax.envs.mixture import Mixture
from rolljax.envs.tasks import first_tasks
from rolljax.errors import DataError
from rolljax.recipe import Recipe
from rolljax.rollout.episodes import Rollouts
from rolljax.types import EVAL_STREAM, Group


async def reference_groups(recipe: Recipe, rollouts: Rollouts, tasks: int) -> dict[str, list[Group]]:
    """Return, by domain, the first `tasks` held-out tasks (or all) with the answers of the environment's scripted
    player.

    Args:
      rollouts: of a phase that learns from reference answers.

    Raises:
      DataError: a domain has no held-out task, or none of them has a reference answer.
    """
    mixture = recipe.env
    assert isinstance(mixture, Mixture), "there are no domains"
    found: dict[str, list[Group]] = {}
    for name, spec in mixture.specs.items():
        chosen = [mixture.outer(name, task) for task in first_tasks(spec, tasks, recipe.evaluation.held_out_frac)]
        groups = await asyncio.gather(
            *(rollouts.group(t, stream=EVAL_STREAM, prompt_index=i, group_size=1) for i, t in enumerate(chosen))
        )
        found[name] = [group for group in groups if group.trajectories[0].status == "ok"]
        if not found[name]:
            fault = groups[-1].trajectories[0].fault
            raise DataError(f"domain {name}: none of {len(groups)} validation tasks has a reference answer: {fault}")
    return found
