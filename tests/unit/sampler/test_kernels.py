"""The TPU and GPU paths, their kernels in interpreters, against the dense path; what the kernels refuse."""

import dataclasses
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel as ragged_kernel
from jax.sharding import AbstractDevice, AbstractMesh

from rolljax.errors import ConfigError
from rolljax.model import attention
from rolljax.model.decoder import Model
from rolljax.model.families.gemma3 import Gemma3Config
from rolljax.model.families.qwen3 import Qwen3Config
from rolljax.sampler import kernels, kv
from rolljax.sampler.arrays import Inserts, PrefillChunks
from rolljax.sampler.engine import Engine
from rolljax.sampler.kernels import RaggedPath, TritonPath, paths_for, why_not
from rolljax.sampler.kv import DensePath, PageTable
from rolljax.sampler.settings import SamplerConfig
from rolljax.trainer.mesh import BATCH_AXES, MeshSpec

MODEL = Model(Qwen3Config(init_std=0.1))
CFG = SamplerConfig(slots=4, max_context=96, page_size=16, prefill_chunk=64, steps_per_dispatch=4)
WIDTH = CFG.pages_per_sequence


class Buffer:
    """What a TPU kernel reads of a buffer: rows of it, also as 32-bit words that hold a number each of several rows."""

    def __init__(self, rows):
        self._rows, self.shape, self.dtype = rows, rows.shape, rows.dtype

    def reshape(self, *shape):
        return Buffer(self._rows.reshape(*shape))

    def bitcast(self, dtype):
        packed = jnp.dtype(dtype).itemsize // self.dtype.itemsize
        apart = self._rows.reshape(-1, packed, self.shape[-1]).swapaxes(1, 2)
        return Buffer(jax.lax.bitcast_convert_type(apart, dtype))

    def __getitem__(self, index):
        return self._rows[index]


@pytest.fixture
def interpreted(monkeypatch):
    """Run TPU kernels on CPU. Two things in the kernel that jax 0.10.2's interpreters cannot do are said otherwise:
    reading a reshaped buffer, and a masked store (the TPU interpreter mistakes its bounds)."""

    def wait(self):
        for copy in self._async_copies:
            copy.wait()
        return Buffer(self._vmem_buf[...])

    def store(ref, value, *, mask):
        ref[...] = jnp.where(mask, value, ref[...])

    monkeypatch.setattr(ragged_kernel.MultiPageAsyncCopyDescriptor, "wait", wait)
    monkeypatch.setattr(pltpu, "store", store)
    with pltpu.force_tpu_interpret_mode(True):
        yield


def engine(kind, mesh, fp8=False):
    cfg = dataclasses.replace(CFG, kv_dtype="fp8" if fp8 else "auto")
    out = Engine(MODEL, cfg, mesh, BATCH_AXES)
    args = (MODEL.cfg, MODEL.dtype, CFG.page_size, out.pages_per_shard)
    if kind == "ragged":
        out.path = out.decode_path = RaggedPath(*args, mesh, fp8)
    elif kind == "triton":
        out.decode_path = TritonPath(*args, False, mesh, interpret=True)
    return out


def run(kind, mesh, params, fp8=False):
    """Run two prompts in chunks (one ends in padding), into slots 0 and 2, decoded greedily; return all outputs of the
    engine."""
    rng = np.random.default_rng(0)
    eng = engine(kind, mesh, fp8)
    state = eng.init_decode_state()
    mine = np.arange(2 * WIDTH, dtype=np.int32).reshape(2, WIDTH)  # pages of the prompts
    shards = eng.num_shards  # with two, each prompt is alone on its shard, in its row 0 and slot 0
    rows = np.array([0, 1])
    chunks = PrefillChunks.empty(2, 32, WIDTH)
    chunks.tokens[:], chunks.count[:] = rng.integers(0, 256, (2, 32)), [20, 32]
    chunks.table[:, :4] = mine[:, :4]
    state, first = eng.prefill(params, state, chunks, read=0)
    chunks = PrefillChunks.empty(2, 32, WIDTH)
    chunks.tokens[:], chunks.start[0], chunks.count[0] = rng.integers(0, 256, (2, 32)), 20, 7
    chunks.table[0, :4] = mine[0, :4]
    state, second = eng.prefill(params, state, chunks, read=WIDTH)
    slots = np.array([0, 2])
    inserts, table, slot_of = Inserts.empty(4), np.full((4, WIDTH), -1, np.int32), np.full(4, -1, np.int32)
    inserts.row[slots] = rows if shards == 1 else 0
    inserts.length[slots], inserts.max_tokens[slots], inserts.distribution.temperature[:] = [27, 32], [9, 3], 0
    table[slots], slot_of[slots] = mine, slots % (4 // shards)
    state, result = eng.insert(state, jnp.stack([second[0], first[1]]), inserts)
    said = [first, second[:1], result.tokens[slots]]
    for _ in range(3):
        state, result = eng.generate(params, state, table, slot_of)
        holds = np.arange(4) < np.asarray(result.valid)[:, None]
        said += [result.valid, result.tokens * holds, result.model_logp * holds]
    return [np.asarray(x, np.float64) for x in said]


def same(a, b):
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)


