"""The groups of a step, the report of its metrics, and the metrics that the loop adds."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from rolljax.concurrency.waits import Watchdog
from rolljax.envs.base import EnvSpec
from rolljax.envs.mixture import Mixture
from rolljax.envs.pool.blame import SET_ASIDE
from rolljax.metrics import ENV_PREFIX, MetricsReport
from rolljax.run.consumed import ConsumedStep
from rolljax.sampler.client import SamplerStats
from rolljax.types import Group, Key, SamplerGap, TokenColumn, Trajectory

PARTS = {
    "rollout": "rollouts",
    "update": "the update (the first of a phase is compiled)",
    "publish": "the sampler to take new weights",
    "eval": "the held-out evaluation",
    "save": "the rollouts to be written",
}
"""Parts of a step -> the work that the loop waits for in them."""


@dataclasses.dataclass(frozen=True)
class StepGroups:
    """The groups of a step."""

    trained: list[Group]
    """Groups to train, in the order of their prompt indices."""
    start_ages: list[int]
    """Ages of the trained groups in policy versions."""
    dropped: list[Group]
    """Groups without a signal, dropped since the step before."""
    waits_s: list[float]
    """Seconds between each group's completion and this step."""
    logged: ConsumedStep | None = None
    """The line of the log that this step was read from; None if its groups were played."""
    kept: list[list[Trajectory]] = dataclasses.field(default_factory=list)
    """The trajectories to train on, by group, without groups and trajectories that filters left out
    (`GroupFilters`)."""

    def with_columns(self, columns: Mapping[Key, Mapping[str, TokenColumn]]) -> StepGroups:
        """Return the same groups with training's numbers for each token, for the record."""
        return dataclasses.replace(self, trained=[_with_columns(g, columns) for g in self.trained])

    @property
    def all(self) -> list[Group]:
        """Every group that was completed for the step."""
        return self.trained + self.dropped


def _with_columns(group: Group, columns: Mapping[Key, Mapping[str, TokenColumn]]) -> Group:
    trajectories = (dataclasses.replace(t, trained=columns.get(t.key)) for t in group.trajectories)
    return dataclasses.replace(group, trajectories=tuple(trajectories))


