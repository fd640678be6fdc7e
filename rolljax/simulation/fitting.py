"""Timings of a real run, from the records that it left."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rolljax import reading
from rolljax.errors import CheckpointError, ConfigError
from rolljax.fields import Fields
from rolljax.recipe import Recipe
from rolljax.simulation.timings import Distribution, EngineTimings, EnvTimings, Timings, TrainerTimings
from rolljax.storage import journal
from rolljax.storage.layout import METRICS, rollouts_file
from rolljax.trainer.mesh import Colocated

MAX_VALUES = 2000
"""Recorded numbers that a distribution keeps."""
AMOUNTS = (
    "stale/start_max_ver",
    "sampler/dispatches_n",
    "sampler/prefills_n",
    "time/decode_s",
    "time/schedule_s",
    "time/rollout_s",
    "time/prefill_s",
    "time/update_s",
    "tput/sample_tok_s",
    "train/tokens_n",
)
"""Metrics that every step which samples has."""
PAUSES = ("time/publish_s", "time/save_s")
"""Metrics that are 0 where they are missing."""
Row = Mapping[str, Any]


def fitted(folder: Path, recipe: Recipe) -> Timings:
    """Return the timings of the run in `folder`, for `recipe`, which may be another than the run's.

    Lengths, turns and seconds of environments are from its rollouts, seconds of sampler and trainer from its metrics;
    the first step, which compiles, is left out. In an asynchronous run, decoding continued during updates: the seconds
    of both then include the slow-down by the other.

    Raises:
      ConfigError: the folder has no usable steps.
      CheckpointError: a record is damaged; the error names the file, the line and the field.
    """
    names = {p.name for p in recipe.phases if p.samples}
    rows = [r for r in _records(folder / METRICS, lambda line: _step(line, names)) if r]
    steps = {r["step"]: r for r in rows[1:]}
    files = [rollouts_file(folder, step) for step in steps]
    every = [t for f in files if f.is_file() for t in _records(f, _trajectory)]
    trajectories = [t for t in every if t["status"] != "failed" and t["answers"]]
    if not steps or not trajectories:
        raise ConfigError(
            "has no steps with rollouts after the first one",
            setting="--run",
            value=str(folder),
            remedy="a run of at least two steps in a phase that samples",
        )
    groups: dict[tuple[int, int], list[Row]] = {}
    for t in trajectories:
        groups.setdefault(t["group"], []).append(t)
    at_once = any(r["stale/start_max_ver"] > 0 for r in steps.values())
    answers = [[tokens for t in group for tokens in t["answers"]] for group in groups.values()]
    later = [tokens for t in trajectories for tokens in t["prompts"][1:]]
    return Timings(
        answer_tok=_in_groups(answers),
        prompt_tok=_recorded([t["prompts"][0] for t in trajectories]),
        observation_tok=_recorded(later) if later else Distribution(),
        turns=_in_groups([[len(t["answers"]) for t in group] for group in groups.values()]),
        engine=_engine(list(steps.values()), recipe),
        env=EnvTimings(step_s=_recorded(_env_step_s(every, trajectories)), alike=True),
        trainer=_trainer(list(steps.values())),
        shared_devices=isinstance(recipe.placement, Colocated) and not at_once,
        solved_frac=float(np.mean([t["success"] for t in trajectories])),
        no_signal_frac=float(np.mean([len({t["reward"] for t in group}) == 1 for group in groups.values()])),
    )


def _records(path: Path, read: Callable[[Fields], Row]) -> list[Row]:
    """Parse each line of a file of JSON Lines with `read`. Raises as `fitted` does."""
    try:
        data = reading.read_bytes(path)
    except OSError as e:
        why = reading.reason(e)
        raise ConfigError(f"cannot be read: {why}", setting="--run", value=str(path), remedy="name another run") from e

    def refuse(line: int, error: Exception) -> CheckpointError:
        remedy = "delete the line in a copy of the run, or name another run"
        return CheckpointError(f"{path}, line {line} is damaged: {error}; {remedy}")

    return journal.parse(data, lambda record: read(Fields(record)), refuse).values


def _step(line: Fields, phases: Collection[str]) -> Row:
    """Return the used metrics of a step; empty for a step of another phase."""
    if line.text("phase") not in phases:
        return {}
    amounts = {name: line.finite(name, low=0) for name in AMOUNTS}
    return amounts | {name: line.finite(name, 0, low=0) for name in PAUSES} | {"step": line.whole("step", low=0)}


def _trajectory(line: Fields) -> Row:
    """Return the used fields of a trajectory. group: key. prompts, answers: tokens of each turn. fault: kind."""
    key, turns, status = line.inside("key"), line.all_inside("turns"), line.text("status")
    return {
        "group": (key.whole("stream"), key.whole("prompt_index")),
        "status": status,
        "prompts": [len(turn.items("prompt_ids")) for turn in turns],
        "answers": [len(turn.items("tokens")) for turn in turns],
        "env_s": line.finite("env_s", low=0),
        "reward": line.finite("reward"),
        "success": line.flag("success"),
        "fault": line.inside("fault").text("kind") if status == "failed" else "",
    }


def _recorded(values: Sequence[float] | np.ndarray) -> Distribution:
    """Return the recorded values, thinned evenly; a single value if all are equal."""
    if len(set(values)) == 1:
        return Distribution(center=float(values[0]))
    return Distribution("recorded", 1.0, values=_thinned(values))


def _thinned(values: Sequence[float] | np.ndarray) -> tuple[float, ...]:
    """Return at most `MAX_VALUES` evenly spaced values in order."""
    kept = np.sort(values)[np.linspace(0, len(values) - 1, min(len(values), MAX_VALUES)).astype(int)]
    return tuple(float(v) for v in kept)


def _in_groups(groups: Sequence[Sequence[float]]) -> Distribution:
    """Fit positive values of groups: a factor of the group times a factor of the sibling.

    The variance of the logarithms is divided between the two as in a random-effects analysis of variance. If groups do
    not differ, all values form one distribution.
    """
    every = [value for group in groups for value in group]
    logs = [np.log(np.maximum(group, 1.0)) for group in groups if len(group) > 1]
    if len(logs) < 2:
        return _recorded(every)
    means, sizes = np.array([x.mean() for x in logs]), np.array([len(x) for x in logs])
    within = sum(((x - x.mean()) ** 2).sum() for x in logs) / (sizes - 1).sum()
    noise = float((within / sizes).mean())  # of a group's mean
    between = float(means.var(ddof=1)) - noise
    if between < 1e-9:  # nothing but rounding
        return _recorded(every)
    shares = np.exp((means - means.mean()) * np.sqrt(between / (between + noise)))
    apart = np.concatenate([(x - x.mean()) * np.sqrt(len(x) / (len(x) - 1)) for x in logs])
    return dataclasses.replace(
        _recorded(np.exp(apart)), center=float(np.exp(means.mean())), group_values=_thinned(shares)
    )


def _env_step_s(every: Sequence[Row], trajectories: Sequence[Row]) -> list[float]:
    """Return the seconds per action of each episode. An episode with a failed environment counts its time over the mean
    number of actions."""
    turns = float(np.mean([len(t["answers"]) for t in trajectories]))
    failed = [t["env_s"] / turns for t in every if t["status"] == "failed" and t["fault"] == "env"]
    return [t["env_s"] / len(t["answers"]) for t in trajectories] + failed


def _line(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Intercept and slope of the straight line through the points, neither below 0."""
    if len(x) > 1 and np.ptp(x) > 0:
        slope, start = np.polyfit(x, y, 1)
        if slope >= 0 and start >= 0:
            return float(start), float(slope)
        if start < 0:
            return 0.0, float(x @ y / (x @ x))
    return float(y.mean()), 0.0


