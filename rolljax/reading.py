"""Read files that anybody may have changed. Only regular files are opened, so that no read waits for the other end of a
pipe. Invalid JSON of any kind raises one error, with the path and the reason."""

from __future__ import annotations

import collections
import contextlib
import errno
import hashlib
import io
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, cast

from rolljax.errors import CheckpointError

MAX_DEPTH = 64
"""Deepest nesting of JSON that is read; our own files have less than 20."""
APPEND = os.O_RDWR | os.O_APPEND | os.O_CREAT
"""Flags of `open_file` that make a file, and write at its end."""
_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def open_file(path: str | Path, flags: int = os.O_RDONLY) -> BinaryIO:
    """Open a regular file, or a link to one, for reading or for appending; never wait for the other end of a pipe.

    Args:
      flags: `os.O_RDONLY`, or `APPEND`, which takes a device too.

    Raises:
      OSError: the file is missing, may not be read, or is not a regular file; `strerror` names the reason.
    """
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    with contextlib.ExitStack() as unless_opened:
        unless_opened.callback(os.close, descriptor)
        mode = os.fstat(descriptor).st_mode
        if not (stat.S_ISREG(mode) or (flags == APPEND and stat.S_ISCHR(mode))):
            kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "something else")
            raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", str(path))
        os.set_blocking(descriptor, True)
        file = os.fdopen(descriptor, "rb" if flags == os.O_RDONLY else "ab")
        unless_opened.pop_all()
    return file


def read_bytes(path: str | Path) -> bytes:
    """Return all bytes of a regular file. Raises `OSError`, as `open_file` does."""
    with open_file(path) as f:
        return f.read()


def digest(path: str | Path) -> str:
    """Return the SHA-256 of a regular file, in hexadecimal digits. Raises `OSError`, as `open_file` does."""
    with open_file(path) as f:
        return hashlib.file_digest(cast(io.BufferedReader, f), "sha256").hexdigest()


def parse(text: str | bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
      ValueError: the text is not JSON, or nested deeper than `MAX_DEPTH`.
    """
    try:
        found = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    level, depth = [found], 0
    while level:
        if depth > MAX_DEPTH:
            raise ValueError("it is nested too deeply")
        level, depth = [inner for value in level for inner in _inside(value)], depth + 1
    return found


def unique_keys(refusal: Callable[[str], Exception]) -> Callable[[list[tuple[str, Any]]], dict[str, Any]]:
    """Return an `object_pairs_hook` of `json` that raises `refusal(key)` if an object has a key twice."""

    def read(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            counts = collections.Counter(key for key, _ in pairs)
            raise refusal(next(key for key, count in counts.items() if count > 1))
        return found

    return read


def _inside(value: Any) -> list[Any]:
    """Return the containers in a container; nothing of other values."""
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [inner for inner in inside if isinstance(inner, (dict, list))]


def read_object(path: str | Path, remedy: str) -> dict[str, Any]:
    """Return the JSON object in a file.

    Args:
      remedy: the action for a user whose file is missing or damaged; the error's text ends with it.

    Raises:
      CheckpointError: the file is missing, is not a regular file, or holds no JSON object.
    """
    try:
        return load_object(path)
    except (OSError, ValueError) as e:
        raise CheckpointError(f"{path} cannot be read: {reason(e)}; {remedy}") from e


def load_object(path: str | Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises OSError if the file cannot be read, ValueError if it holds no object."""
    found = parse(read_bytes(path))
    if not isinstance(found, dict):
        raise ValueError("it is not a JSON object")
    return found


def reason(error: OSError | ValueError) -> str:
    """Return in a few words why a file cannot be read."""
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
