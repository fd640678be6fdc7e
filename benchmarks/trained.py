"""Runs of shipped recipes that benchmarks compare; one that is there is taken as it is."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def train(recipe: str, run_dir: Path, *settings: str) -> Path:
    """Return the folder of a finished run of the shipped config `recipe`; train it first if it does not exist."""
    if not (run_dir / "summary.json").is_file():
        command = [sys.executable, "-m", "rolljax.train", "--gin", recipe]
        command += ["--run_dir", str(run_dir), *(word for s in settings for word in ("--set", s))]
        subprocess.run(command, cwd=ROOT, env=os.environ | {"JAX_PLATFORMS": "cpu"}, check=True, capture_output=True)
    return run_dir
