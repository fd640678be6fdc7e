"""A sampler with the adapters of several policies: each request gets the tokens of its own policy alone."""

import asyncio
import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rolljax.model.decoder import Model
from rolljax.model.families.qwen3 import Qwen3Config
from rolljax.model.lora import Adapted, Lora, LoraSlots, SlottedAdapters
from rolljax.sampler.client import Sampler
from rolljax.sampler.engine import Engine
from rolljax.sampler.settings import SamplerConfig
from rolljax.trainer.mesh import SLOT_AXES, MeshSpec
from rolljax.types import SamplingParams

CFG = Qwen3Config(hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=12, ffn_size=40, init_std=0.15)
SETTINGS = SamplerConfig(
    slots=6, max_context=96, page_size=8, prefill_chunk=32, steps_per_dispatch=4, prefix_match="any"
)
SLOTS = LoraSlots(num=8, rank=4, alpha=6.0)
EXTRA = SLOTS.num
"""Index of an adapter more than there are slots."""
NUM = 10
"""Requests."""
PARAMS = SamplingParams(max_tokens=24)
PROMPT = np.arange(3, 30, dtype=np.int32)


@pytest.fixture(scope="module")
def base():
    return jax.jit(lambda: Model(CFG).init(0))()


@pytest.fixture(scope="module")
def adapters(base):
    """Return adapters of rank 4 whose tokens differ, one for each slot and one more."""
    plain = Model(CFG)
    rng, made = np.random.default_rng(0), []
    for k in range(SLOTS.num + 1):
        fresh = Lora(rank=4, alpha=6.0).init(k, plain.axes(), plain.abstract())["layers"]
        made.append({"layers": {n: x + 0.2 * rng.normal(size=x.shape).astype(np.float32) for n, x in fresh.items()}})
    return made


@functools.cache
def engine(model):
    return Engine(model, SETTINGS, MeshSpec().build(jax.devices()[:1]), SLOT_AXES)


@contextlib.contextmanager
def opened(model, params):
    sampler = Sampler(engine(model), params, 0, longest_prompt=0)
    try:
        yield sampler
    finally:
        sampler.close()


@pytest.fixture(scope="module")
def shared(base):
    model = Model(CFG, lora=SLOTS.lora)
    wide = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), model.abstract())
    with opened(model, SlottedAdapters(base, wide, jnp.zeros(SLOTS.num))) as sampler:
        yield sampler


async def load(sampler, slot, adapter):
    def changed(params):
        scales = params.scales.at[slot].set(SLOTS.alpha / SLOTS.rank)
        return dataclasses.replace(params, adapters=SLOTS.put(params.adapters, slot, adapter), scales=scales)

    await sampler.set_adapter(slot, changed)


def requests():
    """Return prompts, some of them equal or prefixes of others, and addresses."""
    return [(PROMPT[: 27 - 5 * (i % 3)], (7, i // 3)) for i in range(NUM)]


async def sampled(sampler, prompts, adapters):
    pending = [
        sampler.submit(prompt, PARAMS, address, adapter=a)
        for (prompt, address), a in zip(prompts, adapters, strict=True)
    ]
    return [await p.completion for p in pending]


@pytest.fixture(scope="module")
def alone(base, adapters):
    """Return what each policy, and the base, samples and scores by itself, from merged weights."""
    lora = Lora(rank=4, alpha=6.0)
    found = {}
    for k, adapter in (*enumerate(adapters), (-1, None)):
        merged = Model(CFG, lora=lora).merged(Adapted(base, adapter)) if adapter else base
        with opened(Model(CFG), merged) as sampler:

            async def run(sampler=sampler):
                return await sampled(sampler, requests(), [-1] * NUM), await sampler.score(PROMPT)

            found[k] = asyncio.run(run())
    return found


def check(found, wanted):
    np.testing.assert_array_equal(found.sampled.tokens, wanted.sampled.tokens)
    np.testing.assert_allclose(found.sampled.model_logp, wanted.sampled.model_logp, atol=2e-5)


def test_policies_sampled_together_and_one_after_the_other(shared, adapters, alone):
    async def run():
        for slot in range(SLOTS.num):
            await load(shared, slot, adapters[slot])
        mixed = [i % (SLOTS.num + 1) - 1 for i in range(NUM)]  # the base, and every policy
        for found, i, slot in zip(await sampled(shared, requests(), mixed), range(NUM), mixed, strict=True):
            check(found, alone[slot][0][i])
        for slot in (-1, 2, 0, 7, 1):  # the same prompts: no policy may find the keys and values of another
            for found, wanted in zip(await sampled(shared, requests(), [slot] * NUM), alone[slot][0], strict=True):
                check(found, wanted)

    asyncio.run(run())
    different = {tuple(alone[k][0][0].sampled.tokens.tolist()) for k in alone}
    assert len(different) == len(alone)


def test_a_slot_gets_another_adapter_while_others_sample(shared, adapters, alone):
    async def run():
        for slot in range(SLOTS.num):
            await load(shared, slot, adapters[slot])
        await sampled(shared, requests(), [0] * NUM)  # keys and values of the slot's first adapter are cached
        under_way = asyncio.ensure_future(sampled(shared, requests(), [2] * NUM))
        await asyncio.sleep(0)
        await load(shared, 0, adapters[EXTRA])
        for found, wanted in zip(await sampled(shared, requests(), [0] * NUM), alone[EXTRA][0], strict=True):
            check(found, wanted)
        for found, wanted in zip(await under_way, alone[2][0], strict=True):
            check(found, wanted)

    asyncio.run(run())


def test_prompts_are_scored_by_their_own_policy(shared, adapters, alone):
    async def run():
        await load(shared, 1, adapters[1])
        for slot in (1, -1):
            found = await shared.score_top(PROMPT, adapter=slot, top=3)
            np.testing.assert_allclose(found.logp, alone[slot][1], atol=2e-5)
            assert found.top_ids.shape == (len(PROMPT), 3) and np.isnan(found.top_logp[0]).all()
            assert (np.diff(found.top_logp[1:], axis=1) <= 0).all()
            own = found.top_ids[1:] == PROMPT[1:, None]
            np.testing.assert_allclose(found.top_logp[1:][own], np.broadcast_to(found.logp[1:, None], own.shape)[own])

    asyncio.run(run())


def test_cached_keys_of_older_adapters_are_forgotten_when_their_names_run_out(shared, adapters, alone, monkeypatch):
    scheduler = shared._scheduler

    async def run():
        monkeypatch.setattr(
            scheduler, "_salts", {0: np.iinfo(np.int32).max // CFG.vocab_size * CFG.vocab_size - CFG.vocab_size}
        )
        for k in (EXTRA, 0, EXTRA, 2):
            await load(shared, 1, adapters[k])
            for found, wanted in zip(await sampled(shared, requests(), [1] * NUM), alone[k][0], strict=True):
                check(found, wanted)
        assert max(v for s, v in scheduler._salts.items() if s == 1) < 10 * CFG.vocab_size

    asyncio.run(run())
