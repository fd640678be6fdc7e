"""The way of new weights from the trainer to the sampler: in place where they share devices, by resharding between
devices of one process, and through a store between processes.

Each way is a pair: a `WeightSource` on the trainer, or for a store a `StoreSource` in each of its processes, pushes
snapshots, and a `WeightSink` on the sampler takes them.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Protocol

import jax
from jax.sharding import Mesh

from rolljax.cluster.adapters import AdapterReader, AdapterWriter
from rolljax.cluster.file_server import FileServer
from rolljax.cluster.group import SamplerGroup
from rolljax.cluster.manifest import Manifest
from rolljax.cluster.placement import ServedWeights
from rolljax.cluster.snapshots import SnapshotReader, SnapshotWriter
from rolljax.concurrency import lockstep
from rolljax.concurrency.lockstep import Follower, Leader, SingleProcess
from rolljax.concurrency.uploads import Uploads
from rolljax.concurrency.waits import Watchdog
from rolljax.errors import RolljaxError, SamplerError, StorageError
from rolljax.model.decoder import Model, Params
from rolljax.recipe import Phase
from rolljax.run.preflight import ResolvedRecipe
from rolljax.run.step_metrics import timed
from rolljax.sampler.client import SamplerClient
from rolljax.sampler.engine import EngineWorker
from rolljax.sampler.weights import Snapshot, WeightSink, prepared
from rolljax.trainer.publish import (
    Publish,
    Reshard,
    adapted_weights,
    checksums,
    differing,
    in_own_parts,
    make_empty,
    make_publish,
    make_sent,
    sampler_weights,
    share_devices,
    takes_parts,
    write_of,
)

UPLOAD_S = 600.0
"""Longest time to write a snapshot."""
MAX_REPAIRS = 5
"""Number of times that a damaged snapshot is written again."""
LOCKSTEP_CALLS = ("swap",)
"""Methods of a sink that all processes of a mesh must call in one order."""
PART_CALLS = ("start", "sum", "drop", "swap")
"""Methods of a `StorePart` that all processes of a sampler must call in one order. They return at once."""
STORE_CALLS = ("begin", "push", "push_again")
"""Methods of a `StoreSource` that all processes of a mesh must call in one order."""


class WeightSource(Protocol):
    """Pushes the trainer's weights.

    The next update overwrites these weights, so `push` reads them in the trainer's thread.
    """

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
    assert resolved.sampler_mesh is not None, "samplers of other processes have a `StoreSource`"
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

    def close(self) -> None:
        """Do nothing: there is nothing open."""


class StorePublisher:
    """Publishes the trainer's weights to samplers elsewhere while the next step runs.

    Args:
      source: of this process. team: the processes of the trainer; in each of them the source writes its part.
      group: the samplers.
    """

    def __init__(
        self, source: StoreSource, team: SingleProcess | Leader, group: SamplerGroup, watchdog: Watchdog
    ) -> None:
        source.on_written, source.on_failure, group.on_damage = group.prepare, self._failed, self._damaged
        self._source, self._group, self._watchdog = team.share("weights", source, STORE_CALLS), group, watchdog
        self._lock = threading.Lock()
        self._repaired: collections.Counter[int] = collections.Counter()
        self._failure: BaseException | None = None

    def begin(self, epoch: int, version: int) -> None:
        """Start to write the first weights of the run's start number `epoch`, as policy version `version`."""
        self._source.begin(epoch)
        self._source.push(version)

    def publish(self, version: int) -> dict[str, float]:
        """Start to publish the trainer's weights as policy version `version`. Groups that start from now on wait for a
        sampler that has them; no sampler is waited for.

        Returns:
          Metrics: the seconds of its parts.
        """
        seconds: dict[str, float] = {}
        if version != self._group.version:
            waiting = self._watchdog.waiting_for("the weights before to be written")
            with waiting, timed(seconds, "time/push_s"), self._lock:
                self._source.push(version)
                self._group.swap(version)
        return seconds

    def should_stop(self, is_told: Callable[[], bool]) -> Callable[[], bool]:
        """Return a function that returns what `is_told` does, and raises the error of weights that could not be
        written: a run would wait for them."""

        def asked() -> bool:
            if self._failure:
                raise self._failure
            return is_told()

        return asked

    def sleep(self, phase: Phase) -> None:
        """Do nothing: the samplers have devices of their own."""

    def close(self) -> None:
        """Publish no more."""
        self._source.close()

    def _failed(self, error: BaseException) -> None:
        self._failure = error

    def _damaged(self, version: int) -> None:
        """Write weights again that a sampler has found damaged; in a thread of its own."""
        with self._lock, contextlib.suppress(RolljaxError):  # which ends the run elsewhere
            self._repaired[version] += 1
            if version == self._group.version and self._repaired[version] <= MAX_REPAIRS:
                self._source.push_again(version)


