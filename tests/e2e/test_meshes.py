"""The update of the trainer gives the same loss and the same gradients on every mesh, in one process and in two.

Run as a script it is one of the two processes: `test_meshes.py OUT FOLDER COPY`, found by `rolljax.concurrency.distributed`. It also
reads a Hugging Face folder onto the mesh of both, and writes it again.
"""

import functools
import subprocess
import sys

import numpy as np
import pytest

from rolljax.trainer.mesh import MeshSpec

SHARD_BYTES = 50_000
MESHES = {
    "data": MeshSpec(data=8),
    "fsdp": MeshSpec(data=1, fsdp=8),
    "fsdp x tensor": MeshSpec(data=1, fsdp=2, tensor=4),
    "fsdp x expert x tensor": MeshSpec(data=1, fsdp=2, expert=2, tensor=2),
    "fsdp x context": MeshSpec(data=1, fsdp=2, context=4),
}


def groups():
    """Return four groups of ragged siblings. In rows of 64 tokens, cut in four, answers are apart from their
    prompts."""
    from rolljax.trainer.batch import Sample

    rng = np.random.default_rng(0)

    def sample(prompt):
        n = int(rng.integers(1, 20))
        columns = {
            "mask": rng.random(n) < 0.9,
            "sampler_logp": rng.normal(-5.6, 0.3, n).astype(np.float32),
            "advantages": np.full(n, rng.normal(), np.float32),
        }
        tokens = np.concatenate([prompt, rng.integers(0, 264, n)])
        return Sample(tokens, np.arange(len(prompt), len(tokens)), np.zeros(n, int), columns)

    prompts = [rng.integers(0, 264, n) for n in (5, 30, 40, 12)]
    return [[sample(prompt) for _ in range(5)] for prompt in prompts]


def one_update(mesh):
    """Return loss and gradients of one GRPO update, as its optimizer saw them."""
    import jax
    from jax.experimental.multihost_utils import process_allgather

    from rolljax.trainer.algorithms.grpo import Grpo
    from rolljax.trainer.batch import PackShape
    from rolljax.trainer.optimizer import AdamW
    from rolljax.trainer.phase_trainer import PhaseTrainer

    optimizer = AdamW(b1=0.0, clip_norm=1e9)  # its first moment is then the gradient
    trainer = PhaseTrainer(mesh, model(), Grpo(clip_high=0.2), optimizer, PackShape(2, 8, 64), 10, 4)
    state, (row,), _ = trainer.update_policy(trainer.states.init(weights()), trainer.pack_micro_batches(groups()), 0)
    is_adam = lambda x: hasattr(x, "mu")  # noqa: E731
    gradients = next(x.mu for x in jax.tree.leaves(state.policy.opt_state, is_leaf=is_adam) if is_adam(x))
    whole = process_allgather(gradients, tiled=True) if mesh.is_multi_process else jax.device_get(gradients)
    return row["loss/total"], {jax.tree_util.keystr(path): x for path, x in jax.tree.leaves_with_path(whole)}


@functools.cache
def weights():
    """Return the weights on the host."""
    import jax

    return jax.tree.map(np.asarray, jax.jit(lambda: model().init(0))())


def model():
    from rolljax.model.decoder import Model
    from rolljax.model.families.qwen3 import Qwen3Config

    return Model(Qwen3Config(264, 2, 32, 8, 4, 8, 64))


@pytest.fixture(scope="module")
def alone():
    import jax

    return one_update(MeshSpec().build(jax.devices()[:1]))


def assert_same(found, expected):
    assert abs(found[0] - expected[0]) < 1e-5
    assert found[1].keys() == expected[1].keys()
    for name, value in expected[1].items():
        assert np.abs(found[1][name] - value).max() <= 1e-4 * np.abs(value).max(), name


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", MESHES)
def test_the_mesh_changes_neither_loss_nor_gradients(name, alone):
    assert all(np.abs(g).max() > 0 for g in alone[1].values())
    assert_same(one_update(MESHES[name].build()), alone)


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    """Run two processes; return the folder of their results."""
    import jax

    from rolljax.model import hf
    from rolljax.model.tokenizer import byte_tokenizer

    from .conftest import of_two_processes  # this file is a script, too

    out = tmp_path_factory.mktemp("processes")
    hf.save(out / "folder", model(), jax.device_put(weights()), byte_tokenizer(), max_shard_bytes=SHARD_BYTES)
    env = of_two_processes(4)
    both = [
        subprocess.Popen(
            [sys.executable, __file__, *(str(out / name) for name in (f"{i}.npz", "folder", "copy"))],
            env={**env, "JAX_PROCESS_ID": str(i)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    try:
        errors = [p.communicate(timeout=240)[1] for p in both]
    finally:
        for p in both:
            p.kill()
    assert [p.returncode for p in both] == [0, 0], errors
    return out


@pytest.mark.slow
def test_two_processes_give_the_same_loss_and_gradients(alone, processes):
    for i in range(2):
        arrays = dict(np.load(processes / f"{i}.npz"))
        assert_same((float(arrays.pop("loss")), arrays), alone)


@pytest.mark.slow
def test_two_processes_read_a_folder_and_write_it(processes):
    files = {path.name: path.read_bytes() for path in (processes / "folder").iterdir()}
    assert sum(name.endswith(".safetensors") for name in files) > 2
    assert {path.name: path.read_bytes() for path in (processes / "copy").iterdir()} == files


def test_a_run_refuses_to_be_several_processes(monkeypatch):
    from rolljax.concurrency import distributed
    from rolljax.errors import ConfigError

    for name in ("JAX_COORDINATOR_ADDRESS", "MEGASCALE_COORDINATOR_ADDRESS", "TPU_PROCESS_ADDRESSES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "localhost")
    assert distributed.start() == 1
    distributed.require_one(1)
    with pytest.raises(ConfigError, match="joins 4 processes"):
        distributed.require_one(4)
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "a,b")
    assert distributed.is_asked_for()
    monkeypatch.setenv("JAX_NUM_PROCESSES", "two")
    with pytest.raises(ConfigError, match="JAX_NUM_PROCESSES"):
        distributed.start()


def main(out, folder, copy):
    from rolljax.concurrency import distributed
    from rolljax.model import hf
    from rolljax.model.tokenizer import byte_tokenizer
    from rolljax.trainer.mesh import param_shardings

    assert distributed.start() == 2
    mesh = MESHES["fsdp x tensor"].build()
    assert mesh.is_multi_process
    loss, gradients = one_update(mesh)
    np.savez(out, loss=loss, **gradients)
    params = hf.load(folder, model(), param_shardings(mesh, model().axes(), model().abstract()))
    hf.save(copy, model(), params, byte_tokenizer(), max_shard_bytes=SHARD_BYTES)


if __name__ == "__main__":
    main(*sys.argv[1:])
