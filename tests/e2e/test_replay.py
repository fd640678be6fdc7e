"""Asynchronous runs: killed at any moment they lose no draw and train none twice, and a replay of their log ends with
the same bits."""

import functools
import json
import os
import random
import shutil
import subprocess
import sys
import time

import pytest

from rolljax import cli
from rolljax.commands.train import main, parse, train
from rolljax.concurrency.lockstep import SingleProcess
from rolljax.console.progress import Console
from rolljax.metrics import check_row
from rolljax.recipe import Phase
from rolljax.run.checkpoint import Checkpoints
from rolljax.run.consumed import ConsumedStep, DrawAccount
from rolljax.run.folder import RunFolder
from tests.ends import at_points, end

from .conftest import ROOT, arguments, check_conserved, rows, summary
from .test_kills import TINY

STEPS, PROMPTS = 6, 4
TINY_ASYNC = TINY | {
    "rl__Phase_dot_steps": STEPS,
    "rl__Phase_dot_prompts_per_step": PROMPTS,
    "rl__Phase_dot_async_ratio": 2,
    "Recipe_dot_keep_rollouts": "None",
}
LATE = {
    "wait": {},
    "resample": {"rl__Phase_dot_late": "'resample'", "rl__Phase_dot_spare_prompts": 2},
    "drop": {"rl__Phase_dot_late": "'drop'", "rl__Phase_dot_spare_prompts": 2, "rl__Phase_dot_spare_siblings": 1},
}


@functools.cache
def loaded(changes):
    """Load the settings."""
    args = parse(arguments("-", **TINY_ASYNC | dict(changes)))
    return cli.load_recipe(args.gin, args.set)


def start(run_dir, replay_of=None, **changes):
    """Run the command with loaded settings; return its exit code."""
    config, console, began = loaded(tuple((LATE["drop"] | changes).items())), Console(), time.perf_counter()
    return cli.run_verb(lambda: train(config, run_dir, console, began, SingleProcess(), replay_of=replay_of))


def log_of(run_dir):
    return [ConsumedStep(**row) for row in RunFolder(run_dir).rows("consumed.jsonl")]


def check_account(lines, late):
    """Check that every draw of the asynchronous phase is trained, cancelled or waiting at every step, never twice."""
    phase = Phase("rl", loaded(()).value.phases[1].algorithm, STEPS, PROMPTS, 4, async_ratio=2, late=late)
    account, trained, gone = DrawAccount(phase), [], set()
    for line in (line for line in lines if line.phase == "rl"):
        account.add(line)
        trained += line.prompt_indices
        gone |= {draw for draws in line.dropped.values() for draw in draws}
        waiting = {*map(int, line.waiting)}
        assert {*trained} | gone | waiting == {*range(account.num_drawn)} and not {*trained} & waiting
        assert all(0 <= line.version - v <= 2 for v in line.start_versions)
    assert len({*trained}) == len(trained)
    assert late == "resample" or not {*trained} & gone
    assert late == "drop" or not gone - {*trained} - waiting
    return trained


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Return an asynchronous run that trained to its end, and a copy of its folder from the moment it wrote its seventh
    step."""
    folder = tmp_path_factory.mktemp("recorded")
    run_dir, killed = folder / "run", folder / "killed"

    def copy(point, path):
        if point == "before" and path.name == "step_7.jsonl":
            shutil.copytree(run_dir, killed)

    with at_points(do=copy):
        assert start(run_dir) == 0
    assert len(check_account(log_of(run_dir), "drop")) == STEPS * PROMPTS
    return run_dir, killed


NOT_LOGGED = {"groups/started_n", "groups/waiting_n", "start_states/experts_n"}
"""Numbers that differ in a replay: it starts no draw again, and plays no expert's episode."""


OF_THE_RUN = ("hf/README.md", "hf/curves.png")
"""Files about how the weights were made. A replay has no metrics of the sampler."""


def assert_same(ours, theirs):
    """Check that two runs trained the same, to the last bit; only one of them sampled for it."""
    assert summary(ours)["state_sha256"] == summary(theirs)["state_sha256"]
    assert (ours / "consumed.jsonl").read_bytes() == (theirs / "consumed.jsonl").read_bytes()
    ends = [end(run_dir) for run_dir in (ours, theirs)]
    for found in ends:
        found["files"] = {name: of for name, of in found["files"].items() if name not in OF_THE_RUN}
    for name in ("summary", "rollouts", "files", "settings"):
        assert ends[0][name] == ends[1][name], name
    for mine, other in zip(ends[0]["rows"], ends[1]["rows"], strict=True):
        both = mine.keys() & other.keys() - NOT_LOGGED
        assert {k: mine[k] for k in both} == {k: other[k] for k in both} and "reward/mean" in both


