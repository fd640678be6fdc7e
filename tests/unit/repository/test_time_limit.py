"""`--start_before`, by which CI ends in time on a slow machine."""

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_tests_that_have_not_started_in_time_are_skipped_and_counted(tmp_path):
    (tmp_path / "test_two.py").write_text("def test_a(): pass\ndef test_b(): pass\n")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-c",
        str(ROOT / "pyproject.toml"),
        "-p",
        "tests.conftest",
        str(tmp_path),
    ]
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")} | {"PYTHONPATH": str(ROOT)}

    def said(seconds):
        limit = ["--start_before", str(time.time() + seconds)]
        return subprocess.run([*command, *limit], cwd=tmp_path, env=env, capture_output=True, text=True).stdout

    late, early = said(-1.0), said(600.0)
    assert "2 tests were skipped, because the time of --start_before was over" in late and "2 skipped" in late
    assert "2 passed" in early and "were skipped" not in early
