"""The sampler's end of the weight transfer: snapshots pushed by a trainer, and how a sampler takes them.

The trainer's end is a `run.weight_channel.WeightSource`.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

from rolljax.errors import SamplerError
from rolljax.model.decoder import Params
from rolljax.sampler.engine import EngineWorker


@dataclasses.dataclass(frozen=True, eq=False)
class Snapshot:
    """Weights that a trainer has pushed for samplers."""

    version: int
    """Policy version of the weights."""
    parts: Params | None = None
    """The weights; None: the sampler shares the trainer's devices and reads the trainer's own."""
    checksums: Params | None = None
    """`trainer.publish.checksums` of the weights as they were sent; None: they are not compared."""
    location: str = ""
    """Address of the store from which samplers of other processes fetch the weights."""
    epoch: int = 0
    """Number of the start of the trainer's controller; with the version it names the snapshot in its store."""


class WeightSink(Protocol):
    """Takes snapshots for the engine of one sampler."""

    def prepare(self, snapshot: Snapshot) -> None:
        """Bring the weights of a snapshot to the sampler's devices, next to those in use. Decoding continues."""

    def swap(self, version: int) -> None:
        """Replace the weights in use by those of version `version`, which were prepared. Called between two dispatches.

        Raises:
          SamplerError: weights of that version were not prepared, or the received weights differ from the sent ones.
        """


class DirectSink:
    """Takes snapshots whose parts already have the form in which the engine uses them (see `trainer.publish`)."""

    def __init__(self, worker: EngineWorker) -> None:
        self._worker = worker
        self._next: Snapshot | None = None

    def prepare(self, snapshot: Snapshot) -> None:
        self._next = snapshot

    def swap(self, version: int) -> None:
        snapshot, self._next = self._next, None
        self._worker.set_params(prepared(snapshot, version).parts)


def prepared(snapshot: Snapshot | None, version: int) -> Snapshot:
    """Return `snapshot` if it is of version `version`.

    Raises:
      SamplerError: it is of another version, or there is none.
    """
    if snapshot is None or snapshot.version != version:
        found = "none were prepared" if snapshot is None else f"those of version {snapshot.version} were prepared"
        raise SamplerError(f"weights of version {version} are wanted, {found}")
    return snapshot
