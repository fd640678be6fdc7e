"""A layer of experts compiled for a TPU that is not there: it computes what was chosen, and nothing besides.

In a process of its own (this file, run as a script): libtpu is loaded there and nowhere else.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOKENS, D, F, K = 8 * 256, 256, 128, 2


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu: pip install 'rolljax[tpu]'")
def test_tpu_work_does_not_grow_with_the_number_of_experts():
    """Forward and backward over 2 x 2 x 2 devices. `lax.ragged_dot` in its place makes the
    gradient of the weights grow with their number."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, timeout=400, env=env)
    assert done.returncode == 0, done.stderr
    few, many = (json.loads(line) for line in done.stdout.splitlines())
    assert few["kernels"] == many["kernels"] == 11  # 3 forward, 2 again, 3 for the rows, 3 for the weights
    useful = 11 * 2 * 1.25 * (TOKENS * K / 8) * D * F  # 1.25: moe.SLACK; the expert axis shares rows, tensor columns
    for found in (few, many):
        assert 0.9 * useful < found["flops"] < 1.3 * useful
    assert many["flops"] < 1.1 * few["flops"]
    assert "all-to-all" not in many["collectives"]


def compile_experts():
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    from rolljax.aot import chips
    from rolljax.model import moe
    from rolljax.model.axes import BATCH_AXES, PARAM_RULES, on_mesh, spec
    from rolljax.trainer.mesh import MeshSpec

    mesh = MeshSpec(data=1, fsdp=2, expert=2, tensor=2).build(chips.devices("v5e:2x4"))
    like = lambda shape, where, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(  # noqa: E731
        shape, dtype, sharding=NamedSharding(mesh, where)
    )
    rows = PartitionSpec(BATCH_AXES)
    for E in (4, 32):
        shapes = moe.ExpertWeights((E, D, F), (E, D, F), (E, F, D))
        where = moe._AXES.each(lambda names: spec(names, PARAM_RULES, mesh))
        experts = shapes.each(like, where)
        tokens = (TOKENS // 256, 256)

        def loss(x, weights, experts, chosen):
            with on_mesh(mesh):
                return jnp.sum(moe.mixed(x, chosen, weights, experts).astype(jnp.float32) ** 2)

        program = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(
            like((*tokens, D), rows), like((*tokens, K), rows), experts, like((*tokens, K), rows, jnp.int32)
        )
        compiled = program.compile()
        text = compiled.as_text()
        found = {
            "flops": compiled.cost_analysis()["flops"],
            "kernels": text.count('custom_call_target="tpu_custom_call"'),
            "collectives": sorted({n for n in ("all-gather", "all-to-all") if n in text}),
        }
        print(json.dumps(found))  # noqa: T201


if __name__ == "__main__":
    compile_experts()
