"""The benchmark of samplers in other processes, small: its figures are there, and its answers are checked by itself."""

import json
import os
import subprocess
import sys

from .plan_run import ROOT


def test_a_controller_gets_what_was_recorded():
    command = [sys.executable, str(ROOT / "benchmarks" / "remote_samplers.py"), "controller", "--samplers", "2"]
    command += ["--completions", "64", "--dispatch_tok", "64"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stderr
    first = json.JSONDecoder().raw_decode(done.stdout)[0]
    assert first["dispatch_tok"] == 64 and first["completions per CPU s"] > 0
    assert "largest parts" in done.stdout
