"""Snapshots of weights in a store: what is read is what was written, and every damage has a name."""

import shutil
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from rolljax.cluster.snapshots import SnapshotReader, SnapshotWriter
from rolljax.errors import SamplerError, StorageError
from rolljax.trainer.publish import checksums, differing

WRITTEN = {"layers": {"w": P(None, "a", "b"), "norm": P()}, "embed": P(("a", "b")), "scale": P(), "none": P(None, "a")}
READ = {"layers": {"w": P("b", None, "a"), "norm": P("a")}, "embed": P(None, "b"), "scale": P(), "none": P()}


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))


def placed(mesh, specs):
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, P))


def weights(mesh, seed):
    """Return weights of several shapes and dtypes, sharded as a trainer's; they depend on `seed`."""
    keys = jax.random.split(jax.random.key(seed), 3)
    tree = {
        "layers": {"w": jax.random.normal(keys[0], (6, 8, 32), jnp.bfloat16), "norm": jax.random.normal(keys[1], (8,))},
        "embed": jax.random.normal(keys[2], (24, 4), jnp.bfloat16),
        "scale": jnp.float32(seed),
        "none": jnp.zeros((0, 4), jnp.bfloat16),
    }
    return jax.device_put(tree, placed(mesh, WRITTEN))


def push(writer, mesh, version, seed=None):
    """Write weights as a snapshot; return them."""
    params = weights(mesh, version if seed is None else seed)
    writer.write(params, version, checksums(params))
    return params


class CheckedReader(SnapshotReader):
    """A reader that compares checksums as a sampler does."""

    def read(self, epoch, version):
        for _ in range(2):
            params, sums = super().read(epoch, version)
            if not (wrong := differing(sums, checksums(params))):
                return params, sums
            self.forget()
        raise SamplerError(f"version {version} of epoch {epoch} in the store are damaged: checksums of {wrong} differ")


def reader(url, mesh, **settings):
    shapes = jax.eval_shape(lambda: weights(mesh, 0))
    return CheckedReader(str(url), shapes, placed(mesh, READ), **{"timeout_s": 5.0} | settings)


def equal(one, other):
    return jax.tree.all(jax.tree.map(lambda a, b: a.dtype == b.dtype and bool((np.asarray(a) == b).all()), one, other))


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.fixture(params=["path", "file", "memory"])
def url(request, tmp_path):
    return {"path": str(tmp_path / "s"), "file": f"file://{tmp_path}/s/", "memory": f"memory://{tmp_path}"}[
        request.param
    ]


def test_devices_get_their_slices_of_what_was_written(url, mesh):
    """Another sharding, several chunks for each shard; weights in use stay when the next ones arrive."""
    writer, read = SnapshotWriter(url, 1, chunk_bytes=64), reader(url, mesh)
    first = push(writer, mesh, 3)
    arrived, sums = read.read(1, 3)
    assert equal(first, arrived) and equal(checksums(first), sums)
    assert jax.tree.map(lambda x: x.sharding, arrived) == placed(mesh, READ)
    for version in (4, 7):
        second = push(writer, mesh, version)
        assert equal(read.read(*read.newest())[0], second) and not equal(first, second)
    assert equal(first, arrived)


def test_old_snapshots_go(tmp_path, mesh):
    """The newest stay; an epoch's first snapshot ends those before it. A version is written once."""
    for epoch in (2, 3):
        writer = SnapshotWriter(str(tmp_path), epoch, keep=2)
        for version in range(4):
            push(writer, mesh, version)
            names = {p.parent.name for p in tmp_path.glob("*/*/manifest.json")}
            assert names == {f"{v:08d}" for v in range(max(0, version - 1), version + 1)}
        assert [p.name for p in tmp_path.iterdir() if p.is_dir()] == [f"{epoch:06d}"]
    push(writer, mesh, 3, seed=9)
    assert equal(reader(tmp_path, mesh).read(3, 3)[0], weights(mesh, 3))
    with pytest.raises(StorageError, match="version 2 cannot be pushed: those of 3 were"):
        push(writer, mesh, 2)


def test_an_earlier_start_that_lives_on_is_refused(tmp_path, mesh):
    earlier, later = (SnapshotWriter(str(tmp_path), epoch) for epoch in (1, 2))
    push(earlier, mesh, 7)
    push(later, mesh, 3)
    with pytest.raises(StorageError, match="has weights of epoch 2, which began after this one, 1"):
        push(earlier, mesh, 8)
    assert reader(tmp_path, mesh).newest() == (2, 3)


# ---- changes


def nudged(params, version, share=0.03):
    """Return weights of which about that share differs from `params`."""

    def one(x):
        chosen = jax.random.uniform(jax.random.key(version), x.shape) < share
        return jax.device_put(jnp.where(chosen, x + version, x).astype(x.dtype), x.sharding)

    return jax.tree.map(one, params)


