"""Rows from files (JSON Lines, also gzip; a JSON array, Parquet, Arrow, and folders of these), or from memory.

The first bytes of a file decide its format, not its name. Rows stay on disk where their format allows it: of JSON Lines
and of a JSON array 16 bytes a row are kept, Arrow files are mapped; a compressed file is unpacked into a temporary one
without a name; Parquet is read into memory, each different text of a column once.

A small file can unpack to any size. So every size is bounded before memory or disk is used: the bytes of a row
(`MAX_ROW_BYTES`), the number of rows (`MAX_ROWS`), and what a file may unpack to (`most_unpacked`).
"""

from __future__ import annotations

import bisect
import codecs
import collections
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

from rolljax import reading
from rolljax.errors import ConfigError, DataError, needed

Row = dict[str, Any]
"""Column -> JSON value."""

ENDINGS = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet", ".arrow", ".ndjson")
"""Endings of the names of data files in a folder."""
_SPLIT = re.compile(r"(train|test|validation|valid|val|dev|eval)(?![a-z])", re.IGNORECASE)
_BESIDE = {"dataset_info.json", "state.json", "dataset_dict.json"}

MAX_ROW_BYTES = 16 * 2**20
"""Maximum size of a row in bytes. A longer row is a bad row; its text is never in memory as a whole."""
MAX_ROWS = 2**26
"""Most rows of a file."""
SMALL_BYTES = 2**30
"""Every file may unpack to this many bytes."""
MAX_RATIO = 100
"""Most bytes that a byte of a larger packed file may unpack to; gzip packs JSON to a quarter, one letter to 1/1000."""
_BLOCK = 2**20
_HALVES = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")
"""Encodings of halves of surrogate pairs, also inside whole pairs."""
_SPACE = re.compile(r"[ \t\r\n]*")


class BadRow(Exception):
    """A row cannot be used; the message gives the reason."""


class Rows(Protocol):
    """Rows in file order."""

    def __len__(self) -> int: ...

    def row(self, i: int) -> Row:
        """Return row `i`. Raise `BadRow` if it is not an object, or cannot be read."""
        ...

    def location(self, i: int) -> str:
        """Return file and line (or number of the row, from 0) of row `i`."""
        ...


class InMemoryRows:
    """Rows in memory, without a file. Two objects are equal if their rows are equal.

    Args:
      rows: dicts of JSON values.

    Raises:
      ConfigError: a row is not a dict, or holds a value that JSON cannot express.
    """

    def __init__(self, rows: Iterable[Mapping[str, Any]]) -> None:
        try:
            self._lines = [json.dumps(dict(row), ensure_ascii=False) for row in rows]
        except (TypeError, ValueError) as e:
            raise ConfigError(
                f"holds what is no JSON object: {e}", setting="records", remedy="give dicts of text, numbers and lists"
            ) from None
        self.sha256 = hashlib.sha256("\n".join(self._lines).encode(errors="surrogatepass")).hexdigest()

    def __len__(self) -> int:
        return len(self._lines)

    def row(self, i: int) -> Row:
        """Return a new dict of row `i`."""
        return _object(self._lines[i])

    def location(self, i: int) -> str:
        """Return the name of row `i` in messages."""
        return f"record {i} of {self}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, InMemoryRows) and self.sha256 == other.sha256

    def __hash__(self) -> int:
        return hash(self.sha256)

    def __repr__(self) -> str:
        return f"{len(self)} rows in memory (sha256 {self.sha256[:12]})"


def in_memory(rows: InMemoryRows | Iterable[Mapping[str, Any]] | None) -> InMemoryRows | None:
    """Wrap rows in the type that an environment keeps in its settings; return None for None."""
    return rows if rows is None or isinstance(rows, InMemoryRows) else InMemoryRows(rows)


def most_unpacked(path: Path) -> int:
    """Return the largest allowed size of a packed file after unpacking, bytes."""
    return max(SMALL_BYTES, MAX_RATIO * os.stat(path).st_size)


