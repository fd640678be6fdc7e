"""Training while environments fail: every step completes, every failure is counted under its kind, and none is a wrong
answer."""

import json

import numpy as np
import pytest

from rolljax.commands.train import main as train
from rolljax.concurrency import waits
from rolljax.metrics import check_row
from rolljax.run import preflight

from .conftest import QUICKSTART, rows, summary

STEPS, PROMPTS, GROUP = 4, 8, 4
KINDS = {"reset_raise": "env", "reset_infra": "infra", "reset_hang": "env"}


def start(run_dir, faults, folder, *, spec="Faulty", **changes):
    settings = {
        "Recipe.env": f"@tests.faulty.{spec}()",
        f"{spec}.faults": repr(tuple(faults)),
        f"{spec}.folder": repr(str(folder)),
        "Recipe.phases": "[@rl/recipe.Phase()]",
        "Recipe.max_answer_tok": 4,
        "Recipe.save_every": 100,
        "rl/Phase.algorithm": "@rolljax.trainer.algorithms.reinforce.Reinforce()",
        "rl/Phase.steps": STEPS,
        "rl/Phase.prompts_per_step": PROMPTS,
        "rl/Phase.group_size": GROUP,
        "rl/Phase.updates_per_step": 1,
        "rl/Phase.eval_every": 0,
        "Evaluation.tasks": 4,
        "SamplerConfig.slots": 32,
        "SamplerConfig.prefill_chunk": 256,
        "MeshSpec.data": 1,
        **{k.replace("_dot_", "."): v for k, v in changes.items()},
    }
    argv = ["--gin", QUICKSTART, "--run_dir", str(run_dir)]
    return train(argv + [a for name, value in settings.items() for a in ("--set", f"{name} = {value}")])


def faults_of(share, names):
    """Spread faults over `share` of a hundred tasks."""
    bad = set(np.linspace(0, 99, round(100 * share), dtype=int).tolist())
    return [names[i % len(names)] if i in bad else "" for i in range(100)]


def trajectories(run_dir, step):
    return [json.loads(x) for x in (run_dir / "rollouts" / f"step_{step}.jsonl").read_text().splitlines()]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("share", [0.01, 0.1, 0.5])
def test_steps_complete_and_counts_are_exact(tmp_path, share):
    folder = tmp_path / "marks"
    folder.mkdir()
    faults = faults_of(share, ["reset_raise", "reset_once_infra", "reset_infra"])
    changes = {"FilterConfig_dot_max_failed_frac": 1.0, "PoolConfig_dot_max_fault_frac": 1.0}
    assert start(tmp_path / "run", faults, folder, **changes) == 0
    written = rows(tmp_path / "run")
    assert len(written) == STEPS and all(check_row(row) == [] for row in written)
    seen = 0
    for step, row in enumerate(written, 1):
        every = trajectories(tmp_path / "run", step)
        assert len(every) == PROMPTS * GROUP
        retried = 0
        for t in every:
            fault = t["task"]["content"].partition(" ")[2]
            kind = KINDS.get(fault)
            assert (t["status"] == "failed") == (kind is not None), t
            if kind:
                assert t["fault"]["kind"] == kind and t["attempts"] == (3 if kind == "infra" else 1)
            retried += t["attempts"] - 1
            seen += bool(fault)
        for kind in ("env", "infra"):
            assert row[f"faults/{kind}_n"] == sum(bool(t["fault"]) and t["fault"]["kind"] == kind for t in every)
        assert row["faults/retried_n"] == retried
        lost = sum(t["status"] == "failed" for t in every) // GROUP
        assert row["groups/started_n"] == PROMPTS and row["groups/dropped_failed_n"] == lost
        assert row["groups/trained_n"] == PROMPTS - lost
    assert seen or share == 0.01
    assert summary(tmp_path / "run")["stop_reason"] == "all phases done"


