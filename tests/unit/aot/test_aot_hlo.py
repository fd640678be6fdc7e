"""Figures read from compiled programs, against counts made by hand."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from rolljax.aot import hlo, hlo_text, programs
from rolljax.aot.chips import CHIPS, links
from rolljax.model.decoder import Model
from rolljax.model.families.qwen3 import Qwen3Config
from rolljax.trainer.algorithms.grpo import Grpo
from rolljax.trainer.batch import PackShape
from rolljax.trainer.mesh import MeshSpec
from rolljax.trainer.optimizer import AdamW
from rolljax.trainer.phase_trainer import PhaseTrainer

AXES = {"fsdp": 4, "tensor": 2}


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.array(jax.devices()).reshape(4, 2), tuple(AXES))


def read(fn, *args, trips=1, axes=AXES):
    return hlo.read(jax.jit(fn).lower(*args).compile().as_text(), axes, trips)


def test_loops_in_loops_are_multiplied_out():
    """3 x 5 products of [8, 16] by [16, 16]."""

    def fn(x, w):
        inner = lambda x, _: (jnp.tanh(x @ w), None)  # noqa: E731
        outer = lambda i, x: jax.lax.scan(inner, x, None, length=5)[0]  # noqa: E731
        return jax.lax.fori_loop(0, 3, outer, x)

    work = read(fn, jnp.ones((8, 16)), jnp.ones((16, 16)))
    assert work.matmul_flops == 3 * 5 * 2 * 8 * 16 * 16
    assert work.unknown_loops == 0


def test_a_loop_of_unknown_length_counts_as_often_as_is_said():
    def fn(x, w, n):
        inner = lambda i, x: x @ w  # noqa: E731
        outer = lambda i, x: jax.lax.fori_loop(0, n + i, inner, x) @ w  # noqa: E731
        return jax.lax.fori_loop(0, n, outer, x)

    work = read(fn, jnp.ones((8, 16)), jnp.ones((16, 16)), 3, trips=7)
    assert work.unknown_loops == 2
    assert work.matmul_flops == 7 * (1 + 1) * 2 * 8 * 16 * 16, "the loop inside it counts once"


def test_collectives_are_what_was_written(mesh):
    """6 layers: weights [64, 32] float32 over fsdp 4 are gathered, and the product is summed over tensor 2; then one
    mean of a [16, 32] over fsdp, scattered; and a step around the fsdp ring."""

    def layer(x, w):
        whole = jax.lax.all_gather(w, "fsdp", tiled=True)
        return jax.lax.psum(x @ whole, "tensor"), None

    def fn(x, w):
        x, _ = jax.lax.scan(layer, x, w)
        x = jax.lax.ppermute(x, "fsdp", [(i, (i + 1) % 4) for i in range(4)])
        return jax.lax.psum_scatter(x, "fsdp", tiled=True)

    sharded = jax.shard_map(fn, mesh=mesh, in_specs=(P(), P(None, "fsdp", None)), out_specs=P("fsdp"), check_vma=False)
    place = lambda shape, *spec: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))  # noqa: E731
    work = read(sharded, place((16, 32)), place((6, 32, 32), None, "fsdp", None))
    found = {c.kind: c for c in work.collectives}
    whole, activations = 4 * 32 * 32, 4 * 16 * 32
    assert found.keys() == {"all-gather", "all-reduce", "collective-permute", "reduce-scatter"}
    for kind, axes, times, payload, sent in [
        ("all-gather", ("fsdp",), 6, 6 * whole, 6 * whole * 3 / 4),
        ("all-reduce", ("tensor",), 6, 6 * activations, 6 * 2 * activations / 2),
        ("collective-permute", ("fsdp",), 1, activations, activations),
        ("reduce-scatter", ("fsdp",), 1, activations, activations * 3 / 4),
    ]:
        one = found[kind]
        assert (one.axes, one.times) == (axes, times)
        assert (one.payload_bytes, one.sent_bytes) == (payload, sent)
    assert work.matmul_flops == 6 * 2 * 16 * 32 * 32


@pytest.mark.parametrize(
    "written",
    [
        "replica_groups={{0,2,4,6},{1,3,5,7}}, x",
        "replica_groups=[2,4]<=[4,2]T(1,0), x",
        "replica_groups=mesh['axis_0'=4,'axis_1'=2] {'axis_0'}, x",
        "replica_groups=mesh['a'=8] {'a':(1)4}, x",
        "replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}, x",
    ],
)
def test_groups_are_read_however_they_are_written(written):
    assert hlo_text.replica_group(written, 8) == (0, 2, 4, 6)


CHAIN = """HloModule m