def find_files(path: str, setting: str) -> list[Path]:
    """Return the files that `path` names: a file, a folder, a pattern such as `data/train-*.parquet`, or a file that
    comes with rolljax.

    Raises:
      ConfigError: there is no such file, or a folder holds several splits.
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
    for folder in (package / "configs", package.parent / "configs", *sorted((package / "recipes").glob("*"))):
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
    """Open the rows of all files, one after the other.

    Raises:
      DataError: a file is broken, or holds no rows. ConfigError: a needed package is missing.
    """
    parts = [_open(path) for path in files]
    rows = parts[0] if len(parts) == 1 else _Several(parts)
    if not len(rows):
        raise DataError(f"{', '.join(map(str, files))} holds no rows")
    return rows


def signature(files: Sequence[Path]) -> tuple[tuple[int, ...], ...]:
    """Return a value that changes when one of the files does."""
    stats = map(os.stat, files)
    return tuple((s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns) for s in stats)


def _in_folder(folder: Path, setting: str) -> list[Path]:
    """Return the data files of a folder, in the order of their names: the shards of `save_to_disk`, or all."""
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
            file = _unpacked(path, file)
            head = file.read(8)
            file.seek(0)
        if head[:4] == b"PAR1" or head[:6] == b"ARROW1" or head[:4] == b"\xff\xff\xff\xff":
            file.close()
            return _ArrowRows(path, head)
        return _JsonArray(path, file) if _starts_array(file) else _JsonLines(path, file)
    except (OSError, EOFError) as e:
        raise DataError(f"{path} cannot be read: {e}") from e


def _unpacked(path: Path, packed: BinaryIO) -> BinaryIO:
    """Unpack a gzip file into a temporary one. Raise `DataError` if it is larger than `most_unpacked`, or the disk is
    full."""
    unpacked_file = tempfile.TemporaryFile()  # noqa: SIM115  # its reader keeps it open
    limit, free = most_unpacked(path), shutil.disk_usage(tempfile.gettempdir()).free
    num = 0
    with packed, gzip.open(packed) as unpacking:
        while block := unpacking.read(_BLOCK):
            num += len(block)
            if num > limit:
                raise DataError(
                    f"{path} unpacks to more than {limit:,} bytes: a file of its size may not\n"
                    "  fix:   if you trust it, unpack it yourself"
                )
            if num > free // 2:
                raise DataError(
                    f"{path} unpacks to more than half of the {free:,} bytes that are free in {tempfile.gettempdir()}"
                    "\n  fix:   unpack it yourself, or name a larger folder: TMPDIR=FOLDER"
                )
            unpacked_file.write(block)
    unpacked_file.seek(0)
    return unpacked_file


def _starts_array(file: BinaryIO) -> bool:
    """Return whether the first character, apart from white space, is a bracket."""
    while (block := file.read(4096)) and not block.strip():
        pass
    file.seek(0)
    return block.lstrip()[:1] == b"["


# ---- formats --------------------------------------------------------------------------------------------------------


class _JsonRows:
    """JSON objects in a file, each read by `pread`, so that threads can read concurrently.

    Subclasses call `_add` with the first and the end offset of each row.
    """

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path, self._file = path, file
        self._starts, self._ends = array("q"), array("q")

    def __len__(self) -> int:
        return len(self._starts)

    def row(self, i: int) -> Row:
        start, num = self._starts[i], self._ends[i] - self._starts[i]
        _check_size(num)
        return _object(os.pread(self._file.fileno(), num, start))

    def _add(self, start: int, end: int) -> None:
        _check_number(self._path, len(self._starts) + 1)
        self._starts.append(start)
        self._ends.append(end)


class _JsonLines(_JsonRows):
    """An object on each line that is not blank."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        super().__init__(path, file)
        offset, start, is_blank = 0, 0, True
        while part := file.readline(_BLOCK):
            offset += len(part)
            is_blank = is_blank and not part.strip()
            if part.endswith(b"\n"):
                if not is_blank:
                    self._add(start, offset)
                start, is_blank = offset, True
        if not is_blank:
            self._add(start, offset)

    def location(self, i: int) -> str:
        lines, left, offset = 1, self._starts[i], 0
        while block := os.pread(self._file.fileno(), min(left - offset, _BLOCK), offset):
            lines, offset = lines + block.count(b"\n"), offset + len(block)
        return f"{self._path}, line {lines}"


