"""The HTTP server among hostile clients: incomplete requests, floods, and nonsense.

Every attack goes to a real server on the loopback address, and is over within seconds.
"""

import contextlib
import json
import re

import httpx2
import jax
import pytest

from rolljax.sampler.client import Sampler
from rolljax.sampler.engine import Engine
from rolljax.sampler.settings import SamplerConfig
from rolljax.serving import http_server
from rolljax.serving.schema import ServedModel
from rolljax.serving.server import LARGE_BODY, ServerLimits
from rolljax.trainer.mesh import BATCH_AXES, MeshSpec
from rolljax.trainer.publish import make_publish

from .serving import KEY, Running, connect, everything, head, received, status, until

CONTEXT = 64
SMALL = json.dumps({"prompt": "x", "max_tokens": 1}).encode()


@pytest.fixture(scope="module")
def sampler(model, params, chat):
    mesh = MeshSpec().build(jax.devices()[:1])
    cfg = SamplerConfig(slots=4, max_context=CONTEXT, prefill_chunk=32, steps_per_dispatch=1, programs="few")
    sampler = Sampler(
        Engine(model, cfg, mesh, BATCH_AXES),
        make_publish(mesh, model)(params),
        0,
        vocabulary=chat.vocabulary,
        longest_prompt=0,
    )
    yield sampler
    sampler.close()


@pytest.fixture
def start(sampler, model, chat):
    """Return a function that starts servers over one sampler with their own limits."""
    with contextlib.ExitStack() as stack:

        def start(keep_alive_s=5, **limits):
            limits = {"head_s": 600, "body_s": 600} | limits
            served = ServedModel("tiny", chat.tokenizer, chat, model.cfg.vocab_size, CONTEXT)
            running = Running(sampler, served, ServerLimits(keys=(KEY,), **limits), keep_alive_s)
            stack.callback(running.close)
            return running

        yield start


def works(running):
    """Return whether the server answers normally."""
    return running.post("/v1/completions", SMALL).status_code == 200


def connections(running):
    return len(running.server.server_state.connections)


# ---- incomplete requests


def test_unfinished_bodies_hold_no_slot(start):
    running = start(concurrency=40)
    unfinished = [connect(running, head("Content-Length: 100") + b'{"prompt"') for _ in range(64)]
    until(lambda: connections(running) == 64)
    assert works(running) and running.service.open == 0
    for connection in unfinished[:5]:
        connection.sendall(b" " * 91)
        assert status(received(connection, b"JSON")) == 400
    for connection in unfinished[5:]:
        connection.close()
    until(lambda: connections(running) == 0)
    assert works(running) and running.service.open == running.service._held_bytes == 0


def test_a_body_has_a_deadline(start):
    running = start(body_s=0.3)
    connection = connect(running, head("Content-Length: 100") + b'{"prompt"')
    answer = received(connection, b"--body_s")
    assert status(answer) == 408 and b"9 bytes" in answer
    chunked = connect(running, head("Transfer-Encoding: chunked") + b"5\r\nhello\r\n")
    assert status(received(chunked, b"--body_s")) == 408
    assert works(running)


