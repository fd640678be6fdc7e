"""The policy of a run folder, for verbs that only use it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rolljax.console.progress import Console
from rolljax.errors import CheckpointError, ConfigError
from rolljax.model.decoder import Params
from rolljax.run.checkpoint import Saved, Step
from rolljax.run.folder import RunFolder
from rolljax.run.initial_weights import base_weights, plain_params, start_params
from rolljax.run.preflight import ResolvedRecipe
from rolljax.trainer.mesh import param_shardings


def trained_params(resolved: ResolvedRecipe, run: str | Path, step: Step | None = None) -> tuple[Params, int]:
    """Return the weights of a run's checkpoint, as the argument of `Model.bind`, and their policy version.

    Args:
      step: see `trained_checkpoint`.

    Raises:
      CheckpointError: there is no checkpoint, or it is damaged.
    """
    params, saved = trained_checkpoint(resolved, run, step)
    return params, saved.progress.version


def trained_checkpoint(resolved: ResolvedRecipe, run: str | Path, step: Step | None = None) -> tuple[Params, Saved]:
    """Return the weights of a run's checkpoint, as `Model.bind` takes them, and the checkpoint's record.

    Of the run's settings only the model is needed (`run.policy`).

    Args:
      step: after which it was saved, or `best`: the one of the highest held-out reward; None: the newest.

    Raises:
      CheckpointError: there is none of that step, or it is damaged.
    """
    folder = RunFolder(run)
    saved = folder.latest(Console().say) if step is None else folder.checkpoints.find(step)
    if saved is None:
        raise CheckpointError(f"{run} holds no checkpoint yet")
    model = resolved.model
    shardings = param_shardings(resolved.mesh, model.axes(), model.abstract())
    params = folder.checkpoints.params(saved.name, model.abstract(), shardings)
    return model.full_params(params, base_weights(resolved)), saved


def averaged_params(resolved: ResolvedRecipe, run: str | Path, steps: Sequence[int]) -> tuple[Params, Saved]:
    """Return the mean of the weights of several checkpoints of a run, adapters added, of the plain decoder in float32;
    and the record of the last of them. The sum is in float64 on the host and is rounded once.

    Raises:
      ConfigError: fewer than two different steps, or one that is not kept. CheckpointError: one is damaged, or holds
        weights that are not finite.
    """
    if len(set(steps)) < max(2, len(steps)):
        raise ConfigError(
            "must be two or more different steps", setting="--average", value=tuple(steps), remedy="--average 100,150"
        )
    checkpoints = RunFolder(run).checkpoints
    found = {step: checkpoints.find(step) for step in steps}  # before anything is loaded
    total: Any = None
    for step in steps:
        params = plain_params(resolved, trained_checkpoint(resolved, run, step)[0])
        if not all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(params)):
            raise CheckpointError(f"the weights of step {step} are not finite, so neither would their mean be")
        wide = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
        total = wide if total is None else jax.tree.map(np.add, total, wide)
    mean = jax.tree.map(lambda x: np.asarray(x / len(steps), np.float32), total)
    placed = param_shardings(resolved.mesh, resolved.model.plain.axes(), resolved.model.plain.abstract())
    return jax.device_put(mean, placed), found[max(steps)]


def initial_params(resolved: ResolvedRecipe) -> Params:
    """Return the weights from which a run of this recipe would start, as the argument of `Model.bind`."""
    return resolved.model.full_params(start_params(resolved), base_weights(resolved))