class _JsonArray(_JsonRows):
    """One array of objects. It is read through once, in a window of the text that holds one row at least."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        super().__init__(path, file)
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogatepass")
        self._window, self._at, self._offset = "", 0, 0
        self._next("[")
        has_more = self._peek() != "]"
        while has_more:
            self._read_item()
            has_more = self._peek() == ","
            if has_more:
                self._next(",")
        self._next("]")
        if self._peek():
            raise self._fault("text follows its end")
        self._window = ""

    def location(self, i: int) -> str:
        return f"{self._path}, row {i}"

    def _read_item(self) -> None:
        """Note where the item that begins here ends, and go there."""
        self._peek()
        scan = json.JSONDecoder().raw_decode
        while True:
            try:
                _, end = scan(self._window, self._at)
            except (ValueError, RecursionError) as e:  # or it is cut by the window's end
                if not self._more():
                    raise self._fault(str(e)) from None
            else:
                if end < len(self._window) or not self._more():  # a number may continue
                    break
        start = self._offset
        self._go_to(end)
        self._add(start, self._offset)

    def _peek(self) -> str:
        """Return the next character that is not white space; empty at the file's end."""
        while True:
            if blank := _SPACE.match(self._window, self._at):
                self._go_to(blank.end())
            if (char := self._window[self._at : self._at + 1]) or not self._more():
                return char

    def _next(self, char: str) -> None:
        if (found := self._peek()) != char:
            raise self._fault(f"{char!r} expected, not {found!r}" if found else f"it ends without {char!r}")
        self._go_to(self._at + 1)

    def _go_to(self, end: int) -> None:
        self._offset += len(self._window[self._at : end].encode("utf-8", "surrogatepass"))
        self._at = end

    def _more(self) -> bool:
        """Read more text into the window, at least one block; return False at the end of the file."""
        self._window, self._at = self._window[self._at :], 0
        if len(self._window) > MAX_ROW_BYTES:
            raise self._fault(f"it is not JSON, or has more than {MAX_ROW_BYTES:,} bytes")
        while block := self._file.read(max(_BLOCK, len(self._window))):
            try:
                text = self._decoder.decode(block)
            except UnicodeDecodeError as e:
                raise self._fault(str(e)) from None
            self._window += text
            if text:
                return True
        return False

    def _fault(self, why: str) -> DataError:
        return DataError(f"{self._path} starts as a JSON array, but is not JSON at row {len(self)}: {why}")


class _ArrowRows:
    """A Parquet file in memory, or an Arrow file (as `datasets.save_to_disk` writes it), mapped."""

    def __init__(self, path: Path, head: bytes) -> None:
        with needed("pyarrow", f"the Parquet or Arrow file {path}", install="rolljax[data]"):
            import pyarrow
        self._path = path
        try:
            self._batches = _parquet(path) if head[:4] == b"PAR1" else _arrow(path, is_file=head[:6] == b"ARROW1")
        except (pyarrow.ArrowException, OSError) as e:
            raise DataError(f"{path} cannot be read: {e}") from e
        self._ends = [*_running_sums(b.num_rows for b in self._batches)]
        _check_number(path, len(self))
        self._is_small = [sum(map(_most_bytes, b.columns)) <= MAX_ROW_BYTES for b in self._batches]

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def row(self, i: int) -> Row:
        n = bisect.bisect_right(self._ends, i)
        batch = self._batches[n]
        row = batch.slice(i - self._ends[n] + batch.num_rows, 1)
        if not self._is_small[n]:
            _check_size(sum(map(_num_bytes, row.columns)))
        try:
            return row.to_pylist()[0]
        except UnicodeDecodeError as e:
            raise BadRow(f"holds bytes that are no text: {e}") from None

    def location(self, i: int) -> str:
        return f"{self._path}, row {i}"


