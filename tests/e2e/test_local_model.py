"""A chat model of this process gives the same answers as the same folder behind the server."""

import asyncio
import contextlib
import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rolljax import serve
from rolljax.chat_models import local
from rolljax.chat_models.base import Asking, ChatTooLong
from rolljax.chat_models.client import EndpointConfig
from rolljax.chat_models.local import LocalModel
from rolljax.envs.games.guess_number import GuessNumber
from rolljax.errors import ConfigError, InfraError, RolljaxError
from rolljax.judging.calls import CallLimits
from rolljax.model import hf
from rolljax.model.attention import packed
from rolljax.model.decoder import Model
from rolljax.model.families.qwen3 import Qwen3Config
from rolljax.model.tokenizer import Chat, byte_tokenizer
from rolljax.rewards.base import RewardContext
from rolljax.rewards.judge import Judge
from rolljax.sampler.client import Sampler
from rolljax.sampler.settings import SamplerConfig
from rolljax.serving.server import ServerLimits
from rolljax.types import Message

from .serving import Running

SIZES = SamplerConfig(slots=8, max_context=192, prefill_chunk=64, prefix_match="any", programs="few")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Save a small model with random weights as the result of a run."""
    run = tmp_path_factory.mktemp("run")
    model = Model(Qwen3Config(init_std=0.3))
    hf.save(run / "hf", model, jax.jit(lambda: model.init(3))(), byte_tokenizer())
    return run


@contextlib.contextmanager
def served(folder, sizes=SIZES):
    """Serve a folder with rolljax's own server."""
    engine, params, version, model = serve.load(
        model=folder, slots=sizes.slots, max_context=sizes.max_context, prefill_chunk=sizes.prefill_chunk
    )
    sampler = Sampler(engine, params, version, vocabulary=model.vocabulary, longest_prompt=0)
    running = Running(sampler, model, ServerLimits())
    try:
        yield EndpointConfig(f"{running.url}/v1", retries=0)
    finally:
        running.close()
        sampler.close()


@pytest.fixture(scope="module")
def endpoint(folder):
    with served(folder / "hf") as config:
        yield config


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


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_local_model_answers_like_the_server(folder, endpoint, temperature):
    """Also for random samples: a seed has the same randomness."""
    how = Asking(temperature, max_tok=24, seed=5)
    here = asyncio.run(answers(LocalModel(str(folder), SIZES), how))
    there = asyncio.run(answers(endpoint, how))
    assert here == there and len({a.text for a in here}) == len(CONVERSATIONS)
    assert not local._loaded


@pytest.mark.slow
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


def test_a_conversation_that_does_not_fit_is_too_long(folder, endpoint):
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


# ---- as a judge


ANSWERS = ("12", "25", "37", "4", "50", "nonsense")
SPEC = GuessNumber()


def judge_of(model):
    limits = CallLimits(retries=0)
    return Judge(model, rubric="{question}\n{answer}", max_tok=16, max_chars=100, limits=limits)


def taught(judge, verdicts, steps=200):
    """Train a small model to give the verdict for each of `ANSWERS`."""
    chat, model = Chat(byte_tokenizer()), Model(Qwen3Config(num_layers=1, init_std=0.1))
    rows, says = [], []
    for answer, verdict in verdicts.items():
        [asked] = judge.prompts(RewardContext(SPEC), SPEC.task(0), answer).values()
        prompt = chat.prompt_ids(asked)
        said = chat.answer_ids(verdict)
        rows.append(np.concatenate([prompt, said]))
        says.append(np.arange(len(rows[-1])) >= len(prompt))
    width = max(map(len, rows))
    tokens, counts = (np.stack([np.pad(x, (0, width - len(x))) for x in xs]) for xs in (rows, says))
    segments = np.stack([np.arange(width) < len(row) for row in rows]).astype(np.int32)
    positions = np.broadcast_to(np.arange(width), tokens.shape)
    tx = optax.adam(1e-2)

    @jax.jit
    def step(params, state):
        def loss(params):
            decoder = model.bind(params)
            hidden = decoder(tokens, positions, packed(segments, segments * 0, positions)).hidden
            logp = jax.nn.log_softmax(decoder.logits(hidden[:, :-1]))
            of_next = jnp.take_along_axis(logp, tokens[:, 1:, None], axis=2)[..., 0]
            return -(of_next * counts[:, 1:]).sum() / counts.sum()

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = tx.update(grads, state)
        return optax.apply_updates(params, updates), state, value

    params = jax.jit(lambda: model.init(0))()
    state = tx.init(params)
    for _ in range(steps):
        params, state, value = step(params, state)
        if value < 1e-3:
            break
    return model, params


@pytest.mark.slow
def test_a_judge_here_judges_as_behind_the_server(tmp_path):
    """At temperature 0: the same marks, and the same answers without a mark."""
    sizes = dataclasses.replace(SIZES, max_context=768, prefill_chunk=256)
    here = LocalModel(str(tmp_path / "judge"), sizes, devices=(0,))
    said = {a: json.dumps({"score": 3 + 4 * (i % 2)}) for i, a in enumerate(ANSWERS)} | {ANSWERS[-1]: "I cannot say."}
    hf.save(tmp_path / "judge", *taught(judge_of(here), said), byte_tokenizer())

    async def verdicts(model, **changes):
        scorer = dataclasses.replace(judge_of(model), **changes).open(RewardContext(SPEC))
        try:
            asked = (scorer.judge(SPEC.task(0), answer) for answer in ANSWERS)
            return await asyncio.gather(*asked, return_exceptions=True)
        finally:
            await scorer.close()

    ours = asyncio.run(verdicts(here))
    with served(tmp_path / "judge", sizes) as endpoint:
        theirs = asyncio.run(verdicts(endpoint))
    assert [getattr(r, "value", str(r)) for r in ours] == [getattr(r, "value", str(r)) for r in theirs]
    assert [r.value for r in ours[:-1]] == [0.3, 0.7, 0.3, 0.7, 0.3] and isinstance(ours[-1], RolljaxError)
    cut = asyncio.run(verdicts(here, max_tok=len('{"score": 3}')))  # all of the verdict, and no room to end
    assert all(isinstance(r, InfraError) and "cut (length" in str(r) for r in cut)