def test_a_head_has_a_deadline(start):
    running = start(head_s=2)
    silent, slow = connect(running), connect(running, b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-A: ")
    again = connect(running, head(body=SMALL))
    assert everything(silent) == b""
    assert status(everything(slow)) == 408
    received_first = b""
    while b'"usage"' not in received_first:
        received_first += again.recv(65536)
    again.sendall(b"POST /v1/compl")
    assert b"408" in everything(again), "the second request of a connection has one as well"
    assert works(running)


def test_connections_that_wait_give_way(start):
    running = start(concurrency=4)
    waiting = [connect(running, data) for data in (b"", b"GET /hea", head("Content-Length: 9"))]
    waiting += [connect(running) for _ in range(40)]
    until(lambda: connections(running) <= running.service.limits.bounds.connections)
    assert works(running)
    assert everything(waiting[0]) == everything(waiting[2]) == b""
    for connection in waiting[3:]:
        connection.close()


def test_the_rest_of_a_refused_body_is_not_waited_for(start, monkeypatch):
    monkeypatch.setattr(http_server, "LINGER_S", 0.2)
    running = start()
    for lines in (["Content-Length: 99999999999"], ["Authorization: Bearer no", "Content-Length: 1000"]):
        answer = everything(connect(running, head(*lines) + b"x"))
        assert status(answer) in (413, 401)
    until(lambda: connections(running) == 0)
    assert works(running)


def test_large_bodies_share_what_is_held(start):
    running = start(body_bytes=4 * LARGE_BODY)
    begun = head(f"Content-Length: {4 * LARGE_BODY}") + b"[" * (4 * LARGE_BODY - 1)
    unfinished = [connect(running, begun) for _ in range(12)]
    until(lambda: running.service._held_bytes > running.service.limits.held_bytes - 3 * LARGE_BODY)
    refused = connect(running, begun)
    assert status(received(refused, b"large bodies")) == 429
    assert works(running), "bodies of an ordinary size are still accepted"
    for connection in unfinished:
        connection.close()
    until(lambda: running.service._held_bytes == 0)
    assert running.post("/v1/completions", b" " * (4 * LARGE_BODY)).status_code == 400


# ---- too much


def test_headers_are_bounded(start):
    running = start()
    many = head(*(f"X-{i}: 1" for i in range(2000)), body=SMALL)
    long = head(f"X-A: {'a' * 40_000}", body=SMALL)
    endless = b"POST / HTTP/1.1\r\nX-A: " + b"a" * 2**20
    trailers = head("Transfer-Encoding: chunked") + b"2\r\n{}\r\n0\r\n" + b"X-T: 1\r\n" * 2000
    for flood in (many, long, endless):
        assert status(everything(connect(running, flood))) in (431, 0)
    assert status(everything(connect(running, many))) == 431
    assert status(everything(connect(running, trailers))) in (400, 431, 0)
    assert status(everything(connect(running, head(path="/" + "a" * 10_000)))) == 414
    assert works(running)


def test_requests_on_one_connection_are_bounded_and_in_order(start):
    running = start()
    three = [head("X-N: 1", body=json.dumps({"prompt": "x", "max_tokens": n}).encode()) for n in (1, 2, 3)]
    last = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    answers = everything(connect(running, b"".join(three) + last))
    assert answers.count(b"HTTP/1.1 200") == 4
    assert [int(n) for n in re.findall(rb'"completion_tokens":(\d)', answers)] == sorted(
        int(n) for n in re.findall(rb'"completion_tokens":(\d)', answers)
    )
    flood = connect(running, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * 5000)
    assert everything(flood).count(b"HTTP/1.1 200") < 5000
    assert works(running)


def test_prompts_are_bounded_before_they_are_tokenised(start, monkeypatch):
    running = start()
    vocabulary, encoded = running.service.served.vocabulary, []
    encode = vocabulary.encode
    monkeypatch.setattr(
        vocabulary, "encode", lambda text, **kw: encoded.append(len(text)) or encode(text, **kw), raising=False
    )
    huge, large = "x" * (7 * 2**20), "x" * 2**20
    calls = {
        "/v1/completions": [{"prompt": huge}, {"prompt": ["x", large]}, {"prompt": [1] * 2**18}],
        "/v1/chat/completions": [
            {"messages": [{"role": "user", "content": large}]},
            {"messages": [{"role": "user", "content": [{"type": "text", "text": large}]}]},
            {"messages": [{"role": "user", "content": "x"}] * 2**15},
            {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"documents_": [large]}},
        ],
    }
    for path, bodies in calls.items():
        for body in bodies:
            reply = running.post(path, body)
            assert reply.status_code == 400 and reply.json()["error"]["code"] == "context_length_exceeded", reply.text
    assert max(encoded, default=0) < 2**15
    assert works(running)


# ---- nonsense

