"""The files of an evaluation, from which an interrupted one resumes.

evaluation.json   model, environments, attempts; at the end the results, by environment and by task
answers.jsonl     every answer as it came, a trajectory for each line (`Trajectory.to_json`), as a run's rollouts are
table.md          the results for people
verdicts.jsonl    of an evaluation by judges: their verdicts on every answer

`key.prompt_index` of an answer is its task, `key.sibling` the attempt. Of several lines with one key the last counts:
answers that failed are requested again when the evaluation resumes.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rolljax import reading
from rolljax.errors import CheckpointError, ConfigError
from rolljax.storage import durable
from rolljax.storage.journal import JsonLines, read_lines
from rolljax.storage.layout import VERDICTS
from rolljax.storage.lock import locked
from rolljax.types import Key, Trajectory

EVALUATION, ANSWERS, TABLE = "evaluation.json", "answers.jsonl", "table.md"
JUDGEMENTS = "verdicts.jsonl"
SCHEMA = 1


class AnswerLog:
    """The answers of one evaluation, on disk if a folder is given.

    Args:
      setup: the settings that must be the same to resume, as JSON; `attempts.num` may grow.
      fresh: delete an earlier evaluation of that folder first.

    Raises:
      ConfigError: the folder holds something else, or an evaluation of another setup. CheckpointError: it is damaged.
    """

    def __init__(self, folder: str | Path | None, setup: Mapping[str, Any], *, fresh: bool = False) -> None:
        self.folder = None if folder is None else Path(folder)
        self.setup = json.loads(json.dumps(setup))
        self.answers: dict[Key, Trajectory] = {}
        self._files = contextlib.ExitStack()
        self._file: JsonLines | None = None
        if self.folder is not None:
            with contextlib.ExitStack() as files:
                self._open(self.folder, fresh, files)
                self._files = files.pop_all()

    def _open(self, folder: Path, fresh: bool, files: contextlib.ExitStack) -> None:
        files.enter_context(locked(folder, EVALUATION, "the folder of an evaluation", "--to"))
        durable.sweep(folder)
        if fresh:
            for name in (TABLE, JUDGEMENTS, ANSWERS, EVALUATION, VERDICTS):
                durable.remove(folder / name)
        if (folder / EVALUATION).is_file():
            _check_same(folder, read(folder)["setup"], self.setup)
        durable.write(folder / EVALUATION, json.dumps({"schema": SCHEMA, "setup": self.setup}, indent=1) + "\n")
        for trajectory in read_answers(folder):
            self.answers[trajectory.key] = trajectory
        self._file = files.enter_context(JsonLines(folder / ANSWERS))

    def has(self, key: Key) -> bool:
        """Return whether this answer exists and did not fail."""
        return key in self.answers and not self.answers[key].lost

    def add(self, trajectory: Trajectory) -> None:
        """Record an answer. With a folder it is also written to a file, and survives the end of this process.

        Raises:
          StorageError: the disk does not take it.
        """
        self.answers[trajectory.key] = trajectory
        if self._file is not None:
            self._file.add(trajectory.to_json())

    def finish(self, results: Mapping[str, Any], table: str) -> None:
        """Write the results next to the answers."""
        if self.folder is not None:
            durable.write(self.folder / TABLE, table)
            record = {"schema": SCHEMA, "setup": self.setup, "results": results}
            durable.write(self.folder / EVALUATION, json.dumps(record, indent=1) + "\n")

    def close(self) -> None:
        """Close the file, and allow other processes to write here."""
        self._files.close()


def read(folder: str | Path) -> dict[str, Any]:
    """Return evaluation.json of a folder: `setup`, and `results` if the evaluation is complete.

    Raises:
      CheckpointError: it is missing or damaged.
    """
    path = Path(folder) / EVALUATION
    try:
        record = reading.parse(reading.read_bytes(path))
        if record["schema"] != SCHEMA or not isinstance(record["setup"], dict):
            raise ValueError(f"schema {record['schema']}")
        return record
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is not the folder of an evaluation: it has no {EVALUATION}") from None
    except (OSError, ValueError, LookupError, TypeError) as e:
        raise CheckpointError(f"{path} cannot be read: {type(e).__name__}: {e}") from e


def read_answers(folder: str | Path) -> list[Trajectory]:
    """Read the whole answers of an evaluation, in the order in which they came."""
    return read_lines(Path(folder) / ANSWERS, Trajectory.from_json)


def _check_same(folder: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    old, new = _flat(before), _flat(now)
    for name in sorted(old.keys() | new.keys()):
        was, wanted = old.get(name), new.get(name)
        more = name == "attempts.num" and isinstance(was, int) and isinstance(wanted, int) and wanted > was
        if was == wanted or more:
            continue
        raise ConfigError(
            f"is {wanted!r} now, but the evaluation in {folder} was started with {was!r}",
            setting=name,
            remedy="go back to the old value, name another --to, or start over with --fresh",
        )


def _flat(value: Any, path: str = "") -> dict[str, Any]:
    """Return the leaves of nested objects and lists by their paths."""
    if isinstance(value, Mapping):
        parts = [(f"{path}.{name}".lstrip("."), inner) for name, inner in value.items()]
    elif isinstance(value, list):
        parts = [(f"{path}[{i}]", inner) for i, inner in enumerate(value)]
    else:
        return {path: value}
    found: dict[str, Any] = {}
    for name, inner in parts:
        found |= _flat(inner, name)
    return found
