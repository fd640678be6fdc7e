"""A chat model of this process: it says what the same folder says behind the server."""

import asyncio
import dataclasses

import jax
import pytest

from rolljax import serve
from rolljax.chat_models import local
from rolljax.chat_models.base import Asking, ChatTooLong
from rolljax.chat_models.client import EndpointConfig
from rolljax.chat_models.local import LocalModel
from rolljax.errors import ConfigError
from rolljax.model import hf
from rolljax.model.decoder import Model
from rolljax.model.families.qwen3 import Qwen3Config
from rolljax.model.tokenizer import byte_tokenizer
from rolljax.sampler.client import Sampler
from rolljax.sampler.settings import SamplerConfig
from rolljax.serving.server import Limits
from rolljax.types import Message

from .serving import Running

SIZES = SamplerConfig(slots=8, max_context=192, prefill_chunk=64, prefix_match="any", programs="few")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small model with random weights, as a run folder has its result."""
    run = tmp_path_factory.mktemp("run")
    model = Model(Qwen3Config(init_std=0.3))
    hf.save(run / "hf", model, jax.jit(lambda: model.init(3))(), byte_tokenizer())
    return run


@pytest.fixture(scope="module")
def endpoint(folder):
    """The same folder behind rolljax's own server."""
    args = serve.parse(["--model", str(folder / "hf"), "--slots", "8", "--max_context", "192", "--prefill_chunk", "64"])
    engine, params, version, served = serve.load(args)
    sampler = Sampler(engine, params, version, vocabulary=served.vocabulary, longest_prompt=0)
    running = Running(sampler, served, Limits())
    yield EndpointConfig(f"{running.url}/v1", retries=0)
    running.close()
    sampler.close()


CONVERSATIONS = [
    [Message("user", "Which is better, A or B?")],
    [Message("system", "You judge."), Message("user", "A: 12 <|end|> B: 13"), Message("assistant", "A"), Message("user", "why?")],
    *([Message("user", f"question {i} " * (1 + i % 4))] for i in range(6)),
]  # fmt: skip


async def answers(config, how):
    chat = config.open()
    try:
        return await asyncio.gather(*(chat.ask(messages, how) for messages in CONVERSATIONS))
    finally:
        await chat.close()


@pytest.mark.parametrize("temperature", [0.0, pytest.param(0.8, marks=pytest.mark.slow)])
def test_it_says_what_the_server_says(folder, endpoint, temperature):
    """Also where it is drawn: a seed has the same randomness."""
    how = Asking(temperature, max_tok=24, seed=5)
    here = asyncio.run(answers(LocalModel(str(folder), SIZES), how))
    there = asyncio.run(answers(endpoint, how))
    assert here == there and len({a.text for a in here}) == len(CONVERSATIONS)
    assert not local._loaded


def test_equal_settings_share_one_model(folder):
    async def run():
        one, two = LocalModel(str(folder), SIZES).open(), LocalModel(str(folder), SIZES).open()
        other = LocalModel(str(folder), SIZES, devices=(1,)).open()
        assert one._model is two._model and other._model is not one._model
        assert other._model.sampler.engine.mesh.devices.flat[0] == jax.devices()[1]
        await one.close()
        await one.close()
        said = await asyncio.gather(*(chat.ask(CONVERSATIONS[0], Asking(max_tok=8)) for chat in (two, other)))
        assert said[0] == said[1] and two.counts() == {"requests": 1, "answers": 1}
        await two.close()
        await other.close()

    asyncio.run(run())
    assert not local._loaded


def test_what_does_not_fit_is_said(folder, endpoint):
    async def run(config):
        chat = config.open()
        try:
            for text in ("x" * 500, "x" * 200_000):
                with pytest.raises(ChatTooLong):
                    await chat.ask([Message("user", text)], Asking())
            full = await chat.ask([Message("user", "x" * 150)], Asking(max_tok=500))
            assert full.finish_reason in ("stop", "length") and full.num_tok < 192
            return full
        finally:
            await chat.close()

    assert asyncio.run(run(LocalModel(str(folder), SIZES))) == asyncio.run(run(endpoint))


def test_settings_that_cannot_work_are_refused(folder, tmp_path):
    for config, setting in (
        (LocalModel(str(tmp_path)), "LocalModel.path"),
        (LocalModel(str(folder), SIZES, devices=(99,)), "LocalModel.devices"),
        (LocalModel(str(folder), SIZES, devices=(0, 0)), "LocalModel.devices"),
        (LocalModel(str(folder), dataclasses.replace(SIZES, max_context=10**6)), "SamplerConfig.max_context"),
    ):
        with pytest.raises(ConfigError) as error:
            config.open()
        assert error.value.setting == setting
    assert LocalModel(str(folder)).identity.startswith("hf ") and not local._loaded
