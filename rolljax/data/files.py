"""Files that pipelines read and write: rows of any format in, JSON Lines or Parquet out, complete or not at all."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from rolljax.data.base import Record
from rolljax.envs.data.rows import BadRow, Rows, find_files, open_rows, signature
from rolljax.errors import DataError, needed
from rolljax.storage import durable

Format = Literal["jsonl", "jsonl.gz", "parquet"]
PARQUET_ROWS = 4096
"""Rows that are written at a time."""


class FileSource:
    """The rows of files, as records.

    skip_bad: leave out rows that are no records instead of raising; `bad` is their number once all rows were read.

    Raises:
      DataError: a file is broken. ConfigError: there is none, or it needs a package that is missing.
    """

    def __init__(self, path: str, setting: str = "--in", *, skip_bad: bool = False) -> None:
        files = find_files(path, setting)
        self._rows: Rows = open_rows(files)
        self._skip_bad = skip_bad
        self.state = [[str(f), *stat[2:]] for f, stat in zip(files, signature(files), strict=True)]
        self.bad = 0

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Record]:
        self.bad = 0
        for i in range(len(self._rows)):
            try:
                yield self._rows.row(i)
            except BadRow as e:
                if not self._skip_bad:
                    raise DataError(
                        f"{self._rows.location(i)}: {e}\n  fix:   mend the row, or Pipeline.bad_rows = 'skip'"
                    ) from None
                self.bad += 1

    def record(self, i: int) -> Record:
        """Record `i`."""
        try:
            return self._rows.row(i)
        except BadRow as e:
            raise DataError(f"{self._rows.location(i)}: {e}") from None


class Spill:
    """Records between two stages: JSON Lines, written once, read any number of times."""

    def __init__(self, path: Path) -> None:
        self.path = path
        empty = not path.stat().st_size
        self._rows: Rows | None = None if empty else open_rows([path])

    def __len__(self) -> int:
        return 0 if self._rows is None else len(self._rows)

    def __iter__(self) -> Iterator[Record]:
        with open(self.path, "rb") as f:
            for line in f:
                yield json.loads(line)

    def record(self, i: int) -> Record:
        """Record `i`."""
        assert self._rows is not None
        return self._rows.row(i)


def line_of(record: Mapping[str, Any]) -> bytes:
    """Serialize a record as a line of JSON.

    Raises:
      DataError: the record holds a value that JSON cannot express.
    """
    try:
        text = json.dumps(record, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return text.encode() + b"\n"
    except UnicodeEncodeError:
        return json.dumps(record, allow_nan=False, separators=(",", ":")).encode() + b"\n"
    except (TypeError, ValueError) as e:
        raise DataError(f"a record cannot be written: {e}: {str(record)[:200]}") from e


def write_spill(path: Path, records: Iterable[Record]) -> int:
    """Write records between two stages; the file appears when it is complete. Returns their number."""
    num = 0
    temporary = durable.beside(path)
    with durable.storing(path):
        with open(temporary, "wb") as f:
            for record in records:
                f.write(line_of(record))
                num += 1
            f.flush()
            os.fsync(f.fileno())
        durable.reach("written", path)
        os.replace(temporary, path)
        durable.reach("after", path)
    return num


class Writer:
    """Writes records into a file of one format. Equal records make equal files."""

    def __init__(self, path: Path, form: Format) -> None:
        self.path, self._form, self.num = path, form, 0
        self._file: Any = None
        self._raw: Any = None
        self._table: Any = None
        self._waiting: list[Record] = []

    def add(self, record: Record) -> None:
        """Write a record."""
        self.num += 1
        if self._form == "parquet":
            self._waiting.append(record)
            if len(self._waiting) == PARQUET_ROWS:
                self._write_rows()
            return
        if self._file is None:
            self._raw = open(self.path, "wb")  # noqa: SIM115  # until `close`
            packing = self._form == "jsonl.gz"  # bytes that depend on neither clock nor name
            self._file = gzip.GzipFile("", "wb", 6, self._raw, mtime=0) if packing else self._raw
        self._file.write(line_of(record))

    def close(self) -> None:
        """Write the buffered records, and close the file."""
        if self._form == "parquet":
            self._write_rows()
            if self._table is not None:
                self._table.close()
        elif self._file is not None:
            self._file.close()
            self._raw.close()
        else:
            self.path.touch()

    def _write_rows(self) -> None:
        if not self._waiting:
            return
        pyarrow, parquet = _pyarrow()
        try:
            schema = self._table.schema if self._table is not None else None
            rows = pyarrow.Table.from_pylist(self._waiting, schema=schema)
            unknown = {name for r in self._waiting for name in r} - set(rows.column_names)
            if unknown:
                raise DataError(f"column {sorted(unknown)[0]!r} is not in the first {PARQUET_ROWS} records")
        except (pyarrow.ArrowException, DataError) as e:
            raise DataError(f"{self.path}: {e}\n  fix:   Pipeline.output = 'jsonl', where columns may differ") from e
        if self._table is None:
            self._table = parquet.ParquetWriter(self.path, rows.schema)
        self._table.write_table(rows)
        self._waiting = []


def _pyarrow() -> tuple[Any, Any]:
    with needed("pyarrow", "Pipeline.output = 'parquet'", install="rolljax[data]"):
        import pyarrow
        import pyarrow.parquet
    return pyarrow, pyarrow.parquet
