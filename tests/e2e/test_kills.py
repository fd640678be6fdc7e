"""A run that is killed anywhere, whose files are damaged, or that gets more steps: the same command again ends like the
uninterrupted run, to the last bit."""

import contextlib
import functools
import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rolljax import cli
from rolljax.commands.train import main as train
from rolljax.commands.train import parse
from rolljax.commands.train import train as train_recipe
from rolljax.concurrency.lockstep import SingleProcess
from rolljax.console.progress import Console
from rolljax.errors import ConfigError
from rolljax.run.checkpoint import MANIFEST, Checkpoints
from rolljax.run.folder import RunFolder
from rolljax.run.trainer import Trainer
from rolljax.storage import durable
from rolljax.trainer.state import fingerprint
from tests.ends import Killed, at_points, end

from .conftest import ROOT, arguments, summary

TINY = {
    "Qwen3Config_dot_num_layers": 1,
    "SamplerConfig_dot_slots": 16,
    "SamplerConfig_dot_prefill_chunk": 64,
    "warm_start__Phase_dot_steps": 2,
    "warm_start__Phase_dot_prompts_per_step": 4,
    "rl__Phase_dot_steps": 3,
    "rl__Phase_dot_prompts_per_step": 4,
    "rl__AdamW_dot_schedule": "'constant'",
    "Grpo_dot_kl": "@KlLoss()",  # so that the weights that the phase began with are kept
    "KlLoss_dot_coef": 0.1,
    "Evaluation_dot_tasks": 4,
    "Recipe_dot_save_every": 2,
    "Recipe_dot_keep_rollouts": 4,
    "MeshSpec_dot_data": 1,
}


@functools.cache
def loaded(**changes):
    """Load the settings."""
    args = parse(arguments("-", **TINY | changes))
    return cli.load_recipe(args.gin, args.set)


def start(run_dir, **changes):
    """Run the command with loaded settings; return its exit code."""
    config, console, began = loaded(**changes), Console(), time.perf_counter()
    return cli.run_verb(lambda: train_recipe(config, run_dir, console, began, SingleProcess()))


def contents(run_dir):
    """Return every file in a folder, to compare two states of it."""
    return {str(p.relative_to(run_dir)): p.read_bytes() if p.is_file() else None for p in run_dir.rglob("*")}


class Watched:
    """A run that was never stopped, with a copy of its disk at every point."""

    def __init__(self, folder):
        self.run_dir, self.at = folder / "run", folder / "at"
        self.points = []
        """Name and copy of the folder of each point; points between which nothing changed share one."""
        self._last = None
        with at_points(do=self._keep):
            assert start(self.run_dir) == 0
        self.end = end(self.run_dir)

    def _keep(self, point, path):
        now, state = contents(self.run_dir), self.at / str(len(self.points))
        if now == self._last:
            state = self.points[-1][1]
        else:
            shutil.copytree(self.run_dir, state)
        self.points.append((f"{point} {path.relative_to(self.run_dir)}", state))
        self._last = now

    def state(self, text, to):
        """Copy the folder as it was at the first point of this name."""
        return shutil.copytree(dict(reversed(self.points))[text], to)


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    return Watched(tmp_path_factory.mktemp("watched"))


def goes_on(run_dir, **changes):
    """Run the same command again."""
    assert start(run_dir, **changes) == 0
    return end(run_dir)


