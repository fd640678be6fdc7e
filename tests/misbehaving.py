"""A server over real HTTP, in a process of its own, that misbehaves in as many ways as there are entries in `BEHAVIOURS`.

A request names a behaviour in its body, `do gzip_bomb`, or in its path, `/do=gzip_bomb/v1/models`. A judge's verdict of the form that is asked for is the
right one of `FORMS` where an answer may be used, and the wrong one where it may not. At `/in_turn/v1` the server goes
through all faults that take no time, one for each request, whatever is asked, and then answers.

    python -m tests.misbehaving         # prints its port
"""

import codecs
import contextlib
import dataclasses
import gzip
import itertools
import json
import re
import socket
import socketserver
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path

FORMS = {
    "comparison": ('{"better"', {"better": "tie"}, {"better": "a"}),
    "labels": ('"verdict"', {"verdict": "fair"}, {"verdict": "good"}),
    "veto": ('"made_up"', {"score": 3, "made_up": False}, {"score": 9, "made_up": True}),
    "score": ("", {"score": 3}, {"score": 9}),
}
"""Forms of a verdict: what a question of this form has in it, the right verdict, and a wrong one."""
CRITIQUE = "Therefore, the scores are <Score 1>{}</Score 1> and <Score 2>{}</Score 2>."


def texts(asked):
    """Return the right and a wrong answer to a question."""
    if "<Score 1>" in asked:
        return CRITIQUE.format(50, 50), CRITIQUE.format(0, 100)
    _, right, wrong = next(form for form in FORMS.values() if form[0] in asked)
    return json.dumps(right), json.dumps(wrong)


@dataclasses.dataclass(frozen=True)
class Behaviour:
    """act: writes to a connection, given the right and a wrong text. ends: what a client may make of it: an `answer`,
    which is right, a `fault`, or `lost` where no second request can help. slow: it never ends; the client's deadline
    does. heavy: it costs a second of CPU. keeps: the connection stays open for the next request."""

    act: Callable
    ends: str
    slow: bool = False
    heavy: bool = False
    keeps: bool = False


BEHAVIOURS = {}


def behaves(ends="fault", *, slow=False, heavy=False):
    def add(act):
        BEHAVIOURS[act.__name__] = Behaviour(act, ends, slow, heavy)
        return act

    return add


def completion(text, finish="stop", **changes):
    """Return a chat completion as JSON text; `changes` are fields of its choice."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": finish} | changes
    return json.dumps({"choices": [choice], "usage": {"completion_tokens": 1}})


def http(body, *headers, status="200 OK", kind="application/json", length=None):
    """Return a response as bytes."""
    body = body.encode() if isinstance(body, str) else body
    lines = [f"HTTP/1.1 {status}", *([f"Content-Type: {kind}"] if kind else []), *headers]
    if length is not False:
        lines.append(f"Content-Length: {len(body) if length is None else length}")
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def sends(name, make, ends="fault", **how):
    """Register a behaviour that sends the bytes that `make` makes of the right and the wrong text."""
    BEHAVIOURS[name] = Behaviour(lambda to, right, wrong: to(make(right, wrong)), ends, **how)


def chunked(*pieces, end=b"0\r\n\r\n"):
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + end


def bomb(blocks):
    """Return gzip of that many times 64 MiB of spaces, as one stream, in 64 KiB for each."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    block = packer.compress(b" " * (64 << 20)) + packer.flush(zlib.Z_FULL_FLUSH)
    return b"\x1f\x8b\x08\0\0\0\0\0\0\xff" + block * blocks


sends("plain", lambda r, w: http(completion(r)), "answer", keeps=True)
sends("answers_twice", lambda r, w: http(completion(r)) + http(completion(w)), "answer", keeps=True)

# ---- connections

