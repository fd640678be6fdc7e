"""The manifest of a snapshot: which arrays it has, in which chunks they lie in the store, and who wrote each chunk."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from rolljax import fields
from rolljax.fields import Fields

FORMAT = 1
Box = tuple[tuple[int, int], ...]
"""A part of an array: start and stop along each axis."""
Cell = tuple[int, ...]
"""A chunk of an array: its place in the grid of chunks."""


@dataclasses.dataclass(frozen=True)
class StoredArray:
    """One array of a snapshot."""

    shape: tuple[int, ...]
    """Its shape."""
    dtype: str
    """Its dtype; the store has its bit patterns."""
    checksum: int
    """Its `trainer.publish.checksums`."""
    chunk: tuple[int, ...]
    """Shape of its chunks, each an object of the store; it divides the shape."""
    owners: tuple[int, ...] = ()
    """For each chunk, the process that wrote it, in C order; empty: all lie in one store."""

    @property
    def itemsize(self) -> int:
        """Bytes of an entry."""
        return np.dtype(self.dtype).itemsize

    @property
    def grid(self) -> tuple[int, ...]:
        """Number of chunks along each axis."""
        return tuple(size // step for size, step in zip(self.shape, self.chunk, strict=True))

    def cells(self, box: Box) -> Iterator[Cell]:
        """Yield the chunks that have entries in `box`."""
        pairs = zip(box, self.chunk, strict=True)
        return itertools.product(*(range(start // step, -(-stop // step)) for (start, stop), step in pairs))

    def box(self, cell: Cell) -> Box:
        """Return the part of the array that a chunk holds."""
        return tuple((i * step, (i + 1) * step) for i, step in zip(cell, self.chunk, strict=True))

    def owner(self, cell: Cell) -> int:
        """Return the process in whose store a chunk lies."""
        if not self.owners:
            return 0
        place = 0
        for i, count in zip(cell, self.grid, strict=True):
            place = place * count + i
        return self.owners[place]


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The description of a snapshot. It is written last: a snapshot without it does not exist."""

    epoch: int
    """The trainer's start that made it; each start has a higher one."""
    version: int
    """Policy version of the weights."""
    base: int | None
    """The version, of the same epoch, to which the changes in this snapshot are to be added; None: it is full."""
    arrays: dict[str, StoredArray]
    """The arrays by dotted name."""
    stores: tuple[str, ...] = ()
    """URL of each process's store, if they are not one."""

    def to_json(self) -> bytes:
        """Return the manifest as JSON."""
        return json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Manifest:
        """Read a manifest.

        Raises:
          Damaged: it is not one, or not whole.
        """
        parsed = fields.parse(data)
        value = Fields(parsed, "the manifest")
        value.whole("format", low=FORMAT, high=FORMAT)
        stores = value.items("stores")
        if not all(isinstance(url, str) for url in stores):
            raise value.wrong("stores", "a list of URLs")
        arrays = value.inside("arrays")
        version = value.whole("version", low=0)
        return cls(
            epoch=value.whole("epoch", low=0),
            version=version,
            base=value.whole("base", low=0, high=version - 1) if value.has("base") else None,
            arrays={name: _stored_array(arrays.inside(name), len(stores)) for name in parsed["arrays"]},
            stores=tuple(stores),
        )


def _stored_array(value: Fields, stores: int) -> StoredArray:
    """Return an array as a manifest describes it; stores: number of the stores."""
    found = StoredArray(
        shape=tuple(value.wholes("shape", low=0, high=fields.MOST)),
        dtype=value.text("dtype"),
        checksum=value.whole("checksum", low=0, high=2**32 - 1),
        chunk=tuple(value.wholes("chunk", low=1, high=fields.MOST)),
        owners=tuple(value.wholes("owners", low=0, high=stores - 1)),
    )
    if len(found.chunk) != len(found.shape) or any(a % b for a, b in zip(found.shape, found.chunk, strict=True)):
        raise value.wrong("chunk", "a divisor of the shape")
    if len(found.owners) != (math.prod(found.grid) if stores else 0):
        raise value.wrong("owners", "a process for each chunk")
    return found


def box_of(index: Sequence[slice], shape: Sequence[int]) -> Box:
    """Return the box of a shard's index."""
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def overlap(box: Box, other: Box) -> Box:
    """Return the part that two boxes have in common."""
    return tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, other, strict=True))


def index_of(box: Box, origin: Box | None = None) -> tuple[Any, ...]:
    """Return the index of a box in the array, or in a part of the array that begins where `origin` does.

    It ends with an ellipsis, so that NumPy makes a view of a scalar too.
    """
    starts = [start for start, _ in origin] if origin else [0] * len(box)
    return (*(slice(a - start, b - start) for (a, b), start in zip(box, starts, strict=True)), ...)


@functools.cache
def chunk_of(part: tuple[int, ...], itemsize: int, most_bytes: int) -> tuple[int, ...]:
    """Return the shape of chunks of about `most_bytes` bytes into which a part of an array is cut.

    A chunk is contiguous in its part: an axis is cut after all those before it were cut into single entries.
    """
    chunk = list(part)
    for axis, size in enumerate(part):
        nbytes = math.prod(chunk) * itemsize
        if nbytes <= most_bytes:
            break

        def distance(pieces: int, nbytes: int = nbytes) -> float:
            return abs(math.log(nbytes / pieces / most_bytes))

        # of the divisors the closest, so that a prime number of rows is not cut into single rows
        chunk[axis] = size // min((n for n in range(1, size + 1) if size % n == 0), key=distance)
        if chunk[axis] > 1:
            break
    return tuple(max(size, 1) for size in chunk)
