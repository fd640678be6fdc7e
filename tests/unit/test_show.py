"""`rolljax.show`: the content of a run folder in a terminal, whatever the texts contain."""

import json

import numpy as np
import pytest

from rolljax import show
from rolljax.run.folder import RESOLVED
from rolljax.types import Fault, Key, Task, Trajectory, Turn

HOSTILE = "a\x1b[2J\x1b]0;pwned\x07b\u202egnp.exe[bold red]c[/bold red]\rgone :smile:"


def turn(text, reward=0.0):
    ids = np.array([258, 65, 259], np.int32)
    return Turn(
        ids, np.array([66, 257], np.int32), np.full(2, -0.5, np.float32), np.zeros(2, np.int32), "stop", reward, text
    )


def trajectory(draw, sibling, reward, text="up", status="ok", turns=1):
    fault = Fault("env", "step", f"KeyError {HOSTILE}") if status == "failed" else None
    task = Task("lake", draw, f"where now {draw}? {HOSTILE}")
    return Trajectory(
        Key(0, draw, sibling), task, (turn(text),) * turns, reward, {"form": reward}, reward > 0, status, fault
    )


def make_run(path, scale=1.0, seed=0):
    (path / "rollouts").mkdir(parents=True)
    (path / RESOLVED).write_text(json.dumps({"seed": seed, "env.name": "lake", "model.__class__": "Qwen3Config"}))
    rows = []
    for step in (1, 2, 3):
        rows.append({
            "step": step, "phase_step": step, "phase": "rl", "reward/mean": scale * step / 4, "rollout/len_tok": 2.0,
            "rollout/fail_frac": 0.25 if step == 2 else 0.0, "time/step_s": 1.0, "time/rollout_s": 0.8, "time/update_s": 0.2,
            "tput/sample_tok_s": 10.0, "env/own": 5.0,
        })  # fmt: skip
        every = [
            trajectory(7, 0, 0.0),
            trajectory(7, 1, 0.0),
            trajectory(9, 0, 0.0, "bad\nanswer"),
            trajectory(9, 1, 1.0, HOSTILE, turns=2),
        ]
        if step == 2:
            every[0] = trajectory(7, 0, 0.0, status="failed")
        (path / "rollouts" / f"step_{step}.jsonl").write_text("".join(json.dumps(t.to_json()) + "\n" for t in every))
    (path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "run")


def shown(capsys, *argv):
    code = show.main([str(a) for a in argv])
    done = capsys.readouterr()
    assert all(c.isprintable() or c == "\n" for c in done.out), "nothing of it may reach the terminal as it is"
    assert code == 0, done.err
    return done.out


def test_a_run_its_curves_and_what_to_look_at_next(run, capsys):
    out = shown(capsys, run)
    assert "reward/mean" in out and "▁▅█" in out and "0.25" in out and "0.75" in out and "3 steps, 1 to 3" in out
    assert "env/own" in shown(capsys, run, "--metric", "env/own")


def test_a_step_has_its_groups_in_the_order_of_their_spread(run, capsys):
    lines = shown(capsys, run, "--step", 3).splitlines()
    draws = [line.split()[0] for line in lines if line.strip() and line.split()[0] in ("7", "9")]
    assert draws == ["9", "7"] and any("0 1" in line and "0.500" in line for line in lines)


def test_the_best_is_shown_turn_by_turn_and_untrusted_text_is_only_text(run, capsys):
    out = shown(capsys, run, "--best", "--limit", 1)
    assert (
        "step 3: 1 of 4" in out and "prompt 9, sibling 1" in out and "turn 2: 2 tokens, stop" in out and "solved" in out
    )
    assert "\\x1b[2J" in out and "\\u202e" in out and "[bold red]c" in out and ":smile:" in out and "\\r" in out
    assert "reward 1 (form 1)" in out and "mean log-prob -0.500" in out and "<|user|>" in out


def test_a_limit_holds_for_trajectories_and_for_groups(run, capsys):
    assert "step 3: 2 of 4" in shown(capsys, run, "--best", "--limit", 2)
    assert "step 3: 3 of 4" in shown(capsys, run, "--best") and "step 3: 4 of 4" in shown(
        capsys, run, "--best", "--limit", 9
    )
    assert "2 groups, 4 traj" in shown(capsys, run, "--step", 3)
    lines = shown(capsys, run, "--step", 3, "--limit", 1)
    assert "1 of 2 groups, 4 trajectories" in lines and "where now 7" not in lines
    for argv, says in ((["--best", "--limit", "0"], "at least 1"), (["--limit", "2"], "limits nothing here")):
        assert show.main([str(run), *argv]) == 2 and says in capsys.readouterr().err


def test_the_worst_and_the_failed(run, capsys):
    assert "prompt 7, sibling 0" in shown(capsys, run, "--worst", "--limit", 1)
    out = shown(capsys, run, "--failed")
    assert "step 2: 1 of 1 failed" in out and "fault of env (step): KeyError" in out
    assert "0 of 0" in shown(capsys, run, "--failed", "--step", 1)


def test_two_runs_beside_each_other(run, tmp_path, capsys):
    other = make_run(tmp_path / "other", scale=0.5, seed=1)
    out = shown(capsys, run, "--compare", other)
    assert "-0.375" in out and "seed" in out and "env.name" not in out.replace("lake", "")
    assert "all settings are the same" in shown(capsys, run, "--compare", run)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--step", "9"], "the nearest is 3"),
        (["--metric", "reward/maen"], "reward/mean"),
        (["--compare", "/tmp"], "run folder"),
    ],
)
def test_what_is_not_there_is_named(run, capsys, argv, says):
    assert show.main([str(run), *argv]) == 2
    assert says in capsys.readouterr().err


def test_a_run_without_rollouts(run, capsys):
    for file in (run / "rollouts").iterdir():
        file.unlink()
    assert "kept no rollouts" in shown(capsys, run, "--best") and "rollouts:" not in shown(capsys, run)


def test_a_damaged_file_is_an_error_not_a_traceback(run, capsys):
    (run / "rollouts" / "step_3.jsonl").write_text("{")
    assert show.main([str(run), "--best"]) == 6 and "cannot be read" in capsys.readouterr().err