class StoreSource:
    """Writes the trainer's weights to a store for samplers of other processes, in a thread of its own.

    Every process of the trainer has one, writes the parts of its devices, and makes the calls of `STORE_CALLS`. Those
    alone run programs on the devices of all; the threads that write meet without (`lockstep.barrier`).

    Args:
      weights: returns the trainer's weights, as `Model.bind` takes them.
      place: address of the store of all processes, or where each has one of its own.

    Attributes:
      on_written: called with each snapshot that all processes have written.
      on_failure: called with an error of this process. Both are called in the thread that writes.
    """

    def __init__(self, mesh: Mesh, model: Model, weights: Callable[[], Params], place: str | ServedWeights) -> None:
        self._sent, self._writers = make_sent(mesh, model), AdapterWriter if model.lora else SnapshotWriter
        self._weights, self._place = weights, place
        self._uploads = Uploads("the weights before to be written", UPLOAD_S)
        self._server: FileServer | None = None
        self.on_written: Callable[[Snapshot], None] = lambda snapshot: None
        self.on_failure: Callable[[BaseException], None] = lambda error: None

    def begin(self, epoch: int) -> None:
        """Open the store for the run's start number `epoch`.

        Raises:
          StorageError: this process cannot serve its folder.
        """
        self._epoch, url, stores = epoch, self._place, list[str]()
        if isinstance(url, ServedWeights):
            self._server = serve(url)
            url, stores = str(self._server.folder), lockstep.gather(self._server.url)
        self._location = stores[0] if stores else url
        barrier = lockstep.barrier(f"weights of epoch {epoch}", UPLOAD_S)
        self._writer = self._writers(url, epoch, stores=stores, barrier=barrier, timeout_s=UPLOAD_S)

    def push(self, version: int) -> None:
        """Copy the weights (with adapters, those alone) on the trainer's devices, then start to write the copy as
        version `version`.

        Raises:
          HangError: the weights before are still being written. Also the error of writing them.
        """
        self._uploads.wait()  # one copy at a time
        parts = jax.block_until_ready(self._sent(self._weights()))
        sums = checksums(parts)
        self._start(lambda: self._writer.write(parts, version, sums))

    def push_again(self, version: int) -> None:
        """Start to write the newest snapshot, which has version `version`, again. Raises as `push` does."""
        self._start(self._writer.write_again)

    def close(self) -> None:
        """Serve no more."""
        if self._server:
            self._server.close()

    def _start(self, write: Callable[[], Manifest]) -> None:
        def upload() -> None:
            try:
                version = write().version
            except BaseException as e:  # border: of this thread
                self.on_failure(e)
                raise
            self.on_written(Snapshot(version, location=self._location, epoch=self._epoch))

        self._uploads.start(upload)


def serve(place: ServedWeights) -> FileServer:
    """Serve this process's folder of `place`.

    Raises:
      StorageError: it cannot be made, or the port is taken.
    """
    folder = Path(place.folder) / f"process_{jax.process_index()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return FileServer(folder, lockstep.own_host(), place.port)
    except OSError as e:
        raise StorageError(
            f"weights cannot be served from {folder}, port {place.port}: {e}\n"
            "  fix:   set ServedWeights.folder to one that all processes of the trainer can write, and its port to 0"
        ) from e


