"""The HTTP server over a real engine: OpenAI's client, token ids and log-probs, bad input, hang-ups, the end."""

import asyncio
import contextlib
import dataclasses
import json
import os
import re
import signal
import socket
import subprocess
import sys

import httpx2
import jax
import numpy as np
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolljax import cli, serve
from rolljax.model import hf
from rolljax.model.tokenizer import Chat, byte_tokenizer
from rolljax.run.folder import RunFolder
from rolljax.run.preflight import check as check_run
from rolljax.run.progress import RunProgress
from rolljax.run.trainer import make_trainer
from rolljax.sampler.client import Sampler
from rolljax.sampler.engine import Engine
from rolljax.sampler.settings import SamplerConfig
from rolljax.serving.schema import ServedModel
from rolljax.serving.server import ServerLimits
from rolljax.trainer.mesh import BATCH_AXES, MeshSpec
from rolljax.trainer.publish import make_publish
from rolljax.types import SamplingParams

from .conftest import QUICKSTART, ROOT
from .serving import KEY, Running, received, until

CONTEXT = 240
VERSION = 3


@pytest.fixture(scope="module")
def start_sampler(model, params, chat):
    """Return a function that makes samplers on one engine, whose programs are compiled once."""
    mesh = MeshSpec().build(jax.devices()[:1])
    cfg = SamplerConfig(slots=32, max_context=CONTEXT, steps_per_dispatch=4, prefill_chunk=64, prefix_match="any")
    engine, weights = Engine(model, cfg, mesh, BATCH_AXES), make_publish(mesh, model)(params)
    return lambda: Sampler(engine, weights, VERSION, vocabulary=chat.vocabulary)


@pytest.fixture(scope="module")
def sampler(start_sampler):
    sampler = start_sampler()
    yield sampler
    sampler.close()


@pytest.fixture(scope="module")
def served(model, chat):
    return ServedModel("tiny", chat.tokenizer, chat, model.cfg.vocab_size, CONTEXT)


@pytest.fixture(scope="module")
def running(sampler, served):
    serve.allow_open_files(4096)
    running = Running(sampler, served, ServerLimits(keys=("other", KEY), body_bytes=2**20))
    yield running
    running.close()


@pytest.fixture(scope="module")
def client(running):
    with running.client() as client:
        yield client


def ask(client, prompt="Hello", extra=None, **fields):
    return client.completions.create(model="tiny", prompt=prompt, extra_body=extra or {}, **fields)


def talk(client, text="Hello", extra=None, **fields):
    messages = fields.pop("messages", [{"role": "user", "content": text}])
    return client.chat.completions.create(model="tiny", messages=messages, extra_body=extra or {}, **fields)


IDS = {"return_token_ids": True}


# ---- what is answered


def test_models_and_health(client, running):
    (model,) = client.models.list().data
    assert (model.id, model.max_model_len) == ("tiny", CONTEXT)
    assert client.models.retrieve("tiny").id == "tiny"
    health = httpx2.get(f"{running.url}/health")
    assert health.status_code == 200
    assert health.json() == {"status": "ok", "policy_version": VERSION}


def test_a_completion(client, chat):
    reply = ask(client, seed=1, max_tokens=12, extra=IDS)
    (choice,) = reply.choices
    assert reply.object == "text_completion" and reply.model == "tiny"
    assert choice.prompt_token_ids == chat.tokenizer("Hello")["input_ids"]
    assert choice.text == chat.text(choice.token_ids, choice.prompt_token_ids) and choice.logprobs is None
    assert choice.versions == [VERSION] * len(choice.token_ids)
    assert choice.finish_reason == ("stop" if choice.token_ids[-1] in chat.stop_ids else "length")
    assert reply.usage.prompt_tokens == 5 and reply.usage.completion_tokens == len(choice.token_ids) <= 12
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    assert reply.usage.prompt_tokens_details.cached_tokens >= 0


def test_a_request_without_limits_gets_the_defaults(client):
    assert ask(client, extra={"ignore_eos": True}).usage.completion_tokens == 16
    reply = talk(client, extra={"ignore_eos": True})
    assert reply.usage.total_tokens == CONTEXT
    assert reply.choices[0].finish_reason == "length"


def test_ids_in_and_text_in_are_the_same(client, chat):
    ids = chat.tokenizer("What now?")["input_ids"]
    text, tokens, listed = (ask(client, p, seed=5, max_tokens=20) for p in ("What now?", ids, [ids]))
    assert text.choices[0].text == tokens.choices[0].text == listed.choices[0].text
    many = ask(client, ["What now?", "And then?"], seed=5, max_tokens=20, n=2)
    assert [c.index for c in many.choices] == [0, 1, 2, 3]
    assert many.choices[0].text == text.choices[0].text
    assert many.usage.prompt_tokens == 18


def test_chat_is_the_template(client, chat):
    messages = [{"role": "developer", "content": "short"}, {"role": "user", "content": [{"type": "text", "text": "é"}]}]
    reply = talk(client, messages=messages, seed=2, max_tokens=10, extra=IDS)
    prompt = chat.conversation_ids([{"role": "system", "content": "short"}, {"role": "user", "content": "é"}])
    assert reply.prompt_token_ids == prompt.tolist()
    assert reply.choices[0].message.role == "assistant"
    assert reply.choices[0].message.content == chat.text(reply.choices[0].token_ids, prompt)
    same = ask(client, prompt.tolist(), seed=2, max_tokens=10, extra=IDS)
    assert same.choices[0].token_ids == reply.choices[0].token_ids


