"""Compute results from answers: scores of tasks, means with their intervals, tables, comparisons of two evaluations."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from rolljax.errors import CheckpointError, ConfigError
from rolljax.evaluation.settings import Attempts
from rolljax.evaluation.statistics import Interval, bootstrap, maj_at_k, paired_bootstrap, pass_at_k, wilson
from rolljax.types import Key, Task, Trajectory

FinalAnswer = Callable[[Task, str], str | None]
"""Attempts vote for their final answers (`EnvSpec.final_answer`)."""
ALL, MEAN, WEIGHTED = "all tasks", "mean of environments", "weighted mean"
"""Names of the rows over several environments: with equal weights of all tasks, with equal weights of all environments,
or with the configured weights."""


class ReportTable(Protocol):
    """A table that an environment adds to a report: a dataclass, which is part of the report's JSON record."""

    def markdown(self) -> str:
        """Return the table as Markdown."""


@runtime_checkable
class MakesTable(Protocol):
    """An environment that adds a table to the report of an evaluation."""

    def evaluation_table(
        self, trajectories: Sequence[Trajectory], keys: Sequence[Key], attempts: Attempts
    ) -> ReportTable:
        """Return the table of these attempts. `keys[i]` is the key of `trajectories[i]`."""


@dataclasses.dataclass(frozen=True)
class TaskScores:
    """The scores of the attempts at one task."""

    env: str
    id: str
    prompt_index: int
    answers: int
    """Number of attempts that did not fail."""
    failed: int
    """Number of attempts that failed by a fault of the infrastructure or the environment; no score includes them."""
    cut: int
    """Number of answers that a limit ended."""
    tokens: float
    """Number of tokens in all answers together."""
    values: Mapping[str, float]
    """Score by metric; a metric that needs more answers than there are is missing."""
    category: str = ""
    """Kind of the task (`EnvSpec.category`)."""
    solved: tuple[bool | None, ...] = ()
    """Whether each attempt solved the task; None for an attempt that failed."""


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A mean over tasks with its confidence interval."""

    mean: float
    low: float
    high: float
    method: str
    num: int
    """Number of tasks in the row."""

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclasses.dataclass(frozen=True)
class Row:
    """Results of one environment, or over several, or of one category of tasks."""

    name: str
    tasks: int
    answers: int
    failed: int
    cut_frac: float
    """Share of the answers that a limit ended."""
    tok: float
    """Mean number of tokens of an answer."""
    estimates: Mapping[str, Estimate]
    std: float | None = None
    """Sample standard deviation, over the attempts, of the share of tasks that one attempt at each task solves; None if
    there is only one attempt, or if some failed."""


@dataclasses.dataclass(frozen=True)
class EvaluationReport:
    """The results of an evaluation."""

    title: str
    rows: Sequence[Row]
    tasks: Sequence[TaskScores] = dataclasses.field(repr=False)
    notes: Sequence[str]
    """Sentences below the table."""
    counts: Mapping[str, int]
    """Counts of an endpoint's requests, by kind."""
    categories: Sequence[Row] = ()
    """Rows by environment and kind of task, of environments whose tasks have kinds."""
    trajectories: Sequence[Trajectory] = dataclasses.field(default=(), repr=False, compare=False)
    """Every attempt; they are no part of the JSON record."""
    tables: Sequence[ReportTable] = ()
    """Further tables, made by environments."""

    def __getitem__(self, name: str) -> Row:
        """Return the row of an environment, of a category ("environment: category"), or `ALL`, `MEAN` or `WEIGHTED`."""
        return next(row for row in (*self.rows, *self.categories) if row.name == name)

    @property
    def failed(self) -> int:
        """Return the number of attempts without an answer."""
        return sum(task.failed for task in self.tasks)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able record of all of it."""
        record = dataclasses.asdict(dataclasses.replace(self, trajectories=()))
        del record["trajectories"]
        return record

    def markdown(self) -> str:
        """Return the tables as Markdown: environments, categories if tasks have some, and judges in both orders."""
        tables = [_table("environment", self.rows, with_std=False)]
        if self.categories:
            tables.append(_table("category", self.categories, with_std=True))
        tables += [table.markdown() for table in self.tables]
        notes = "".join(f"\n{note}\n" for note in self.notes)
        return f"**{self.title}**\n\n" + "\n\n".join(tables) + "\n" + notes

    def _repr_markdown_(self) -> str:
        return self.markdown()


def _table(first: str, rows: Sequence[Row], *, with_std: bool) -> str:
    """Format rows as a table in Markdown. with_std: add a column for the deviation between several attempts."""
    metrics = list(dict.fromkeys(name for row in rows for name in row.estimates))
    with_std = with_std and any(row.std is not None for row in rows)
    head = [first, "tasks", *metrics, *["std"] * with_std, "cut", "failed", "tok"]
    cells = [
        [
            row.name,
            str(row.tasks),
            *(str(row.estimates[name]) if name in row.estimates else "" for name in metrics),
            *["" if row.std is None else f"{row.std:.3f}"] * with_std,
            f"{row.cut_frac:.1%}",
            str(row.failed),
            f"{row.tok:.1f}" if row.tok else "",
        ]
        for row in rows
    ]
    return table(head, cells)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a table in Markdown, its columns aligned; all but the first to the right."""
    safe = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in [head, *rows]]
    widths = [max(map(len, column)) for column in zip(*safe, strict=True)]
    lines = ["| " + " | ".join(_padded(row, widths)) + " |" for row in safe]
    rule = "|".join([f":{'-' * (widths[0] + 1)}", *(f"{'-' * (w + 1)}:" for w in widths[1:])])
    return "\n".join([lines[0], f"|{rule}|", *lines[1:]])


