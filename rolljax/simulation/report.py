"""The results of a simulation: step time, throughput, how busy each role was, staleness, waits; in numbers and
pictures."""

from __future__ import annotations

import dataclasses
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from rolljax.simulation.runtime import SimulatedRecorder, SimulatedRuntime

MAX_BARS = 128
"""Most slots that a timeline draws individually; with more it draws the number of busy slots."""
LINES = {
    "steps": "steps simulated",
    "step_s": "seconds of a step",
    "rollout_s": "  waiting for groups",
    "update_s": "  update",
    "publish_s": "  publish",
    "sample_tok_s": "tokens sampled and trained, per second",
    "answer_tok": "tokens of an episode",
    "sampler_busy_frac": "sampler: slots that decode",
    "sampler_peak_kv_tok": "sampler: most context of a replica, tokens",
    "trainer_busy_frac": "trainer: busy",
    "start_age_mean": "age of a group at training, versions",
    "start_age_max": "  of the oldest",
    "token_age_mean": "age of a token",
    "buffer_wait_p50_s": "a group waits in the buffer, median seconds",
    "buffer_wait_p90_s": "  one of ten longer than",
    "late_groups": "late groups cancelled, of each step",
    "no_signal_groups": "groups without a signal, of each step",
    "lost_replicas": "replicas lost",
    "rerouted_answers": "  answers that continued elsewhere",
    "longest_wait_s": "longest wait of the loop, seconds",
    "streamed_frac": "training before the last answer had ended",
    "reward_busy_frac": "reward workers: busy",
    "served_ttft_p99_s": "users: first token, one of a hundred waits longer than",
    "served_late_frac": "users: requests whose first token was late",
}
"""The figures of a summary, and their meaning."""


@dataclasses.dataclass(frozen=True)
class Summary:
    """The results of a simulation."""

    numbers: Mapping[str, float]
    """Numbers of the simulation by name, as described in `LINES`: means over the steps between the first ones, in which
    the buffer fills, and the last ones, in which nothing new begins."""
    token_ages: Mapping[int, float]
    """Share of the trained tokens at each age in versions."""
    warnings: Sequence[str]
    """Warnings about problems that a real run would have."""

    def to_json(self) -> dict[str, Any]:
        return {
            **self.numbers,
            "token_ages": {str(k): v for k, v in self.token_ages.items()},
            "warnings": self.warnings,
        }


