"""Aim: a repository of runs, in a folder or at a server."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from rolljax.trackers.base import EVERY_ROW, Outcome, Row, RunInfo, TrackerConfig, flat, numbers, png_file


@dataclasses.dataclass(frozen=True)
class Aim(TrackerConfig):
    """A run in an Aim repository."""

    repo: str | None = None
    """A folder, or `aim://HOST:PORT`. None: Aim's own default, `.aim` in the working directory."""
    experiment: str = "rolljax"
    """Name of the experiment."""
    system_metrics: bool = False
    """Whether Aim also records CPU, memory and accelerators."""

    package: ClassVar[str] = "aim"
    extra: ClassVar[str] = "aim"

    def open(self, run: RunInfo) -> AimRun:
        """Resume the run whose hash is remembered, or start one."""
        return AimRun(self, run)


class AimRun:
    """See `base.Tracker`. A step that is tracked again replaces the earlier one."""

    def __init__(self, cfg: Aim, run: RunInfo) -> None:
        import aim

        remembered = run.folder / "hash"
        known = remembered.read_text() if remembered.is_file() else None
        interval = 10.0 if cfg.system_metrics else None
        self._run = aim.Run(
            known,
            repo=cfg.repo,
            experiment=cfg.experiment,
            force_resume=True,
            system_tracking_interval=interval,
            capture_terminal_logs=False,
        )
        remembered.write_text(self._run.hash)
        self._run.name = run.name
        self._run["settings"] = flat(run.settings)
        self._held = min(self._newest() if known else 0, run.done)

    def _newest(self) -> int:
        from aim.storage.context import Context

        found = self._run.get_metric(EVERY_ROW, Context({}))
        return int(found.last_step()) if found else 0

    def last_step(self) -> int:
        return self._held

    def log(self, step: int, row: Row) -> None:
        self._run.track(numbers(row), step=step)
        if self._run.get("phase") != row.get("phase"):
            self._run["phase"] = row.get("phase")

    def text(self, step: int, name: str, text: str) -> None:
        import aim

        self._run.track(aim.Text(text), name=name, step=step)

    def figure(self, step: int, name: str, png: bytes) -> None:
        import aim

        with png_file(png) as path:
            self._run.track(aim.Image(path), name=name, step=step)

    def close(self, outcome: Outcome) -> None:
        self._run["outcome"] = outcome
        self._run.close()
