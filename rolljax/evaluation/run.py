"""An evaluation from beginning to end: tasks, episodes, answers on disk, the report."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rolljax.concurrency.event_loop import EventLoop
from rolljax.concurrency.waits import Watchdog
from rolljax.console.progress import ProgressBar
from rolljax.envs.base import EnvSpec
from rolljax.envs.catalog import ref_of
from rolljax.envs.pool import open_pool
from rolljax.errors import ConfigError, HangError, InfraError
from rolljax.evaluation.answers import AnswerLog
from rolljax.evaluation.models import EvaluatedModel
from rolljax.evaluation.report import EvaluationReport, FinalAnswer, MakesTable, ReportTable, report, score_task
from rolljax.evaluation.settings import Attempts, Benchmark
from rolljax.rewards.base import RewardContext
from rolljax.rewards.scoring import Scoring
from rolljax.rollout.domain_rewards import open_rewards
from rolljax.rollout.episodes import EpisodeRollouts
from rolljax.storage.layout import VERDICTS
from rolljax.types import EVAL_STREAM, Key, Task, Trajectory

ALL_FAILED = 32
"""Number of failed attempts, without a single answer, after which an evaluation ends."""


@dataclasses.dataclass
class Standing:
    """The progress of an evaluation."""

    total: int
    """Number of all attempts."""
    answers: int = 0
    """Number of attempts with an answer."""
    right: int = 0
    """Number of right ones."""
    failed: int = 0
    scored: bool = True
    """Whether answers are already scored as right or wrong; False for judged answers, whose verdicts come later."""

    def count(self, trajectory: Trajectory) -> None:
        """Count a finished attempt."""
        self.failed += trajectory.lost
        self.answers += not trajectory.lost
        self.right += trajectory.success and not trajectory.lost

    def describe(self) -> str:
        """Return a short summary of the answers so far."""
        if not self.answers and not self.failed:
            return "compiling, or waiting for the first"
        said = f"{self.right / self.answers:.1%} solved" if self.answers else "no answer"
        said = f"{self.answers} judged" if not self.scored and self.answers else said
        return said + (f", {self.failed} failed" if self.failed else "")

    def show(self, bar: ProgressBar, model: str) -> None:
        """Show the progress. model: the name of the evaluated model."""
        over, text = self.answers + self.failed, self.describe()
        line = f"{model}: {over} of {self.total} attempts, {text}"
        bar.show(over, self.total, f"{model}: {text}", line, now=over == self.total)


@dataclasses.dataclass(frozen=True)
class EvaluationJob:
    """One attempt at one task."""

    benchmark: int
    task: Task
    key: Key


class Witness(Protocol):
    """Sees every answer before it is kept. Used from the event loop of the episodes."""

    def kept(self, key: Key) -> Trajectory | None:
        """Return an existing answer, which need not be requested again; None if there is none."""

    async def look(self, trajectory: Trajectory) -> Trajectory:
        """Return the answer in the form to store.

        Raises:
          RolljaxError: the evaluation cannot continue.
        """

    async def close(self) -> None:
        """Release resources that belong to the event loop."""


def evaluate(
    model: EvaluatedModel,
    benchmarks: Sequence[Benchmark],
    attempts: Attempts | None = None,
    *,
    to: str | Path | None = None,
    fresh: bool = False,
    show: Callable[[Standing], None] = lambda _: None,
    warn: Callable[[str], None] = lambda _: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> EvaluationReport:
    """Evaluate a model on the tasks of one or more environments, and report the results.

    The samples of an attempt depend only on its seed, its task and its number, so that an interrupted evaluation
    resumes with the answers it would have had (behind an endpoint, if its server respects seeds).

    Args:
      model: an open model. to: a folder for the answers and the report; an unfinished evaluation there resumes, a
        finished one is reported again. fresh: delete it first.
      show: called with the progress. warn: called with messages for the user.
      should_stop: polled all the time; True ends the evaluation, and existing answers stay in `to`.

    Raises:
      Stopped: `should_stop` said so.
      ConfigError: settings that cannot be used, or a folder with another evaluation. DataError: there are no tasks.
      InfraError: no attempt has an answer. HangError: nothing moved for `Attempts.stall_s`.
    """
    attempts, tasks, before = attempts or Attempts(), _tasks(benchmarks), collections.Counter(model.counts())
    jobs = jobs_of(tasks, attempts, model.version)
    standing = Standing(len(jobs))
    with contextlib.closing(AnswerLog(to, _setup(model, benchmarks, attempts), fresh=fresh)) as log:
        for job in jobs:
            if log.has(job.key):
                check_task(log.answers[job.key], job)
                standing.count(log.answers[job.key])
        show(standing)
        if left := [job for job in jobs if not log.has(job.key)]:
            make_attempts(model, benchmarks, attempts, left, log, standing, show, warn, should_stop)
        counts = collections.Counter(model.counts())
        counts.subtract(before)
        found = _report(model.name, benchmarks, attempts, jobs, log, {k: n for k, n in counts.items() if n})
        log.finish(found.to_json(), found.markdown())
    return found


def _tasks(benchmarks: Sequence[Benchmark]) -> list[list[Task]]:
    names = [b.env.name for b in benchmarks]
    if not names:
        raise ConfigError("are none", setting="benchmarks", remedy="name an environment at least")
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                "is the name of two environments: their rows would look the same",
                setting="--env",
                value=name,
                remedy="evaluate them one after the other, or give one another name (Questions.domain)",
            )
    return [b.tasks() for b in benchmarks]


def _setup(model: EvaluatedModel, benchmarks: Sequence[Benchmark], attempts: Attempts) -> dict[str, Any]:
    """Return the settings that must be the same to resume."""
    sampling = ("num", "temperature", "top_p", "top_k", "min_p", "seed")
    return {
        "model": dict(model.identity),
        "name": model.name,
        "benchmarks": [
            {
                "env": b.env.name,
                "ref": ref_of(b.env),
                "num_tasks": b.num_tasks,
                "held_out_frac": b.held_out_frac,
                "max_answer_tok": b.max_answer_tok,
                "rollout": dataclasses.asdict(b.rollout),
                **({"reward": re.sub(r" at 0x[0-9a-f]+", "", repr(b.reward))} if b.reward else {}),
            }
            for b in benchmarks
        ],
        "attempts": {name: getattr(attempts, name) for name in sampling},
    }


def jobs_of(tasks: Sequence[Sequence[Task]], attempts: Attempts, version: int) -> list[EvaluationJob]:
    """Return every attempt, task by task. Keys, and so the samples, equal those of a run's own evaluation at this
    version."""
    prompt_index, jobs = version * sum(map(len, tasks)), []
    for benchmark, every in enumerate(tasks):
        for task in every:
            jobs += [EvaluationJob(benchmark, task, Key(EVAL_STREAM, prompt_index, i)) for i in range(attempts.num)]
            prompt_index += 1
    return jobs


def check_task(answer: Trajectory, job: EvaluationJob) -> None:
    """Raise `ConfigError` for a kept answer that belongs to another task than its number has now."""
    if answer.task.id != job.task.id:
        raise ConfigError(
            f"has an answer to another task than number {job.key.prompt_index} is now: were the environment's files "
            "changed?",
            setting="--to",
            remedy="name another folder, or start over with --fresh",
        )


def make_attempts(
    model: EvaluatedModel,
    benchmarks: Sequence[Benchmark],
    attempts: Attempts,
    jobs: Sequence[EvaluationJob],
    log: AnswerLog,
    standing: Standing,
    show: Callable[[Standing], None],
    warn: Callable[[str], None],
    should_stop: Callable[[], bool],
    witness: Witness | None = None,
) -> None:
    """Make the attempts `jobs`, and put the results into the log; for the rest see `evaluate`."""
    with contextlib.ExitStack() as stack:
        pools = {i: open_pool(benchmarks[i].pool, benchmarks[i].env) for i in sorted({job.benchmark for job in jobs})}
        for pool in pools.values():
            stack.callback(pool.close)
        verdicts = str(log.folder / VERDICTS) if log.folder else ""
        scorings = {i: _scoring(benchmarks[i], attempts, verdicts) for i in pools}
        rollouts = {i: model.rollouts(benchmarks[i], pool, attempts, scorings[i]) for i, pool in pools.items()}
        watchdog = Watchdog(warn)
        watchdog.watch(*model.inboxes(), *(inbox for pool in pools.values() for inbox in pool.inboxes))
        watchdog.start()
        stack.callback(watchdog.close)
        loop = EventLoop(should_stop, watchdog)
        stack.callback(loop.close)
        stack.callback(lambda: loop.run(model.close()))
        stack.callback(lambda: [loop.run(scoring.close()) for scoring in scorings.values() if scoring])
        if witness is not None:
            stack.callback(lambda: loop.run(witness.close()))

        def put(trajectory: Trajectory) -> None:
            log.add(trajectory)
            standing.count(trajectory)
            show(standing)
            if error := model.fatal():
                raise error
            if not standing.answers and standing.failed >= min(ALL_FAILED, standing.total):
                raise InfraError(f"every attempt failed; the last one: {trajectory.fault}", stage="evaluation")

        loop.run(loop.within(_attempt_all(rollouts, jobs, attempts, put, witness), "answers", math.inf))


async def _attempt(rollouts: EpisodeRollouts, job: EvaluationJob, witness: Witness | None) -> Trajectory:
    """Make one attempt; return it in the form to store."""
    found = None if witness is None else witness.kept(job.key)
    if found is None:
        found = await rollouts.trajectory(job.task, job.key)
    return found if witness is None else await witness.look(found)


def _scoring(benchmark: Benchmark, attempts: Attempts, verdicts: str) -> Scoring | None:
    around = RewardContext(benchmark.env, attempts.seed, verdicts)
    return open_rewards(benchmark.reward, benchmark.domains, around, attempts.stall_s)


async def _attempt_all(
    rollouts: dict[int, EpisodeRollouts],
    jobs: Sequence[EvaluationJob],
    attempts: Attempts,
    put: Callable[[Trajectory], None],
    witness: Witness | None,
) -> None:
    """Make all attempts, `attempts.concurrency` at a time, and pass each on when it ends."""
    waiting = list(reversed(jobs))
    running: set[asyncio.Future[Trajectory]] = set()
    try:
        while waiting or running:
            while waiting and len(running) < attempts.concurrency:
                job = waiting.pop()
                running.add(asyncio.ensure_future(_attempt(rollouts[job.benchmark], job, witness)))
            done, _ = await asyncio.wait(running, timeout=attempts.stall_s, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                raise HangError(f"no answer became complete for {attempts.stall_s:.0f} s ({len(running)} under way)")
            for future in sorted(done, key=lambda f: f.exception() is not None):  # the results of the others are kept
                put(future.result())
                running.discard(future)
    finally:
        for future in running:
            future.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def _report(
    title: str,
    benchmarks: Sequence[Benchmark],
    attempts: Attempts,
    jobs: Sequence[EvaluationJob],
    log: AnswerLog,
    counts: Mapping[str, int],
) -> EvaluationReport:
    by_task: dict[tuple[int, int], list[Trajectory]] = {}
    for job in jobs:
        by_task.setdefault((job.benchmark, job.key.prompt_index), []).append(log.answers[job.key])
    every = [[log.answers[job.key] for job in jobs if job.benchmark == i] for i in range(len(benchmarks))]
    votes = [_vote(b.env, tried) for b, tried in zip(benchmarks, every, strict=True)]
    scores = [
        score_task(prompt_index, tried, attempts, votes[index], benchmarks[index].env.category(tried[0].task))
        for (index, prompt_index), tried in by_task.items()
    ]
    found = report(title, scores, attempts, counts, [log.answers[job.key] for job in jobs])
    return dataclasses.replace(found, tables=_tables(benchmarks, attempts, jobs, log))


def _tables(
    benchmarks: Sequence[Benchmark], attempts: Attempts, jobs: Sequence[EvaluationJob], log: AnswerLog
) -> list[ReportTable]:
    """Return the tables of the environments that add one to the report."""
    tables = []
    for i, benchmark in enumerate(benchmarks):
        if isinstance(benchmark.env, MakesTable):
            keys = [job.key for job in jobs if job.benchmark == i]
            tables.append(benchmark.env.evaluation_table([log.answers[key] for key in keys], keys, attempts))
    return tables


def _vote(env: EnvSpec, tried: Sequence[Trajectory]) -> FinalAnswer | None:
    """Return how answers of an environment are counted; None if none of its tasks has countable answers."""
    read = any(env.final_answer(t.task, t.turns[-1].text) is not None for t in tried if t.turns)
    return env.final_answer if read else None
