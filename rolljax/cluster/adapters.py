"""Snapshots of adapters in a store. The base weights, which never change, are written and read once for each epoch.

The base lies in the folder `base` of the store, as a snapshot of version 0; next to it are snapshots of the adapters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rolljax.cluster.manifest import Manifest
from rolljax.cluster.snapshots import SnapshotReader, SnapshotWriter
from rolljax.model.lora import Adapted

_BASE = "/base"


class AdapterWriter:
    """Writes snapshots of adapters, and before the first one the base. Arguments and errors: see `SnapshotWriter`.

    The host keeps a copy of both, to write them again.
    """

    def __init__(self, url: str, epoch: int, *, stores: Sequence[str] = (), **settings: Any) -> None:
        self._base = SnapshotWriter(url + _BASE, epoch, stores=[each + _BASE for each in stores], **settings)
        self._adapters = SnapshotWriter(url, epoch, stores=stores, **settings)

    def write(self, params: Adapted, version: int, sums: Adapted) -> Manifest:
        """Write the adapters as a snapshot, and return its manifest; see `SnapshotWriter.write`."""
        self._base.write(params.base, 0, sums.base)  # the second time it does nothing
        return self._adapters.write(params.adapters, version, sums.adapters)

    def write_again(self) -> Manifest:
        """Write the base and the newest adapters again; see `SnapshotWriter.write_again`."""
        self._base.write_again()
        return self._adapters.write_again()


class AdapterReader:
    """Reads snapshots of adapters, and once for each epoch the base. Arguments and errors: see `SnapshotReader`.

    Args:
      shapes, shardings: of adapters and base.
    """

    def __init__(self, url: str, shapes: Adapted, shardings: Adapted) -> None:
        self._url = url
        self._like = shapes.base, shardings.base
        self._adapters = SnapshotReader(url, shapes.adapters, shardings.adapters)
        self._base: tuple[int, Any, Any] | None = None

    def read(self, epoch: int, version: int) -> tuple[Adapted, Adapted]:
        """Return base and adapters of a snapshot, and their checksums as they were sent."""
        if self._base is None or self._base[0] != epoch:
            self._base = None
            reader = SnapshotReader(self._url + _BASE, *self._like)  # its host memory is freed
            self._base = epoch, *reader.read(epoch, 0)
        adapters, sums = self._adapters.read(epoch, version)
        return Adapted(self._base[1], adapters), Adapted(self._base[2], sums)

    def forget(self) -> None:
        """Forget what was read; see `SnapshotReader.forget`."""
        self._base = None
        self._adapters.forget()
