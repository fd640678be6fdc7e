"""The reader of run folders: rows, summary, settings and trajectories, each checked. It needs no jax."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rolljax import reading
from rolljax.errors import CheckpointError, boundary
from rolljax.storage import journal
from rolljax.storage.layout import CONFIG, ENVIRONMENT, METRICS, RESOLVED, SUMMARY, rollout_files, rollouts_file
from rolljax.types import Trajectory

Row = dict[str, Any]
DONE = "all phases done"
"""Why a complete run stopped."""
_SUMMARY = {
    "stop_reason": str,
    "state_sha256": str,
    "steps": int,
    "version": int,
    "wall_s": float,
    "phase_steps": dict,
    "phase_end": dict,
}
_REWARD = {"phase": str, "step": int, "mean": float, "n": int}


class RunReader:
    """The files of a run, finished or in progress. Nothing is opened before it is asked for.

    Args:
      path: the run folder.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def rows(self, name: str = METRICS) -> list[Row]:
        """Return the whole rows of `metrics.jsonl`, or of `consumed.jsonl`; none where no file is there.

        Raises:
          CheckpointError: something else than a file is there, or the file may not be read.
        """
        return journal.read_lines(self.path / name, row)

    def resolved(self) -> dict[str, Any]:
        """Return every setting by its path, from `config.resolved.json`.

        Raises:
          CheckpointError: the file is missing or damaged.
        """
        return reading.read_object(self.path / RESOLVED, "--fresh starts over")

    def config_file(self) -> str:
        """Return the path of the config that the run can be read back from.

        Raises:
          CheckpointError: this is no run folder.
        """
        if not (self.path / CONFIG).is_file():
            raise CheckpointError(f"{self.path} is not a run folder: it has no {CONFIG}")
        return str(self.path / CONFIG)

    def summary(self) -> dict[str, Any]:
        """Return the content of `summary.json`; nothing where there is none.

        Raises:
          CheckpointError: the file cannot be read, or is not as a run writes it.
        """
        remedy = "delete it: the command that trained the run writes it again"
        found = self._optional(SUMMARY, remedy)
        wrong = [name for name, kind in _SUMMARY.items() if name in found and not _is_a(found[name], kind)]
        entries = found.get("heldout_reward", [])
        is_list = isinstance(entries, list) and all(map(_is_reward, entries))
        if wrong := wrong + ["heldout_reward"] * (not is_list):
            raise CheckpointError(f"{self.path / SUMMARY} is damaged: {wrong[0]} is not what a run writes; {remedy}")
        return found

    def environment(self) -> dict[str, Any]:
        """Return the content of `env.json`; nothing where there is none. Raises as `resolved` does."""
        return self._optional(ENVIRONMENT, "delete it: the run writes a new one when it continues")

    def rollout_steps(self) -> list[int]:
        """Return the steps whose rollouts are kept, in their order."""
        return [*rollout_files(self.path)]

    def trajectories(self, step: int) -> list[Trajectory]:
        """Return the trajectories in `rollouts/step_N.jsonl`. Raises as `read_trajectories` does."""
        return read_trajectories(rollouts_file(self.path, step))

    def _optional(self, name: str, remedy: str) -> dict[str, Any]:
        path = self.path / name
        return reading.read_object(path, remedy) if path.exists() or path.is_symlink() else {}


def row(value: Any) -> Row:
    """Return the row in a JSON value: it has the number of a step, and numbers for metrics (names with a slash).

    Raises:
      ValueError: it is something else.
    """
    is_row = isinstance(value, dict) and _is_a(value.get("step"), int) and isinstance(value.get("phase", ""), str)
    if not is_row or not all(isinstance(v, (int, float)) for k, v in value.items() if "/" in k):
        raise ValueError("it is not the row of a step")
    return dict(value)


def read_trajectories(path: Path) -> list[Trajectory]:
    """Return the trajectories in a file of rollouts.

    Raises:
      CheckpointError: the file is missing, is not a regular file, or a line is not a trajectory; the error names it.
    """
    try:
        data = reading.read_bytes(path)
    except OSError as e:
        raise CheckpointError(f"{path} cannot be read: {reading.reason(e)}; choose another step") from e
    return [trajectory(line, f"{path}, line {i}") for i, line in enumerate(data.splitlines(), 1)]


def trajectory(line: bytes, where: str) -> Trajectory:
    """Return the trajectory of a line. Raises `CheckpointError` if it is not one; where: the file and the line."""
    damaged = f"{where} cannot be read: it is damaged, or of another version of rolljax; choose another step"
    with boundary(CheckpointError, damaged):
        found = Trajectory.from_json(reading.parse(line))
        texts = (found.task.env, found.task.content, found.status, *(turn.text for turn in found.turns))
        if not all(isinstance(text, str) for text in texts):
            raise ValueError("a text is not a text")
        if not all(_is_a(value, float) for value in (found.reward, *found.reward_parts.values())):
            raise ValueError("a reward is not a number")
        return found


def _is_a(value: object, kind: type) -> bool:
    """Return whether a value of JSON is of a kind; an int is a float too, and a truth value is no number."""
    return isinstance(value, (int, float) if kind is float else kind) and not isinstance(value, bool)


def _is_reward(entry: object) -> bool:
    return isinstance(entry, dict) and all(_is_a(entry.get(name), kind) for name, kind in _REWARD.items())
