"""`benchmarks/accelerator/` with tiny sizes on a CPU, in processes that lack the packages a lent machine may lack."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.sweep  # `make test-newest` runs it


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    folder = tmp_path_factory.mktemp("accelerator")
    environ = os.environ | {"PYTHONPATH": str(ROOT / "tests" / "hidden"), "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    environ["JAX_COMPILATION_CACHE_DIR"] = str(folder / "compiled")
    command = [sys.executable, str(ROOT / "benchmarks" / "accelerator" / "run.py"), "--tiny", "--out", str(folder)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return folder


def test_every_piece_runs_without_the_packages_of_features(out):
    found = {path.stem: json.loads(path.read_text()) for path in out.glob("*.json")}
    assert len(found) == 9
    for name, content in found.items():
        assert content["done"] and content["failed"] is None and content["figures"], name
        assert [row for row in content["figures"] if "failed" in row] == [], name
        assert f"## {name}: " in (out / "summary.md").read_text()


def test_the_training_run_has_its_curve(out):
    rows = json.loads((out / "learning.json").read_text())["figures"]
    runs = [row for row in rows if row["what"] == "run"]
    assert [row["async_ratio"] for row in runs] == [0, 1]
    for row in runs:
        assert row["rl_steps"] == 4 and row["trained_tok_s"] > 0 and row["sampled_tok_s"] > 0
    points = [row for row in rows if row["what"] == "held-out reward"]
    assert [row["step"] for row in points] == [2, 4]
    assert all({"ratio 0, seed 0", "ratio 1, seed 0"} <= row.keys() for row in points)
