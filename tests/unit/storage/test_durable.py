"""Files and checkpoints of a run, whatever ends the writer and whatever happens to them later."""

import os
import resource
import shutil
import subprocess
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from rolljax.errors import CheckpointError, ConfigError, StorageError
from rolljax.run.checkpoint import Checkpoints, damage
from rolljax.run.folder import RunFolder
from rolljax.run.progress import RunProgress
from rolljax.storage import durable
from rolljax.storage.lock import locked
from tests.ends import Killed, at_points


def state(value):
    """Return a small tree of arrays whose numbers depend on `value`."""
    return {"a": jax.random.normal(jax.random.key(value), (64, 100)), "b": [jnp.full((4,), value, jnp.int32)]}


def restored(checkpoints, name):
    like = jax.eval_shape(lambda: state(0))
    here = SingleDeviceSharding(jax.devices()[0])
    return checkpoints.state(name, like, jax.tree.map(lambda _: here, like))


def equal(one, other):
    return all(jax.tree.leaves(jax.tree.map(lambda a, b: bool((np.asarray(a) == np.asarray(b)).all()), one, other)))


def save(checkpoints, value):
    progress = RunProgress(total_steps=value, step=value, waiting=f'{{"prompt_index": {value}}}\n')
    name = checkpoints.next_name(progress)
    checkpoints.save(name, state(value), progress)
    return name


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Make a folder with two checkpoints, of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("two") / "ckpt"
    checkpoints = Checkpoints(folder)
    assert [save(checkpoints, 2), save(checkpoints, 4)] == ["000001_step_2", "000002_step_4"]
    return folder


# ---- killed while writing


def places(tmp_path):
    """Return ways to replace an old file or folder by a new one: the write, and a check for old, new or neither."""
    file, folder = tmp_path / "file", tmp_path / "folder"

    def write_folder(text):
        with durable.folder(folder) as place:
            (place / "one").write_text(text)
            (place / "two").write_text(text)

    def read_folder():
        return {(folder / n).read_text() for n in ("one", "two")} if folder.exists() else set()

    yield (lambda text: durable.write(file, text)), (lambda: {file.read_text()})
    yield write_folder, read_folder


@pytest.mark.parametrize("kind", [0, 1], ids=["file", "folder"])
def test_a_killed_writer_leaves_the_old_or_the_new(tmp_path, kind):
    write, read = list(places(tmp_path))[kind]
    write("old")
    with at_points() as passed:
        write("new")
    assert read() == {"new"}
    for number, (point, path) in enumerate(passed):
        write("old")
        with pytest.raises(Killed), at_points(kill=number):
            write("new")
        is_away = kind == 1 and read() == set()  # a folder is moved aside first
        assert is_away or read() in ({"old"}, {"new"}), (point, path)
        durable.sweep(tmp_path)
        assert not [p for p in tmp_path.rglob("*") if durable.is_temporary(p)]


def test_a_killed_remover_leaves_no_part_of_a_folder(tmp_path):
    folder = tmp_path / "folder"
    for number in range(3):
        with durable.folder(folder) as place:
            (place / "one").write_text("1")
        with pytest.raises(Killed), at_points(kill=number):
            durable.remove(folder)
        assert folder.exists() == (number == 0)
        durable.sweep(tmp_path)
    assert not list(tmp_path.iterdir())


def test_at_any_time_there_is_a_whole_checkpoint(two, tmp_path):
    """A third save at the position of the second, and the retention after it, killed at every point."""

    def third(folder):
        checkpoints = Checkpoints(folder)
        save(checkpoints, 4)
        checkpoints.retain(2)

    with at_points() as passed:
        third(shutil.copytree(two, tmp_path / "whole"))
    assert {point for point, _ in passed} == {"before", "written", "aside", "after"}
    for number, (point, path) in enumerate(passed):
        folder = shutil.copytree(two, tmp_path / str(number))
        with pytest.raises(Killed), at_points(kill=number):
            third(folder)
        warnings = []
        saved = Checkpoints(folder).latest(warnings.append)
        assert saved.progress.total_steps == 4 and not warnings, (point, path)
        assert equal(restored(Checkpoints(folder), saved.name), state(4))
        assert sum(not damage(folder / name) for name in Checkpoints(folder).names()) >= 2


