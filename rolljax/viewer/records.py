"""Files of trajectories, read without their tokens: where each trajectory stands, and what it came to.

Nine tenths of a file are arrays of tokens and log-probs. They are jumped over, and only counted, so that a step of 512
trajectories is known in a few hundredths of a second, and one trajectory is read in full when somebody opens it.
"""

from __future__ import annotations

import dataclasses
import json
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

Json = dict[str, Any]

_ARRAY = re.compile(rb'"(prompt_ids|tokens|sampler_logp|versions|advantages|trainer_logp|entropy)":\[')
"""Where an array of a turn begins. A text cannot hold this: its quotes are escaped."""
_COUNTED = (b"prompt_ids", b"tokens", b"versions")
SHOWN_CHARS = 280
"""Of a task, and of an answer, in a list."""


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """One trajectory of a file.

    start, end: its bytes. outline: its JSON with every array of tokens replaced by `[length]`, that of versions by
    `[tokens that no policy sampled]`.
    """

    start: int
    end: int
    outline: Json

    @property
    def texts(self) -> Iterator[str]:
        """All that is written in it: its task, its answers, what went wrong."""
        yield self.outline["task"]["content"]
        yield from (turn["text"] for turn in self.outline["turns"])
        if fault := self.outline["fault"]:
            yield fault["detail"]


def scan(data: bytes) -> list[Record]:
    """The trajectories of a file, in its order; lines that are not whole are left out."""
    found, start = [], 0
    while start < len(data):
        end = data.find(b"\n", start)
        end = len(data) if end < 0 else end
        if outline := _outline(data, start, end):
            found.append(Record(start, end, outline))
        start = end + 1
    return found


def read(path: Path, record: Record) -> Json:
    """All of one trajectory, as `Trajectory.to_json` wrote it."""
    with open(path, "rb") as f:
        f.seek(record.start)
        return dict(json.loads(f.read(record.end - record.start)))


def _outline(data: bytes, start: int, end: int) -> Json | None:
    parts, at = [], start
    while found := _ARRAY.search(data, at, end):
        stop = data.find(b"]", found.end(), end)
        if stop < 0:
            return None
        parts += [data[at : found.end()], _told(found[1], data, found.end(), stop)]
        at = stop
    parts.append(data[at:end])
    try:
        outline = json.loads(b"".join(parts))
        return outline if outline["task"]["content"] is not None and outline["turns"] is not None else None
    except (ValueError, LookupError, TypeError):
        return None


def _told(name: bytes, data: bytes, start: int, stop: int) -> bytes:
    """What stands for an array in an outline."""
    if start == stop or name not in _COUNTED:
        return b""
    return b"%d" % (data.count(b"-", start, stop) if name == b"versions" else data.count(b",", start, stop) + 1)


# ---- what lists show


def summary(line: int, record: Record) -> Json:
    """One trajectory in a list: everything but tokens and the rest of long texts.

    Args:
      line: its place in the file, its address.
    """
    of = record.outline
    turns = of["turns"]
    answer, sampled_tok = turns[-1]["text"] if turns else "", sum(sum(t["tokens"]) for t in turns)
    return {
        "line": line,
        **of["key"],
        "env": of["task"]["env"],
        "task": _short(of["task"]["content"]),
        "answer": _short(answer),
        "reward": of["reward"],
        "parts": of["reward_parts"],
        "success": of["success"],
        "status": of["status"],
        "fault": of["fault"],
        "turns": len(turns),
        "prompt_tok": sum(sum(t["prompt_ids"]) for t in turns),
        "sampled_tok": sampled_tok,
        "replayed": 0 < sampled_tok == sum(sum(t["versions"]) for t in turns),
    }


def groups(summaries: Sequence[Json]) -> list[Json]:
    """The groups of a step's trajectories, those whose rewards differ most first.

    Each has its draw, task and environment, the mean and the standard deviation of the rewards of those that did not
    fail, and its trajectories by sibling.
    """
    members: dict[tuple[int, int], list[Json]] = {}
    for s in summaries:
        members.setdefault((s["stream"], s["draw"]), []).append(s)
    found = [_group(key, sorted(of, key=lambda s: s["sibling"])) for key, of in members.items()]
    return sorted(found, key=lambda g: (-g["spread"], g["stream"], g["draw"]))


def _group(key: tuple[int, int], members: Sequence[Json]) -> Json:
    rewards = [s["reward"] for s in members if s["status"] != "failed"]
    return {
        "stream": key[0],
        "draw": key[1],
        "task": members[0]["task"],
        "env": members[0]["env"],
        "mean": statistics.fmean(rewards) if rewards else None,
        "spread": statistics.pstdev(rewards) if rewards else 0.0,
        "trajectories": members,
    }


def heldout_pairs(evaluations: Sequence[tuple[str, Sequence[Record]]]) -> list[Json]:
    """What became of every held-out task from one evaluation to the next, by its place in them.

    Args:
      evaluations: name and trajectories of each, in their order.
    """
    by_task: dict[tuple[str, int], dict[str, Json]] = {}
    for name, found in evaluations:
        for line, record in enumerate(found):
            task = record.outline["task"]
            by_task.setdefault((task["env"], task["index"]), {})[name] = summary(line, record)
    return [
        {"env": env, "index": index, "task": next(iter(of.values()))["task"], "answers": of}
        for (env, index), of in by_task.items()
    ]


def versions(record: Mapping[str, Any]) -> tuple[int, int] | None:
    """The oldest and the newest policy version that sampled a token; None: nothing was sampled by one."""
    found = [v for turn in record["turns"] for v in turn["versions"] if v >= 0]
    return (min(found), max(found)) if found else None


def _short(text: str) -> str:
    return text if len(text) <= SHOWN_CHARS else text[: SHOWN_CHARS - 1] + "…"