sends("closes", lambda r, w: b"")
sends("closes_in_status", lambda r, w: b"HTTP/1.1 2")
sends("closes_in_headers", lambda r, w: b"HTTP/1.1 200 OK\r\nContent-Type: appl")
sends("not_http", lambda r, w: b"SSH-2.0-OpenSSH_9.6\r\n")
sends("tls_alert", lambda r, w: b"\x15\x03\x01\x00\x02\x02\x28")
sends("http_0_9", lambda r, w: completion(w).encode())
sends("http_3_7", lambda r, w: http(completion(r)).replace(b"HTTP/1.1", b"HTTP/3.7"), "answer")
sends("no_status", lambda r, w: http(completion(w)).replace(b" 200 OK", b""))
sends("status_of_letters", lambda r, w: http(completion(w), status="OK"))
sends("header_without_colon", lambda r, w: http(completion(w), "no colon here"))
sends("header_with_nul", lambda r, w: http(completion(w), "X: a\0b"))
sends("header_of_256_kib", lambda r, w: http(completion(w), "X: " + "a" * (1 << 18)))
sends("headers_without_number", lambda r, w: http(completion(w), *(f"X-{i}: a" for i in range(20_000))))
sends(
    "cookies", lambda r, w: http(completion(r), *(f"Set-Cookie: c{i}={'a' * 500}; Path=/" for i in range(99))), "answer"
)
sends("switching_protocols", lambda r, w: http("", "Upgrade: x", status="101 Switching Protocols"))


@behaves()
def resets(to, right, wrong):
    to.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    to(http(completion(wrong))[:60])


# ---- lengths and chunks

sends("no_body", lambda r, w: http(""))
sends("shorter_than_said", lambda r, w: http(completion(w), length=10**6))
sends("longer_than_said", lambda r, w: http(completion(w), length=40), keeps=True)
sends("negative_length", lambda r, w: http(completion(w), length=-1))
sends("length_of_letters", lambda r, w: http(completion(w), length="many"))
sends("two_lengths", lambda r, w: http(completion(w), "Content-Length: 7"))
sends("length_of_30_digits", lambda r, w: http(completion(w), length=10**30))
sends("no_length", lambda r, w: http(completion(r), length=False), "answer")
sends("chunks", lambda r, w: chunked(*(bytes([b]) for b in completion(r).encode())), "answer")
sends("chunks_and_trailers", lambda r, w: chunked(completion(r).encode(), end=b"0\r\nX: y\r\n\r\n"), "answer")
sends("chunks_without_end", lambda r, w: chunked(completion(w).encode(), end=b""))
sends("chunk_cut", lambda r, w: chunked(end=b"ffff\r\n" + completion(w).encode()))
sends("chunk_size_of_letters", lambda r, w: chunked(end=b"zz\r\n" + completion(w).encode()))
sends("chunk_size_negative", lambda r, w: chunked(end=b"-5\r\n" + completion(w).encode()))
sends("chunk_size_of_a_mile", lambda r, w: chunked(end=b"f" * 300 + b"\r\n" + completion(w).encode()))
sends("chunk_longer_than_said", lambda r, w: chunked(end=b"3\r\n" + completion(w).encode() + b"\r\n0\r\n\r\n"))

# ---- time


@behaves(slow=True)
def hangs(to, right, wrong):
    to.wait()


@behaves(slow=True)
def hangs_behind_headers(to, right, wrong):
    to(http(completion(wrong))[:80])
    to.wait()


@behaves(slow=True)
def hangs_before_the_last_byte(to, right, wrong):
    to(http(completion(wrong))[:-1])
    to.wait()


@behaves(slow=True)
def drips_its_headers(to, right, wrong):
    to.drip(itertools.chain(b"HTTP/1.1 200 OK\r\nX: ", itertools.repeat(97)))


@behaves(slow=True)
def drips_its_body(to, right, wrong):
    to(http("", length=10**6))
    to.drip(itertools.repeat(32))


