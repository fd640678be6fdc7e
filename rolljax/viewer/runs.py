"""Run folders as the viewer reads them: nothing is written, and what grows is read from where it was left."""

from __future__ import annotations

import functools
import json
import statistics
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rolljax.errors import ConfigError
from rolljax.run import layout
from rolljax.viewer.filters import Filter
from rolljax.viewer.records import Json, Record, scan, summary

if TYPE_CHECKING:
    from rolljax.viewer.tokens import TokenTexts

KEPT_BYTES = 2**30
"""Of files whose records are kept in memory, those used last. Records take about a fifth of their file."""


class NotThere(LookupError):
    """A run, step or trajectory that is not there; the text says which."""


class Run:
    """One run folder. Safe to use from several threads.

    Args:
      name: what it is called in addresses; no other run is called so.
    """

    def __init__(self, name: str, path: Path) -> None:
        self.name, self.path = name, path
        self._rows = _Rows(path / layout.METRICS)
        self._files: OrderedDict[Path, tuple[tuple[int, int], list[Record]]] = OrderedDict()
        self._lock = threading.Lock()

    # ---- what the run says of itself

    @property
    def config(self) -> Json:
        """Every setting with its value, by its path."""
        return _read(self.path / layout.RESOLVED)

    def overview(self) -> Json:
        """Where the run stands, and what it has come to."""
        rows, ended = self.rows(0)[1], _read(self.path / layout.SUMMARY)
        last = rows[-1] if rows else {}
        is_over = bool(ended) and ended.get("steps", 0) >= last.get("step", 0)
        config = self.config
        return {
            "name": self.name,
            "path": str(self.path),
            "step": last.get("step", 0),
            "steps_planned": sum(v for k, v in config.items() if _is_phase_steps(k) and isinstance(v, int)),
            "phase": last.get("phase", ""),
            "stop_reason": ended.get("stop_reason") if is_over else None,
            "wall_s": ended.get("wall_s") if is_over else sum(r.get("time/step_s", 0) for r in rows),
            "heldout": ended.get("heldout_reward", []) if is_over else self._evaluated(),
            "updated": self._rows.modified,
            "environment": _read(self.path / layout.ENVIRONMENT),
            "rollout_steps": list(layout.rollout_files(self.path)),
            "evaluations": [name for name, _ in self._heldout_files()],
        }

    def _evaluated(self) -> list[Json]:
        """Held-out rewards as `summary.json` has them at the end, from the answers."""
        found = [(name, [r.outline["reward"] for r in records]) for name, records in self.heldout() if records]
        return [{"phase": name, "mean": statistics.fmean(rewards), "n": len(rewards)} for name, rewards in found]

    def rows(self, after: int, generation: str = "") -> tuple[str, list[Json]]:
        """Rows of metrics.jsonl behind the first `after`, and the generation of the file: a file that was written
        anew has another, and then all of its rows are returned."""
        return self._rows.read(after, generation)

    @property
    def stamp(self) -> list[float | int]:
        """Changes whenever there is something new."""
        found = [self.path / name for name in (layout.METRICS, layout.SUMMARY, layout.ROLLOUTS)]
        return [n for f in found for n in _stamp(f)]

    # ---- trajectories

    def records(self, step: int) -> list[Record]:
        """The trajectories of a step.

        Raises:
          NotThere: none of it are on record.
        """
        return self._of_file(layout.rollouts_file(self.path, step), f"step {step} of {self.name}")

    def heldout(self) -> list[tuple[str, list[Record]]]:
        """Name and trajectories of every held-out evaluation on record, in the order in which they were made."""
        return [(name, self._of_file(path, name)) for name, path in self._heldout_files()]

    def trajectory(self, step: int | str, line: int) -> tuple[Path, Record]:
        """File and record of one trajectory.

        Args:
          step: or the name of an evaluation.

        Raises:
          NotThere: there is no such trajectory.
        """
        if isinstance(step, int):
            path = layout.rollouts_file(self.path, step)
        elif not (path := dict(self._heldout_files()).get(step, Path())).name:
            raise NotThere(f"{self.name} has no held-out answers of {step!r}")
        records = self._of_file(path, f"step {step} of {self.name}")
        if not 0 <= line < len(records):
            raise NotThere(f"step {step} of {self.name} has {len(records)} trajectories, none at {line}")
        return path, records[line]

    def search(self, wanted: Filter, newest: int | None) -> Iterator[tuple[int, list[Json]]]:
        """Steps from `newest` (None: the last) down to the first, each with its trajectories that are wanted."""
        for step in reversed(layout.rollout_files(self.path)):
            if newest is None or step <= newest:
                try:
                    records = self.records(step)
                except NotThere:  # it was taken away meanwhile
                    continue
                yield step, [summary(i, r) for i, r in enumerate(records) if wanted.holds(i, r)]

    @functools.cached_property
    def tokens(self) -> TokenTexts:
        """The texts of its tokens."""
        from rolljax.viewer.tokens import token_texts

        model = self.config.get("model")
        return token_texts(self.path, model if isinstance(model, str) else None)

    def _heldout_files(self) -> list[tuple[str, Path]]:
        """Those of phases in their order, behind that of the start."""
        config = self.config
        phases = [str(config[key]) for key in config if key.startswith("phases[") and key.endswith("].name")]
        files = [(name, layout.heldout_file(self.path, name)) for name in ("start", *phases)]
        return [(name, path) for name, path in files if path.is_file()]

    def _of_file(self, path: Path, what: str) -> list[Record]:
        stamp = _stamp(path)
        with self._lock:
            kept = self._files.get(path)
            if kept and kept[0] == stamp:
                self._files.move_to_end(path)
                return kept[1]
        try:
            found = scan(path.read_bytes())
        except OSError as e:
            raise NotThere(f"no trajectories of {what} are on record") from e
        with self._lock:
            self._files[path] = stamp, found
            while len(self._files) > 1 and sum(size for (_, size), _ in self._files.values()) > KEPT_BYTES:
                self._files.popitem(last=False)
        return found