def test_tools_reach_the_template(client, chat):
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"where": "left <|end|>"}'}}
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "tool_call_id": "c1", "content": "a door"},
    ]
    prompt = talk(client, messages=messages, tools=tools, max_tokens=1, extra=IDS).prompt_token_ids
    text = chat.tokenizer.decode(prompt)
    assert text.startswith(f"<|system|>{json.dumps(tools)}<|user|>go<|assistant|><tool_call>")
    assert '"arguments": {"where": "left <|end|>"}' in text
    assert text.endswith("</tool_call><|end|><|user|>a door<|assistant|>")
    end = chat.tokenizer.convert_tokens_to_ids("<|end|>")
    assert prompt.count(end) == 1, "what a message spells must not become a special token"
    untold = talk(client, messages=messages, tools=tools, tool_choice="none", max_tokens=1, extra=IDS)
    assert "look" not in chat.tokenizer.decode(untold.prompt_token_ids[:20])
    demanded = talk(client, messages=messages, tools=tools, tool_choice="required", max_tokens=4, extra=IDS)
    assert chat.tokenizer.decode(demanded.prompt_token_ids).endswith('<|assistant|><tool_call>{"name":')
    assert demanded.choices[0].message.content.startswith('<tool_call>{"name":'), "a call that is not whole is text"


def test_equal_seeds_give_equal_samples(client):
    texts = [ask(client, seed=seed, max_tokens=24, n=2).choices for seed in (7, 7, 8, -7)]
    first, again, other, negative = ([c.text for c in choices] for choices in texts)
    assert first == again
    assert first != other and first != negative and first[0] != first[1]
    assert len({ask(client, max_tokens=24).choices[0].text for _ in range(4)}) == 4
    greedy = {ask(client, max_tokens=24, temperature=0).choices[0].text for _ in range(3)}
    assert len(greedy) == 1


@pytest.mark.parametrize("kind", ["completion", "chat"])
@pytest.mark.parametrize("stop", [None, "stop"])
def test_a_stream_is_the_answer_in_parts(client, kind, stop):
    create = {"completion": ask, "chat": talk}[kind]
    fields = {"seed": 11, "max_tokens": 60, "n": 3, "extra": IDS}
    if stop:
        text = _text(create(client, **fields).choices[0])
        fields["stop"] = ["never said", said(text)[-1]]
    complete = create(client, **fields)
    chunks = list(create(client, stream=True, stream_options={"include_usage": True}, **fields))
    for choice in complete.choices:
        parts = [c for chunk in chunks for c in chunk.choices if c.index == choice.index]
        assert "".join(_text(c) or "" for c in parts) == _text(choice)
        assert sum((getattr(c, "token_ids", []) for c in parts), []) == choice.token_ids
        assert [c.finish_reason for c in parts if c.finish_reason] == [choice.finish_reason]
        assert parts[-1].finish_reason
        if stop and choice.index == 0:
            assert choice.finish_reason == "stop" and _text(choice) == text[: text.index(fields["stop"][1])]
    assert chunks[-1].choices == []
    tokens = lambda usage: (usage.prompt_tokens, usage.completion_tokens)  # noqa: E731
    assert tokens(chunks[-1].usage) == tokens(complete.usage)
    assert all(chunk.usage is None for chunk in chunks[:-1])


def _text(choice):
    if hasattr(choice, "text"):
        return choice.text
    return (choice.delta if hasattr(choice, "delta") else choice.message).content


def said(text, length=3):
    """Return parts of a text that can be stop texts; each takes several tokens of a byte tokenizer."""
    parts = [text[at : at + length] for at in range(len(text) - length + 1)]
    parts = [p for p in parts if "\ufffd" not in p]
    assert parts
    return parts


def test_stop_texts(client, chat):
    """Parts of an answer as its stop text: they end at any place of a dispatch."""
    plain = ask(client, seed=3, max_tokens=80, extra={"ignore_eos": True}).choices[0].text
    for stop in said(plain):
        reply = ask(client, seed=3, max_tokens=80, stop=stop, extra=IDS | {"ignore_eos": True}).choices[0]
        assert reply.text == plain[: plain.index(stop)] and reply.finish_reason == "stop"
        assert stop in chat.text(reply.token_ids, []), "ids are all that was sampled"
        assert stop not in chat.text(reply.token_ids[:-1], [])
    token = chat.tokenizer(stop)["input_ids"][0]
    ended = ask(client, seed=3, max_tokens=80, extra=IDS | {"stop_token_ids": [token], "ignore_eos": True}).choices[0]
    assert ended.token_ids[-1] == token and ended.finish_reason == "stop"


# ---- other APIs