@behaves(slow=True)
def drips_chunks(to, right, wrong):
    to(chunked(end=b""))
    while to(b"1\r\n \r\n"):
        time.sleep(0.01)


@behaves(slow=True)
def drips_an_error(to, right, wrong):
    to(http("", status="503 Busy", length=10**6))
    to.drip(itertools.repeat(32))


@behaves(slow=True)
def says_continue_for_ever(to, right, wrong):
    while to(b"HTTP/1.1 100 Continue\r\n\r\n" * 50):
        pass


@behaves(heavy=True)
def body_without_end(to, right, wrong):
    to(http("", length=10**12))
    while to(b" " * 65536):
        pass


@behaves()
def error_without_end(to, right, wrong):
    to(http("", status="500 Oh", length=10**12))
    while to(b"x" * 65536):
        pass


# ---- packing

ZIP = "Content-Encoding: gzip"
sends("gzip", lambda r, w: http(gzip.compress(completion(r).encode()), ZIP), "answer")
sends("gzip_bomb", lambda r, w: http(bomb(100), ZIP), heavy=True)
sends("gzip_bomb_as_an_error", lambda r, w: http(bomb(100), ZIP, status="503 Busy"))
sends("gzip_cut", lambda r, w: http(gzip.compress(completion(w).encode())[:-4], ZIP))
sends("gzip_with_a_wrong_checksum", lambda r, w: http(gzip.compress(completion(w).encode())[:-8] + b"12345678", ZIP))
sends("gzip_and_more", lambda r, w: http(gzip.compress(completion(w).encode()) + b"more", ZIP))
sends("gzip_of_nothing", lambda r, w: http(gzip.compress(b""), ZIP))
sends("gzip_in_name_alone", lambda r, w: http(completion(w), ZIP))
sends(
    "gzip_twice",
    lambda r, w: http(gzip.compress(gzip.compress(completion(w).encode())), "Content-Encoding: gzip, gzip"),
)
sends("deflate", lambda r, w: http(zlib.compress(completion(w).encode()), "Content-Encoding: deflate"))
sends("brotli", lambda r, w: http(b"\x0b\x02\x80{}\x03", "Content-Encoding: br"))
sends("zstd", lambda r, w: http(b"\x28\xb5\x2f\xfd\0\0", "Content-Encoding: zstd"))
sends("packed_in_an_unknown_way", lambda r, w: http(completion(w), "Content-Encoding: rot13"))
sends("packed_a_hundred_times", lambda r, w: http(completion(w), "Content-Encoding: " + ", ".join(["gzip"] * 100)))

# ---- what is no JSON, or JSON that is made to hurt