def summarize(runtime: SimulatedRuntime, recorder: SimulatedRecorder) -> Summary:
    """Compute the figures of a simulation."""
    rows, ahead = recorder.rows, max(math.ceil(p.async_ratio) for p in runtime.recipe.phases)
    filling = min(len(rows) - 1, 1 + ahead)
    steady = rows[filling : max(filling + 1, len(rows) - ahead)]
    start_s, end_s = steady[0]["end_s"] - steady[0]["time/step_s"], steady[-1]["end_s"]
    elapsed = max(end_s - start_s, 1e-9)

    def mean(name: str) -> float:
        return float(np.mean([r.get(name, 0.0) for r in steady]))

    waits = [
        recorder.trained[g.stream, g.prompt_index] - g.end_s
        for g in runtime.player.groups
        if (g.stream, g.prompt_index) in recorder.trained and g.start_s >= start_s and math.isfinite(g.end_s)
    ]
    busy = overlap(((a.started_s, a.ended_s) for a in runtime.sampler.ended), start_s, end_s)
    trainer = overlap(((s.start_s, s.end_s) for s in runtime.clock.spans if s.name == "update"), start_s, end_s)
    ages = dict(sorted(recorder.ages.items()))
    tokens = max(sum(ages.values()), 1)
    numbers = {
        "steps": len(rows),
        "step_s": mean("time/step_s"),
        "rollout_s": mean("time/rollout_s"),
        "update_s": mean("time/update_s"),
        "publish_s": mean("time/publish_s"),
        "sample_tok_s": mean("sampled_tok") * len(steady) / elapsed,
        "answer_tok": mean("rollout/len_tok"),
        "sampler_busy_frac": min(1.0, busy / (runtime.sampler.slots * elapsed)),
        "sampler_peak_kv_tok": max(r.peak_tok for r in runtime.sampler.replicas),
        "trainer_busy_frac": trainer / elapsed,
        "start_age_mean": mean("stale/start_mean_ver"),
        "start_age_max": max(r["stale/start_max_ver"] for r in rows),
        "token_age_mean": mean("stale/mean_ver"),
        "buffer_wait_p50_s": float(np.percentile(waits, 50)) if waits else 0.0,
        "buffer_wait_p90_s": float(np.percentile(waits, 90)) if waits else 0.0,
        "late_groups": mean("groups/late_n"),
        "no_signal_groups": mean("groups/no_signal_n"),
        "lost_replicas": runtime.sampler.fleet.losses,
        "rerouted_answers": runtime.sampler.rerouted,
        "longest_wait_s": runtime.clock.longest_s,
    }
    rewards, stream = runtime.player.envs.rewards, runtime.player.stream
    if stream:
        rest_s = sum(s.end_s - s.start_s for s in runtime.clock.spans if s.name == "update")
        numbers["streamed_frac"] = stream.trained_s / max(stream.trained_s + rest_s, 1e-9)
    if runtime.timings.rewards.kind != "unlimited":
        numbers["reward_busy_frac"] = rewards.busy_s / max(rewards.alive_s(rows[-1]["end_s"]), 1e-9)
    if runtime.timings.serving:
        first_s = np.array([r.first_s - r.arrival_s for s in runtime.serving for r in s.done] or [0.0])
        numbers["served_ttft_p99_s"] = float(np.percentile(first_s, 99))
        numbers["served_late_frac"] = float(np.mean(first_s > runtime.timings.serving.ttft_s))
    return Summary(numbers, {a: n / tokens for a, n in ages.items()}, _warnings(runtime, recorder, numbers))


def overlap(spans: Iterable[tuple[float, float]], start_s: float, end_s: float) -> float:
    """Return the sum of the spans' seconds that lie between two times."""
    return sum(max(0.0, min(end, end_s) - max(start, start_s)) for start, end in spans if end > start)


def _warnings(runtime: SimulatedRuntime, recorder: SimulatedRecorder, numbers: Mapping[str, float]) -> list[str]:
    found = list(dict.fromkeys(recorder.console.texts))
    room, needed = runtime.timings.engine.kv_tok, numbers["sampler_peak_kv_tok"]
    if room and needed > room:
        found.append(
            f"a replica held {needed:,.0f} tokens of context and has room for {room:,}: a real sampler would preempt; "
            "lower SamplerConfig.slots or raise Slices.chips_per_replica"
        )
    waits = runtime.clock
    if waits.longest_s > runtime.recipe.wait_s:
        found.append(
            f"{waits.name} took {waits.longest_s:,.0f} s: a run would end after Recipe.wait_s = "
            f"{runtime.recipe.wait_s:g}; raise it"
        )
    return found


# ---- tables


def table(summary: Summary) -> Any:
    """Return the figures as a table for a terminal."""
    from rich import box
    from rich.table import Table

    found = Table(box=box.SIMPLE_HEAD, show_header=False, pad_edge=False)
    found.add_column()
    found.add_column(justify="right")
    for name in [n for n in LINES if n in summary.numbers]:
        found.add_row(LINES[name], shown(name, summary.numbers[name]))
    for age, share in summary.token_ages.items():
        found.add_row(f"tokens {age} version{'s' * (age != 1)} old", f"{share:.1%} {'#' * round(20 * share)}")
    return found


def sweep_table(name: str, found: Mapping[str, Summary]) -> Any:
    """Return a table with one row for each value of setting `name`."""
    from rich import box
    from rich.table import Table

    columns = (
        *("step_s", "rollout_s", "sample_tok_s", "sampler_busy_frac", "trainer_busy_frac"),
        *("start_age_mean", "start_age_max", "late_groups"),
    )
    result = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for head in (name, *columns, "speedup"):
        result.add_column(head, justify="right")
    first = next(iter(found.values())).numbers["sample_tok_s"]
    for value, summary in found.items():
        n = summary.numbers
        result.add_row(value, *(shown(c, n[c]) for c in columns), f"{n['sample_tok_s'] / max(first, 1e-9):.2f}x")
    return result


