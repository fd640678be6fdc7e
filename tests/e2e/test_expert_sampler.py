"""Experts spread over the shards of the sampler: the same tokens as on one device, and no shard waits for another."""

import asyncio

import jax
import numpy as np
import pytest

from rolljax.model.axes import SLOT_AXES
from rolljax.model.decoder import Model
from rolljax.model.families.qwen3_moe import Qwen3MoeConfig
from rolljax.sampler.client import Sampler
from rolljax.sampler.engine import Engine
from rolljax.sampler.settings import SamplerConfig
from rolljax.trainer.mesh import MeshSpec
from rolljax.trainer.publish import make_publish
from rolljax.types import SamplingParams

from .test_sampler import close

MODEL = Model(
    Qwen3MoeConfig(hidden_size=32, head_dim=8, num_experts=8, experts_per_token=2, expert_ffn_size=24, init_std=0.3)
)
LENGTHS = (3, 30, 9, 21, 4, 17)
"""Lengths of answers: some shards finish early while others continue and need the experts of all."""


def sampled(spec):
    """Return the answers and the sampler's weights."""
    mesh = spec.build(jax.devices()[: spec.fsdp * spec.expert * spec.tensor])
    weights = make_publish(mesh, MODEL)(jax.jit(lambda: MODEL.init(0))())
    cfg = SamplerConfig(slots=8, max_context=64, page_size=8, prefill_chunk=32, steps_per_dispatch=4)
    sampler = Sampler(Engine(MODEL, cfg, mesh, SLOT_AXES), weights, 0, longest_prompt=0)
    prompts = [np.arange(3 + i, dtype=np.int32) for i in range(len(LENGTHS))]

    async def all_of_them():
        each = zip(prompts, LENGTHS, strict=True)
        return await asyncio.gather(
            *(sampler.generate(p, SamplingParams(1.0, n), (i,)) for i, (p, n) in enumerate(each))
        )

    try:
        return [c.tokens.tolist() for c in asyncio.run(asyncio.wait_for(all_of_them(), 120))], weights
    finally:
        close(sampler)


@pytest.mark.slow
def test_experts_in_parts_sample_the_same_tokens():
    alone, _ = sampled(MeshSpec(data=1))
    parts, weights = sampled(MeshSpec(data=1, fsdp=2, expert=2, tensor=2))
    assert parts == alone
    assert [len(tokens) for tokens in parts] == list(LENGTHS)
    gate = weights["layers"][0]["gate"]
    assert gate.sharding.shard_shape(gate.shape) == (4, 32, 12), "half of the experts, half of each"