def test_a_killed_start_does_not_lock_its_user_out(tmp_path):
    """Also one with --fresh over an earlier run: it is empty, or it is that run, or it says what to do."""
    config = SimpleNamespace(resolved={"seed": 0}, operative="# settings\n", value=None)

    def start(path, fresh):
        with RunFolder(path).lock():
            RunFolder(path).prepare(config, fresh=fresh)
            RunFolder(path).mark()

    start(tmp_path / "earlier", False)
    save(RunFolder(tmp_path / "earlier").checkpoints, 1)
    RunFolder(tmp_path / "earlier").write_row({"step": 1})
    for fresh in (False, True):
        number = 0
        while True:
            path = tmp_path / f"{fresh}{number}"
            if fresh:
                shutil.copytree(tmp_path / "earlier", path)
            try:
                with at_points(kill=number):
                    start(path, fresh)
            except Killed:
                number += 1
            else:
                break
            start(path, fresh)
            assert RunFolder(path).latest(print) is None
            assert {p.name for p in path.iterdir()} == {
                ".lock", "config.resolved.json", "config.gin", "env.json", "rollouts"
            }  # fmt: skip
        assert number >= (18 if fresh else 9)


def test_a_folder_is_written_by_one_and_holds_nothing_of_others(tmp_path):
    folder, ours = tmp_path / "new" / "folder", ("marker", "one of ours", "--to")
    for _ in range(2):  # also behind the first
        with locked(folder, *ours):
            taken = pytest.raises(ConfigError, match="is being written by another process")
            with taken as error, locked(folder, *ours):
                pass
            assert error.value.setting == "--to" and error.value.value == str(folder)
    (folder / ".half.tmp").touch()  # of a writer that was killed
    with locked(folder, *ours):
        (folder / "theirs").touch()
    with pytest.raises(ConfigError, match="is not empty and not one of ours"), locked(folder, *ours):
        pass
    (folder / "marker").touch()
    with locked(folder, *ours):
        pass


def test_a_run_without_its_checkpoints_is_not_begun_again_in_silence(tmp_path):
    folder = RunFolder(tmp_path)
    folder.write_row({"step": 1})
    with pytest.raises(CheckpointError, match="1 steps on record, but no checkpoint"):
        folder.latest(print)


def test_half_a_line_and_what_is_after_the_checkpoint_are_forgotten(tmp_path):
    folder, said = RunFolder(tmp_path), []
    (tmp_path / "rollouts").mkdir()
    for step in (1, 2, 3):
        folder.write_row({"step": step})
        folder.write_rollouts(step, [])
    with open(tmp_path / "metrics.jsonl", "a") as f:
        f.write('{"step": 4, "loss')
    folder.forget_after(2, said.append)
    folder.write_row({"step": 3})
    assert [r["step"] for r in folder.rows()] == [1, 2, 3] and not said
    assert sorted(p.name for p in (tmp_path / "rollouts").iterdir()) == ["step_1.jsonl", "step_2.jsonl"]
    text = (tmp_path / "metrics.jsonl").read_text()
    (tmp_path / "metrics.jsonl").write_text(text.replace('{"step":2', '{"st\x00p":2'))
    folder.forget_after(3, said.append)
    assert "lacks 1 row(s), the first of step 2" in said[0]


# ---- damaged afterwards


def flip(at):
    def do(path):
        data = bytearray(path.read_bytes())
        data[at(len(data))] ^= 1
        path.write_bytes(data)

    return do


