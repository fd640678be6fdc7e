"""What the page asks for, as JSON values: one function for each address under `/api/`."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rolljax import metrics
from rolljax.viewer.filters import Filter
from rolljax.viewer.records import Json, groups, heldout_pairs, read, summary, versions
from rolljax.viewer.runs import Run, Runs

if TYPE_CHECKING:
    from rolljax.viewer.tokens import TokenTexts

SEARCH_S = 0.4
"""How long one search goes through steps; the page asks for the rest."""
SEARCH_HITS = 100
COLUMNS = ("advantages", "trainer_logp", "entropy")
"""What training says of single tokens, where a run records it (`Trajectory.trained`)."""


def run_list(runs: Runs) -> Json:
    """The runs, and what metrics mean."""
    return {"runs": [run.overview() for run in runs.all()], "metrics": metric_table()}


def metric_table() -> Json:
    """Unit and meaning of every metric, by name."""
    return {name: {"unit": m.unit, "meaning": m.meaning} for name, m in metrics.NAMES.items()}


def rows(run: Run, after: int, generation: str) -> Json:
    """Metrics of steps: see `Run.rows`."""
    now, found = run.rows(after, generation)
    return {"generation": now, "rows": found, "all": now != generation}


def step(run: Run, number: int, wanted: Filter) -> Json:
    """A step's groups, with those of their trajectories that are wanted."""
    records = run.records(number)
    found = [summary(i, r) for i, r in enumerate(records) if wanted.holds(i, r)]
    return {"step": number, "total": len(records), "found": len(found), "groups": groups(found)}


def search(run: Run, wanted: Filter, newest: int | None) -> Json:
    """Trajectories of all steps that are wanted, from the newest step down.

    Returns:
      hits, each with its step; `next`: the step to go on from, None at the end.
    """
    hits: list[Json] = []
    deadline = time.monotonic() + SEARCH_S
    for number, found in run.search(wanted, newest):
        if hits and (len(hits) + len(found) > SEARCH_HITS or time.monotonic() > deadline):
            return {"hits": hits, "next": number}
        hits += [{"step": number, **of} for of in found]
        if time.monotonic() > deadline:
            return {"hits": hits, "next": number - 1}
    return {"hits": hits, "next": None}


def heldout(run: Run) -> Json:
    """The held-out answers of every evaluation, by task."""
    evaluations = run.heldout()
    return {"evaluations": [name for name, _ in evaluations], "tasks": heldout_pairs(evaluations)}


def trajectory(run: Run, where: int | str, line: int) -> Json:
    """All of one trajectory: its turns with the text of every token."""
    path, record = run.trajectory(where, line)
    full = read(path, record)
    trained = full.get("trained") or {}
    turns, at = [], 0
    for t in full["turns"]:
        own = slice(at, at := at + len(t["tokens"]))
        columns = {name: _part(trained[name], own) for name in COLUMNS if name in trained}
        turns.append(_turn(t, run.tokens, columns))
    return {
        **summary(line, record),
        "where": where,
        "task": full["task"]["content"],
        "task_index": full["task"]["index"],
        "metrics": full["metrics"],
        "attempts": full["attempts"],
        "loops": full["loops"],
        "expert": full["expert"],
        "env_s": full["env_s"],
        "sample_s": full["sample_s"],
        "versions": versions(full),
        "tokenizer": run.tokens.known,
        "turns": turns,
    }


def _turn(turn: Mapping[str, Any], tokens: TokenTexts, columns: Json) -> Json:
    return {
        "prompt": tokens.segments(turn["prompt_ids"]),
        "prompt_tok": len(turn["prompt_ids"]),
        "restart": turn["restart"],
        "ids": turn["tokens"],
        "texts": tokens.texts(turn["tokens"]),
        "special": tokens.special(turn["tokens"]),
        "text": turn["text"],
        "logp": turn["sampler_logp"],
        "versions": _constant(turn["versions"]),
        **columns,
        **_alternatives(turn.get("alternatives"), tokens),
        "reward": turn["reward"],
        "finish_reason": turn["finish_reason"],
        "weight": turn["weight"],
    }


def _alternatives(recorded: Mapping[str, Any] | None, tokens: TokenTexts) -> Json:
    """Of each token the likeliest ones in its place, as texts with log-probs."""
    if not recorded:
        return {}
    rows = zip(recorded["ids"], recorded["logp"], strict=True)
    return {"alternatives": [[(tokens.alone(i), x) for i, x in zip(*row, strict=True)] for row in rows]}


def _part(column: float | Sequence[float], own: slice) -> Any:
    """A turn's part of a column, of which one number stands for a trajectory of equal ones."""
    return column[own] if isinstance(column, list) else column


def _constant(values: Sequence[int]) -> int | Sequence[int]:
    """One number where all are equal."""
    return values[0] if values and min(values) == max(values) else values


def finite(value: Any) -> Any:
    """A JSON value without numbers that JSON does not have: they are None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return value
