"""Reward models that phases train: saved at the end of their phase, and read for `rewards.reward_model`.

They are not part of the checkpoints. A run that resumes from a point before the end of their phase trains them again; a
run that resumes after it reads them.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping

import jax
from jax.sharding import Mesh

from rolljax import reading
from rolljax.errors import CheckpointError, ConfigError, boundary
from rolljax.model import hf
from rolljax.model.decoder import DecoderConfig, Model, Params
from rolljax.recipe import Phase, Recipe
from rolljax.rewards.row_scores import TrainedValue
from rolljax.run import checkpoint
from rolljax.run.folder import RunFolder
from rolljax.run.initial_weights import base_weights
from rolljax.run.policy import policy_recipe, stored_phases
from rolljax.run.preflight import ResolvedRecipe, micro_tok
from rolljax.trainer.algorithms.reward_model import RewardModel, score_spread
from rolljax.trainer.mesh import param_shardings
from rolljax.trainer.state import stacked

SCORES = "scores.json"
"""Mean and standard deviation of a model's scores for the answers that its training ended with."""


def trains_one(phase: Phase) -> bool:
    """Return whether a phase trains a reward model."""
    return isinstance(phase.algorithm, RewardModel)


def keep(folder: RunFolder, phase: Phase, params: Params, algorithm_state: Mapping[str, float]) -> None:
    """Save the reward model of a phase that has ended in the run folder; all processes that hold it call this.

    Args:
      params: of all critics, stacked. algorithm_state: the state of the phase's algorithm after its last step.
    """
    mean, std = score_spread(algorithm_state)
    text = json.dumps({"mean": mean, "std": std}) + "\n"
    checkpoint.write(folder.reward_model(phase.name).absolute(), params, {SCORES: text})


@dataclasses.dataclass(frozen=True)
class TrainedRewardModels:
    """The trained reward models that a run's rewards can load (`rewards.base.TrainedModels`)."""

    resolved: ResolvedRecipe
    folder: RunFolder | None = None
    """Folder of the run; None: the run has no folder yet."""

    def check(self, phase: str, run: str) -> int:
        if run:
            other, of = self._of_run(run)
            theirs, ours = _config(other).vocab_size, self.resolved.model.cfg.vocab_size
            if theirs != ours:
                raise ConfigError(
                    f"reads {theirs} tokens ({of.name}); the policy's vocabulary has {ours}",
                    setting="RewardModelScore.path",
                    value=run,
                    remedy="both must share one tokenizer",
                )
            return -1
        phases = self.resolved.recipe.phases
        found = [i for i, p in enumerate(phases) if p.name == phase]
        if not found or not trains_one(phases[found[0]]):
            those = ", ".join(p.name for p in phases if trains_one(p)) or "none"
            raise ConfigError(
                "is no phase of this run that trains a reward model",
                setting="RewardModelScore.phase",
                value=phase,
                remedy=f"phases with RewardModel or PairRewardModel: {those}",
            )
        if found[0] + 1 == len(phases):
            raise ConfigError(
                "can have no effect: no phase follows the one that trains the reward model",
                setting="RewardModelScore.phase",
                value=phase,
                remedy="put it before the phases that use it",
            )
        return found[0]

    def load(self, mesh: Mesh, phase: str, run: str) -> TrainedValue:
        if run:
            recipe, theirs = self._of_run(run)
            return _load(recipe, mesh, theirs, RunFolder(run))
        assert self.folder is not None, "the run has no folder"
        own = next(p for p in self.resolved.recipe.phases if p.name == phase)
        return _load(self.resolved.recipe, mesh, own, self.folder)

    def _of_run(self, run: str) -> tuple[Recipe, Phase]:
        """Return the settings of a finished run's model, and its last phase with a reward model."""
        folder = RunFolder(run)
        found = [p for p in stored_phases(run) if trains_one(p) and folder.reward_model(p.name).is_dir()]
        if not found:
            raise ConfigError(
                "holds no reward model: no phase of that run that trains one has ended",
                setting="RewardModelScore.path",
                value=run,
                remedy="name a run with a phase of RewardModel or PairRewardModel that is done",
            )
        return policy_recipe(run), found[-1]


def _config(recipe: Recipe) -> DecoderConfig:
    return recipe.model if isinstance(recipe.model, DecoderConfig) else hf.read_config(recipe.model)


def _load(recipe: Recipe, mesh: Mesh, phase: Phase, folder: RunFolder) -> TrainedValue:
    """Load the reward model that a phase of a run trained, on a mesh; matrices in the compute dtype."""
    model = Model(_config(recipe), recipe.dtype, recipe.remat, recipe.attention, recipe.lora)
    resolved = ResolvedRecipe(recipe.sized(mesh, micro_tok(mesh, model)), mesh, mesh, model)
    path = folder.reward_model(phase.name).absolute()
    critic = phase.algorithm.needs().critics
    assert critic is not None
    value = critic.value_model(model)
    if problem := checkpoint.damage(path):
        raise CheckpointError(
            f"{path}, the reward model of phase {phase.name}, is damaged: {problem}; --fresh starts over"
        )
    shapes = stacked(value.abstract(), critic.num)
    axes = jax.tree.map(lambda a: ("critics", *a), value.axes(), is_leaf=lambda a: isinstance(a, tuple))
    params = checkpoint.read(path, shapes, param_shardings(mesh, axes, shapes, owner="RewardModelScore.mesh"))
    if value.trunk.lora is None:
        params = {**params, "trunk": jax.jit(value.trunk.computed)(params["trunk"])}
    with boundary(CheckpointError, f"reading {path / SCORES}"):
        scores = reading.parse(reading.read_bytes(path / SCORES))
        mean, std = float(scores["mean"]), float(scores["std"])
    base = base_weights(resolved) if value.trunk.lora else None
    return TrainedValue(value, params, critic.num, base, mean, std if std > 0 and math.isfinite(std) else 1.0)
