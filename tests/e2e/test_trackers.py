"""Each tracker's real package, offline: it holds exactly the rows of metrics.jsonl and the settings of a real recipe, read back
through its own API, also of a run that was killed and continues; a real run with all of them; and a run whose tracker dies."""

import contextlib
import dataclasses
import importlib.util
import json
import math
import os
import re
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from rolljax import cli
from rolljax.run.folder import RESOLVED, RunFolder
from rolljax.run.tracking import tracking
from rolljax.trackers import Aim, MLflow, TensorBoard, Trackio, WandB, feed
from rolljax.trackers.base import flat, numbers
from rolljax.trackers.mlflow import MAX_VALUE

from .conftest import QUICKSTART, ROOT, arguments, rows, summary

PNG = ROOT / "docs" / "agents.png"


def needs(package):
    here = importlib.util.find_spec(package) is not None
    return pytest.mark.skipif(not here, reason=f"{package} is not installed (the extra of its name)")


def make_row(step, run=1):
    values = {
        "reward/mean": step / 7,
        "time/step_s": 0.1 * run,
        "optim/lr": 1e-300,
        "kl/ref_nat": -2.5,
        "env/own name": 3.0,
    }
    return {"step": step, "phase_step": step, "version": step, "phase": "sft" if step < 3 else "rl", **values}


class Recipe:
    """The rows that `tracking` reads of a run."""

    def __init__(self, *trackers):
        self.trackers = trackers


def train(folder, config, steps, done=0, run=1):
    """Write the rows of `steps` as a run that resumes after `done`."""
    said = []
    folder.forget_after(done, said.append)
    with tracking(Recipe(config), folder, done, said.append) as trackers:
        for step in steps:
            folder.write_row(make_row(step, run))
            trackers.log(step, make_row(step, run))
            if step % 2 == 0:
                trackers.text(step, "heldout/answers", "best \x1b[31m <script> \u202e")
                trackers.figure(step, "curves", PNG.read_bytes())
    assert not said


@pytest.fixture
def folder(tmp_path):
    folder = RunFolder(tmp_path / "lake")
    folder.path.mkdir()
    (folder.path / RESOLVED).write_text(json.dumps(cli.load_recipe([QUICKSTART], []).resolved))
    return folder


def settings_of(folder):
    return flat(json.loads((folder.path / RESOLVED).read_text()))


def read_tensorboard(folder, config):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder.path / "trackers" / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    found = {}
    for name in events.Tags()["scalars"]:
        for e in events.Scalars(name):
            assert name not in found.setdefault(e.step, {})
            found[e.step][name] = e.value
    assert {"curves"} == {*events.Tags()["images"]} and {"heldout/answers", "settings"} == {*events.Tags()["tensors"]}
    [settings] = events.Tensors("settings")
    [text] = settings.tensor_proto.string_val
    assert all(f"    {name} = {value}" in text.decode() for name, value in settings_of(folder).items())
    return found


def read_wandb(folder, config):
    """Read the records of wandb's transaction logs: a header, and blocks of 32 KiB of framed protobufs."""
    from wandb.proto import wandb_internal_pb2 as pb

    found, ids, config = {}, set(), {}
    for path in sorted((folder.path / "trackers" / "wandb").glob("wandb/offline-run-*/*.wandb")):
        data, at, whole = path.read_bytes(), 7, b""
        while at + 7 <= len(data):
            if (left := 32768 - at % 32768) < 7:
                at += left
                continue
            _, size, kind = struct.unpack("<IHB", data[at : at + 7])
            whole, at = whole + data[at + 7 : at + 7 + size], at + 7 + size
            if kind in (1, 4):  # complete, or the last part
                record, whole = pb.Record.FromString(whole), b""
                ids |= {record.run.run_id} - {""}
                config |= {u.key or u.nested_key[0]: json.loads(u.value_json) for u in record.run.config.update}
                if items := record.history.item:
                    got = {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items}
                    if "time/step_s" in got:
                        assert got["step"] not in found
                        found[got["step"]] = {
                            k: v
                            for k, v in got.items()
                            if isinstance(v, (int, float)) and not k.startswith(("_", "curves/", "heldout/answers/"))
                        }
    assert len(ids) == 1 and {name: config[name] for name in settings_of(folder)} == settings_of(folder)
    return found


