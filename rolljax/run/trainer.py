"""The trainer of a run, phase by phase: its weights, its state, its checkpoints."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from rolljax.aot import programs as aot
from rolljax.aot.ahead import CompileAhead
from rolljax.cluster.placement import Remote
from rolljax.model import hf
from rolljax.model.decoder import Params
from rolljax.rollout.mixture_rules import Perplexities
from rolljax.run import reference_policies, reward_models
from rolljax.run.checkpoint import Saved
from rolljax.run.folder import RunFolder
from rolljax.run.initial_weights import base_weights, plain_params, start_params
from rolljax.run.preflight import ResolvedRecipe
from rolljax.run.progress import RunProgress
from rolljax.storage import durable
from rolljax.storage.layout import RESULT
from rolljax.trainer.algorithms.base import AlgorithmState
from rolljax.trainer.phase_trainer import PhaseTrainer, TrainedStep
from rolljax.trainer.state import TrainState, fingerprint
from rolljax.trainer.update import ReferencePolicies
from rolljax.types import Group, Trajectory

LOCKSTEP_CALLS = ("open_phase", "restore", "compile_ahead", "step", "perplexities", "save", "result")
"""Methods that all processes of a mesh must call in one order."""


class Trainer:
    """Trains the policy of a run, phase by phase, on the devices of its mesh. It holds the state; the programs of the
    current phase are a `PhaseTrainer`.

    Every process of a run has one. `lockstep.Leader.share` turns the leader's into a proxy that makes the calls of
    `LOCKSTEP_CALLS` in all processes.

    Args:
      folder: where checkpoints and the result go. tokenizer: saved with the result; None in the processes that follow,
        which write none.
    """

    def __init__(self, resolved: ResolvedRecipe, folder: RunFolder, tokenizer: Any = None) -> None:
        self._resolved, self._folder, self._tokenizer = resolved, folder, tokenizer
        self._phase_trainer: PhaseTrainer | None = None
        self._state: TrainState | None = None
        self._phase, self._algorithm_state = 0, dict[str, float]()
        self._ahead = CompileAhead(())

    @functools.cached_property
    def _base(self) -> Params | None:
        return base_weights(self._resolved)

    @property
    def phase_trainer(self) -> PhaseTrainer:
        """The programs of the current phase."""
        assert self._phase_trainer is not None, "no phase is open"
        return self._phase_trainer

    @property
    def state(self) -> TrainState:
        assert self._state is not None, "no phase is open"
        return self._state

    def open_phase(self, progress: RunProgress) -> None:
        """Start phase `progress.phase` with the current weights, which in the first phase are the initial weights."""
        self._keep_reward_model()
        base, self._phase, self._algorithm_state = self._base, progress.phase, {}
        params = start_params(self._resolved) if self._state is None else self._state.params
        critics = None if self._state is None else self._state.critics
        references = reference_policies.load(self._resolved, progress.phase, self._folder, params, base, begins=True)
        self._phase_trainer = make_trainer(self._resolved, progress.phase, references, base)
        self._state = self._phase_trainer.states.init(params, critics)

    def restore(self, saved: Saved) -> None:
        """Continue from a checkpoint."""
        progress, base = saved.progress, self._base
        self._phase, self._algorithm_state = progress.phase, dict(progress.algorithm_state)
        trainer = make_trainer(self._resolved, progress.phase, {}, base)
        self._state = self._folder.checkpoints.state(saved.name, trainer.states.abstract(), trainer.states.shardings)
        if not progress.finished:  # else it is only looked at
            references = reference_policies.load(
                self._resolved, progress.phase, self._folder, self._state.params, base, begins=progress.step == 0
            )
            trainer = dataclasses.replace(trainer, references=references)
        self._phase_trainer = trainer

    def compile_ahead(self) -> None:
        """Start to compile the programs of the phase: while the devices sample its first step, the host has time.

        On GPUs this does nothing, because their compiler times kernels on the devices.
        """
        if self._resolved.mesh.devices.flat[0].platform == "gpu":
            return
        programs = aot.TrainerShapes.of(self.phase_trainer).programs("", {})
        self._ahead = CompileAhead([program.lower for program in programs])

    def step(self, groups: Sequence[Sequence[Trajectory]], algorithm_state: AlgorithmState, step: int) -> TrainedStep:
        """Compute credit and make all updates of step `step` of the phase.

        Args:
          groups: the trajectories that take part. algorithm_state: from the result of the step before; empty in the
            first step.

        Raises:
          NotFinite: a loss or gradient was not finite.
          TrainerError: no token of these trajectories could be trained on, regardless of the rewards.
        """
        self._ahead.wait()
        self._state, trained = self.phase_trainer.step(self.state, groups, algorithm_state, step)
        self._algorithm_state = dict(trained.algorithm_state)
        return trained

    def perplexities(self, groups: Mapping[str, Sequence[Group]]) -> dict[str, Perplexities]:
        """Return the perplexities of the policy and of the phase's teacher on reference answers, by domain."""
        trainer, found = self.phase_trainer, {}
        for name, of_domain in groups.items():
            nats = trainer.cross_entropies(self.state, [list(group.trajectories) for group in of_domain])
            found[name] = Perplexities(*(math.exp(nat) for nat in nats))
        return found

    def weights(self) -> Params:
        """Return the policy's current weights, on the devices, in the form that `Model.bind` takes."""
        return self._resolved.model.full_params(self.state.params, self._base)

    def save(self, name: str, progress: RunProgress) -> None:
        """Commit a checkpoint of the state and of `progress` as `name`."""
        self._folder.checkpoints.save(name, self.state, progress)

    def _keep_reward_model(self) -> None:
        """Save the reward model if the phase that has ended trained one."""
        phase = self._resolved.recipe.phases[self._phase]
        if self._state is not None and self._state.critics is not None and reward_models.trains_one(phase):
            reward_models.keep(self._folder, phase, self._state.critics.params, self._algorithm_state)

    def result(self) -> str:
        """Write the policy as a Hugging Face folder; return the fingerprint of the whole state, in hexadecimal."""
        self._keep_reward_model()
        recipe, model = self._resolved.recipe, self._resolved.model
        source = recipe.model if isinstance(recipe.model, str) else None
        path = self._folder.path / RESULT
        params = plain_params(self._resolved, self.weights())
        with durable.folder(path) if self._tokenizer else contextlib.nullcontext(path) as place:
            hf.save(place, model.plain, params, self._tokenizer, source=source)
        return fingerprint(self.state)


def make_trainer(
    resolved: ResolvedRecipe, index: int, references: ReferencePolicies, base: Params | None = None
) -> PhaseTrainer:
    """Make the trainer of phase `index` of a recipe."""
    recipe, phase = resolved.recipe, resolved.recipe.phases[index]
    return PhaseTrainer(
        resolved.mesh,
        resolved.model,
        phase.algorithm,
        phase.optimizer,
        recipe.pack_shape(phase),
        steps=phase.steps,
        groups_per_step=phase.prompts_per_step,
        updates_per_step=phase.updates_per_step,
        epochs=phase.epochs,
        temperature=phase.temperature,
        limit_tok=recipe.max_answer_tok,
        seed=recipe.seed,
        references=references,
        base=base,
        first_latent_id=resolved.model.cfg.vocab_size if resolved.model.prefixes else None,
        replay_experts=recipe.sampler.record_experts and phase.algorithm.source == "sampler",
        compare_samplers=isinstance(recipe.placement, Remote) and phase.algorithm.source == "sampler",
    )
