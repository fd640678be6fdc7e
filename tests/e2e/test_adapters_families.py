"""Every family of reasoning-gym in one worker process (`reasoning_gym_families.py`)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from reasoning_gym.factory import DATASETS

import rolljax
from rolljax.envs import checks
from rolljax.envs.adapters.reasoning_gym import REFUSED, ReasoningGym

ROOT = Path(rolljax.__file__).parents[1]
NUM_TEXTS = 200 if os.environ.get("ROLLJAX_FULL") else 20

NOT_GOLD = {"complex_arithmetic", "coin_flip", "knights_knaves", "number_format", "rush_hour"}
"""Families whose scorers take, or took, other answers than the reference answer."""
SLOW = {
    *("futoshiki", "knight_swap", "puzzle24", "quantum_lock", "rubiks_cube", "sokoban", "sudoku", "zebra_puzzles"),
    *("intermediate_integration", "simple_integration", "polynomial_multiplication"),
}
"""Families that take long to make a task, or to score an answer."""
FAMILIES = sorted(set(DATASETS) - set(REFUSED))
PARTS = 6
"""Number of processes that share the families."""


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=() if f in NOT_GOLD else pytest.mark.sweep) for f in FAMILIES], ids=FAMILIES
)
def test_no_answer_without_thought_wins_more_than_chance(family):
    checks.no_constant_wins(ReasoningGym(family), 10 if family in SLOW else 30)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("part", range(PARTS))
def test_every_family_takes_its_own_answer_and_survives_others(tmp_path, part):
    assert len(FAMILIES) == 103
    script, mark, families = (
        Path(__file__).with_name("reasoning_gym_families.py"),
        tmp_path / "executed",
        FAMILIES[part::PARTS],
    )
    done = subprocess.run(
        [sys.executable, str(script), str(NUM_TEXTS), str(mark), *families],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=3000,
    )
    assert done.returncode == 0, done.stdout[-300:] + done.stderr
    records = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    results = {r["family"]: r["wrong"] for r in records if "family" in r}
    assert set(results) == set(families) == {r["starting"] for r in records if "starting" in r}
    assert {family: wrong for family, wrong in results.items() if wrong} == {}
    assert not mark.exists(), "the text of an answer was executed"
