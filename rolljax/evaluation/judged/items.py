"""Items of evaluations by judges: records of a file, and the tasks that they are."""

from __future__ import annotations

import csv
import dataclasses
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from rolljax.envs.base import EnvSpec, PureEnv, Runs, StepResult
from rolljax.envs.data.rows import BadRow, find_files, open_rows
from rolljax.errors import DataError
from rolljax.types import Message, Task


@dataclasses.dataclass(frozen=True, slots=True)
class Item:
    """One request to a model."""

    id: str
    """Unique among the items."""
    messages: tuple[Message, ...]
    row: Mapping[str, Any]
    """All columns of its record."""


class ItemRecord(dict[str, Any]):
    """A record of a file: value by column. where: its place, for messages."""

    def __init__(self, where: str, row: Mapping[str, Any]) -> None:
        super().__init__(row)
        self.where = where

    def text(self, key: str) -> str:
        """Return the text in a column. Raises `DataError`: there is none."""
        value = self.get(key)
        if not isinstance(value, (str, int)) or isinstance(value, bool) or not str(value).strip():
            raise DataError(f"{self.where}: has no text in {key!r}; its columns: {', '.join(map(str, self))}")
        return str(value)


def read_records(path: str, setting: str) -> list[ItemRecord]:
    """Return all records of a file.

    Raises:
      ConfigError: there is no such file. DataError: it is broken.
    """
    if path.endswith(".csv") and Path(path).is_file():
        with open(path, newline="", encoding="utf-8-sig") as f:
            return [ItemRecord(f"{path}, row {i}", row) for i, row in enumerate(csv.DictReader(f))]
    rows = open_rows(find_files(path, setting))
    found = []
    for i in range(len(rows)):
        try:
            found.append(ItemRecord(rows.location(i), rows.row(i)))
        except BadRow as e:
            raise DataError(f"{rows.location(i)}: {e}") from None
    return found


class ItemEnv(EnvSpec):
    """Items as tasks of one turn without a reward. A task holds an item's id and a hash, no text."""

    runs: ClassVar[Runs] = "inline"

    def __init__(self, domain: str, items: tuple[Item, ...]) -> None:
        self.domain, self.items = domain, items

    @property
    def name(self) -> str:
        return self.domain

    def task(self, index: int) -> Task:
        item = self.items[index % len(self.items)]
        said = "\0".join(f"{m.role}\0{m.content}" for m in item.messages)
        return Task(self.name, index % len(self.items), f"{item.id} {digest(said)}")

    def make(self) -> ItemEpisode:
        return ItemEpisode(self)


class ItemEpisode(PureEnv):
    """One item: any answer ends it."""

    def __init__(self, spec: ItemEnv) -> None:
        self._spec = spec

    def reset(self, task: Task) -> tuple[Message, ...]:
        return self._spec.items[task.index].messages

    def step(self, action: str) -> StepResult:
        return StepResult((), 0.0, terminated=True)

    def reference_answer(self) -> str:
        return ""


def digest(text: str) -> str:
    """Return a replacement for a hidden text: `sha256:` and 64 hexadecimal digits."""
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()
