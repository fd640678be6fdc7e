"""Adapters that are sent to a sampler through a store become the weights that a run in one process decodes with."""

import queue

import jax
import numpy as np
import pytest

from rolljax.concurrency.lockstep import SINGLE_PROCESS
from rolljax.errors import SamplerError
from rolljax.model.axes import SLOT_AXES
from rolljax.model.decoder import Model
from rolljax.model.families.qwen3 import Qwen3Config
from rolljax.model.lora import Adapted, Lora
from rolljax.run.weight_channel import StorePart, StoreSink, StoreSource
from rolljax.sampler.engine import Engine, EngineWorker
from rolljax.sampler.settings import SamplerConfig
from rolljax.sampler.weights import Snapshot
from rolljax.trainer import publish
from rolljax.trainer.mesh import MeshSpec, param_shardings
from rolljax.trainer.publish import adapted_weights, make_publish

SHAPE = Qwen3Config(num_layers=2, hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=16, ffn_size=64)


def stored(folder):
    """Return the bytes of the arrays in a folder of a store."""
    return sum(path.stat().st_size for path in folder.rglob("c/**/*") if path.is_file())


def quantized(model):
    """Return the sampler's setting for a model."""
    return "int8" if model.int8_sampler else "none"


@pytest.mark.parametrize(
    ("int8", "sampled"), [pytest.param(False, False, marks=pytest.mark.slow), (True, False), (False, True)]
)
def test_a_sampler_merges_adapters_to_the_trainers_bits(tmp_path, int8, sampled):
    model = Model(SHAPE, "bfloat16", lora=Lora(rank=3, int8_base=int8), int8_sampler=sampled)
    store = tmp_path / "store"
    mesh, to = MeshSpec().build(jax.devices()[:4]), MeshSpec(data=2).build(jax.devices()[4:6])
    where = adapted_weights(model, mesh)[1]
    base = jax.device_put(model.base(model.plain.init(7)), where.base)
    now = []
    source = StoreSource(mesh, model, lambda: now[-1], str(store))
    written = queue.Queue()
    source.on_written = written.put
    source.begin(1)
    settings = SamplerConfig(slots=4, max_context=64, quantization=quantized(model))
    worker = EngineWorker(Engine(model.plain, settings, to, SLOT_AXES))
    sink, give = StoreSink(StorePart(model, to, worker, SINGLE_PROCESS)), make_publish(mesh, model)
    for version in range(3):
        adapters = jax.tree.map(lambda x, i=version: jax.random.normal(jax.random.key(i), x.shape), model.init(0))
        now.append(Adapted(base, jax.device_put(adapters, where.adapters)))
        source.push(version)
        sink.prepare(written.get(timeout=60))
        sink.swap(version)
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(worker.params), jax.device_get(give(now[-1])))
    assert stored(store / "base") == sum(x.nbytes for x in jax.tree.leaves(base))
    assert stored(store / "000001" / "00000002") == sum(x.nbytes for x in jax.tree.leaves(now[-1].adapters))

    for path in (store / "base").rglob("c/**/*"):
        if path.is_file():
            path.write_bytes(bytes(byte ^ 1 for byte in path.read_bytes()))
    sink, fresh = StoreSink(StorePart(model, to, worker, SINGLE_PROCESS)), Snapshot(2, location=str(store), epoch=1)
    with pytest.raises(
        SamplerError, match="weights of version 2 of epoch 1 in .* are damaged: checksums of .* differ, first of base"
    ):
        sink.prepare(fresh)
    source.push_again(2)
    sink.prepare(written.get(timeout=60))
    sink.swap(2)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(worker.params), jax.device_get(give(now[-1])))


@pytest.mark.parametrize(
    ("apart", "int8"), [(True, False), (False, True), pytest.param(True, True, marks=pytest.mark.slow)]
)
def test_weights_are_written_from_what_a_store_sends(tmp_path, monkeypatch, apart, int8):
    """Layers that lie apart, as on GPUs, are stacked in the store, and int8 weights are there in the compute dtype."""
    monkeypatch.setattr(publish, "lies_apart", lambda mesh: apart)
    model, store = Model(SHAPE, "bfloat16", int8_sampler=int8), tmp_path / "store"
    mesh, to = MeshSpec().build(jax.devices()[:4]), MeshSpec().build(jax.devices()[4:5])
    params = jax.device_put(model.init(0), param_shardings(mesh, model.axes(), model.abstract()))
    source, written = StoreSource(mesh, model, lambda: params, str(store)), queue.Queue()
    source.on_written = written.put
    source.begin(1)
    settings = SamplerConfig(slots=4, max_context=64, quantization=quantized(model))
    worker = EngineWorker(Engine(model, settings, to, SLOT_AXES))
    sink = StoreSink(StorePart(model, to, worker, SINGLE_PROCESS))
    for version in range(2):
        source.push(version)
        sink.prepare(written.get(timeout=60))
        sink.swap(version)
        wanted = model.sampled(model.computed(params))
        wanted = jax.device_get(model.apart(wanted) if apart else wanted)
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(worker.params), wanted)