class _Rows:
    """A file of JSON lines that grows at its end, and now and then is written anew."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        self._rows: list[Json] = []
        self._at, self._file = 0, 0
        self._written_anew = 0
        self.modified = 0.0

    def read(self, after: int, generation: str) -> tuple[str, list[Json]]:
        with self._lock:
            self._catch_up()
            now = f"{self._file}-{self._written_anew}"
            return now, self._rows[after if generation == now else 0 :]

    def _catch_up(self) -> None:
        try:
            status = self._path.stat()
        except OSError:
            return
        if status.st_ino != self._file or status.st_size < self._at:
            self._rows, self._at, self._file = [], 0, status.st_ino
            self._written_anew += 1
        self.modified = status.st_mtime
        with open(self._path, "rb") as f:
            f.seek(self._at)
            whole, _, _ = f.read().rpartition(b"\n")
        self._at += len(whole) + bool(whole)
        self._rows += [row for line in whole.splitlines() if (row := _row(line))]


class Runs:
    """The runs that were named, and those in folders that were named; new ones are found as they appear.

    Raises:
      ConfigError: a path is neither, or there is no run in it.
    """

    def __init__(self, paths: Sequence[str | Path]) -> None:
        self._paths = [Path(p).absolute() for p in paths]
        self._runs: dict[Path, Run] = {}
        self._lock = threading.Lock()
        for path in self._paths:
            if not _run_folders(path):
                raise ConfigError(
                    f"is not a run folder: it has no {layout.RESOLVED}, and neither has a folder in it",
                    setting="RUN",
                    value=str(path),
                    remedy="name a folder that rolljax.train wrote, or one with such folders in it, such as runs/",
                )

    def all(self) -> list[Run]:
        """Every run that is there now."""
        with self._lock:
            for path in (folder for p in self._paths for folder in _run_folders(p)):
                if path not in self._runs:
                    self._runs[path] = Run(self._name(path), path)
            return [run for run in self._runs.values() if (run.path / layout.RESOLVED).is_file()]

    def find(self, name: str) -> Run:
        """A run by its name.

        Raises:
          NotThere: none is called so.
        """
        for run in self.all():
            if run.name == name:
                return run
        raise NotThere(f"no run is called {name!r}")

    def _name(self, path: Path) -> str:
        taken, name, number = {run.name for run in self._runs.values()}, path.name, 1
        while name in taken:
            number += 1
            name = f"{path.name}-{number}"
        return name


def _run_folders(path: Path) -> list[Path]:
    if (path / layout.RESOLVED).is_file():
        return [path]
    return sorted(file.parent for file in path.glob(f"*/{layout.RESOLVED}"))


def _is_phase_steps(key: str) -> bool:
    return key.startswith("phases[") and key.endswith("].steps")


def _read(path: Path) -> Json:
    """A JSON object; empty if there is none, or only a part of it."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _row(line: bytes) -> Json | None:
    try:
        row: Any = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def _stamp(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError:
        return 0, 0
    return status.st_mtime_ns, status.st_size
