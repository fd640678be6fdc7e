"""Published chat templates that rewrite earlier turns, and the training templates that are made of them.

The oracle is `transformers` with the published template: for one turn, and for what follows an answer.
"""

import dataclasses
import json

import numpy as np
import pytest

from rolljax.errors import ConfigError
from rolljax.model.tokenizer import Chat, byte_tokenizer, load_tokenizer, save_tokenizer
from rolljax.model.training_templates import ORIGINALS, fingerprint, training_template
from rolljax.serving.schema import ServedModel
from rolljax.serving.session import Session, SessionRules
from rolljax.types import Completion, Message, Sampled, SamplingParams
from tests.originals import by_fingerprint, published
from tests.spellers import qwen

NAMES = {found.models: digest for digest, found in ORIGINALS.items()}
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "adds",
        "parameters": {"type": "object", "properties": {"a": {"type": "number", "description": "first"}}},
    },
}
SYSTEM = {"role": "system", "content": "be brief"}
USER = {"role": "user", "content": "what is 2+3?"}
PLAIN = {"role": "assistant", "content": "it is 5"}
THOUGHT = {"role": "assistant", "content": "it is 5", "reasoning_content": "two and three"}
CALLED = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 2}}}],
}
RESULT = {"role": "tool", "content": "5", "tool_call_id": "1", "name": "add"}
MORE = {"role": "user", "content": "and 3+4?"}
OPTIONS = ({}, {"enable_thinking": True}, {"enable_thinking": False})


HARMONY = ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>"]


def chat_of(template):
    tokenizer = qwen()
    tokenizer.add_special_tokens({"additional_special_tokens": HARMONY})
    tokenizer.bos_token = "<s>"
    tokenizer.chat_template = template
    return Chat(tokenizer)


@pytest.fixture(params=NAMES)
def original(request):
    return by_fingerprint()[NAMES[request.param]]


def written(template, messages, *, generate, tools=(), **options):
    """What `transformers` makes of a conversation."""
    return qwen().apply_chat_template(
        messages, list(tools) or None, chat_template=template, add_generation_prompt=generate, tokenize=False, **options
    )


def spelled(chat, ids):
    return chat.tokenizer.decode([int(i) for i in ids], skip_special_tokens=False, clean_up_tokenization_spaces=False)


def test_every_edit_applies_once(original):
    edits = ORIGINALS[fingerprint(original)].edits
    assert [original.count(before) for before, _ in edits] == [1] * len(edits)
    assert training_template(original) != original == training_template(original + "\n").replace(
        training_template(original), original
    ).removesuffix("\n")


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_one_turn_is_what_transformers_writes(original, options):
    chat = chat_of(original).for_streams()
    trained = training_template(original)
    for tools in ([], [TOOL]):
        for opening in ([USER], [SYSTEM, USER]):
            want = written(original, opening, generate=True, tools=tools, **options)
            assert spelled(chat, chat.conversation_ids(opening, tools, options)) == want
            for answer in (PLAIN, THOUGHT, CALLED):
                both = [written(t, [*opening, answer], generate=False, tools=tools, **options) for t in (original, trained)]
                assert both[0] == both[1] and answer["content"] in both[0]


def test_earlier_turns_stay_as_they_are(original):
    trained = training_template(original)
    talk = [SYSTEM, USER, THOUGHT, MORE, PLAIN, USER, {**CALLED, "reasoning_content": "a tool"}, RESULT, THOUGHT, MORE]
    for end, message in enumerate(talk, 1):
        if message["role"] == "assistant":
            so_far = written(trained, talk[:end], generate=False)
            assert written(trained, talk, generate=True).startswith(so_far)
    assert not all(
        written(original, talk, generate=True).startswith(written(original, talk[:end], generate=False))
        for end in (3, 5, 7, 9)
    )


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_what_follows_an_answer_is_what_transformers_writes_behind_it(original, options):
    """Also behind an answer that the template would write in another way: the answer's own tokens stay."""
    chat = chat_of(original).for_streams()
    for tools in ([], [TOOL]):
        for more in ([MORE], [RESULT], [RESULT, RESULT], [RESULT, MORE]):
            if "functions." in original:  # gpt-oss reads the name of a tool in the call before its result
                more = [m for m in more if m["role"] != "tool"] or [MORE]
            whole = written(original, [USER, PLAIN, *more], generate=True, tools=tools, **options)
            behind = whole.partition("it is 5")[2]
            closing = spelled(chat, chat.closing_ids)
            delta = spelled(chat, chat.delta_ids(more, closed=False, tools=tools, options=options))
            if "<|return|>" in closing:  # which gpt-oss says at the end of an answer, and later templates take away
                delta = delta.replace("<|return|>", "<|end|>", 1)
            assert delta == behind


def test_results_without_a_call_have_a_name():
    """The calls of a model of text stand in its text, so gpt-oss's template does not know which tool it was."""
    chat = chat_of(published()["gptoss"]).for_streams()
    named = spelled(chat, chat.delta_ids([RESULT], closed=True))
    assert named.startswith("<|start|>functions.add to=assistant<|channel|>commentary<|message|>")
    assert "functions.tool to" in spelled(chat, chat.delta_ids([Message("tool", "5")], closed=True))


def test_templates_under_which_streams_can_grow_stay_as_they_are():
    kept = ("qwen2_5", "qwen3_instruct_2507", "llama3", "llama3_1", "llama3_2", "gemma3", "deepseek_r1_distill", "qwen3_8")
    for name in kept:
        chat = chat_of(published()[name])
        assert chat.for_streams() is chat
        assert len(chat.delta_ids([Message("user", "x")], closed=True))


def test_a_refusal_names_the_originals_and_the_setting():
    text = published()["qwen3"] + "{# changed #}"
    with pytest.raises(ConfigError, match="rewrites earlier turns") as refused:
        chat_of(text).for_streams().delta_ids([Message("user", "x")], closed=True)
    said = str(refused.value)
    assert all(found.models in said for found in ORIGINALS.values()) and fingerprint(text)[:12] in said
    assert "Recipe.chat_template" in said


# ---- an agent's conversation


def test_an_agent_over_a_published_template_goes_on_with_its_stream(original):
    chat = chat_of(original).for_streams()
    served = ServedModel("policy", chat.tokenizer, chat, 10_000, 8000)
    params = SamplingParams(max_tokens=20, stop_ids=chat.stop_ids)
    for options in OPTIONS:
        for tools in ([], [TOOL]):
            session = Session(SessionRules(params, (1, 0, 7, 3), max_calls=9, max_restarts=0))
            talk, stream = [SYSTEM, USER], np.zeros(0, np.int32)
            for answer, more in (("<think>\nx", MORE), ("\n\n  <think>y</think>\n", RESULT), ("z", MORE), ("", RESULT)):
                fields = {"chat_template_kwargs": options, **({"tools": tools} if tools else {})}
                job = session.begin(session.read({"messages": talk} | fields, True, served))
                assert np.array_equal(job.prompts[0].ids[: len(stream)], stream)
                tokens = chat.answer_ids(answer)
                zeros = np.zeros(len(tokens))
                job.call.answered(Completion(Sampled.of(tokens, zeros, zeros), "stop"), answer)
                stream = np.concatenate([job.prompts[0].ids, tokens])
                talk += [{"role": "assistant", "content": answer}, more]
            assert [len(calls) for calls in session.streams()] == [4]
