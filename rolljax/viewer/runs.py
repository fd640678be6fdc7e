"""Run folders as the viewer reads them: nothing is written, and growing files are read from the last position on."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import statistics
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rolljax import reading
from rolljax.errors import CheckpointError, ConfigError
from rolljax.fields import Json, as_number, as_text, as_whole, is_there
from rolljax.storage import journal, layout, starts
from rolljax.viewer.filters import Filter
from rolljax.viewer.records import Record, TrajectoryFile, scan, summary

if TYPE_CHECKING:
    from rolljax.viewer.tokens import TokenTexts

KEPT_BYTES = 2**30
"""Bytes of files whose records are kept in memory; the least recently used are dropped. Records take about a fifth of
their file."""


class NotThere(LookupError):
    """A run, step or trajectory does not exist; the text names it."""


class ViewedRun:
    """One run folder. Safe to use from several threads.

    Args:
      name: the run's unique name in URLs.
    """

    def __init__(self, name: str, path: Path) -> None:
        self.name, self.path = name, path
        self._rows = _Rows(path / layout.METRICS)
        self._files: OrderedDict[Path, tuple[tuple[int, int], TrajectoryFile]] = OrderedDict()
        self._lock = threading.Lock()

    # ---- what the run says of itself

    @property
    def config(self) -> Json:
        """Return every setting with its value, by its path; empty if the file is damaged."""
        return self._object(layout.RESOLVED, [])

    def overview(self) -> Json:
        """Return the state and results of the run. Damaged files are left out and named."""
        damaged: list[str] = []
        config, ended, made_by = (
            self._object(name, damaged) for name in (layout.RESOLVED, layout.SUMMARY, layout.ENVIRONMENT)
        )
        rows = self.rows(0)[1]
        if self._rows.damaged:
            damaged.append(f"{layout.METRICS}: {self._rows.damaged} lines")
        try:
            restarts = starts.restarts(self.path)
        except CheckpointError as e:
            restarts = []
            damaged.append(str(e))
        last: Json = rows[-1] if rows else {"step": 0, "phase": ""}
        is_over = bool(ended) and (as_whole(ended.get("steps")) or 0) >= last["step"]
        return {
            "name": self.name,
            "path": shown_path(self.path),
            "recipe": _recipe_of(config),
            "step": last["step"],
            "steps_planned": sum(as_whole(v) or 0 for k, v in config.items() if _is_phase_steps(k)),
            "phase": last["phase"],
            "stop_reason": as_text(ended.get("stop_reason")) or None if is_over else None,
            "wall_s": as_number(ended.get("wall_s")) if is_over else sum(r.get("time/step_s", 0) for r in rows),
            "heldout": _evaluations(ended.get("heldout_reward")) if is_over else self._evaluated(),
            "restarts": [start.after for start in restarts],
            "updated": self._rows.modified,
            "environment": _environment(made_by),
            "rollout_steps": self.steps(),
            "evaluations": [name for name, _ in self._heldout_files()],
            "damaged": damaged,
        }

    def _object(self, name: str, damaged: list[str]) -> Json:
        """Return the JSON object of a file; errors of the file are added to `damaged`."""
        try:
            return reading.load_object(self.path / name)
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as e:
            damaged.append(f"{name} cannot be read: {reading.reason(e)}")
        except MemoryError:
            damaged.append(f"{name} cannot be read: it is larger than memory")
        return {}

    def _evaluated(self) -> list[Json]:
        """Compute held-out rewards from the answers, as `summary.json` has them after the run."""
        found = []
        for name, records in self.heldout():
            rewards = [r.outline["reward"] for r in records.found.values()]
            if rewards := [r for r in rewards if math.isfinite(r)]:
                found.append({"phase": name, "mean": statistics.fmean(rewards), "n": len(rewards)})
        return found

    def rows(self, after: int, generation: str = "") -> tuple[str, list[Json]]:
        """Return the rows of metrics.jsonl after the first `after`, and the generation of the file. A rewritten file
        has a new generation, and then all of its rows are returned."""
        return self._rows.read(after, generation)

    @property
    def stamp(self) -> list[float | int]:
        """Return a value that changes whenever there is something new."""
        found = [self.path / name for name in (layout.METRICS, layout.SUMMARY, layout.ROLLOUTS)]
        return [n for f in found for n in _stamp(f)]

    # ---- trajectories

    def steps(self) -> list[int]:
        """Return the steps whose trajectories are on record, in order."""
        try:
            return list(layout.rollout_files(self.path))
        except OSError:  # a folder that may not be read
            return []

    def records(self, step: int) -> TrajectoryFile:
        """Return the trajectories of a step.

        Raises:
          NotThere: the run has no record of the step.
        """
        return self._of_file(layout.rollouts_file(self.path, step), f"step {step} of {self.name}")

    def heldout(self) -> list[tuple[str, TrajectoryFile]]:
        """Name and trajectories of every held-out evaluation on record, in the order in which they were made."""
        found = []
        for name, path in self._heldout_files():
            try:
                found.append((name, self._of_file(path, name)))
            except NotThere:  # it was taken away meanwhile, or cannot be read
                continue
        return found

    def trajectory(self, step: int | str, line: int) -> tuple[Path, Record]:
        """Return file and record of one trajectory.

        Args:
          step: or the name of an evaluation.

        Raises:
          NotThere: there is no such trajectory, or its line is damaged.
        """
        if isinstance(step, int):
            path = layout.rollouts_file(self.path, step)
        elif not (path := dict(self._heldout_files()).get(step, Path())).name:
            raise NotThere(f"{self.name} has no held-out answers of {step!r}")
        what = f"step {step} of {self.name}"
        records = self._of_file(path, what)
        if line in records.damaged:
            raise NotThere(f"line {line} of {what} is damaged: {records.damaged[line]}")
        if line not in records.found:
            raise NotThere(f"{what} has {len(records.found)} trajectories, none at {line}")
        return path, records.found[line]

    def search(self, wanted: Filter, newest: int | None) -> Iterator[tuple[int, list[Json]]]:
        """Yield steps from `newest` (None: the last) down to the first, each with its matching trajectories."""
        for step in reversed(self.steps()):
            if newest is None or step <= newest:
                try:
                    records = self.records(step)
                except NotThere:  # it was taken away meanwhile, or cannot be read
                    continue
                yield step, [summary(r) for r in records.found.values() if wanted.holds(r)]

    @functools.cached_property
    def tokens(self) -> TokenTexts:
        """The texts of its tokens."""
        from rolljax.viewer.tokens import token_texts

        model = self.config.get("model")
        return token_texts(self.path, model if isinstance(model, str) else None)

    def _heldout_files(self) -> list[tuple[str, Path]]:
        """Return the held-out files: the start's, then those of phases in their order, then all others."""
        config = self.config
        phases = [config[key] for key in config if key.startswith("phases[") and key.endswith("].name")]
        order = {name: i for i, name in enumerate(["start", *map(str, phases)])}
        folder, ends = self.path / layout.ROLLOUTS, layout.heldout_file(self.path, "\0").name.split("\0")
        files = {f.name.removeprefix(ends[0]).removesuffix(ends[1]): f for f in folder.glob("*".join(ends))}
        found = sorted(files, key=lambda name: (order.get(name, len(order)), name))
        return [(encodable(name), files[name]) for name in found if is_there(files[name])]

    def _of_file(self, path: Path, what: str) -> TrajectoryFile:
        stamp = _stamp(path)
        with self._lock:
            kept = self._files.get(path)
            if kept and kept[0] == stamp:
                self._files.move_to_end(path)
                return kept[1]
        try:
            found = scan(reading.read_bytes(path))
        except (OSError, MemoryError) as e:
            raise NotThere(f"no trajectories of {what} are on record") from e
        with self._lock:
            self._files[path] = stamp, found
            while len(self._files) > 1 and sum(size for (_, size), _ in self._files.values()) > KEPT_BYTES:
                self._files.popitem(last=False)
        return found