def tear(run_dir):
    """Leave half of a pending write: a line of metrics, a file before its rename. Return whether there was any."""
    torn = [p for p in run_dir.rglob("*") if p.is_file() and any(map(durable.is_temporary, (p, *p.parents)))]
    for path in torn:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    metrics = run_dir / "metrics.jsonl"
    if metrics.is_file():
        last = metrics.read_bytes().splitlines(keepends=True)[-1]
        metrics.write_bytes(metrics.read_bytes() + last[: len(last) // 2])
    return bool(torn) or metrics.is_file()


@pytest.mark.sweep
def test_killed_after_the_last_checkpoint_it_writes_its_results(watched, tmp_path, capsys):
    run_dir = watched.state("written hf", tmp_path / "run")
    assert not (run_dir / "hf").exists() and not (run_dir / "summary.json").exists()
    assert goes_on(run_dir) == watched.end
    assert "its results are not all there" in capsys.readouterr().err
    assert goes_on(run_dir) == watched.end
    assert "complete already (5 steps)" in capsys.readouterr().err
    shutil.rmtree(run_dir / "hf")
    assert goes_on(run_dir) == watched.end


@pytest.mark.slow
def test_killed_in_the_middle_with_a_damaged_checkpoint(watched, tmp_path, capsys):
    """In the phase that keeps the weights it began with; half a line is in metrics.jsonl."""
    run_dir = watched.state("before rollouts/step_5.jsonl", tmp_path / "run")
    assert tear(run_dir)
    newest = Checkpoints(run_dir / "ckpt").names()[-1]
    assert newest.endswith("step_4")
    data = max((run_dir / "ckpt" / newest / "arrays").rglob("*"), key=lambda p: p.stat().st_size)
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    assert goes_on(run_dir) == watched.end
    said = capsys.readouterr().err.replace("\n", "")
    assert "damaged and left out" in said and data.name in said
    assert "after step 2; 2 step(s) that were done after it are made again" in said


@pytest.mark.slow
def test_a_finished_run_is_given_more(watched, tmp_path, capsys):
    """First more steps and another phase, then more steps of that phase."""
    run_dir = tmp_path / "run"
    first = "[@warm_start/recipe.Phase()]"
    few = {"Recipe_dot_phases": first, "warm_start__Phase_dot_steps": 1}
    unread = [name for name in TINY if name.startswith(("rl", "Grpo", "KlLoss"))]
    settings = arguments(run_dir, **{k: v for k, v in TINY.items() if k not in unread} | few)
    settings = [a for i, a in enumerate(settings) if not _of_rl(settings, i)]
    assert train(settings) == 0 and summary(run_dir)["steps"] == 1
    goes_on(run_dir, rl__Phase_dot_steps=1)
    assert summary(run_dir)["phase_steps"] == {"warm_start": 2, "rl": 1}
    assert "continuing" in capsys.readouterr().err
    assert goes_on(run_dir) == watched.end


def _of_rl(argv, i):
    """Return whether this argument, or the one after it, is a setting of the phase that does not exist yet."""
    return any(a.startswith(("rl/", "Grpo.", "KlLoss.")) for a in argv[i : i + 2] if argv[i] == "--set" or a == argv[i])


def prepared(run_dir, **changes):
    return RunFolder(run_dir).prepare(loaded(**changes), fresh=False)


@pytest.mark.slow
def test_settings_that_may_change_between_starts(watched, tmp_path):
    run_dir = watched.state("before rollouts/step_5.jsonl", tmp_path / "run")  # 2 of 3 steps of rl are saved
    assert prepared(run_dir, rl__Phase_dot_steps=9, Recipe_dot_keep_checkpoints=5) == []
    assert prepared(run_dir, rl__Phase_dot_steps=2) == []
    with pytest.raises(ConfigError, match="2 steps of this phase are done"):
        prepared(run_dir, rl__Phase_dot_steps=1)
    with pytest.raises(ConfigError, match="was made with"):
        prepared(run_dir, warm_start__Phase_dot_steps=3)
    with pytest.raises(ConfigError, match="was made with"):
        prepared(run_dir, rl__AdamW_dot_lr=1.0)
    with pytest.raises(ConfigError, match="was made with"):
        prepared(run_dir, rl__AdamW_dot_schedule="'linear'")
    run_dir = watched.state("before rollouts/step_1.jsonl", tmp_path / "start")
    assert prepared(run_dir, rl__Phase_dot_steps=9, rl__AdamW_dot_lr=1.0, rl__AdamW_dot_schedule="'linear'") == []


@pytest.mark.slow
def test_a_setting_that_is_newer_than_a_run_has_its_default_there(watched, tmp_path):
    run_dir = watched.state("before rollouts/step_5.jsonl", tmp_path / "run")
    path = run_dir / "config.resolved.json"
    stored = json.loads(path.read_text())
    assert stored.pop("sampler.record_alternatives") == 0
    path.write_text(json.dumps(stored))
    assert prepared(run_dir) == []
    with pytest.raises(ConfigError, match="record_alternatives is 2 now, but the run in .* was made with 0"):
        prepared(run_dir, SamplerConfig_dot_record_alternatives=2)


@pytest.mark.slow
def test_more_steps_with_a_falling_learning_rate_give_a_note(watched, tmp_path):
    run_dir = watched.state("before rollouts/step_5.jsonl", tmp_path / "run")
    stored = json.loads((run_dir / "config.resolved.json").read_text())
    stored["phases[1].optimizer.schedule"] = "linear"
    (run_dir / "config.resolved.json").write_text(json.dumps(stored))
    (note,) = prepared(run_dir, rl__AdamW_dot_schedule="'linear'", rl__Phase_dot_steps=9)
    assert "rl/Phase.steps is 9, and was 3 for the 2 steps that are done" in note and "linear" in note


# ---- messages


@pytest.mark.parametrize("place", ["under a file", "nothing fits"])
def test_a_folder_that_cannot_be_written_is_a_message(tmp_path, capsys, place):
    run_dir = tmp_path / "place" / "run"
    if place == "under a file":
        run_dir.parent.write_text("")
    else:
        run_dir.parent.mkdir()
        mounted = ["mount", "-t", "tmpfs", "-o", "size=4k,nr_inodes=4", "none", str(run_dir.parent)]
        if subprocess.run(mounted, capture_output=True).returncode:
            pytest.skip("file systems cannot be mounted here")
    try:
        assert train(arguments(run_dir, **TINY)) == 74
    finally:
        if place == "nothing fits":
            subprocess.run(["umount", str(run_dir.parent)], check=True)
    said = capsys.readouterr().err
    assert "storage error: " in said and str(run_dir.parent) in said and "fix:" in said and "Traceback" not in said


@pytest.mark.sweep
def test_a_run_whose_console_is_full_ends_as_any_other(watched, tmp_path):
    """Also for a run whose files may not grow: it ends with that message's exit code, and resumes once they may."""
    run_dir = watched.state("before rollouts/step_5.jsonl", tmp_path / "run")
    command = [sys.executable, "-m", "rolljax.train", *arguments(run_dir, **TINY)]
    small = subprocess.run(
        ["bash", "-c", 'ulimit -f 8; exec "$@"', "-", *command], env=_environment(), capture_output=True
    )
    assert small.returncode == 74, small.stderr
    said = small.stderr.decode()
    assert "ulimit -f" in said and "Traceback" not in said
    with open("/dev/full", "w") as full:
        assert subprocess.run(command, env=_environment(), stdout=full, stderr=full).returncode == 0
    assert (summary(run_dir)["stop_reason"], summary(run_dir)["steps"]) == ("all phases done", 5)
    assert [row["step"] for row in end(run_dir)["rows"]] == [1, 2, 3, 4, 5]


STOPPED_EARLY = """
import os, signal, sys
from rolljax.run import preflight
from rolljax.commands.train import main
check = preflight.check
def stopped(recipe):
    found = check(recipe)
    os.kill(os.getpid(), signal.SIGTERM)
    signal.pause()
preflight.check = stopped
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_sigterm_while_a_run_is_checked_ends_it_in_order(tmp_path):
    command = [sys.executable, "-c", STOPPED_EARLY, *arguments(tmp_path / "run", **TINY)]
    done = subprocess.run(command, env=_environment(), capture_output=True, text=True)
    assert done.returncode == 75 and "stopped by SIGTERM" in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert not (tmp_path / "run").exists()


def test_a_second_ctrl_c_ends_at_once():
    """Also where the interruption would be swallowed; without a traceback."""
    code = """
import os, signal, sys, threading
from rolljax.commands.train import end_at_once
from rolljax.concurrency.signals import stop_requests
with stop_requests(end_at_once) as is_told:
    os.kill(os.getpid(), signal.SIGINT)
    assert is_told()
    try:
        os.kill(os.getpid(), signal.SIGINT)
        threading.Event().wait(60)
    except BaseException:
        os._exit(1)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=_environment())
    assert done.returncode == 130, done.stderr
    assert "interrupted; the same command continues from the last checkpoint" in done.stderr
    assert "Traceback" not in done.stderr


def _environment():
    return os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": ""}


# ---- at full size


def say(capsys, *lines):
    """Print figures."""
    with capsys.disabled():
        sys.stdout.write("\n" + "\n  ".join(lines) + "\n")


@pytest.mark.sweep
def test_killed_at_every_point(watched, tmp_path, capsys):
    """With the files unchanged, and with half of what was being written."""
    tried = []
    for state in dict.fromkeys(state for _, state in watched.points):
        names = ", ".join(name for name, at in watched.points if at == state)
        for torn in (False, True):
            run_dir = shutil.copytree(state, tmp_path / "run")
            if not torn or (not (run_dir / "summary.json").exists() and tear(run_dir)):
                assert goes_on(run_dir) == watched.end, names
                tried.append(f"{names}{' (torn)' if torn else ''}")
            shutil.rmtree(run_dir)
    say(capsys, f"{len(watched.points)} points, {len(tried)} kills, all bitwise:", *tried)
    assert len(watched.points) >= 60 and len(tried) >= 60


KILLED_BY_CHANCE = """
import os, random, signal, sys, threading
from rolljax.commands.train import main as train
from rolljax.storage import durable
chance, passed = random.Random(int(sys.argv[1])), 0
last = chance.randrange(int(sys.argv[2]))
def reach(point, path):
    global passed
    passed += 1
    if passed == last:
        threading.Timer(chance.choice((0, chance.random() / 10, chance.random())), os.kill, (os.getpid(), 9)).start()
durable.reach = reach
sys.exit(train(sys.argv[3:]))
"""


@pytest.mark.sweep
def test_fifty_random_kills(watched, tmp_path, capsys):
    """SIGKILL at a random time after a random point, repeated until the run ends by itself."""
    kills, runs, chance = 0, 0, random.Random(0)
    while kills < 50:
        run_dir = tmp_path / str(runs)
        code = -9
        while code:
            most = str(len(watched.points))
            command = [sys.executable, "-c", KILLED_BY_CHANCE, str(chance.randrange(10**6)), most]
            command += arguments(run_dir, **TINY)
            process = subprocess.run(
                command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
            )
            code = process.returncode
            assert code in (0, -9), process.stderr
            kills += code == -9
        runs += 1
        assert end(run_dir) == watched.end
    say(capsys, f"{kills} kills in {runs} runs, all bitwise")


@pytest.mark.sweep
def test_a_disk_that_fills_up_anywhere(watched, tmp_path, capsys):
    """A small disk, made larger after each failure; every start but the last ends with a message."""
    disk = tmp_path / "disk"
    disk.mkdir()
    size, mount = 8, ["mount", "-t", "tmpfs", "none", str(disk), "-o"]
    if subprocess.run([*mount, f"size={size}k"], capture_output=True).returncode:
        pytest.skip("file systems cannot be mounted here")
    places = []
    try:
        while (code := start(disk / "run")) != 0:
            said = capsys.readouterr().err
            assert code == 74 and "No space left on device" in said and "Traceback" not in said
            places.append(f"{size} KiB: " + said.split("storage error: ")[1].split(" cannot")[0].split("/run/")[-1])
            size = int(size * 1.3) + 4
            subprocess.run([*mount, f"remount,size={size}k"], check=True)
        assert end(disk / "run") == watched.end
    finally:
        subprocess.run(["umount", str(disk)], check=True)
    say(capsys, f"{len(places)} times full:", *places)
    assert len(places) > 5


@pytest.mark.sweep
def test_every_write_may_fail(watched, tmp_path, capsys):
    """A full disk at every point, one after the other; then the same command."""
    run_dir, failed = tmp_path / "run", set()

    def fail(point, path):
        name = f"{point} {Path(path).relative_to(run_dir)}"
        if point != "after" and name not in failed:
            failed.add(name)
            raise OSError(28, os.strerror(28))

    code = 74
    while code:
        with at_points(do=fail):
            code = start(run_dir)
        said = capsys.readouterr().err
        assert code in (0, 74) and "Traceback" not in said and (code == 0 or "No space left" in said)
    assert end(run_dir) == watched.end and len(failed) > 30


@pytest.mark.sweep
def test_108_corruptions_of_a_real_run(watched, tmp_path, capsys, monkeypatch):
    """Corrupt every file of a checkpoint, of the phase's first weights, and of the run's position: the run either
    resumes exactly one of the checkpoints, and no other file differs, or names the damaged file."""
    state, restore, begun = watched.state("before rollouts/step_5.jsonl", tmp_path / "run"), Trainer.restore, []

    def look(self, saved):
        restore(self, saved)
        references = [params for _, params in self.phase_trainer.references.values()]
        begun.append((saved.progress.step, fingerprint((self.state, references))))
        raise Killed

    monkeypatch.setattr(Trainer, "restore", look)

    def starts(run_dir):
        with contextlib.suppress(Killed):
            return start(run_dir)
        return begun[-1]

    def whole(text):
        return starts(watched.state(text, tmp_path / text.replace("/", "-")))

    right = {whole("before rollouts/step_5.jsonl"), whole("before rollouts/step_3.jsonl")}
    assert {step for step, _ in right} == {0, 2}
    settings, outcomes, chance = contents(state)["config.resolved.json"], {}, random.Random(0)
    newest = state / "ckpt" / Checkpoints(state / "ckpt").names()[-1]
    for folder in (newest, state / "phase_start" / "rl", state):
        for path in [p for p in folder.rglob("*") if p.is_file() and (folder != state or p.parent == state)]:
            for kind in ("flip", "cut", "delete", "empty", "append"):
                run_dir = shutil.copytree(state, tmp_path / "damaged")
                _corrupt(run_dir / path.relative_to(state), kind, chance)
                outcome, said = starts(run_dir), capsys.readouterr().err
                if outcome in right:
                    assert contents(run_dir)["config.resolved.json"] == settings
                    outcome = f"resumes from step {outcome[0]} of the phase"
                else:
                    # a digit changed in a manifest is blamed on the file it names; a letter in a setting is a new setting
                    named = {MANIFEST: "is damaged: ", "config.resolved.json": "damaged"}.get(path.name, path.name)
                    assert outcome in (2, 6) and named in said.replace("\n", ""), (path, kind, outcome, said)
                assert "Traceback" not in said
                outcomes[outcome] = outcomes.get(outcome, 0) + 1
                shutil.rmtree(run_dir)
    say(capsys, f"{sum(outcomes.values())} corruptions, none silent: {outcomes}")
    assert sum(outcomes.values()) >= 108


def _corrupt(path, kind, chance):
    content = bytearray(path.read_bytes())
    if kind == "flip" and content:
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    elif kind == "cut":
        del content[len(content) // 2 :]
    elif kind == "empty":
        content.clear()
    elif kind == "append":
        content += b"\n0"
    if kind == "delete":
        path.unlink()
    else:
        path.write_bytes(content)
