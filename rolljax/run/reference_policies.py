"""Policies that stay as they are while a phase trains: references, teachers, scorers.

A source is `run_start` (the initial weights of the run, made again), `phase_start` (the initial weights of this phase,
saved in the folder of checkpoints when it starts) or a local Hugging Face folder with the same vocabulary.

If adapters are trained, the initial weights of the run are the base itself, without adapters; of the starts of later
phases only the adapters are saved and kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from rolljax.errors import CheckpointError, ConfigError
from rolljax.model import hf
from rolljax.model.decoder import Model, Params
from rolljax.model.lora import Adapted
from rolljax.run import checkpoint
from rolljax.run.folder import RunFolder
from rolljax.run.initial_weights import start_params
from rolljax.run.preflight import ResolvedRecipe
from rolljax.trainer.mesh import param_shardings
from rolljax.trainer.update import ReferencePolicies

OWN = ("run_start", "phase_start")


def check(resolved: ResolvedRecipe) -> None:
    """Raise `ConfigError` for a source of a policy that this run cannot use."""
    for phase in resolved.recipe.phases:
        for source in phase.algorithm.needs().references:
            if source not in OWN and phase.guidance:
                raise ConfigError(
                    "names a frozen policy with its own embedding, for which latent prefixes were not made",
                    setting=_setting(phase.algorithm, source) or type(phase.algorithm).__name__,
                    value=source,
                    remedy="run_start or phase_start, or leave out Phase.guidance",
                )
            if source not in OWN:
                _model(resolved, source, _setting(phase.algorithm, source) or type(phase.algorithm).__name__)


def load(
    resolved: ResolvedRecipe, phase: int, folder: RunFolder, params: Params, base: Params | None, *, begins: bool
) -> ReferencePolicies:
    """Load the frozen policies of a phase by source, on the mesh; matrices in the compute dtype.

    Args:
      phase: its index. params: the policy's current trained weights. base: the frozen weights that adapters add to.
      begins: the phase starts now, so that these are its initial weights; otherwise they are read from disk.
    """
    model, settings = resolved.model, resolved.recipe.phases[phase]
    shardings = param_shardings(resolved.mesh, model.axes(), model.abstract())
    computed = model.computed if base is None else lambda adapters: adapters
    found: dict[str, tuple[Model, Params]] = {}
    for source in settings.algorithm.needs().references:
        if base is not None and (source == "run_start" or source == "phase_start" and phase == 0):
            found[source] = (model, Adapted(base, None))
        elif source == "run_start":
            found[source] = (
                model,
                jax.jit(computed, out_shardings=shardings, donate_argnums=0)(start_params(resolved)),
            )
        elif source == "phase_start":
            saved = folder.phase_start(settings.name)
            if begins:
                checkpoint.write(saved.absolute(), params, {})
                kept = jax.jit(lambda p: computed(jax.tree.map(jnp.copy, p)), out_shardings=shardings)(params)
            else:
                kept = jax.jit(computed, donate_argnums=0)(_read(saved.absolute(), model, shardings))
            found[source] = (model, model.full_params(kept, base))
        else:
            other = _model(resolved, source, "Needs")
            where = param_shardings(resolved.mesh, other.axes(), other.abstract())
            found[source] = (other, hf.load(source, other, where, computed=True))
    return found


def _model(resolved: ResolvedRecipe, folder: str, owner: str) -> Model:
    if not (Path(folder) / "config.json").is_file():
        raise ConfigError(
            "names a frozen policy that is not there",
            setting=owner,
            value=folder,
            remedy="phase_start, run_start, or a local Hugging Face folder with config.json and *.safetensors",
        )
    cfg = hf.read_config(folder)
    if cfg.vocab_size != resolved.model.cfg.vocab_size:
        raise ConfigError(
            f"names a policy with {cfg.vocab_size} tokens in its vocabulary; the one that is trained has "
            f"{resolved.model.cfg.vocab_size}",
            setting=owner,
            value=folder,
            remedy="both must share one tokenizer",
        )
    return Model(cfg, resolved.recipe.dtype)


def _setting(value: Any, source: str) -> str:
    """Return the `Class.field` that names a source, in `value` or its parts; empty if there is none."""
    if isinstance(value, list | tuple | Mapping):
        parts = value.values() if isinstance(value, Mapping) else value
        return next(filter(None, (_setting(part, source) for part in parts)), "")
    if not dataclasses.is_dataclass(value):
        return ""
    fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if own := next((name for name, held in fields.items() if isinstance(held, str) and held == source), ""):
        return f"{type(value).__name__}.{own}"
    return _setting(fields, source)


def _read(path: Path, model: Model, shardings: Params) -> Params:
    if jax.process_index() == 0 and (problem := checkpoint.damage(path)):
        raise CheckpointError(
            f"{path}, the weights that the phase began with, is damaged: {problem}; --fresh starts over"
        )
    return checkpoint.read(path, model.abstract(), shardings)