def _padded(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    return [row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))]


# ---- from answers to numbers ----------------------------------------------------------------------------------------


def score_task(
    prompt_index: int, attempts: Sequence[Trajectory], cfg: Attempts, vote: FinalAnswer | None, category: str = ""
) -> TaskScores:
    """Compute the scores of one task.

    Args:
      attempts: at it, at least one. vote: None where answers cannot be counted. category: of the
        task.
    """
    task = attempts[0].task
    alive = [t for t in attempts if not t.lost]
    right = [t.success for t in alive]
    values = {}
    if alive:
        values["reward"] = float(np.mean([t.reward for t in alive]))
        values[f"avg@{cfg.num}"] = sum(right) / len(alive)
    values |= {f"pass@{k}": pass_at_k(len(alive), sum(right), k) for k in cfg.ks if k <= len(alive)}
    if vote is not None and alive:
        said = [vote(task, t.turns[-1].text) if t.turns else None for t in alive]
        values |= {f"maj@{k}": maj_at_k(said, right, k) for k in cfg.ks if k <= len(alive)}
    cut = sum(t.status == "truncated" and t.fault is not None and t.fault.kind == "limit" for t in alive)
    tokens = sum(t.num_sampled_tok or t.metrics.get("endpoint_tok", 0.0) for t in alive)
    solved = tuple(None if t.lost else t.success for t in attempts)
    failed = len(attempts) - len(alive)
    return TaskScores(task.env, task.id, prompt_index, len(alive), failed, cut, float(tokens), values, category, solved)


def report(
    title: str,
    tasks: Sequence[TaskScores],
    cfg: Attempts,
    counts: Mapping[str, int],
    trajectories: Sequence[Trajectory] = (),
) -> EvaluationReport:
    """Make tables of scores. There is a row for each environment and category; with several environments also one over
    all tasks, one of the environments' means and, if they have weights, one of their weighted mean.

    Raises:
      ConfigError: some environments have weights, others have none.
    """
    domains: dict[str, list[TaskScores]] = {}
    for task in tasks:
        domains.setdefault(task.env, []).append(task)
    rows = [_row(name, [scores], cfg) for name, scores in domains.items()]
    if len(domains) > 1:
        rows += [_row(ALL, [list(tasks)], cfg), _row(MEAN, list(domains.values()), cfg)]
        if weights := weights_of(list(domains), cfg):
            rows.append(_row(WEIGHTED, list(domains.values()), cfg, weights))
    kinds: dict[str, list[TaskScores]] = collections.defaultdict(list)
    for task in sorted(tasks, key=lambda t: (list(domains).index(t.env), t.category)):
        if task.category:
            kinds[f"{task.env}: {task.category}"].append(task)
    categories = [_row(name, [scores], cfg) for name, scores in kinds.items()]
    notes = [
        f"{cfg.num} attempt{'s' * (cfg.num > 1)} at temperature {cfg.temperature:g}, seed {cfg.seed}. "
        f"{cfg.confidence:.0%} intervals: Wilson where a task is one trial, else bootstrap over tasks "
        f"({cfg.resamples:,} resamples)."
    ]
    faults = {kind: n for kind, n in counts.items() if kind not in ("requests", "answers")}
    if faults:
        said = ", ".join(f"{n} {kind}" for kind, n in sorted(faults.items()))
        notes.append(f"Of {counts.get('requests', 0)} requests: {said}; asked again.")
    if failed := sum(task.failed for task in tasks):
        notes.append(f"{failed} attempt(s) failed without an answer; no number includes them.")
    if rows[-1].name == WEIGHTED:
        said = ", ".join(f"{name} {cfg.weights[name]:g}" for name in domains)
        notes.append(f"Weights: {said}.")
    if any(row.std is not None for row in categories):
        notes.append("std: of the share of tasks solved, between attempts.")
    return EvaluationReport(title, rows, list(tasks), notes, dict(counts), categories, trajectories)


