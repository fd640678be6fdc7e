"""Every family of reasoning-gym in one worker process (`reasoning_gym_families.py`)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import rolljax

ROOT = Path(rolljax.__file__).parents[1]
NUM_TEXTS = 200 if os.environ.get("ROLLJAX_FULL") else 20


def test_every_family_takes_its_own_answer_and_survives_others(tmp_path):
    mark = tmp_path / "executed"
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("reasoning_gym_families.py")), str(NUM_TEXTS), str(mark)],
        env={**os.environ, "ROLLJAX_ENV_WORKER": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-300:] + done.stderr
    records = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    results = {r["family"]: r["wrong"] for r in records if "family" in r}
    assert len(results) == 104 and {r["starting"] for r in records if "starting" in r} == set(results)
    assert {family: wrong for family, wrong in results.items() if wrong} == {}
    assert not mark.exists(), "the text of an answer was executed"
