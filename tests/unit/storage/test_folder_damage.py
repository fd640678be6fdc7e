"""A run folder in which something stands that no run has written: what a run, `show` and the library say of it."""

import json
import os
import shutil
from types import SimpleNamespace

import pytest

from rolljax import reading, show
from rolljax.errors import CheckpointError, ConfigError, RolljaxError, StorageError
from rolljax.library.run import Run
from rolljax.run.checkpoint import Checkpoints, damage
from rolljax.run.consumed import ConsumedStep
from rolljax.run.folder import RunFolder
from rolljax.storage import durable
from rolljax.storage.journal import parse
from rolljax.storage.layout import rollout_files
from rolljax.storage.run_reader import row
from tests.unit.test_show import make_run, trajectory

DEEP = "[" * 100_000
"""Deeper than any parser of JSON goes."""


def pipe(path):
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def dangling(path):
    path.unlink(missing_ok=True)
    path.symlink_to(path.parent / "nowhere" / "at all")


def folder_there(path):
    path.unlink(missing_ok=True)
    path.mkdir()


def endless(path):
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


INSTEAD = {
    "pipe": pipe,
    "dangling": dangling,
    "circle": lambda path: (path.unlink(missing_ok=True), path.symlink_to(path)),
    "folder": folder_there,
    "device": endless,
    "deep": lambda path: path.write_text(DEEP),
    "deep in a key": lambda path: path.write_text('{"step": 1, "steps": 3, "a": ' + "[" * 900 + "]" * 900 + "}\n"),
    "other types": lambda path: path.write_text('{"steps": "3", "step": true, "heldout_reward": 7, "packages": 1}\n'),
    "a list": lambda path: path.write_text("[]\n"),
    "binary": lambda path: path.write_bytes(bytes(range(256))),
    "empty": lambda path: path.write_text(""),
}


@pytest.fixture
def run(tmp_path):
    """Write the files of a run of three steps that readers use."""
    path = make_run(tmp_path / "run")
    entry = {"phase": "start", "step": 0, "mean": 0.5, "n": 2}
    summary = {"stop_reason": "all phases done", "steps": 3, "wall_s": 3.0, "heldout_reward": [entry]}
    (path / "summary.json").write_text(json.dumps(summary))
    env = {"python": "3", "packages": {"jax": "1"}, "platform": "cpu", "devices": 1, "command": ["train"]}
    (path / "env.json").write_text(json.dumps(env))
    (path / "config.gin").write_text("")
    return path


STRAY = ("step_3 (copy).jsonl", "step_03.jsonl", "step_1e3.jsonl", "step_٣.jsonl", "step_.jsonl", "step_4.jsonl.bak")


def test_stray_files_among_rollouts_are_nobodys(run, capsys):
    for name in STRAY:
        (run / "rollouts" / name).write_text("not ours")
    (run / "rollouts" / "step_9 of another run").mkdir()
    assert [*rollout_files(run)] == [1, 2, 3] and Run(run).steps == [1, 2, 3]
    assert show.main([str(run), "--best"]) == 0 and show.main([str(run)]) == 0
    assert "3 steps, 1 to 3" in capsys.readouterr().out
    RunFolder(run).forget_after(2, lambda _: None)
    assert {p.name for p in (run / "rollouts").iterdir()} >= {*STRAY, "step_1.jsonl", "step_2.jsonl"}
    assert not (run / "rollouts" / "step_3.jsonl").exists()


FILES = ("metrics.jsonl", "starts.jsonl", "summary.json", "env.json", "config.resolved.json", "rollouts/step_3.jsonl")


@pytest.mark.parametrize("kind", INSTEAD)
def test_whatever_stands_in_place_of_a_file_is_one_line(run, tmp_path, capsys, kind):
    """Of `show` and the library; they end by themselves."""
    for file in FILES:
        place = shutil.copytree(run, tmp_path / file.replace("/", "-"))
        INSTEAD[kind](place / file)
        for argv in ([], ["--best"], ["--step", "3"], ["--compare", str(run)]):
            code, said = show.main([str(place), *argv]), capsys.readouterr()
            assert code in (0, 2, 6) and "Traceback" not in said.err, (file, argv)
            if code:
                assert file.split("/")[-1] in said.err and len(said.err.splitlines()) <= 3, (file, argv, said.err)
        for look in (repr, lambda r: r.metrics, lambda r: r.trajectories(), lambda r: r.curves()):
            try:
                look(Run(place))
            except RolljaxError as e:
                assert "\n" not in str(e), e


