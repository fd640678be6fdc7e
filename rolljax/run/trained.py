"""The policy of a run folder, for verbs that only use it."""

from __future__ import annotations

from pathlib import Path

from rolljax.errors import CheckpointError
from rolljax.model.decoder import Params
from rolljax.run.console import Console
from rolljax.run.folder import RunFolder
from rolljax.run.initial_weights import base_weights, start_params
from rolljax.run.preflight import ResolvedRecipe
from rolljax.run.trainer import make_trainer


def trained_params(resolved: ResolvedRecipe, run: str | Path) -> tuple[Params, int]:
    """The weights of a run's newest checkpoint, as `Model.bind` takes them, and their policy version.

    Raises:
      CheckpointError: there is none, or it is damaged.
    """
    folder = RunFolder(run)
    saved = folder.latest(Console().say)
    if saved is None:
        raise CheckpointError(f"{run} holds no checkpoint yet")
    trainer = make_trainer(resolved, saved.progress.phase, {}, base_weights(resolved))
    state = folder.checkpoints.state(saved.name, trainer.abstract(), trainer.shardings)
    return trainer.full_params(state.params), saved.progress.version


def initial_params(resolved: ResolvedRecipe) -> Params:
    """The weights that a run of this recipe would start from, as `Model.bind` takes them."""
    return resolved.model.full_params(start_params(resolved), base_weights(resolved))
