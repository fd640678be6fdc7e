"""Recipes and simulations for tests: any sizes, and time limits that nothing reaches."""

import dataclasses

import numpy as np

from rolljax.envs.catalog import make_spec
from rolljax.envs.pool import PoolConfig
from rolljax.recipe import Phase, Recipe
from rolljax.sampler.settings import SamplerConfig
from rolljax.simulate import simulate
from rolljax.simulation.timings import Distribution, EngineTimings, Timings
from rolljax.trainer.algorithms.reinforce import Reinforce

TOKEN_A_SECOND = EngineTimings(step_s=1.0)
LENGTHS = Distribution("lognormal", 200.0, 1.0)


def recipe(*, slots, prompts, group, steps, answer_tok=4000, algorithm=None, pool=None, sampler=None, seed=0, **phase):
    """Return a recipe of one phase whose episodes have up to 20 turns."""
    return Recipe(
        make_spec("sokoban"),
        (Phase("rl", algorithm or Reinforce(), steps, prompts, group, **phase),),
        max_answer_tok=answer_tok,
        sampler=SamplerConfig(slots=slots, max_context=21 * answer_tok + 100, steps_per_dispatch=1, **(sampler or {})),
        pool=pool or PoolConfig(where="process", reset_s=1e6, step_s=1e6, episode_s=1e7),
        seed=seed,
    )


def step_s(recipe, timings, skip=0):
    """Return the mean seconds of a step."""
    _, recorder = simulate(recipe, timings)
    return float(np.mean([row["time/step_s"] for row in recorder.rows[skip:]]))


def with_scheduling(timings, scheduling):
    return dataclasses.replace(timings, engine=dataclasses.replace(timings.engine, scheduling=scheduling))


def timings(answer_tok=LENGTHS, engine=TOKEN_A_SECOND, **others):
    return Timings(answer_tok=answer_tok, engine=engine, **others)