def read_mlflow(folder, config):
    from mlflow import MlflowClient

    client = MlflowClient(config.tracking_uri)
    [run] = client.search_runs([client.get_experiment_by_name("rolljax").experiment_id])
    params = {re.sub(r"[^\w\-. :/]", "_", name): str(v)[:MAX_VALUE] for name, v in settings_of(folder).items()}
    assert run.data.params == params and "phases_0_.steps" in params
    assert run.info.run_name == folder.path.name and run.info.status == "FINISHED"
    found = {}
    for name in run.data.metrics:
        for m in client.get_metric_history(run.info.run_id, name):
            assert name not in found.setdefault(m.step, {})
            found[m.step][name] = m.value
    assert {a.path for a in client.list_artifacts(run.info.run_id)} == {"curves", "heldout"}
    return found


def read_aim(folder, config):
    import aim
    from aim.sdk.index_manager import RepoIndexManager

    known = (folder.path / "trackers" / "aim" / "hash").read_text()
    repo = aim.Repo(config.repo)
    assert repo.list_all_runs() == [known]
    RepoIndexManager.get_index_manager(repo).index(known)  # as `aim up` does
    run = aim.Run(known, repo=config.repo, read_only=True)
    assert run.name == folder.path.name and run["settings"] == settings_of(folder) and run["outcome"] == "done"
    found = {}
    for metric in run.metrics():
        steps, (values, *_) = metric.data.items_list()
        for step, value in zip(steps, values, strict=True):
            assert metric.name not in found.setdefault(int(step), {})
            found[int(step)][metric.name] = float(value)
    return found


def read_trackio(folder, config):
    os.environ["TRACKIO_DIR"] = config.dir
    from trackio.sqlite_storage import SQLiteStorage

    [name] = SQLiteStorage.get_runs("rolljax")
    config = SQLiteStorage.get_run_config("rolljax", name)
    wanted = {name.lstrip("_"): value for name, value in settings_of(folder).items()}
    assert {name: value for name, value in config.items() if name[0] != "_"} == wanted
    found = {}
    for log in SQLiteStorage.get_logs("rolljax", name):
        if "time/step_s" in log:
            assert log["step"] not in found
            found[log["step"]] = {k: v for k, v in log.items() if isinstance(v, (int, float))}
    return found


PACKAGES = {
    "tensorboard": (lambda path: TensorBoard(), read_tensorboard),
    "wandb": (lambda path: WandB(mode="offline", system_metrics=False), read_wandb),
    "mlflow": (lambda path: MLflow(tracking_uri=f"sqlite:///{path}/mlflow.db"), read_mlflow),
    "aim": (lambda path: Aim(repo=str(path / "aim")), read_aim),
    "trackio": (lambda path: Trackio(dir=str(path / "trackio")), read_trackio),
}
REWINDS = ("tensorboard", "aim")
CASES = [pytest.param(n, marks=[needs(n), *([] if n == "tensorboard" else [pytest.mark.slow])]) for n in PACKAGES]


def expected(name, row):
    """Return a row as a package can store it."""
    found = numbers(row)
    if name == "mlflow":
        return {k.replace("[", "_"): float(v) for k, v in found.items()}
    if name == "tensorboard":
        return {k: float(np.float32(v)) for k, v in found.items()}
    return found | ({"step": row["step"]} if name in ("wandb", "trackio") else {})


def read_back(name, folder, tmp_path):
    """Return the rows that a package stored, read in another process."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.e2e.test_trackers", name, str(folder.path), str(tmp_path)],
        capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", CASES)
def test_a_package_holds_the_rows_of_metrics_jsonl(folder, tmp_path, name, monkeypatch):
    """Three steps, of which the third is lost with the process; the run resumes after the second."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(feed, "CLOSE_S", 120.0)  # a new database takes MLflow a while
    config = PACKAGES[name][0](tmp_path)
    train(folder, config, (1, 2, 3))
    train(folder, config, (3, 4, 5), done=2, run=2)
    found = read_back(name, folder, tmp_path)
    want = {str(row["step"]): expected(name, row) for row in folder.rows()}
    if name not in REWINDS:
        want["3"]["time/step_s"] = 0.1  # the first time it was made: these cannot take a step back
    assert found == want and all(map(math.isfinite, found["1"].values()))


