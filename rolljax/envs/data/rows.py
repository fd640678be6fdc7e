"""Files of rows, whatever their format: JSON Lines (also gzip), a JSON array, Parquet, Arrow, and folders of these;
and rows that a program gives, without a file.

What a file is shows in its first bytes, not in its name. Rows stay on disk where their format lets them: of JSON Lines
8 bytes a row are kept, Arrow files are mapped; a packed file is unpacked into a temporary one without a name; a JSON
array and Parquet are read into memory.
"""

from __future__ import annotations

import bisect
import difflib
import glob
import gzip
import hashlib
import json
import os
import re
import shutil
import tempfile
from array import array
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from rolljax.errors import ConfigError, DataError

Row = dict[str, Any]
"""Column -> value, as JSON knows values."""

ENDINGS = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet", ".arrow", ".ndjson")
"""Names of files in a folder that are taken for data."""
_SPLIT = re.compile(r"(train|test|validation|valid|val|dev|eval)(?![a-z])", re.IGNORECASE)
_BESIDE = {"dataset_info.json", "state.json", "dataset_dict.json"}


class BadRow(Exception):
    """What is wrong with a row."""


class Rows(Protocol):
    """Rows in the order in which they stand."""

    def __len__(self) -> int: ...

    def row(self, i: int) -> Row:
        """Row `i`. Raises `BadRow`: it is not an object, or cannot be read."""
        ...

    def location(self, i: int) -> str:
        """File and line (or number of the row, from 0) of row `i`."""
        ...


class InMemoryRows:
    """Rows that a program gives, without a file. Two are equal that hold the same.

    Args:
      rows: dicts, as JSON knows them.

    Raises:
      ConfigError: one is no dict, or holds what JSON does not know.
    """

    def __init__(self, rows: Iterable[Mapping[str, Any]]) -> None:
        try:
            self._lines = [json.dumps(dict(row), ensure_ascii=False) for row in rows]
        except (TypeError, ValueError) as e:
            raise ConfigError(
                f"holds what is no JSON object: {e}", setting="records", remedy="give dicts of text, numbers and lists"
            ) from None
        self.sha256 = hashlib.sha256("\n".join(self._lines).encode()).hexdigest()

    def __len__(self) -> int:
        return len(self._lines)

    def row(self, i: int) -> Row:
        """Row `i`, a dict of its own."""
        return _object(self._lines[i].encode())

    def location(self, i: int) -> str:
        """What row `i` is called in messages."""
        return f"record {i} of {self}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, InMemoryRows) and self.sha256 == other.sha256

    def __hash__(self) -> int:
        return hash(self.sha256)

    def __repr__(self) -> str:
        return f"{len(self)} rows in memory (sha256 {self.sha256[:12]})"


def in_memory(rows: InMemoryRows | Iterable[Mapping[str, Any]] | None) -> InMemoryRows | None:
    """Rows as an environment keeps them in its settings."""
    return rows if rows is None or isinstance(rows, InMemoryRows) else InMemoryRows(rows)


def find_files(path: str, setting: str) -> list[Path]:
    """The files that `path` names: a file, a folder, a pattern such as `data/train-*.parquet`, or a file that comes
    with rolljax.

    Raises:
      ConfigError: there is none, or a folder holds several splits.
    """
    target = Path(path)
    if target.is_file():
        return [target]
    if target.is_dir():
        return _in_folder(target, setting)
    if glob.has_magic(path):
        if found := sorted(p for p in map(Path, glob.glob(path)) if p.is_file()):
            return found
        raise ConfigError("matches no file", setting=setting, value=path)
    package = Path(__file__).parents[2]
    for folder in (package / "configs", package.parent / "configs"):
        if target.name == path and (folder / path).is_file():
            return [folder / path]
    beside = [p.name for p in target.parent.iterdir()] if target.parent.is_dir() else []
    near = difflib.get_close_matches(target.name, beside, 1)
    raise ConfigError(
        "is not a file or folder",
        setting=setting,
        value=path,
        remedy=f"did you mean {near[0]}?" if near else "name a local file of JSON Lines, JSON, Parquet or Arrow",
    )


def open_rows(files: Sequence[Path]) -> Rows:
    """The rows of all files, one after the other.

    Raises:
      DataError: a file is broken, or holds no rows. ConfigError: it needs a package that is missing.
    """
    parts = [_open(path) for path in files]
    rows = parts[0] if len(parts) == 1 else _Several(parts)
    if not len(rows):
        raise DataError(f"{', '.join(map(str, files))} holds no rows")
    return rows


def signature(files: Sequence[Path]) -> tuple[tuple[int, ...], ...]:
    """What changes when one of the files does."""
    stats = map(os.stat, files)
    return tuple((s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns) for s in stats)


def _in_folder(folder: Path, setting: str) -> list[Path]:
    """The data files of a folder: those of `save_to_disk`, or all of them, in the order of their names."""
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(p.name for p in folder.iterdir() if (p / "state.json").is_file())
        if len(splits) != 1:
            raise _one_of(folder, "holds several splits", splits, setting)
        return _in_folder(folder / splits[0], setting)
    found = sorted(p for p in folder.iterdir() if p.name.endswith(ENDINGS) and p.name not in _BESIDE and p.is_file())
    if not found:
        inside = sorted(p.name for p in folder.iterdir() if p.is_dir())
        raise _one_of(folder, "holds no data files", inside, setting)
    splits = sorted({m[1].lower() for p in found if (m := _SPLIT.match(p.name))})
    if len(splits) > 1:
        raise _one_of(folder, f"holds files of several splits ({', '.join(splits)})", [p.name for p in found], setting)
    return found


