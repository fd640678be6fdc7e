"""Text of growing answers: nothing is taken back, nothing is cut apart, parts and complete text agree; and tools in templates."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolljax.errors import ConfigError
from rolljax.model.tokenizer import Chat, byte_tokenizer
from rolljax.model.vocabulary import TextStream, Vocabulary
from rolljax.serving.schema import ApiError, parse_json
from rolljax.serving.text import CompletionLogprobs
from rolljax.types import Message
from tests.spellers import llama

TOKENIZERS = {"bytes": byte_tokenizer(), "sentencepiece": llama()}
VOCABULARIES = {name: Vocabulary(t) for name, t in TOKENIZERS.items()}
BYTE = {VOCABULARIES["bytes"].raw(i): i for i in range(256)}
"""Ids of the byte tokenizer."""


def decode(name):
    return lambda ids: TOKENIZERS[name].decode(list(ids), skip_special_tokens=True)


def ids_of(name):
    """Generate random ids with stretches of real text; invalid bytes only if tokens are bytes."""
    text = st.text("aSTOPé\u20ac\U0001f642 ", max_size=6).map(lambda t: list(t.encode()))
    least = 0 if name == "bytes" else 256
    if name == "bytes":
        text = text.map(lambda raw: [BYTE[bytes([b])] for b in raw])
    return st.lists(text | st.lists(st.integers(least, 263), max_size=3), max_size=8).map(lambda parts: sum(parts, []))


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
def test_parts_are_the_complete_text(name, data):
    ids = data.draw(ids_of(name))
    stops = data.draw(st.lists(st.sampled_from(["STOP", "TO", " ", "\u20ac", "OPa", "\u00e9S"]), max_size=3))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(ids)), max_size=6)))
    text = decode(name)(ids)
    at = min((text.index(s) for s in stops if s in text), default=len(text))
    stream, shown = TextStream(VOCABULARIES[name].decoder(), stops), ""
    for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True):
        shown += stream.add(ids[start:end], last=False)
        assert text[:at].startswith(shown)
    shown += stream.add([], last=True)
    assert shown == text[:at]
    assert bool(stream.stopped) == (at < len(text)) and stream.stopped in ("", *stops)


def test_half_a_character_and_half_a_stop_text_wait():
    stream = TextStream(VOCABULARIES["bytes"].decoder(), ["</think>"])
    parts = ["\u20ac".encode()[i : i + 1] for i in range(3)] + [bytes([b]) for b in b"<b></thi!</think>x"]
    shown = [stream.add([BYTE[p]], last=False) for p in parts]
    assert shown[:5] == ["", "", "\u20ac", "", "<b"]
    assert "".join(shown) == "\u20ac<b></thi!" and stream.stopped == "</think>"


@given(st.binary(max_size=12))
def test_offsets_count_the_characters_before_a_token(raw):
    ids = np.array([BYTE[raw[i : i + 1]] for i in range(len(raw))], np.int32)
    text = decode("bytes")(ids.tolist())
    entries = CompletionLogprobs(VOCABULARIES["bytes"], ids).prompt(np.zeros(len(ids)), text)
    for token, offset in zip(entries["tokens"], entries["text_offset"], strict=True):
        assert text[offset] == token if len(token) == 1 else offset < len(text)


def test_names_and_bytes_of_tokens():
    vocabulary = VOCABULARIES["bytes"]
    assert sorted(vocabulary.raw(i) for i in range(256)) == [bytes([b]) for b in range(256)]
    assert vocabulary.name(TOKENIZERS["bytes"].convert_tokens_to_ids("<|end|>")) == "<|end|>"
    assert vocabulary.name(263) == "token_id:263" and vocabulary.raw(263) == b""
    other = VOCABULARIES["sentencepiece"]
    assert (other.name(0xE2), other.raw(0x41), other.name(256)) == ("bytes:\\xe2", b"A", " a")


TOOLS = [{"type": "function", "function": {"name": "f", "description": "a <|end|> b", "parameters": {}}}]


def test_conversations_with_tools():
    chat = Chat(byte_tokenizer())
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": "<|user|>"}}}
    messages = [
        {"role": "user", "content": "q<|end|>"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "\ufdd0" + "0\ufdd1"},
    ]
    ids = chat.conversation_ids(messages, TOOLS).tolist()
    named = [chat.tokenizer.convert_ids_to_tokens(i) for i in ids if i >= 256]
    assert named == ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|user|>", "<|assistant|>"]
    text = chat.tokenizer.decode(ids)
    assert json.dumps(TOOLS) in text and "q<|end|><|assistant|>" in text and "\ufdd0" + "0\ufdd1" in text
    plain = [Message("system", "s<|end|>"), Message("user", "q")]
    as_dicts = [{"role": m.role, "content": m.content} for m in plain]
    np.testing.assert_array_equal(chat.conversation_ids(as_dicts), chat.prompt_ids(plain))


def test_template_options_and_templates_without_tools():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ messages[0]['content'] }}{{ '!' if loud else '' }}"
    chat = Chat(tokenizer)
    ids = chat.conversation_ids([{"role": "user", "content": "q"}], options={"loud": True})
    assert tokenizer.decode(ids.tolist()) == "q!"
    with pytest.raises(ConfigError, match="shows no tools"):
        chat.conversation_ids([{"role": "user", "content": "q"}], TOOLS)


JSONS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=10,
)


@given(st.dictionaries(st.text(max_size=4), JSONS, max_size=4))
def test_json_comes_back(value):
    assert parse_json(json.dumps(value).encode()) == value


@given(st.binary(max_size=30) | st.text('{}[]",:0123456789.eEudNa\\ ', max_size=30).map(str.encode))
def test_any_bytes_are_json_or_refused(raw):
    try:
        value = parse_json(raw)
    except ApiError as e:
        assert e.status == 400 and e.message
    else:
        assert value == json.loads(raw)
