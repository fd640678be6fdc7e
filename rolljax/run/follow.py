"""A run in the processes that do not lead it: with their devices, what the first process does with its own.

They hold their part of the state and of the sampler's weights, and nothing else of the run: what a turn needs comes
with it (`cluster`). Each turn here has its counterpart in `loop`, `rooms` or `sampler.led`.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from rolljax import loop
from rolljax.cluster.lockstep import GREET, Follower
from rolljax.model.axes import SLOT_AXES
from rolljax.run.checkpoint import Progress
from rolljax.run.folder import RunFolder
from rolljax.run.preflight import ResolvedRecipe
from rolljax.sampler.engine import Engine
from rolljax.sampler.worker import EngineWorker
from rolljax.trainer.phase_trainer import NotFinite
from rolljax.trainer.publish import make_publish


def follow(plan: ResolvedRecipe, config: Any, path: str | Path, leader: Follower) -> int:
    """Do what the leader says until it ends the run; returns its exit code.

    Args:
      config: a `config.Loaded`. path: of the run folder.

    Raises:
      ConfigError: settings or run folder are not the leader's. InfraError: the leader is lost.
    """
    folder = RunFolder(path)
    hands = Hands(plan, folder)
    for kind, payload in leader.turns():
        if kind == GREET:
            folder.check_shared(config, payload)
            leader.ready()
        else:
            hands.do(kind, payload)
    return leader.code


class Hands:
    """What a process does with its devices, turn by turn."""

    def __init__(self, plan: ResolvedRecipe, folder: RunFolder) -> None:
        self._plan, self._folder = plan, folder
        self._write = make_publish(plan.mesh, plan.model, plan.sampler_mesh)
        engine = Engine(plan.model.plain, plan.recipe.sampler, plan.sampler_mesh, SLOT_AXES)
        self._worker = EngineWorker(engine)

    def do(self, kind: str, payload: Any) -> None:
        """One turn of the leader."""
        match kind:
            case "begin":
                self._base, self._trainer, self._state = loop.begin(self._plan, self._folder, payload)
            case "open_phase":
                self._open_phase(payload)
            case "step":
                with contextlib.suppress(NotFinite):  # the leader says so, and ends the run
                    self._state = self._trainer.step(self._state, *payload).state
            case "publish":
                params = self._trainer.full_params(self._state.params)
                self._worker.set_params(self._write(params, self._worker.params))
            case "save":
                name, progress = payload
                self._folder.checkpoints.save(name, self._state, progress)
            case "result":
                loop.result(self._plan, self._folder, self._state, None)
            case "engine":
                name, args, kwargs = payload
                getattr(self._worker, name)(*args, **kwargs)
            case _:
                raise ValueError(f"no such turn: {kind}")

    def _open_phase(self, progress: Progress) -> None:
        state = self._state
        self._trainer, self._state = loop.open_phase(
            self._plan, self._folder, progress, state.params, self._base, state.critics
        )