def shown(name: str, value: float) -> str:
    """Format a number for a table."""
    return f"{value:.1%}" if name.endswith("_frac") else f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


# ---- pictures


def timeline(runtime: SimulatedRuntime, recorder: SimulatedRecorder) -> bytes:
    """Plot the activity of trainer and slots over time as a PNG. The colour of an answer is the policy version of its
    start."""
    plt = _pyplot()
    figure, (top, below) = plt.subplots(
        2, 1, figsize=(12, 7), sharex=True, height_ratios=(1, 4), constrained_layout=True
    )
    for name, colour in (("update", "tab:blue"), ("publish", "tab:orange")):
        spans = [(s.start_s, s.end_s - s.start_s) for s in runtime.clock.spans if s.name == name]
        top.broken_barh(spans, (0, 0.9), facecolors=colour, label=name)
    waits = [(r["end_s"] - r["time/step_s"], r["time/rollout_s"]) for r in recorder.rows]
    top.broken_barh(waits, (0, 0.9), facecolors="0.85", label="waits for groups", zorder=0)
    top.set(yticks=[], ylabel="trainer", ylim=(0, 1.5))
    top.legend(ncols=3, fontsize=8, frameon=False, loc="upper right")
    started = [a for a in runtime.sampler.ended if a.ended_s > a.started_s]
    if runtime.sampler.slots <= MAX_BARS:
        _draw_slots(below, started, runtime)
    else:
        _draw_load(below, started)
    below.set(xlabel="seconds")
    return _png(plt, figure)


def _draw_slots(axis: Any, answers: Sequence[Any], runtime: SimulatedRuntime) -> None:
    each = runtime.sampler.slots // len(runtime.sampler.replicas)
    colours = [f"C{i}" for i in range(10)]
    by_slot: dict[int, list[Any]] = {}
    for answer in answers:
        by_slot.setdefault(answer.replica * each + answer.slot, []).append(answer)
    for slot, found in by_slot.items():
        bars = [(a.started_s, a.ended_s - a.started_s) for a in found]
        versions = [int(a.versions[0]) if len(a.versions) else 0 for a in found]
        axis.broken_barh(
            bars, (slot, 0.9), facecolors=[colours[v % 10] for v in versions], edgecolor="w", linewidth=0.3
        )
    axis.set(ylabel="slot", ylim=(0, runtime.sampler.slots))


def _draw_load(axis: Any, answers: Sequence[Any]) -> None:
    times = np.array([t for a in answers for t in (a.started_s, a.ended_s)])
    changes = np.tile([1, -1], len(answers))
    order = np.argsort(times, kind="stable")
    axis.fill_between(times[order], np.cumsum(changes[order]), step="post", linewidth=0, color="tab:green", alpha=0.7)
    axis.set(ylabel="slots that decode", ylim=(0, None))


def sweep_figure(name: str, found: Mapping[str, Summary]) -> bytes:
    """Plot step time, utilisation of both roles, and staleness over the values of a setting, as a PNG."""
    plt = _pyplot()
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.5), constrained_layout=True)
    panels = (
        ("seconds of a step", ("step_s", "rollout_s")),
        ("busy", ("sampler_busy_frac", "trainer_busy_frac")),
        ("age at training, versions", ("start_age_mean", "start_age_max", "token_age_mean")),
    )
    for axis, (title, names) in zip(axes, panels, strict=True):
        for each in names:
            axis.plot(list(found), [s.numbers[each] for s in found.values()], marker="o", label=LINES[each].strip())
        axis.set(title=title, xlabel=name, ylim=(0, None))
        axis.legend(fontsize=8, frameon=False)
    return _png(plt, figure)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def _png(plt: Any, figure: Any) -> bytes:
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=110)
    plt.close(figure)
    return image.getvalue()