def _parquet(path: Path) -> list[Any]:
    """Read the batches of a Parquet file. Texts are kept as it stores them, each different one once: a column that
    repeats one text a million times stays small.

    Raises:
      DataError: it is larger than `most_unpacked`; mostly the file says so itself, before it is read.
    """
    import pyarrow
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:
        about, columns = file.metadata, [file.schema.column(i) for i in range(len(file.schema))]
    _check_number(path, about.num_rows)
    num = 0
    for i, column in enumerate(columns):
        chunks = [about.row_group(g).column(i) for g in range(about.num_row_groups)]
        width = 4 if column.physical_type == "BYTE_ARRAY" else max(8, column.length or 0)
        num += sum(max(c.total_uncompressed_size, c.num_values * width) for c in chunks)
    _check_unpacked(path, num)
    texts = [column for column in columns if column.physical_type == "BYTE_ARRAY"]
    flat = [column.path for column in texts if not column.max_repetition_level and "." not in column.path]
    batches, before = [], pyarrow.total_allocated_bytes()
    with (
        parquet.ParquetFile(path, read_dictionary=[column.path for column in texts]) as file,
        parquet.ParquetFile(path, read_dictionary=flat) as plainer,
    ):
        for g in range(about.num_row_groups):
            try:  # no threads: workers are forked from this process
                group = file.read_row_group(g, use_threads=False)
            except pyarrow.ArrowNotImplementedError:  # texts inside of lists, stored in two ways
                group = plainer.read_row_group(g, use_threads=False)
            batches += group.to_batches()
            _check_unpacked(path, pyarrow.total_allocated_bytes() - before)
    return batches


def _arrow(path: Path, *, is_file: bool) -> list[Any]:
    """Read the batches of an Arrow file or stream, mapped where its buffers are not packed.

    Raises:
      DataError: its buffers are packed, and larger than `most_unpacked`.
    """
    import pyarrow

    content = pyarrow.memory_map(str(path)).read_buffer()
    stream = content.slice(8) if is_file else content  # a file is a stream between marks
    num = 0
    for message in pyarrow.ipc.MessageReader.open_stream(pyarrow.BufferReader(stream)):
        num += _packed_bytes(message)
        _check_unpacked(path, num)
    reader = (pyarrow.ipc.open_file if is_file else pyarrow.ipc.open_stream)(pyarrow.BufferReader(content))
    return [*map(reader.get_batch, range(reader.num_record_batches))] if is_file else [*reader]


def _packed_bytes(message: Any) -> int:
    """Return the bytes into which an Arrow message declares that its packed buffers unpack; 0 if they are not packed.

    A message is described by a flatbuffer, in which a list of offsets before a table locates its fields. Field 2 of a
    `Message` is a `RecordBatch`, whose field 2 lists buffers and field 3 says that they are packed, or a
    `DictionaryBatch`, whose field 1 is such a batch. Every packed buffer begins with its size.
    """
    described, body = memoryview(message.metadata), memoryview(message.body or b"")

    def number(at: int, size: int, data: memoryview = described) -> int:
        return int.from_bytes(data[at : at + size], "little", signed=True)

    def field(table: int, index: int) -> int:
        offsets = table - number(table, 4)
        has_field = 4 + 2 * index < number(offsets, 2)
        offset = number(offsets + 4 + 2 * index, 2) if has_field else 0
        return table + offset if offset else 0

    def inner(at: int) -> int:
        return at + number(at, 4)

    if message.type not in ("record batch", "dictionary") or not (header := field(inner(0), 2)):
        return 0
    batch = inner(header)
    if message.type == "dictionary":
        batch = inner(field(batch, 1))
    if not field(batch, 3) or not (buffers := field(batch, 2)):
        return 0
    first = inner(buffers)
    places = [number(first + 4 + 16 * i, 8) for i in range(number(first, 4))]
    return sum(max(0, number(place, 8, body)) for place in places)


