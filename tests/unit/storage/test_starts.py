"""The record of a run's starts: epochs grow whatever happens to the file, and restarts are those of this run."""

import json
import subprocess
import sys
from types import SimpleNamespace

import hypothesis.strategies as st
import pytest
from hypothesis import given

from rolljax.errors import ConfigError
from rolljax.run.folder import RunFolder
from rolljax.storage import starts
from rolljax.storage.layout import STARTS
from tests.ends import Killed, at_points


def begin(path, **how):
    """Start a run as `train` does; return its epoch."""
    folder = RunFolder(path)
    config = SimpleNamespace(resolved={"seed": 1}, operative="", value=None)
    with folder.lock():
        folder.prepare(config, fresh=how.get("fresh", False))
        epoch = folder.begin(**how)
        assert folder.epoch == epoch
    return epoch


def test_every_start_has_the_next_epoch(tmp_path):
    assert [begin(tmp_path / "run") for _ in range(3)] == [1, 2, 3]
    assert starts.count(tmp_path / "run") == 3 and starts.restarts(tmp_path / "run") == []


def test_only_the_process_with_the_lock_starts(tmp_path):
    assert begin(tmp_path) == 1
    with RunFolder(tmp_path).lock(), pytest.raises(ConfigError, match="another process"):
        begin(tmp_path)
    assert begin(tmp_path) == 2


def test_a_fresh_run_keeps_the_epochs_and_not_the_restarts(tmp_path):
    assert begin(tmp_path) == 1 and begin(tmp_path, after="crashed (SIGSEGV) after step 3") == 2
    assert [start.after for start in starts.restarts(tmp_path)] == ["crashed (SIGSEGV) after step 3"]
    assert begin(tmp_path, fresh=True) == 3 and starts.restarts(tmp_path) == []
    begin(tmp_path, after="was killed (SIGKILL) after step 1")
    (found,) = starts.restarts(tmp_path)
    assert (found.epoch, found.after) == (4, "was killed (SIGKILL) after step 1") and "T" in found.time


def test_a_fresh_run_killed_anywhere_keeps_the_epochs(tmp_path):
    with at_points() as passed:
        begin(tmp_path / "all"), begin(tmp_path / "all", fresh=True)
    for kill in range(len(passed)):
        run, last = tmp_path / str(kill), 0
        try:
            with at_points(kill=kill):
                last = begin(run)
                last = begin(run, fresh=True)
        except Killed:
            pass
        assert begin(run) > last


def test_a_torn_line_is_no_start(tmp_path):
    begin(tmp_path), begin(tmp_path)
    path = tmp_path / STARTS
    path.write_bytes(path.read_bytes()[:-5])
    assert starts.count(tmp_path) == 1 and begin(tmp_path) == 2
    assert [json.loads(line)["epoch"] for line in path.read_text().splitlines()] == [1, 2]


@given(st.data())
def test_the_epoch_grows_whatever_bytes_change(tmp_path_factory, data):
    run = tmp_path_factory.mktemp("run")
    epochs = [begin(run) for _ in range(3)]
    path = run / STARTS
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content) - 2))
        if content[at] != ord("\n"):
            content[at] = data.draw(st.integers(0, 255).filter(lambda byte: byte != ord("\n")))
    path.write_bytes(content)
    for _ in range(2):
        epochs.append(begin(run))
    assert epochs[3] > 3 and epochs[4] > epochs[3]


def test_a_reader_of_starts_is_light():
    code = "import sys, rolljax.commands.restarts; print([m for m in ('jax', 'numpy', 'gin') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
