"""Measures the time before anything happens: `import rolljax`, `--help` of every verb, `--dry_run` of a 0.6B model.

python benchmarks/startup.py [--repeat 5]

Each is a process of its own. The table has medians, and the limit above which a user notices the wait.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERBS = sorted(f.stem for f in (ROOT / "rolljax").glob("*.py") if "argparse" in f.read_text() and f.stem != "cli")


def cases() -> dict[str, tuple[list[str], float]]:
    """Return the commands to measure, each with its budget in seconds."""
    found = {"import rolljax": (["-c", "import rolljax"], 0.3)}
    found |= {f"{verb} --help": (["-m", f"rolljax.{verb}", "--help"], 0.5) for verb in VERBS}
    config = ["--gin", "qwen3_0p6b_grpo_v5e_1", "--dry_run"]
    return found | {"train --dry_run of 0.6B": (["-m", "rolljax.train", *config], 10.0)}


def timed(arguments: list[str]) -> float:
    """Return the seconds of a command that must succeed."""
    env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    began = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, cwd=ROOT, env=env, capture_output=True)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=5, help="processes of each (default: %(default)s)")
    args = parser.parse_args()
    print(f"{'':26}{'median s':>10}{'budget s':>10}")
    for name, (command, budget_s) in cases().items():
        seconds = [timed(command) for _ in range(args.repeat)]
        print(f"{name:26}{statistics.median(seconds):10.2f}{budget_s:10.1f}", flush=True)


if __name__ == "__main__":
    main()