class _Rows:
    """A file of JSON lines that grows at its end and is occasionally rewritten. damaged: number of lines that are not
    rows."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        self._rows: list[Json] = []
        self._at, self._file = 0, 0
        self._written_anew = 0
        self.damaged = 0
        self.modified = 0.0

    def read(self, after: int, generation: str) -> tuple[str, list[Json]]:
        with self._lock:
            self._catch_up()
            now = f"{self._file}-{self._written_anew}"
            return now, self._rows[after if generation == now else 0 :]

    def _catch_up(self) -> None:
        try:
            with reading.open_file(self._path) as f:
                status = os.fstat(f.fileno())
                if status.st_ino != self._file or status.st_size < self._at:
                    self._rows, self._at, self._file, self.damaged = [], 0, status.st_ino, 0
                    self._written_anew += 1
                self.modified = status.st_mtime
                f.seek(self._at)
                found = journal.parse(f.read(), _row)
        except (OSError, MemoryError):
            return
        self._at += found.end
        self._rows += found.values
        self.damaged += found.damaged


class Runs:
    """The given runs, and the runs in the given folders, including runs that appear later.

    Raises:
      ConfigError: a path is not a run folder and contains no run.
    """

    def __init__(self, paths: Sequence[str | Path]) -> None:
        self._paths = [Path(os.path.abspath(p)) for p in paths]
        self._runs: dict[Path, ViewedRun] = {}
        self._lock = threading.Lock()
        for path in self._paths:
            if not _run_folders(path):
                raise ConfigError(
                    f"is not a run folder: it has no {layout.RESOLVED}, and neither has a folder in it",
                    setting="RUN",
                    value=str(path),
                    remedy="name a folder that rolljax.train wrote, or one with such folders in it, such as runs/",
                )

    def all(self) -> list[ViewedRun]:
        """Return every run that exists now."""
        with self._lock:
            for path in (folder for p in self._paths for folder in _run_folders(p)):
                if path not in self._runs:
                    self._runs[path] = ViewedRun(self._name(path), path)
            return [run for run in self._runs.values() if is_there(run.path / layout.RESOLVED)]

    def find(self, name: str) -> ViewedRun:
        """Return a run by its name.

        Raises:
          NotThere: no run has this name.
        """
        for run in self.all():
            if run.name == name:
                return run
        raise NotThere(f"no run is called {name!r}")

    def _name(self, path: Path) -> str:
        own = encodable(path.name) or "run"
        taken, name, number = {run.name for run in self._runs.values()}, own, 1
        while name in taken:
            number += 1
            name = f"{own}-{number}"
        return name


def encodable(name: str) -> str:
    """Return the name of a file as a text that addresses can hold: bytes that are not UTF-8 are written out."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def shown_path(path: Path) -> str:
    """Return a path as a text."""
    return encodable(str(path))


