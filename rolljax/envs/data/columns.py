"""Find the column for each role: the one that the user names, else the first of the role's usual names, most specific
first.

A name with dots reaches into objects (`reward_model.ground_truth`), also into those that are stored as JSON text.
"""

from __future__ import annotations

import collections
import dataclasses
import difflib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rolljax.envs.data.rows import BadRow, NotStrict, Row, Rows, read_json
from rolljax.envs.text import clean
from rolljax.errors import ConfigError, DataError

NUM_LOOKED_AT = 100
"""Number of rows, from the first, whose columns are counted."""
MAX_SHOWN = 30
MAX_NAMES = 1000
"""Maximum number of names that are read from one row."""
_DEPTH = 3


@dataclasses.dataclass(frozen=True)
class Role:
    """The role of a column (question, answer, ...)."""

    setting: str
    """The setting `Class.field` that names the column."""
    key: str
    """Column name set by the user; empty: look for the usual names."""
    usual: Sequence[Sequence[str]]
    """Names in tiers; a name of an earlier tier is preferred, two of the same tier are a choice for the user."""
    rivals: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Usual name -> one of a later tier that may hold the same; where both are there, the user chooses as well."""


@dataclasses.dataclass(frozen=True)
class Columns:
    """Columns of the first rows, in order; those inside of objects with dots."""

    every: Sequence[str]
    common: Sequence[str]
    """Columns that are not empty in at least half of these rows; only those are found by their names."""

    @classmethod
    def of(cls, rows: Rows) -> Columns:
        """Read the column names of the first rows. Raise `DataError` if none can be read."""
        counts: collections.Counter[str] = collections.Counter()
        complaints, num_read = [], 0
        for i in range(min(len(rows), NUM_LOOKED_AT)):
            try:
                counts.update(itertools.islice(_names(rows.row(i), "", _DEPTH), MAX_NAMES))
                num_read += 1
            except BadRow as e:
                complaints.append(f"{rows.location(i)}: {e}")
        if not num_read:
            raise DataError(complaints[0])
        return cls(tuple(counts), tuple(name for name, n in counts.items() if n >= num_read / 2))

    def __str__(self) -> str:
        return _listed(self.every) or "none"

    def has_usual(self, role: Role) -> bool:
        """Return whether a column is set for a role, or has one of its usual names."""
        names = {name.lower() for name in self.common}
        return bool(role.key) or any(name in names for tier in role.usual for name in tier)


def find(role: Role, columns: Columns, path: str) -> str | None:
    """Return the column of a role; None if no column has a usual name.

    Raises:
      ConfigError: the column in the settings does not exist, or several have usual names.
    """
    if role.key:
        if role.key not in columns.every:
            near = difflib.get_close_matches(role.key, columns.every, 1)
            raise ConfigError(
                f"is no column of {path}",
                setting=role.setting,
                value=role.key,
                remedy=(f"did you mean {near[0]!r}? " if near else "") + f"columns: {columns}",
            )
        return role.key
    lower = {name.lower(): name for name in reversed(columns.common)}
    for tier in role.usual:
        names = [name for name in tier if name in lower]
        names += [rival for name in names if (rival := role.rivals.get(name)) in lower and rival is not None]
        here = [lower[name] for name in names]
        if len(here) > 1:
            raise ConfigError(
                f"is not set, and {path} has more than one column it could be: {' and '.join(map(repr, here))}",
                setting=role.setting,
                remedy=f"{' or '.join(f'{role.setting} = {name!r}' for name in here)}; columns: {columns}",
            )
        if here:
            return here[0]
    return None


def need(role: Role, columns: Columns, path: str) -> str:
    """Return the column of a role as `find`, but raise `ConfigError` if there is none."""
    found = find(role, columns, path)
    if found is None:
        raise ConfigError(
            f"is not set, and {path} has none of the usual columns ({', '.join(n for t in role.usual for n in t)})",
            setting=role.setting,
            remedy=f"{role.setting} = 'COLUMN', one of its columns: {columns}",
        )
    return found


def value(row: Row, key: str) -> Any:
    """Return the value in a column. Raises `BadRow`: it is empty."""
    if key in row:
        return row[key]
    found: Any = row
    for part in key.split("."):
        try:
            found = _as_object(found, read_json)
        except NotStrict as e:
            raise BadRow(f"{key} is in an object that is written as JSON text, but {e}") from None
        if not isinstance(found, Mapping) or part not in found:
            raise BadRow(f"lacks {key!r}; it has {_listed([*row]) or 'nothing'}")
        found = found[part]
    return found


def _listed(names: Sequence[str]) -> str:
    more = f", and {len(names) - MAX_SHOWN} more" if len(names) > MAX_SHOWN else ""
    return clean(", ".join(names[:MAX_SHOWN]) + more)


def _names(row: Mapping[str, Any], before: str, depth: int) -> Iterator[str]:
    for key, inner in row.items():
        if inner is not None:
            yield f"{before}{key}"
        found = _as_object(inner, json.loads)
        if depth > 1 and isinstance(found, Mapping):
            yield from _names(found, f"{before}{key}.", depth - 1)


def _as_object(found: Any, read: Callable[[str], Any]) -> Any:
    """Parse a text that spells a JSON object; return any other value unchanged. read: parses JSON."""
    if isinstance(found, str) and found.lstrip()[:1] == "{":
        try:
            return read(found)
        except NotStrict:
            raise
        except (ValueError, RecursionError):
            return found
    return found
