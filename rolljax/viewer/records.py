"""Files of trajectories, read without their tokens: where each trajectory is, and its results.

Nine tenths of a file are arrays of tokens and log-probs. They are skipped, and only counted, so that a step of 512
trajectories is read in a few hundredths of a second. One trajectory is read in full when it is opened.
"""

from __future__ import annotations

import dataclasses
import math
import re
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

from rolljax import reading
from rolljax.fields import Damaged, Fields, Json, parse
from rolljax.storage.run_reader import MAX_TOKEN, trajectory, trajectory_outline
from rolljax.types import Trajectory

_ARRAY = re.compile(rb'"(prompt_ids|tokens|sampler_logp|versions|advantages|trainer_logp|entropy)":\s*\[')
"""Matches the beginning of an array of a turn. A text cannot hold this: its quotes are escaped."""
_SUMMED = ("prompt_ids", "tokens", "versions")
_COUNTED = tuple(name.encode() for name in _SUMMED)
SHOWN_CHARS = 280
"""Characters shown of a task, and of an answer, in a list."""


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """One trajectory of a file."""

    line: int
    """Index of the trajectory's line in the file, from 0."""
    start: int
    """Offset of the trajectory's first byte in the file."""
    end: int
    """Offset after the trajectory's last byte in the file."""
    outline: Json
    """The fields that lists show. In place of arrays of tokens it has their length, in place of `versions` the number
    of tokens that no policy sampled."""

    @property
    def texts(self) -> Iterator[str]:
        """Return everything recorded about it: its task, its answers, its faults."""
        yield self.outline["task"]["content"]
        yield from (turn["text"] for turn in self.outline["turns"])
        if fault := self.outline["fault"]:
            yield fault["detail"]


@dataclasses.dataclass(frozen=True, slots=True)
class TrajectoryFile:
    """The trajectories of a file by line, and the errors of its other lines by line.

    A last line without its end is being written, and is in neither.
    """

    found: dict[int, Record]
    damaged: dict[int, str]


def scan(data: bytes) -> TrajectoryFile:
    """Read the trajectories of a file without their tokens."""
    found, damaged, start, line = dict[int, Record](), dict[int, str](), 0, 0
    while start < len(data):
        end = data.find(b"\n", start)
        whole, end = end >= 0, len(data) if end < 0 else end
        try:
            found[line] = Record(line, start, end, _outline(data, start, end))
        except Damaged as e:
            if whole and data[start:end].strip():
                damaged[line] = str(e)
        start, line = end + 1, line + 1
    return TrajectoryFile(found, damaged)


def read(path: Path, record: Record) -> Trajectory:
    """Return all of one trajectory.

    Raises:
      Damaged: a field is missing or has a wrong type or value. OSError: the file is gone.
    """
    with reading.open_file(path) as f:
        f.seek(record.start)
        return trajectory(parse(f.read(record.end - record.start)))


def _outline(data: bytes, start: int, end: int) -> Json:
    parts, at = [], start
    while found := _ARRAY.search(data, at, end):
        stop = data.find(b"]", found.end(), end)
        if stop < 0:
            raise Damaged("not JSON: a list without its end")
        parts += [data[at : found.end()], _told(found[1], data, found.end(), stop)]
        at = stop
    parts.append(data[at:end])
    of = Fields(parse(b"".join(parts)))
    return trajectory_outline(of) | {"turns": [_outline_turn(t) for t in of.all_inside("turns")]}


def _outline_turn(of: Fields) -> Json:
    return {"text": of.text("text")} | {name: sum(of.wholes(name, low=0, high=MAX_TOKEN)) for name in _SUMMED}


def _told(name: bytes, data: bytes, start: int, stop: int) -> bytes:
    """Return the count that replaces an array in an outline; empty if the array is not counted."""
    if name not in _COUNTED or not data[start:stop].strip():
        return b""
    return b"%d" % (data.count(b"-", start, stop) if name == b"versions" else data.count(b",", start, stop) + 1)


# ---- what lists show


def summary(record: Record) -> Json:
    """Return one trajectory in a list: everything but tokens and the rest of long texts."""
    of = record.outline
    turns = of["turns"]
    answer, sampled_tok = turns[-1]["text"] if turns else "", sum(t["tokens"] for t in turns)
    return {
        "line": record.line,
        **of["key"],
        "env": of["task"]["env"],
        "task": _short(of["task"]["content"]),
        "answer": _short(answer),
        "reference": of["reference"] and _short(of["reference"]),
        "reward": of["reward"],
        "parts": of["reward_parts"],
        "success": of["success"],
        "status": of["status"],
        "fault": of["fault"],
        "turns": len(turns),
        "prompt_tok": sum(t["prompt_ids"] for t in turns),
        "sampled_tok": sampled_tok,
        "replayed": 0 < sampled_tok == sum(t["versions"] for t in turns),
    }


def groups(summaries: Sequence[Json]) -> list[Json]:
    """Return the groups of a step's trajectories, those whose rewards differ most first.

    Each has its prompt index, task and environment, the mean and the standard deviation of the rewards of the
    trajectories that did not fail, and its trajectories by sibling.
    """
    members: dict[tuple[int, int], list[Json]] = {}
    for s in summaries:
        members.setdefault((s["stream"], s["prompt_index"]), []).append(s)
    found = [_group(key, sorted(of, key=lambda s: s["sibling"])) for key, of in members.items()]
    return sorted(found, key=lambda g: (-g["spread"], g["stream"], g["prompt_index"]))


def _group(key: tuple[int, int], members: Sequence[Json]) -> Json:
    rewards = [s["reward"] for s in members if s["status"] != "failed" and math.isfinite(s["reward"])]
    return {
        "stream": key[0],
        "prompt_index": key[1],
        "task": members[0]["task"],
        "env": members[0]["env"],
        "reference": members[0]["reference"],
        "mean": statistics.fmean(rewards) if rewards else None,
        "spread": statistics.pstdev(rewards) if rewards else 0.0,
        "trajectories": members,
    }


def heldout_pairs(evaluations: Sequence[tuple[str, Sequence[Record]]]) -> list[Json]:
    """Return the course of every held-out task from one evaluation to the next, by its place in them.

    Args:
      evaluations: name and trajectories of each, in their order.
    """
    by_task: dict[tuple[str, int], dict[str, Json]] = {}
    for name, found in evaluations:
        for record in found:
            task = record.outline["task"]
            by_task.setdefault((task["env"], task["index"]), {})[name] = summary(record)
    return [
        {"env": env, "index": index, "task": first["task"], "reference": first["reference"], "answers": of}
        for (env, index), of in by_task.items()
        for first in (next(iter(of.values())),)
    ]


def _short(text: str) -> str:
    return text if len(text) <= SHOWN_CHARS else text[: SHOWN_CHARS - 1] + "…"
