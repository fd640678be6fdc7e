"""Safetensors files of a folder: an index of the tensors, reading parts of one tensor, and writing shards.

The library checks each header. Tensors are read through a memory map of the file, so that only the needed pages are
read, and none of them stays in memory.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from rolljax.errors import CheckpointError
from rolljax.model.files import inside, parse_json, read_json

INDEX, WEIGHTS = "{}.safetensors.index.json", "{}.safetensors"
DTYPES = {"F32": np.dtype(np.float32), "BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype(np.float16)}
"""Dtypes of weights that are read, by their names in safetensors."""
_READ_BYTES = 32 * 2**20
"""Most bytes of a file that are read at a time."""


class Stored(NamedTuple):
    """A tensor of a file."""

    file: str
    dtype: str
    """Name of the dtype in safetensors."""
    shape: tuple[int, ...]
    start: int
    """Offset of the first byte in the file."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


class Shards:
    """The weights of a folder: one file, or the files that an index names.

    Args:
      name: stem of the file names (`model`: `model.safetensors` or `model.safetensors.index.json`).

    Raises:
      CheckpointError: no weights, a file that is cut off or no safetensors, an index that does not fit the files.
    """

    def __init__(self, folder: str | Path, name: str = "model") -> None:
        self.folder = Path(folder)
        self._open: dict[str, mmap.mmap] = {}
        index, single = self.folder / INDEX.format(name), WEIGHTS.format(name)
        if (self.folder / single).is_file():
            self.tensors = _header(inside(self.folder, single))
        elif index.is_file():
            self.tensors = _indexed(index)
        else:
            raise CheckpointError(f"{folder} has neither {single} nor {index.name}{_others(self.folder)}")

    def view(self, name: str) -> np.ndarray:
        """Return a tensor as unsigned integers of its width; the file is read only when its elements are used."""
        stored = self.tensors[name]
        if stored.file not in self._open:
            with (self.folder / stored.file).open("rb") as f:
                self._open[stored.file] = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
        unsigned = np.dtype(f"u{DTYPES[stored.dtype].itemsize}")
        flat = np.frombuffer(self._open[stored.file], unsigned, math.prod(stored.shape), stored.start)
        return flat.reshape(stored.shape)

    def copy(self, view: np.ndarray, name: str) -> np.ndarray:
        """Copy a part of `view(name)`, rows of the file first, to a new array in the dtype of the file.

        In addition to the array at most a few MiB of the file are in memory.
        """
        out = np.empty(view.shape, view.dtype)
        rows = max(_READ_BYTES // view.strides[0], 1)
        for start in range(0, len(view), rows):
            out[start : start + rows] = view[start : start + rows]
            self._open[self.tensors[name].file].madvise(mmap.MADV_DONTNEED)
        return out.view(DTYPES[self.tensors[name].dtype])

    def equal(self, one: str, other: str) -> bool:
        """Return whether two tensors are equal bit by bit."""
        a, b = self.tensors[one], self.tensors[other]
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return False
        left, right = self.view(one), self.view(other)
        rows = max(_READ_BYTES // left.strides[0], 1)
        parts = (slice(start, start + rows) for start in range(0, len(left), rows))
        return all(np.array_equal(self.copy(left[p], one), self.copy(right[p], other)) for p in parts)


def _others(folder: Path) -> str:
    """Return a hint about the pickled weights that a folder holds instead of safetensors; empty if it holds none."""
    pickled = sorted(f.name for suffix in ("bin", "pt", "pth") for f in folder.glob(f"*.{suffix}"))
    if not pickled:
        return ""
    return (
        f"; {', '.join(pickled[:3])} may run code when read, and is not read here: convert it once, where you trust "
        "it, with `transformers`: AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new)"
    )


def _indexed(index: Path) -> dict[str, Stored]:
    folder = index.parent
    where = read_json(inside(folder, index.name), "an index of weights").get("weight_map")
    if not isinstance(where, dict) or not all(isinstance(file, str) for file in where.values()):
        raise CheckpointError(f"{index} is not an index of weights: its weight_map does not map names to files")
    files = sorted(set(where.values()))
    if absent := [f for f in files if not inside(folder, f).is_file()]:
        raise CheckpointError(f"{index} names files that are not there: {listed(absent)}")
    found = {file: _header(folder / file) for file in files}
    wrong = [f"{name}: not in {file}, where it should be" for name, file in where.items() if name not in found[file]]
    wrong += [f"{name}: in {f}, the index does not say so" for f in files for name in found[f] if where.get(name) != f]
    if wrong:
        raise CheckpointError(f"{index} does not fit its files:\n  " + listed(wrong))
    return {name: found[file][name] for name, file in where.items()}


def _header(path: Path) -> dict[str, Stored]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy"):  # the library's checks: sizes, offsets, dtypes
            pass
        with path.open("rb") as f:
            size = int.from_bytes(f.read(8), "little")
            fields = parse_json(f.read(size))
    except (SafetensorError, OSError, ValueError) as e:
        raise CheckpointError(f"{path} cannot be read: {e}") from e
    fields.pop("__metadata__", None)
    return {
        name: Stored(path.name, field["dtype"], tuple(field["shape"]), 8 + size + field["data_offsets"][0])
        for name, field in fields.items()
    }


def save_file(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Write one file of tensors, with the rights that the umask gives to any other file."""
    from safetensors.numpy import save_file

    path.touch()
    mode = path.stat().st_mode & 0o777
    in_order = {name: np.asarray(x, order="C") for name, x in tensors.items()}  # it writes others' memory as it lies
    save_file(in_order, str(path), metadata={"format": "pt"})  # a temporary file for the owner alone, renamed
    path.chmod(mode)


def listed(lines: list[str], most: int = 20) -> str:
    """Return the first lines of a long list, and the number of lines left out."""
    more = f"\n  ... and {len(lines) - most} more" if len(lines) > most else ""
    return "\n  ".join(lines[:most]) + more


class Planned(NamedTuple):
    """A tensor that will be written."""

    name: str
    nbytes: int
    make: Callable[[], np.ndarray]


def write(
    folder: Path, tensors: Iterable[Planned], max_shard_bytes: int, name: str = "model", writes: bool = True
) -> Iterator[int]:
    """Write tensors in files of at most `max_shard_bytes` (or of one tensor), with an index if there are several.

    A tensor is made when its file is; one file's tensors are in memory at a time. Yields the bytes of each tensor made.

    Args:
      writes: False makes the tensors and leaves the disk alone: for all processes of a cluster but one.
    """
    files: list[list[Planned]] = [[]]
    for tensor in tensors:
        if files[-1] and sum(t.nbytes for t in files[-1]) + tensor.nbytes > max_shard_bytes:
            files.append([])
        files[-1].append(tensor)
    names = [
        WEIGHTS.format(name if len(files) == 1 else f"{name}-{i:05}-of-{len(files):05}")
        for i in range(1, len(files) + 1)
    ]
    for file, group in zip(names, files, strict=True):
        made: dict[str, Any] = {}
        for tensor in group:
            value = tensor.make()
            if writes:
                made[tensor.name] = np.ascontiguousarray(value)
            yield tensor.nbytes
        if writes:
            save_file(folder / file, made)
    if writes and len(files) > 1:
        index = {
            "metadata": {"total_size": sum(t.nbytes for group in files for t in group)},
            "weight_map": {t.name: file for file, group in zip(names, files, strict=True) for t in group},
        }
        (folder / INDEX.format(name)).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