LINES = [  # request lines, with ordinary headers behind them
    b"GET / HTTP/0.9", b"GET /", b"GET / HTTP/2.0", b"GET / HTTP/1.9", b"GET / HTTP/9.9", b"GET  /  HTTP/1.1", b"\x00 / HTTP/1.1",
    b"G\xc3\x89T / HTTP/1.1", b"GET \xff HTTP/1.1", b"GET /\x00 HTTP/1.1", b"GET http://[::1 HTTP/1.1", b"GET http://a:b/ HTTP/1.1",
    b"GET * HTTP/1.1", b"OPTIONS * HTTP/1.1", b"CONNECT a:1 HTTP/1.1", b"TRACE / HTTP/1.1", b"HEAD /health HTTP/1.1",
    b"PUT /v1/completions HTTP/1.1", b"DELETE /v1/models HTTP/1.1", b"PATCH /metrics HTTP/1.1", b"PRI * HTTP/2.0", b"FOO / HTTP/1.1",
    b"GET /v1/models/%ff%00 HTTP/1.1", b"GET /v1/models/..%2f..%2fetc HTTP/1.1", b"GET //v1//models HTTP/1.1", b"GET /v1/models/ HTTP/1.1",
    b"GET /v1/models/%f0%9f%99%82 HTTP/1.1", b"GET /?%%% HTTP/1.1", b"GET /metrics?a=\xff HTTP/1.1", b"GET /%zz HTTP/1.1", b"SOURCE / ICE/1.0",
]  # fmt: skip
FIELDS = [  # headers of a POST with a small body, after its length
    "Content-Length: 5", "Content-Length: -1", "Content-Length: x", "Content-Length: 99999999999999999999999", "Content-Length: 0x10",
    "Content-Length: +34", "Content-Length:", "Transfer-Encoding: chunked", "Transfer-Encoding: gzip", "Transfer-Encoding: chunked, chunked",
    "Transfer-Encoding: xchunked", "Transfer-Encoding:\tchunked", "Expect: 100-continue", "Expect: magic", "Upgrade: websocket",
    "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: x\r\nSec-WebSocket-Version: 13", "Connection: Upgrade\r\nUpgrade: h2c",
    "Connection: close, keep-alive", "Connection: \x01", "X: \x00", "X: \xff\xfe", "X : y", ": y", "X", " folded", "X: y\r\n folded",
    "X: " + "y" * 9000, "Content-Type: application/json; charset=utf-16", "Content-Type: \xe9", "Content-Type: application/json\r\nContent-Type: x/y",
    "Content-Encoding: br", "Authorization: Bearer \xe9", "Authorization: x" + "y" * 5000, "Host: a\r\nHost: b", "Cookie: " + "a=b;" * 500,
]  # fmt: skip
CHUNKS = [
    b"", b"0\r\n\r\n", b"zz\r\n", b"-1\r\n", b"5\r\nab", b"1\r\nabc\r\n0\r\n\r\n", b"FFFFFFFFFFFFFFFFF\r\nx", b"7fffffffffffffff\r\nx",
    b"2;" + b"a" * 9000 + b"\r\n{}\r\n0\r\n\r\n", b"2\n{}\n0\n\n", b"2\r\n{}\r\n0\r\nX: y\r\n\r\n", b"2\r\n{}\r\n0\r\n\x00\r\n\r\n", b"\r\n\r\n\r\n",
    b"2 \r\n{}\r\n0\r\n\r\n", b"0x2\r\n{}\r\n0\r\n\r\n", b"1\r\n{\r\n1\r\n}\r\n0\r\n\r\n",
]  # fmt: skip
BYTES = [
    b"", b"\r\n", b"\n" * 100, b"\x00" * 100, b"\xff" * 100, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200), b"SSH-2.0-x\r\n",
    b"EHLO x\r\n", b"{}\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\n", b"GET", b"GET / HTTP/1.1\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
]  # fmt: skip
TEXTS = [  # bodies
    b"\x00", b"\xff\xfe{\x00}\x00", b"\xef\xbb\xbf{}", b"{}" * 2, b"[" * 50_000, b"[" * 50_000 + b"]" * 50_000, b'{"a":' * 5000 + b"1" + b"}" * 5000,
    b'{"prompt": "\\ud800"}', b'{"prompt": "\\udc00\\ud800"}', b'{"\\ud800": 1}', b'{"prompt": NaN}', b'{"prompt": "x", "seed": 1e400}',
    b'{"prompt": "x", "n": 1e2}', b'{"prompt": "x", "n": -0}', b'{"prompt": "\x00"}', b'{"prompt": "\\u0000\\uffff", "max_tokens": 1}', b"null", b"0",
    b'"x"', b"nan", b"{'prompt': 'x'}", b'{"prompt": "x",}', b'{"prompt": "x"} // no', b'{"__class__": "x", "prompt": "x"}', b"9" * 9000,
    b'{"prompt": "\xf0\x9f\x99"}', b'{"prompt": "' + "\U0001f642".encode() * 900 + b'"}', b'{"prompt": "\\uD83D\\uDE42", "max_tokens": 1}',
]  # fmt: skip