@pytest.mark.parametrize("kind", ["pipe", "circle", "dangling", "folder", "device"])
@pytest.mark.parametrize("file", [".lock", "starts.jsonl", "metrics.jsonl", "consumed.jsonl", "rollouts", "ckpt"])
def test_a_run_that_meets_it_ends_with_a_message_or_goes_on(run, kind, file):
    """What the command does before it trains, and the writes of a step."""
    if (run / file).is_dir():
        shutil.rmtree(run / file)
    INSTEAD[kind](run / file)
    config = SimpleNamespace(resolved=RunFolder(run).resolved(), operative="", value=None)
    folder = RunFolder(run)
    try:
        with folder.lock():
            folder.prepare(config, fresh=False)
            folder.mark()
            folder.begin()
            folder.forget_after(3, lambda _: None)
            folder.write_row({"step": 4})
            folder.write_consumed(consumed(4))
            folder.write_rollouts(4, [trajectory(1, 0, 1.0)])
    except (StorageError, CheckpointError, ConfigError) as e:
        assert file.split("/")[0] in str(e)


def test_links_are_taken_away_and_not_what_they_lead_to(tmp_path):
    home, run = tmp_path / "home", tmp_path / "run"
    home.mkdir()
    run.mkdir()
    (home / ".notes.tmp").write_text("mine")
    (run / "link").symlink_to(home)
    for i in range(6):  # a tree that never ends for who follows them
        (run / f"again{i}").symlink_to(run)
    (run / ".left.tmp").symlink_to(home)
    durable.sweep(run)
    durable.remove(run / "link")
    assert (home / ".notes.tmp").read_text() == "mine" and not (run / "link").is_symlink()
    assert not (run / ".left.tmp").is_symlink()


@pytest.mark.parametrize("kind", ["pipe", "dangling", "folder", "device"])
def test_a_checkpoint_with_such_a_file_is_damaged(tmp_path, kind):
    with durable.folder(tmp_path / "ckpt" / "000001_step_1") as place:
        (place / "progress.json").write_text("{}")
        digest = "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"  # of {}
        (place / "manifest.sha256").write_text(f"{digest}  progress.json\n")
    assert damage(tmp_path / "ckpt" / "000001_step_1") == ""
    for file in ("progress.json", "manifest.sha256"):
        place = shutil.copytree(tmp_path / "ckpt", tmp_path / file)
        INSTEAD[kind](place / "000001_step_1" / file)
        assert file in damage(place / "000001_step_1")
        with pytest.raises(CheckpointError, match="no checkpoint is whole"):
            Checkpoints(place).latest(lambda _: None)


# ---- messages about records when a run continues


def consumed(step, rollouts=""):
    none = {"no_signal": [], "failed": [], "late": []}
    return ConsumedStep(step, "rl", step - 1, [step], [0], none, {}, "", {}, {}, rollouts=rollouts)


@pytest.fixture
def recorded(tmp_path):
    """Write the records of four steps and of an evaluation; return the folder and the state of a checkpoint after
    them."""
    folder = RunFolder(tmp_path / "run")
    (folder.path / "rollouts").mkdir(parents=True)
    for step in (1, 2, 3, 4):
        digest = folder.write_rollouts(step, [trajectory(step, 0, 1.0)])
        folder.write_consumed(consumed(step, digest))
        folder.write_row({"step": step, "phase": "rl", "reward/mean": step / 4})
    folder.write_heldout("start", [trajectory(1, 0, 0.0)])
    return folder.path, json.loads(json.dumps(folder.recorded()))


def said_of(path, records, keep=None):
    said = []
    RunFolder(path).forget_after(4, said.append, records, keep)
    return said


def swap(one, two):
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)


def edit(path, before, now):
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, now, 1))