def _one_of(folder: Path, message: str, names: Sequence[str], setting: str) -> ConfigError:
    shown = ", ".join(str(folder / name) for name in names[:5])
    remedy = f"name one of {shown}" if names else f"it should hold files that end with {', '.join(ENDINGS)}"
    return ConfigError(message, setting=setting, value=str(folder), remedy=remedy)


def _open(path: Path) -> Rows:
    try:
        file: BinaryIO = open(path, "rb")  # noqa: SIM115  # a reader of lines keeps it open
        head = file.read(8)
        file.seek(0)
        if head[:2] == b"\x1f\x8b":
            file = _unpacked(file)
            head = file.read(8)
            file.seek(0)
        if head[:4] == b"PAR1" or head[:6] == b"ARROW1" or head[:4] == b"\xff\xff\xff\xff":
            file.close()
            return _ArrowRows(path, head)
        return _JsonArray(path, file) if _starts_array(file) else _JsonLines(path, file)
    except (OSError, EOFError) as e:
        raise DataError(f"{path} cannot be read: {e}") from e


def _unpacked(packed: BinaryIO) -> BinaryIO:
    unpacked_file = tempfile.TemporaryFile()  # noqa: SIM115  # its reader keeps it open
    with packed, gzip.open(packed) as unpacking:
        shutil.copyfileobj(unpacking, unpacked_file, 1 << 20)
    unpacked_file.seek(0)
    return unpacked_file


def _starts_array(file: BinaryIO) -> bool:
    """Whether what stands first, white space aside, is a bracket."""
    while (block := file.read(4096)) and not block.strip():
        pass
    file.seek(0)
    return block.lstrip()[:1] == b"["


# ---- formats --------------------------------------------------------------------------------------------------------


class _JsonLines:
    """An object on each line that is not blank; read by `pread`, so that threads do not get into each other's way."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path, self._file = path, file
        self._starts = array("q")
        offset = 0
        for line in file:
            if line.strip():
                self._starts.append(offset)
            offset += len(line)
        self._starts.append(offset)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def row(self, i: int) -> Row:
        start, end = self._starts[i], self._starts[i + 1]
        return _object(os.pread(self._file.fileno(), end - start, start))

    def location(self, i: int) -> str:
        lines, left, offset = 1, self._starts[i], 0
        while block := os.pread(self._file.fileno(), min(left - offset, 1 << 20), offset):
            lines, offset = lines + block.count(b"\n"), offset + len(block)
        return f"{self._path}, line {lines}"


class _JsonArray:
    """One array of objects."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path = path
        with file:
            try:
                self._items = json.load(file)
            except (ValueError, RecursionError) as e:
                raise DataError(f"{path} starts as a JSON array, but is not JSON: {e}") from None

    def __len__(self) -> int:
        return len(self._items)

    def row(self, i: int) -> Row:
        return _checked(self._items[i])

    def location(self, i: int) -> str:
        return f"{self._path}, row {i}"


class _ArrowRows:
    """A Parquet file in memory, or an Arrow file (as `datasets.save_to_disk` writes it), mapped."""

    def __init__(self, path: Path, head: bytes) -> None:
        try:
            import pyarrow
            import pyarrow.parquet
        except ModuleNotFoundError as e:
            raise ConfigError(
                "is Parquet or Arrow, and reading it needs the package pyarrow",
                setting=str(path),
                remedy="pip install 'rolljax[data]'",
            ) from e
        self._path = path
        try:
            if head[:4] == b"PAR1":  # no threads: workers are forked from this process
                self._table = pyarrow.parquet.ParquetFile(path).read(use_threads=False)
            else:
                file = pyarrow.memory_map(str(path))
                reader = pyarrow.ipc.open_file if head[:6] == b"ARROW1" else pyarrow.ipc.open_stream
                self._table = reader(file).read_all()
        except (pyarrow.ArrowException, OSError) as e:
            raise DataError(f"{path} cannot be read: {e}") from e
        self._batches = self._table.to_batches()
        self._ends = [*_running_sums(b.num_rows for b in self._batches)]

    def __len__(self) -> int:
        return self._table.num_rows

    def row(self, i: int) -> Row:
        n = bisect.bisect_right(self._ends, i)
        batch = self._batches[n]
        return batch.slice(i - self._ends[n] + batch.num_rows, 1).to_pylist()[0]

    def location(self, i: int) -> str:
        return f"{self._path}, row {i}"


class _Several:
    """Files one after the other."""

    def __init__(self, parts: Sequence[Rows]) -> None:
        self._parts = parts
        self._ends = [*_running_sums(map(len, parts))]

    def __len__(self) -> int:
        return self._ends[-1]

    def row(self, i: int) -> Row:
        part, row = self._part_of(i)
        return part.row(row)

    def location(self, i: int) -> str:
        part, row = self._part_of(i)
        return part.location(row)

    def _part_of(self, i: int) -> tuple[Rows, int]:
        n = bisect.bisect_right(self._ends, i)
        return self._parts[n], i - (self._ends[n - 1] if n else 0)


def _running_sums(sizes: Any) -> Any:
    total = 0
    for size in sizes:
        total += size
        yield total


def _object(line: bytes) -> Row:
    try:
        return _checked(json.loads(line))
    except (ValueError, RecursionError) as e:
        raise BadRow(f"is not JSON: {e}") from None


def _checked(value: Any) -> Row:
    if not isinstance(value, dict):
        raise BadRow("is not a JSON object")
    return value
