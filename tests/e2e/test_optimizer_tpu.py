"""The optimizer's update compiled for a TPU that is not there: with `offload` its state is in host memory, is updated in
place there, and is never on the device as a whole.

In a process of its own (this file, run as a script): libtpu is loaded there and nowhere else.
"""

import dataclasses
import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu: pip install 'rolljax[tpu]'"),
]


@pytest.fixture(scope="module")
def memory():
    """Return offload (bool) -> bytes per device, as the TPU compiler counts them."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stderr
    kept, offloaded = (json.loads(line) for line in done.stdout.splitlines())
    return {False: kept, True: offloaded}


def test_the_state_is_in_host_memory_between_updates(memory):
    kept, offloaded = memory[False], memory[True]
    state = kept["state"]
    assert kept["host_arguments"] == 0
    assert offloaded["host_arguments"] == pytest.approx(state, rel=0.01)
    assert kept["arguments"] - offloaded["arguments"] == pytest.approx(state, rel=0.01)


def test_the_optimizer_state_is_updated_in_place(memory):
    assert memory[True]["host_aliased"] == memory[True]["host_arguments"]
    assert memory[False]["aliased"] >= memory[False]["state"]


def test_an_update_holds_a_part_of_it_at_a_time(memory):
    """At most as much as the largest parameter, in both directions."""
    assert memory[True]["temporaries"] < 2.2 * memory[True]["largest"] < 0.7 * memory[True]["state"]


def compile_both():
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    from rolljax.aot import chips
    from rolljax.model.decoder import Model
    from rolljax.model.families.qwen3 import Qwen3Config
    from rolljax.trainer.mesh import MeshSpec, param_shardings
    from rolljax.trainer.optimizer import AdamW, opt_state_shardings

    mesh = MeshSpec(data=1, fsdp=2, tensor=4).build(chips.devices("v5e:2x4"))
    shape = Qwen3Config(8192, 4, 1024, 8, 4, 128, 3072)
    model = Model(shape)
    abstract = model.abstract()
    params_sh = param_shardings(mesh, model.axes(), abstract)
    like = lambda t, sh: jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), t, sh)  # noqa: E731
    size = lambda x, s: x.dtype.itemsize * math.prod(s.shard_shape(x.shape))  # noqa: E731
    for offload in (False, True):
        optimizer = dataclasses.replace(AdamW(), offload=offload)
        tx = optimizer.build(10)
        state = jax.eval_shape(tx.init, abstract)
        state_sh = optimizer.host_shardings(opt_state_shardings(mesh, tx, abstract, params_sh))

        def update(grads, state, params, ok, tx=tx):
            return tx.update(grads, state, params, ok=ok)

        program = jax.jit(update, out_shardings=(params_sh, state_sh), donate_argnums=(0, 1))
        params = like(abstract, params_sh)
        ok = jax.ShapeDtypeStruct((), bool, sharding=NamedSharding(mesh, PartitionSpec()))
        memory = program.lower(params, like(state, state_sh), params, ok).compile().memory_analysis()
        found = {
            "state": sum(jax.tree.leaves(jax.tree.map(size, state, state_sh))),
            "largest": 2 * max(jax.tree.leaves(jax.tree.map(size, abstract, params_sh))),
            "arguments": memory.argument_size_in_bytes,
            "aliased": memory.alias_size_in_bytes,
            "temporaries": memory.temp_size_in_bytes,
            "host_arguments": memory.host_argument_size_in_bytes,
            "host_aliased": memory.host_alias_size_in_bytes,
        }
        print(json.dumps(found))  # noqa: T201


if __name__ == "__main__":
    compile_both()