DAMAGE = {
    "first byte": flip(lambda n: 0),
    "middle byte": flip(lambda n: n // 2),
    "last byte": flip(lambda n: n - 1),
    "cut by one": lambda p: p.write_bytes(p.read_bytes()[:-1]),
    "cut in half": lambda p: p.write_bytes(p.read_bytes()[: p.stat().st_size // 2]),
    "empty": lambda p: p.write_bytes(b""),
    "zeros": lambda p: p.write_bytes(bytes(p.stat().st_size)),
    "longer": lambda p: p.write_bytes(p.read_bytes() + b"\n0"),
    "deleted": lambda p: p.unlink(),
    "doubled": lambda p: shutil.copy(p, p.with_name(p.name + "2")),
    "renamed": lambda p: p.rename(p.with_name(p.name + "2")),
    "a folder": lambda p: (p.unlink(), p.mkdir()),
    "swapped": None,
}


def files(path):
    return sorted(p for p in path.rglob("*") if p.is_file())


def harm(checkpoint, number, kind):
    """Damage file `number` of a checkpoint; return whether that changed anything."""
    path = files(checkpoint)[number]
    before = {p: p.read_bytes() for p in files(checkpoint)}
    if kind == "swapped":
        other = files(checkpoint)[(number + 1) % len(files(checkpoint))]
        one, two = path.read_bytes(), other.read_bytes()
        path.write_bytes(two)
        other.write_bytes(one)
    else:
        DAMAGE[kind](path)
    return before != {p: p.read_bytes() for p in files(checkpoint)}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint_is_left_out(two, tmp_path, kind):
    """Every file of the newest; then of both."""
    older, newer = sorted(p.name for p in two.iterdir())
    tried = 0
    for number in range(len(files(two / newer))):
        folder, said = shutil.copytree(two, tmp_path / str(number)), []
        tried += harm(folder / newer, number, kind)
        saved = Checkpoints(folder).latest(said.append)
        assert saved.name == older and saved.progress.total_steps == 2, files(two / newer)[number]
        assert len(said) == 1 and str(folder / newer) in said[0]
        if number == 0:
            assert equal(restored(Checkpoints(folder), saved.name), state(2))
        harm(folder / older, number, kind)
        with pytest.raises(CheckpointError, match="no checkpoint is whole") as e:
            Checkpoints(folder).latest(said.append)
        assert str(folder / newer) in str(e.value) and str(folder / older) in str(e.value)
    assert tried == len(files(two / newer)) >= 12


def test_the_warning_names_the_file(two, tmp_path):
    folder = shutil.copytree(two, tmp_path / "ckpt")
    data = max(files(folder / "000002_step_4" / "arrays"), key=lambda p: p.stat().st_size)
    flip(lambda n: n // 2)(data)
    name = data.relative_to(folder / "000002_step_4")
    assert damage(folder / "000002_step_4") == f"{name} is not as it was written"
    (folder / "000002_step_4" / "manifest.sha256").unlink()
    assert damage(folder / "000002_step_4") == "manifest.sha256 is missing"


def test_what_is_damaged_goes_when_the_next_is_committed(two, tmp_path):
    folder = shutil.copytree(two, tmp_path / "ckpt")
    (folder / "000002_step_4" / "progress.json").unlink()
    checkpoints = Checkpoints(folder)
    assert checkpoints.latest(print).name == "000001_step_2"
    name = save(checkpoints, 4)
    assert name == "000003_step_4"  # no name is used twice
    checkpoints.retain(2)
    assert checkpoints.names() == ["000001_step_2", name]


def test_a_manifest_is_one_of_sha256sum(two):
    done = subprocess.run(["sha256sum", "-c", "manifest.sha256"], cwd=two / "000002_step_4", capture_output=True)
    assert done.returncode == 0, done.stderr


# ---- retention


def test_the_newest_files_of_rollouts_stay(tmp_path):
    folder = RunFolder(tmp_path)
    (tmp_path / "rollouts").mkdir()
    for step in range(1, 11):
        folder.write_rollouts(step, [])
    save(folder.checkpoints, 4)
    save(folder.checkpoints, 6)
    save(folder.checkpoints, 9)
    folder.retain(2, 3)
    assert folder.checkpoints.names() == ["000002_step_6", "000003_step_9"]
    left = sorted(int(p.stem[5:]) for p in (tmp_path / "rollouts").iterdir())
    assert left == [4, 5, 6, 7, 8, 9, 10]  # a run that goes on from step 6 has its last three
    folder.retain(2, None)
    assert len(list((tmp_path / "rollouts").iterdir())) == 7


# ---- a disk that does not take it


def test_a_full_disk_costs_nothing_that_was_committed(small_disk):
    disk = small_disk(256)
    checkpoints = Checkpoints(disk / "ckpt")
    name = save(checkpoints, 2)
    durable.write(disk / "file", "old")
    (disk / "ballast").write_bytes(bytes(100 * 1024))
    big = {"a": jax.random.normal(jax.random.key(0), (64, 1024))}
    with pytest.raises(StorageError, match="No space left on device") as e:
        checkpoints.save(checkpoints.next_name(RunProgress()), big, RunProgress())
    assert "keep_checkpoints" in str(e.value) and str(disk / "ckpt") in str(e.value)
    with pytest.raises(StorageError):
        durable.write(disk / "file", bytes(300 * 1024))
    assert (disk / "file").read_text() == "old"
    assert Checkpoints(disk / "ckpt").latest(print).name == name
    assert [p.name for p in (disk / "ckpt").iterdir()] == [name]


def test_a_read_only_disk(small_disk):
    disk = small_disk(64)
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    with pytest.raises(StorageError, match="Read-only file system"), RunFolder(disk / "run").lock():
        pass


def test_a_limit_on_the_size_of_files(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    durable.write(tmp_path / "file", "old")
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(StorageError, match="ulimit -f"):
            durable.write(tmp_path / "file", bytes(2000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (tmp_path / "file").read_text() == "old"


@pytest.mark.parametrize("what", ["parent", "lock", "line"])
def test_something_else_is_in_the_way(tmp_path, what):
    run = tmp_path / "run"
    if what == "parent":
        run.write_text("")
        with pytest.raises((StorageError, ConfigError), match="run"), RunFolder(run / "inside").lock():
            pass
    elif what == "lock":
        (run / ".lock").mkdir(parents=True)
        with pytest.raises(StorageError, match="Is a directory"), RunFolder(run).lock():
            pass
    else:
        run.mkdir()
        os.symlink("/dev/full", run / "metrics.jsonl")
        with pytest.raises(StorageError, match="No space left"):
            RunFolder(run).write_row({"step": 1})


def test_the_best_checkpoints_stay_beside_the_newest(tmp_path):
    """Of equal rewards the earlier; what was not evaluated is not among the best; another process finds the same."""
    checkpoints = Checkpoints(tmp_path / "ckpt")
    for step, reward in ((1, 0.5), (2, 0.9), (3, None), (4, 0.9), (5, 0.1), (6, None)):
        progress = RunProgress(total_steps=step, step=step, weights_reward=reward)
        checkpoints.save(checkpoints.next_name(progress), state(step), progress)
        assert checkpoints.retain(2, 1) == max(1, step - 1)
    assert checkpoints.names() == ["000002_step_2", "000005_step_5", "000006_step_6"]
    again = Checkpoints(tmp_path / "ckpt")
    assert again.best(3) == ["000002_step_2", "000005_step_5"]
    assert again.find("best").progress.total_steps == 2 and again.find(5).name == "000005_step_5"
    assert again.latest(print).name == "000006_step_6"
    with pytest.raises(ConfigError, match="kept 2, 5, 6"):
        again.find(4)
    next((tmp_path / "ckpt" / "000005_step_5" / "arrays").rglob("*/d/*")).write_bytes(b"x")
    with pytest.raises(CheckpointError, match="damaged"):
        Checkpoints(tmp_path / "ckpt").find(5)
    again.retain(1)
    assert again.names() == ["000006_step_6"]
    with pytest.raises(ConfigError, match="none was evaluated"):
        again.find("best")
