"""The way of new weights from the trainer to the sampler: in place where they share devices, else by resharding."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from typing import Protocol

import jax

from rolljax.concurrency.waits import Watchdog
from rolljax.errors import SamplerError
from rolljax.model.decoder import Params
from rolljax.recipe import Phase
from rolljax.run.preflight import ResolvedRecipe
from rolljax.run.step_metrics import timed
from rolljax.sampler.client import Sampler
from rolljax.sampler.engine import EngineWorker
from rolljax.trainer.publish import Reshard, checksums, differing, make_publish, share_devices

LOCKSTEP_CALLS = ("pull",)
"""Methods that all processes of a mesh must call in one order."""


class WeightChannel(Protocol):
    """Transfers the trainer's weights to the sampler: cast, and laid out for decoding."""

    def push(self, version: int) -> None:
        """Make the trainer's weights ready for the sampler, as `version`, on the trainer's side. Decoding continues."""

    def pull(self, version: int) -> Params:
        """Replace the weights in use, on the sampler's side between two dispatches, and return the new ones.

        Raises:
          SamplerError: the weights that arrived are not the ones that were pushed as `version`.
        """
        ...


def open_channel(resolved: ResolvedRecipe, source: Callable[[], Params], worker: EngineWorker) -> WeightChannel:
    """Open the channel between the meshes of a run.

    Args:
      source: returns the trainer's current weights, as the argument of `Model.bind`. worker: receives them in place
        of its own.
    """
    shared = share_devices(resolved.mesh, resolved.sampler_mesh)
    return (InPlace if shared else BetweenMeshes)(resolved, source, worker)


class Publisher:
    """Gives the sampler the trainer's weights, through a `WeightChannel`, and frees its memory while it needs none.

    Args:
      sleeping: names of the phases whose steps are trained without the sampler's memory.
    """

    def __init__(self, channel: WeightChannel, sampler: Sampler, watchdog: Watchdog, sleeping: Collection[str]) -> None:
        self._channel, self._sampler, self._watchdog, self._sleeping = channel, sampler, watchdog, sleeping

    def publish(self, version: int) -> dict[str, float]:
        """Give the sampler the trainer's weights as policy version `version`; a sampler that is asleep wakes up.

        Returns:
          Metrics: the seconds of its parts.
        """
        seconds: dict[str, float] = {}
        if version != self._sampler.version or self._sampler.asleep:
            with self._watchdog.waiting_for("the sampler to take new weights"):
                with timed(seconds, "time/push_s"):
                    self._channel.push(version)
                with timed(seconds, "time/swap_s"):
                    self._sampler.publish(lambda _: self._channel.pull(version), version)
        return seconds

    def sleep(self, phase: Phase) -> None:
        """Free the memory of the sampler until the next `publish`, where a step of `phase` is trained without it."""
        if phase.name in self._sleeping:
            with self._watchdog.waiting_for("the sampler to free its memory"):
                self._sampler.sleep()


class InPlace:
    """A `WeightChannel` over devices that both sides share: all of its work is done between two dispatches."""

    def __init__(self, resolved: ResolvedRecipe, source: Callable[[], Params], worker: EngineWorker) -> None:
        self._write = make_publish(resolved.mesh, resolved.model, resolved.sampler_mesh)
        self._source, self._worker = source, worker

    def push(self, version: int) -> None:
        """Do nothing: the sampler reads the trainer's memory."""

    def pull(self, version: int) -> Params:
        self._worker.set_params(self._write(self._source(), self._worker.params))
        return self._worker.params


@dataclasses.dataclass(frozen=True, eq=False)
class _Arrived:
    """Weights in parts on the sampler's devices, and the checksums of what was sent."""

    version: int
    parts: Params
    sent: Params


class BetweenMeshes:
    """A `WeightChannel` between meshes of one runtime that have no device in common (`Reshard`).

    `push` casts on the trainer's devices and moves the result to the sampler's, in addition to the weights in use.
    `pull` overwrites the weights in use with it, and compares version and checksums of both sides.
    """

    def __init__(self, resolved: ResolvedRecipe, source: Callable[[], Params], worker: EngineWorker) -> None:
        self._reshard = Reshard(resolved.mesh, resolved.model, resolved.sampler_mesh)
        self._source, self._worker = source, worker
        self._arrived: _Arrived | None = None

    def push(self, version: int) -> None:
        parts = self._reshard.cast(self._source())
        sent = checksums(parts)
        self._arrived = _Arrived(version, jax.block_until_ready(self._reshard.move(parts)), jax.device_get(sent))

    def pull(self, version: int) -> Params:
        arrived, self._arrived = self._arrived, None
        if arrived is None or arrived.version != version:
            found = "none have arrived" if arrived is None else f"those of version {arrived.version} have arrived"
            raise SamplerError(f"weights of version {version} are wanted, {found}")
        params = self._reshard.write(arrived.parts, self._worker.params)
        if wrong := differing(arrived.sent, jax.device_get(checksums(params))):
            raise SamplerError(
                f"weights of version {version} are not what the trainer sent: checksums of {len(wrong)} arrays differ, "
                f"first of {wrong[0]}"
            )
        self._worker.set_params(params)
        return params