def odd_requests():
    for line in LINES:
        yield line + b"\r\nHost: x\r\nAuthorization: Bearer sesame\r\nConnection: close\r\n\r\n"
    for field in FIELDS:
        yield head(field, body=SMALL)
    for chunk in CHUNKS:
        yield head("Transfer-Encoding: chunked") + chunk
    yield from BYTES
    for path in ("/v1/completions", "/v1/chat/completions"):
        for text in TEXTS:
            yield head(path=path, body=text)


def server_errors(running):
    text = httpx2.get(f"{running.url}/metrics", headers={"Authorization": f"Bearer {KEY}"}).text
    return [line for line in text.splitlines() if re.search('http_requests_total.*status="5', line)]


def test_no_odd_request_is_an_internal_error(start, capfd):
    running = start(head_s=5, body_s=5, keep_alive_s=0.5)
    requests = list(odd_requests())
    assert len(requests) >= 150
    statuses = [status(everything(c)) for c in [connect(running, data) for data in requests]]
    assert [(r[:80], s) for r, s in zip(requests, statuses, strict=True) if s >= 500] == []
    assert statuses.count(200) > 5 and statuses.count(400) > 50
    assert works(running) and server_errors(running) == []
    until(lambda: running.service.open == 0 and not running.service.generations and connections(running) == 0)
    assert "Traceback" not in capfd.readouterr().err


NAMES = [
    "prompt", "messages", "model", "temperature", "top_p", "top_k", "min_p", "max_tokens", "n", "seed", "stop", "stop_token_ids", "echo",
    "logprobs", "top_logprobs", "logprobs_mode", "return_token_ids", "priority", "ignore_eos", "tools", "stream", "tool_choice",
    "response_format", "logit_bias", "best_of", "user", "chat_template_kwargs", "stream_options", "max_completion_tokens", "suffix",
]  # fmt: skip
WRONG = [
    True, 0, -1, 1.5, 1e308, 2**64, -(2**63), "", "x", "\x00", [], [[]], [None], [{}], {}, {"a": 1}, {"role": "user"}, [1, [2, [3]]], ["\u202e"],
    [{"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 500}}]}],
]  # fmt: skip


def every_type(running, values):
    bodies = {
        "/v1/completions": {"prompt": "x", "max_tokens": 1},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
    }
    sent = 0
    with httpx2.Client(base_url=running.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=60) as http:
        for path, body in bodies.items():
            for name in NAMES:
                for value in values:
                    reply = http.post(path, json=body | {name: value})
                    assert reply.status_code < 500, (path, name, value, reply.text)
                    sent += 1
    assert server_errors(running) == [] and works(running)
    return sent


def test_wrong_types(start):
    assert every_type(start(), WRONG[:1] + WRONG[-1:]) == 120


@pytest.mark.sweep
def test_wrong_types_everywhere(start):
    assert every_type(start(), WRONG) == 1200


@pytest.mark.sweep
def test_an_attack_in_waves_leaves_nothing_behind(start):
    """All attacks at once, repeatedly; in between the server answers."""
    running = start(concurrency=16, head_s=0.5, body_s=0.5)
    for _ in range(5):
        held = [connect(running, data) for data in odd_requests()]
        held += [connect(running, head("Content-Length: 50") + b"{") for _ in range(64)]
        assert works(running)
        for connection in held:
            connection.close()
    until(lambda: connections(running) == 0, 30)
    assert running.service.open == running.service._held_bytes == 0 and server_errors(running) == []
