"""Tool calls in answers: formats by template, content and calls of whole and of growing answers, sessions that continue."""

import dataclasses
import json
import random

import numpy as np
import pytest

from rolljax.envs.tools.base import ToolCall, ToolSpec
from rolljax.envs.tools.parsers import PARSERS
from rolljax.model.tokenizer import Chat, byte_tokenizer
from rolljax.serving.generation import Choice
from rolljax.serving.requests import read_chat
from rolljax.serving.schema import ApiError
from rolljax.serving.tool_calls import AnswerParts, call_prefill, parser_of, split_calls
from rolljax.types import Completion, Sampled
from tests.originals import published
from tests.spellers import qwen

LOOK = {"type": "object", "properties": {"at": {"type": "integer"}, "how": {"type": "string"}}}
SPECS = [ToolSpec("look", input_schema=LOOK)]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": LOOK}}]
SPELLED = {"type": "function", "function": {"name": "look<|end|>"}}
"""A tool whose name spells a special token."""
USER = {"role": "user", "content": "go"}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": 5}}\n</tool_call>'
XML = "<tool_call>\n<function=look>\n<parameter=at>\n5\n</parameter>\n</function>\n</tool_call>"
JSON = '{"name": "look", "parameters": {"at": 5}}'
FORMS = {"hermes": CALL, "qwen_xml": XML, "llama_json": JSON}


# ---- formats


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("qwen2_5", "hermes"),
        ("qwen3", "hermes"),
        ("qwen3_6", "qwen_xml"),
        ("llama3_1", "llama_json"),
        ("llama3", None),
        ("gemma", None),
    ],
)
def test_the_format_is_the_one_that_the_template_writes(template, name):
    tokenizer = qwen()
    tokenizer.chat_template = published()[template]
    assert parser_of(Chat(tokenizer)) is (None if name is None else PARSERS[name])


def test_our_own_template_has_a_format_and_one_without_tools_has_none():
    assert parser_of(Chat(byte_tokenizer())) is PARSERS["hermes"]
    assert parser_of(Chat(qwen())) is None


@pytest.mark.parametrize(
    ("template", "any_tool", "one"),
    [
        ("qwen3", '<tool_call>\n{"name":', '<tool_call>\n{"name": "look", "arguments":'),
        ("qwen3_6", "<tool_call>\n", "<tool_call>\n<function=look>\n"),
        ("llama3_1", '{"name":', '{"name": "look", "parameters":'),
    ],
)
def test_the_prefill_of_a_call_is_what_the_template_writes(template, any_tool, one):
    tokenizer = qwen()
    tokenizer.chat_template = published()[template]
    chat = Chat(tokenizer)
    parser = parser_of(chat)
    assert (call_prefill(chat, parser), call_prefill(chat, parser, "look")) == (any_tool, one)
    for arguments in ({}, {"at": 5}):
        assert parser.write("look", arguments, SPECS).startswith((any_tool, one)), arguments


@pytest.mark.parametrize(
    "arguments", [{}, {"at": 5}, {"how": "5"}, {"how": "two\nlines\n"}, {"at": -1, "how": '{"x": [1, "<"]}'}]
)
@pytest.mark.parametrize("name", FORMS)
def test_what_a_format_writes_it_reads(name, arguments):
    text = PARSERS[name].write("look", arguments, SPECS)
    assert [*PARSERS[name].parse(text, SPECS)] == [ToolCall("look", arguments)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("<tool_call>look</tool_call>", "there must be <function=...>"),
        ("<tool_call><function=look><parameter=at>5", "<parameter=at> is not closed"),
        ("<tool_call><function=look><parameter=at>5</parameter>5</function></tool_call>", "must be </function>"),
        (XML.replace("</function>", "<parameter=at>6</parameter></function>"), "'at' is given twice"),
    ],
)
def test_a_broken_call_has_a_reason(text, said):
    (call,) = PARSERS["qwen_xml"].parse(text, SPECS)
    assert said in call.problem and not call.arguments