def _run_folders(path: Path) -> list[Path]:
    if is_there(path / layout.RESOLVED):
        return [path]
    return sorted(file.parent for file in path.glob(f"*/{layout.RESOLVED}"))


def _is_phase_steps(key: str) -> bool:
    return key.startswith("phases[") and key.endswith("].steps")


def _recipe_of(config: Json) -> str:
    """Return a key that is equal for runs whose settings differ only in their seed; empty without settings."""
    others = {name: value for name, value in config.items() if name != "seed"}
    return hashlib.sha256(json.dumps(others, sort_keys=True).encode()).hexdigest()[:16] if others else ""


def _evaluations(found: object) -> list[Json]:
    """Return the held-out rewards of a summary that have a phase and a mean."""
    every = [e for e in found if isinstance(e, dict)] if isinstance(found, list) else []
    return [
        {
            "phase": as_text(e.get("phase")),
            "step": as_whole(e.get("step")),
            "mean": mean,
            "n": as_whole(e.get("n")) or 0,
        }
        for e in every
        if (mean := as_number(e.get("mean"))) is not None
    ]


def _environment(found: Json) -> Json:
    """Return the recorded environment of a run; empty unless it is complete."""
    command, packages, devices = found.get("command"), found.get("packages"), as_whole(found.get("devices"))
    if not isinstance(command, list) or not isinstance(packages, dict) or devices is None:
        return {}
    return {
        "command": list(map(str, command)),
        "packages": {name: str(version) for name, version in packages.items()},
        "devices": devices,
        "platform": as_text(found.get("platform")),
        "python": as_text(found.get("python")),
    }


def _row(row: Json) -> Json:
    """Return a step's row: its number, its phase and its metrics. Raises ValueError if it has no number."""
    if (step := as_whole(row["step"])) is None:
        raise ValueError("the step is no number")
    numbers = {name: x for name, value in row.items() if (x := as_number(value)) is not None}
    return {**numbers, "step": step, "phase": as_text(row.get("phase"))}


def _stamp(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError:
        return 0, 0
    return status.st_mtime_ns, status.st_size
