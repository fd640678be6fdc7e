"""The run folder: every file a run leaves behind, and nothing outside it.

config.gin            the settings that were read, complete and runnable
config.resolved.json  every setting with its value, defaults included
env.json              versions, devices, command
metrics.jsonl         one object per step (`metrics.NAMES`)
rollouts/step_N.jsonl every trajectory of step N: tokens, log-probs, rewards, status
ckpt/                 checkpoints (Orbax)
hf/                   the result as a Hugging Face folder
curves.png            reward and health over steps
summary.json          held-out reward at each phase border, steps, wall seconds, stop reason
crash/                what led to a stop that nobody asked for
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from rolljax.checkpoint import Checkpoints, Progress
from rolljax.errors import CheckpointError, ConfigError
from rolljax.recipe import RESUMABLE
from rolljax.types import Trajectory

PACKAGES = (
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "grain",
    "gin-config",
    "transformers",
    "reasoning-gym",
)

RESOLVED, LOCK = "config.resolved.json", ".lock"
FOUND_S = 30.0
"""Longest that a shared file system takes to show one process what another wrote."""


class RunFolder:
    """Files of one run."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other processes of this machine from writing here.

        Raises:
          ConfigError: one is at it already, or the folder holds something else.
        """
        import fcntl

        self._check_ours()
        self.path.mkdir(parents=True, exist_ok=True)
        with open(self.path / LOCK, "w") as f:
            try:
                fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(
                    "is being written by another process",
                    setting="--run_dir",
                    value=str(self.path),
                    remedy="wait for it to end, or name another folder",
                ) from None
            yield

    def mark(self, text: str) -> None:
        """Leave a mark for other processes of the run; the folder is locked by this one."""
        (self.path / LOCK).write_text(text)

    def check_shared(self, config: Any, mark: str) -> None:
        """Check that this is the folder of the process that left `mark`, and that its settings are those of `config`.

        Raises:
          ConfigError: one of them is not.
        """
        from rolljax.config import diff

        deadline = time.monotonic() + FOUND_S
        while not _holds(self.path / LOCK, mark):
            if time.monotonic() > deadline:
                raise ConfigError(
                    "is not the folder that the first process writes to",
                    setting="--run_dir",
                    value=str(self.path.absolute()),
                    remedy="name a folder on a file system that all processes share",
                )
            time.sleep(0.1)
        for path, theirs, own in diff(json.loads((self.path / RESOLVED).read_text()), config.resolved):
            raise ConfigError(
                f"is {own!r} here, but {theirs!r} in the first process",
                setting=path,
                remedy="start all processes with the same configs and settings",
            )

    @property
    def checkpoints_path(self) -> Path:
        return self.path / "ckpt"

    def prepare(self, config: Any, *, fresh: bool) -> None:
        """Make the folder, or check that what is there may be continued by this config.

        Args:
          config: a `config.Loaded`. fresh: delete an earlier run first.

        Raises:
          ConfigError: the folder holds something else, or a run with other settings.
        """
        self._check_ours()
        stored = self.path / RESOLVED
        if fresh and stored.is_file():
            for entry in self.path.iterdir():
                if entry.is_dir():
                    shutil.rmtree(entry)
                elif entry.name != LOCK:
                    entry.unlink()
        if stored.is_file():
            self._check_same(json.loads(stored.read_text()), config)
        (self.path / "rollouts").mkdir(parents=True, exist_ok=True)
        (self.path / "config.gin").write_text(config.operative)
        stored.write_text(json.dumps(config.resolved, indent=1) + "\n")
        (self.path / "env.json").write_text(json.dumps(_environment(), indent=1) + "\n")

    def _check_ours(self) -> None:
        """Raise unless the folder is absent, empty, or a run folder."""
        if not self.path.exists() or (self.path / RESOLVED).is_file():
            return
        if not self.path.is_dir() or any(entry.name != LOCK for entry in self.path.iterdir()):
            raise ConfigError(
                "is not empty and not a run folder",
                setting="--run_dir",
                value=str(self.path),
                remedy="name another folder",
            )

    def _check_same(self, old: Mapping[str, object], config: Any) -> None:
        from rolljax.config import diff

        for path, before, now in diff(dict(old), config.resolved):
            if not path.startswith(RESUMABLE):
                raise ConfigError(
                    f"is {now!r} now, but the run in {self.path} was made with {before!r}",
                    setting=path,
                    remedy="go back to the old value, name another --run_dir, or start over with --fresh",
                )

    def phase_start(self, phase: str) -> Path:
        """Where the weights that a phase began with are kept, if its algorithm refers to them."""
        return self.path / "phase_start" / phase

    def checkpoints(self) -> Checkpoints:
        return Checkpoints(self.checkpoints_path)

    def progress(self) -> Progress | None:
        """The latest committed position, or None; no other process is asked."""
        if not self.checkpoints_path.is_dir():
            return None
        with contextlib.closing(Checkpoints(self.checkpoints_path, alone=True)) as checkpoints:
            return checkpoints.progress()

    # ---- metrics and rollouts

    def forget_after(self, step: int) -> None:
        """Drop metrics rows and rollouts of steps after `step`: they are about to be made again."""
        path = self.path / "metrics.jsonl"
        if path.is_file():
            rows = [
                line for line in path.read_text().splitlines() if _complete(line) and json.loads(line)["step"] <= step
            ]
            _replace(path, "".join(f"{line}\n" for line in rows))
        for file in (self.path / "rollouts").glob("step_*.jsonl"):
            if int(file.stem.removeprefix("step_")) > step:
                file.unlink()

    def write_row(self, row: Mapping[str, Any]) -> None:
        """Append one step to metrics.jsonl."""
        with open(self.path / "metrics.jsonl", "a") as f:
            f.write(json.dumps(row) + "\n")

    def rows(self) -> list[dict[str, Any]]:
        """All rows of metrics.jsonl."""
        path = self.path / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []

    def write_rollouts(self, step: int, trajectories: Iterable[Trajectory]) -> None:
        """Write rollouts/step_N.jsonl."""
        _replace(
            self.path / "rollouts" / f"step_{step}.jsonl",
            "".join(json.dumps(t.to_json(), separators=(",", ":")) + "\n" for t in trajectories),
        )

    def write_crash(self, name: str, arrays: Mapping[str, Any]) -> Path:
        """Keep the batch that led to a stop."""
        import numpy as np

        path = self.path / "crash" / f"{name}.npz"
        path.parent.mkdir(exist_ok=True)
        np.savez(path, **arrays)
        return path

    def write_summary(self, progress: Progress, stop_reason: str, state_sha256: str = "") -> dict[str, Any]:
        """Write summary.json; `state_sha256` is the fingerprint of the whole train state."""
        summary = {
            "stop_reason": stop_reason,
            "steps": progress.total_steps,
            "phase_steps": progress.phase_steps,
            "phase_end": progress.phase_end,
            "phase_wall_s": progress.phase_wall_s,
            "wall_s": sum(progress.phase_wall_s.values()),
            "heldout_reward": progress.heldout_reward,
            "version": progress.version,
            "state_sha256": state_sha256,
        }
        _replace(self.path / "summary.json", json.dumps(summary, indent=1) + "\n")
        return summary


def stored_config(run: str | Path) -> str:
    """Path of the config a run can be read back from.

    Raises:
      CheckpointError: not a run folder.
    """
    path = Path(run) / "config.gin"
    if not path.is_file():
        raise CheckpointError(f"{run} is not a run folder: it has no config.gin")
    return str(path)


def _holds(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text() == text


def _complete(line: str) -> bool:
    return line.startswith("{") and line.endswith("}")


def _replace(path: Path, text: str) -> None:
    """Write a file so that it is either the old or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


def _environment() -> dict[str, Any]:
    import jax

    return {
        "python": platform.python_version(),
        "packages": {name: metadata.version(name) for name in PACKAGES if _installed(name)},
        "platform": jax.default_backend(),
        "devices": jax.device_count(),
        "command": _command(sys.argv),
    }


def _installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _command(argv: Sequence[str]) -> list[str]:
    return [Path(argv[0]).name, *argv[1:]]
