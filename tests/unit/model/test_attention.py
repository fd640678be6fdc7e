"""Attention in packed rows: whatever computes it, on one device or with rows, heads and tokens split over a mesh, the
reference in XLA is what comes out, and its gradients. The rules by which arrays lie on a mesh."""

import importlib.util
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo
from jax.sharding import NamedSharding, PartitionSpec

from rolljax.errors import ConfigError
from rolljax.model import attention, gather, implementations, splash
from rolljax.model.attention import Window, packed, packed_mask
from rolljax.model.axes import PARAM_RULES, constrain, on_mesh, spec
from rolljax.model.implementations import implementation
from rolljax.model.layers import matmul
from rolljax.recipe import Recipe
from rolljax.trainer.mesh import MeshSpec, num_batch_shards, num_slot_shards, param_shardings

T, H, K, C, SIZE = 384, 4, 2, 8, 37
PARTS = [
    [[(70, [30, 50, 40]), (100, [20, 30])], [(10, [200]), (3, [1, 1, 1, 100])]],  # both padded at the end
    [[(5, [2] * 20), (150, [90, 80])], [(130, [])]],
]
"""Two times two rows of groups: tokens of a prompt, and of its siblings' answers."""


def row(parts):
    """Return segments, branches, positions and predecessors of one packed row."""
    segment, branch, position, prev = np.zeros((4, T), np.int32)
    prev[:] = np.arange(T)
    at = 0
    for number, (prompt, answers) in enumerate(parts, 1):
        start = at
        for b, size in enumerate([prompt, *answers]):
            span = slice(at, at + size)
            segment[span], branch[span] = number, b
            position[span] = np.arange(size) + (prompt if b else 0)
            prev[span] = np.arange(at - 1, at + size - 1)
            prev[at] = at if b == 0 else start + prompt - 1
            at += size
    return segment, branch, position, prev


@pytest.fixture(scope="module")
def rows():
    """Return arrays `[4, T]`, and where there are tokens."""
    segment, branch, position, prev = (jnp.asarray(np.stack(x)) for x in zip(*map(row, sum(PARTS, [])), strict=True))
    return segment, branch, position, prev, np.asarray(segment > 0)


def heads(dtype):
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(4, T, H, C), (4, T, K, C), (4, T, K, C), (4, T, H, C)]
    return [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)]


def run(rows, how, dtype, size, mesh=None):
    """Return a function of whether the window is on: mixed values, and gradients of queries, keys and values."""
    *qkv, weight = heads(dtype)
    segment, branch, position, _, real = rows
    weight = weight * real[..., None, None]

    def loss(qkv, on):
        with on_mesh(mesh):
            attend = packed(segment, branch, position, how)
            mixed, _ = attend(*qkv, None, 0, Window(size, on) if size else None)
        return (mixed.astype(jnp.float32) * weight).sum(), mixed

    program = jax.jit(jax.value_and_grad(loss, has_aux=True))

    def both(on):
        (_, mixed), grads = program(qkv, on)
        assert np.isfinite(mixed.astype(jnp.float32)).all()
        return [np.asarray(x, np.float32) for x in (mixed * real[..., None, None], *grads)]

    return both


def assert_near(found, expected, tolerance):
    for a, b in zip(found, expected, strict=True):
        assert np.abs(a - b).max() <= tolerance * max(1, np.abs(b).max())


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("dtype", "size", "tolerance"), [("float32", None, 1e-5), ("float32", SIZE, 1e-5), ("bfloat16", SIZE, 2e-2)]
)
def test_the_kernels_give_what_the_reference_gives(rows, dtype, size, tolerance):
    """Outputs and gradients, for shared prompts, padding, grouped heads; with windows that are on or off by layer."""
    expected, found = (run(rows, how, dtype, size) for how in ("xla", "splash"))
    for on in (True, False) if size else (True,):
        assert_near(found(on), expected(on), tolerance)
    if size:
        assert np.abs(expected(True)[0] - expected(False)[0]).max() > 0.1


@pytest.mark.parametrize("how", ["xla", "splash"])
def test_parts_of_rows_give_what_whole_rows_give(rows, how):
    mesh = MeshSpec(data=1, fsdp=2, context=3).build(jax.devices()[:6])
    alone, split = run(rows, "xla", "float32", SIZE), run(rows, how, "float32", SIZE, mesh)
    assert_near(split(True), alone(True), 1e-5)


