"""trackio: a local database with a dashboard (`trackio show`), or a Hugging Face Space."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from rolljax.trackers.base import EVERY_ROW, Outcome, Row, RunInfo, TrackerConfig, flat, png_file


@dataclasses.dataclass(frozen=True)
class Trackio(TrackerConfig):
    """A run in a trackio project.

    It cannot take a step back: steps that are made again after a kill keep the values of their first time. Settings
    whose names begin with `_`, which trackio keeps for itself, lose it there: `__class__` is `class__`.
    """

    project: str = "rolljax"
    """Name of the project."""
    dir: str | None = None
    """Folder of trackio's databases; None: the value of `TRACKIO_DIR`, else trackio's own default."""
    space_id: str | None = None
    """A Hugging Face Space that gets the rows instead."""
    system_metrics: bool = False
    """Whether trackio also records CPU and accelerators."""

    package: ClassVar[str] = "trackio"
    extra: ClassVar[str] = "trackio"

    def open(self, run: RunInfo) -> TrackioRun:
        """Resume the run of this name, which holds the id, or start it."""
        return TrackioRun(self, run)


class TrackioRun:
    """See `base.Tracker`."""

    def __init__(self, cfg: Trackio, run: RunInfo) -> None:
        if cfg.dir:
            os.environ["TRACKIO_DIR"] = str(Path(cfg.dir).expanduser().absolute())  # it is read when it is imported
        import trackio
        from trackio.sqlite_storage import SQLiteStorage

        name = f"{run.name}-{run.id[:4]}"
        known = [] if cfg.space_id else SQLiteStorage.get_logs(cfg.project, name)
        self._last = max((row["step"] for row in known if EVERY_ROW in row), default=0)
        on = None if cfg.system_metrics else False
        self._trackio: Any = trackio
        self._run = trackio.init(
            cfg.project,
            name=name,
            space_id=cfg.space_id,
            config=config_of(run.settings),
            resume="allow",
            embed=False,
            auto_log_gpu=on,
            auto_log_cpu=on,
        )

    def last_step(self) -> int:
        return self._last

    def log(self, step: int, row: Row) -> None:
        self._run.log({name: value for name, value in row.items() if name != "step"}, step=step)

    def text(self, step: int, name: str, text: str) -> None:
        self._run.log({name: self._trackio.Markdown("\n".join(f"    {line}" for line in text.split("\n")))}, step=step)

    def figure(self, step: int, name: str, png: bytes) -> None:
        with png_file(png) as path:
            self._run.log({name: self._trackio.Image(path)}, step=step)

    def close(self, outcome: Outcome) -> None:
        self._run.finish()


def config_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings under names that trackio accepts: it refuses a run with one that begins with `_`."""
    return {name.lstrip("_"): value for name, value in flat(settings).items()}
