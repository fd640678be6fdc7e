"""Rows as records: every row is checked once, when a file is first used. Bad rows are an error or left out with a
warning, as the user chose."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, Literal, Protocol, TypeVar

from rolljax.envs.data.rows import BadRow, Row, Rows, find_files, open_rows, signature
from rolljax.envs.text import clean
from rolljax.errors import ConfigError, DataError

T = TypeVar("T")
BadRows = Literal["error", "skip"]
NUM_NAMED = 5
"""Maximum number of bad rows that an error names."""

Reader = Callable[[Row], T]
"""Converts a row to a record, or raises `BadRow`."""
Taken = Mapping[str, str | None]
"""Part of a record -> the column that it is taken from; None: there is none."""


class Table(Generic[T]):
    """The records of files, addressed by number.

    num_bad: number of rows that are left out. complaint: a sentence that names such rows and their faults; empty if
    there are none. columns_taken: a sentence that names the column of each part of a record.
    """

    def __init__(self, rows: Rows, read: Reader[T], taken: Taken, bad_rows: BadRows, setting: str) -> None:
        self._rows, self._read = rows, read
        self.columns_taken = ", ".join(f"{part} from `{clean(column)}`" for part, column in taken.items() if column)
        self._good = array("q")
        named: list[str] = []
        for i in range(len(rows)):
            try:
                read(rows.row(i))
                self._good.append(i)
            except BadRow as e:
                if len(named) < NUM_NAMED:
                    named.append(f"{rows.location(i)}: {e}")
        self.num_bad = len(rows) - len(self._good)
        self.complaint = self._sentence(named, bad_rows, setting)
        if self.num_bad and (bad_rows == "error" or not len(self._good)):
            raise DataError(self.complaint)

    def __len__(self) -> int:
        return len(self._good)

    def record(self, index: int) -> T:
        """Return record `index` modulo the number of records."""
        return self._read_row(index, self._read)

    def row(self, index: int) -> Row:
        """Return all columns of record `index`."""
        return self._read_row(index, lambda row: row)

    def location(self, index: int) -> str:
        """Return file and line of record `index`."""
        return self._rows.location(self._good[index % len(self._good)])

    def _read_row(self, index: int, read: Callable[[Row], Any]) -> Any:
        i = self._good[index % len(self._good)]
        try:
            return read(self._rows.row(i))
        except BadRow as e:
            raise DataError(f"{self._rows.location(i)}: {e}; was the file changed?") from None

    def _sentence(self, named: Sequence[str], bad_rows: BadRows, setting: str) -> str:
        if not named:
            return ""
        if self.num_bad == 1 and bad_rows == "error":
            return f"{named[0]}\n  fix:   mend the row, or leave out bad ones: {setting} = 'skip'"
        more = f"\n  and {self.num_bad - len(named)} more" if self.num_bad > len(named) else ""
        what = "are left out" if bad_rows == "skip" and len(self._good) else "cannot be used"
        fix = f"\n  fix:   mend them, or leave them out: {setting} = 'skip'" if bad_rows == "error" else ""
        lines = "".join(f"\n  {line}" for line in named)
        return f"{self.num_bad} of {len(self._rows)} rows {what}:{lines}{more}{fix}"


_tables: dict[Hashable, tuple[Any, Table[Any]]] = {}
_lock = threading.Lock()


class RowSource(Hashable, Protocol):
    """The settings of an environment that name the source of its rows: files, or rows in memory."""

    @property
    def path(self) -> str: ...
    @property
    def records(self) -> Any: ...
    @property
    def bad_rows(self) -> BadRows: ...


def source_name(source: RowSource) -> str:
    """Return the name of the rows in messages."""
    return source.path or str(source.records)


def check_source(source: RowSource, owner: str) -> None:
    """Check these settings without reading the rows. owner: their class. Raise `ConfigError`."""
    if source.records is None:
        if not source.path:
            raise ConfigError("says where the rows are, and is empty", setting=f"{owner}.path", remedy="name a file")
        find_files(source.path, f"{owner}.path")
    elif source.path or not len(source.records):
        raise ConfigError(
            "are the rows instead of a path" if source.path else "holds no row",
            setting=f"{owner}.records",
            value=source.records,
            remedy="leave out one of the two" if source.path else "give at least one",
        )
    if source.bad_rows not in ("error", "skip"):
        raise ConfigError(
            "is neither error nor skip", setting=f"{owner}.bad_rows", value=source.bad_rows, remedy="'error' or 'skip'"
        )


def table(source: RowSource, owner: str, reader: Callable[[Rows, str], tuple[Reader[T], Taken]]) -> Table[T]:
    """Return the table of an environment's rows; read it again if one of their files has changed.

    source: the environment's settings. owner: their class. reader: makes the reader of rows once their columns are
    known, and returns which columns it uses.

    Raises:
      DataError: a row is no record. ConfigError: a column is not found.
    """
    files: list[Path] = [] if source.records is not None else find_files(source.path, f"{owner}.path")
    state = (files, signature(files))
    with _lock:
        known, made = _tables.get(source, (None, None))
        if made is None or known != state:
            rows = open_rows(files) if source.records is None else source.records
            made = Table(rows, *reader(rows, source_name(source)), source.bad_rows, f"{owner}.bad_rows")
            _tables[source] = state, made
        return made
