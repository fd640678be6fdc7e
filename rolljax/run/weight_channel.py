"""The way of new weights from the trainer to the sampler: in place where they share devices, else by resharding.

Each way is a pair: a `WeightSource` on the trainer pushes snapshots, and a `WeightSink` on the sampler takes them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

import jax

from rolljax.concurrency.waits import Watchdog
from rolljax.errors import SamplerError
from rolljax.model.decoder import Params
from rolljax.recipe import Phase
from rolljax.run.preflight import ResolvedRecipe
from rolljax.run.step_metrics import timed
from rolljax.sampler.client import SamplerClient
from rolljax.sampler.engine import EngineWorker
from rolljax.sampler.weights import Snapshot, WeightSink, prepared
from rolljax.trainer.publish import Publish, Reshard, checksums, differing, make_publish, share_devices

LOCKSTEP_CALLS = ("swap",)
"""Methods of a sink that all processes of a mesh must call in one order."""


class WeightSource(Protocol):
    """Pushes the trainer's weights."""

    def push(self, version: int) -> Snapshot:
        """Return the trainer's weights as a snapshot of version `version`. Decoding continues."""
        ...


def open_channel(
    resolved: ResolvedRecipe, weights: Callable[[], Params], worker: EngineWorker
) -> tuple[WeightSource, WeightSink]:
    """Open both ends of the way between the meshes of a run.

    Args:
      weights: returns the trainer's weights, as `Model.bind` takes them. worker: takes them, in place of those it has.
    """
    if share_devices(resolved.mesh, resolved.sampler_mesh):
        write = make_publish(resolved.mesh, resolved.model, resolved.sampler_mesh)
        return SharedSource(), SharedSink(write, weights, worker)
    reshard = Reshard(resolved.mesh, resolved.model, resolved.sampler_mesh)
    return ReshardSource(reshard, weights), ReshardSink(reshard, worker)


class Publisher:
    """Gives the sampler the trainer's weights, and frees the sampler's memory while the sampler needs none.

    Args:
      sleeping: names of the phases whose steps are trained without the sampler's memory.
    """

    def __init__(
        self, source: WeightSource, sampler: SamplerClient, watchdog: Watchdog, sleeping: Collection[str]
    ) -> None:
        self._source, self._sampler, self._watchdog, self._sleeping = source, sampler, watchdog, sleeping

    def publish(self, version: int) -> dict[str, float]:
        """Give the sampler the trainer's weights as policy version `version`; a sampler that is asleep wakes up.

        Returns:
          Metrics: the seconds of its parts.
        """
        seconds: dict[str, float] = {}
        if version != self._sampler.version or self._sampler.asleep:
            with self._watchdog.waiting_for("the sampler to take new weights"):
                with timed(seconds, "time/push_s"):
                    # the snapshot has no name here, so that the trainer's copy is free before the swap
                    self._sampler.prepare(self._source.push(version))
                with timed(seconds, "time/swap_s"):
                    self._sampler.swap(version)
        return seconds

    def sleep(self, phase: Phase) -> None:
        """Free the memory of the sampler until the next `publish`, where a step of `phase` is trained without it."""
        if phase.name in self._sleeping:
            with self._watchdog.waiting_for("the sampler to free its memory"):
                self._sampler.sleep()


class SharedSource:
    """A `WeightSource` over devices that trainer and sampler share: the sampler reads the trainer's own weights."""

    def push(self, version: int) -> Snapshot:
        return Snapshot(version)


class SharedSink:
    """A `WeightSink` over devices that trainer and sampler share: `swap` does all of the work."""

    def __init__(self, write: Publish, weights: Callable[[], Params], worker: EngineWorker) -> None:
        self._write, self._weights, self._worker = write, weights, worker

    def prepare(self, snapshot: Snapshot) -> None:
        """Do nothing: the weights are where the sampler can read them."""

    def swap(self, version: int) -> None:
        self._worker.set_params(self._write(self._weights(), self._worker.params))


class ReshardSource:
    """A `WeightSource` of a mesh that has no device in common with the sampler's: it casts on the trainer's devices."""

    def __init__(self, reshard: Reshard, weights: Callable[[], Params]) -> None:
        self._reshard, self._weights = reshard, weights

    def push(self, version: int) -> Snapshot:
        parts = self._reshard.cast(self._weights())
        return Snapshot(version, parts, checksums(parts))


class ReshardSink:
    """A `WeightSink` of a mesh that has no device in common with the trainer's, in the same runtime (`Reshard`).

    `prepare` moves the parts to the sampler's devices, in addition to the weights in use. `swap` overwrites the weights
    in use with them, and compares the checksums of both sides.
    """

    def __init__(self, reshard: Reshard, worker: EngineWorker) -> None:
        self._reshard, self._worker = reshard, worker
        self._next: Snapshot | None = None

    def prepare(self, snapshot: Snapshot) -> None:
        parts = jax.block_until_ready(self._reshard.move(snapshot.parts))
        self._next = Snapshot(snapshot.version, parts, jax.device_get(snapshot.checksums))

    def swap(self, version: int) -> None:
        snapshot, self._next = self._next, None
        arrived = prepared(snapshot, version)
        params = self._reshard.write(arrived.parts, self._worker.params)
        if wrong := differing(arrived.checksums, jax.device_get(checksums(params))):
            raise SamplerError(
                f"weights of version {version} are not what the trainer sent: checksums of {len(wrong)} arrays differ, "
                f"first of {wrong[0]}"
            )
        self._worker.set_params(params)
