"""A run that was killed and resumed equals an uninterrupted one, to the last bit."""

import os
import shutil
import signal
import time

import pytest

from tests.unit.concurrency.test_child import wait_until_gone

from . import conftest
from .conftest import child_of, rows, summary

TIMEOUT_S = 240
STEPS = 13
SMALL = {
    "Qwen3Config_dot_num_layers": 1,
    "SamplerConfig_dot_slots": 32,
    "warm_start__Phase_dot_steps": 3,
    "rl__Phase_dot_steps": STEPS - 3,
    "Evaluation_dot_tasks": 8,
}


def arguments(run_dir, **changes):
    return conftest.arguments(run_dir, **SMALL | changes)


def losses(run_dir):
    return [(r["step"], r["loss/total"], r.get("optim/grad_norm"), r["reward/mean"]) for r in rows(run_dir)]


def wait_for_step(process, run_dir, step):
    deadline = time.monotonic() + TIMEOUT_S
    while not any(r["step"] >= step for r in rows(run_dir)):
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline, "the run never got that far"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def straight(start, tmp_path_factory):
    """Return a function that makes an uninterrupted run by device count, once."""
    done = {}

    def run(devices):
        if devices not in done:
            run_dir = tmp_path_factory.mktemp("straight") / "run"
            process = start(arguments(run_dir), devices)
            _, err = process.communicate(timeout=TIMEOUT_S)
            assert process.returncode == 0, err
            done[devices] = run_dir
        return done[devices]

    return run


@pytest.fixture(scope="module")
def killed(start, tmp_path_factory):
    """Return a function that copies the folder of a run killed in the middle, by device count."""
    done = {}

    def copy(devices, to):
        if devices not in done:
            run_dir = tmp_path_factory.mktemp("killed") / "run"
            process = start(arguments(run_dir), devices)
            wait_for_step(process, run_dir, 7)
            process.kill()  # SIGKILL: nothing can be saved now
            process.communicate()
            assert len(rows(run_dir)) < STEPS
            done[devices] = run_dir
        shutil.copytree(done[devices], to, symlinks=True)

    return copy


@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.sweep), pytest.param(8, marks=pytest.mark.slow)])
def test_kill_and_continue_is_bitwise(start, straight, killed, tmp_path, devices):
    run_dir = tmp_path / "run"
    killed(devices, run_dir)
    process = start(arguments(run_dir), devices)
    _, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, err
    assert "continuing" in err
    reference = straight(devices)
    assert losses(run_dir) == losses(reference)
    assert [r["step"] for r in rows(run_dir)] == list(range(1, STEPS + 1))
    assert summary(run_dir)["state_sha256"] == summary(reference)["state_sha256"]
    assert summary(run_dir)["heldout_reward"] == summary(reference)["heldout_reward"]


@pytest.mark.parametrize("kills", [(7,), pytest.param((5, 9), marks=pytest.mark.sweep)])
def test_a_run_whose_process_is_killed_is_restarted_and_bitwise_equal(start, straight, tmp_path, kills):
    """The parent may restart it as often as it is killed."""
    run_dir = tmp_path / "run"
    process = start([*arguments(run_dir), "--restarts", str(len(kills))])
    for step in kills:
        wait_for_step(process, run_dir, step)
        os.kill(child_of(process), signal.SIGKILL)
    _, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, err
    for i in range(len(kills)):
        assert f"; restart {i + 1} of {len(kills)} in {2**i} s" in err
    reference = straight(1)
    assert losses(run_dir) == losses(reference)
    assert summary(run_dir)["state_sha256"] == summary(reference)["state_sha256"]
    found = [(r["epoch"], r["after"].split(" after ")[0]) for r in summary(run_dir)["restarts"]]
    assert found == [(i + 2, "was killed (SIGKILL)") for i in range(len(kills))]
    assert summary(reference)["restarts"] == []


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", ["SIGTERM", "two Ctrl-C", "killed"])
def test_the_end_of_the_parent_of_a_run_is_the_end_of_the_run(start, tmp_path, way):
    run_dir = tmp_path / "run"
    process = start([*arguments(run_dir), "--restarts", "2"])
    wait_for_step(process, run_dir, 2)
    pid = child_of(process)
    if way == "SIGTERM":
        process.send_signal(signal.SIGTERM)
    elif way == "killed":
        process.kill()
    else:
        process.send_signal(signal.SIGINT)  # two that come together are one, after which the run saves
        process.send_signal(signal.SIGINT)
    process.communicate(timeout=TIMEOUT_S)
    assert process.returncode in {"SIGTERM": {75}, "killed": {-9}, "two Ctrl-C": {130, 75}}[way]
    wait_until_gone(pid)
    if way == "SIGTERM":
        assert summary(run_dir)["stop_reason"] == "stopped by signal"


@pytest.mark.slow
def test_a_wrong_setting_is_not_restarted(start, tmp_path):
    process = start([*arguments(tmp_path / "run", rl__Phase_dot_steps=-1), "--restarts", "2"])
    _, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 2 and "restart" not in err, err


@pytest.mark.slow
def test_sigterm_saves_and_continues(start, straight, tmp_path):
    run_dir = tmp_path / "run"
    process = start(arguments(run_dir))
    wait_for_step(process, run_dir, 5)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 75, err
    stopped = summary(run_dir)
    assert stopped["stop_reason"] == "stopped by signal"
    assert stopped["steps"] == len(rows(run_dir)) < STEPS  # nothing that was done is done again
    process = start(arguments(run_dir))
    _, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, err
    assert losses(run_dir) == losses(straight(1))
    assert summary(run_dir)["state_sha256"] == summary(straight(1))["state_sha256"]


@pytest.mark.slow
def test_one_and_eight_devices_agree(straight):
    one, eight = rows(straight(1)), rows(straight(8))
    assert [r["loss/total"] for r in eight] == pytest.approx([r["loss/total"] for r in one], abs=1e-4)
    assert [r["reward/mean"] for r in eight] == [r["reward/mean"] for r in one]


@pytest.mark.sweep
def test_every_mesh_axis_computes_the_same(start, straight, tmp_path):
    run_dir = tmp_path / "run"
    process = start(arguments(run_dir, MeshSpec_dot_data=2, MeshSpec_dot_fsdp=2, MeshSpec_dot_tensor=2), 8)
    _, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, err
    assert [r["loss/total"] for r in rows(run_dir)] == pytest.approx(
        [r["loss/total"] for r in rows(straight(1))], abs=1e-4
    )


@pytest.mark.slow
def test_a_run_resumes_with_fewer_devices(start, straight, killed, tmp_path):
    run_dir = tmp_path / "run"
    killed(8, run_dir)
    process = start(arguments(run_dir), 1)
    _, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, err
    assert "continuing" in err
    assert [r["loss/total"] for r in rows(run_dir)] == pytest.approx(
        [r["loss/total"] for r in rows(straight(1))], abs=1e-4
    )