@pytest.mark.parametrize("stream", [False, True])
def test_every_api_samples_the_same(running, client, chat, stream):
    """The same conversation, seed and settings give the same tokens; usage is counted the same."""
    plain = talk(client, seed=5, max_tokens=20, extra=IDS)
    ids, want = plain.prompt_token_ids, plain.choices[0]
    asked = {"model": "tiny", "input": "Hello", "max_output_tokens": 20, "extra_body": {"seed": 5}}
    if stream:
        with client.responses.stream(**asked) as events:
            events = list(events)
        reply = events[-1].response
        assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == want.message.content
    else:
        reply = client.responses.create(**asked)
    assert reply.output_text == want.message.content
    ended = ("completed", None) if want.finish_reason == "stop" else ("incomplete", "max_output_tokens")
    assert (reply.status, reply.incomplete_details and reply.incomplete_details.reason) == ended
    assert (reply.usage.input_tokens, reply.usage.output_tokens) == (len(ids), len(want.token_ids))
    body = {"max_tokens": 20, "messages": [{"role": "user", "content": "Hello"}], "seed": 5, "stream": stream}
    reply = running.post("/v1/messages?beta=true", body, **{"Authorization": "", "x-api-key": KEY})
    if stream:
        events = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: ")]
        said = "".join(e["delta"]["text"] for e in events if e["type"] == "content_block_delta")
        end, usage = events[-2]["delta"], events[-2]["usage"]
    else:
        (said,), end, usage = [b["text"] for b in reply.json()["content"]], reply.json(), reply.json()["usage"]
    assert (said, end["stop_reason"]) == (want.message.content, "end_turn" if ended[0] == "completed" else "max_tokens")
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len(ids)
    assert running.post("/v1/messages/count_tokens", body | {"stream": False}).json() == {"input_tokens": len(ids)}
    settings = {"max_tokens": 20, "seed": 5, "logprobs": 2, "n": 2}
    body = {"token_ids": ids, "sampling_params": settings, "stream": stream, "cache_salt": "x", "request_id": "mine"}
    reply = running.post("/inference/v1/generate", body)
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line not in ("", "data: [DONE]")]
    parts = [json.loads(line) for line in lines]
    choices = [c for p in parts for c in p["choices"] if c["index"] == 0]
    assert {p["request_id"] for p in parts} == {"mine"}
    assert sum((c["token_ids"] for c in choices), []) == want.token_ids
    entries = [e for c in choices for e in c["logprobs"]["content"]]
    assert [e["token"] for e in entries] == [f"token_id:{t}" for t in want.token_ids]
    assert all(len(e["top_logprobs"]) == 2 for e in entries) and choices[-1]["finish_reason"] == want.finish_reason
    assert sum((c["versions"] for c in choices), []) == [VERSION] * len(want.token_ids)


@pytest.mark.parametrize("stream", [False, True])
def test_anthropics_client(running, stream):
    anthropic = pytest.importorskip("anthropic")
    with anthropic.Anthropic(base_url=running.url, api_key=KEY, max_retries=0) as client:
        talk = {"model": "tiny", "max_tokens": 20, "messages": [{"role": "user", "content": "Hello"}]}
        if stream:
            with client.messages.stream(**talk) as events:
                text, reply = "".join(events.text_stream), events.get_final_message()
            assert text == "".join(b.text for b in reply.content)
        else:
            reply = client.messages.create(**talk)
        assert reply.stop_reason in ("end_turn", "max_tokens") and 0 < reply.usage.output_tokens <= 20
        for key, change, error in (
            (KEY, {"extra_body": {"temperature": -1}}, anthropic.BadRequestError),
            (KEY, {"model": "gpt"}, anthropic.NotFoundError),
            ("wrong", {}, anthropic.AuthenticationError),
        ):
            with pytest.raises(error) as e:
                client.with_options(api_key=key).messages.create(**talk | change)
            assert e.value.body["type"] == "error" and e.value.body["error"]["message"]


# ---- token ids and log-probs, as training needs them


def in_process(sampler, prompt, params, seed):
    """Return the sampler's own result for the first choice of a seeded request, without the server."""

    async def one():
        return await sampler.generate(np.array(prompt, np.int32), params, (1, seed >> 31, seed & (2**31 - 1), 0))

    return asyncio.run(one())


@pytest.mark.parametrize("mode", ["processed_logprobs", "raw_logprobs"])
@pytest.mark.parametrize("stream", [False, True])
def test_log_probs_are_the_samplers(client, sampler, chat, mode, stream):
    settings = {"temperature": 0.7, "top_p": 0.9, "extra": {"top_k": 50, "min_p": 0.01, "logprobs_mode": mode} | IDS}
    prompt, seed = chat.tokenizer("log")["input_ids"], 2**40 + 5
    params = SamplingParams(0.7, 20, chat.stop_ids, top_k=50, top_p=0.9, min_p=0.01, top_logprobs=3)
    want = in_process(sampler, prompt, params, seed).sampled
    logp, top = (
        (want.sampler_logp, want.top_sampler_logp)
        if mode == "processed_logprobs"
        else (want.model_logp, want.top_model_logp)
    )
    reply = ask(client, "log", seed=seed, max_tokens=20, logprobs=3, stream=stream, **settings)
    choices = [chunk.choices[0] for chunk in reply] if stream else reply.choices
    assert sum((c.token_ids for c in choices if hasattr(c, "token_ids")), []) == want.tokens.tolist()
    entries = [c.logprobs for c in choices if c.logprobs]
    got = [value for e in entries for value in e.token_logprobs]
    np.testing.assert_allclose(got, logp, atol=1e-6)
    alternatives = [a for e in entries for a in e.top_logprobs]
    for values, a in zip(np.maximum(top, -9999), alternatives, strict=True):
        assert 3 <= len(a) <= 4 and max(a.values()) == pytest.approx(values[0], abs=1e-6)
    reply = talk(client, "log", seed=seed, max_tokens=20, logprobs=True, top_logprobs=3, stream=stream, **settings)
    choices = [chunk.choices[0] for chunk in reply] if stream else reply.choices
    entries = [e for c in choices if c.logprobs for e in c.logprobs.content]
    ids = sum((c.token_ids for c in choices if hasattr(c, "token_ids")), [])
    assert len(entries) == len(ids)
    shown = b"".join(bytes(e.bytes) for e, i in zip(entries, ids, strict=True) if i < 256)
    assert shown.decode(errors="replace") == chat.text(ids, [])
    assert all(len(e.top_logprobs) == 3 and e.logprob <= 0 for e in entries)