@pytest.mark.slow
def test_a_replay_ends_at_the_same_bits(recorded, tmp_path, capsys):
    run_dir, _ = recorded
    assert start(tmp_path / "again", run_dir) == 0
    assert "replaying steps 1 to 8" in capsys.readouterr().err.replace("\n", " ")
    assert_same(tmp_path / "again", run_dir)
    of_rl = rows(tmp_path / "again")[2:]
    assert [check_row(row) for row in of_rl] == [[]] * STEPS and "sampler/dispatches_n" not in of_rl[0]
    check_conserved(of_rl)


@pytest.mark.slow
def test_a_run_of_another_history_is_not_continued_by_a_replay(recorded, tmp_path, capsys):
    run_dir, killed = recorded
    other = shutil.copytree(killed, tmp_path / "other")
    lines = (other / "consumed.jsonl").read_text().splitlines()
    line = json.loads(lines[3])
    line["prompt_indices"][0] = 99
    (other / "consumed.jsonl").write_text("\n".join([*lines[:3], json.dumps(line), *lines[4:]]) + "\n")
    assert start(other, run_dir) == 2
    assert "trained other samples in step 4" in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.sweep
def test_a_killed_run_is_continued_by_a_replay(recorded, tmp_path):
    """A copy of the run itself from a checkpoint in its middle, and a replay that is killed there."""
    run_dir, killed = recorded
    assert Checkpoints(killed / "ckpt").names()[-1].endswith("step_6")
    assert start(killed, run_dir) == 0
    assert_same(killed, run_dir)

    def copy(point, path):
        if point == "before" and path.name == "step_7.jsonl":
            shutil.copytree(tmp_path / "again", tmp_path / "stopped")

    with at_points(do=copy):
        assert start(tmp_path / "again", run_dir) == 0
    assert start(tmp_path / "stopped", run_dir) == 0
    assert_same(tmp_path / "stopped", run_dir)


@pytest.mark.sweep
@pytest.mark.parametrize("late", LATE)
def test_a_replay_continues_after_the_end_of_the_log(tmp_path, late):
    """Also with a run that was stopped in its middle, by a setting of fewer steps."""
    run_dir, again = tmp_path / "run", tmp_path / "again"
    settings = LATE["drop"] | {"rl__Phase_dot_late": "'drop'"} | LATE[late]
    settings |= {} if late == "drop" else {"rl__Phase_dot_spare_siblings": 0}
    settings |= {"rl__Phase_dot_spare_prompts": 0} if late == "wait" else {}
    settings |= {"rl__Phase_dot_late": f"'{late}'"}
    assert start(run_dir, **settings | {"rl__Phase_dot_steps": 3}) == 0
    assert start(again, run_dir, **settings) == 0
    assert log_of(again)[:5] == log_of(run_dir)
    assert len(check_account(log_of(again), late)) == STEPS * PROMPTS
    check_conserved(rows(again)[2:]) if late != "drop" else None
    assert all("sampler/dispatches_n" in row for row in rows(again)[5:])


FEW = {
    "Recipe.max_answer_tok": 8,
    "SamplerConfig.slots": 16,
    "Evaluation.tasks": 4,
    "rl/Phase.steps": 4,
    "rl/Phase.prompts_per_step": 4,
    "rl/Phase.group_size": 4,
    "rl/Phase.eval_every": 0,
    "warm_start/Phase.steps": 2,
    "warm_start/Phase.prompts_per_step": 4,
    "warm_start/Phase.eval_every": 0,
    "warm_start/Phase.stop_at_reward": None,
}
FEW_OF_CRITICS = FEW | {
    "reward_model/Phase.steps": 2,
    "reward_model/Phase.prompts_per_step": 4,
    "reward_model/Phase.updates_per_step": 2,
}
FEW_OF_IPA = {
    "SamplerConfig.slots": 16,
    "Evaluation.tasks": 4,
    "ipa/Phase.steps": 6,
    "ipa/Phase.prompts_per_step": 4,
    "ipa/Phase.group_size": 4,
    "ipa/Phase.eval_every": 3,
    "ipa/Phase.async_ratio": 1.5,
    "KeyDoorChain.length": 3,
}
DROPPING = {"rl/Phase.late": "'drop'", "rl/Phase.spare_prompts": 2}
KINDS = {
    "experts, several turns": ("agent_ipa", FEW_OF_IPA),
    "critics": ("reward_model_ppo", FEW_OF_CRITICS | DROPPING | {"rl/Phase.async_ratio": 1}),
    "teachers": ("algorithms/opd", FEW | DROPPING | {"rl/Phase.async_ratio": 1}),
    "tail batching": ("algorithms/grpo", FEW),
    "dynamic sampling": ("algorithms/dapo", FEW | {"rl/Phase.async_ratio": 2, "ReasoningGym.partial_credit": True}),
}

