"""Checkpoints: everything a run needs to go on, saved together, committed atomically by Orbax.

A checkpoint is the train state and one JSON record (`Progress`): phase and step, the position of the task stream, the
policy version, held-out rewards and wall seconds so far. Randomness is addressed, not stored, and rollouts in flight
are made again from their addresses, so this is all there is.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from rolljax.errors import CheckpointError, boundary
from rolljax.trainer.state import TrainState

if TYPE_CHECKING:
    import orbax.checkpoint as ocp

KEEP = 2


@dataclasses.dataclass
class Progress:
    """Where a run stands. `phase` and `step` are what comes next; `total_steps` counts over all phases."""

    phase: int = 0
    step: int = 0
    total_steps: int = 0
    version: int = 0
    stream_position: str = ""
    heldout_reward: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    phase_wall_s: dict[str, float] = dataclasses.field(default_factory=dict)
    phase_steps: dict[str, int] = dataclasses.field(default_factory=dict)
    phase_end: dict[str, str] = dataclasses.field(default_factory=dict)
    """Why each finished phase ended."""
    memory: dict[str, float] = dataclasses.field(default_factory=dict)
    """What the phase's algorithm carries from step to step."""
    starts: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Where the phase's episodes start (`starts.Starts.state`)."""
    failed_steps: int = 0
    """Consecutive steps in which no trajectory survived."""
    finished: bool = False
    """The last phase is done."""


class Checkpoints:
    """The checkpoints of one run folder. Where a run is several processes all of them do everything together.

    Args:
      alone: this process reads the folder, which is there, and waits for no other.
    """

    def __init__(self, folder: str | Path, *, alone: bool = False) -> None:
        import orbax.checkpoint as ocp

        self.folder = Path(folder).absolute()
        own = jax.process_index()
        among = ocp.options.MultiprocessingOptions(primary_host=own, active_processes={own}) if alone else None
        self._manager: ocp.CheckpointManager = ocp.CheckpointManager(
            self.folder,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=KEEP,
                enable_async_checkpointing=False,
                create=not alone,
                multiprocessing_options=among or ocp.options.MultiprocessingOptions(),
            ),
        )

    def save(self, state: TrainState, progress: Progress) -> None:
        """Commit a checkpoint; a second save at the same position replaces the first."""
        import orbax.checkpoint as ocp

        number = _number(progress)
        if number in self._manager.all_steps():
            self._manager.delete(number)
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(state), progress=ocp.args.JsonSave(dataclasses.asdict(progress))
        )
        with boundary(CheckpointError, f"saving to {self.folder}"):
            self._manager.save(number, args=items)
            self._manager.wait_until_finished()

    def progress(self) -> Progress | None:
        """The latest committed position, or None."""
        import orbax.checkpoint as ocp

        number = self._manager.latest_step()
        if number is None:
            return None
        with boundary(CheckpointError, f"reading {self.folder / str(number)}"):
            items = self._manager.restore(number, args=ocp.args.Composite(progress=ocp.args.JsonRestore()))
        return Progress(**items["progress"])

    def state(self, abstract: TrainState, shardings: TrainState) -> TrainState:
        """The latest train state, placed as `shardings` say, on whatever mesh they are of."""
        import orbax.checkpoint as ocp

        like = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), abstract, shardings)
        number = self._manager.latest_step()
        with boundary(CheckpointError, f"reading {self.folder / str(number)}"):
            return self._manager.restore(number, args=ocp.args.Composite(state=ocp.args.StandardRestore(like)))["state"]

    def close(self) -> None:
        self._manager.close()


def _number(progress: Progress) -> int:
    """Orbax's step number: grows with every step and every phase border."""
    return progress.total_steps * 100 + progress.phase