class StepReport(MetricsReport):
    """Collects the metrics of a step. It measures the seconds of each part, and names the current part to the
    watchdog."""

    def __init__(self, watchdog: Watchdog, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__()
        self._watchdog, self._clock = watchdog, clock
        self._start = clock()

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Measure a part of the step, one of `PARTS`."""
        start = self._clock()
        with self._watchdog.waiting_for(PARTS[name]):
            yield
        self.add(f"time/{name}_s", self._clock() - start)

    def total_s(self) -> float:
        """Return the seconds since the step began."""
        return self._clock() - self._start


@contextlib.contextmanager
def timed(seconds: dict[str, float], name: str, since: float | None = None) -> Iterator[None]:
    """Add the seconds inside, or since `time.perf_counter()` was `since`, to those of `name`."""
    start = time.perf_counter() if since is None else since
    yield
    seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start


def add_groups(report: MetricsReport, step: StepGroups, num_trained: int, version: int, env: EnvSpec) -> None:
    """Add the metrics of a step's groups, and of their trajectories.

    Args:
      num_trained: groups with a token that was trained. version: of the policy that was trained.
    """
    report.add("groups/trained_n", num_trained)
    report.add("groups/dropped_failed_n", len(step.trained) - len(step.kept))
    report.add("groups/dropped_credit_n", len(step.kept) - num_trained)
    add_trajectories(report, step.all, version)
    add_faults(report, step.all)
    add_domains(report, step.trained, step.all, env)
    if step.logged is None:  # else their episodes were played by another run
        report.add("time/env_s", *[t.env_s for g in step.all for t in g.trajectories] or [0.0])


def add_trajectories(report: MetricsReport, groups: Sequence[Group], version: int) -> None:
    """Add the metrics of a step's trajectories, trained by policy version `version`."""
    trajectories = [t for g in groups for t in g.trajectories]
    alive = [t for t in trajectories if t.status != "failed"]
    rewards = [t.reward for t in alive] or [0.0]
    for name in sorted({name for t in alive for name in t.metrics}):
        report.add(f"{ENV_PREFIX}{name}", *(t.metrics.get(name, 0.0) for t in alive))
    report.add("reward/mean", *rewards)
    report.add("reward/std", float(np.std(rewards)))
    report.add("reward/success_frac", *[t.success for t in alive] or [False])
    report.add("rollout/len_tok", *[t.num_sampled_tok for t in alive] or [0])
    for name, solved in (("right", True), ("wrong", False)):
        if lengths := [t.num_sampled_tok for t in alive if t.success == solved]:
            report.add(f"rollout/{name}_len_tok", *lengths)
    report.add("rollout/turns_n", *[len(t.turns) for t in alive] or [0])
    report.add("rollout/trunc_frac", *[t.status == "truncated" for t in trajectories] or [False])
    report.add("rollout/fail_frac", *[t.status == "failed" for t in trajectories] or [False])
    report.add_histogram("stale/", token_ages(alive, version))


def add_faults(report: MetricsReport, groups: Sequence[Group]) -> None:
    """Add the counts of episodes by kind of fault, of restarts, loops, tampering, and cancelled episodes."""
    every = [t for g in groups for t in g.trajectories]
    kinds = Counter(t.fault.kind for t in every if t.fault)
    for kind in ("infra", "env", "agent", "limit"):
        report.add(f"faults/{kind}_n", kinds[kind])
    report.add("faults/set_aside_n", sum(t.fault is not None and t.fault.stage == SET_ASIDE for t in every))
    report.add("faults/retried_n", sum(t.attempts - 1 for t in every))
    report.add("faults/looped_n", sum(t.loops for t in every))
    report.add("faults/tampered_n", sum(t.tampered for t in every))
    report.add("rollout/cancelled_n", sum(g.cancelled for g in groups))


def add_domains(report: MetricsReport, trained: Sequence[Group], every: Sequence[Group], env: EnvSpec) -> None:
    """Add the same metrics for each domain of a mixture; otherwise nothing. A domain without a trajectory in the step
    has no means.

    Args:
      trained: the groups that the step took. every: these, and the groups that were dropped since the step before.
    """
    if not isinstance(env, Mixture):
        return
    for name in env.specs:
        alive = [t for g in every if g.task.env == name for t in g.trajectories if t.status != "failed"]
        report.add(f"domain/{name}/trained_n", float(sum(g.task.env == name for g in trained)))
        report.add(f"domain/{name}/reward_mean", *(t.reward for t in alive))
        report.add(f"domain/{name}/success_frac", *(t.success for t in alive))
        report.add(f"domain/{name}/len_tok", *(t.num_sampled_tok for t in alive))


def add_heldout(report: MetricsReport, trajectories: Sequence[Trajectory], env: EnvSpec) -> None:
    """Add the metrics of a held-out evaluation: the mean reward of the trajectories that did not fail (NaN if all
    failed), of all and of each domain of a mixture."""
    report.add("heldout/reward_mean", mean_reward(trajectories))
    for name in env.specs if isinstance(env, Mixture) else ():
        report.add(f"domain/{name}/heldout_mean", *(t.reward for t in trajectories if counts_in(t, name)))


def counts_in(t: Trajectory, domain: str) -> bool:
    """Return whether a trajectory counts in a domain's mean: it is one of the domain's, and did not fail."""
    return t.task.env == domain and t.status != "failed"


def mean_reward(trajectories: Sequence[Trajectory]) -> float:
    """Return the mean reward of the trajectories that did not fail; NaN if all failed."""
    rewards = [t.reward for t in trajectories if t.status != "failed"]
    return float(np.mean(rewards)) if rewards else float("nan")


def token_ages(trajectories: Iterable[Trajectory], version: int) -> np.ndarray:
    """Count the sampled tokens by age, in versions, when they train version `version`; `[A]`."""
    found = np.zeros(1, np.int64)
    for turn in (turn for t in trajectories for turn in t.turns if (turn.versions >= 0).all()):
        counts = np.bincount(version - turn.versions, minlength=len(found))
        counts[: len(found)] += found
        found = counts
    return found


def add_gaps(report: MetricsReport, gaps: Mapping[str, SamplerGap]) -> None:
    """Add the distance of each sampler from the trainer."""
    for name, gap in gaps.items():
        report.add(f"sampler/{name}/gap_nat", gap.mean_nat)
        report.add(f"sampler/{name}/trained_tok_n", float(gap.tokens))


def add_sampler(report: MetricsReport, before: SamplerStats, now: SamplerStats, slot_s: float) -> None:
    """Add the sampler's work between two readings of its counters.

    Args:
      slot_s: seconds between them, times the sampler's slots.
    """
    did = {name: value - getattr(before, name) for name, value in dataclasses.asdict(now).items()}
    report.add("sampler/prefill_tok", did["prefill_tok"])
    report.add("sampler/reuse_frac", did["reused_tok"] / max(did["reused_tok"] + did["prefill_tok"], 1))
    report.add("sampler/prefills_n", did["prefills"])
    report.add("sampler/dispatches_n", did["dispatches"])
    report.add("sampler/steps_n", did["steps"])
    if did["drafted_tok"]:
        report.add("sampler/accept_frac", did["accepted_tok"] / did["drafted_tok"])
    report.add("sampler/slot_frac", did["busy_slot_steps"] / max(did["slot_steps"], 1))
    report.add("sampler/idle_frac", 1 - min(did["held_s"] / max(slot_s, 1e-9), 1.0))
    report.add("sampler/preempt_n", did["preemptions"])
    report.add("sampler/abort_n", did["aborted"])
    if did["aborted"]:
        report.add("sampler/abort_len_tok", did["aborted_tok"] / did["aborted"])
    report.add("time/prefill_s", did["prefill_s"])
    report.add("time/decode_s", did["generate_s"])
    report.add("time/schedule_s", did["host_s"])
