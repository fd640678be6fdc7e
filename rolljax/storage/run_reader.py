"""The reader of run folders: rows, summary, settings and trajectories, each checked. It needs no jax."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rolljax import reading
from rolljax.errors import CheckpointError
from rolljax.fields import Damaged, Fields, as_number
from rolljax.storage import journal
from rolljax.storage.layout import CONFIG, ENVIRONMENT, METRICS, RESOLVED, SUMMARY, rollout_files, rollouts_file
from rolljax.types import Trajectory

Row = dict[str, Any]
DONE = "all phases done"
"""Why a complete run stopped."""
MAX_TOKEN = 2**31 - 1
"""The largest id of a token, and the largest policy version."""
STATUSES = ("ok", "truncated", "failed")
TRAINED_COLUMNS = ("advantages", "trainer_logp", "entropy")
"""Training results of single tokens, if a run records them (`Trajectory.trained`)."""
_SUMMARY = {
    "stop_reason": str,
    "state_sha256": str,
    "steps": int,
    "version": int,
    "wall_s": float,
    "phase_steps": dict,
    "phase_end": dict,
    "restarts": list,
}
_REWARD = {"phase": str, "step": int, "mean": float, "n": int}


class RunReader:
    """The files of a run, finished or in progress. Files are opened at their first use.

    Args:
      path: the run folder.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def rows(self, name: str = METRICS) -> list[Row]:
        """Return the whole rows of `metrics.jsonl`, or of `consumed.jsonl`; none if the file is missing.

        Raises:
          CheckpointError: the path is not a regular file, or the file cannot be read.
        """
        return journal.read_lines(self.path / name, row)

    def resolved(self) -> dict[str, Any]:
        """Return every setting by its path, from `config.resolved.json`.

        Raises:
          CheckpointError: the file is missing or damaged.
        """
        return reading.read_object(self.path / RESOLVED, "name a run folder that is whole; --fresh starts a run over")

    def config_file(self) -> str:
        """Return the path of the config that the run can be read back from.

        Raises:
          CheckpointError: this is no run folder.
        """
        if not (self.path / CONFIG).is_file():
            raise CheckpointError(f"{self.path} is not a run folder: it has no config.gin")
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
    return parse_trajectories(data, path)


def parse_trajectories(data: bytes, path: Path) -> list[Trajectory]:
    """Return the trajectories in `data`, the content of a file of rollouts. Raises as `read_trajectories` does."""

    def refuse(line: int, error: Exception) -> CheckpointError:
        remedy = "it is damaged, or of another version of rolljax; choose another step"
        return CheckpointError(f"{path}, line {line} cannot be read: {error}: {remedy}")

    return journal.parse(data, trajectory, refuse).values


def trajectory(record: Any) -> Trajectory:
    """Return the trajectory in the JSON value of a line.

    Raises:
      Damaged: it is not one; the error names the field.
    """
    of = Fields(record)
    trajectory_outline(of)
    num_tok = 0
    for turn in of.all_inside("turns"):
        size = len(turn.wholes("tokens", low=0, high=MAX_TOKEN))
        turn.wholes("prompt_ids", low=0, high=MAX_TOKEN)
        turn.numbers("sampler_logp", size=size)
        if len(turn.wholes("versions", low=-1, high=MAX_TOKEN)) != size:
            raise turn.wrong("versions", f"a list of {size}")
        _check_alternatives(turn.maybe_inside("alternatives"), size)
        for name in ("text", "finish_reason"):
            turn.text(name)
        turn.number("reward"), turn.number("weight", 1.0), turn.flag("restart", False)
        num_tok += size
    of.by_name("metrics"), of.whole("attempts", 1), of.whole("loops", 0)
    of.number("env_s", 0.0), of.number("sample_s", 0.0)
    if expert := of.maybe_inside("expert"):
        expert.text("id"), expert.whole("turns")
    _check_trained(of.maybe_inside("trained"), num_tok)
    try:
        return Trajectory.from_json(record)
    except (LookupError, TypeError, ValueError) as e:
        raise Damaged(f"a field is missing or not known: {e}") from e


def trajectory_outline(of: Fields) -> Row:
    """Return the fields of a trajectory that lists show, without its turns. Raises `Damaged`, which names the field."""
    key, task, fault, status = of.inside("key"), of.inside("task"), of.maybe_inside("fault"), of.text("status")
    if status not in STATUSES:
        raise of.wrong("status", f"one of {', '.join(STATUSES)}")
    return {
        "key": {name: key.whole(name) for name in ("stream", "prompt_index", "sibling")},
        "task": {"env": task.text("env"), "index": task.whole("index"), "content": task.text("content")},
        "reference": of.text("reference", None),
        "reward": of.number("reward"),
        "reward_parts": of.by_name("reward_parts"),
        "success": of.flag("success"),
        "status": status,
        "fault": fault and {name: fault.text(name) for name in ("kind", "stage", "detail")},
    }


def _check_alternatives(of: Fields | None, size: int) -> None:
    if of is None:
        return
    ids, logp = of.items("ids"), of.items("logp")
    rows = [
        isinstance(row, list)
        and isinstance(x, list)
        and len(row) == len(x)
        and all(type(i) is int and 0 <= i <= MAX_TOKEN for i in row)
        and all(as_number(value) is not None for value in x)
        for row, x in zip(ids, logp, strict=False)
    ]
    if len(ids) != size or len(logp) != size or not all(rows):
        raise of.wrong("ids", f"{size} lists of tokens, each with its log-probs")


def _check_trained(of: Fields | None, size: int) -> None:
    """Check the columns of training's numbers for sampled tokens: a number for all of them, or `size` values."""
    if of is None:
        return
    for name in TRAINED_COLUMNS:
        if of.is_list(name):
            column = of.items(name)
            if len(column) != size or not all(x is None or as_number(x) is not None for x in column):
                raise of.wrong(name, f"a list of {size} numbers")
        elif of.has(name):
            of.number(name)


def _is_a(value: object, kind: type) -> bool:
    """Return whether a value of JSON is of a kind; an int is accepted as a float, a bool is not accepted as a
    number."""
    return isinstance(value, (int, float) if kind is float else kind) and not isinstance(value, bool)


def _is_reward(entry: object) -> bool:
    return isinstance(entry, dict) and all(_is_a(entry.get(name), kind) for name, kind in _REWARD.items())
