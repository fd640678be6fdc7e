"""Runs whose reward is a judge behind a real server: their training, stopping and resuming, and evaluation."""

import json

import pytest

from rolljax import cli, loop
from rolljax.commands.train import main as train
from rolljax.commands.train import parse
from rolljax.concurrency.event_loop import Stopped
from rolljax.eval import main as evaluate
from rolljax.metrics import check_row
from rolljax.run.folder import RunFolder
from rolljax.run.preflight import check as check_run
from rolljax.trainer.state import fingerprint
from tests.judge_server import judge_server, share

from .conftest import QUICKSTART, SMALL, StopAt, check_conserved, rows

CONFIG = f"""
from __gin__ import dynamic_registration
from rolljax import recipe
from rolljax.chat_models import client
from rolljax.judging import calls
from rolljax.rewards import compose
from rolljax.rewards import environment
from rolljax.rewards import judge
from rolljax.rewards import rules
include '{QUICKSTART}'
recipe.Recipe.reward = @compose.Sum()
compose.Sum.terms = {{'own': @environment.Environment(), 'judge': @judge.Judge(), 'said': @rules.Repetition()}}
compose.Sum.weights = {{'judge': 0.5}}
judge.Judge.model = @client.EndpointConfig()
client.EndpointConfig.model = 'judge'
client.EndpointConfig.retries = 0
judge.Judge.rubric = '{{question}} {{answer}}'
judge.Judge.limits = @calls.CallLimits()
calls.CallLimits.backoff_s = 0.001
calls.CallLimits.retries = 6
"""
SHORT = {"warm_start/Phase.steps": 2, "rl/Phase.steps": 4, "Recipe.save_every": 2, "Evaluation.tasks": 4}


def verdict(text):
    return json.dumps({"score": round(10 * share(text), 3)})


def fault(number, text):
    """Return no fault, or one of three, by the number of earlier requests."""
    return {0: "garbage", 1: "status_503", 2: "refuse"}.get(number % 11, "")


def arguments(folder, url, name="run", **changes):
    config = folder / "judged.gin"
    config.write_text(CONFIG)
    settings = SMALL | SHORT | {"EndpointConfig.url": repr(url)} | changes
    argv = ["--gin", str(config), "--run_dir", str(folder / name)]
    return argv + [a for key, value in settings.items() for a in ("--set", f"{key} = {value}")]


def run(argv, stop_at=None):
    args = parse(argv)
    config = cli.load_recipe(args.gin, args.set)
    plan, folder = check_run(config.value), RunFolder(args.run_dir)
    folder.prepare(config, fresh=False)
    console = StopAt(stop_at)
    return loop.train(plan, folder, console, should_stop=lambda: console.stopped)


def trajectories(folder, step):
    return [json.loads(line) for line in (folder / "rollouts" / f"step_{step}.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_judged_run_is_what_it_is_stopped_continued_and_with_faults(tmp_path, capsys):
    with judge_server(verdict) as server:
        whole, _ = run(arguments(tmp_path, server.url, "whole"))
        asked = len(server.asked)
    with judge_server(verdict, fault) as server:
        argv = arguments(tmp_path, server.url, "parts")
        with pytest.raises(Stopped):
            run(argv, stop_at=5)
        parts, _ = run(argv)
        faulty = len(server.asked)
        assert fingerprint(parts.state) == fingerprint(whole.state)
        code = evaluate(["--run", str(tmp_path / "parts"), "--tasks", "4", "--to", str(tmp_path / "report")])
        assert code == 0 and (tmp_path / "report" / "verdicts").is_dir()
    assert asked < faulty
    every = rows(tmp_path / "parts")
    assert not [w for row in every for w in check_row(row)]
    check_conserved(every)
    judged = [row for row in every if row["phase"] == "rl"]
    assert all(row["rewards/lost_n"] == 0 and "rewards/part/judge" in row for row in judged)
    kinds = {name for row in judged for name in row if name.startswith("rewards/faults/") and row[name]}
    assert {"rewards/faults/garbage_n", "rewards/faults/status_503_n", "rewards/faults/connection_n"} <= kinds
    for t in trajectories(tmp_path / "whole", 6):
        parts = t["reward_parts"]
        assert t["reward"] == pytest.approx(parts["own"] + 0.5 * parts["judge"] + parts["said"])
        assert t["turns"][-1]["reward"] == t["reward"]


@pytest.mark.slow
def test_without_a_judge_nothing_is_trained_and_the_run_ends(tmp_path, capsys):
    with judge_server(verdict) as server:
        server.up.clear()
        limits = {"CallLimits.outage_s": 0.01, "CallLimits.probe_s": 0.01, "CallLimits.retries": 0}
        assert train(arguments(tmp_path, server.url, **limits, **{"warm_start/Phase.steps": 1})) == 3
    assert "no trajectory survived for 3 steps" in (said := capsys.readouterr().err) and "infra (reward)" in said
    judged = [row for row in rows(tmp_path / "run") if row["phase"] == "rl"]
    assert all(row["rewards/lost_n"] == 32 and row["groups/trained_n"] == 0 for row in judged)


@pytest.mark.parametrize(
    ("bindings", "says"),
    [
        ("recipe.Recipe.reward = @rules.Answer()", "finds no recorded answer of task 0 of spell_backward"),
        ("recipe.Recipe.reward = @broken/function.Function()\nbroken/function.Function.fn = @reward_of_mine.broken",
         "Recipe.reward, task 0, the reference answer: env (reward): reward_of_mine.broken: ZeroDivisionError"),
    ],
)  # fmt: skip
def test_a_reward_that_cannot_work_ends_a_run_before_it_allocates(tmp_path, capsys, monkeypatch, bindings, says):
    (tmp_path / "reward_of_mine.py").write_text("def broken(task, said):\n    return 1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "wrong.gin").write_text(
        "from __gin__ import dynamic_registration\nfrom rolljax import recipe\nfrom rolljax.rewards import rules\n"
        f"from rolljax.rewards import function\nimport reward_of_mine\ninclude '{QUICKSTART}'\n{bindings}\n"
    )
    assert train(["--gin", str(tmp_path / "wrong.gin"), "--dry_run"]) in (2, 3)
    assert says in " ".join(capsys.readouterr().err.split())