%start (p: bf16[8,16]) -> bf16[32,16] {
  %p = bf16[8,16]{1,0:T(8,128)(2,1)} parameter(0)
  %g = bf16[32,16]{1,0} all-gather(%p), channel_id=3, replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}, frontend_attributes={chain_id="0"}
  ROOT %s = bf16[32,16]{1,0:S(1)} custom-call(%g), custom_call_target="AsyncCollectiveStart"
}

%step (p: bf16[8,16], q: bf16[32,16], a: f32[4,8]) -> f32[4,4] {
  %p = bf16[8,16]{1,0} parameter(0)
  %q = bf16[32,16]{1,0} parameter(1)
  %a = f32[4,8]{1,0} parameter(2)
  %g = bf16[32,16]{1,0:S(1)} all-gather(%p), channel_id=3, replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}, frontend_attributes={chain_id="0"}
  ROOT %c = f32[4,4]{1,0} convolution(%a, %a), dim_labels=bf_oi->bf
}

%all-reduce-scatter.1 (p: f32[32,16]) -> f32[8,16] {
  %p = f32[32,16]{1,0} parameter(0)
  %r = f32[32,16]{1,0} all-reduce(%p), channel_id=4, replica_groups={{0,2,4,6},{1,3,5,7}}, to_apply=%add
  ROOT %d = f32[8,16]{1,0} slice(%r), slice={[0:8], [0:16]}
}

ENTRY %main (w: bf16[8,16], a: f32[4,8], h: f32[32,16]) -> f32[4,4] {
  %w = bf16[8,16]{1,0} parameter(0)
  %a = f32[4,8]{1,0} parameter(1)
  %h = f32[32,16]{1,0} parameter(2)
  %one = bf16[32,16]{1,0:S(1)} fusion(%w), kind=kCustom, calls=%start
  %two = f32[4,4]{1,0} fusion(%w, %one, %a), kind=kOutput, calls=%step
  %three = f32[8,16]{1,0} fusion(%h), kind=kCustom, calls=%all-reduce-scatter.1
  ROOT %end = f32[4,4]{1,0} copy(%two)
}
"""


def test_what_only_tpu_compilers_write():
    """A gather in two pieces behind a matmul is one, and hidden; a fused all-reduce and slice is a reduce-scatter."""
    work = hlo.read(CHAIN, AXES)
    gather, scatter = sorted(work.collectives, key=lambda c: c.kind)
    assert (gather.kind, gather.hidden, gather.times, gather.sent_bytes) == ("all-gather", True, 1, 2 * 32 * 16 * 3 / 4)
    assert (scatter.kind, scatter.hidden, scatter.sent_bytes) == ("reduce-scatter", False, 4 * 32 * 16 * 3 / 4)
    assert work.matmul_flops == 2 * 4 * 4 * 8


def test_bytes_are_those_of_what_is_sliced_not_of_what_it_is_sliced_from():
    def fn(layers, x):
        return jax.lax.scan(lambda x, w: (x + w, None), x, layers)[0]

    x = jnp.ones(1024)
    work = read(fn, jnp.ones((50, 1024)), x)
    once = 50 * 3 * x.nbytes  # a layer and x are read, x is written
    assert once * 0.6 < work.hbm_bytes < once * 2


RENAMED = """HloModule m

%renamed (p: s8[36,64,128]) -> s8[36,64,128] {
  %p = s8[36,64,128]{2,1,0:T(32,128)(4,1)} parameter(0)
  ROOT %c = s8[36,64,128]{2,1,0:T(8,128)(4,1)} copy(%p)
}

%layer (stack: s8[36,64,128], i: s32[]) -> bf16[1,64,128] {
  %stack = s8[36,64,128]{2,1,0:T(32,128)(4,1)} parameter(0)
  %f = s8[36,64,128]{2,1,0:T(8,128)(4,1)} fusion(%stack), kind=kLoop, output_to_operand_aliasing={{}: (0, {})}, calls=%renamed
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  %d = s8[1,64,128]{2,1,0:T(8,128)(4,1)} dynamic-slice(%f, %i, %zero, %zero), dynamic_slice_sizes={1,64,128}
  ROOT %w = bf16[1,64,128]{2,1,0:T(8,128)(2,1)S(1)} convert(%d)
}

