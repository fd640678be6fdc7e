"""Names of the files in a run folder, for their writers and for readers that do not import jax."""

from __future__ import annotations

import re
from pathlib import Path

RESOLVED, LOCK = "config.resolved.json", ".lock"
METRICS, CONSUMED, ROLLOUTS, CHECKPOINTS = "metrics.jsonl", "consumed.jsonl", "rollouts", "ckpt"
STARTS = "starts.jsonl"
"""The starts of a run (`storage.starts`)."""
SAMPLERS = "samplers"
"""Key, address and logs of samplers in other processes."""
VERDICTS = "verdicts"
"""The stored verdicts of judges and reward servers, for a run that continues."""
TEMPLATE = "chat_template.jinja"
"""The chat template of a run that has another than its model's folder."""
RESULT, CURVES, SUMMARY, ENVIRONMENT = "hf", "curves.png", "summary.json", "env.json"
CONFIG = "config.gin"
SERVICE = "service.json"
"""The base model of a training service's folder."""
_STEP_FILE = re.compile(r"step_(0|[1-9][0-9]*)\.jsonl")


def rollouts_file(run: Path, step: int) -> Path:
    """Return the file of a step's trajectories."""
    return run / ROLLOUTS / f"step_{step}.jsonl"


def heldout_file(run: Path, evaluation: str) -> Path:
    """Return the file of the held-out trajectories of an evaluation: `start`, or the name of the phase before it."""
    return run / ROLLOUTS / f"heldout_{evaluation}.jsonl"


def rollout_files(run: Path) -> dict[int, Path]:
    """Return the files of trajectories, by step in order. Other files in the folder, such as copies, are not ours."""
    folder = run / ROLLOUTS
    names = (_STEP_FILE.fullmatch(f.name) for f in folder.iterdir()) if folder.is_dir() else ()
    found = sorted(int(name[1]) for name in names if name)
    return {step: rollouts_file(run, step) for step in found}