def weights_of(names: Sequence[str], cfg: Attempts) -> list[float]:
    """Return the weights of environments, empty if there are none.

    Raises:
      ConfigError: an environment has no weight, or a weight names no environment of this evaluation.
    """
    if not cfg.weights:
        return []
    if odd := sorted(set(names) ^ cfg.weights.keys()):
        raise ConfigError(
            f"are not those of {', '.join(names)}",
            setting="Attempts.weights",
            value=dict(cfg.weights),
            remedy=f"a weight for each of them, and no other; look at {', '.join(odd)}",
        )
    return [cfg.weights[name] for name in names]


def _row(
    name: str, domains: Sequence[Sequence[TaskScores]], cfg: Attempts, weights: Sequence[float] | None = None
) -> Row:
    tasks = [task for domain in domains for task in domain]
    answers = sum(task.answers for task in tasks)
    estimates = {}
    for metric in shown(cfg):
        values = [_values(domain, metric) for domain in domains]
        if all(map(len, values)):
            one_trial = all(_is_one_trial(t, metric) for t in tasks)
            estimates[metric] = estimate(values, cfg, share="@" in metric, one_trial=one_trial, weights=weights)
    return Row(
        name,
        len(tasks),
        answers,
        sum(task.failed for task in tasks),
        sum(task.cut for task in tasks) / max(answers, 1),
        sum(task.tokens for task in tasks) / max(answers, 1),
        estimates,
        _deviation(tasks),
    )


def _deviation(tasks: Sequence[TaskScores]) -> float | None:
    """Return the standard deviation of `Row.std`."""
    solved = [task.solved for task in tasks]
    if len(solved[0]) < 2 or any(s is None for every in solved for s in every) or len({*map(len, solved)}) > 1:
        return None
    return float(np.std(np.array(solved, np.float64).mean(axis=0), ddof=1))


def shown(cfg: Attempts) -> list[str]:
    """Return the metrics of the table: with several attempts avg@n is pass@1, and a majority of two equals one
    attempt."""
    if cfg.num == 1:
        return ["reward", "pass@1"]
    passes = [f"pass@{k}" for k in cfg.ks if k > 1]
    return ["reward", f"avg@{cfg.num}", *passes, *(f"maj@{k}" for k in cfg.ks if k > 2)]


def _values(tasks: Sequence[TaskScores], metric: str) -> np.ndarray:
    return np.array([task.values[metric] for task in tasks if metric in task.values], np.float64)


def _is_one_trial(task: TaskScores, metric: str) -> bool:
    """Return whether the value of this metric for one task is a single success or failure, because exactly the required
    number of answers was sampled."""
    kind, _, k = metric.partition("@")
    return metric not in task.values or (kind == "pass" and task.answers == int(k))


def estimate(
    domains: Sequence[np.ndarray],
    cfg: Attempts,
    *,
    share: bool,
    one_trial: bool,
    weights: Sequence[float] | None = None,
) -> Estimate:
    """Return the mean of the means of `domains` with its interval.

    Wilson's interval serves a single domain whose tasks are one trial each. Otherwise the bootstrap over tasks is used.
    If all values are 0, or all are 1, the bootstrap has no width; then Wilson's for as many trials as there are tasks
    is used, which is at least as wide as necessary: no value between 0 and 1 varies more than a trial.

    Args:
      share: values are between 0 and 1. one_trial: each is one success or failure. weights: of domains; None: equal.
    """
    num = sum(map(len, domains))
    mean = float(np.average([v.mean() for v in domains], weights=weights))
    alike = {float(x) for v in domains for x in np.unique(v)}
    if (one_trial and len(domains) == 1) or (share and alike in ({0.0}, {1.0})):
        each = [1.0] * len(domains) if weights is None else weights
        trials = sum(each) ** 2 / sum(w * w / len(v) for w, v in zip(each, domains, strict=True))
        mean = min(mean, 1.0)  # weights may round to a little more
        found: Interval = wilson(mean, max(1, int(trials)), cfg.confidence)
    else:
        found = bootstrap(domains, weights=weights, confidence=cfg.confidence, resamples=cfg.resamples, seed=cfg.seed)
    return Estimate(mean, found.low, found.high, found.method, num)


