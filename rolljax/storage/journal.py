"""Files of JSON lines that only grow: appending, reading, and a journal of values by key.

One rule holds for all of these files:

- A last line without its newline is torn: a kill or a full disk cut it short. Readers ignore it, and the next writer
  removes it.
- Any other line that is not JSON, or not what was written, is damaged. Readers skip and count it. It stays in the file,
  and whoever needs its value requests or makes it again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

from rolljax import fields, reading
from rolljax.errors import CheckpointError
from rolljax.storage import durable

T = TypeVar("T")
_BLOCK = 1 << 16


class Parsed(NamedTuple):
    """The lines of a file."""

    values: list[Any]
    """The parsed value of each complete line, in order."""
    damaged: int
    """Number of damaged lines."""
    end: int
    """Number of bytes up to and including the last newline; the rest is a torn line."""


def parse(data: bytes, read: Callable[[Any], T], refuse: Callable[[int, Exception], Exception] | None = None) -> Parsed:
    """Return the values of the lines in `data`.

    Args:
      read: makes the result from the JSON value of a line; an exception of it marks a damaged line.
      refuse: for a file that is written in one piece, so that a damaged or torn line is an error: makes this error from
        the line's number, counted from 1, and the exception.
    """
    end = data.rfind(b"\n") + 1
    values, damaged = [], 0
    lines = data.splitlines() if refuse else data[:end].split(b"\n")
    for i, line in enumerate(lines, 1):
        if line.strip() or refuse:
            try:
                values.append(read(fields.parse(line)))
            except Exception as e:  # border: any error of `read` on untrusted JSON
                if refuse:
                    raise refuse(i, e) from e
                damaged += 1
    return Parsed(values, damaged, end)


def read_lines(path: Path, read: Callable[[Any], T]) -> list[T]:
    """Return the values of the whole lines in a file; none if there is no file. read: see `parse`.

    Raises:
      CheckpointError: the path is not a regular file, or the file may not be read.
    """
    return parse(read_bytes(path), read).values


def read_bytes(path: Path) -> bytes:
    """Return the bytes of a file of lines; none if there is no file.

    Raises:
      CheckpointError: the path is not a regular file, or the file may not be read.
    """
    try:
        return reading.read_bytes(path)
    except FileNotFoundError:
        if path.is_symlink():
            raise CheckpointError(f"{path} is a link that leads nowhere; move it away") from None
        return b""
    except OSError as e:
        raise CheckpointError(f"{path} cannot be read: {reading.reason(e)}; move it away") from e


class JsonLines:
    """A file of JSON lines, open for appending. Only one process may have it open.

    Raises:
      StorageError: the file cannot be written, or is not a regular file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._synced = True
        with durable.storing(path):
            self._file = reading.open_file(path, reading.APPEND)
            try:
                _remove_torn_line(self._file.fileno())
            except OSError:
                self._file.close()
                raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, value: Any) -> bytes:
        """Append the line of a value and return it. The line survives the end of the process; see `sync`.

        Raises:
          StorageError: the disk does not take it.
        """
        self.write(line := line_of(value))
        return line

    def write(self, line: bytes) -> int:
        """Append a line that ends with a newline, as `add` does; return its offset in the file."""
        durable.reach("before", self.path)
        with durable.storing(self.path):
            descriptor, left = self._file.fileno(), memoryview(line)
            start = os.fstat(descriptor).st_size
            try:
                while left:
                    left = left[os.write(descriptor, left) :]
            except OSError:
                with contextlib.suppress(OSError):  # the next writer removes the torn line
                    os.ftruncate(descriptor, start)
                raise
        self._synced = False
        durable.reach("after", self.path)
        return start

    def sync(self) -> None:
        """Wait until all lines are on the disk, so that they survive the end of the machine.

        Raises:
          StorageError: the disk does not take them.
        """
        if not self._synced:
            with durable.storing(self.path):
                os.fsync(self._file.fileno())
            self._synced = True

    def close(self) -> None:
        """Sync and close the file. Raises as `sync` does."""
        try:
            self.sync()
        finally:
            self._file.close()


def line_of(value: Any) -> bytes:
    """Return the line of a value, with its newline."""
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


