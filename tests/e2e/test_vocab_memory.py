"""Memory and traffic of the blocked vocabulary, as compilers report them: bytes at a real size (nothing runs at that
size) on CPU and for a TPU, and the collectives of a head that is split over a mesh."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from rolljax.trainer import vocab
from rolljax.trainer.mesh import BATCH_AXES, MeshSpec

ROOT = Path(__file__).parents[2]
MOST = 1.25  # times hidden states, head and their gradients
needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs libtpu: pip install 'rolljax[tpu]'"
)


def figures(out, *flags):
    """Measure T = 8192, D = 1024, V = 151,936 in another process: {(head, way): (storage, held)}, bytes."""
    command = [sys.executable, ROOT / "benchmarks" / "vocab_memory.py", *flags, "--json", out]
    env = {k: v for k, v in os.environ.items() if not k.startswith("JAX_") and k != "XLA_FLAGS"}
    env |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=env)
    assert done.returncode == 0, done.stderr
    return {(f["head"], f["way"]): (f["storage"], f["held"]) for f in json.loads(out.read_text())}


def test_gradients_on_cpu_hold_less_than_a_quarter_beyond_storage(tmp_path):
    found = figures(tmp_path / "cpu.json", "--only", "cpu")
    logits = 8192 * 151_936 * 4
    for head, width in (("bfloat16", 2), ("float32", 4)):
        storage, held = found[head, "blocks"]
        assert storage == 2 * 1024 * (8192 * 2 + 151_936 * width)
        assert storage <= held < MOST * storage, held / storage
        assert found[head, "whole"][1] > storage + logits, "whole logits do not count: the figure means nothing"


@needs_libtpu
@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("head", ["bfloat16", "float32"])
def test_gradients_on_tpu_hold_less_than_a_quarter_beyond_storage(head, tmp_path):
    storage, held = figures(tmp_path / "v5e.json", "--only", "v5e", "--way", "blocks", "--head", head)[head, "blocks"]
    assert storage <= held < MOST * storage, held / storage


def gathered(program):
    """Return the number of elements of the largest all-gather of a compiled program."""
    shapes = re.findall(r"= \(?\w+\[([\d,]*)\]\S* all-gather(?:-start)?\(", program.as_text())
    return max([int(np.prod([int(n) for n in shape.split(",")])) for shape in shapes], default=0)


B, T, D, V = 4, 4, 16, 4096
BLOCK = 4 * B * T * 1024  # bytes: 1024 columns


def gradients(shards, block_bytes=BLOCK):
    def loss(hidden, head, targets, weights):
        out = vocab.token_logp(hidden, head, targets, 0.7, entropy_grad=True, shards=shards, block_bytes=block_bytes)
        return jnp.sum(weights * (out[0] + out[1])), out

    return jax.grad(loss, (0, 1), has_aux=True)


@pytest.mark.parametrize(
    ("spec", "split", "most"),
    [
        (MeshSpec(data=2, tensor=4), ("tensor", None), 0),
        (MeshSpec(data=1, fsdp=2, tensor=4), ("tensor", "fsdp"), 256 * D),  # one block of a part, over fsdp
    ],
    ids=["tensor", "tensor and fsdp"],
)
def test_a_head_split_over_the_mesh_stays_where_it_is(spec, split, most):
    mesh = spec.build()
    rows, over_vocab = NamedSharding(mesh, PartitionSpec(BATCH_AXES)), NamedSharding(mesh, PartitionSpec(*split))
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=(B, T, D)), rng.normal(size=(V, D)), rng.integers(0, V, (B, T)), rng.normal(size=(B, T))]
    args = [jnp.asarray(x, jnp.int32 if x.dtype == int else jnp.float32) for x in arrays]
    want = jax.jit(gradients(1, vocab.BLOCK_BYTES))(*args)
    args = [jax.device_put(x, s) for x, s in zip(args, (rows, over_vocab, rows, rows), strict=True)]

    def compiled(shards):
        return jax.jit(gradients(shards), out_shardings=((rows, over_vocab), (rows, rows))).lower(*args).compile()

    program = compiled(shards=4)
    for got, expected in zip(jax.tree.leaves(program(*args)), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(got, expected, atol=2e-5, rtol=1e-5)
    assert gathered(program) <= most
    assert gathered(compiled(shards=1)) >= V * D // 2, "blocks across parts do gather: the test would see it"