@pytest.fixture(scope="module")
def said(params):
    return run("dense", MeshSpec().build(jax.devices()[:1]), params)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("sizes", [(1, 1), (2, 2)], ids=["one device", "data 2, tensor 2"])
def test_the_tpu_path_says_what_the_dense_path_says(said, params, interpreted, sizes):
    data, tensor = sizes
    same(said, run("ragged", MeshSpec(data=data, tensor=tensor).build(), params))


def test_the_tpu_path_reads_float8_as_the_dense_path_does(params, interpreted):
    mesh = MeshSpec().build(jax.devices()[:1])
    for a, b in zip(run("dense", mesh, params, True), run("ragged", mesh, params, True), strict=True):
        # keys near the middle of two float8 neighbours may be rounded either way
        assert np.quantile(np.abs(a - b), 0.9) < 1e-4


def test_the_gpu_path_says_what_the_dense_path_says(said, params):
    same(said, run("triton", MeshSpec().build(jax.devices()[:1]), params))


def test_what_does_not_hold_is_written_nowhere():
    """A path's `attend` with a kernel that does nothing: which tokens of the pool change."""

    class Write(RaggedPath):
        def _kernel(self, q, pool, *_, **__):
            return q

    path = Write(MODEL.cfg, "float32", 4, 10, MeshSpec().build(jax.devices()[:1]))
    table = jnp.array([[3, 5, -1], [7, -1, -1], [-1, -1, -1]])
    reading, pool = path.open(jnp.zeros(path.pool_shape(10)), PageTable(table, jnp.array([2, 0, 9])), 4, 3)
    ones = lambda heads: jnp.ones((3, 4, heads, 16))  # noqa: E731
    _, pool = path.attend(reading, 0, jnp.array([3, 1, 0]))(ones(4), ones(2), ones(2), pool, 1)
    assert np.unique(pool[..., 16:]).tolist() == [0]  # the head size is padded
    written = np.argwhere(np.asarray(pool[..., :16]).all(axis=(2, 3))).tolist()
    assert written == [[13, 2], [13, 3], [15, 0], [17, 0]]  # layer 1 starts at page 10


@pytest.mark.parametrize("kind", [DensePath, RaggedPath])
def test_pages_are_copied_in_every_layer(kind):
    last = MeshSpec().build(jax.devices()[:1]) if kind is RaggedPath else False
    path = kind(MODEL.cfg, "float32", 4, 10, last)
    pool = jnp.asarray(np.random.default_rng(0).normal(size=path.pool_shape(10)), jnp.float32)
    got = jax.jit(path.copy_pages)(pool, jnp.array([-1, 3, 3, 0]), jnp.array([-1, 7, 8, 2]))
    want = np.array(pool)
    for first in (0, 10):
        want[first + 7] = want[first + 8] = want[first + 3]
        want[first + 2] = want[first]
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_gpu_kernel_becomes_a_triton_kernel(dtype):
    """No GPU is needed to lower for one; later versions of JAX want to know which."""
    h100 = AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H100", 132, "gpu"))
    path = TritonPath(dataclasses.replace(MODEL.cfg, head_dim=128), dtype, 16, 32, False, None)
    q, pool = jnp.zeros((3, 2, 2, 128), dtype), jnp.zeros((64, 4, 16, 128), dtype)
    args = (q, pool, jnp.zeros((3, 6), jnp.int32), jnp.ones(3, jnp.int32), 0)
    with jax.sharding.use_abstract_mesh(h100):
        lowered = jax.jit(path._kernel).trace(*args).lower(lowering_platforms=("cuda",))
    assert "xla.gpu.triton" in lowered.as_text()