def _most_bytes(column: Any) -> int:
    """Return the most bytes that a value of an Arrow array takes when written out."""
    from pyarrow import compute, types

    kind = column.type
    if not len(column):
        return 0
    if types.is_dictionary(kind):
        return _most_bytes(column.dictionary)
    if types.is_struct(kind):
        return sum(map(_most_bytes, column.flatten()))
    if types.is_list(kind) or types.is_large_list(kind):
        return (compute.max(compute.list_value_length(column)).as_py() or 0) * _most_bytes(column.flatten())
    if types.is_string(kind) or types.is_binary(kind) or types.is_large_string(kind) or types.is_large_binary(kind):
        return compute.max(compute.binary_length(column)).as_py() or 0
    return 16 if types.is_primitive(kind) else column.nbytes


def _num_bytes(column: Any) -> int:
    """Return the bytes of an Arrow array with every value written out; for very many values a lower bound above the
    limit of a row."""
    from pyarrow import types

    kind, least = column.type, 8 * len(column)
    if least > MAX_ROW_BYTES:
        return least
    if types.is_dictionary(kind):
        used = collections.Counter(column.indices.to_pylist())
        return sum(num * _most_bytes(column.dictionary[i : i + 1]) for i, num in used.items() if i is not None)
    if types.is_struct(kind):
        return sum(map(_num_bytes, column.flatten()))
    if types.is_list(kind) or types.is_large_list(kind):
        return _num_bytes(column.flatten())
    return max(least, column.nbytes)


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


def read_json(text: str | bytes) -> Any:
    """Parse JSON in which no object has a duplicate key and every number is finite.

    Raises:
      ValueError: it is not JSON, or one of these.
    """
    try:
        return json.loads(text, object_pairs_hook=_once, parse_constant=_refused)
    except RecursionError:
        raise ValueError("JSON is nested too deeply") from None


_once = reading.unique_keys(lambda key: NotStrict(f"key {key!r} stands twice in one object"))


def _refused(constant: str) -> Any:
    raise NotStrict(f"{constant} is not a number in JSON")


class NotStrict(ValueError):
    """Text that Python's parser accepts although it is not JSON (`NaN`), or is ambiguous (a repeated key)."""


def _object(line: str | bytes) -> Row:
    try:
        found = read_json(line)
    except ValueError as e:
        raise BadRow(f"is not JSON: {e}") from None
    if not isinstance(found, dict):
        raise BadRow("is not a JSON object")
    if _HALVES.search(line.encode(errors="surrogatepass") if isinstance(line, str) else line):
        _check_characters(found)
    return found


def _check_characters(row: Row) -> None:
    for name, value in row.items():
        try:
            json.dumps([name, value], ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise BadRow(f"{ascii(name)[1:-1]} holds half of a surrogate pair, which is no character") from None


def _check_size(num: int) -> None:
    if num > MAX_ROW_BYTES:
        raise BadRow(f"has {num:,} bytes; a row has at most {MAX_ROW_BYTES:,}")


def _check_number(path: Path, num: int) -> None:
    if num > MAX_ROWS:
        raise DataError(f"{path} has more than {MAX_ROWS:,} rows\n  fix:   split the file")


def _check_unpacked(path: Path, num: int) -> None:
    if num > (limit := most_unpacked(path)):
        raise DataError(
            f"{path} unpacks to {num:,} bytes, more than {limit:,}: a file of its size may not\n"
            "  fix:   if you trust it, write it as JSON Lines, or in several files"
        )