class StorePart:
    """The part of a `StoreSink` in one process of a sampler: it reads the slices of its devices, and no others.

    Every process of the sampler has one, and makes the calls of `PART_CALLS`. Reading, which takes long, has a thread
    of its own, which runs no program on the devices: meanwhile the sampler decodes.

    Where several devices have the same part of the weights, each fetches its own piece of it, so that a device has that
    piece in addition to the weights in use, not all of them twice. `swap` then overwrites the weights in use. So it
    does where layers lie apart: they are stacked in the store.

    Of a model with adapters the base is fetched once, in such pieces, which stay on the devices next to the weights in
    use: a device needs its share of the base (int8, or in the compute dtype) in addition, and of the adapters. `swap`
    adds both with the program of a run in one process (`trainer.publish.write_of`), so they have the same bits.

    Args:
      worker: of this process. team: the processes of the sampler.
    """

    def __init__(self, model: Model, mesh: Mesh, worker: EngineWorker, team: SingleProcess | Leader | Follower) -> None:
        parts = in_own_parts(mesh, model)
        self._in_pieces = bool(model.lora) or takes_parts(mesh, model)
        if model.lora:
            self._like, self._there = adapted_weights(model, parts)
        else:
            self._like, self._there = sampler_weights(model, parts if self._in_pieces else mesh, self._in_pieces)
        self._readers = AdapterReader if model.lora else SnapshotReader
        self._write, self._empty = write_of(parts, model, mesh), make_empty(model, mesh)
        self._worker, self._team = worker, team
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="rolljax-read")
        self._reading: concurrent.futures.Future[list[str]] = concurrent.futures.Future()
        self._reader: tuple[str, SnapshotReader | AdapterReader] | None = None
        self._next: Snapshot | None = None
        self._sums: Params = None

    def start(self, snapshot: Snapshot) -> None:
        """Start to read a snapshot."""
        self._next = self._sums = None
        self._reading = self._thread.submit(self._read, snapshot)

    def errors(self) -> list[str]:
        """Wait until every process has read the snapshot, in the first of them; return why some could not."""
        return sorted({error for error in self._reading.result() if error})

    def sum(self) -> None:
        """Start to compute the checksums of what was read."""
        assert self._next is not None
        self._sums = checksums(self._next.parts)

    def differing(self) -> list[str]:
        """Return the names of the arrays that are not what the trainer sent."""
        assert self._next is not None
        return differing(self._next.checksums, jax.device_get(self._sums))

    def drop(self) -> None:
        """Drop what was read: the next snapshot is read in full."""
        self._next = self._sums = None
        if self._reader:
            self._reader[1].forget()

    def swap(self, version: int) -> None:
        """Replace the weights in use; see `WeightSink.swap`."""
        snapshot, self._next = self._next, None
        params = prepared(snapshot, version).parts
        if self._in_pieces:
            old = self._worker.params
            params = self._write(params, self._empty() if old is None else old)
        self._worker.set_params(params)

    def _read(self, snapshot: Snapshot) -> list[str]:
        """Read this process's slices; return what `errors` needs."""
        error, where = "", snapshot.location
        with self._team.guard():
            if self._reader is None or self._reader[0] != where:
                self._reader = where, self._readers(where, self._like, self._there)
            try:
                parts, sums = self._reader[1].read(snapshot.epoch, snapshot.version)
                self._next = Snapshot(snapshot.version, parts, sums)
            except SamplerError as e:
                error = str(e)
            return self._team.collect("weights", error)


class StoreSink:
    """A `WeightSink` of a sampler that fetches weights from a store, each of its processes the slices of its devices.

    Args:
      part: of this process, which is the first one; shared with the others.
    """

    def __init__(self, part: StorePart) -> None:
        self._part = part

    def prepare(self, snapshot: Snapshot) -> None:
        """Bring the weights of a snapshot to the sampler's devices, next to those in use. Decoding continues.

        Raises:
          SamplerError: a process cannot read them, or they are not what the trainer sent.
        """
        for _ in range(2):  # what the changes were added to may be damaged: then all is read
            self._part.start(snapshot)
            if errors := self._part.errors():
                self._part.drop()
                raise SamplerError("; ".join(errors))
            self._part.sum()
            if not (wrong := self._part.differing()):
                return
            self._part.drop()
        raise SamplerError(
            f"weights of version {snapshot.version} of epoch {snapshot.epoch} in {snapshot.location} are damaged: "
            f"checksums of {len(wrong)} arrays differ, first of {wrong[0]}"
        )

    def swap(self, version: int) -> None:
        self._part.swap(version)


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


def weight_list(model: Model) -> list[tuple[str, list[int], str]]:
    """Return name, shape and dtype of each array of a sampler's weights."""
    shapes = jax.eval_shape(model.plain.computed, model.plain.abstract())
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in jax.tree.leaves_with_path(shapes)]
    return [(name, list(x.shape), x.dtype.name) for name, x in zip(names, jax.tree.leaves(shapes), strict=True)]