def test_text_offsets(client):
    logprobs = ask(client, "héé", max_tokens=24, seed=4, logprobs=0, echo=True).choices[0].logprobs
    reply = ask(client, "héé", max_tokens=24, seed=4, echo=True).choices[0].text
    assert logprobs.tokens[:3] == ["h", "bytes:\\xc3", "bytes:\\xa9"] and logprobs.text_offset[:6] == [0, 1, 1, 2, 2, 3]
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        if len(token) == 1:
            assert reply[offset] == token


def test_echo_scores_the_prompt(client, sampler, chat):
    ids = chat.tokenizer("score me")["input_ids"]
    want = asyncio.run(sampler.score(np.array(ids, np.int32)))
    only = ask(client, "score me", echo=True, logprobs=0, max_tokens=0).choices[0]
    assert only.text == "score me" and only.finish_reason == "length"
    assert only.logprobs.token_logprobs[0] is None
    np.testing.assert_allclose(only.logprobs.token_logprobs[1:], want[1:], atol=1e-5)
    plain = ask(client, "score me", seed=9, max_tokens=8, logprobs=1).choices[0]
    for prompt in ("score me", ids):
        both = ask(client, prompt, seed=9, max_tokens=8, echo=True, logprobs=1).choices[0]
        assert both.text == "score me" + plain.text
        np.testing.assert_allclose(both.logprobs.token_logprobs[len(ids) :], plain.logprobs.token_logprobs, atol=1e-5)
    parts = [c.choices[0] for c in ask(client, "score me", seed=9, max_tokens=8, echo=True, logprobs=1, stream=True)]
    assert "".join(p.text for p in parts) == both.text
    assert sum((p.logprobs.tokens for p in parts), []) == both.logprobs.tokens
    assert sum((p.logprobs.text_offset for p in parts), []) == both.logprobs.text_offset


def test_echoed_log_probs_are_those_of_sampling(client, chat):
    """A sampled token's log-prob at temperature 1 is what scoring the complete text gives it."""
    reply = ask(client, "again", seed=6, max_tokens=12, logprobs=0, extra=IDS | {"ignore_eos": True}).choices[0]
    complete = [*chat.tokenizer("again")["input_ids"], *reply.token_ids]
    scored = ask(client, complete, echo=True, logprobs=0, max_tokens=0).choices[0].logprobs.token_logprobs
    np.testing.assert_allclose(scored[5:], reply.logprobs.token_logprobs, atol=1e-5)


# ---- many at once, and clients that leave


