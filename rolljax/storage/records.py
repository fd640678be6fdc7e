"""Rows and summaries of a run folder: what every reader of these files takes for whole."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rolljax import reading
from rolljax.errors import CheckpointError, boundary
from rolljax.storage.layout import SUMMARY
from rolljax.types import Trajectory

Row = dict[str, Any]
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


def row(line: str | bytes) -> Row | None:
    """Return the row of a line of `metrics.jsonl` or `consumed.jsonl`; None if the line is not a whole row.

    A whole row has the number of a step, and numbers for metrics (names with a slash).
    """
    try:
        found = reading.parse(line)
    except ValueError:
        return None
    is_row = isinstance(found, dict) and is_a(found.get("step"), int) and isinstance(found.get("phase", ""), str)
    return found if is_row and all(isinstance(v, (int, float)) for k, v in found.items() if "/" in k) else None


def rows(path: Path) -> Iterator[Row]:
    """Yield the whole rows of a file, in their order; none where no file is there.

    Raises:
      CheckpointError: something else than a file is there, or the file may not be read.
    """
    return (found for line in lines(path) if (found := row(line)))


def lines(path: Path) -> list[bytes]:
    """Return the lines of a file without their ends; none where no file is there. Raises as `rows` does."""
    try:
        return reading.read_bytes(path).split(b"\n")
    except FileNotFoundError:
        if path.is_symlink():
            raise CheckpointError(f"{path} is a link that leads nowhere; move it away") from None
        return []
    except OSError as e:
        raise CheckpointError(f"{path} cannot be read: {reading.reason(e)}; move it away") from e


def trajectories(path: Path) -> list[Trajectory]:
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
        if not all(is_a(value, float) for value in (found.reward, *found.reward_parts.values())):
            raise ValueError("a reward is not a number")
        return found


def summary(run: Path) -> dict[str, Any]:
    """Return what `summary.json` of a run folder says; nothing where there is none.

    Raises:
      CheckpointError: the file cannot be read, or is not as a run writes it.
    """
    path, remedy = run / SUMMARY, "delete it: the command that trained the run writes it again"
    found = optional(path, remedy)
    wrong = [name for name, kind in _SUMMARY.items() if name in found and not is_a(found[name], kind)]
    entries = found.get("heldout_reward", [])
    is_list = isinstance(entries, list) and all(map(_is_reward, entries))
    if wrong := wrong + ["heldout_reward"] * (not is_list):
        raise CheckpointError(f"{path} is damaged: {wrong[0]} is not what a run writes; {remedy}")
    return found


def optional(path: Path, remedy: str) -> dict[str, Any]:
    """Return the JSON object in a file, an empty one where there is no file. Raises as `reading.read_object` does."""
    return reading.read_object(path, remedy) if path.exists() or path.is_symlink() else {}


def is_a(value: object, kind: type) -> bool:
    """Whether a value of JSON is of a kind; an int is a float too, and a truth value is no number."""
    return isinstance(value, (int, float) if kind is float else kind) and not isinstance(value, bool)


def _is_reward(entry: object) -> bool:
    return isinstance(entry, dict) and all(is_a(entry.get(name), kind) for name, kind in _REWARD.items())