ENTRY %main (stack: s8[36,64,128], i: s32[]) -> bf16[1,64,128] {
  %stack = s8[36,64,128]{2,1,0:T(32,128)(4,1)} parameter(0)
  %i = s32[] parameter(1)
  ROOT %w = bf16[1,64,128]{2,1,0:S(1)} fusion(%stack, %i), kind=kLoop, calls=%layer
}
"""


def test_a_copy_to_another_layout_of_the_same_memory_reads_nothing():
    """So TPU compilers read int8 weights: a layer is read, as int8, and its bfloat16 stays on the chip."""
    assert hlo.read(RENAMED, AXES).hbm_bytes == 64 * 128 + 4  # and the index


# ---- a training step on CPU -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def update():
    """Compile a small update over fsdp 4 x tensor 2: 2 micro-batches of 4 rows of 64 tokens."""
    shape = Qwen3Config(512, 3, 64, 4, 2, 32, 256, tie_embeddings=False)
    model = Model(shape, "float32", "full")
    trainer = PhaseTrainer(
        MeshSpec(data=1, fsdp=4, tensor=2).build(),
        model,
        Grpo(),
        AdamW(),
        PackShape(2, 4, 64),
        steps=1,
        groups_per_step=1,
    )
    program = next(programs.TrainerShapes.of(trainer).programs("rl", {}))
    return trainer, program, program.lower().compile()


def test_matmul_flops_are_the_formulas(update):
    """Forward, recomputed, and twice that backward, each 2 flops per parameter and token; the layer's last matmul is not
    recomputed. A head in several parts computes its logits twice. Attention's own blocks come on top."""
    trainer, program, compiled = update
    work = hlo.read(compiled.as_text(), dict(trainer.mesh.shape), program.trips)
    cfg, tokens = trainer.model.cfg, 2 * 4 * 64
    D, F, H, K, C = cfg.hidden_size, cfg.ffn_size, cfg.num_heads, cfg.num_kv_heads, cfg.head_dim
    layer = D * C * (2 * H + 2 * K) + 3 * D * F
    assert programs.matmul_params(trainer.model) == 3 * layer + cfg.vocab_size * D
    dense = 2 * tokens * (3 * (4 * layer - D * F) + 4 * cfg.vocab_size * D)
    # one block of all queries and keys: scores and mixture forward, again, and twice that backward
    attention = 2 * 3 * (2 + 2 + 4) * 2 * 4 * H * C * 64 * 64
    assert work.matmul_flops * 8 == pytest.approx(dense + attention, rel=0.02)


def test_memory_is_what_memory_analysis_says(update):
    trainer, program, compiled = update
    memory = compiled.memory_analysis()
    arguments = sum(v for k, v in program.own.items() if k != "gradients")
    assert arguments == pytest.approx(memory.argument_size_in_bytes, rel=0.01)
    state = program.own["parameters"] + program.own["optimizer"]
    assert memory.alias_size_in_bytes == pytest.approx(state, rel=0.01)
    params = sum(x.size for x in jax.tree.leaves(trainer.model.abstract())) * 4
    assert program.own["gradients"] == program.own["parameters"] >= params / 8


# ---- links ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "chip, sides, group, expected",
    [
        ("v5p", (4, 4, 4), [(x, 0, 0) for x in range(4)], 2),  # a ring
        ("v5p", (2, 4, 4), [(0, 0, 0), (1, 0, 0)], 1),  # a line
        ("v5p", (4, 4, 4), [(x, y, 0) for x in range(4) for y in range(4)], 4),
        ("v5p", (4, 4, 4), [(0, 0, 0), (2, 0, 0)], 1),  # a ring, shared with the devices in between
        ("v5e", (2, 4), [(0, y) for y in range(4)], 1),
        ("v6e", (16, 16), [(x, 3) for x in range(16)], 2),
    ],
)
def test_links_that_a_group_can_use(chip, sides, group, expected):
    every = [types.SimpleNamespace(coords=tuple(c)) for c in np.ndindex(*sides)]
    places = [i for i, d in enumerate(every) if d.coords in group]
    assert links(CHIPS[chip], every, places) == expected