def pushes(writer, params, count, share=0.03):
    """Write that many versions, each a little different from the one before; return them by version, and their bases."""
    versions, bases = {}, []
    for version in range(count):
        versions[version] = params = nudged(params, version, share) if version else params
        bases.append(writer.write(params, version, checksums(params)).base)
    return versions, bases


def test_changes_give_the_same_weights(url, mesh):
    """To a reader of all, to one that misses some, and to one that joins; each chain begins with a full snapshot."""
    writer = SnapshotWriter(url, 1, full_every=4, keep=20, chunk_bytes=1000)
    versions, bases = pushes(writer, weights(mesh, 1), 9)
    assert bases == [None, 0, 1, 2, None, 4, 5, 6, None]
    always, sometimes = reader(url, mesh), reader(url, mesh)
    for version, params in versions.items():
        assert equal(always.read(1, version)[0], params)
        assert equal(reader(url, mesh).read(1, version)[0], params)
        if version in (1, 3, 6, 7):
            assert equal(sometimes.read(1, version)[0], params)


def test_what_is_not_worth_it_is_full(tmp_path, mesh):
    """Many changes, other arrays, or on request."""
    writer = SnapshotWriter(str(tmp_path), 1, chunk_bytes=1000)
    params = weights(mesh, 1)
    assert pushes(writer, params, 3, share=0.9)[1] == [None, None, None]

    def base_of(params, version, **settings):
        return writer.write(params, version, checksums(params), **settings).base

    assert base_of(params, 3) is None and base_of(params, 4) == 3 and base_of(params, 5, full=True) is None
    del params["scale"]
    assert base_of(params, 6) is None and base_of(params, 7) == 6
    params["embed"] = jax.device_put(params["embed"], NamedSharding(mesh, P("b")))
    assert base_of(params, 8) is None and base_of(params, 9) == 8


def test_what_changes_build_on_stays(tmp_path, mesh):
    writer = SnapshotWriter(str(tmp_path), 1, full_every=3, keep=1, chunk_bytes=1000)
    params = weights(mesh, 1)
    for version, there in enumerate([{0}, {0, 1}, {0, 1, 2}, {3}, {3, 4}]):
        params = nudged(params, version)
        writer.write(params, version, checksums(params))
        assert {int(p.name) for p in (tmp_path / "000001").iterdir()} == there
        assert equal(reader(tmp_path, mesh).read(1, version)[0], params)


@pytest.fixture
def chain(tmp_path, mesh):
    """Make a store with a full snapshot and three that build on it."""
    return tmp_path, pushes(SnapshotWriter(str(tmp_path), 1, keep=9, chunk_bytes=1000), weights(mesh, 1), 4)[0]


def changes_of(store, version):
    return store / f"000001/{version:08d}/delta/layers.w/c.0.2.1"


@pytest.mark.parametrize(("harm", "said"), [(lambda p: p.unlink(), "is missing"), (cut, "delta"), (flip, "checksums")])
def test_a_broken_chain_has_a_name(chain, mesh, harm, said):
    """A reader with the snapshot after the break continues."""
    store, versions = chain
    behind, after = reader(store, mesh), reader(store, mesh)
    behind.read(1, 0)
    after.read(1, 2)
    harm(changes_of(store, 2))
    with pytest.raises(SamplerError, match=f"version 3 of epoch 1 in .* are damaged: .*{said}"):
        behind.read(1, 3)
    assert equal(after.read(1, 3)[0], versions[3])
    params = nudged(versions[3], 4)
    SnapshotWriter(str(store), 1).write(params, 4, checksums(params))
    assert equal(behind.read(1, 4)[0], params)


def test_changes_of_what_was_not_right_are_read_from_the_full_one(chain, mesh):
    """Of changes that are harmed, and of a reader whose memory changes."""
    store, versions = chain
    read = reader(store, mesh)
    read.read(1, 1)
    for buffer in read._arrays["embed"].buffers.values():
        buffer ^= 1
    assert equal(read.read(1, 2)[0], versions[2])

    read, path = reader(store, mesh), changes_of(store, 1)
    whole = path.read_bytes()
    flip(path)
    with pytest.raises(SamplerError, match=r"checksums of \['layers.w'\] differ"):
        read.read(1, 1)
    path.write_bytes(whole)
    assert equal(read.read(1, 2)[0], versions[2])


# ---- what a reader refuses


@pytest.fixture
def one(tmp_path, mesh):
    """Make a store with a snapshot, version 5 of epoch 2."""
    push(SnapshotWriter(str(tmp_path / "store"), 2, chunk_bytes=64), mesh, 5)
    return tmp_path / "store"