sends("html", lambda r, w: http(f"<html><body>{w}</body></html>", kind="text/html"))
sends("events", lambda r, w: http(f"data: {completion(w)}\n\ndata: [DONE]\n\n", kind="text/event-stream"))
sends("another_type", lambda r, w: http(completion(r), kind="text/html"), "answer")
sends("no_type", lambda r, w: http(completion(r), kind=""), "answer")
sends("json_cut", lambda r, w: http(completion(w)[:-2]))
sends("json_twice", lambda r, w: http(completion(w) * 2))
sends("json_null", lambda r, w: http("null"))
sends("json_list", lambda r, w: http(f"[{completion(w)}]"))
sends("json_text", lambda r, w: http(json.dumps(completion(w))))
sends("json_deep", lambda r, w: http("[" * 10**6))
sends("json_deep_objects", lambda r, w: http('{"choices":' * 10**5))
sends("json_of_a_million_lists", lambda r, w: http('{"a":[' + "[]," * (5 << 20) + "0]}"), heavy=True)
sends("json_of_a_million_objects", lambda r, w: http('{"a":[' + '{"b":0},' * (2 << 20) + "0]}"), heavy=True)
sends(
    "json_of_many_values",
    lambda r, w: http('{"a":[' + '{"b":0},' * (1 << 18) + "0]," + completion(r)[1:]),
    "answer",
    heavy=True,
)
sends(
    "json_of_a_million_floats",
    lambda r, w: http('{"a":[' + "0.5," * (900 << 10) + "0]," + completion(r)[1:]),
    "answer",
    heavy=True,
)
sends("json_with_a_million_digits", lambda r, w: http('{"a":' + "9" * 10**6 + "," + completion(w)[1:]))
sends(
    "json_with_many_long_numbers",
    lambda r, w: http('{"a":[' + ("9" * 4299 + ",") * 3800 + "0]," + completion(r)[1:]),
    "answer",
    heavy=True,
)
sends("json_with_400_digits", lambda r, w: http(completion(w)[:-2] + "9" * 400 + "}}"))
sends(
    "json_with_40_thousand_keys_and_one_twice",
    lambda r, w: http("{" + "".join(f'"k{i}":0,' for i in range(40_000)) + '"k39999":1,' + completion(w)[1:]),
)
sends("key_twice", lambda r, w: http(completion(r)[:-1] + "," + completion(w)[1:]))
sends("content_twice", lambda r, w: http(completion(r).replace('"role": "assistant"', '"content": "x"')))
sends("nan", lambda r, w: http(completion(w)[:-1] + ', "x": NaN}'))
sends("infinity", lambda r, w: http(completion(w).replace('"completion_tokens": 1', '"completion_tokens": Infinity')))
sends(
    "number_too_large", lambda r, w: http(completion(w).replace('"completion_tokens": 1', '"completion_tokens": 1e999'))
)
sends("not_utf_8", lambda r, w: http(completion(w).encode().replace(b"assistant", b"assist\xff\xfe")))
sends("utf_16", lambda r, w: http(completion(w).encode("utf-16"), kind="application/json; charset=utf-16"))
sends("utf_16_unsaid", lambda r, w: http(completion(w).encode("utf-16")))
sends("utf_32_unsaid", lambda r, w: http(completion(w).encode("utf-32")))
sends("bom", lambda r, w: http(codecs.BOM_UTF8 + completion(r).encode()), "answer")
sends("surrogate", lambda r, w: http(completion("\ud800 " + r)), "answer")
sends("surrogate_bytes", lambda r, w: http(completion(w).encode().replace(b"assistant", b"\xed\xa0\x80")))
sends("charset_unknown", lambda r, w: http(completion(w), kind="application/json; charset=klingon"))
sends("charset_unknown_and_garbage", lambda r, w: http("<html>", kind="text/html; charset=klingon"))
sends("charset_that_is_none", lambda r, w: http(completion(w), kind="application/json; charset=hex"))
sends("charset_utf_7", lambda r, w: http(completion(w), kind='application/json; charset="utf-7"'))
sends("charset_in_capitals", lambda r, w: http(completion(r), kind='application/json; Charset="UTF-8"'), "answer")
sends("text_of_32_mib", lambda r, w: http(completion("x" * (32 << 20) + w)), heavy=True)
sends("text_of_8_mib", lambda r, w: http(completion("x" * (8 << 20) + r)), "answer", heavy=True)

# ---- what is no chat completion

BAD = {
    "no_choices": '{"choices": []}',
    "nothing": "{}",
    "error_with_200": '{"error": {"message": "overloaded"}}',
    "choices_of_null": '{"choices": null}',
    "choices_of_text": '{"choices": "abc"}',
    "choices_by_name": '{"choices": {"0": {}}}',
    "choice_of_text": '{"choices": ["abc"]}',
    "choice_without_message": '{"choices": [{"text": "abc", "finish_reason": "stop"}]}',
    "message_of_null": '{"choices": [{"message": null}]}',
    "message_of_list": '{"choices": [{"message": [1]}]}',
    "message_of_text": '{"choices": [{"message": "abc"}]}',
}
for name, body in BAD.items():
    sends(name, lambda r, w, body=body: http(body))
