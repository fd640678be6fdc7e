"""An evaluation by judges from beginning to end: answers of a model, verdicts, records on disk, tables.

In addition to the files of any evaluation (`evaluation.answers`) its folder holds `verdicts.jsonl`: for every answer a
line with the labels, the votes, and the benchmark's own record of the answer. Unless texts are requested, files hold
only hashes of the texts of items, answers and judges: an answer whose verdict failed is then requested again.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rolljax.chat_models.base import Asking
from rolljax.errors import ConfigError
from rolljax.evaluation.answers import JUDGEMENTS, AnswerLog
from rolljax.evaluation.judged.base import Ask, Judged, JudgedEvaluation, JudgedReport
from rolljax.evaluation.judged.items import Item, ItemEnv, digest
from rolljax.evaluation.models import EvaluatedModel
from rolljax.evaluation.run import Standing, check_task, jobs_of, make_attempts
from rolljax.evaluation.settings import Attempts, Benchmark
from rolljax.judging.judge import Ballot, JudgePanel
from rolljax.judging.verdict import read_label
from rolljax.storage.journal import Journal
from rolljax.types import Fault, Key, Trajectory


def evaluate_judged(
    model: EvaluatedModel,
    cfg: JudgedEvaluation,
    *,
    to: str | Path | None = None,
    fresh: bool = False,
    show_texts: bool = False,
    show: Callable[[Standing], None] = lambda _: None,
    warn: Callable[[str], None] = lambda _: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> JudgedReport:
    """Evaluate a model's answers to the items of a benchmark with judges, and report the results.

    Args:
      model: an open model. to: a folder for records and report; an unfinished evaluation there resumes, and requests
        missing verdicts again. fresh: delete it first.
      show_texts: write the texts of items, answers and judges into the records, in clear.
      show, warn, should_stop: see `evaluation.run.evaluate`.

    Raises:
      Stopped: `should_stop` said so.
      ConfigError: settings that cannot be used, or a folder with another evaluation. DataError: items that cannot.
      InfraError: nothing is answered, or no judge answers. HangError: nothing moved for long.
    """
    if cfg.benchmark.needs_judge and not cfg.judges:
        raise ConfigError("are none", setting="JudgedEvaluation.judges", remedy="name one: --judge URL")
    items = cfg.benchmark.items()
    bench = benchmark_of(cfg, items)
    attempts = Attempts(
        cfg.benchmark.samples,
        temperature=cfg.benchmark.temperature,
        top_p=cfg.benchmark.top_p,
        seed=cfg.seed,
        concurrency=cfg.concurrency,
    )
    jobs = jobs_of([[bench.env.task(i) for i in range(len(items))]], attempts, 0)
    standing, before = Standing(len(jobs), scored=False), collections.Counter(model.counts())
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(contextlib.closing(AnswerLog(to, _setup(model, cfg, items, show_texts), fresh=fresh)))
        witness = JudgedAnswers(cfg, items, log, show_texts)
        stack.enter_context(contextlib.closing(witness.log))
        for job in jobs:
            if witness.has(job.key):
                check_task(log.answers[job.key], job)
                standing.count(log.answers[job.key])
        show(standing)
        if left := [job for job in jobs if not witness.has(job.key)]:
            make_attempts(model, [bench], attempts, left, log, standing, show, warn, should_stop, witness)
        counts = collections.Counter(model.counts())
        counts.subtract(before)
        found = _report(model.name, cfg, items, [job.key for job in jobs], log, witness)
        found = dataclasses.replace(found, counts={k: n for k, n in (counts + witness.requests).items() if n})
        log.finish(found.to_json(), found.markdown())
    return found


def benchmark_of(cfg: JudgedEvaluation, items: Sequence[Item]) -> Benchmark:
    """Return the items as tasks of an environment, with the limits of their answers."""
    env = ItemEnv(cfg.benchmark.name, tuple(items))
    return Benchmark(env, len(items), max_answer_tok=cfg.benchmark.max_answer_tok, thinking=True)


def _setup(model: EvaluatedModel, cfg: JudgedEvaluation, items: Sequence[Item], show_texts: bool) -> dict[str, Any]:
    """Return the settings that must be the same to resume."""
    said = "\0".join(f"{i.id}\0{m.role}\0{m.content}" for i in items for m in i.messages)
    names = [f.name for f in dataclasses.fields(cfg.benchmark) if f.name != "samples"]  # which may grow
    settings = {name: repr(getattr(cfg.benchmark, name)) for name in names}
    return {
        "model": dict(model.identity),
        "name": model.name,
        "benchmark": {"class": type(cfg.benchmark).__name__, **settings, "items": digest(said)},
        "judges": {
            "models": [judge.identity for judge in cfg.judges],
            "votes": cfg.votes,
            "temperature": cfg.judge_temperature,
            "max_tok": cfg.judge_max_tok,
        },
        "attempts": {"num": cfg.benchmark.samples, "temperature": cfg.benchmark.temperature, "seed": cfg.seed},
        "show_texts": show_texts,
    }


class JudgedAnswers:
    """Judges every answer before it is stored (`evaluation.run.Witness`)."""

    def __init__(self, cfg: JudgedEvaluation, items: Sequence[Item], answers: AnswerLog, show_texts: bool) -> None:
        self._cfg, self._items, self._answers, self._show_texts = cfg, items, answers, show_texts
        self.log = Journal(answers.folder and answers.folder / JUDGEMENTS)
        how = Asking(cfg.judge_temperature, cfg.judge_max_tok, cfg.seed)
        self.judges = JudgePanel(cfg.judges, cfg.votes, how)
        self.requests: collections.Counter[str] = collections.Counter()

    def has(self, key: Key) -> bool:
        """Return whether an answer exists with all its verdicts."""
        if not self._answers.has(key):
            return False
        verdict = self.verdict(key)
        return verdict.complete if verdict is not None else not self._answers.answers[key].turns

    def verdict(self, key: Key) -> Judged | None:
        """Return the stored verdicts on an answer; None if there are none."""
        record = self.log.get(_address(key))
        return record and Judged(**{f.name: record[f.name] for f in dataclasses.fields(Judged)})

    def kept(self, key: Key) -> Trajectory | None:
        return self._answers.answers[key] if self._show_texts and self._answers.has(key) else None

    async def look(self, trajectory: Trajectory) -> Trajectory:
        if not trajectory.lost and trajectory.turns:
            item, answer = self._items[trajectory.task.index], trajectory.turns[-1].text
            key, asks = trajectory.key, self._cfg.benchmark.asks(item, answer)
            ballots = await asyncio.gather(*(self._ballot(ask, _address(key)) for ask in asks))
            by_name = {ask.name: ballot for ask, ballot in zip(asks, ballots, strict=True)}
            judged = Judged(
                key.prompt_index,
                key.sibling,
                item.id,
                self._cfg.benchmark.facts(item, answer),
                {name: ballot.label for name, ballot in by_name.items()},
                {name: ballot.votes for name, ballot in by_name.items()},
                dict(sum((collections.Counter(ballot.faults) for ballot in ballots), collections.Counter())),
            )
            shown = (lambda text: text) if self._show_texts else digest
            said = {name: [shown(text) for text in ballot.texts] for name, ballot in by_name.items()}
            self.log.put(_address(key), dataclasses.asdict(judged) | {"answer": shown(answer), "said": said})
        return trajectory if self._show_texts else hidden(trajectory)

    async def _ballot(self, ask: Ask, address: str) -> Ballot:
        if ask.known is not None:
            return Ballot(ask.known, [], {}, [])
        read = functools.partial(read_label, field=ask.field, labels=ask.labels)
        return await self.judges.ballot(ask.messages, read, f"{address}/{ask.name}")

    async def close(self) -> None:
        self.requests.update({f"judge_{kind}": n for kind, n in self.judges.counts().items()})
        await self.judges.close()


def _address(key: Key) -> str:
    return f"{key.prompt_index}/{key.sibling}"


def hidden(trajectory: Trajectory) -> Trajectory:
    """Return the trajectory without its texts and tokens: texts are replaced by hashes."""
    none, fault = np.zeros(0, np.int32), trajectory.fault
    turns = tuple(
        dataclasses.replace(
            turn,
            text=digest(turn.text),
            prompt_ids=none,
            tokens=none,
            versions=none,
            sampler_logp=np.zeros(0, np.float32),
            experts=None,
        )
        for turn in trajectory.turns
    )
    said = fault and Fault(fault.kind, fault.stage, "hidden; it is shown with the texts", fault.retryable)
    return dataclasses.replace(trajectory, turns=turns, fault=said)


def _report(
    title: str,
    cfg: JudgedEvaluation,
    items: Sequence[Item],
    keys: Sequence[Key],
    log: AnswerLog,
    witness: JudgedAnswers,
) -> JudgedReport:
    """Return the tables, with notes on missing answers and verdicts."""
    judged = [v for key in keys if (v := witness.verdict(key)) is not None]
    found = cfg.benchmark.tables(items, judged, cfg)
    notes = list(found.notes)
    if cfg.judges:
        names = ", ".join(judge.identity for judge in cfg.judges)
        itself = " The model judges itself." if title in names.split(", ") else ""
        notes.append(f"Judged by {names}; {cfg.votes * len(cfg.judges)} vote(s) on every question.{itself}")
    faults: collections.Counter[str] = collections.Counter()
    for verdict in judged:
        faults.update(verdict.faults)
    if without := sum(not verdict.complete for verdict in judged):
        said = ", ".join(f"{n} {kind}" for kind, n in sorted(faults.items())) or "ties"
        notes.append(f"{without} answer(s) lack a verdict ({said}); the same command asks for them again.")
    if lost := sum(log.answers[key].lost or not log.answers[key].turns for key in keys if key in log.answers):
        notes.append(f"{lost} answer(s) are missing: their attempts failed.")
    return dataclasses.replace(found, title=f"{cfg.benchmark.name}: {title}", notes=notes)
