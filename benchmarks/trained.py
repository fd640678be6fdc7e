"""Runs of shipped recipes that benchmarks compare; a finished one is taken as it is, a stopped one continues."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def heldout(run_dir: Path) -> float:
    """Return the mean held-out reward at the end of a run."""
    return json.loads((run_dir / "summary.json").read_text())["heldout_reward"][-1]["mean"]


def train(recipe: str, run_dir: Path, *settings: str) -> Path:
    """Return the folder of a finished run of the shipped config `recipe`; train it first if it does not exist."""
    summary = run_dir / "summary.json"
    if not summary.is_file() or json.loads(summary.read_text())["stop_reason"] != "all phases done":
        command = [sys.executable, "-m", "rolljax.train", "--gin", recipe]
        command += ["--run_dir", str(run_dir), *(word for s in settings for word in ("--set", s))]
        subprocess.run(command, cwd=ROOT, env=os.environ | {"JAX_PLATFORMS": "cpu"}, check=True, capture_output=True)
    return run_dir
