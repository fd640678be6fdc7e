"""Files of trajectories, read without their tokens: where each trajectory is, and its results.

Nine tenths of a file are arrays of tokens and log-probs. They are skipped, and only counted, so that a step of 512
trajectories is read in a few hundredths of a second. One trajectory is read in full when it is opened.
"""

from __future__ import annotations

import dataclasses
import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rolljax import reading
from rolljax.fields import Damaged, Fields, Json, as_number, parse

_ARRAY = re.compile(rb'"(prompt_ids|tokens|sampler_logp|versions|advantages|trainer_logp|entropy)":\s*\[')
"""Where an array of a turn begins. A text cannot hold this: its quotes are escaped."""
_SUMMED = ("prompt_ids", "tokens", "versions")
_COUNTED = tuple(name.encode() for name in _SUMMED)
COLUMNS = ("advantages", "trainer_logp", "entropy")
"""What training says of single tokens, where a run records it (`Trajectory.trained`)."""
SHOWN_CHARS = 280
"""Of a task, and of an answer, in a list."""


TOKEN = 2**31 - 1
"""The largest id of a token, and the largest policy version."""
STATUSES = ("ok", "truncated", "failed")


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


def read(path: Path, record: Record) -> Json:
    """Return all of one trajectory, as `Trajectory.to_json` wrote it.

    Raises:
      Damaged: a field is missing, or is not what it should be. OSError: the file is gone.
    """
    with reading.open_file(path) as f:
        f.seek(record.start)
        of = Fields(parse(f.read(record.end - record.start)))
    turns = [_turn(t) for t in of.all_inside("turns")]
    expert = of.maybe_inside("expert")
    return {
        "task": _task(of),
        "turns": turns,
        "metrics": of.by_name("metrics"),
        "attempts": of.whole("attempts", 1),
        "loops": of.whole("loops", 0),
        "expert": expert and {"id": expert.text("id"), "turns": expert.whole("turns")},
        "env_s": of.number("env_s", 0.0),
        "sample_s": of.number("sample_s", 0.0),
        "trained": _trained(of.maybe_inside("trained"), sum(len(t["tokens"]) for t in turns)),
    }


def _turn(of: Fields) -> Json:
    tokens = of.wholes("tokens", low=0, high=TOKEN)
    return {
        "prompt_ids": of.wholes("prompt_ids", low=0, high=TOKEN),
        "tokens": tokens,
        "sampler_logp": of.numbers("sampler_logp", size=len(tokens)),
        "versions": _sized(of, of.wholes("versions", low=-1, high=TOKEN), len(tokens)),
        "alternatives": _alternatives(of.maybe_inside("alternatives"), len(tokens)),
        "text": of.text("text"),
        "reward": of.number("reward"),
        "finish_reason": of.text("finish_reason"),
        "weight": of.number("weight", 1.0),
        "restart": of.flag("restart", False),
    }


def _sized(of: Fields, values: list[int], size: int) -> list[int]:
    if len(values) != size:
        raise of.wrong("versions", f"a list of {size}")
    return values


def _alternatives(of: Fields | None, size: int) -> list[list[tuple[int, float]]] | None:
    """Return the likeliest tokens in place of each one, as pairs of id and log-prob."""
    if of is None:
        return None
    ids, logp = of.items("ids"), of.items("logp")
    rows = [_pairs(i, x) for i, x in zip(ids, logp, strict=False)]
    if len(ids) != size or len(logp) != size or None in rows:
        raise of.wrong("ids", f"{size} lists of tokens, each with its log-probs")
    return [row for row in rows if row is not None]


def _pairs(ids: Any, logp: Any) -> list[tuple[int, float]] | None:
    if not isinstance(ids, list) or not isinstance(logp, list) or len(ids) != len(logp):
        return None
    fit = all(type(i) is int and 0 <= i <= TOKEN and as_number(x) is not None for i, x in zip(ids, logp, strict=True))
    return list(zip(ids, logp, strict=True)) if fit else None


def _trained(of: Fields | None, size: int) -> Json:
    """Return the columns of what training made of sampled tokens: a number for all of them, or `size` values."""
    if of is None:
        return {}
    found: Json = {}
    for name in COLUMNS:
        if of.is_list(name):
            column = of.items(name)
            if len(column) != size or not all(x is None or as_number(x) is not None for x in column):
                raise of.wrong(name, f"a list of {size} numbers")
            found[name] = column
        elif name in of:
            found[name] = of.number(name, None) if of.has(name) else None
    return found


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
    key, fault = of.inside("key"), of.maybe_inside("fault")
    status = of.text("status")
    if status not in STATUSES:
        raise of.wrong("status", f"one of {', '.join(STATUSES)}")
    return {
        "key": {name: key.whole(name) for name in ("stream", "prompt_index", "sibling")},
        "task": _task(of),
        "reference": of.text("reference", None),
        "turns": [_outline_turn(t) for t in of.all_inside("turns")],
        "reward": of.number("reward"),
        "reward_parts": of.by_name("reward_parts"),
        "success": of.flag("success"),
        "status": status,
        "fault": fault and {name: fault.text(name) for name in ("kind", "stage", "detail")},
    }


def _task(of: Fields) -> Json:
    task = of.inside("task")
    return {"env": task.text("env"), "index": task.whole("index"), "content": task.text("content")}


def _outline_turn(of: Fields) -> Json:
    return {"text": of.text("text")} | {name: sum(of.wholes(name, low=0, high=TOKEN)) for name in _SUMMED}


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


def versions(record: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the oldest and the newest policy version that sampled a token; None if no policy sampled any."""
    found = [v for turn in record["turns"] for v in turn["versions"] if v >= 0]
    return (min(found), max(found)) if found else None


def _short(text: str) -> str:
    return text if len(text) <= SHOWN_CHARS else text[: SHOWN_CHARS - 1] + "…"