for name, value in {
    "number": 4,
    "zero": 0,
    "true": True,
    "false": False,
    "list": ["x"],
    "object": {"text": "x"},
}.items():
    sends(f"content_of_{name}", lambda r, w, value=value: http(completion(value)))
for name, value in {"list": ["stop"], "object": {}, "number": 7, "true": True, "unknown": "tired", "error": "error",
                    "abort": "abort", "no_resource": "insufficient_system_resource"}.items():  # fmt: skip
    sends(f"finish_of_{name}", lambda r, w, value=value: http(completion(w, value)))
for name, value in {"negative": [-1], "huge": [2**31], "float": [1.5], "text": "123", "texts": ["1"], "object": {"1": 2},
                    "null": [None], "long": [10**400]}.items():  # fmt: skip
    sends(f"token_ids_{name}", lambda r, w, value=value: http(completion(w, token_ids=value)))
for name, value in {"huge": "-1e308", "long": "-" + "9" * 400, "nan": "NaN", "infinite": "-Infinity", "positive": "3.0",
                    "text": '"-1"', "null": "null", "true": "true", "list": "[-1]"}.items():  # fmt: skip
    field = {"logprobs": {"content": [{"token": "a", "logprob": "HERE"}]}, "token_ids": [5]}
    sends(f"logprob_{name}", lambda r, w, v=value, f=field: http(completion(w, **f).replace('"HERE"', v)))
sends("logprobs_of_text", lambda r, w: http(completion(w, logprobs="many")))
for name, value in {"list": "[1]", "text": '"5"', "negative": '{"completion_tokens": -5}', "of_text": '{"completion_tokens": "5"}',
                    "half": '{"completion_tokens": 0.5}'}.items():  # fmt: skip
    sends(f"usage_{name}", lambda r, w, v=value: http(completion(w).replace('{"completion_tokens": 1}', v)))

# ---- what holds no verdict

sends("cut_by_length", lambda r, w: http(completion(w, "length")), "lost")
sends("cut_by_max_tokens", lambda r, w: http(completion(w, "MAX_TOKENS")), "lost")
sends("cut_by_a_filter", lambda r, w: http(completion(w, "content_filter")), "lost")
sends("content_of_null", lambda r, w: http(completion(None)), "lost")
sends(
    "verdict_in_its_thoughts",
    lambda r, w: http(completion(None, message={"content": None, "reasoning_content": w})),
    "lost",
)
sends("verdict_and_more", lambda r, w: http(completion(w + " or so")), "lost")
sends("verdict_cut", lambda r, w: http(completion(w[:-2])), "lost")
for name, mark in {"7000": "7000", "negative": "-1", "400_digits": "9" * 400, "5000_digits": "9" * 5000, "nan": "NaN", "infinite": "1e999",
                   "list": "[9]", "object": '{"x": 9}', "text": '"9"', "true": "true", "null": "null"}.items():  # fmt: skip
    verdict = f'{{"score": {mark}, "verdict": {mark}, "better": {mark}, "made_up": {mark}}}'
    sends(f"verdict_of_{name}", lambda r, w, text=verdict: http(completion(text)), "lost")
sends("verdict_twice", lambda r, w: http(completion(r[:-1] + ", " + w[1:])), "lost")
sends("verdict_nested", lambda r, w: http(completion('{"a": ' * 5000 + w + "}" * 5000)), "lost")

# ---- status

