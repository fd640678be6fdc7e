"""Published chat templates that rewrite earlier turns, and the training templates that are made of them.

The oracle is `transformers` with the published template: for one turn, and for what follows an answer.
"""

import dataclasses
import datetime
import json
import os

import numpy as np
import pytest

from rolljax.errors import ConfigError
from rolljax.model.tokenizer import Chat, byte_tokenizer, load_tokenizer, save_tokenizer
from rolljax.model.training_templates import ORIGINALS, fingerprint, training_template
from rolljax.serving.requests import read_chat
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


@pytest.fixture(params=[name for name in NAMES if name != "Gemma 3"])
def original(request):
    """Return a template that rewrites earlier turns."""
    return by_fingerprint()[NAMES[request.param]]


def written(template, messages, *, generate, tools=(), **options):
    """Render a conversation with `transformers`."""
    return qwen().apply_chat_template(
        messages, list(tools) or None, chat_template=template, add_generation_prompt=generate, tokenize=False, **options
    )


def spelled(chat, ids):
    return chat.tokenizer.decode([int(i) for i in ids], skip_special_tokens=False, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("name", NAMES)
def test_every_edit_applies_once(name):
    original = by_fingerprint()[NAMES[name]]
    edits = ORIGINALS[fingerprint(original)].edits
    assert [original.count(before) for before, _ in edits] == [1] * len(edits)
    trained = training_template(original)
    assert trained != original and training_template(original.removesuffix("\n")) == trained.removesuffix("\n")
    assert training_template(trained) == trained


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_one_turn_is_what_transformers_writes(original, options):
    chat = chat_of(original).for_streams()
    trained = training_template(original)
    for tools in ([], [TOOL]):
        for initial_messages in ([USER], [SYSTEM, USER]):
            want = written(original, initial_messages, generate=True, tools=tools, **options)
            assert spelled(chat, chat.conversation_ids(initial_messages, tools, options)) == want
            for answer in (PLAIN, THOUGHT, CALLED):
                both = [
                    written(t, [*initial_messages, answer], generate=False, tools=tools, **options)
                    for t in (original, trained)
                ]
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
    """A policy writes its calls as text, so the template of gpt-oss does not know which tool was called."""
    chat = chat_of(published()["gptoss"]).for_streams()
    named = spelled(chat, chat.delta_ids([RESULT], closed=True))
    assert named.startswith("<|start|>functions.add to=assistant<|channel|>commentary<|message|>")
    assert "functions.tool to" in spelled(chat, chat.delta_ids([Message("tool", "5")], closed=True))


def test_gemma_3_takes_results_of_tools_as_it_takes_users():
    original = published()["gemma3"]
    chat, own = chat_of(original).for_streams(), chat_of(original)
    talk = [SYSTEM, USER, PLAIN, MORE]
    assert spelled(chat, chat.conversation_ids(talk)) == own.tokenizer.apply_chat_template(
        talk, add_generation_prompt=True, tokenize=False
    )
    delta = chat.delta_ids([RESULT], closed=True)
    assert np.array_equal(delta, chat.delta_ids([RESULT | {"role": "user"}], closed=True))
    assert np.array_equal(delta, own.delta_ids([RESULT | {"role": "user"}], closed=True))
    with pytest.raises(ConfigError, match="must alternate"):
        own.delta_ids([RESULT], closed=True)
    assert len(chat.delta_ids([RESULT, RESULT], closed=True)) > len(delta)


def test_a_stream_keeps_its_date_beyond_midnight():
    chat = dataclasses.replace(chat_of(published()["llama3_2"]), day="2031-12-30")
    assert "Today Date: 30 Dec 2031" in spelled(chat, chat.prompt_ids([Message("user", "q")]))
    today = datetime.date.today()
    streams = chat_of(published()["gptoss"]).for_streams()
    assert datetime.date.fromisoformat(streams.day) - today <= datetime.timedelta(days=1)
    assert f"Current date: {streams.day}" in spelled(streams, streams.prompt_ids([Message("user", "q")]))


def test_templates_under_which_streams_can_grow_stay_as_they_are():
    kept = ("qwen2_5", "qwen3_instruct_2507", "llama3", "llama3_1", "llama3_2", "deepseek_r1_distill", "qwen3_8")
    for name in kept:
        chat = chat_of(published()[name])
        assert chat.for_streams().tokenizer is chat.tokenizer and not chat.for_streams().replaced
        assert len(chat.delta_ids([Message("user", "x")], closed=True))


def test_a_refusal_names_the_originals_and_the_setting():
    text = published()["qwen3"] + "{# changed #}"
    with pytest.raises(ConfigError, match="rewrites earlier turns") as refused:
        chat_of(text).for_streams().delta_ids([Message("user", "x")], closed=True)
    said = str(refused.value)
    assert (
        all(found.models.partition(",")[0] in said for found in ORIGINALS.values()) and fingerprint(text)[:12] in said
    )
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
                job = session.begin(session.read({"messages": talk} | fields, read_chat, served))
                assert np.array_equal(job.prompts[0].ids[: len(stream)], stream)
                tokens = chat.answer_ids(answer)
                zeros = np.zeros(len(tokens))
                job.call.answered(
                    Completion(Sampled.of(tokens, zeros, zeros), "stop"),
                    answer,
                    {"role": "assistant", "content": answer},
                )
                stream = np.concatenate([job.prompts[0].ids, tokens])
                talk += [{"role": "assistant", "content": answer}, more]
            assert [len(calls) for calls in session.streams()] == [4]


# ---- templates of the user's choice, and base models


def texts(chat, messages, more, answer):
    stream = [*chat.prompt_ids(messages), *chat.answer_ids(answer), *chat.delta_ids(more, closed=True)]
    return chat.tokenizer.decode([int(i) for i in stream], skip_special_tokens=False)


def test_plain_is_the_texts_as_they_are():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    chat = Chat.of(tokenizer, "plain")
    assert chat.prompt_ids([Message("user", "1+1=")]).tolist() == tokenizer("1+1=")["input_ids"]
    said = texts(
        chat, [Message("system", "s"), Message("user", "q")], [Message("tool", "t"), Message("user", "u")], "a"
    )
    assert said == "s\n\nqa<|end|>t\n\nu"
    closing = chat.tokenizer.convert_ids_to_tokens(chat.closing_ids)
    assert closing == ["<|end|>"] and chat.stop_ids == (tokenizer.eos_token_id,)
    unclosed = chat.delta_ids([Message("user", "u")], closed=False).tolist()
    assert unclosed == [tokenizer.eos_token_id, *tokenizer("u")["input_ids"]]
    assert tokenizer.chat_template is None, "the tokenizer that is given keeps its own"
    tokenizer.eos_token = None
    with pytest.raises(ConfigError, match="end-of-text token"):
        Chat.of(tokenizer, "plain")


def test_plain_begins_as_the_tokenizer_begins_texts():
    from tokenizers import processors

    tokenizer = byte_tokenizer()
    tokenizer.bos_token = "<|system|>"
    begin = tokenizer.bos_token_id
    assert Chat.of(tokenizer, "plain").prompt_ids([Message("user", "q")])[0] != begin
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|system|> $A", special_tokens=[("<|system|>", begin)]
    )
    chat = Chat.of(tokenizer, "plain")
    assert chat.prompt_ids([Message("user", "q")]).tolist() == chat.vocabulary.encode("q", special=True)