def test_a_format_refuses_to_write_what_it_cannot_read():
    with pytest.raises(ValueError, match="cannot write these arguments"):
        PARSERS["qwen_xml"].write("look", {"how": "a</parameter>b"}, SPECS)


# ---- content and calls


@pytest.mark.parametrize("name", FORMS)
def test_content_is_what_is_outside_of_the_calls(name):
    call, parser = FORMS[name], PARSERS[name]
    look, broken = ToolCall("look", {"at": 5}), "{}" if name == "llama_json" else "<tool_call>broken</tool_call>"
    for text, content, calls in (
        ("no call <b>", "no call <b>", 0),
        (f"{call}", "", 1),
        (f"I look.\n\n{call}\n{call}\n", "I look.", 2),
        (f"I look.\n{call} and wait", "I look. and wait", 1),
        (f"<think>{call}</think>\n{call}", f"<think>{call}</think>", 1),
        (f"{broken}\n{call}", broken, 1),
        (call[:-20], call[:-20], 0),
    ):
        assert split_calls(text, parser, SPECS) == (content, [look] * calls)


PIECES = (
    CALL,
    XML,
    JSON,
    "<tool_call>",
    "</tool_call>",
    "<tool",
    "<",
    "<think>",
    "</think>",
    " ",
    "\n",
    "a",
    "é",
    "{",
    "}",
)


def test_a_growing_answer_gives_what_the_whole_one_gives():
    """1,000 random texts, cut at random places, and at every place."""
    rng = random.Random(0)
    for i in range(1000):
        text = "".join(rng.choices(PIECES, k=rng.randint(0, 8)))
        parser = PARSERS[rng.choice(list(FORMS))]
        cuts = range(len(text)) if i % 4 == 0 else sorted(rng.choices(range(len(text) + 1), k=3))
        parts, shown, start = AnswerParts(parser, SPECS), "", 0
        for cut in cuts:
            shown += parts.add(text[start:cut], last=False)
            start = cut
        shown += parts.add(text[start:], last=True)
        assert (shown, parts.calls) == split_calls(text, parser, SPECS), text


def test_text_is_shown_as_soon_as_it_cannot_be_part_of_a_call():
    parts = AnswerParts(PARSERS["hermes"], SPECS)
    shown = [parts.add(c, last=False) for c in f"a <b {CALL}"]
    assert shown == ["a", "", "", " <b", *[""] * (len(CALL) + 1)]


# ---- requests and sessions


def test_requests_without_tools_have_no_calls(served):
    for body, parser in (({"tools": TOOLS}, "hermes"), ({}, None), ({"tools": TOOLS, "tool_choice": "none"}, None)):
        job = read_chat({"messages": [USER]} | body, served)
        assert job.tool_parser is (parser and PARSERS[parser])
    with pytest.raises(ApiError, match=r"tools\[0\].function.parameters: must be a JSON schema"):
        read_chat(
            {"messages": [USER], "tools": [{"type": "function", "function": {"name": "f", "parameters": 3}}]}, served
        )


class Server:
    """What a choice needs of a server."""

    def __init__(self, served):
        self.served = served


def begin(session, served, messages):
    return session.begin(session.read({"messages": messages, "tools": TOOLS}, read_chat, served))


def answer(job, served, text):
    """Answer a call with the ids of a text; return the choice."""
    tokens = served.chat.answer_ids(text)
    choice = Choice(Server(served), job, 0)
    sampled = Sampled.of(tokens, np.zeros(len(tokens), np.float32), np.zeros(len(tokens), np.int32))
    choice.add(sampled, last=True)
    job.call.sampled()
    job.call.answered(Completion(sampled, "stop"), choice.text, choice.message)
    return choice


