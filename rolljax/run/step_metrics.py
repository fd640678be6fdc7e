"""The metrics of a step's row, except the trainer's own."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from rolljax.envs.base import EnvSpec
from rolljax.envs.mixture import Mixture
from rolljax.metrics import ENV_PREFIX
from rolljax.sampler.client import SamplerStats
from rolljax.threads.watchdog import Watchdog
from rolljax.types import Group, Trajectory

PARTS = {
    "rollout": "rollouts",
    "update": "the update (the first of a phase is compiled)",
    "publish": "the sampler to take new weights",
    "eval": "the held-out evaluation",
    "save": "the rollouts to be written",
}
"""Parts of a step, and what is waited for in them."""


class StepTimer:
    """Measures the seconds of each part of a step, in `row`, and names the current part to the watchdog."""

    def __init__(self, watchdog: Watchdog, clock: Callable[[], float] = time.perf_counter) -> None:
        self.row: dict[str, float] = {}
        self._watchdog, self._clock = watchdog, clock
        self._start = clock()

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Around a part of the step, one of `PARTS`."""
        start = self._clock()
        with self._watchdog.waiting_for(PARTS[name]):
            yield
        key = f"time/{name}_s"
        self.row[key] = self.row.get(key, 0.0) + self._clock() - start

    def total_s(self) -> float:
        """Seconds since it was made."""
        return self._clock() - self._start


@contextlib.contextmanager
def timed(seconds: dict[str, float], name: str, since: float | None = None) -> Iterator[None]:
    """Add the seconds inside, or since `time.perf_counter()` was `since`, to those of `name`."""
    start = time.perf_counter() if since is None else since
    yield
    seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start


def trajectories_row(groups: Sequence[Group], version: int) -> dict[str, float]:
    """Statistics of a step's trajectories, trained by policy version `version`."""
    trajectories = [t for g in groups for t in g.trajectories]
    alive = [t for t in trajectories if t.status != "failed"]
    rewards = np.array([t.reward for t in alive]) if alive else np.zeros(1)
    own = sorted({name for t in alive for name in t.metrics})
    return {
        **{f"{ENV_PREFIX}{name}": _mean(t.metrics.get(name, 0.0) for t in alive) for name in own},
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/success_frac": _mean(t.success for t in alive),
        "rollout/len_tok": _mean(t.num_sampled_tok for t in alive),
        "rollout/turns_n": _mean(len(t.turns) for t in alive),
        "rollout/trunc_frac": _mean(t.status == "truncated" for t in trajectories),
        "rollout/fail_frac": _mean(t.status == "failed" for t in trajectories),
        **ages_row("stale/", token_ages(alive, version)),
    }


def env_row(groups: Sequence[Group]) -> dict[str, float]:
    """Seconds that the episodes of a step, which were played for it, spent in their environments."""
    return {"time/env_s": max((t.env_s for g in groups for t in g.trajectories), default=0.0)}


def domains_row(trained: Sequence[Group], every: Sequence[Group], env: EnvSpec) -> dict[str, float]:
    """Return the same metrics for each domain of a mixture; otherwise nothing. A domain without a trajectory in the
    step has no means.

    Args:
      trained: the groups that the step took. every: these, and the groups that were dropped since the step before.
    """
    if not isinstance(env, Mixture):
        return {}
    row: dict[str, float] = {}
    for name in env.specs:
        alive = [t for g in every if g.task.env == name for t in g.trajectories if t.status != "failed"]
        row[f"domain/{name}/trained_n"] = float(sum(g.task.env == name for g in trained))
        if alive:
            row[f"domain/{name}/reward_mean"] = _mean(t.reward for t in alive)
            row[f"domain/{name}/success_frac"] = _mean(t.success for t in alive)
            row[f"domain/{name}/len_tok"] = _mean(t.num_sampled_tok for t in alive)
    return row


def heldout_row(trajectories: Sequence[Trajectory], env: EnvSpec) -> dict[str, float]:
    """Return the metrics of a held-out evaluation: the mean reward of the trajectories that did not fail (NaN if all
    failed), of all and of each domain of a mixture."""
    alive = [t for t in trajectories if t.status != "failed"]
    row = {"heldout/reward_mean": float(np.mean([t.reward for t in alive])) if alive else float("nan")}
    if isinstance(env, Mixture):
        for name in env.specs:
            if own := [t.reward for t in alive if t.task.env == name]:
                row[f"domain/{name}/heldout_mean"] = float(np.mean(own))
    return row


def ages_row(prefix: str, counts: np.ndarray) -> dict[str, float]:
    """Return mean, median, 99th percentile and maximum of ages in versions.

    Args:
      prefix: of the metrics' names. counts: how many items have each age; int `[A]`, all 0 if there are none.
    """
    ages, weights = np.arange(len(counts)), counts if counts.any() else np.eye(1, len(counts))[0]
    p50, p99 = np.percentile(ages, (50, 99), weights=weights, method="inverted_cdf")
    return {
        f"{prefix}mean_ver": float(np.average(ages, weights=weights)),
        f"{prefix}p50_ver": float(p50),
        f"{prefix}p99_ver": float(p99),
        f"{prefix}max_ver": float(ages[weights > 0][-1]),
    }


def token_ages(trajectories: Iterable[Trajectory], version: int) -> np.ndarray:
    """How many tokens that a policy sampled have each age, in versions, when they train version `version`; `[A]`."""
    found = np.zeros(1, np.int64)
    for turn in (turn for t in trajectories for turn in t.turns if (turn.versions >= 0).all()):
        counts = np.bincount(version - turn.versions, minlength=len(found))
        counts[: len(found)] += found
        found = counts
    return found


def groups_row(taken: int, kept: int, trained: int) -> dict[str, float]:
    """Return how many groups of a step were trained, and how many filters and credit dropped."""
    return {
        "groups/trained_n": trained,
        "groups/dropped_failed_n": taken - kept,
        "groups/dropped_credit_n": kept - trained,
    }


def sampler_row(before: SamplerStats, now: SamplerStats, slot_s: float) -> dict[str, float]:
    """What the sampler did between two looks at its counters.

    Args:
      slot_s: seconds between them, times the sampler's slots.
    """
    did = {name: value - getattr(before, name) for name, value in dataclasses.asdict(now).items()}
    return {
        "sampler/prefill_tok": did["prefill_tok"],
        "sampler/reuse_frac": did["reused_tok"] / max(did["reused_tok"] + did["prefill_tok"], 1),
        "sampler/prefills_n": did["prefills"],
        "sampler/dispatches_n": did["dispatches"],
        "sampler/slot_frac": did["busy_slot_steps"] / max(did["slot_steps"], 1),
        "sampler/idle_frac": 1 - min(did["held_s"] / max(slot_s, 1e-9), 1.0),
        "sampler/preempt_n": did["preemptions"],
        "sampler/abort_n": did["aborted"],
        **({"sampler/abort_len_tok": did["aborted_tok"] / did["aborted"]} if did["aborted"] else {}),
        "time/prefill_s": did["prefill_s"],
        "time/decode_s": did["generate_s"],
        "time/schedule_s": did["host_s"],
    }


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return float(np.mean(found)) if found else 0.0