def test_kernels_pass_over_blocks_that_nobody_sees(rows):
    """What the two runs compute is what the mask has anything in, and padding's own blocks."""

    @jax.jit
    def blocks(segment, branch, position):
        queries, keys = splash.rows(segment, branch, position)
        looks = splash._Kernel(None, False).looks(queries, keys, True)
        return [jax.vmap(lambda look: splash.look_blocks(look, 128, 128))(look) for look in looks]

    segment, branch, position, _, real = rows
    own, prompt = blocks(segment, branch, position)
    computed = np.asarray(own.block_mask + prompt.block_mask)[:, 0] > 0
    seen = np.asarray(packed_mask(segment, branch)) & real[:, :, None]
    seen = seen.reshape(4, 3, 128, 3, 128).any((2, 4))
    padding = (~real).reshape(4, 3, 128).any(2)[:, :, None] & np.eye(3, dtype=bool)
    assert (computed == (seen | padding)).all()
    assert not computed.all()
    row, _, key = np.nonzero(own.block_mask[:, 0])
    assert len(row) and (np.asarray(own.data_next[:, 0])[np.asarray(own.block_mask[:, 0]) > 0] == key).all()


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 2e-2)])
@pytest.mark.parametrize("split", [False, True], ids=["one device", "fsdp 2, context 3"])
def test_pieces_of_queries_give_what_whole_rows_give(rows, monkeypatch, split, dtype, tolerance):
    """XLA's way for long rows: outputs and gradients, with a last piece that is not full."""
    mesh = MeshSpec(data=1, fsdp=2, context=3).build(jax.devices()[:6]) if split else None
    expected = run(rows, "xla", dtype, SIZE)(True)
    monkeypatch.setattr(attention, "SCORE_BYTES", 0)
    rows_of_device = 2 if split else 4
    monkeypatch.setattr(attention, "PIECE_BYTES", 30 * rows_of_device * H * T * 4)  # 30 queries at a time
    assert_near(run(rows, "xla", dtype, SIZE, mesh)(True), expected, tolerance)


def test_memory_of_long_rows_is_linear():
    """The program of one layer, forward and backward: scores of all pairs of 16,384 tokens would take 4 GiB."""
    shape = jax.ShapeDtypeStruct((1, 16_384, 4, 32), jnp.bfloat16)
    place = jax.ShapeDtypeStruct(shape.shape[:2], jnp.int32)

    def loss(qkv, segment, branch, position):
        mixed, _ = packed(segment, branch, position, "xla")(*qkv, None, 0)
        return mixed.astype(jnp.float32).sum()

    compiled = jax.jit(jax.grad(loss)).lower([shape] * 3, *[place] * 3).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 2**31


# ---- which implementation -------------------------------------------------------------------------------------------


def mesh_of(platform, kind="", capability=None):
    """Return a mesh of one device that this machine does not have."""
    device = types.SimpleNamespace(platform=platform, device_kind=kind)
    if capability:
        device.compute_capability = capability
    return types.SimpleNamespace(devices=np.array([device]), shape={"context": 1})


HOPPER = mesh_of("gpu", "NVIDIA H100 80GB HBM3", "9.0")
AMPERE = mesh_of("gpu", "NVIDIA A100-SXM4-80GB", "8.0")
TPU = mesh_of("tpu", "TPU v5 lite")


@pytest.fixture
def cudnn_is_there(monkeypatch):
    """Pretend that cuDNN is installed: JAX refuses it first on a machine without it."""
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)


def test_a_named_implementation_runs_or_is_refused():
    cpu = MeshSpec(data=1, context=2).build(jax.devices()[:2])
    assert implementation("auto", cpu, (2, 256, 4, 128), jnp.bfloat16) == "xla"
    assert implementation("splash", cpu, (2, 256, 4, 128), jnp.bfloat16) == "splash"
    with pytest.raises(ConfigError, match="multiples of 128 tokens, not 64"):
        implementation("splash", cpu, (2, 128, 4, 128), jnp.bfloat16)
    with pytest.raises(ConfigError, match="needs a GPU"):
        implementation("cudnn", None, (2, 128, 4, 128), jnp.bfloat16)


@pytest.mark.parametrize(
    ("mesh", "shape", "dtype", "expected"),
    [
        (TPU, (2, 4096, 8, 128), "bfloat16", "splash"),
        (TPU, (2, 4096, 8, 128), "float32", "splash"),
        (TPU, (2, 100, 8, 128), "bfloat16", "xla"),
        (AMPERE, (2, 4096, 8, 128), "bfloat16", "xla"),
        (mesh_of("rocm"), (2, 4096, 8, 128), "float32", "xla"),
    ],
)
def test_auto_takes_no_gpu_kernel_that_was_not_measured(mesh, shape, dtype, expected):
    assert implementation("auto", mesh, shape, jnp.dtype(dtype)) == expected
    assert implementation("auto", None, shape, jnp.dtype(dtype)) == "xla"


