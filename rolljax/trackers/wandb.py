"""Weights & Biases, online or offline (`WANDB_API_KEY`, `WANDB_MODE` and its other variables are its own)."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import ClassVar, Literal

from rolljax.trackers.base import Outcome, Row, RunInfo, TrackerConfig, flat, png_file


@dataclasses.dataclass(frozen=True)
class WandB(TrackerConfig):
    """A run at Weights & Biases, or in files for `wandb sync`.

    It cannot take a step back: steps that are made again after a kill keep the values of their first time.
    """

    project: str = "rolljax"
    """Name of the project at Weights & Biases."""
    entity: str | None = None
    """Entity at Weights & Biases."""
    group: str | None = None
    """Group of the run at Weights & Biases."""
    tags: tuple[str, ...] = ()
    """Tags of the run at Weights & Biases."""
    mode: Literal["online", "offline"] | None = None
    """Online, offline (files in the run folder, for `wandb sync --append`), or None: `WANDB_MODE` if set, else
    online."""
    system_metrics: bool = True
    """Whether Weights & Biases also records CPU, memory and accelerators."""

    package: ClassVar[str] = "wandb"
    extra: ClassVar[str] = "wandb"

    def open(self, run: RunInfo) -> WandBRun:
        """Resume the run of this id, or start it."""
        return WandBRun(self, run)


class WandBRun:
    """See `base.Tracker`."""

    def __init__(self, cfg: WandB, run: RunInfo) -> None:
        import wandb

        settings = wandb.Settings(
            console="off", disable_git=True, save_code=False, x_disable_stats=not cfg.system_metrics, silent=True
        )
        self._run = wandb.init(
            project=cfg.project,
            entity=cfg.entity,
            group=cfg.group,
            tags=list(cfg.tags),
            mode=cfg.mode,
            id=run.id,
            name=run.name,
            dir=str(run.folder),
            config=flat(run.settings),
            resume="allow",
            allow_val_change=True,
            settings=settings,
        )
        self._offline = bool(self._run.offline)
        self._sent = Path(run.folder) / "sent"
        """Return the newest step of an offline run, whose files wandb does not read back."""

    def last_step(self) -> int:
        if self._offline:
            return int(self._sent.read_text()) if self._sent.is_file() else 0
        return max(self._run.starting_step - 1, 0)

    def log(self, step: int, row: Row) -> None:
        self._run.log(dict(row), step=step)
        if self._offline:
            self._sent.write_text(str(step))

    def text(self, step: int, name: str, text: str) -> None:
        import wandb

        self._run.log({name: wandb.Table(["text"], [[text]])}, step=step)

    def figure(self, step: int, name: str, png: bytes) -> None:
        import wandb

        with png_file(png) as path:
            self._run.log({name: wandb.Image(path)}, step=step)

    def close(self, outcome: Outcome) -> None:
        self._run.finish(exit_code={"done": 0, "stopped": 75, "failed": 1}[outcome])