def test_a_conversation_continues_after_a_call_with_the_sampled_tokens(session, served):
    """As clients send the message back: content null, arguments as text in another form, numbers of a stream."""
    first = begin(session, served, [USER])
    spaced = CALL.replace('"at": 5', '"at" : 5')
    choice = answer(first, served, f"I look.\n{spaced}")
    assert choice.reason(first.call.completion) == "tool_calls"
    (call,) = choice.tool_calls
    assert call == {"id": "c00000000", "type": "function", "function": {"name": "look", "arguments": {"at": 5}}}
    text = call | {"index": 0, "function": {"name": "look", "arguments": '{"at":  5}'}}
    said = {"role": "assistant", "content": "I look.", "tool_calls": [text]}
    result = {"role": "tool", "content": "a door", "tool_call_id": call["id"]}
    job = begin(session, served, [USER, said, result])
    stream = [*first.prompts[0].ids, *served.chat.answer_ids(f"I look.\n{spaced}")]
    assert job.prompts[0].ids.tolist()[: len(stream)] == stream and job.call.before is first.call
    assert served.vocabulary.text(job.call.new_ids) == "a door"
    answer(job, served, CALL)
    assert job.call.message["content"] == ""
    again = {"role": "assistant", "content": None, "tool_calls": json.loads(json.dumps(job.call.message["tool_calls"]))}
    assert begin(session, served, [USER, said, result, again, result]).call.before is job.call


def test_a_demanded_call_continues_with_its_beginning(session, served):
    """The beginning belongs to the prompt, so it is not trained; a later call may be free."""
    body = {"messages": [USER], "tools": TOOLS, "tool_choice": "required"}
    first = session.begin(session.read(body, read_chat, served))
    prefill = '<tool_call>{"name":'
    rest = CALL.replace("\n", "").removeprefix(prefill)
    choice = answer(first, served, rest)
    assert choice.reason(first.call.completion) == "tool_calls" and first.call.text == rest
    result = {"role": "tool", "content": "a door", "tool_call_id": choice.tool_calls[0]["id"]}
    after = begin(session, served, [USER, choice.message, result]).call
    assert after.before is first.call and served.vocabulary.text(after.new_ids) == "a door"
    assert served.vocabulary.text(first.call.stream).endswith(prefill + rest)


def test_a_call_cannot_be_demanded_inside_a_thought(served):
    """Nor of a tool that is not there, nor without a format of calls."""
    tokenizer = qwen()
    tokenizer.chat_template = published()["qwen3_6"]
    thinking = dataclasses.replace(served, tokenizer=tokenizer, chat=Chat(tokenizer), max_context=4000)
    body = {"messages": [USER], "tools": TOOLS, "tool_choice": "required"}
    with pytest.raises(ApiError, match="begins every answer with a thought"):
        read_chat(body, thinking)
    assert read_chat(body | {"chat_template_kwargs": {"enable_thinking": False}}, thinking).prefill
    for change, says in (
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, r"one of the tools \['look'\]"),
        ({"tools": []}, "tool_choice: needs tools"),
        ({"tools": [*TOOLS, SPELLED], "tool_choice": SPELLED}, r"one of the tools \['look'\]"),
        ({"tool_choice": "any"}, "must be 'auto', 'none', 'required' or"),
    ):
        with pytest.raises(ApiError, match=says):
            read_chat(body | change, served)


@pytest.mark.parametrize(
    "change",
    [
        {"content": "I look"},
        {"tool_calls": []},
        {"tool_calls": [{"id": "1", "type": "function", "function": {"name": "look", "arguments": {"at": 5}}}]},
        {"tool_calls": [{"id": "c00000000", "type": "function", "function": {"name": "look", "arguments": {"at": 6}}}]},
    ],
)
def test_a_changed_call_is_another_conversation(session, served, change):
    first = begin(session, served, [USER])
    answer(first, served, f"I look.\n{CALL}")
    result = {"role": "tool", "content": "a door", "tool_call_id": "c00000000"}
    job = begin(session, served, [USER, first.call.message | change, result])
    assert job.call.before is None
