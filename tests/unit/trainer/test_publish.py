"""From the trainer's weights to the sampler's: written over the old ones, layer by layer, on the same mesh or another."""

import asyncio
import dataclasses

import jax
import numpy as np
import pytest

from rolljax.aot.programs import computed_params, placed
from rolljax.envs.games.frozen_lake import FrozenLake
from rolljax.errors import ConfigError, SamplerError
from rolljax.model.axes import SLOT_AXES
from rolljax.model.decoder import Model
from rolljax.model.families.qwen3 import Qwen3Config
from rolljax.model.families.qwen3_moe import Qwen3MoeConfig
from rolljax.recipe import Phase, Recipe
from rolljax.run.preflight import resolve
from rolljax.sampler.client import Sampler
from rolljax.sampler.engine import Engine, EngineWorker
from rolljax.sampler.settings import SamplerConfig
from rolljax.sampler.weights import DirectSink
from rolljax.trainer import publish
from rolljax.trainer.algorithms.sft import Sft
from rolljax.trainer.mesh import MeshSpec, param_shardings
from rolljax.trainer.publish import make_publish, make_write
from rolljax.types import SamplingParams

DENSE = Model(Qwen3Config(num_layers=3, tie_embeddings=False), "bfloat16")
EXPERTS = Model(Qwen3MoeConfig(num_layers=3, num_experts=4), "bfloat16")
INT8 = {
    "int8": dataclasses.replace(DENSE, int8_sampler=True),
    "int8 experts": dataclasses.replace(EXPERTS, int8_sampler=True),
}
TRAINER = MeshSpec(data=1, fsdp=4, tensor=2)


@pytest.fixture(scope="module", params=["dense", "experts", *INT8])
def model(request):
    return {"dense": DENSE, "experts": EXPERTS, **INT8}[request.param]


def weights(model, mesh, seed):
    """Return weights on the host and in the trainer's shardings."""
    params = jax.device_get(jax.jit(lambda: model.init(seed))())
    return params, jax.device_put(params, param_shardings(mesh, model.axes(), model.abstract()))


@pytest.fixture(params=["stacked", "apart"])
def form(request, monkeypatch):
    """Return how the sampler has its layers; stacked as on TPUs."""
    monkeypatch.setattr(publish, "lies_apart", lambda mesh: request.param == "apart")
    return request.param


@pytest.mark.sampled(4)
@pytest.mark.parametrize("cfg", [SamplerConfig(), SamplerConfig(tensor=1), SamplerConfig(tensor=2, expert=2)], ids=str)
def test_new_weights_lie_where_the_old_ones_did(model, cfg, form):
    mesh = TRAINER.build()
    to = cfg.mesh(mesh)
    assert (to is mesh) == (cfg.tensor is None) and to.size == 8
    give = make_publish(mesh, model, to)
    first = give(weights(model, mesh, 0)[1])
    places = jax.tree.map(lambda x: [s.data.unsafe_buffer_pointer() for s in x.addressable_shards], first["layers"])
    new, trained = weights(model, mesh, 1)
    second = give(trained, first)
    assert all(x.is_deleted() for x in jax.tree.leaves(first)), "given up"
    assert not any(x.is_deleted() for x in jax.tree.leaves(trained))
    now = jax.tree.map(lambda x: [s.data.unsafe_buffer_pointer() for s in x.addressable_shards], second["layers"])
    assert now == places
    wanted, axes = jax.jit(model.sampled)(model.computed(new)), model.sampled_axes()
    if form == "apart":
        wanted, axes = model.apart(wanted), model.apart_axes()
    where = param_shardings(to, axes, wanted, fsdp=False)
    assert jax.tree.all(jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s, x.ndim), second, where))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(second), jax.device_get(wanted))


def test_weights_are_rounded_where_they_arrive(form):
    mesh, to = MeshSpec(fsdp=4, data=1).build(jax.devices()[:4]), MeshSpec(data=2).build(jax.devices()[4:6])
    model = INT8["int8"]
    params, trained = weights(model, mesh, 0)
    wanted = jax.jit(model.sampled)(model.computed(params))
    wanted = model.apart(wanted) if form == "apart" else wanted
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(make_publish(mesh, model, to)(trained)), wanted)


def test_no_stack_of_layers_is_ever_gathered():
    mesh = TRAINER.build()
    big = Model(Qwen3Config(num_layers=64, hidden_size=256, ffn_size=512), "bfloat16")
    lowered = make_write(mesh, big, mesh).lower(
        placed(big.abstract(), param_shardings(mesh, big.axes(), big.abstract())),
        computed_params(mesh, big, fsdp=False),
    )
    memory = lowered.compile().memory_analysis()
    stack = 64 * 256 * 512 * 2 // 2  # of one map, as a device of the sampler has it
    assert memory.temp_size_in_bytes < stack / 4
    assert memory.alias_size_in_bytes > 10 * stack / 4


@pytest.mark.slow
def test_a_sampler_whose_weights_cannot_be_made_ends():
    """And says so at once, to whoever published and to whoever waits for tokens."""
    mesh = MeshSpec().build(jax.devices()[:1])
    model = Model(Qwen3Config())
    params = make_publish(mesh, model)(jax.jit(lambda: model.init(0))())

    class Broken(DirectSink):
        def swap(self, version):
            raise ValueError("no memory")

    worker = EngineWorker(Engine(model, SamplerConfig(slots=4), mesh, SLOT_AXES))
    sampler = Sampler(worker.engine, params, 0, longest_prompt=0, worker=worker, sink=Broken(worker))

    async def run():
        waiting = asyncio.ensure_future(sampler.generate(np.arange(5, dtype=np.int32), SamplingParams(1.0, 400), (0,)))
        while not sampler.stats.dispatches:
            await asyncio.sleep(0.01)
        with pytest.raises(SamplerError, match="version 1 could not be taken: ValueError: no memory"):
            await asyncio.get_running_loop().run_in_executor(None, sampler.swap, 1)
        with pytest.raises(SamplerError, match="no memory"):
            await waiting

    try:
        asyncio.run(run())
        with pytest.raises(SamplerError, match="has stopped"):
            sampler.swap(2)
    finally:
        sampler.close()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"tensor": 3}, r"SamplerConfig.tensor.*8 devices do not divide by tensor x expert = 3 x 1"),
        ({"tensor": 4}, r"SamplerConfig.tensor.*kv_heads dimension of 2"),
        ({"tensor": 2, "slots": 6}, r"SamplerConfig.slots.*4 batch shards"),
        ({"tensor": 0}, r"SamplerConfig.tensor.*at least 1"),
    ],
    ids=str,
)
def test_a_sampler_that_cannot_be_split_is_refused(settings, says):
    with pytest.raises(ConfigError, match=f"(?s){says}"):
        resolve(Recipe(FrozenLake(), (Phase("sft", Sft(), 1, prompts_per_step=8),), sampler=SamplerConfig(**settings)))
