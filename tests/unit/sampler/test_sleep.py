"""The sampler asleep: its memory is free, requests wait for the next weights, and tokens are those of a sampler awake."""

import asyncio
import gc

import jax
import numpy as np
import pytest

from rolljax.errors import SamplerError
from rolljax.model.axes import SLOT_AXES
from rolljax.model.decoder import Model
from rolljax.model.families.qwen3 import Qwen3Config
from rolljax.run.weight_channel import SharedSink
from rolljax.sampler.client import Sampler
from rolljax.sampler.engine import Engine, EngineWorker
from rolljax.sampler.prompt_queue import Request
from rolljax.sampler.scheduler import Scheduler
from rolljax.sampler.settings import SamplerConfig
from rolljax.sampler.weights import Snapshot
from rolljax.trainer.mesh import MeshSpec
from rolljax.trainer.publish import make_publish
from rolljax.types import Sampled, SamplingParams
from tests.compilations import compiled_from_now_on

MODEL = Model(Qwen3Config(vocab_size=64, num_layers=2, hidden_size=32, num_heads=2, head_dim=8, ffn_size=32))
MESH = MeshSpec().build(jax.devices()[:1])
ENGINE = Engine(MODEL, SamplerConfig(slots=4, max_context=128, page_size=16, prefill_chunk=32), MESH, SLOT_AXES)
PUBLISH = make_publish(MESH, MODEL)
PROMPTS = [np.arange(1, 1 + n, dtype=np.int32) for n in (5, 20, 40)]


def weights(seed):
    return jax.jit(MODEL.init, static_argnums=0)(seed)


TRAINED = [weights(0)]
"""The weights of a trainer on the sampler's devices."""


@pytest.fixture
def sampler():
    worker = EngineWorker(ENGINE)
    made = Sampler(
        ENGINE,
        PUBLISH(weights(0)),
        0,
        longest_prompt=0,
        worker=worker,
        sink=SharedSink(PUBLISH, lambda: TRAINED[0], worker),
    )
    yield made
    made.close()


def wake(sampler, version=1, params=None):
    TRAINED[0] = params or weights(version)
    sampler.prepare(Snapshot(version))
    sampler.swap(version)


def ask(sampler, number, max_tokens=24):
    return sampler.submit(PROMPTS[number], SamplingParams(1.0, max_tokens), (7, number))


async def answers(sampler):
    done = await asyncio.gather(*(ask(sampler, i).completion for i in range(len(PROMPTS))))
    return [(c.sampled.tokens.tolist(), c.sampled.versions.tolist(), c.cached_tok) for c in done]


def live_bytes():
    gc.collect()
    return sum(x.nbytes for x in jax.live_arrays())


def test_the_memory_of_weights_and_pages_is_free_while_the_sampler_is_asleep(sampler):
    asyncio.run(answers(sampler))
    awake = live_bytes()
    freed = jax.tree.leaves((sampler._worker.params, sampler._worker._state))
    size = sum(x.nbytes for x in freed)
    del freed
    sampler.sleep()
    assert sampler.asleep
    assert awake - live_bytes() == size > 100_000
    sampler.sleep()
    assert sampler.asleep, "a second time changes nothing"
    wake(sampler)
    assert not sampler.asleep and live_bytes() == awake


def test_tokens_after_sleep_are_those_of_a_sampler_that_stayed_awake(sampler):
    asyncio.run(answers(sampler))
    wake(sampler)
    expected = asyncio.run(answers(sampler))
    sampler.sleep()
    wake(sampler, 1)
    assert asyncio.run(answers(sampler)) == expected
    assert expected[0][1] == [1] * 24


def test_nothing_compiles_after_the_first_waking(sampler):
    new = [weights(1), weights(2)]
    asyncio.run(answers(sampler))
    wake(sampler, 1, new[0])
    asyncio.run(answers(sampler))
    compiled = compiled_from_now_on()
    for version in (2, 3):
        sampler.sleep()
        wake(sampler, version, new[version - 2])
        asyncio.run(answers(sampler))
    assert compiled == []


def test_requests_and_scores_wait_until_the_sampler_wakes_up(sampler):
    async def run():
        sampler.sleep()
        pending, score = ask(sampler, 0), asyncio.ensure_future(sampler.score(PROMPTS[1]))
        await asyncio.sleep(0)
        sampler.sleep()  # its thread has looked at both
        assert not pending.completion.done() and not score.done()
        assert sampler.load().waiting == 1 and not sampler.stats.dispatches
        await asyncio.to_thread(wake, sampler)
        done, scores = await asyncio.gather(pending.completion, score)
        assert done.sampled.versions.tolist() == [1] * 24
        np.testing.assert_allclose(scores, await sampler.score(PROMPTS[1]))

    asyncio.run(run())


def test_a_running_request_waits_and_continues_with_the_new_weights():
    worker, reasons = EngineWorker(ENGINE), []
    worker.set_params(PUBLISH(weights(0)))
    scheduler = Scheduler(worker, 0)
    params = SamplingParams(1.0, 24)
    requests = [Request(p, params, (7, i), 0, lambda _, why: reasons.append(why)) for i, p in enumerate(PROMPTS)]
    for request in requests:
        scheduler.add(request)
    while not requests[0].num_sampled:
        scheduler.step()
    scheduler.sleep()
    assert not scheduler.busy and scheduler.load().running == 0 and scheduler.load().waiting == 3 and not reasons
    assert scheduler.load().used_pages == scheduler.load().cached_pages == 0 and worker._logits == {}
    scheduler.publish(lambda: worker.set_params(PUBLISH(weights(1))), 1)
    while scheduler.busy:
        scheduler.step()
    assert reasons == ["length"] * 3
    versions = [Sampled.concatenate(r.parts).versions.tolist() for r in requests]
    assert all(len(v) == 24 and v == sorted(v) and v[-1] == 1 for v in versions) and versions[0][0] == 0


def test_a_request_is_aborted_while_the_sampler_is_asleep(sampler):
    async def run():
        sampler.sleep()
        pending = ask(sampler, 0)
        pending.abort()
        done = await pending.completion
        assert done.finish_reason == "abort" and not len(done.sampled)
        assert sampler.asleep and not sampler.load().waiting

    asyncio.run(run())


def test_all_that_waits_for_a_sampler_that_is_asleep_fails_when_it_closes(sampler):
    async def run():
        sampler.sleep()
        pending, score = ask(sampler, 0), asyncio.ensure_future(sampler.score(PROMPTS[1]))
        await asyncio.sleep(0)
        await asyncio.to_thread(sampler.close)
        for waiting in (pending.completion, score):
            with pytest.raises(SamplerError, match="the sampler was closed"):
                await waiting
        with pytest.raises(SamplerError, match="the sampler was closed"):
            sampler.sleep()

    asyncio.run(run())


def test_weights_that_cannot_be_made_end_a_sampler_that_is_asleep(sampler):
    TRAINED[0] = {"layers": {}}  # not what the sampler computes with

    async def run():
        sampler.sleep()
        pending = ask(sampler, 0)
        with pytest.raises(SamplerError, match="version 1 could not be taken: "):
            await asyncio.to_thread(sampler.swap, 1)
        with pytest.raises(SamplerError, match="version 1 could not be taken: "):
            await pending.completion

    asyncio.run(run())
