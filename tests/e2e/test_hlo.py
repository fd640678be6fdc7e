"""Compiled code of the update on a mesh: which arrays are sent, how often, and which never exist.

On 8 CPU devices. The CPU compiler reduces to every device where others scatter the sum; its count of collectives and
their shapes are otherwise those of a TPU. The attention kernels are compiled for a TPU, in a process of its own (this
file, run as a script).
"""

import collections
import importlib.util
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from rolljax.aot import hlo, hlo_text
from rolljax.trainer.mesh import MeshSpec
from rolljax.trainer.vocab_blocks import PIECES

ROOT = Path(__file__).parents[2]
V, L, D, H, K, C, F = 262144, 2, 64, 8, 4, 16, 192
B, T = 8, 256
WEIGHTS = {
    "q": (D, H * C),
    "k": (D, K * C),
    "v": (D, K * C),
    "o": (H * C, D),
    "gate": (D, F),
    "up": (D, F),
    "down": (F, D),
}
NORMS = [(D,), (D,), (C,), (C,)]


class Collective(NamedTuple):
    kind: str
    shapes: list[tuple[int, ...]]
    """Of its results."""
    name: str
    """What it was in Python."""


def shapes_in(text):
    return [array.dims for array in hlo_text.arrays(text)]


def read(text):
    """Return the collectives of every computation that involve several devices."""
    found = []
    for computation in hlo_text.parse(text)[0].values():
        found.append([])
        for one in computation:
            if one.opcode in hlo.KINDS and len(hlo_text.replica_group(one.attributes, 8)) > 1:
                name = re.search(r'op_name="([^"]*)"', one.attributes)
                found[-1].append(Collective(one.opcode, shapes_in(one.shape), name[1] if name else ""))
    return found


class Compiled(NamedTuple):
    text: str
    forward: list[Collective]
    """Of one layer."""
    backward: list[Collective]
    everywhere: list[Collective]

    def count(self, part, kind, shape):
        return sum(c.shapes.count(shape) for c in getattr(self, part) if c.kind == kind)


