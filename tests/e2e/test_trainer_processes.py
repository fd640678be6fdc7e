"""A trainer of two processes with a sampler in a third trains what it trains with a sampler of its own, and ends by name."""

import os
import shutil
import signal

import pytest

from .conftest import arguments, child_of, summary
from .test_hosts import SMALL, assert_the_same_run, ends, start, wait_for_step  # noqa: F401  # a fixture
from .test_remote_run import assert_ended

FEW = SMALL | {"warm_start__Phase_dot_steps": 1, "rl__Phase_dot_steps": 3}
REMOTE = FEW | {"Recipe_dot_placement": "@Remote()"}


def served(folder):
    """Return the settings of a run whose processes serve folders of their own, in `folder`."""
    return REMOTE | {"Remote_dot_weights": "@ServedWeights()", "ServedWeights_dot_folder": repr(str(folder))}


@pytest.fixture(scope="module")
def colocated(start, tmp_path_factory):  # noqa: F811
    """Return the folder of a run of two processes that sample themselves."""
    folder = tmp_path_factory.mktemp("colocated") / "run"
    assert ends(start(arguments(folder, **FEW)))[0] == [0, 0]
    return folder


@pytest.mark.slow
def test_a_remote_sampler_changes_nothing(start, colocated, tmp_path):  # noqa: F811
    codes, said = ends(start(arguments(tmp_path / "run", **REMOTE)))
    assert codes == [0, 0], said
    assert_the_same_run(tmp_path / "run", colocated)


@pytest.mark.sweep
def test_damaged_parts_are_written_again_and_change_nothing(start, colocated, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setenv("WEIGHTS", str(tmp_path / "weights"))
    both = start(arguments(tmp_path / "run", **served(tmp_path / "weights")), "tests.trainer_process", "damage")
    codes, said = ends(both)
    assert codes == [0, 0], said
    assert said[0].count("does not take the weights of version 2") == 1
    assert_the_same_run(tmp_path / "run", colocated)


@pytest.mark.slow
def test_a_process_that_is_killed_while_it_writes_ends_the_run(start, tmp_path):  # noqa: F811
    both = start(arguments(tmp_path / "run", **served(tmp_path / "weights")), "tests.trainer_process", "kill")
    codes, said = ends(both)
    assert codes == [3, -signal.SIGKILL], said
    assert "infra error: process 1 ended before the run did" in said[0]
    assert_ended(tmp_path / "run")


@pytest.mark.sweep
def test_a_lost_process_is_restarted_with_the_others(start, colocated, tmp_path):  # noqa: F811
    run_dir = tmp_path / "run"
    both = start([*arguments(run_dir, **served(tmp_path / "weights")), "--restarts", "2"])
    wait_for_step(both, run_dir, 2)
    os.kill(child_of(both[1]), signal.SIGKILL)
    codes, said = ends(both)
    assert codes == [0, 0], said
    assert len(summary(run_dir)["restarts"]) == 1
    assert_the_same_run(run_dir, colocated)


@pytest.mark.sweep
def test_a_process_that_cannot_write_ends_the_run(start, tmp_path):  # noqa: F811
    folder = tmp_path / "weights" / "process_1"
    both = start(arguments(tmp_path / "run", **served(folder.parent) | {"rl__Phase_dot_steps": 1000}))
    wait_for_step(both, tmp_path / "run", 2)
    while folder.is_dir():
        shutil.rmtree(folder, ignore_errors=True)
    folder.write_text("")
    codes, said = ends(both)
    assert codes == [3, 74], said
    assert "infra error: process 1 failed: weights of version" in said[0]
    assert f"cannot be written to {folder}" in said[0] and f"cannot be written to {folder}" in said[1]
    assert_ended(tmp_path / "run")