def choose(platform, attention="auto", *, tensor=1, rows=64, width=64, page_size=16, **cfg):
    model = Model(dataclasses.replace(MODEL.cfg, **cfg))
    mesh = MeshSpec(data=1, tensor=tensor).build()
    return paths_for(platform, attention, model, mesh, page_size=page_size, num_pages=100, rows=rows, width=width)


def test_each_platform_has_its_path():
    kinds = lambda *args, **kw: [type(path).__name__ for path in choose(*args, **kw)]  # noqa: E731
    assert kinds("cpu") == ["DensePath", "DensePath"]
    assert kinds("tpu") == ["RaggedPath", "RaggedPath"]
    assert kinds("tpu", "ragged") == ["RaggedPath", "RaggedPath"]
    assert kinds("gpu") == kinds("tpu", "dense") == ["DensePath", "DensePath"]
    assert kinds("gpu", "triton") == ["DensePath", "TritonPath"]


@pytest.mark.parametrize(
    ("platform", "attention", "sizes", "reason"),
    [
        ("cpu", "ragged", {}, "needs a TPU"),
        ("gpu", "ragged", {}, "needs a TPU"),
        ("cpu", "triton", {}, "needs a GPU"),
        ("tpu", "triton", {}, "needs a GPU"),
        ("gpu", "triton", {"page_size": 5}, "powers of two, heads from 16, not 5 and 16"),
        ("gpu", "triton", {"head_dim": 80}, "powers of two, heads from 16, not 16 and 80"),
        ("gpu", "triton", {"head_dim": 8}, "powers of two, heads from 16, not 16 and 8"),
    ],
)
def test_a_path_that_cannot_run_is_refused_with_the_reason(platform, attention, sizes, reason):
    with pytest.raises(ConfigError) as error:
        choose(platform, attention, **sizes)
    assert reason in error.value.message and error.value.setting == "SamplerConfig.attention"
    assert "'dense'" in error.value.remedy


def test_windows_are_refused_by_the_triton_path():
    assert "sliding windows" in why_not("triton", "gpu", Gemma3Config(), 16, fp8=False)


def test_a_jax_without_the_triton_backend_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert "Pallas for Triton, which JAX" in why_not("triton", "gpu", MODEL.cfg, 16, fp8=False)