@pytest.mark.slow
def test_five_hundred_streams(running, chat, sampler):
    prompts = [f"stream {i % 50}" for i in range(500)]
    with running.client() as client:
        want = {p: ask(client, p, seed=21, max_tokens=8).choices[0].text for p in set(prompts)}

    async def one(client, prompt):
        stream = await ask(client, prompt, seed=21, max_tokens=8, stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def everything():
        async with running.client(openai.AsyncOpenAI) as client:
            return await asyncio.gather(*(one(client, p) for p in prompts))

    assert asyncio.run(everything()) == [want[p] for p in prompts]
    assert running.service.open == 0
    until(lambda: sampler.load().running == sampler.load().waiting == 0)


def raw_request(running, body):
    """Return a connection that has sent a request and reads nothing."""
    content = json.dumps(body).encode()
    connection = socket.create_connection(running.address)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Type: application/json"
    connection.sendall(f"{head}\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content)
    return connection


LONG = {"prompt": "x", "ignore_eos": True, "max_tokens": 10_000, "n": 64}


@pytest.mark.parametrize("stream", [False, True])
def test_a_hang_up_frees_the_slots(running, sampler, stream):
    aborted = sampler.stats.aborted
    connections = [raw_request(running, LONG | {"stream": stream}) for _ in range(12)]  # 768 answers for 32 slots
    until(lambda: sampler.load().running == 32)
    for connection in connections:
        connection.close()
    until(lambda: sampler.load().running == sampler.load().waiting == 0)
    assert sampler.stats.aborted > aborted
    assert not running.service.generations and running.service.open == 0


def test_a_cancelled_client_frees_its_slot(running, sampler):
    async def leave():
        async with running.client(openai.AsyncOpenAI) as client:
            task = asyncio.ensure_future(ask(client, extra={"ignore_eos": True}, max_tokens=9999, n=64))
            while sampler.load().running < 4:
                await asyncio.sleep(0.002)
            task.cancel()
            stream = await ask(client, extra={"ignore_eos": True}, max_tokens=9999, n=64, stream=True)
            async for _ in stream:
                break
            await stream.close()

    asyncio.run(leave())
    until(lambda: sampler.load().running == sampler.load().waiting == 0)


# ---- what is refused


def nested(depth):
    return b'{"prompt":' + b"[" * depth + b"]" * depth + b"}"


COMPLETIONS = [  # (a name, the body, what the message must say)
    ("not JSON", b'{"prompt": "x"', "JSON"),
    ("empty body", b"", "JSON"),
    ("not an object", b"[1]", "object"),
    ("not UTF-8", b'{"prompt": "\xff"}', "UTF-8"),
    ("NaN", b'{"prompt": "x", "temperature": NaN}', "NaN"),
    ("Infinity", b'{"prompt": "x", "top_p": -Infinity}', "Infinity"),
    ("a float without end", b'{"prompt": "x", "temperature": 1e999}', "1e999"),
    ("an integer without end", b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", "JSON"),
    ("deep", nested(200), "deeply"),
    ("deeper", nested(100_000), "deeply"),
    ("twice", b'{"prompt": "x", "n": 1, "n": 2}', "n:"),
    ("half a surrogate pair", b'{"prompt": "\\ud800"}', "prompt"),
    ("half a pair in a name", b'{"prompt": "x", "\\udfff": 1}', "surrogate"),
    ("no prompt", {}, "prompt: is missing"),
    ("null prompt", {"prompt": None}, "prompt"),
    ("empty prompt", {"prompt": ""}, "prompt: has 0 tokens"),
    ("no ids", {"prompt": []}, "prompt: has 0 tokens"),
    ("an empty list of ids", {"prompt": [[1], []]}, r"prompt[1]: has 0 tokens"),
    ("mixed", {"prompt": ["x", 1]}, "prompt[1]"),
    ("text among ids", {"prompt": [1, "x"]}, "prompt[1]"),
    ("true as an id", {"prompt": [1, True]}, "prompt[1]"),
    ("a float as an id", {"prompt": [1.0]}, "prompt[0]"),
    ("id too large", {"prompt": [264]}, "0 to 263"),
    ("id far too large", {"prompt": [2**70]}, "0 to 263"),
    ("negative id", {"prompt": [-1]}, "prompt[0]"),
    ("too long", {"prompt": "x" * 240}, "240 tokens, and 1 to 239 fit"),
    ("another model", {"prompt": "x", "model": "gpt"}, "'tiny'"),
    ("model of a wrong type", {"prompt": "x", "model": 3}, "model"),
    ("temperature", {"prompt": "x", "temperature": -0.1}, "temperature"),
    ("temperature as text", {"prompt": "x", "temperature": "1"}, "temperature"),
    ("tiny temperature", {"prompt": "x", "temperature": 1e-300}, "temperature"),
    ("huge temperature", {"prompt": "x", "temperature": 10**400}, "temperature"),
    ("top_p", {"prompt": "x", "top_p": 0}, "top_p"),
    ("top_k", {"prompt": "x", "top_k": -2}, "top_k"),
    ("min_p", {"prompt": "x", "min_p": 1.5}, "min_p"),
    ("n", {"prompt": "x", "n": 0}, "n:"),
    ("n too large", {"prompt": "x", "n": 129}, "128"),
    ("too many answers", {"prompt": ["x"] * 100, "n": 100}, "4096"),
    ("max_tokens", {"prompt": "x", "max_tokens": 0}, "max_tokens"),
    ("max_tokens as float", {"prompt": "x", "max_tokens": 1.5}, "max_tokens"),
    ("seed", {"prompt": "x", "seed": 2**63}, "seed"),
    ("stop", {"prompt": "x", "stop": ["a", "b", "c", "d", "e"]}, "stop: must be at most 4"),
    ("empty stop", {"prompt": "x", "stop": ""}, "stop"),
    ("stop of a wrong type", {"prompt": "x", "stop": [1]}, "stop"),
    ("stop that is no text", {"prompt": "x", "stop": "\ufffd"}, "U+FFFD"),
    ("stop ids", {"prompt": "x", "stop_token_ids": [999]}, "stop_token_ids[0]"),
    ("too many stop ids", {"prompt": "x", "stop_token_ids": [1, 2, 3, 4]}, "ignore_eos"),
    ("logprobs", {"prompt": "x", "logprobs": 21}, "logprobs"),
    ("logprobs as chat has them", {"prompt": "x", "logprobs": True}, "logprobs"),
    ("logprobs_mode", {"prompt": "x", "logprobs_mode": "raw"}, "logprobs_mode"),
    ("stream options", {"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options"),
    ("unknown stream option", {"prompt": "x", "stream": True, "stream_options": {"usage": 1}}, "stream_options.usage"),
    ("penalty", {"prompt": "x", "frequency_penalty": 0.5}, "frequency_penalty"),
    ("bias", {"prompt": "x", "logit_bias": {"5": -100}}, "logit_bias"),
    ("best_of", {"prompt": "x", "best_of": 3}, "best_of"),
    ("suffix", {"prompt": "x", "suffix": "y"}, "suffix"),
    ("misspelt", {"prompt": "x", "temprature": 0}, "did you mean temperature"),
    ("priority", {"prompt": "x", "priority": 2**31}, "priority"),
]
USER = {"role": "user", "content": "x"}
CHATS = [
    ("no messages", {}, "messages"),
    ("empty", {"messages": []}, "messages"),
    ("not messages", {"messages": ["x"]}, "messages[0]"),
    ("role", {"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    ("no content", {"messages": [{"role": "user"}]}, "messages[0].content"),
    ("image", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
    ("field of a message", {"messages": [USER | {"weight": 1}]}, "messages[0].weight"),
    ("calls of a user", {"messages": [USER | {"tool_calls": [{}]}]}, "messages[0].tool_calls"),
    ("a broken call", {"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0]"),
    ("too long", {"messages": [{"role": "user", "content": "x" * 300}]}, "302 tokens"),
    ("tools", {"messages": [USER], "tools": [{"type": "retrieval"}]}, "tools[0]"),
    ("tool_choice", {"messages": [USER], "tool_choice": "required"}, "tool_choice"),
    ("response_format", {"messages": [USER], "response_format": {"type": "json_object"}}, "response_format"),
    ("audio", {"messages": [USER], "audio": {"voice": "a"}}, "audio"),
    ("top_logprobs alone", {"messages": [USER], "top_logprobs": 2}, "top_logprobs"),
    ("logprobs as completions have them", {"messages": [USER], "logprobs": 2}, "logprobs"),
    ("two limits", {"messages": [USER], "max_tokens": 2, "max_completion_tokens": 3}, "max_tokens"),
    ("echo", {"messages": [USER], "echo": True}, "echo"),
    ("a template's own argument", {"messages": [USER], "chat_template_kwargs": {"tokenize": True}}, "tokenize"),
]


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [("completions", *row[1:]) for row in COMPLETIONS] + [("chat/completions", *row[1:]) for row in CHATS],
    ids=[row[0] for row in COMPLETIONS + CHATS],
)
def test_bad_input(running, path, body, says):
    reply = running.post(f"/v1/{path}", body)
    error = reply.json()["error"]
    assert reply.status_code == (404 if "'tiny'" in says else 400), error
    assert says in error["message"] and set(error) == {"message", "type", "param", "code"}


def test_fields_that_change_nothing_are_accepted(client):
    plain = talk(client, seed=1, max_tokens=4)
    more = {"service_tier": "auto", "logit_bias": {}, "response_format": {"type": "text"}, "echo": False}
    same = talk(client, seed=1, max_tokens=4, user="me", metadata={"a": "b"}, presence_penalty=0, extra=more)
    assert same.choices[0].message.content == plain.choices[0].message.content


def test_other_refusals(running):
    small = {"prompt": "x", "max_tokens": 1}
    for reply, status in [
        (running.post("/v1/completion", small), 404),
        (httpx2.get(f"{running.url}/v1/models/gpt", headers={"Authorization": f"Bearer {KEY}"}), 404),
        (httpx2.get(f"{running.url}/v1/completions", headers={"Authorization": f"Bearer {KEY}"}), 405),
        (running.post("/v1/completions", b"x" * (2**20 + 1)), 413),
        (running.post("/v1/completions", small, **{"Content-Type": "text/plain"}), 415),
        (running.post("/v1/completions", small, **{"Content-Encoding": "gzip"}), 415),
        (running.post("/v1/completions", small, Authorization="Bearer wrong"), 401),
        (running.post("/v1/completions", small, Authorization=f"Basic {KEY}"), 401),
        (httpx2.get(f"{running.url}/metrics"), 401),
        (httpx2.get(f"{running.url}/nowhere"), 401),
        (running.post("/v1/completions", small, Authorization="bearer other"), 200),
        (running.post("/v1/messages", {}), 400),
        (running.post("/v1/messages", {}, **{"Authorization": "", "x-api-key": "wrong"}), 401),
        (running.post("/v1/responses", {}), 400),
        (running.post("/inference/v1/generate", {}), 400),
    ]:
        assert reply.status_code == status
        assert status == 200 or reply.json()["error"]["message"]


NUMBERS = st.one_of(st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.booleans(), st.none())
JSONS = st.recursive(
    NUMBERS | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
NAMES = [
    "prompt", "messages", "temperature", "top_p", "top_k", "min_p", "max_tokens", "n", "seed", "stop", "stop_token_ids",
    "echo", "logprobs", "top_logprobs", "logprobs_mode", "return_token_ids", "priority", "ignore_eos", "tools", "stream",
    "tool_choice", "response_format", "logit_bias", "best_of", "user", "chat_template_kwargs", "stream_options",
]  # fmt: skip
TALK = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "tool"])},
        optional={"content": st.text(max_size=8) | JSONS, "tool_calls": JSONS, "name": JSONS},
    ),
    max_size=3,
)
BODIES = st.fixed_dictionaries(
    {"prompt": st.text(max_size=8) | st.lists(st.integers(-1, 300), max_size=4) | JSONS, "messages": TALK | JSONS},
    optional={name: JSONS for name in NAMES if name not in ("prompt", "messages", "max_tokens", "n")},
)


def test_invalid_json_is_never_an_internal_error(running):
    kept = {"completions": {"messages"}, "chat/completions": {"prompt"}}
    with httpx2.Client(base_url=running.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=60) as http:

        @settings(max_examples=150)
        @given(BODIES, st.sampled_from(sorted(kept)), st.integers(1, 3), st.booleans())
        def fuzz(body, path, max_tokens, sparse):
            body = {k: v for k, v in body.items() if k not in kept[path]} | {"max_tokens": max_tokens}
            if sparse:
                body = {k: v for k, v in body.items() if k in ("prompt", "messages", "max_tokens", "temperature")}
            reply = http.post(f"/v1/{path}", json=body)
            assert reply.status_code < 500, reply.text
            assert "event-stream" in reply.headers["content-type"] or reply.json()

        fuzz()


# ---- limits, metrics, other templates


@pytest.fixture
def another(sampler, served):
    """Return a function that starts a second server over the same sampler with its own settings."""
    with contextlib.ExitStack() as stack:

        def start(limits=None, **changes):
            running = Running(sampler, dataclasses.replace(served, **changes), limits or ServerLimits())
            stack.callback(running.close)
            return running

        yield start


def test_too_many_requests_and_draining(another, sampler):
    running = another(ServerLimits(concurrency=2))
    connections = [raw_request(running, LONG), raw_request(running, LONG | {"stream": True})]
    until(lambda: running.service.open == 2)
    reply = running.post("/v1/completions", {"prompt": "x"})
    assert (reply.status_code, reply.headers["retry-after"]) == (429, "1") and "--max_concurrency" in reply.text
    asyncio.run_coroutine_threadsafe(running.service.drain(0.05), running.server.servers[0].get_loop()).result(10)
    assert running.post("/v1/completions", {"prompt": "x"}).status_code == 503
    health = httpx2.get(f"{running.url}/health")
    assert health.status_code == 503 and "shutting down" in health.json()["reason"]
    ends = [received(connection, b"shutting down") for connection in connections]
    assert ends[0].startswith(b"HTTP/1.1 503") and ends[1].startswith(b"HTTP/1.1 200")
    until(lambda: sampler.load().running == 0)


def test_a_sampler_that_has_stopped(start_sampler, served):
    sampler = start_sampler()
    running = Running(sampler, served, ServerLimits())
    connections = [raw_request(running, LONG), raw_request(running, LONG | {"stream": True})]
    until(lambda: sampler.load().running == 32)
    sampler.close()
    ends = [received(connection, b"the sampler has stopped") for connection in connections]
    assert ends[0].startswith(b"HTTP/1.1 503") and ends[1].startswith(b"HTTP/1.1 200")
    reply = running.post("/v1/chat/completions", {"messages": [USER]})
    assert reply.status_code == 503 and "the sampler has stopped" in reply.json()["error"]["message"]
    health = httpx2.get(f"{running.url}/health")
    assert health.status_code == 503 and "closed" in health.json()["reason"]
    running.close()


def test_metrics(running, client, sampler):
    ask(client, max_tokens=2)
    text = httpx2.get(f"{running.url}/metrics", headers={"Authorization": f"Bearer {KEY}"}).text
    value = lambda name: float(re.search(rf"^{re.escape(name)} (.*)$", text, re.M)[1])  # noqa: E731
    assert value('rolljax_http_requests_total{endpoint="/v1/completions",status="200"}') >= 1
    assert value("rolljax_policy_version") == VERSION and value("rolljax_slots") == 32
    assert value("rolljax_sampled_tokens_total") == sampler.stats.sampled_tok > 0
    assert value("rolljax_time_to_first_token_seconds_count") >= 1
    assert 0 <= value("rolljax_prefix_hit_ratio") <= 1
    assert value('rolljax_kv_pages{state="all"}') == sampler.load().pages
    assert value("rolljax_preemptions_total") >= 0 and value("rolljax_inter_token_seconds_count") >= 1


def test_a_template_without_tools_and_a_model_without_template(another):
    def with_template(template):
        tokenizer = byte_tokenizer()
        tokenizer.chat_template = template
        return tokenizer

    plain = with_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    tools = [{"type": "function", "function": {"name": "look"}}]
    body = {"messages": [USER], "max_tokens": 1}
    running = another(tokenizer=plain, chat=Chat(plain))
    assert running.post("/v1/chat/completions", body).status_code == 200
    reply = running.post("/v1/chat/completions", body | {"tools": tools})
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "tools"
    fussy = with_template("{{ raise_exception('users must go first') }}")
    reply = another(tokenizer=fussy, chat=Chat(fussy)).post("/v1/chat/completions", body)
    assert reply.status_code == 400 and "users must go first" in reply.text
    running = another(chat=None)
    assert "no chat template" in running.post("/v1/chat/completions", body).json()["error"]["message"]
    assert running.post("/v1/completions", {"prompt": "x", "max_tokens": 1}).status_code == 200


# ---- the command


@pytest.fixture(scope="module")
def folder(tmp_path_factory, model, params, chat):
    """Save the model as a Hugging Face folder."""
    folder = tmp_path_factory.mktemp("hf") / "tiny-model"
    hf.save(folder, model, params, chat.tokenizer)
    return folder


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory, params):
    """Make a run folder as training does, with a checkpoint of policy version 5."""
    folder = RunFolder(tmp_path_factory.mktemp("runs") / "tiny-run")
    config = cli.load_recipe([QUICKSTART], ["MeshSpec.data = 1"])
    plan = check_run(config.value)
    folder.prepare(config, fresh=False)
    state = make_trainer(plan, 0, {}).states.init(params)
    progress = RunProgress(total_steps=5, step=5, version=5)
    folder.checkpoints.save(folder.checkpoints.next_name(progress), state, progress)
    return folder.path


def test_a_model_folder_is_loaded(folder, model, params, chat):
    engine, loaded, version, served = serve.load(model=folder, max_context=64)
    jax.tree.map(np.testing.assert_array_equal, loaded, model.apart(params))
    assert (served.name, served.max_context, version) == ("tiny-model", 64, 0)
    assert engine.cfg.max_context == 64 and served.stop_ids == chat.stop_ids
    engine, loaded, *_ = serve.load(model=folder, max_context=64, quantization="int8", kv_dtype="fp8")
    assert loaded["layers"][0]["q"].dtype == np.int8 and engine.path.stored == "float8_e4m3fn"


@pytest.mark.slow
def test_the_command_serves_and_drains(run_folder):
    env = os.environ | {"PYTHONPATH": str(ROOT), "ROLLJAX_API_KEY": KEY}
    env["XLA_FLAGS"] = "--xla_force_host_platform_device_count=1"
    sizes = ["--slots", "8", "--max_context", "64", "--prefill_chunk", "32", "--speculate", "3"]
    sizes += ["--quantization", "int8", "--kv_dtype", "fp8"]
    command = [sys.executable, "-m", "rolljax.serve", "--run", str(run_folder), "--port", "0", *sizes]
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        line = process.stdout.readline()
        assert line, process.stderr.read()
        url = re.search(r"http://127\.0\.0\.1:\d+/v1", line)[0]
        assert "tiny-run" in line and "8 slots" in line and "64" in line and "curl" in line and KEY not in line
        assert httpx2.get(url.replace("/v1", "/ready")).status_code == 200
        metrics = httpx2.get(url.replace("/v1", "/metrics"), headers={"Authorization": f"Bearer {KEY}"}).text
        assert "rolljax_drafted_tokens_total 0.0" in metrics
        with openai.OpenAI(base_url=url, api_key=KEY, max_retries=0, timeout=60) as client:
            assert client.models.list().data[0].id == "tiny-run"
            many = {"n": 64, "max_tokens": 60, "stream": True, "extra_body": IDS | {"ignore_eos": True}}
            stream = client.completions.create(model="tiny-run", prompt="x", **many)
            first = next(stream)
            process.send_signal(signal.SIGTERM)
            rest = list(stream)
        choices = [choice for chunk in [first, *rest] for choice in chunk.choices]
        assert sum(len(getattr(c, "token_ids", [])) for c in choices) == 64 * 60
        assert sum(c.finish_reason == "length" for c in choices) == 64
        assert {v for c in choices for v in getattr(c, "versions", [])} == {5}
        out, err = process.communicate(timeout=30)
        assert process.returncode == 0, err
        assert out == "" and "Traceback" not in err
        assert url.replace("/v1", "/ready") in err and "compiled 4 of 8 programs" in err
    finally:
        process.kill()


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--run", "nowhere"], ["--run", "not a run folder"]),
        (["--model", "nowhere"], ["--model", "config.json"]),
        (["--model", "{folder}", "--port", "70000"], ["--port", "65535"]),
        (["--model", "{folder}", "--port", "{taken}"], ["--port", "another port"]),
        (["--model", "{folder}", "--host", "256.1.1.1"], ["--host"]),
        (["--model", "{folder}", "--max_context", "5000", "--port", "0"], ["--max_context", "4096"]),
        (["--model", "{folder}", "--slots", "0", "--port", "0"], ["slots"]),
        (["--model", "{folder}", "--api_key", ",", "--port", "0"], ["--api_key"]),
        (["--model", "{folder}", "--drain_s", "nan", "--port", "0"], ["--drain_s"]),
    ],
)
def test_wrong_arguments(folder, running, capsys, argv, says):
    argv = [a.format(folder=folder, taken=running.address[1]) for a in argv]
    assert serve.main(argv) == 2
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err and not captured.out
    for part in says:
        assert part in captured.err, captured.err


@pytest.mark.parametrize(("host", "made_up"), [("127.0.0.1", False), ("0.0.0.0", True)])
def test_an_address_that_is_open_to_others_gets_a_key(folder, capsys, monkeypatch, host, made_up):
    argv = ["--model", str(folder), "--host", host, "--port", "0", "--slots", "0"]  # ends before it listens
    assert serve.main(argv) == 2
    assert bool(re.search(r"^key.*: \S{32}$", capsys.readouterr().out, re.M)) == made_up
    monkeypatch.setenv("ROLLJAX_API_KEY", "a, b")
    assert serve.main(argv) == 2
    assert not capsys.readouterr().out
    assert serve.read_keys(None) == ("a", "b") and serve.read_keys("c") == ("c",)