@pytest.mark.slow
def test_a_step_of_which_too_much_was_lost_is_skipped(tmp_path):
    """Half of the episodes may fail; if more do, nothing is trained on, and the counts still add up."""
    faults = ["reset_raise", "", "reset_raise", "", ""]
    changes = {"FilterConfig_dot_max_failed_frac": 0.4, "rl/Phase.steps": 8}
    assert start(tmp_path / "run", faults, tmp_path, **changes) == 0
    shares = []
    for row in rows(tmp_path / "run"):
        shares.append(row["faults/env_n"] / (PROMPTS * GROUP))
        assert row["groups/trained_n"] == (0 if shares[-1] > 0.4 else PROMPTS * (1 - shares[-1]))
        assert row["groups/dropped_failed_n"] == PROMPTS - row["groups/trained_n"]
    assert min(shares) <= 0.4 < max(shares)


@pytest.mark.slow
def test_workers_that_hang_and_die_do_not_end_a_run(tmp_path):
    """In worker processes, which are killed and replaced."""
    folder = tmp_path / "marks"
    folder.mkdir()
    faults = faults_of(0.1, ["reset_once_kill", "reset_hang"])
    changes = {
        "PoolConfig_dot_where": "'process'",
        "PoolConfig_dot_reset_s": 1.0,
        "PoolConfig_dot_max_fault_frac": 1.0,
        "PoolConfig_dot_episodes_per_worker": 4,
        "RolloutConfig_dot_retries": 8,
    }
    assert start(tmp_path / "run", faults, folder, spec="FaultyProcess", **changes) == 0
    for step in range(1, STEPS + 1):
        for t in trajectories(tmp_path / "run", step):
            fault = t["task"]["content"].partition(" ")[2]
            assert (t["status"] == "failed") == (fault == "reset_hang"), t["fault"]


@pytest.mark.sweep
def test_a_task_in_eight_that_crashes_its_worker_does_not_end_a_run(tmp_path):
    """With default settings, although all episodes share one worker."""
    changes = {"PoolConfig_dot_where": "'process'", "PoolConfig_dot_workers": 1, "PoolConfig_dot_fault_window": 16}
    assert start(tmp_path / "run", ["reset_segv", *[""] * 7], tmp_path, spec="FaultyProcess", **changes) == 0
    written, aside = rows(tmp_path / "run"), 0
    assert len(written) == STEPS
    for step, row in enumerate(written, 1):
        every = trajectories(tmp_path / "run", step)
        for t in every:
            fault = t["task"]["content"].partition(" ")[2]
            assert (t["status"] == "failed") == bool(fault), t["fault"]
            assert not fault or t["fault"]["kind"] == "env" and t["fault"]["stage"] in ("reset", "set_aside")
        failed = [t for t in every if t["status"] == "failed"]
        assert row["faults/env_n"] == len(failed) and row["faults/infra_n"] == 0
        assert row["faults/set_aside_n"] == sum(t["fault"]["stage"] == "set_aside" for t in failed)
        aside += row["faults/set_aside_n"]
    assert aside, "no task of the test was set aside"


async def nothing(*args, **settings):
    return []


def test_a_run_that_hangs_says_where(tmp_path, capfd, monkeypatch):
    """A long wait is reported by name, and at its end the stacks of all threads are saved."""
    monkeypatch.setattr(waits, "CHECK_EVERY_S", 0.05)
    monkeypatch.setattr(waits, "QUIET_S", 0.5)
    monkeypatch.setattr(preflight, "check_rewards", nothing)  # which would notice before the run that nothing answers
    changes = {"PoolConfig_dot_where": "'thread'", "PoolConfig_dot_close_s": 1.0, "Recipe_dot_wait_s": 8.0}
    assert start(tmp_path / "run", [""], tmp_path, **changes, Faulty_dot_latency_s=1000.0) == 7
    err = capfd.readouterr().err
    assert "nothing has moved for" in err and "waiting for the held-out evaluation" in err
    assert "4 under way" in err and "sampler idle" in err and " 4 step" in err
    (report,) = (tmp_path / "run" / "crash").iterdir()
    assert str(report) in err and "Traceback" not in err
    text = report.read_text()
    assert "waited 8 s for the held-out evaluation" in text
    assert "thread rolljax-env" in text and "in step" in text and "thread rolljax-sampler" in text


def test_when_nothing_survives_the_run_ends_with_the_reason(tmp_path, capfd):
    assert start(tmp_path / "run", ["reset_raise"], tmp_path) == 3
    err = capfd.readouterr().err
    assert "KeyError: 'hole'" in err and "Traceback" not in err