def test_auto_takes_the_first_measured_path_that_can_run(monkeypatch):
    """The device of the mesh is this machine's, a CPU; what counts is the entry of its kind."""
    monkeypatch.setitem(kernels.MEASURED, jax.devices()[0].device_kind, ("triton", "dense"))
    assert type(choose("gpu")[1]) is TritonPath
    assert type(choose("gpu", page_size=5)[1]) is DensePath
    assert type(choose("gpu", "dense")[1]) is DensePath


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("kind", ["unrolled", "scanned", "triton"])
def test_pages_that_rows_share_are_read_as_if_each_row_had_them(kind, window):
    """Three blocks of four rows: they share three pages, none, and one."""
    if kind == "triton" and window:
        pytest.skip("the GPU kernel has no windows")
    args = MODEL.cfg, "float32", 4, 96, kind == "unrolled"
    mesh = MeshSpec().build(jax.devices()[:1])
    path = TritonPath(*args, mesh, interpret=True) if kind == "triton" else DensePath(*args)
    rng, rows = np.random.default_rng(0), 12
    pool = jnp.asarray(rng.normal(size=path.pool_shape(96)), jnp.float32)
    shared = np.full((3, 4), -1)
    shared[0, :3], shared[2, :1] = [90, 80, 70], [60]
    own = rng.permutation(60).reshape(rows, 5)
    whole = np.full((rows, 9), -1)
    length = []
    for row, pages in enumerate(own):
        begins = [p for p in shared[row // 4] if p >= 0]
        whole[row, : len(begins) + 5] = [*begins, *pages]
        length.append(len(begins) * 4 + int(rng.integers(0, 17)))
    heads = (MODEL.cfg.num_heads, *[MODEL.cfg.num_kv_heads] * 2)
    qkv = [jnp.asarray(rng.normal(size=(2, rows, 1, n, MODEL.cfg.head_dim)), jnp.float32) for n in heads]
    looks = None if window is None else attention.Window(window, True)

    def played(table, *shared):
        pages = PageTable(jnp.asarray(table), jnp.asarray(length), *shared)
        reading, cache = path.open(pool, pages, 2, table.shape[1])
        out, ones = [], jnp.ones(rows, jnp.int32)
        for step in range(2):
            mixed, cache = path.attend(reading, step, ones)(*(x[step] for x in qkv), cache, 1, looks)
            out.append(mixed)
        return jnp.stack(out), path.close(pool, reading, cache, 2 * ones)

    wanted, found = played(whole), played(own, jnp.asarray(shared))
    np.testing.assert_allclose(found[0], wanted[0], atol=1e-5)
    np.testing.assert_array_equal(found[1], wanted[1])


def test_prefill_by_cudnn_where_auto_takes_cudnn_in_training(monkeypatch):
    by_cudnn = lambda *args, **kw: choose(*args, **kw)[0].chunks_by_cudnn  # noqa: E731
    assert not by_cudnn("gpu")
    monkeypatch.setattr(kernels, "implementation", lambda *_: "cudnn")
    assert by_cudnn("gpu") and by_cudnn("gpu", "triton")
    assert not by_cudnn("gpu", "dense") and not by_cudnn("gpu", tensor=2)


@pytest.mark.parametrize("window", [None, 5])
def test_prefill_by_cudnn_gives_what_the_dense_path_gives(monkeypatch, window):
    """Two chunks; this machine has no cuDNN, so the reference takes its call."""
    calls = []

    def reference(q, k, v, mask, *, causal):
        calls.append(causal)
        after = jnp.tri(q.shape[1], k.shape[1], dtype=bool)
        return attention.attention(q, k, v, mask & after if causal else mask)

    monkeypatch.setattr(kv, "cudnn", reference)
    plain = DensePath(MODEL.cfg, "float32", 4, 8, False)
    rng, table = np.random.default_rng(0), jnp.arange(8).reshape(2, 4)
    heads = (MODEL.cfg.num_heads, *[MODEL.cfg.num_kv_heads] * 2)
    qkv = [jnp.asarray(rng.normal(size=(2, 16, n, MODEL.cfg.head_dim)), jnp.float32) for n in heads]
    looks = None if window is None else attention.Window(window, True)

    def mixed(path):
        pool, out = jnp.zeros(path.pool_shape(8), path.pool_dtype), []
        for start, read in ((0, 0), (8, 2)):
            reading, cache = path.open(pool, PageTable(table, jnp.full(2, start)), 8, read)
            attend = path.attend(reading, 0, jnp.full(2, 8))
            chunk, cache = attend(*(x[:, start : start + 8] for x in qkv), cache, 0, looks)
            pool = path.close(pool, reading, cache, jnp.full(2, 8))
            out.append(chunk)
        return jnp.concatenate(out, 1), pool

    wanted, found = mixed(plain), mixed(dataclasses.replace(plain, chunks_by_cudnn=True))
    np.testing.assert_allclose(found[0], wanted[0], atol=1e-5)
    np.testing.assert_array_equal(found[1], wanted[1])
    assert calls == [True, False]


@pytest.mark.parametrize(
    ("sizes", "setting", "remedy"),
    [
        ({"rows": 512, "width": 512}, "SamplerConfig.page_size", "page_size=32, or fewer slots"),
        ({"rows": 250, "width": 1000, "page_size": 64}, "SamplerConfig.page_size", "page_size=128, or fewer slots"),
        ({"rows": 4096, "width": 8}, "SamplerConfig.slots", "at most 2000 slots"),
        ({"num_heads": 6, "num_kv_heads": 6}, "MeshSpec.tensor", "1, 2, 4 or a multiple of 8 heads"),
        ({"num_heads": 12, "num_kv_heads": 12, "tensor": 4}, "MeshSpec.tensor", "1, 2, 4 or a multiple of 8 heads"),
    ],
)
def test_what_a_tpu_cannot_hold_is_refused_with_the_remedy(sizes, setting, remedy):
    with pytest.raises(ConfigError) as error:
        choose("tpu", **sizes)
    assert error.value.setting == setting and remedy in error.value.remedy
    if "page_size=" in error.value.remedy:
        size = int(error.value.remedy.split("=")[1].split(",")[0])
        pages = -(-sizes["width"] * sizes.get("page_size", 16) // size)
        choose("tpu", **sizes | {"page_size": size, "width": pages})
