"""`python -m rolljax.plan` in a process of its own."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs libtpu: pip install 'rolljax[tpu]'"
)


def plan(config, topology, settings, only, folder, timeout=600, flags=()):
    """Run `rolljax.plan`; return the finished process and its JSON output (None without output)."""
    out = Path(folder) / "plan.json"
    command = [
        sys.executable,
        "-m",
        "rolljax.plan",
        "--gin",
        config,
        "--topology",
        topology,
        "--json",
        str(out),
        *flags,
    ]
    command += [a for name in only for a in ("--only", name)]
    command += [a for name, value in settings.items() for a in ("--set", f"{name} = {value}")]
    env = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=env)
    return done, json.loads(out.read_text()) if out.exists() else None