DAMAGE = {
    "metrics missing": (lambda p: (p / "metrics.jsonl").unlink(), "metrics.jsonl is missing"),
    "consumed missing": (lambda p: (p / "consumed.jsonl").unlink(), "consumed.jsonl is missing"),
    "metrics changed": (lambda p: edit(p / "metrics.jsonl", "0.25", "0.95"), "metrics.jsonl is damaged.*SHA-256"),
    "consumed changed": (lambda p: edit(p / "consumed.jsonl", '"version":1', '"version":0'), "consumed.jsonl is dam"),
    "a row missing": (lambda p: edit(p / "metrics.jsonl", '"step":2', '"s":2'), "lacks 1 row.*first of step 2"),
    "logs swapped": (lambda p: swap(p / "metrics.jsonl", p / "consumed.jsonl"), "holds what consumed.jsonl held"),
    "rows swapped": (
        lambda p: (p / "metrics.jsonl").write_text("".join((p / "metrics.jsonl").read_text().splitlines(True)[::-1])),
        "metrics.jsonl is damaged.*SHA-256",
    ),
    "rollouts missing": (lambda p: (p / "rollouts/step_2.jsonl").unlink(), "rollouts is damaged: step_2.jsonl is miss"),
    "rollouts changed": (
        lambda p: edit(p / "rollouts/step_2.jsonl", "1.0", "0.0"),
        "step_2.jsonl is not as it was wri",
    ),
    "rollouts swapped": (
        lambda p: swap(p / "rollouts/step_2.jsonl", p / "rollouts/step_3.jsonl"),
        "step_3.jsonl holds what step_2.jsonl held; step_2.jsonl holds what step_3.jsonl held",
    ),
    "held-out changed": (
        lambda p: edit(p / "rollouts/heldout_start.jsonl", "0.0", "1.0"),
        "heldout_start.jsonl is not",
    ),
    "a pipe": (lambda p: pipe(p / "rollouts/step_2.jsonl"), "step_2.jsonl cannot be read: it is a named pipe"),
    "all rollouts": (lambda p: shutil.rmtree(p / "rollouts"), "step_4.jsonl is missing; .* and 1 more"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named_when_the_run_goes_on(recorded, kind):
    path, records = recorded
    do, said = DAMAGE[kind]
    assert said_of(path, records) == []
    do(path)
    found = said_of(path, records)
    assert found and all("\n" not in line and line.startswith("warning: ") for line in found)
    assert any(__import__("re").search(said, line) for line in found), found


def test_what_a_run_lets_go_is_not_missing(recorded):
    path, records = recorded
    RunFolder(path).retain(2, 2)
    for step in (1, 2):
        (path / "rollouts" / f"step_{step}.jsonl").unlink(missing_ok=True)
    assert said_of(path, records, keep=2) == []
    (path / "rollouts" / "step_3.jsonl").unlink()
    (path / "rollouts" / "step_1.jsonl").write_text("")
    assert "step_3.jsonl is missing" in said_of(path, records, keep=2)[0]


def test_later_steps_and_a_torn_line_are_no_damage(recorded):
    """A run that was killed after the checkpoint; and a checkpoint of an earlier rolljax, which records nothing."""
    path, records = recorded
    folder = RunFolder(path)
    folder.write_row({"step": 5, "phase": "rl"})
    with open(path / "metrics.jsonl", "a") as f:
        f.write('{"step": 6, "pha')
    assert said_of(path, records) == [] and [row["step"] for row in folder.rows()] == [1, 2, 3, 4]
    assert said_of(path, {}) == []


def test_steps_after_a_checkpoint_of_none_are_no_damage(tmp_path):
    """The run was killed before it saved its first step; its first checkpoint records empty logs."""
    path = tmp_path / "run"
    records = json.loads(json.dumps(RunFolder(path).recorded()))
    path.mkdir()
    RunFolder(path).write_row({"step": 1, "phase": "rl"})
    RunFolder(path).write_consumed(consumed(1))
    said = []
    RunFolder(path).forget_after(0, said.append, records)
    assert said == [] and RunFolder(path).rows() == []


def test_a_run_goes_on_recording_where_it_went_on(recorded):
    """What a checkpoint records is the same for a run that was continued and one that was not."""
    path, records = recorded
    again = RunFolder(path)
    again.forget_after(4, lambda _: None, records)
    assert again.recorded() == records
    for folder in (again, RunFolder(shutil.copytree(path, path.parent / "copy"))):
        folder.write_row({"step": 5, "phase": "rl"})
    assert again.recorded()["metrics.jsonl"] == folder.recorded()["metrics.jsonl"] != records["metrics.jsonl"]


# ---- the readers


def test_json_of_any_depth_is_a_value_or_an_error():
    assert reading.parse("[" * 60 + "]" * 60)
    for depth in (100, 900, 100_000):
        with pytest.raises(ValueError, match="nested too deeply"):
            reading.parse('{"a":' * depth + "1" + "}" * depth)


@pytest.mark.parametrize("kind", ["pipe", "folder", "device"])
def test_only_regular_files_are_opened(tmp_path, kind):
    INSTEAD[kind](tmp_path / "file")
    with pytest.raises(OSError, match="not a regular file"):
        reading.read_bytes(tmp_path / "file")
    (tmp_path / "target").write_text("x")
    (tmp_path / "link").symlink_to("target")
    assert reading.read_bytes(tmp_path / "link") == b"x"


def test_a_row_is_whole_or_none():
    assert parse(b'{"step": 1, "phase": "rl", "a/b": 0.5}\n{"step": 1, "draws": [1]}\n', row).damaged == 0
    for line in (
        '{"step": "1"}',
        '{"step": true}',
        '{"step": 1, "phase": 2}',
        '{"step": 1, "a/b": "x"}',
        "[1]",
        "",
        "{",
    ):
        assert parse(line.encode() + b"\n", row) == ([], bool(line), len(line) + 1)
