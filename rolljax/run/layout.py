"""Names of the files in a run folder, for whoever writes them and whoever reads them without jax."""

from __future__ import annotations

from pathlib import Path

RESOLVED, LOCK = "config.resolved.json", ".lock"
METRICS, CONSUMED, ROLLOUTS, CHECKPOINTS = "metrics.jsonl", "consumed.jsonl", "rollouts", "ckpt"
VERDICTS = "verdicts"
"""What rewards were told by judges and servers, for a run that goes on."""
RESULT, CURVES, SUMMARY, ENVIRONMENT = "hf", "curves.png", "summary.json", "env.json"


def rollouts_file(run: Path, step: int) -> Path:
    """Where the trajectories of a step are."""
    return run / ROLLOUTS / f"step_{step}.jsonl"


def heldout_file(run: Path, evaluation: str) -> Path:
    """Where the held-out trajectories are of an evaluation: `start`, or the phase behind which it was made."""
    return run / ROLLOUTS / f"heldout_{evaluation}.jsonl"


def rollout_files(run: Path) -> dict[int, Path]:
    """The files of trajectories that there are, by step in order."""
    found = {int(f.stem.removeprefix("step_")): f for f in (run / ROLLOUTS).glob("step_[0-9]*.jsonl")}
    return dict(sorted(found.items()))