@pytest.mark.parametrize(
    ("shape", "dtype", "expected"),
    [
        ((2, 4096, 8, 128), "bfloat16", "cudnn"),
        ((2, 4096, 8, 256), "bfloat16", "cudnn"),
        ((2, 4096, 8, 128), "float32", "xla"),
        ((2, 101, 8, 128), "bfloat16", "xla"),
    ],
)
def test_auto_takes_the_first_measured_one_that_can_run(monkeypatch, cudnn_is_there, shape, dtype, expected):
    monkeypatch.setattr(fused_attention_stablehlo, "check_compute_capability", lambda _: True)
    assert implementation("auto", HOPPER, shape, jnp.dtype(dtype)) == expected
    assert implementation("auto", AMPERE, shape, jnp.dtype(dtype)) == "xla"


@pytest.mark.parametrize(
    ("how", "mesh", "shape", "dtype", "reason"),
    [
        ("splash", HOPPER, (2, 4096, 8, 128), "bfloat16", "needs a TPU"),
        ("cudnn", TPU, (2, 4096, 8, 128), "bfloat16", "needs a GPU"),
        ("cudnn", HOPPER, (2, 4096, 8, 128), "float32", "in bfloat16, not float32"),
        ("cudnn", HOPPER, (2, 4096, 8, 264), "bfloat16", "8, 16, ... 256 numbers"),
        ("cudnn", AMPERE, (2, 4096, 8, 256), "bfloat16", "8, 16, ... 128 numbers"),
        ("cudnn", AMPERE, (2, 101, 8, 128), "bfloat16", "in even parts, not 128 and 101"),
        ("cudnn", HOPPER, (2, 4096, 8, 128), "bfloat16", "cuDNN is not detected"),
        ("tokamax", AMPERE, (2, 4096, 8, 128), "bfloat16", "capability 9.0"),
        ("tokamax", HOPPER, (2, 4096, 8, 128), "float32", "in bfloat16, not float32"),
    ],
)
def test_a_refusal_says_why(how, mesh, shape, dtype, reason):
    """On this machine JAX finds no cuDNN, which is a reason, too."""
    with pytest.raises(ConfigError) as error:
        implementation(how, mesh, shape, jnp.dtype(dtype))
    assert reason in error.value.message and error.value.setting == "Recipe.attention"
    assert "'xla'" in error.value.remedy


@pytest.mark.skipif(importlib.util.find_spec("tokamax") is not None, reason="tokamax is installed")
def test_a_package_that_is_not_installed_is_named():
    with pytest.raises(ConfigError, match="the package tokamax, which is not installed"):
        implementation("tokamax", HOPPER, (2, 4096, 8, 128), jnp.bfloat16)


def test_cudnn_is_called_forward_and_backward(cudnn_is_there):
    """Lowering for CUDA needs no GPU. The mask goes in as a bias; the causal half is left out."""
    q, k = (jnp.zeros((2, 256, heads, 128), jnp.bfloat16) for heads in (4, 2))
    mask = jnp.ones((2, 256, 256), bool)
    loss = lambda q, k, v: implementations.cudnn(q, k, v, mask, causal=True).astype(jnp.float32).sum()  # noqa: E731
    text = jax.jit(jax.grad(loss, (0, 1, 2))).trace(q, k, k).lower(lowering_platforms=("cuda",)).as_text()
    assert "__cudnn$fmhaScaleBiasSoftmax" in text and "__cudnn$fmhaScaleBiasSoftmaxBackward" in text
    assert re.search(r"mask_type\\22: \\22CAUSAL", text)


@pytest.mark.parametrize("score_bytes", [2**30, 0], ids=["whole rows", "pieces"])
def test_xla_needs_no_kernel_on_a_gpu(rows, monkeypatch, score_bytes):
    monkeypatch.setattr(attention, "SCORE_BYTES", score_bytes)
    segment, branch, position, _, _ = rows

    def loss(qkv):
        return packed(segment, branch, position, "xla")(*qkv, None, 0)[0].astype(jnp.float32).sum()

    traced = jax.jit(jax.grad(loss)).trace(heads("bfloat16")[:3])
    assert "custom_call" not in traced.lower(lowering_platforms=("cuda",)).as_text()


# ---- look-ups ---------------------------------------------------------------------------------------------------------


