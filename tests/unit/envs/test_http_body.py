"""Bodies of foreign servers: what is unpacked, what is refused, and that nothing else is raised."""

import gzip
import json
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolljax.chat_models.completion import MAX_PARTS, read_object, read_reply
from rolljax.envs.data import rows
from rolljax.envs.http_body import MAX_PIECE, BadBody, Unpacker
from rolljax.envs.text import read_json
from rolljax.model.files import parse_json
from rolljax.serving import schema


def unpacked(data, encoding="gzip", max_bytes=1 << 20, cuts=()):
    """Unpack a body that arrives in pieces."""
    unpacker, found = Unpacker(encoding, max_bytes), []
    for start, end in zip((0, *cuts), (*cuts, len(data)), strict=True):
        found += unpacker.feed(data[start:end])
    unpacker.end()
    assert all(len(piece) <= MAX_PIECE for piece in found)
    return b"".join(found)


@given(st.binary(max_size=300), st.lists(st.integers(0, 40), max_size=4).map(sorted), st.booleans(), st.integers(0, 3))
def test_whatever_the_pieces_the_body_is_the_same(data, cuts, packed, long):
    data = data + b"x" * (long * MAX_PIECE)
    body = gzip.compress(data) if packed else data
    cuts = [min(cut, len(body)) for cut in cuts]
    assert unpacked(body, "gzip" if packed else "", cuts=cuts) == data


def test_a_small_body_that_unpacks_to_a_large_one_is_not_unpacked():
    unpacker, size = Unpacker("gzip", 1 << 20), 0
    with pytest.raises(BadBody, match="more than 1048576 bytes"):
        for piece in unpacker.feed(gzip.compress(b" " * (64 << 20), 9)):
            size += len(piece)
    assert size <= 1 << 20


@pytest.mark.parametrize(
    ("body", "encoding", "says"),
    [
        (gzip.compress(b"x", mtime=0)[:-3], "gzip", "ends too early"),
        (gzip.compress(b"x", mtime=0) + b"y", "gzip", "data after the end of its gzip"),
        (gzip.compress(b"x", mtime=0) * 2, "gzip", "data after the end of its gzip"),
        (b"plain", "gzip", "not gzip"),
        (zlib.compress(b"x"), "gzip", "not gzip"),
        (b"x", "gzip, gzip", "packed as"),
        (b"x", "br", "packed as"),
        (b"x" * 101, "", "more than 100 bytes"),
        (gzip.compress(b"x" * 101, mtime=0), "GZIP", "more than 100 bytes"),
    ],
)
def test_a_body_that_cannot_be_used(body, encoding, says):
    with pytest.raises(BadBody, match=says):
        unpacked(body, encoding, 100)


def test_a_stream_of_events_has_no_end_and_no_limit():
    packer = zlib.compressobj(wbits=zlib.MAX_WBITS | 16)
    unpacker, sent, found = Unpacker("gzip", None), b"", b""
    for i in range(50):
        event = b"data: %d" % i + b" " * MAX_PIECE + b"\n\n"
        sent += event
        found += b"".join(unpacker.feed(packer.compress(event) + packer.flush(zlib.Z_SYNC_FLUSH)))
        assert found == sent  # nothing waits for the next one


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**400), 10**400) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
FIELDS = ("choices", "usage", "prompt_token_ids")
CHOICE = ("message", "finish_reason", "token_ids", "logprobs")


@settings(max_examples=60)
@given(st.data())
def test_a_reply_is_a_chat_completion_or_a_bad_body(data):
    reply = {"choices": [{"message": {"content": "x"}, "finish_reason": "stop", "token_ids": [1], "logprobs": None}]}
    field = data.draw(st.sampled_from([*FIELDS, *CHOICE, "content", "completion_tokens", "logprob"]))
    value = data.draw(VALUES)
    if field in FIELDS:
        reply[field] = value
    elif field in CHOICE:
        reply["choices"][0][field] = value
    elif field == "content":
        reply["choices"][0]["message"][field] = value
    elif field == "completion_tokens":
        reply["usage"] = {field: value}
    else:
        reply["choices"][0]["logprobs"] = {"content": [{field: value}]}
    try:
        found = read_reply(json.dumps(reply).encode())
    except BadBody:
        return
    assert found.text == "x" or isinstance(value, str | type(None) | dict | list)
    assert all(-1e6 <= x <= 0.01 for x in found.sampler_logp) and all(0 <= i < 2**31 for i in found.token_ids)


def test_a_completion_of_a_prompt_is_read_as_strictly():
    choice = {"text": "x", "finish_reason": "length", "token_ids": [5], "logprobs": {"token_logprobs": [-0.5]}}
    found = read_reply(json.dumps({"choices": [choice]}).encode(), of_prompt=True)
    assert (found.text, found.finish_reason, found.token_ids, found.sampler_logp) == ("x", "length", (5,), (-0.5,))
    for wrong in ({"text": 5}, {"logprobs": {"token_logprobs": [1e300]}}, {"logprobs": {"token_logprobs": ["a"]}}):
        with pytest.raises(BadBody):
            read_reply(json.dumps({"choices": [choice | wrong]}).encode(), of_prompt=True)
    with pytest.raises(BadBody):
        read_reply(json.dumps({"choices": [choice]}).encode())


@given(st.binary(max_size=50))
def test_no_bytes_are_anything_but_a_chat_completion_or_a_bad_body(body):
    with pytest.raises(BadBody):
        read_reply(body)


def test_a_body_of_too_many_values_is_not_read():
    with pytest.raises(BadBody, match="values"):
        read_object(b'{"a":[' + b"0," * MAX_PARTS + b"0]}", "")


@pytest.mark.parametrize(
    "read, error, words",
    [
        (lambda text: read_json(text, unique=True), ValueError, "the key 'k199999' is given twice"),
        (lambda text: parse_json(text.encode()), ValueError, "the key 'k199999' is given twice"),
        (rows.read_json, rows.NotStrict, "key 'k199999' stands twice in one object"),
        (lambda text: schema.parse_json(text.encode()), schema.ApiError, "k199999: is given more than once"),
    ],
)
def test_a_key_that_stands_in_an_object_twice_is_found_in_one_pass(read, error, words):
    """Of 200,000 keys: looking for each among all others would take hours."""
    text = "{" + "".join(f'"k{i}": 0, ' for i in range(200_000)) + '"k199999": 1}'
    with pytest.raises(error, match=words):
        read(text)
    assert read_json('{"a": 1, "a": 2}') == {"a": 2}
