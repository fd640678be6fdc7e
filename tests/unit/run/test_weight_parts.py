"""A sampler of two processes takes the weights of a store: both the same ones, or none."""

import json
import shutil
import subprocess
import sys

import jax
import pytest

from rolljax.cluster.snapshots import SnapshotWriter
from rolljax.trainer.publish import checksums
from tests.e2e.conftest import of_two_processes
from tests.weight_takers import MODEL, digest

TIMEOUT_S = 120


@pytest.fixture
def both(tmp_path):
    """Start the two processes, each in a folder of its own, in which the store is."""
    env, started = of_two_processes(1), []
    for i in range(2):
        (tmp_path / f"host{i}").mkdir()
        started.append(
            subprocess.Popen(
                [sys.executable, "-m", "tests.weight_takers"],
                env=env | {"JAX_PROCESS_ID": str(i)},
                cwd=tmp_path / f"host{i}",
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    yield started
    for process in started:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def test_a_process_that_cannot_have_the_weights_keeps_the_others_from_them(both, tmp_path):
    writer = SnapshotWriter(str(tmp_path / "store"), 1)

    def taken(version, change=lambda folder: None):
        """Write a version to the store, which each process sees as a copy of its own; `change` the second one's. Return
        what they have said, and the checksum of what was written."""
        params = MODEL.plain.computed(MODEL.init(version))
        writer.write(params, version, checksums(params))
        for i in range(2):
            shutil.copytree(tmp_path / "store", tmp_path / f"host{i}" / "store", dirs_exist_ok=True)
        change(tmp_path / "host1" / "store" / "000001" / f"{version:08d}")
        both[0].stdin.write(json.dumps({"version": version, "location": "store", "epoch": 1}) + "\n")
        both[0].stdin.flush()
        said = json.loads(next(line for line in both[0].stdout if line.startswith("{")))
        return said["error"], said["digests"], digest(params, jax.devices()[0])

    def flip(folder):
        for path in folder.glob("full/**/c/**/*"):
            if path.is_file():
                path.write_bytes(bytes(byte ^ 1 for byte in path.read_bytes()))

    error, first, sent = taken(0)
    assert not error and first == [sent] * 2
    error, found, _ = taken(1, shutil.rmtree)
    assert "weights of version 1 of epoch 1 are not in store" in error and found == first
    error, found, _ = taken(2, flip)
    assert "version 2 of epoch 1 in store are damaged: checksums of" in error and found == first
    error, found, sent = taken(3)
    assert not error and found == [sent] * 2 != first
    both[0].stdin.close()
    assert [process.wait(TIMEOUT_S) for process in both] == [0, 0]