@pytest.mark.sweep
def test_every_package_holds_a_real_run(tmp_path, start, monkeypatch):
    """A tracker holds the run's settings and rows, and none is lost."""
    monkeypatch.chdir(tmp_path)  # MLflow and Aim write to the working directory
    here = [name for name in PACKAGES if importlib.util.find_spec(name)]
    configs = {type(c).__name__: dataclasses.asdict(c) for c in (PACKAGES[name][0](tmp_path) for name in here)}
    argv = arguments(tmp_path / "lake", warm_start__Phase_dot_steps=2, rl__Phase_dot_steps=3)
    argv += ["--set", f"Recipe.trackers = [{', '.join(f'@rolljax.trackers.{kind}()' for kind in configs)}]"]
    argv += [a for kind, c in configs.items() for name, v in c.items() for a in ("--set", f"{kind}.{name} = {v!r}")]
    process = start(argv)
    _, said = process.communicate()
    assert process.returncode == 0 and "tracker " not in said, said
    folder = RunFolder(tmp_path / "lake")
    assert len(folder.rows()) == 5 and {row["trackers/lost_n"] for row in folder.rows()} == {0.0}
    for name in here:
        want = {str(row["step"]): expected(name, row) for row in folder.rows()}
        assert read_back(name, folder, tmp_path) == want, name


def children(pid):
    """Return the children of a process that have not ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
            if int(parent) == pid and state != "Z":
                found.append(int(path.parent.name))
    return found


@needs("wandb")
@pytest.mark.slow
def test_the_process_that_wandb_starts_itself_may_die(folder, monkeypatch):
    monkeypatch.setattr(feed, "RESTARTS_S", (0.0,))
    said, config = [], WandB(mode="offline", system_metrics=False)
    with tracking(Recipe(config), folder, 0, said.append) as trackers:
        for step in range(1, 8):
            folder.write_row(make_row(step))
            trackers.log(step, make_row(step))
            if step == 3:
                [one] = trackers._feeds
                while one._sent < 3:
                    assert one._thread.is_alive()
                    time.sleep(0.05)
                [core] = children(one._process.pid)
                os.kill(core, signal.SIGKILL)
                while core in children(one._process.pid):  # what is sent to it before it has gone is lost unnoticed
                    time.sleep(0.05)
    assert [("Connection" in s, "in a row" in s) for s in said] == [(True, False), (False, True)]
    found = read_wandb(folder, config)
    assert {*range(4, 8)} <= found.keys() and trackers.row()["trackers/lost_n"] == 4


@pytest.mark.sweep
def test_a_run_whose_tracker_is_killed_equals_one_without(tmp_path, start):
    small = {"warm_start__Phase_dot_steps": 2, "rl__Phase_dot_steps": 8}
    plain = start(arguments(tmp_path / "plain", **small))
    assert plain.wait() == 0
    trackers = "[@tests.file_tracker.FileTracker()]"
    argv = [*arguments(tmp_path / "run", **small), "--set", f"Recipe.trackers = {trackers}",
            "--set", "FileTracker.fault = 'kill'", "--set", "FileTracker.once = False"]  # fmt: skip
    process = start(argv)
    assert process.wait() == 0, process.stderr.read()
    assert summary(tmp_path / "run")["state_sha256"] == summary(tmp_path / "plain")["state_sha256"]
    assert sum(row["trackers/lost_n"] for row in rows(tmp_path / "run")) >= 1
    assert process.returncode != -signal.SIGKILL


if __name__ == "__main__":
    name, path, tmp = sys.argv[1:]
    sys.stdout.write(json.dumps(PACKAGES[name][1](RunFolder(path), PACKAGES[name][0](Path(tmp)))))
