"""The page's data as JSON values: one function for each address under `/api/`."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rolljax import metrics
from rolljax.fields import Damaged, Json
from rolljax.storage.run_reader import TRAINED_COLUMNS
from rolljax.viewer.filters import Filter
from rolljax.viewer.records import groups, heldout_pairs, read, summary
from rolljax.viewer.runs import NotThere, Runs, ViewedRun

if TYPE_CHECKING:
    from rolljax.types import Alternatives, TokenColumn, Turn
    from rolljax.viewer.records import TrajectoryFile
    from rolljax.viewer.tokens import TokenTexts

SEARCH_S = 0.4
"""Seconds that one search spends on steps; the page then requests the rest."""
SEARCH_HITS = 100


def run_list(runs: Runs) -> Json:
    """Return the runs and the meaning of metrics."""
    return {"runs": [run.overview() for run in runs.all()], "metrics": metric_table()}


def metric_table() -> Json:
    """Return unit and meaning of every metric, by name."""
    return {name: {"unit": m.unit, "meaning": m.meaning} for name, m in metrics.NAMES.items()}


def rows(run: ViewedRun, after: int, generation: str) -> Json:
    """Return the metrics of steps: see `ViewedRun.rows`."""
    now, found = run.rows(after, generation)
    return {"generation": now, "rows": found, "all": now != generation}


def step(run: ViewedRun, number: int, wanted: Filter) -> Json:
    """Return a step's groups with their trajectories that match the filter."""
    records = run.records(number)
    found = [summary(r) for r in records.found.values() if wanted.holds(r)]
    total, damaged = len(records.found), damage(records)
    return {"step": number, "total": total, "found": len(found), "groups": groups(found), "damaged": damaged}


def damage(records: TrajectoryFile) -> Json | None:
    """Return the number of unreadable lines of a file, and the error of the first; None if all can be read."""
    line = next(iter(records.damaged), None)
    return None if line is None else {"n": len(records.damaged), "line": line, "why": records.damaged[line]}


def search(run: ViewedRun, wanted: Filter, newest: int | None) -> Json:
    """Return matching trajectories of all steps, from the newest step down.

    Returns:
      hits, each with its step; `next`: the step to continue from, None at the end.
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


def heldout(run: ViewedRun) -> Json:
    """Return the held-out answers of every evaluation, by task."""
    evaluations = run.heldout()
    pairs = heldout_pairs([(name, list(records.found.values())) for name, records in evaluations])
    damaged = {name: of for name, records in evaluations if (of := damage(records))}
    return {"evaluations": [name for name, _ in evaluations], "tasks": pairs, "damaged": damaged}


def trajectory(run: ViewedRun, where: int | str, line: int) -> Json:
    """Return all of one trajectory: its turns with the text of every token.

    Raises:
      NotThere: it is not there, or it is damaged.
    """
    path, record = run.trajectory(where, line)
    try:
        full = read(path, record)
    except OSError as e:
        raise NotThere(f"step {where} of {run.name} is gone") from e
    except Damaged as e:
        raise NotThere(f"line {line} of step {where} of {run.name} is damaged: {e}") from e
    turns, at = [], 0
    for turn in full.turns:
        own = slice(at, at := at + len(turn.tokens))
        trained = {name: column for name, column in (full.trained or {}).items() if name in TRAINED_COLUMNS}
        columns = {name: _part(column, own) for name, column in trained.items()}
        turns.append(_turn(turn, run.tokens, columns))
    sampled = [int(v) for turn in full.turns for v in turn.versions if v >= 0]
    return {
        **summary(record),
        "where": where,
        "task": full.task.content,
        "task_index": full.task.index,
        "reference": full.reference,
        "metrics": full.metrics,
        "attempts": full.attempts,
        "loops": full.loops,
        "expert": full.expert and dataclasses.asdict(full.expert),
        "env_s": full.env_s,
        "sample_s": full.sample_s,
        "versions": (min(sampled), max(sampled)) if sampled else None,
        "tokenizer": run.tokens.known,
        "turns": turns,
    }


def _turn(turn: Turn, tokens: TokenTexts, columns: Json) -> Json:
    ids = turn.tokens.tolist()
    return {
        "prompt": tokens.segments(turn.prompt_ids.tolist()),
        "prompt_tok": len(turn.prompt_ids),
        "restart": turn.restart,
        "ids": ids,
        "texts": tokens.texts(ids),
        "special": tokens.special(ids),
        "text": turn.text,
        "logp": turn.sampler_logp.tolist(),
        "versions": _constant(turn.versions.tolist()),
        **columns,
        **_alternatives(turn.alternatives, tokens),
        "reward": turn.reward,
        "finish_reason": turn.finish_reason,
        "weight": turn.weight,
    }


def _alternatives(recorded: Alternatives | None, tokens: TokenTexts) -> Json:
    """Return the likeliest alternatives of each token, as texts with log-probs."""
    if recorded is None or not len(recorded.ids):
        return {}
    rows = zip(recorded.ids.tolist(), recorded.logp.tolist(), strict=True)
    return {"alternatives": [[(tokens.alone(i), x) for i, x in zip(*row, strict=True)] for row in rows]}


def _part(column: TokenColumn | None, own: slice) -> Any:
    """Return a turn's part of a column; a single number, which means a constant column, is returned unchanged."""
    return column[own] if isinstance(column, list) else column


def _constant(values: Sequence[int]) -> int | Sequence[int]:
    """Return one number if all values are equal, else the values."""
    return values[0] if values and min(values) == max(values) else values


def finite(value: Any) -> Any:
    """Replace non-finite numbers in a JSON value by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return value
