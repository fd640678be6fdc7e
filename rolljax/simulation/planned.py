"""Timings of a recipe from the figures of `rolljax.plan` on its compiled programs."""

from __future__ import annotations

from collections.abc import Mapping

from rolljax.cluster.placement import Remote
from rolljax.recipe import Recipe
from rolljax.simulation.timings import Distribution, EngineTimings, Timings, TrainerTimings


def planned(
    recipe: Recipe,
    times: Mapping[str, float],
    decode_s: float,
    *,
    prefill_tok_s: float = 0.0,
    swap_s: float | None = None,
) -> Timings:
    """Return timings with the seconds of a plan, and with its lengths: every answer is as long as it may be.

    A sampler is one replica: a dispatch of its decode program takes the same time however many slots are busy.

    Args:
      times: seconds of training and publishing of a step (`train_s`, `publish_s`).
      decode_s: of one decode dispatch. prefill_tok_s: of a prompt token. swap_s: that decoding stops while new weights
        are put in place, on devices of the sampler's own; None: trainer and sampler share their devices.
    """
    placement = recipe.placement
    return Timings(
        answer_tok=Distribution(center=float(min(recipe.max_answer_tok, recipe.sampler.max_context))),
        turns=Distribution(center=float(recipe.env.max_turns)),
        engine=EngineTimings(
            replicas=placement.samplers if isinstance(placement, Remote) else 1,
            step_s=decode_s / recipe.sampler.steps_per_dispatch,
            prefill_s=prefill_tok_s,
        ),
        trainer=TrainerTimings(step_s=times["train_s"], publish_s=times["publish_s"], pause_s=swap_s or 0.0),
        shared_devices=swap_s is None,
    )