def update(spec, lora=None):
    import jax
    import numpy as np

    from rolljax.model.decoder import Model
    from rolljax.model.families.qwen3 import Qwen3Config
    from rolljax.trainer.algorithms.grpo import Grpo
    from rolljax.trainer.batch import PackShape
    from rolljax.trainer.mesh import batch_shardings, param_shardings
    from rolljax.trainer.optimizer import AdamW
    from rolljax.trainer.phase_trainer import PhaseTrainer

    mesh = spec.build()
    model = Model(Qwen3Config(V, L, D, H, K, C, F, tie_embeddings=False), "bfloat16", "full", lora=lora)
    like = lambda tree, sh: jax.tree.map(  # noqa: E731
        lambda x, s: jax.ShapeDtypeStruct(np.shape(x), x.dtype, sharding=s), tree, sh
    )
    base = None
    if lora:
        shapes = jax.eval_shape(model.base, model.plain.abstract())
        base = like(shapes, param_shardings(mesh, lora.base_axes(model.plain.axes()), shapes))
    trainer = PhaseTrainer(mesh, model, Grpo(), AdamW(), PackShape(1, B, T), 10, 4, base=base)
    batch = trainer.pack([]).batch
    state = like(trainer.states.abstract().policy, trainer.states.shardings.policy)
    args = state, like(batch, batch_shardings(mesh, batch)), {}, base
    text = trainer.policy_update.lower(*args).compile().as_text()
    computations = read(text)
    (backward,) = (c for c in computations if any("rematted_computation" in x.name for x in c))
    ffn = [(D, F // n) for n in (1, mesh.shape["tensor"])]
    (forward,) = (
        c
        for c in computations
        if c is not backward and any(x.kind == "all-gather" and x.shapes[0][-2:] in ffn for x in c)
    )
    return Compiled(text, forward, backward, [c for each in computations for c in each])


@pytest.fixture(scope="module")
def fsdp():
    return update(MeshSpec(data=1, fsdp=8))


def test_a_layer_gathers_each_weight_once_forward_and_once_backward(fsdp):
    """In the backward pass what is computed again and the gradients share it. Nothing else travels forward."""
    expected = collections.Counter(WEIGHTS.values())
    assert collections.Counter(c.shapes[0] for c in fsdp.forward) == expected
    assert {c.kind for c in fsdp.forward} == {"all-gather"}
    assert collections.Counter(c.shapes[0] for c in fsdp.backward if c.kind == "all-gather") == expected


def test_each_gradient_is_reduced_once(fsdp):
    reduced = [c for c in fsdp.backward if c.kind != "all-gather"]
    assert {c.kind for c in reduced} == {"all-reduce"}
    shapes = collections.Counter(shape for c in reduced for shape in c.shapes)
    assert shapes == collections.Counter([*WEIGHTS.values(), *NORMS])


@pytest.mark.slow
def test_of_adapters_only_weights_travel():
    """The frozen weights, those ends of adapters that lie over fsdp, and blocks of the head; no activations."""
    from rolljax.model.lora import Lora

    found = update(MeshSpec(data=1, fsdp=8), Lora(rank=4))
    adapters = [(D, 4)] * 5 + [(4, D)] * 2
    expected = collections.Counter(math.prod(shape) for shape in [*WEIGHTS.values(), *adapters])
    for part in (found.forward, found.backward):
        assert collections.Counter(math.prod(c.shapes[0]) for c in part if c.kind == "all-gather") == expected
    assert {c.kind for c in found.forward} == {"all-gather"}
    (reduced,) = (c for c in found.backward if c.kind != "all-gather")
    assert reduced.kind == "all-reduce" and all(4 in shape for shape in reduced.shapes), "gradients of adapters"
    assert all(math.prod(shape) < V * D for c in found.everywhere for shape in c.shapes)


def test_embedding_head_and_optimizer_state_are_never_whole_on_a_device(fsdp):
    """The head travels in the blocks that the loss walks over; of the embedding only the rows that tokens name."""
    gathered = [c for c in fsdp.everywhere if c.kind == "all-gather"]
    blocks = {c.shapes[0] for c in gathered if c.shapes[0][-1] == D and math.prod(c.shapes[0]) > D * F}
    assert blocks == {(V // 2, D)}
    assert all(math.prod(shape) < V * D for c in gathered for shape in c.shapes)
    outside = [c for c in gathered if "while/body/closed_call" not in c.name]
    assert [c.shapes for c in outside] == [[(B, T)]]
    swaps = [c for c in fsdp.everywhere if c.kind == "all-to-all"]
    assert [sum(math.prod(shape) for shape in c.shapes) for c in swaps] == [B * T * D // 8] * 2


def test_logits_of_the_whole_vocabulary_never_exist(fsdp):
    largest = max(math.prod(shape) for shape in shapes_in(fsdp.text))
    assert largest == B // 8 * (T // PIECES) * V // 2, "a block of logits is the largest array there is"


@pytest.mark.slow
def test_tensor_parallel_layers_sum_what_attention_and_feed_forward_give():
    program = update(MeshSpec(data=1, fsdp=2, tensor=4))
    assert program.count("forward", "all-reduce", (B // 2, T, D)) == 2
    gathers = collections.Counter(c.shapes[0] for c in program.forward if c.kind == "all-gather")
    by_tensor = {n: (a, b // 4) if n not in ("o", "down") else (a // 4, b) for n, (a, b) in WEIGHTS.items()}
    assert gathers == collections.Counter(by_tensor.values())


@pytest.mark.slow
def test_parts_of_a_row_share_keys_and_values_alone():
    program = update(MeshSpec(data=1, fsdp=2, context=4))
    gathers = collections.Counter(c.shapes[0] for c in program.forward)
    assert gathers == collections.Counter([*WEIGHTS.values(), *[(B // 2, T, K, C)] * 2])
    assert program.count("backward", "reduce-scatter", (B // 2, T // 4, K, C)) == 2
    whole_rows = [c for c in program.everywhere if c.kind == "all-gather" and c.shapes[0] == (B // 2, T, D)]
    assert not whole_rows, "hidden states stay where their tokens are"


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu: pip install 'rolljax[tpu]'")
def test_attention_compiles_to_kernels_for_tpu():
    """Forward two, own tokens and shared prompt; backward two for each. Rows and heads are split, nothing travels."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stderr
    kernels, collectives = done.stdout.split()
    assert (int(kernels), int(collectives)) == (6, 0)


def compile_for_tpu():
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding

    from rolljax.aot import chips
    from rolljax.model.attention import Window, packed
    from rolljax.model.axes import ACTIVATION_RULES, on_mesh
    from rolljax.model.axes import spec as place

    mesh = MeshSpec(data=1, fsdp=2, tensor=4).build(chips.devices("v5e:2x4"))

    def like(shape, dtype, *names):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, place(names, ACTIVATION_RULES, mesh)))

    def loss(q, k, v, segments, branches, positions, on):
        with on_mesh(mesh):
            mixed, _ = packed(segments, branches, positions)(q, k, v, None, 0, Window(256, on))
        return mixed.astype(jnp.float32).sum()

    q = like((2, 512, 8, 128), jnp.bfloat16, "batch", "length", "heads", "head_dim")
    k = like((2, 512, 4, 128), jnp.bfloat16, "batch", "length", "kv_heads", "head_dim")
    rows = [like((2, 512), jnp.int32, "batch", "length")] * 3
    text = jax.jit(jax.grad(loss, (0, 1, 2))).lower(q, k, k, *rows, like((), bool)).compile().as_text()
    print(text.count('custom_call_target="tpu_custom_call"'), sum(map(len, read(text))))  # noqa: T201


if __name__ == "__main__":
    compile_for_tpu()