def on_one_and_on(mesh, f, *args):
    """Return values and gradients of `f`, a function of a float array and integers, without a mesh and on one."""

    def program(mesh):
        def loss(x, *rest):
            with on_mesh(mesh):
                y = f(x, *rest)
            return (y * jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape)).sum(), y

        (_, y), g = jax.jit(jax.value_and_grad(loss, has_aux=True))(*args)
        return y, g

    (y, g), (y2, g2) = program(None), program(mesh)
    np.testing.assert_array_equal(y, y2)
    np.testing.assert_allclose(g, g2, rtol=1e-5, atol=1e-5)


def test_predecessors_in_other_parts_of_the_row_are_found(rows):
    hidden = jax.random.normal(jax.random.key(0), (4, T, 8))
    mesh = MeshSpec(data=1, fsdp=2, context=4).build()
    assert any((rows[3][r, cut:] < cut - 1).any() for r in range(4) for cut in (96, 192, 288)), "across parts"
    on_one_and_on(mesh, gather.before, hidden, rows[3])


@pytest.mark.parametrize("mesh", [MeshSpec(data=1, fsdp=2, expert=2, tensor=2), MeshSpec(data=2, context=2, tensor=2)])
def test_rows_of_a_split_embedding(mesh):
    table = jax.random.normal(jax.random.key(0), (24, 16))
    ids = jax.random.randint(jax.random.key(1), (4, 6), 0, 24)
    on_one_and_on(mesh.build(), lambda table, ids: gather.embedded(table, ids, "float32"), table, ids)


def test_the_gradient_of_an_embedding_is_added_up_in_float32():
    ids = jnp.zeros((1, 1024), jnp.int32)
    grad = jax.grad(lambda table: gather.embedded(table, ids, "bfloat16").astype(jnp.float32).sum())(jnp.ones((2, 4)))
    np.testing.assert_array_equal(grad, [[1024.0] * 4, [0.0] * 4])  # bfloat16 would stop at 256


def test_the_gradient_of_a_weight_leaves_the_matmul_in_float32():
    x, w = jnp.ones((1, 1001, 4), jnp.bfloat16), jnp.ones((4, 2))
    grad = jax.grad(lambda w: matmul(x, w, ("embed", "ffn")).astype(jnp.float32).sum())(w)
    np.testing.assert_array_equal(grad, np.full((4, 2), 1001.0))  # in bfloat16: 1000


# ---- rules ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mesh():
    return MeshSpec(data=1, fsdp=2, context=2, tensor=2).build()


def test_a_name_that_maps_to_nothing(mesh):
    with pytest.raises(ConfigError, match="is no logical axis") as e:
        spec(("embed", "hedas"), PARAM_RULES, mesh)
    assert e.value.value == "hedas" and "heads" in e.value.remedy


def test_two_names_on_one_mesh_axis(mesh):
    with pytest.raises(ConfigError, match="and heads of one array are both split over the mesh axis tensor"):
        spec(("heads", "ffn"), PARAM_RULES, mesh)
    assert spec(("heads", "ffn"), PARAM_RULES, MeshSpec(data=8).build()) == PartitionSpec(None, None)


def test_a_dimension_that_does_not_divide(mesh):
    axes, shapes = {"w": ("embed", "ffn")}, {"w": jax.ShapeDtypeStruct((6, 9), jnp.float32)}
    with pytest.raises(ConfigError, match="= 2 does not divide the model's ffn dimension of 9"):
        param_shardings(mesh, axes, shapes)
    shapes = {"w": jax.ShapeDtypeStruct((7, 8), jnp.float32)}
    with pytest.raises(ConfigError, match="= 2 does not divide the model's embed dimension of 7"):
        param_shardings(mesh, axes, shapes)


def test_rows_and_their_tokens_divide_over_the_mesh(mesh):
    def check(**phase):
        Recipe.check_mesh(types.SimpleNamespace(phases=[types.SimpleNamespace(**phase)]), mesh)

    check(micro_rows=4, row_len=64)
    with pytest.raises(ConfigError, match="does not divide over 2 batch shards"):
        check(micro_rows=3, row_len=64)
    with pytest.raises(ConfigError, match="does not divide by MeshSpec.context = 2"):
        check(micro_rows=4, row_len=63)


def test_constrain_places_by_name_and_only_on_a_mesh(mesh):
    def f(x):
        with on_mesh(mesh):
            return constrain(x, "batch", "length", "hidden")

    x = jnp.zeros((4, 8, 3))
    assert constrain(x, "batch", "length", "hidden") is x
    assert jax.jit(f)(x).sharding.is_equivalent_to(NamedSharding(mesh, PartitionSpec("fsdp", "context", None)), 3)


def test_no_chip_of_the_context_axis_idles_while_sampling(mesh):
    assert (num_batch_shards(mesh), num_slot_shards(mesh)) == (2, 4)