sends("redirect_to_itself", lambda r, w: http(completion(w), "Location: /v1", status="302 Found"), "lost")
sends("redirect_elsewhere", lambda r, w: http(completion(w), "Location: http://127.0.0.1:9/", status="307 Go"), "lost")
sends("redirect_nowhere", lambda r, w: http(completion(w), "Location: http://[", status="301 Moved"))
sends("redirect_without_address", lambda r, w: http(completion(w), status="301 Moved"), "lost")
sends("not_modified", lambda r, w: http("", status="304 Not Modified"), "lost")
sends("no_content", lambda r, w: b"HTTP/1.1 204 No Content\r\n\r\n", "lost")
sends("partial_content", lambda r, w: http(completion(w), status="206 Partial Content"), "lost")
sends("created", lambda r, w: http(completion(w), status="201 Created"), "lost")
sends("status_400", lambda r, w: http(completion(w), status="400 Bad"), "lost")
sends("status_400_too_long", lambda r, w: http('{"error": "maximum context length"}', status="400 Bad"), "lost")
for code in (401, 403, 404):
    sends(f"status_{code}", lambda r, w, code=code: http(completion(w), status=f"{code} No"), "lost")
for code in (408, 429, 500, 502, 503, 504, 529):
    sends(f"status_{code}", lambda r, w, code=code: http(completion(w), status=f"{code} No"))
for name, value in {"a_date": "Wed, 21 Oct 2037 07:28:00 GMT", "nan": "NaN", "negative": "-5"}.items():
    sends(f"retry_after_{name}", lambda r, w, v=value: http("busy", f"Retry-After: {v}", status="429 No"))
sends(
    "status_503_of_an_unknown_charset",
    lambda r, w: http(b"\xff\xfe", status="503 Busy", kind="text/plain; charset=klingon"),
)


class Connection(socketserver.BaseRequestHandler):
    """One request, answered as its path says."""

    def handle(self):
        self.socket = self.request
        with contextlib.suppress(OSError, ValueError):
            while self._answer().keeps:
                pass

    def _answer(self):
        head, body = self._read()
        asked = body.decode()
        if b"/in_turn/" in head:
            with self.server.lock:
                name = next(self.server.turns, "plain")
            right, wrong = "4", "5"
        else:
            name = re.search(r"do[ =](\w+)", asked + head.decode())[1]
            right, wrong = texts(json.loads(asked)["messages"][-1]["content"] if "messages" in asked else "")
        BEHAVIOURS[name].act(self, right, wrong)
        return BEHAVIOURS[name]

    def _read(self):
        data = b""
        while b"\r\n\r\n" not in data:
            data += (more := self.request.recv(65536))
            if not more:
                raise ValueError
        head, _, body = data.partition(b"\r\n\r\n")
        size = next((int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")), 0)
        while len(body) < size:
            body += self.request.recv(65536)
        return head, body

    def __call__(self, data):
        """Send; False if the client is gone."""
        try:
            self.request.sendall(data)
        except OSError:
            return False
        return True

    def drip(self, data):
        for byte in data:
            if not self(bytes([byte])):
                return
            time.sleep(0.01)

    def wait(self):
        """Wait until the client goes."""
        with contextlib.suppress(OSError):
            while self.request.recv(65536):
                pass


class Server(socketserver.ThreadingTCPServer):
    daemon_threads = allow_reuse_address = True
    request_queue_size = 1024

    def handle_error(self, *_):
        pass  # clients that gave up


def faults_in_turn():
    """Return the names of fast behaviours that lead to a retry."""
    return [name for name, b in BEHAVIOURS.items() if b.ends == "fault" and not b.slow and not b.heavy]


@contextlib.contextmanager
def misbehaving():
    """Run the server and yield its address."""
    command = [sys.executable, "-m", "tests.misbehaving"]
    with subprocess.Popen(
        command, cwd=Path(__file__).parents[1], stdout=subprocess.PIPE, stdin=subprocess.PIPE
    ) as process:
        port = int(process.stdout.readline())
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


def main():
    server = Server(("127.0.0.1", 0), Connection)
    server.lock, server.turns = threading.Lock(), iter(faults_in_turn())
    sys.stdout.write(f"{server.server_address[1]}\n")
    sys.stdout.flush()
    threading.Thread(target=lambda: sys.stdin.read() and None or server.shutdown(), daemon=True).start()
    server.serve_forever()


if __name__ == "__main__":
    main()
