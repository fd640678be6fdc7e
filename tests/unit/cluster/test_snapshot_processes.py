"""Snapshots that two processes of a trainer write, and one that is killed while it does."""

import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from rolljax.cluster.snapshots import SnapshotReader, SnapshotWriter
from rolljax.errors import SamplerError, StorageError
from rolljax.trainer.publish import checksums
from tests.e2e.conftest import of_two_processes
from tests.ends import Killed
from tests.snapshot_writers import weights

TIMEOUT_S = 120


def reader(url, **settings):
    """Return a reader for eight devices of this process, with shardings that no writer has."""
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))
    specs = {"rows": P(None, "b"), "columns": P("a", None, "b"), "both": P(), "all": P(("b", "a"))}
    shardings = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
    return SnapshotReader(str(url), jax.eval_shape(lambda: weights(0)), shardings, **settings)


def is_right(found, version):
    return all((np.asarray(found[name]) == x).all() for name, x in weights(version).items())


def push(writer, version):
    params = jax.device_put(weights(version))
    return writer.write(params, version, checksums(params))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Let two processes write; return the folder and what they say."""
    folder = tmp_path_factory.mktemp("processes")
    env = of_two_processes(2)
    command = [sys.executable, "-m", "tests.snapshot_writers", str(folder)]
    both = [
        subprocess.Popen(command, env=env | {"JAX_PROCESS_ID": str(i)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for i in range(2)
    ]
    try:
        yield folder, [json.loads(next(line for line in p.stdout if line.startswith(b"{"))) for p in both]
        for process in both:
            process.stdin.close()
        assert [process.wait(TIMEOUT_S) for process in both] == [0, 0]
    finally:
        for process in both:
            process.kill()
            process.wait()
            process.stdin.close()
            process.stdout.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["shared", "apart"])
def test_two_processes_write_one_snapshot(written, kind):
    """A reader that does not belong to them gets it, also where they have no store in common. All write changes, or none:
    in version 2 one of them alone has too many."""
    folder, said = written
    assert [one["bases"][kind] for one in said] == [[None, 0, None, 2]] * 2
    url = folder / kind if kind == "shared" else said[0]["urls"][0]
    always = reader(url)
    for version in range(2, 4):
        assert is_right(always.read(1, version)[0], version)
        assert is_right(reader(url).read(1, version)[0], version)


@pytest.mark.slow
def test_no_process_writes_what_another_has(written):
    folder, _ = written
    names = [
        {p.relative_to(folder / f"apart{i}") for p in (folder / f"apart{i}").glob("*/*/full/*/c/**/*") if p.is_file()}
        for i in range(2)
    ]
    assert names[0] and names[1] and not names[0] & names[1]
    assert {n.parts[3] for n in names[1]} == {"rows", "columns", "both"}  # of what all have, the first one writes all


# ---- ends


def test_a_killed_writer_leaves_no_half_snapshot(tmp_path):
    """Its parts are there, its manifest is not; the next epoch's first snapshot ends what is left."""

    def killed():
        raise Killed

    kills = []
    writer = SnapshotWriter(str(tmp_path), 1, barrier=lambda: kills and kills.pop()())
    push(writer, 0)
    kills.append(killed)
    with pytest.raises(Killed):
        push(writer, 1)
    assert list((tmp_path / "000001/00000001").iterdir())
    read = reader(tmp_path)
    assert read.newest() == (1, 0)
    with pytest.raises(SamplerError, match="version 1 of epoch 1 are not in .* the newest there are of version 0 of"):
        read.read(1, 1)
    assert is_right(read.read(1, 0)[0], 0)
    assert push(writer, 1).base is None  # whoever has survived forgets what it took
    assert is_right(read.read(1, 1)[0], 1)
    push(SnapshotWriter(str(tmp_path), 2), 1)
    assert [p.name for p in tmp_path.iterdir() if p.is_dir()] == ["000002"]
    assert is_right(read.read(2, 1)[0], 1)


@pytest.mark.parametrize("where", ["parts", "manifest"])
def test_a_full_disk_costs_nothing_that_was_written(small_disk, where):
    """The error names the disk; with space again the next snapshot is written, a full one."""
    disk = small_disk(400)
    ballast = disk / "ballast"

    def fill():
        with open(ballast, "wb", buffering=0) as f, pytest.raises(OSError, match="No space"):
            while True:
                f.write(bytes(4096))

    fills = []
    writer = SnapshotWriter(str(disk / "store"), 1, barrier=lambda: fills and fills.pop()())
    push(writer, 0)
    fill() if where == "parts" else fills.append(fill)
    with pytest.raises(
        StorageError, match=f"(?s)version 1 cannot be written to {disk}/store: .*No space left on device"
    ):
        push(writer, 1)
    assert [p.name for p in (disk / "store/000001").iterdir()] == ["00000000"]
    read = reader(disk / "store")
    assert read.newest() == (1, 0) and is_right(read.read(1, 0)[0], 0)
    os.unlink(ballast)
    assert push(writer, 1).base is None and push(writer, 2).base is None and push(writer, 3).base == 2
    assert is_right(read.read(*read.newest())[0], 3)