# ---- two evaluations ------------------------------------------------------------------------------------------------


def compare(first: Mapping[str, Any], second: Mapping[str, Any], cfg: Attempts) -> tuple[list[dict[str, Any]], str]:
    """Compare two evaluations on the tasks that both have: paired bootstrap over tasks.

    Args:
      first, second: as `answers.read` gives them. cfg: provides confidence, resamples and seed.

    Returns:
      A record for each environment and metric, and the table in Markdown.

    Raises:
      CheckpointError: one is not complete, or they have no task in common.
    """
    before, after = _by_task(first), _by_task(second)
    common = [key for key in before if key in after]
    if not common:
        raise CheckpointError("the two evaluations have no task in common")
    names = [_named(record) for record in (first, second)]
    records = []
    for env in [*dict.fromkeys(env for env, _ in common), *([ALL] if len({e for e, _ in common}) > 1 else [])]:
        for metric in dict.fromkeys(m for key in common for m in before[key] if m in after[key] and _is_compared(m)):
            keys = [k for k in common if env in (k[0], ALL) and metric in before[k] and metric in after[k]]
            if keys:
                records.append(_difference(env, metric, before, after, keys, cfg))
    return records, _comparison(names, records, len(before), len(after), len(common), cfg)


def _named(record: Mapping[str, Any]) -> str:
    """Return a name for the evaluation."""
    how = record["setup"]["attempts"]
    return f"{record['results']['title']} (attempts {how['num']}, temperature {how['temperature']:g})"


def _is_compared(metric: str) -> bool:
    """Return whether to compare a metric. `avg@n` equals `pass@1` for every n, and so do `maj@1` and `maj@2`."""
    return not metric.startswith("avg@") and metric not in ("maj@1", "maj@2")


def _by_task(record: Mapping[str, Any]) -> dict[tuple[str, str], Mapping[str, float]]:
    if "results" not in record:
        raise CheckpointError("the evaluation is not complete: the command that started it resumes it")
    if "tasks" not in record["results"]:
        raise CheckpointError("an evaluation by judges has no scores by task that could be compared")
    asked: dict[tuple[str, str], list[Mapping[str, float]]] = {}
    for task in record["results"]["tasks"]:
        asked.setdefault((task["env"], task["id"]), []).append(task["values"])
    # a task that is asked in several forms (`EnvSpec.variants`) is one task: its values are the means over the forms
    return {
        key: {m: sum(v[m] for v in of) / len(of) for m in of[0] if all(m in v for v in of)} for key, of in asked.items()
    }


def _difference(
    env: str,
    metric: str,
    before: Mapping[tuple[str, str], Mapping[str, float]],
    after: Mapping[tuple[str, str], Mapping[str, float]],
    keys: Sequence[tuple[str, str]],
    cfg: Attempts,
) -> dict[str, Any]:
    first, second = (np.array([values[key][metric] for key in keys]) for values in (before, after))
    found = paired_bootstrap(first, second, confidence=cfg.confidence, resamples=cfg.resamples, seed=cfg.seed)
    means = {"first": float(first.mean()), "second": float(second.mean())}
    return {"env": env, "metric": metric, **means, **dataclasses.asdict(found)}


def _comparison(
    names: Sequence[str],
    records: Sequence[Mapping[str, Any]],
    num_first: int,
    num_second: int,
    common: int,
    cfg: Attempts,
) -> str:
    rows = [
        [
            r["env"],
            r["metric"],
            str(r["tasks"]),
            f"{r['first']:.3f}",
            f"{r['second']:.3f}",
            f"{r['mean']:+.3f} [{r['low']:+.3f}, {r['high']:+.3f}]",
            f"{r['p']:.4f}",
        ]
        for r in records
    ]
    text = table(["environment", "metric", "tasks", "A", "B", "B - A", "p"], rows)
    alone = f" {num_first - common} task(s) of A and {num_second - common} of B have no counterpart." * (
        max(num_first, num_second) > common
    )
    return (
        f"**A: {names[0]}; B: {names[1]}**\n\n{text}\n\nPaired bootstrap over {common} tasks that both were given "
        f"({cfg.resamples:,} resamples, {cfg.confidence:.0%} intervals, two-sided p).{alone}\n"
    )
