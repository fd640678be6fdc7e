"""Timings of a real run, from the records that it left."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rolljax import reading
from rolljax.errors import ConfigError
from rolljax.recipe import Recipe
from rolljax.run.layout import METRICS, rollouts_file
from rolljax.simulation.timings import Distribution, EngineTimings, EnvTimings, Timings, TrainerTimings
from rolljax.trainer.mesh import Colocated

MAX_VALUES = 2000
"""Recorded numbers that a distribution keeps."""
Row = Mapping[str, Any]


def fitted(folder: Path, recipe: Recipe) -> Timings:
    """The timings of the run in `folder`, for `recipe`, which may be another than the run's.

    Lengths, turns and seconds of environments are from its rollouts, seconds of sampler and trainer from its metrics;
    the first step, which compiles, is left out. Of a run that trained older samples, decoding went on during updates:
    what both take is what they took beside each other.

    Raises:
      ConfigError: there is nothing to go by.
    """
    names = {p.name for p in recipe.phases if p.samples}
    rows = [r for r in _lines(folder / METRICS) if r["phase"] in names]
    steps = {int(r["step"]): r for r in rows[1:]}
    files = [rollouts_file(folder, step) for step in steps]
    every = [t for f in files if f.is_file() for t in _lines(f)]
    trajectories = [t for t in every if t["status"] != "failed" and t["turns"]]
    if not steps or not trajectories:
        raise ConfigError(
            "has no steps with rollouts behind the first one",
            setting="--run",
            value=str(folder),
            remedy="a run of at least two steps in a phase that samples",
        )
    groups: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for t in trajectories:
        groups.setdefault((t["key"]["stream"], t["key"]["draw"]), []).append(t)
    at_once = any(r["stale/start_max_ver"] > 0 for r in steps.values())
    answers = [[len(turn["tokens"]) for t in group for turn in t["turns"]] for group in groups.values()]
    later = [len(turn["prompt_ids"]) for t in trajectories for turn in t["turns"][1:]]
    return Timings(
        answer_tok=_in_groups(answers),
        prompt_tok=_recorded([len(t["turns"][0]["prompt_ids"]) for t in trajectories]),
        observation_tok=_recorded(later) if later else Distribution(),
        turns=_in_groups([[len(t["turns"]) for t in group] for group in groups.values()]),
        engine=_engine(list(steps.values()), recipe),
        env=EnvTimings(step_s=_recorded(_env_step_s(every, trajectories)), alike=True),
        trainer=_trainer(list(steps.values())),
        shared_devices=isinstance(recipe.placement, Colocated) and not at_once,
        solved_frac=float(np.mean([t["success"] for t in trajectories])),
        no_signal_frac=float(np.mean([len({t["reward"] for t in group}) == 1 for group in groups.values()])),
    )


def _lines(path: Path) -> list[dict[str, Any]]:
    try:
        return [dict(reading.parse(line)) for line in reading.read_bytes(path).splitlines()]
    except (OSError, ValueError, TypeError) as e:
        raise ConfigError(f"cannot be read: {e}", setting="--run", value=str(path), remedy="name another run") from e


def _recorded(values: Sequence[float] | np.ndarray) -> Distribution:
    """What was recorded, thinned evenly; of equal values just the one."""
    if len(set(values)) == 1:
        return Distribution(center=float(values[0]))
    return Distribution("recorded", 1.0, values=_thinned(values))


def _thinned(values: Sequence[float] | np.ndarray) -> tuple[float, ...]:
    """At most `MAX_VALUES`, in order, evenly."""
    kept = np.sort(values)[np.linspace(0, len(values) - 1, min(len(values), MAX_VALUES)).astype(int)]
    return tuple(float(v) for v in kept)


def _in_groups(groups: Sequence[Sequence[float]]) -> Distribution:
    """What was recorded of groups, positive: a factor of the group, and one of the sibling. The logarithms' variance is
    divided between the two as in a random-effects analysis of variance. Where groups do not differ, all values alike.
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
    """Seconds per action of each episode; one whose environment failed took as long, whatever it could do in it, and is
    as many actions long as others are."""
    turns = float(np.mean([len(t["turns"]) for t in trajectories]))
    failed = [t["env_s"] / turns for t in every if t["status"] == "failed" and t["fault"]["kind"] == "env"]
    return [t["env_s"] / len(t["turns"]) for t in trajectories] + failed


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
    """Seconds of a decode step over the sequences in it, and of a prefill program, which is as large as the settings
    say, whatever it has to do."""
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
    publish_s, save_s = (float(np.mean([r.get(f"time/{part}_s", 0.0) for r in rows])) for part in ("publish", "save"))
    return TrainerTimings(step_s, token_s, publish_s, save_s=save_s)
