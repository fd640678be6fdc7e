"""The journal of a model's answers: an answer is never requested twice, however the process ended.

One line per answer, under a hash of everything that it depends on. Lines survive the end of the process as soon as they
written, and that of the machine when `sync` has returned. A line that a killed writer left unfinished is cut off.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from rolljax.errors import CheckpointError
from rolljax.storage import durable


class Journal:
    """Answers on disk by key; each takes 8 bytes of memory in addition to its key.

    Raises:
      CheckpointError: the file is not a journal. StorageError: it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._places: dict[bytes, int] = {}
        with durable.storing(path):
            self._file = open(path, "a+b")  # noqa: SIM115  # until `close`
        self._end = self._read()
        self._synced = True

    def __len__(self) -> int:
        return len(self._places)

    def get(self, key: str) -> Any:
        """Return the value of a key; None if there is none."""
        place = self._places.get(bytes.fromhex(key))
        if place is None:
            return None
        line = bytearray()
        while not line.endswith(b"\n"):
            line += (block := os.pread(self._file.fileno(), 1 << 16, place + len(line)))
            if (end := line.find(b"\n")) >= 0:
                del line[end + 1 :]
            elif not block:
                raise CheckpointError(f"{self.path} was cut while it was in use")
        return json.loads(line)["value"]

    def add(self, key: str, value: Any) -> None:
        """Keep a value.

        Raises:
          StorageError: the disk does not take it.
        """
        line = json.dumps({"key": key, "value": value}, ensure_ascii=True, separators=(",", ":")).encode() + b"\n"
        with durable.storing(self.path):
            durable.reach("before", self.path)
            self._file.write(line)
            self._file.flush()
        self._places[bytes.fromhex(key)] = self._end
        self._end += len(line)
        self._synced = False
        durable.reach("after", self.path)

    def sync(self) -> None:
        """Have the disk take what was added."""
        if not self._synced:
            with durable.storing(self.path):
                os.fsync(self._file.fileno())
            self._synced = True

    def close(self) -> None:
        """Sync and close it."""
        self.sync()
        self._file.close()

    def _read(self) -> int:
        """Index the existing lines, and cut off an unfinished one; return where the file ends."""
        end = 0
        self._file.seek(0)
        for line in self._file:
            try:
                whole = line.endswith(b"\n")
                key = bytes.fromhex(json.loads(line)["key"]) if whole else b""
            except (ValueError, LookupError, TypeError) as e:
                raise CheckpointError(f"{self.path} is damaged at byte {end}: {e}") from e
            if not whole:
                break
            self._places[key] = end
            end += len(line)
        with durable.storing(self.path):
            self._file.truncate(end)
        return end
