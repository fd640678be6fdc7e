"""A server that says it is ready has compiled what requests need."""

import asyncio
import threading

import httpx2
import jax
import openai
import pytest

from rolljax.sampler.client import Sampler
from rolljax.sampler.engine import Engine
from rolljax.sampler.settings import SamplerConfig
from rolljax.serving.schema import ServedModel
from rolljax.serving.server import ServerLimits
from rolljax.trainer.mesh import BATCH_AXES, MeshSpec
from rolljax.trainer.publish import make_publish
from tests.compilations import compiled_from_now_on

from .serving import KEY, Running, until

CONTEXT = 280


@pytest.fixture(scope="module")
def cold(model, params, chat):
    """Return a server that has compiled nothing."""
    mesh = MeshSpec().build(jax.devices()[:1])
    cfg = SamplerConfig(slots=8, max_context=CONTEXT, prefill_chunk=128, prefix_match="any", programs="few")
    weights = make_publish(mesh, model)(params)
    sampler = Sampler(Engine(model, cfg, mesh, BATCH_AXES), weights, 0, vocabulary=chat.vocabulary, longest_prompt=0)
    running = Running(
        sampler, ServedModel("tiny", chat.tokenizer, chat, model.cfg.vocab_size, CONTEXT), ServerLimits(keys=(KEY,))
    )
    yield running
    running.close()
    sampler.close()


@pytest.mark.slow
def test_requests_wait_for_programs_and_programs_for_no_request(cold):
    service, shown, goes_on = cold.service, [], threading.Event()
    assert httpx2.get(f"{cold.url}/ready").status_code == 200, "a server that compiles nothing is ready"
    cold.service.sampler._send(lambda: goes_on.wait(300))
    loop = cold.server.servers[0].get_loop()
    warming = asyncio.run_coroutine_threadsafe(service.warm_up(lambda *programs: shown.append(programs)), loop)
    until(lambda: shown)
    ready, health = (httpx2.get(f"{cold.url}/{name}") for name in ("ready", "health"))
    refused = cold.post("/v1/completions", {"prompt": "x", "max_tokens": 1})
    goes_on.set()
    assert (health.status_code, ready.status_code, refused.status_code) == (200, 503, 503)
    assert (ready.json()["compiled"], ready.json()["programs"]) == (0, 12) and refused.headers["retry-after"]
    assert "compiling: 0 of 12 programs" in refused.json()["error"]["message"]
    warming.result(300)
    programs = shown[-1][1]
    assert shown == [(i, programs) for i in range(programs + 1)] and programs == 12
    reply = httpx2.get(f"{cold.url}/ready")
    assert (reply.status_code, reply.json()["status"]) == (200, "ready")
    compiled = compiled_from_now_on()
    ordinary(cold)
    assert compiled == []


def ordinary(running):
    """Send requests of every usual kind: many lengths, settings, log-probs, chats, streams, and 200 at once."""
    chat = [{"role": "user", "content": "hello"}]

    async def everything():
        async with running.client(openai.AsyncOpenAI) as client:
            ask, talk = client.completions.create, client.chat.completions.create
            for length in (1, 31, 33, 120, 130, 200, 270):
                await ask(model="tiny", prompt="y" * length, max_tokens=4)
            for settings in (
                {"temperature": 0},
                {"top_p": 0.9},
                {"extra_body": {"top_k": 5}},
                {"logprobs": 3},
                {"n": 20},
            ):
                await ask(model="tiny", prompt="hello", max_tokens=9, **settings)
            await talk(
                model="tiny", messages=chat, max_tokens=150, logprobs=True, top_logprobs=2, top_p=0.5, stop=["zz"]
            )
            turns = [*chat, {"role": "assistant", "content": "a" * 60}, *chat]
            async for _ in await talk(model="tiny", messages=turns, max_tokens=20, stream=True):
                pass
            settings = [{}, {"top_p": 0.8}, {"logprobs": 1}]
            return await asyncio.gather(
                *(ask(model="tiny", prompt="z" * (i % 50 + 1), max_tokens=8, **settings[i % 3]) for i in range(200))
            )

    assert len(asyncio.run(everything())) == 200