def _engine(rows: Sequence[Row], recipe: Recipe) -> EngineTimings:
    """Fit the seconds of a decode step over its number of sequences, and of a prefill program of the size in the
    settings."""
    per_dispatch = recipe.sampler.steps_per_dispatch
    steps = np.array([max(r["sampler/dispatches_n"], 1.0) * per_dispatch for r in rows])
    seconds = np.array([r["time/decode_s"] + r["time/schedule_s"] for r in rows])
    sampled = np.array([r["tput/sample_tok_s"] * r["time/rollout_s"] for r in rows])
    step_s, sequence_s = _line(sampled / steps, seconds / steps)
    prefill_call_s = sum(r["time/prefill_s"] for r in rows) / max(sum(r["sampler/prefills_n"] for r in rows), 1.0)
    sizes = tuple(sorted({*recipe.sampler.chunk_sizes, recipe.sampler.prefill_chunk}))
    return EngineTimings(step_s=step_s, sequence_s=sequence_s, prefill_call_s=prefill_call_s, prefill_sizes=sizes)


def _trainer(rows: Sequence[Row]) -> TrainerTimings:
    tokens, seconds = (np.array([r[name] for r in rows]) for name in ("train/tokens_n", "time/update_s"))
    step_s, token_s = _line(tokens, seconds)
    publish_s, save_s = (float(np.mean([r[name] for r in rows])) for name in PAUSES)
    return TrainerTimings(step_s, token_s, publish_s, save_s=save_s)
