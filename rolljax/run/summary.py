"""A summary of a run in a few lines to paste: rewards, speed, and the causes of waiting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rolljax.console.progress import OWNERS, judged_by, waits
from rolljax.console.terminal import duration, visible
from rolljax.errors import CheckpointError, boundary
from rolljax.storage import starts
from rolljax.storage.environment import command_line
from rolljax.storage.layout import ENVIRONMENT
from rolljax.storage.run_reader import RunReader

Row = Mapping[str, Any]


def summary_lines(run: RunReader) -> list[str]:
    """Return lines of plain text about a run, from its files alone. The run may still be in progress.

    Raises:
      CheckpointError: one of these files is damaged; the error names it.
    """
    rows, summary, env = run.rows(), run.summary(), _environment(run)
    lines = [f"run       {run.path.resolve().name}: {_state(rows, summary)}"]
    if rows:
        lines += _phases(rows, summary)
        lines += [f"tokens    {_tokens(rows)}", f"waits     {_waits(rows)}", f"failed    {_failed(rows)}"]
    if restarts := starts.restarts(run.path):
        lines.append(f"restarts  {len(restarts)}, the last one after it {restarts[-1].after}")
    lines += env
    if sha := summary.get("state_sha256"):
        lines.append(f"state     {sha[:16]}")
    return [visible(line, lines=False) for line in lines]


def _environment(run: RunReader) -> list[str]:
    """Return a line for the machine and one for the command; none where `env.json` is missing."""
    env, remedy = run.environment(), "delete it: the run writes a new one when it continues"
    with boundary(CheckpointError, f"{run.path / ENVIRONMENT} is not as a run writes it; {remedy}"):
        if not env:
            return []
        versions = ", ".join(f"{name} {env['packages'][name]}" for name in ("jax", "flax") if name in env["packages"])
        machine = f"machine   {env['devices']} x {env['platform']}, Python {env['python']}, {versions}"
        return [machine, f"command   {command_line(env['command'])}"]


def _state(rows: Sequence[Row], summary: Mapping[str, Any]) -> str:
    if summary and summary.get("steps") == (rows[-1]["step"] if rows else 0):
        took = f"{summary['steps']} steps in {duration(summary.get('wall_s', 0.0))}"
        return f"{summary.get('stop_reason', 'at its end')}, {took}"
    return f"{rows[-1]['step']} steps, not at its end" if rows else "no step is done"


def _phases(rows: Sequence[Row], summary: Mapping[str, Any]) -> list[str]:
    """Return a line for each phase: steps, seconds, rewards at its start and end."""
    heldout = {entry["phase"]: entry for entry in summary.get("heldout_reward", ())}
    before, lines = heldout.get("start"), []
    for name in dict.fromkeys(row.get("phase", "") for row in rows):
        own = [row for row in rows if row.get("phase", "") == name]
        parts = [f"{len(own)} steps", duration(sum(row.get("time/step_s", 0.0) for row in own))]
        word, key = judged_by(own[0])
        if values := [row[key] for row in own if key in row]:
            parts.append(f"{word} {values[0]:.3f} -> {values[-1]:.3f}")
        if now := heldout.get(name):
            start = f"{before['mean']:.3f} -> " if before else ""
            parts.append(f"held-out {start}{now['mean']:.3f} ({now['n']} tasks)")
            before = now
        lines.append(f"phase     {name}: {', '.join(parts)}")
    return lines


def _tokens(rows: Sequence[Row]) -> str:
    trained, update_s = (sum(row.get(name, 0.0) for row in rows) for name in ("train/tokens_n", "time/update_s"))
    rollout = [row for row in rows if "tput/sample_tok_s" in row]
    sampled_s = sum(row.get("time/rollout_s", 0.0) for row in rollout)
    sampled = sum(row["tput/sample_tok_s"] * row.get("time/rollout_s", 0.0) for row in rollout)
    parts = [f"{sampled:,.0f} sampled ({sampled / sampled_s:,.0f}/s)"] if sampled_s else []
    return ", ".join([*parts, f"{trained:,.0f} trained ({trained / max(update_s, 1e-9):,.0f}/s)"])


def _waits(rows: Sequence[Row]) -> str:
    """Return the fractions of all steps' seconds by the component waited for."""
    seconds: dict[str, float] = {}
    for row in rows:
        for word, share in waits(row).items():
            seconds[word] = seconds.get(word, 0.0) + share * row.get("time/step_s", 0.0)
    whole = max(sum(row.get("time/step_s", 0.0) for row in rows), 1e-9)
    found = sorted(seconds.items(), key=lambda item: -item[1])
    return ", ".join(f"{word} {s / whole:.0%}" for word, s in found if s / whole >= 0.005)


def _failed(rows: Sequence[Row]) -> str:
    counts = {owner: sum(int(row.get(f"faults/{owner}_n", 0)) for row in rows) for owner in OWNERS}
    found = ", ".join(f"{owner} {n:,}" for owner, n in counts.items() if n)
    share = sum(row.get("rollout/fail_frac", 0.0) for row in rows) / len(rows)
    return f"{share:.1%} of trajectories left out" + (f"; faults by owner: {found}" if found else "")