def append(path: Path, value: Any) -> bytes:
    """Append the line of a value to a file, wait until the disk has it, and return the line. Raises `StorageError`."""
    with JsonLines(path) as lines:
        return lines.add(value)


def _remove_torn_line(descriptor: int) -> None:
    """Cut a file after its last newline."""
    size = end = os.fstat(descriptor).st_size
    while end:
        start = max(0, end - _BLOCK)
        if (newline := os.pread(descriptor, end - start, start).rfind(b"\n")) >= 0:
            end = start + newline + 1
            break
        end = start
    if end < size:
        os.ftruncate(descriptor, end)


class Journal:
    """Values by key, one line each with a checksum. The last line of a key counts.

    The memory of a key is a hash of 16 bytes and an offset; values are read from the file.

    Args:
      path: the file, made with its folder by the first `put`; None: the values are in memory only.

    Raises:
      CheckpointError: the file cannot be read.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.damaged = 0
        """Number of lines that were damaged, torn or discarded; their values are requested again."""
        self._offsets: dict[bytes, int] = {}
        self._values: dict[bytes, Any] = {}  # values that no file holds
        self._lines: JsonLines | None = None
        if path is not None and path.is_file():
            self._read(path)

    def __len__(self) -> int:
        return len(self._offsets) + len(self._values)

    def __contains__(self, key: str) -> bool:
        return _short(key) in self._offsets or _short(key) in self._values

    def get(self, key: str) -> Any:
        """Return the value of a key; None if there is none, or if its line was damaged meanwhile."""
        short = _short(key)
        if short not in self._offsets or self.path is None:
            return self._values.get(short)
        try:
            with reading.open_file(self.path) as f:
                f.seek(self._offsets[short])
                found, value = _unsealed(f.readline())
            if found != key:
                raise ValueError("the line has another key")
        except (OSError, ValueError, LookupError, TypeError):
            self.discard(key)
            return None
        return value

    def put(self, key: str, value: Any) -> None:
        """Keep a value. It survives the end of the process; see `sync`.

        Raises:
          StorageError: the disk does not take the value; it is kept in memory.
        """
        short = _short(key)
        self._offsets.pop(short, None)
        self._values[short] = value
        if self.path is None:
            return
        if self._lines is None:
            with durable.storing(self.path):
                self.path.parent.mkdir(parents=True, exist_ok=True)
            self._lines = JsonLines(self.path)
        self._offsets[short] = self._lines.write(sealed(key, value))
        del self._values[short]

    def discard(self, key: str) -> None:
        """Remove a value that cannot be used, and count its line as damaged."""
        self._offsets.pop(_short(key), None)
        self._values.pop(_short(key), None)
        self.damaged += 1

    def sync(self) -> None:
        """Wait until all lines are on the disk. Raises `StorageError`."""
        if self._lines is not None:
            self._lines.sync()

    def close(self) -> None:
        """Sync and close the file. Raises `StorageError`."""
        if self._lines is not None:
            self._lines.close()

    def _read(self, path: Path) -> None:
        """Read where each value is; the values themselves are not kept."""
        offset = 0
        try:
            with reading.open_file(path) as f:
                for line in f:
                    try:
                        if not line.endswith(b"\n"):
                            raise ValueError("the line is torn")
                        self._offsets[_short(_unsealed(line)[0])] = offset
                    except (ValueError, LookupError, TypeError):
                        self.damaged += 1
                    offset += len(line)
        except OSError as e:
            raise CheckpointError(f"{path} cannot be read: {reading.reason(e)}; move it away") from e


def sealed(key: str, value: Any) -> bytes:
    """Return the line of a value in a journal."""
    record = {"key": key, "value": value}
    return line_of({**record, "sum": _checksum(record)})


def _unsealed(line: bytes) -> tuple[str, Any]:
    """Return key and value of a line. Raises ValueError, LookupError or TypeError if the line is damaged."""
    record = reading.parse(line)
    if not isinstance(record, dict) or record.pop("sum") != _checksum(record) or not isinstance(record["key"], str):
        raise ValueError("the checksum belongs to another content")
    return record["key"], record["value"]


def _checksum(record: Any) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:16]


def _short(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogatepass")).digest()[:16]