ROUNDS = """
from __gin__ import dynamic_registration
from rolljax import recipe
from rolljax.rollout import group_buffer
rl/recipe.Phase.tail_batching = @group_buffer.TailBatching()
"""


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", KINDS)
def test_replays_of_every_kind_end_at_the_same_bits(tmp_path, kind):
    config, settings = KINDS[kind]
    argv = ["--gin", config, "--set", "MeshSpec.data = 1"]
    if kind == "tail batching":
        (tmp_path / "rounds.gin").write_text(ROUNDS)
        argv += ["--gin", str(tmp_path / "rounds.gin")]
    argv += [a for name, value in settings.items() for a in ("--set", f"{name} = {value}")]
    run_dir, again = tmp_path / "run", tmp_path / "again"
    assert main([*argv, "--run_dir", str(run_dir)]) == 0
    assert main([*argv, "--run_dir", str(again), "--replay", str(run_dir)]) == 0
    assert_same(again, run_dir)


# ---- SIGKILL

KILLED_BY_EVENT = """
import os, random, sys
from rolljax.commands.train import main
from rolljax.rollout.group_buffer import GroupBuffer
from rolljax.rollout.episodes import SamplerPolicy
from rolljax.storage import durable
chance = random.Random(int(sys.argv[1]))
points, events = chance.randrange(int(sys.argv[2])), chance.choice((0, chance.randrange(40)))
def event(*_):
    global events
    events -= points <= 0
    if events < 0:
        os.kill(os.getpid(), 9)
def reach(point, path):
    global points
    points -= 1
    event()
def noted(call):
    def around(*args, **kwargs):
        event()
        found = call(*args, **kwargs)
        event()
        return found
    return around
durable.reach = reach
for cls, name in ((GroupBuffer, "start"), (GroupBuffer, "finished"), (GroupBuffer, "take"), (SamplerPolicy, "act")):
    setattr(cls, name, noted(getattr(cls, name)))
sys.exit(main(sys.argv[3:]))
"""
"""Ends at a random event of groups, after a random point where the disk changes."""
POINTS = 100


def killed_until_done(run_dir, late, chance):
    """Start a run again and again, SIGKILL at a random moment each time, until it ends by itself; how often it was
    killed. Whatever is on the disk then has lost no draw."""
    kills, code, argv = 0, -9, arguments(run_dir, **TINY_ASYNC | LATE[late])
    while code:
        command = [sys.executable, "-c", KILLED_BY_EVENT, str(chance.randrange(10**6)), str(POINTS), *argv]
        done = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
        code = done.returncode
        assert code in (0, -9), done.stderr
        kills += code == -9
        check_checkpoint(run_dir, late)
    return kills


def check_checkpoint(run_dir, late):
    """Check that the newest checkpoint accounts for every draw: its steps trained or cancelled it, or it waits."""
    if not (names := Checkpoints(run_dir / "ckpt").names()):
        return
    progress = json.loads((run_dir / "ckpt" / names[-1] / "progress.json").read_text())
    lines = [line for line in log_of(run_dir) if line.step <= progress["total_steps"]]
    assert [line.step for line in lines] == list(range(1, progress["total_steps"] + 1))
    if progress["phase"] == 1 and progress["groups"]:
        trained = check_account(lines, late)
        assert {*progress["groups"]["tasks"]} == {*lines[-1].waiting}
        assert progress["groups"]["buffer"]["num_trained"] == len(trained) == progress["step"] * PROMPTS


@pytest.mark.parametrize(
    ("late", "kills"),
    [
        pytest.param("drop", 2, marks=pytest.mark.sweep),
        *(pytest.param(late, 7, marks=pytest.mark.sweep) for late in LATE),
    ],
)
def test_random_kills_lose_no_draw_and_the_log_can_be_replayed(tmp_path, capsys, late, kills):
    chance, killed, runs = random.Random(kills), 0, 0
    while killed < kills:
        run_dir, runs = tmp_path / str(runs), runs + 1
        killed += killed_until_done(run_dir, late, chance)
        trained = check_account(log_of(run_dir), late)
        assert [line.step for line in log_of(run_dir)] == list(range(1, STEPS + 3))
        assert summary(run_dir)["phase_steps"] == {"warm_start": 2, "rl": STEPS}
        assert len(trained) == STEPS * PROMPTS and (late == "drop" or sorted(trained) == list(range(STEPS * PROMPTS)))
        check_conserved(rows(run_dir)[2:])
    argv = arguments(tmp_path / "again", **TINY_ASYNC | LATE[late])
    assert main([*argv, "--replay", str(run_dir)]) == 0
    assert_same(tmp_path / "again", run_dir)
    with capsys.disabled():
        sys.stdout.write(f"\n{late}: {killed} kills in {runs} runs, no draw lost; a replay of the last is the same\n")
