"""Snapshots of weights in a store: every process of a trainer writes its parts, every sampler reads its slices.

A snapshot has the name (epoch, version) and never changes. In the store it is a folder:

    000002/00000007/manifest.json        written last, at once: a snapshot is there, or it is not
    000002/00000007/full/layers.mlp/...  each array as zarr 3, not compressed; its chunks are parts of the trainer's
    000002/00000008/delta/layers.mlp/... what changed in each of these chunks since the snapshot that the manifest names
    newest.json                          names the newest snapshot

Nothing waits for a reader. A reader that is late finds that its snapshot is gone, and reads the newest.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import jax
import numpy as np

from rolljax import fields
from rolljax.cluster import deltas
from rolljax.cluster.deltas import Bits, bits_dtype
from rolljax.cluster.manifest import Box, Cell, Manifest, StoredArray, box_of, chunk_of, index_of, overlap
from rolljax.cluster.store import DamagedObject, MissingObject, Store, StoreAway, value, wait
from rolljax.errors import SamplerError, StorageError
from rolljax.fields import Damaged, Fields
from rolljax.model.decoder import Params

CHUNK_BYTES = 8 * 2**20
NEWEST = "newest.json"
_WAITS_S = (0.05, 2.0)
"""Seconds between two attempts to reach a store: the first, and the most."""
_THREADS = min(8, os.cpu_count() or 1)
"""That compute changes."""
_READERS = 16
"""Threads that read changes and apply them."""
_IN_FLIGHT_BYTES = 64 * 2**20
"""Of a full snapshot that are asked for at once; as much memory is needed besides the weights."""


class SnapshotWriter:
    """Writes the snapshots of one start of a trainer. Each of its processes has one, and calls the same methods.

    Args:
      url: the store (see `Store`). epoch: number of this start; of earlier starts nothing is left after the first
        snapshot.
      full_every: one of this many snapshots is full; the others have the changes alone where those are at most half as
        long. Samplers need not have read the one before. 1: all are full.
      keep: number of the newest snapshots that stay in the store, with the snapshots that they build on.
      stores: if the processes have no store in common, the URL at which readers find that of each process.
      barrier: returns when all processes have called it.
      timeout_s: for all that the store does in one `write`.
      chunk_bytes: size of the objects in the store, about. More suits a bucket; smaller files take longer to
        write.
    """

    def __init__(
        self,
        url: str,
        epoch: int,
        *,
        full_every: int = 8,
        keep: int = 2,
        stores: Sequence[str] = (),
        barrier: Callable[[], None] = lambda: None,
        timeout_s: float = 600.0,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        self._store, self._epoch, self._keep, self._stores = Store(url), epoch, keep, tuple(stores)
        self._full_every, self._barrier = full_every, barrier
        self._timeout_s, self._chunk_bytes = timeout_s, chunk_bytes
        self._process, self._processes = jax.process_index(), jax.process_count()
        self._written: list[Manifest] = []
        self._held: dict[tuple[str, Box], Bits] = {}
        self._begun: list[Any] = []  # writes of the snapshot that is being written

    def write(self, params: Params, version: int, sums: Params, *, full: bool = False) -> Manifest:
        """Write a snapshot and return its manifest; the oldest ones are removed.

        Args:
          params: the weights, on the devices of all processes; each process writes what only it has.
          version: higher than that of the snapshot before; the same version again writes nothing.
          sums: their `trainer.publish.checksums`.
          full: whether it must not be changes alone; the same in all processes.

        Raises:
          StorageError: the store cannot be written, or a later start of the trainer writes to it; earlier snapshots
            stay as they are.
        """
        last = self._written[-1] if self._written else None
        if last and version <= last.version:
            if version == last.version:
                return last
            raise StorageError(f"weights of version {version} cannot be pushed: those of {last.version} were")
        end = time.monotonic() + self._timeout_s
        manifest = Manifest(self._epoch, version, None, self._describe(params, sums), self._stores)
        with self._writing(manifest, end):
            opened = functools.cache(functools.partial(self._open, manifest, end))
            changed = self._take(params, manifest, None if full else self._base(manifest), opened)
            if self._all_have(changed, manifest, end):
                manifest = dataclasses.replace(manifest, base=self._written[-1].version)
                self._begun = [self._store.write(_key(manifest, key), blob) for key, blob in (changed or {}).items()]
            elif changed is not None:
                self._begin_full(opened, list(self._held))
            self._commit(manifest, end)
        self._written.append(manifest)
        self._collect(end)
        return manifest

    def write_again(self) -> Manifest:
        """Write the newest snapshot again, in full, because a sampler has found it damaged; return its manifest.

        Raises:
          StorageError: the store cannot be written, or the host's copy of the snapshot is gone.
        """
        if not self._held:
            raise StorageError(f"the weights in {self._store.url} are damaged, and their copy on this host is gone")
        end, manifest = time.monotonic() + self._timeout_s, dataclasses.replace(self._written[-1], base=None)
        with self._writing(manifest, end):
            if self._process == 0 or self._stores:
                self._store.remove(f"{_key(manifest, 'full')}/", end - time.monotonic())
            self._barrier()
            opened = functools.cache(functools.partial(self._open, manifest, end))
            self._begin_full(opened, list(self._held))
            self._commit(manifest, end)
        self._written[-1] = manifest
        return manifest

    def _commit(self, manifest: Manifest, end: float) -> None:
        """Wait until all processes have written their parts, then write the manifest, in the first process."""
        for write in self._begun:
            wait(write, end - time.monotonic())
        self._barrier()
        if self._process == 0:
            self._check_is_newest(end)
            newest = json.dumps({"epoch": manifest.epoch, "version": manifest.version}).encode()
            for key, data in ((_key(manifest, "manifest.json"), manifest.to_json()), (NEWEST, newest)):
                wait(self._store.write(key, data), end - time.monotonic())
        self._barrier()

    def _check_is_newest(self, end: float) -> None:
        """Raise `StorageError` if a later start of the trainer writes to the store."""
        with suppress(MissingObject, Damaged):
            epoch, _ = _read_newest(self._store, end)
            if epoch > self._epoch:
                raise StorageError(
                    f"{self._store.url} has weights of epoch {epoch}, which began after this one, {self._epoch}\n"
                    "  fix:   end this process: a later start of the run is at work"
                )

    def _describe(self, params: Params, sums: Params) -> dict[str, StoredArray]:
        described = {}
        numbers = jax.tree.leaves(jax.device_get(sums))
        for (name, x), number in zip(_named(params), numbers, strict=True):
            chunk = chunk_of(x.sharding.shard_shape(x.shape), x.dtype.itemsize, self._chunk_bytes)
            found = StoredArray(x.shape, x.dtype.name, int(number), chunk)
            if self._stores:
                owner = {
                    cell: shard.device.process_index
                    for shard in x.global_shards
                    if shard.replica_id == 0
                    for cell in found.cells(box_of(shard.index, x.shape))
                }
                found = dataclasses.replace(found, owners=tuple(owner[cell] for cell in np.ndindex(*found.grid)))
            described[name] = found
        return described

    def _base(self, manifest: Manifest) -> Manifest | None:
        """Return the snapshot to which the changes in the next one are added; None: it must be full."""
        recent = self._written[-self._full_every + 1 :] if self._full_every > 1 else []
        if not self._held or not any(old.base is None for old in recent):
            return None
        before, now = ({n: (x.shape, x.dtype, x.chunk) for n, x in m.arrays.items()} for m in (recent[-1], manifest))
        return recent[-1] if before == now else None

    def _take(
        self, params: Params, manifest: Manifest, base: Manifest | None, opened: Callable[[str], Any]
    ) -> dict[str, bytes] | None:
        """Bring this process's parts of the weights to their place in host memory, one after the other.

        Returns:
          What changed in each chunk, by key. If that is more than half as long as all, or there is no base: None, and
          all parts are being written.
        """
        before, self._held = self._held, {}  # if this fails, the next snapshot is full
        parts = [(name, shard) for name, x in _named(params) for shard in x.addressable_shards if shard.replica_id == 0]
        room = sum(shard.data.nbytes for _, shard in parts) // 2
        changed: dict[str, bytes] | None = {} if base else None
        taken = []
        with ThreadPoolExecutor(_THREADS) as pool:
            for name, shard in parts:
                sent, new = manifest.arrays[name], _bits_of(shard.data)
                box = box_of(shard.index, sent.shape)
                old = before.get((name, box))
                if changed is not None and old is not None:
                    cells = list(sent.cells(box))
                    places = [index_of(sent.box(cell), box) for cell in cells]
                    blobs = list(pool.map(_changes_or_all, (old[i] for i in places), (new[i] for i in places)))
                    changed |= {_delta_key(name, cell): blob for cell, blob in zip(cells, blobs, strict=True)}
                    room -= sum(map(len, blobs))
                if old is None or room < 0:
                    changed = None
                self._held[name, box] = np.empty_like(new) if old is None else old
                np.copyto(self._held[name, box], new)
                taken.append((name, box))
                if changed is None:  # it will be a full one: this part is written while the next one comes
                    self._begin_full(opened, taken)
                    taken = []
        return changed

    def _all_have(self, changed: dict[str, bytes] | None, manifest: Manifest, end: float) -> bool:
        """Return whether all processes have changes to write; the answer is the same in all."""
        if self._processes == 1 or self._full_every == 1:
            return changed is not None
        keys = [_key(manifest, f"has_changes/{process}") for process in range(self._processes)]
        wait(self._store.write(keys[self._process], json.dumps(changed is not None).encode()), end - time.monotonic())
        self._barrier()
        stores = [Store(url) for url in self._stores] or [self._store] * self._processes
        found = [(store.read(key), key) for store, key in zip(stores, keys, strict=True)]
        return all(value(future, key, end - time.monotonic()) == b"true" for future, key in found)

    def _open(self, manifest: Manifest, end: float, name: str) -> Any:
        """Open an array of a full snapshot."""
        sent, creates = manifest.arrays[name], self._process == 0 or bool(self._stores)
        key = _key(manifest, f"full/{name}")
        found = self._store.array(key, sent.shape, sent.chunk, sent.itemsize, create=creates)
        return wait(found, end - time.monotonic())

    def _begin_full(self, opened: Callable[[str], Any], parts: list[tuple[str, Box]]) -> None:
        """Begin to write parts that were taken; opened: returns the array of a name."""
        stays = not self._store.is_memory  # the memory is read until the end, and does not become the object itself
        for name, box in parts:
            part = opened(name)[index_of(box)]
            written = part.write(self._held[name, box], can_reference_source_data_indefinitely=stays)
            self._begun.append(written.commit)

    @contextmanager
    def _writing(self, manifest: Manifest, end: float) -> Iterator[None]:
        """Turn errors of the store into a `StorageError`, after the half snapshot was removed."""
        try:
            yield
        except BaseException as e:  # border: of any error
            self._held = {}  # it is not that of the last snapshot, and an abandoned write may still read it
            if isinstance(e, Exception):
                for write in self._begun:  # one that ends later would write into the folder again
                    with suppress(Exception):
                        wait(write, end - time.monotonic())
                with suppress(StoreAway):
                    self._store.remove(_key(manifest), self._timeout_s)
            if not isinstance(e, (StoreAway, MissingObject, DamagedObject)):
                raise
            raise StorageError(
                f"weights of version {manifest.version} cannot be written to {self._store.url}: {e}\n"
                "  fix:   look whether the store is there and has space; earlier snapshots are as they were"
            ) from e
        finally:
            self._begun = []

    def _collect(self, end: float) -> None:
        """Remove old snapshots, and with the first one those of earlier epochs."""
        by_version, kept = {old.version: old for old in self._written}, set()
        for newest in self._written[-self._keep :]:
            old: Manifest | None = newest
            while old:
                kept.add(old.version)
                old = by_version[old.base] if old.base is not None else None
        gone = [_key(old) for old in self._written if old.version not in kept]
        is_first = len(self._written) == 1
        self._written = [old for old in self._written if old.version in kept]
        if self._process and not self._stores:
            return
        try:
            names = self._store.folders(end - time.monotonic()) if is_first else set()
            gone += [f"{name}/" for name in names if name.isdecimal() and int(name) < self._epoch]
            for key in gone:
                self._store.remove(key, end - time.monotonic())
        except StoreAway as e:
            raise StorageError(f"old weights in {self._store.url} cannot be removed: {e}") from e


class SnapshotReader:
    """Reads snapshots into the memory of devices. Each device gets its slice of every array, and reads no other.

    A sampler of several processes has one in each; each reads for its own devices.

    Args:
      url: the store (see `Store`), of several the first process's.
      shapes: the weights, a tree of objects with shape and dtype. shardings: the same tree of shardings.
      timeout_s: for one `read`, also while the store is away.
    """

    def __init__(self, url: str, shapes: Params, shardings: Params, *, timeout_s: float = 120.0) -> None:
        self._store, self._shapes, self._timeout_s = Store(url), shapes, timeout_s
        self._arrays = {
            name: _Landing(x, s) for (name, x), (_, s) in zip(_named(shapes), _named(shardings), strict=True)
        }
        self._newest = (0, 0)
        self._held: tuple[int, int] | None = None
        self._open_store = functools.cache(Store)

    def newest(self) -> tuple[int, int]:
        """Return epoch and version of the newest snapshot.

        Raises:
          SamplerError: there is none, or the store does not answer.
        """
        return self._until_there("the newest weights", lambda end: self._read_newest(end))

    def read(self, epoch: int, version: int) -> tuple[Params, Params]:
        """Read a snapshot.

        Returns:
          The weights on their devices, and their checksums as they were sent, a tree of uint32. The caller compares
          them with `trainer.publish.checksums`, in several processes one computation of all; if they differ, it calls
          `forget` and reads again.

        Raises:
          SamplerError: it is not there (any more), is damaged, is older than one that was read, or has other arrays; or
            the store does not answer in time.
        """
        if (epoch, version) < self._newest:
            raise SamplerError(
                f"weights of {_named_as(epoch, version)} are older than those of {_named_as(*self._newest)}, "
                "which were read before"
            )
        what = f"weights of {_named_as(epoch, version)}"
        found = self._until_there(what, lambda end: self._read(epoch, version, end))
        self._newest = (epoch, version)
        return found

    def forget(self) -> None:
        """Forget what was read: the next `read` begins with a full snapshot."""
        self._held = None

    def _until_there(self, what: str, attempt: Callable[[float], Any]) -> Any:
        """Return what `attempt`, which is given its deadline, returns; repeat it while the store is away."""
        end, pause = time.monotonic() + self._timeout_s, _WAITS_S[0]
        while True:
            try:
                return attempt(end)
            except StoreAway as e:
                if time.monotonic() + pause >= end:
                    raise SamplerError(
                        f"{what} cannot be read from {self._store.url} within {self._timeout_s:g} s: {e}"
                    ) from e
            except (DamagedObject, Damaged) as e:
                raise SamplerError(f"{what} in {self._store.url} are damaged: {e}") from e
            time.sleep(pause)
            pause = min(2 * pause, _WAITS_S[1])

    def _read_newest(self, end: float) -> tuple[int, int]:
        try:
            return _read_newest(self._store, end)
        except MissingObject as e:
            raise StoreAway(str(e)) from e

    def _read(self, epoch: int, version: int, end: float) -> tuple[Params, Params]:
        try:
            manifest = self._read_manifest(epoch, version, end)
            held, self._held = self._held, None
            if held and manifest.base is not None:
                with suppress(MissingObject, DamagedObject, Damaged):
                    return self._assemble(manifest, held, end)
            return self._assemble(manifest, None, end)
        except MissingObject as e:
            newest = self._read_newest(end)  # if this is missing too, the store is away
            with suppress(MissingObject):
                self._read_manifest(epoch, version, end)
                raise DamagedObject(str(e)) from e
            raise SamplerError(
                f"weights of {_named_as(epoch, version)} are not in {self._store.url}; the newest there are of "
                f"{_named_as(*newest)}"
            ) from e

    def _assemble(self, manifest: Manifest, held: tuple[int, int] | None, end: float) -> tuple[Params, Params]:
        """Bring a snapshot to the devices, from the held snapshot or from the last full one."""
        try:
            for link in self._chain(manifest, held, end):
                self._read_changes(link, end) if link.base is not None else self._read_full(link, end)
        except (MissingObject, DamagedObject, Damaged, StoreAway):
            for array in self._arrays.values():
                array.renew()
            raise
        params = self._tree({name: array.put() for name, array in self._arrays.items()})
        jax.block_until_ready(params)  # the next read overwrites the buffers
        sums = self._tree({name: np.uint32(x.checksum) for name, x in manifest.arrays.items()})
        self._held = (manifest.epoch, manifest.version)
        return params, sums

    def _chain(self, manifest: Manifest, held: tuple[int, int] | None, end: float) -> list[Manifest]:
        """Return the snapshots to be read, in order: the last full one, or the one after the held one, and so on."""
        chain = [manifest]
        while (base := chain[0].base) is not None and (manifest.epoch, base) != held:
            chain.insert(0, self._read_manifest(manifest.epoch, base, end))
        return chain

    def _read_manifest(self, epoch: int, version: int, end: float) -> Manifest:
        key = _key_of(epoch, version, "manifest.json")
        found = Manifest.from_json(value(self._store.read(key), key, end - time.monotonic()))
        if (found.epoch, found.version) != (epoch, version):
            raise Damaged(
                f"the manifest of {_named_as(epoch, version)} is that of {_named_as(found.epoch, found.version)}"
            )
        self._check(found)
        return found

    def _check(self, manifest: Manifest) -> None:
        """Check that a snapshot has the arrays of this reader."""
        have, want = manifest.arrays, self._arrays
        where = f"weights of {_named_as(manifest.epoch, manifest.version)} in {self._store.url}"
        if have.keys() != want.keys():
            names = sorted(have.keys() ^ want.keys())
            lack = "lack" if names[0] in want else "have an array more:"
            raise SamplerError(f"{where} {lack} {names[0]} ({len(names)} arrays differ)")
        for name, array in want.items():
            sent = have[name]
            if (sent.shape, sent.dtype) != (array.shape, array.dtype.name):
                raise SamplerError(
                    f"{where} have {name} as {sent.dtype}{list(sent.shape)}, this sampler as "
                    f"{array.dtype.name}{list(array.shape)}"
                )

    def _read_full(self, manifest: Manifest, end: float) -> None:
        """Read the slices of all arrays into their buffers, many at once."""
        import tensorstore as ts

        stores = self._stores_of(manifest)
        under_way: collections.deque[Any] = collections.deque()
        room = _IN_FLIGHT_BYTES
        for name, array in self._arrays.items():
            sent, key = manifest.arrays[name], _key(manifest, f"full/{name}")
            opened = [store.array(key, sent.shape, sent.chunk, sent.itemsize) for store in stores]
            there = [wait(future, end - time.monotonic()) for future in opened]
            for cell, parts in array.chunks(sent).items():
                while room < 0:
                    commit, nbytes = under_way.popleft()
                    wait(commit, end - time.monotonic())
                    room += nbytes
                for part, target in parts:  # at once: the chunk is fetched once
                    commit = ts.array(target).write(there[sent.owner(cell)][index_of(part)]).commit
                    under_way.append((commit, target.nbytes))
                    room -= target.nbytes
        for commit, _ in under_way:
            wait(commit, end - time.monotonic())

    def _read_changes(self, manifest: Manifest, end: float) -> None:
        """Read the changes of all chunks of which this reader has a part, many at once, and apply them."""
        stores = self._stores_of(manifest)

        def apply(one: tuple[str, StoredArray, Cell, list[tuple[Box, Bits]]]) -> None:
            name, sent, cell, parts = one
            key = _key(manifest, _delta_key(name, cell))
            _change(sent, cell, parts, value(stores[sent.owner(cell)].read(key), key, end - time.monotonic()))

        with ThreadPoolExecutor(_READERS) as pool:
            chunks = [
                (name, sent, *chunk)
                for name, array in self._arrays.items()
                for sent in [manifest.arrays[name]]
                for chunk in array.chunks(sent).items()
            ]
            list(pool.map(apply, chunks))

    def _stores_of(self, manifest: Manifest) -> list[Store]:
        return [self._open_store(url) for url in manifest.stores] or [self._store]

    def _tree(self, by_name: dict[str, Any]) -> Params:
        return jax.tree.unflatten(jax.tree.structure(self._shapes), [by_name[name] for name in self._arrays])


class _Landing:
    """The slices of an array that devices of this process want, and their place in host memory."""

    def __init__(self, like: Any, sharding: jax.sharding.Sharding) -> None:
        self.shape, self.dtype, self._sharding = tuple(like.shape), np.dtype(like.dtype), sharding
        indices: Any = sharding.addressable_devices_indices_map(self.shape)
        self._boxes = {box_of(index, self.shape) for index in indices.values()}
        self._is_shared = any(device.platform == "cpu" for device in indices)
        self._kept: dict[Box, np.ndarray] = {}

    @property
    def buffers(self) -> dict[Box, np.ndarray]:
        """The bit patterns of each slice, in the same memory for every snapshot."""
        if not self._kept:
            self._kept = {box: _aligned([b - a for a, b in box], self.dtype.itemsize) for box in self._boxes}
        return self._kept

    def renew(self) -> None:
        """Forget the memory, into which an abandoned read may still write."""
        self._kept = {}

    def chunks(self, sent: StoredArray) -> dict[Cell, list[tuple[Box, Bits]]]:
        """Return the chunks that hold entries of the slices; for each, which, and their place in the buffers."""
        found: dict[Cell, list[tuple[Box, Bits]]] = {}
        for box, buffer in self.buffers.items():
            for cell in sent.cells(box):
                part = overlap(sent.box(cell), box)
                found.setdefault(cell, []).append((part, buffer[index_of(part, box)]))
        return found

    def put(self) -> jax.Array:
        """Copy the slices to their devices, without a program of the devices. The memory is in use until the result is
        ready."""

        def values(index: Any) -> np.ndarray:
            found = self._kept[box_of(index, self.shape)]
            if self._is_shared:  # devices of the host use the memory itself, if it is aligned
                kept, found = found, _aligned(found.shape, self.dtype.itemsize)
                np.copyto(found, kept)
            return found.view(self.dtype)

        return jax.make_array_from_callback(self.shape, self._sharding, values)


def _change(sent: StoredArray, cell: Cell, parts: list[tuple[Box, Bits]], blob: bytes) -> None:
    """Apply the changes of a chunk to parts of it, or put the whole chunk there, if that is what `blob` is.

    Raises:
      Damaged: it is neither.
    """
    chunk, bits = sent.box(cell), bits_dtype(sent.itemsize)
    entries = math.prod(sent.chunk)
    if len(blob) == entries * sent.itemsize:
        values = np.frombuffer(blob, bits).reshape(sent.chunk)
        for part, target in parts:
            target[...] = values[index_of(part, chunk)]
        return
    positions, values = deltas.changes(blob, entries, bits)
    axes = np.unravel_index(positions, sent.chunk)
    for part, target in parts:
        if part == chunk:
            target[axes] = values
            continue
        starts = [start - origin for (start, _), (origin, _) in zip(part, chunk, strict=True)]
        near = [at - start for at, start in zip(axes, starts, strict=True)]
        inside = np.logical_and.reduce([(at >= 0) & (at < size) for at, size in zip(near, target.shape, strict=True)])
        target[tuple(at[inside] for at in near)] = values[inside]


def _aligned(shape: Sequence[int], itemsize: int) -> np.ndarray:
    """Return new memory for bit patterns that a device of the host can use without a copy."""
    nbytes = math.prod(shape) * itemsize
    raw = np.empty(nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + nbytes].view(bits_dtype(itemsize)).reshape(shape)


def _bits_of(data: jax.Array) -> Bits:
    """Return the bit patterns of an array of one device, in host memory that is free when the result is."""
    # an array keeps its values on the host once they were asked for; another one of the same device memory is asked
    once = jax.make_array_from_single_device_arrays(data.shape, data.sharding, [data])
    return np.asarray(once, order="C").view(bits_dtype(data.dtype.itemsize))


def _changes_or_all(old: Bits, new: Bits) -> bytes:
    """Return what changed in a chunk, or all of it where that is shorter; the length tells which of them."""
    found = deltas.encode(old, new)
    return new.tobytes() if found is None else found


def _delta_key(name: str, cell: Cell) -> str:
    return ".".join([f"delta/{name}/c", *map(str, cell)])


def _named(tree: Params) -> list[tuple[str, Any]]:
    """Return the leaves of a tree with their dotted names."""
    pairs = jax.tree.leaves_with_path(tree)
    return [(jax.tree_util.keystr(path, simple=True, separator="."), leaf) for path, leaf in pairs]


def _read_newest(store: Store, end: float) -> tuple[int, int]:
    """Return epoch and version of the newest snapshot. Raises `MissingObject` if there is none."""
    found = Fields(fields.parse(value(store.read(NEWEST), NEWEST, end - time.monotonic())), NEWEST)
    return found.whole("epoch", low=0), found.whole("version", low=0)


def _key_of(epoch: int, version: int, inside: str = "") -> str:
    """Return the key of an object of a snapshot; of its folder, with a slash at the end, unless one is named."""
    return f"{epoch:06d}/{version:08d}/{inside}"


def _key(manifest: Manifest, inside: str = "") -> str:
    return _key_of(manifest.epoch, manifest.version, inside)


def _named_as(epoch: int, version: int) -> str:
    return f"version {version} of epoch {epoch}"