def test_plain_where_a_token_spans_question_and_answer():
    """Then no template text stands between the two, and the answer is closed all the same."""
    tokenizer = qwen()
    chat = Chat.of(tokenizer, "plain")
    assert chat.closing_ids == [tokenizer.eos_token_id]
    assert chat.delta_ids([Message("user", "to")], closed=False).tolist() == [tokenizer.eos_token_id, 256]


def test_a_template_of_the_users_choice(tmp_path):
    path = tmp_path / "mine.jinja"
    path.write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    chat = Chat.of(byte_tokenizer(), str(path))
    assert chat.replaced and spelled(chat, chat.prompt_ids([Message("user", "q")])) == "[q]"
    for name, content in (("absent", None), ("bytes", b"\xff"), ("long", b" " * (2**20 + 1))):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigError, match="Recipe.chat_template"):
            Chat.of(byte_tokenizer(), str(tmp_path / name))
    os.mkfifo(tmp_path / "pipe")  # which nobody writes to
    with pytest.raises(ConfigError, match="not the path of a file"):
        Chat.of(byte_tokenizer(), str(tmp_path / "pipe"))


@pytest.mark.parametrize("kept_in", ["jinja", "config", "none"])
def test_a_folder_is_written_with_the_template_in_use(kept_in, tmp_path):
    """The other files of the folder go along byte for byte."""
    source, out, same = (tmp_path / name for name in ("source", "out", "same"))
    tokenizer = qwen()
    tokenizer.chat_template = None if kept_in == "none" else published()["qwen3"]
    tokenizer.save_pretrained(source, save_jinja_files=kept_in != "config")
    config = json.loads((source / "tokenizer_config.json").read_text())
    config.pop("backend", None)
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    config.pop("extra_special_tokens", None)
    (source / "tokenizer_config.json").write_text(json.dumps(config))
    own = load_tokenizer(source)
    for folder, chosen in ((same, own), (out, Chat.of(own, "plain").tokenizer)):
        folder.mkdir()
        save_tokenizer(folder, chosen, source)
        assert load_tokenizer(folder).chat_template == chosen.chat_template
        assert (folder / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    assert {f.name: f.read_bytes() for f in same.iterdir()} == {f.name: f.read_bytes() for f in source.iterdir()}
