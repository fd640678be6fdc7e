"""A run on two processes of two devices equals the run of one process of four, also when it stops, resumes or fails."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rolljax.commands.train import main as train
from tests.ends import OF_THE_CLOCK

from .conftest import arguments, child_of, of_two_processes, rows, summary

TIMEOUT_S = 900
SMALL = {
    "Qwen3Config_dot_num_layers": 1,
    "MeshSpec_dot_data": 1,  # weights and slots then lie on both processes
    "MeshSpec_dot_fsdp": 2,
    "MeshSpec_dot_tensor": 2,
    "SamplerConfig_dot_slots": 8,
    "SamplerConfig_dot_prefill_chunk": 64,
    "SamplerConfig_dot_max_context": 64,
    "warm_start__Phase_dot_steps": 2,
    "rl__Phase_dot_steps": 4,
    "rl__Phase_dot_prompts_per_step": 4,
    "Evaluation_dot_tasks": 4,
}


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Start the two processes of a run, by the program `rolljax.train` or one with arguments before; what they compile is
    compiled once for all runs here."""
    cache = tmp_path_factory.mktemp("compiled")
    started = []

    def run(argv, program="rolljax.train", *first):
        env = of_two_processes(2) | {
            "JAX_COMPILATION_CACHE_DIR": str(cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        command = [sys.executable, "-m", program, *first, *argv]
        both = [
            subprocess.Popen(command, env=env | {"JAX_PROCESS_ID": str(i)}, stderr=subprocess.PIPE, text=True)
            for i in range(2)
        ]
        started.extend(both)
        return both

    yield run
    for process in started:
        process.kill()


def ends(both):
    """Return the exit codes and outputs of both processes, without the lines of Gloo, their library for collectives."""
    texts = [p.communicate(timeout=TIMEOUT_S)[1] for p in both]
    said = ["".join(line for line in t.splitlines(True) if not line.startswith("[Gloo]")) for t in texts]
    return [p.returncode for p in both], said


def wait_for_step(both, run_dir, step):
    deadline = time.monotonic() + TIMEOUT_S
    while not any(r["step"] >= step for r in rows(run_dir)):
        assert all(p.poll() is None for p in both), ends(both)
        assert time.monotonic() < deadline, "the run never got that far"
        time.sleep(0.02)


def numbers(run_dir):
    """Return the metrics without measured times, and without those of single samplers."""
    return [
        {k: v for k, v in row.items() if not k.startswith((*OF_THE_CLOCK, "sampler/sampler-"))} for row in rows(run_dir)
    ]


def answers(run_dir, step):
    lines = (Path(run_dir) / "rollouts" / f"step_{step}.jsonl").read_text().splitlines()
    return [[turn["tokens"] for turn in json.loads(line)["turns"]] for line in lines]


def assert_the_same_run(run_dir, alone):
    """Assert that two processes train like one, up to the order of sums over devices."""
    assert len(rows(run_dir)) == len(rows(alone)) > 0
    for of_two, of_one in zip(numbers(run_dir), numbers(alone), strict=True):
        assert of_two == pytest.approx(of_one, abs=1e-4)
        assert of_two["loss/total"] == pytest.approx(of_one["loss/total"], abs=1e-5)
        assert of_two["reward/mean"] == of_one["reward/mean"]
        assert answers(run_dir, of_one["step"]) == answers(alone, of_one["step"])
    assert summary(run_dir)["heldout_reward"] == summary(alone)["heldout_reward"]


@pytest.mark.sweep
def test_two_processes_are_one(start, tmp_path):
    run_dir, alone = tmp_path / "run", tmp_path / "alone"
    few = SMALL | {"warm_start__Phase_dot_steps": 1, "rl__Phase_dot_steps": 2}
    codes, said = ends(start(arguments(run_dir, **few)))
    assert codes == [0, 0], said
    assert train(arguments(alone, **few)) == 0
    assert_the_same_run(run_dir, alone)


@pytest.mark.slow
def test_two_processes_stopped_and_continued_are_one(start, tmp_path):
    run_dir, alone = tmp_path / "run", tmp_path / "alone"
    both = start(arguments(run_dir, **SMALL))
    wait_for_step(both, run_dir, 1)
    for process in both:  # as when a whole slice is taken away
        process.send_signal(signal.SIGTERM)
    codes, said = ends(both)
    assert codes == [75, 75], said
    assert "stopped and saved" in said[0]
    assert not said[1]
    assert summary(run_dir)["stop_reason"] == "stopped by signal"
    assert summary(run_dir)["steps"] == len(rows(run_dir)) < 6
    codes, said = ends(start(arguments(run_dir, **SMALL)))
    assert codes == [0, 0], said
    assert "continuing" in said[0]
    assert not said[1]
    assert train(arguments(alone, **SMALL)) == 0
    assert len(rows(run_dir)) == 6
    assert_the_same_run(run_dir, alone)
    assert sum(row["reward/std"] > 0 for row in rows(alone)[2:]) > 1  # there was something to learn
    files = [{p.name: p.stat().st_size for p in (d / "hf").iterdir()} for d in (run_dir, alone)]
    assert files[0].keys() == files[1].keys() and files[0].pop("README.md") and files[0].pop("curves.png")
    assert files[0].items() < files[1].items()


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_process_is_restarted_with_the_others(start, tmp_path, lost):
    run_dir = tmp_path / "run"
    both = start([*arguments(run_dir, **SMALL), "--restarts", "2"])
    wait_for_step(both, run_dir, 2)
    os.kill(child_of(both[lost]), signal.SIGKILL)
    codes, said = ends(both)
    assert codes == [0, 0], said
    assert "the run was killed (SIGKILL)" in said[lost]
    # the other one ends itself, or JAX ends it when the lost one comes back first
    assert any(f"the run {how}" in said[1 - lost] for how in ("ended with exit code 3", "crashed (SIGABRT)"))
    assert "damaged" not in said[0]
    assert len(rows(run_dir)) == 6 and len(summary(run_dir)["restarts"]) == 1


@pytest.mark.sweep
def test_a_lost_process_ends_the_run(start, tmp_path):
    run_dir = tmp_path / "run"
    both = start(arguments(run_dir, **SMALL | {"rl__Phase_dot_steps": 1000, "rl__Phase_dot_async_ratio": 1}))
    wait_for_step(both, run_dir, 5)
    assert rows(run_dir)[4]["groups/waiting_n"] == 4  # while the policy is trained, the next answers are under way
    assert max(r["stale/max_ver"] for r in rows(run_dir)) <= 1
    both[1].kill()
    codes, said = ends(both)
    assert codes == [3, -signal.SIGKILL], said
    assert "infra error: process 1 ended before the run did" in said[0]