def test_what_is_old_or_gone_is_refused(one, mesh):
    read = reader(one, mesh)
    for epoch, version in ((2, 4), (2, 6), (1, 5)):
        with pytest.raises(
            SamplerError, match=f"version {version} of epoch {epoch} are not in .*the newest.*version 5 of"
        ):
            read.read(epoch, version)
    read.read(2, 5)
    for epoch, version in ((2, 4), (1, 9)):
        with pytest.raises(
            SamplerError, match=f"version {version} of epoch {epoch} are older than those of version 5 of"
        ):
            read.read(epoch, version)
    read.read(2, 5)


def test_other_arrays_are_refused_by_name(one, mesh):
    shapes = jax.eval_shape(lambda: weights(mesh, 0))
    other = {
        r"have layers\.norm as float32\[8\], this sampler as float32\[16\]": (
            "norm",
            jax.ShapeDtypeStruct((16,), "float32"),
        ),
        r"have layers\.norm as float32\[8\], this sampler as int32\[8\]": ("norm", jax.ShapeDtypeStruct((8,), "int32")),
        r"lack layers\.bias \(1 arrays differ\)": ("bias", jax.ShapeDtypeStruct((8,), "float32")),
    }
    for said, (name, like) in other.items():
        tree = shapes | {"layers": shapes["layers"] | {name: like}}
        shardings = placed(mesh, jax.tree.map(lambda _: P(), tree))
        with pytest.raises(SamplerError, match=said):
            SnapshotReader(str(one), tree, shardings).read(2, 5)


def manifest(store):
    return store / "000002/00000005/manifest.json"


DAMAGE = {
    "half a manifest": (manifest, cut, "not JSON"),
    "another version": (
        manifest,
        lambda p: p.write_text(p.read_text().replace('"version":5', '"version":4')),
        "is that of",
    ),
    "another format": (
        manifest,
        lambda p: p.write_text(p.read_text().replace('"format":1', '"format":2')),
        "format is 2",
    ),
    "missing": (lambda s: chunk(s), lambda p: p.unlink(), "chunk .* is missing"),
    "truncated": (lambda s: chunk(s), cut, "Not enough data"),
    "longer": (lambda s: chunk(s), lambda p: p.write_bytes(p.read_bytes() + b"0"), "End of data expected"),
    "flipped": (lambda s: chunk(s), flip, r"checksums of \['layers\.w'\] differ"),
}


def chunk(store):
    return store / "000002/00000005/full/layers.w/c/3/1/1"


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_has_a_name(one, mesh, kind):
    """And the reader takes what is whole afterwards."""
    where, harm, said = DAMAGE[kind]
    read, path = reader(one, mesh), where(one)
    shutil.copy(path, path.with_suffix(".whole"))
    harm(path)
    with pytest.raises(
        SamplerError, match=f"(?s)version 5 of epoch 2 in .* are damaged: .*{said}" if "are" not in said else said
    ):
        read.read(2, 5)
    shutil.move(path.with_suffix(".whole"), path)
    assert equal(read.read(2, 5)[0], weights(mesh, 5))


@pytest.mark.slow
def test_no_damage_gives_other_weights(tmp_path, mesh):
    """200 times a file of a chain is harmed; readers with and without what came before refuse, or get the right weights."""
    pushes(SnapshotWriter(str(tmp_path / "s"), 1, keep=9, chunk_bytes=200), weights(mesh, 1), 3)
    names = [
        p.relative_to(tmp_path) for p in sorted((tmp_path / "s").rglob("*")) if p.is_file() and p.name != "zarr.json"
    ]
    right, rng, refused = reader(tmp_path / "s", mesh).read(1, 2)[0], np.random.default_rng(0), 0
    held = reader(tmp_path / "s", mesh)
    for _ in range(200):
        path = tmp_path / names[rng.integers(len(names))]
        whole = path.read_bytes()
        held.read(1, 2)
        flipped = bytearray(whole)
        flipped[rng.integers(len(whole))] ^= 1 << rng.integers(8)
        path.write_bytes([flipped, whole[: rng.integers(len(whole))], whole + b"0", b""][rng.integers(4)])
        for read in (held, reader(tmp_path / "s", mesh)):
            try:
                assert equal(read.read(1, 2)[0], right)
            except SamplerError:
                refused += 1
        path.write_bytes(whole)
    assert refused > 300


def test_a_store_that_is_away_is_waited_for(one, mesh):
    away = one.with_name("away")
    one.rename(away)
    with pytest.raises(SamplerError, match="cannot be read from .* within 0.3 s"):
        reader(one, mesh, timeout_s=0.3).read(2, 5)
    back = threading.Timer(0.5, away.rename, [one])
    back.start()
    assert equal(reader(one, mesh, timeout_s=60.0).read(2, 5)[0], weights(mesh, 5))
    back.join()
