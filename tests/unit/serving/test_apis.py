"""Anthropic's Messages, OpenAI's Responses and token ids: streams and whole answers agree, sessions continue, bad bodies."""

import copy
import json
import random
import types

import numpy as np
import openai.types.chat
import openai.types.responses
import pydantic
import pytest

from rolljax.serving.apis import APIS
from rolljax.serving.generation import NOTHING, Choice
from rolljax.serving.messages import error_json, read_count
from rolljax.serving.schema import ApiError
from rolljax.serving.session import Session, SessionRules
from rolljax.types import Completion, Sampled, SamplingParams

API = {api.path.rpartition("/")[2] if "chat" not in api.path else "chat": api for api in APIS}
LOOK = {"type": "object", "properties": {"at": {"type": "integer"}, "how": {"type": "string"}}}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": 5, "how": "é"}}\n</tool_call>'
PIECES = (CALL, CALL, "<tool_call>", "</tool_call>", "<tool", "<", "<think>", "</think>", " ", "\n", "a", "é", "{", "}")
ASKED = {
    "chat": {
        "messages": [{"role": "user", "content": "go"}],
        "tools": [{"type": "function", "function": {"name": "look", "parameters": LOOK}}],
    },
    "responses": {
        "input": "go",
        "instructions": "be brief",
        "tools": [{"type": "function", "name": "look", "description": "d", "parameters": LOOK, "strict": False}],
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"effort": "low"},
        "text": {"format": {"type": "text"}, "verbosity": "low"},
    },
    "messages": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "go", "cache_control": {"type": "ephemeral"}}]}],
        "system": [{"type": "text", "text": "be brief"}],
        "max_tokens": 50,
        "tools": [{"name": "look", "description": "d", "input_schema": LOOK}],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "metadata": {"user_id": "x"},
    },
    "generate": {"token_ids": [65, 66], "sampling_params": {"max_tokens": 50, "logprobs": 1}, "cache_salt": "3"},
}  # fmt: skip


def service(served):
    """Return what choices and encoders need of a server."""
    return types.SimpleNamespace(served=served, sampler=types.SimpleNamespace(version=3))


def sampled(tokens):
    n = len(tokens)
    return Sampled.of(np.array(tokens, np.int32), np.zeros(n, np.float32), np.full(n, 3, np.int32))


def whole(api, job, served, tokens, reason="stop"):
    """Return the choice and the body of a complete answer."""
    choice, completion = Choice(service(served), job, 0), Completion(sampled(tokens), reason)
    choice.add(completion.sampled, last=True)
    return choice, api.encoder(service(served), job, [choice]).body([completion]), completion


def streamed(api, job, served, tokens, cuts, reason="stop"):
    """Return the events of an answer whose tokens come in parts, as (name, value) pairs."""
    choice, completion = Choice(service(served), job, 0), Completion(sampled(tokens), reason)
    encoder = api.encoder(service(served), job, [choice])
    raw = encoder.first()
    for start, end in zip([0, *cuts], [*cuts, len(tokens)], strict=True):
        part = sampled(tokens[start:end])
        raw += encoder.more(choice, part, choice.add(part, last=False))
    raw += encoder.end(choice, completion, choice.add(NOTHING, last=True)) + encoder.last([completion])
    events = []
    for event in b"".join(raw).decode().split("\n\n")[:-1]:
        *name, data = event.split("\n")
        value = json.loads(data.removeprefix("data: ")) if data != "data: [DONE]" else None
        assert name == ([f"event: {value['type']}"] if value and "type" in value else [])
        events.append(value)
    return events


# ---- what clients make of streams


def without_ids(items):
    """Return items without their ids, which are random outside of sessions."""
    return [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in items]


def joined_chat(events):
    assert events.pop() is None
    message, reason = {"content": "", "tool_calls": []}, None
    for event in events:
        (choice,) = event["choices"]
        message["content"] += choice["delta"].get("content") or ""
        message["tool_calls"] += choice["delta"].get("tool_calls", [])
        reason = choice["finish_reason"] or reason
    return (
        message["content"],
        [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in message["tool_calls"]],
        reason,
    )


def said_chat(body):
    message = body["choices"][0]["message"]
    calls = [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in message.get("tool_calls", [])]
    return message["content"] or "", calls, body["choices"][0]["finish_reason"]


def joined_messages(events):
    kinds = [e["type"] for e in events]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    blocks, texts = [], []
    for e in events[1:-2]:
        match e["type"]:
            case "content_block_start":
                assert e["index"] == len(blocks) == len(texts)
                blocks.append(e["content_block"])
                texts.append("")
            case "content_block_delta":
                assert e["index"] == len(blocks) - 1
                texts[-1] += e["delta"]["text" if e["delta"]["type"] == "text_delta" else "partial_json"]
            case "content_block_stop":
                assert e["index"] == len(blocks) - 1
                field = {"text": "text", "tool_use": "input"}[blocks[-1]["type"]]
                assert not blocks[-1][field]
                blocks[-1] |= {field: texts[-1] if field == "text" else json.loads(texts[-1])}
    return without_ids(blocks), events[-2]["delta"], events[-2]["usage"]


def said_messages(body):
    return without_ids(body["content"]), {n: body[n] for n in ("stop_reason", "stop_sequence")}, body["usage"]


def joined_responses(events):
    assert [e["sequence_number"] for e in events] == [*range(len(events))]
    assert [e["type"] for e in events[:2]] == ["response.created", "response.in_progress"]
    items = []
    for e in events[2:-1]:
        kind = e["type"].removeprefix("response.")
        match kind:
            case "output_item.added":
                assert e["output_index"] == len(items)
                items.append(copy.deepcopy(e["item"]))
            case "content_part.added":
                items[-1]["content"].append(e["part"])
            case "output_text.delta":
                assert e["delta"] and e["item_id"] == items[-1]["id"]
                items[-1]["content"][0]["text"] += e["delta"]
            case "output_text.done":
                assert e["text"] == items[-1]["content"][0]["text"]
            case "content_part.done":
                assert e["part"] == items[-1]["content"][0]
            case "function_call_arguments.delta":
                assert e["item_id"] == items[-1]["id"]
                items[-1]["arguments"] += e["delta"]
            case "function_call_arguments.done":
                assert (e["arguments"], e["name"]) == (items[-1]["arguments"], items[-1]["name"])
            case "output_item.done":
                assert e["item"] == items[-1] | {"status": e["item"]["status"]} and e["output_index"] == len(items) - 1
    last = events[-1]["response"]
    assert events[-1]["type"] == f"response.{last['status']}"
    assert [i | {"status": ""} for i in items] == [i | {"status": ""} for i in last["output"]]
    return said_responses(last)


def said_responses(body):
    return without_ids(body["output"]), body["status"], body["incomplete_details"], body["usage"]


def joined_generate(events):
    assert events.pop() is None
    choices = [e["choices"][0] for e in events]
    assert {e["request_id"] for e in events} == {events[0]["request_id"]}
    return (
        sum((c["token_ids"] for c in choices), []),
        sum((c["logprobs"]["content"] for c in choices), []),
        choices[-1]["finish_reason"],
    )


def said_generate(body):
    choice = body["choices"][0]
    return choice["token_ids"], choice["logprobs"]["content"], choice["finish_reason"]


JOINED = {"chat": joined_chat, "messages": joined_messages, "responses": joined_responses, "generate": joined_generate}
SAID = {"chat": said_chat, "messages": said_messages, "responses": said_responses, "generate": said_generate}


def validators():
    """Return what checks whole answers and events against the types of the official clients."""
    event = pydantic.TypeAdapter(openai.types.responses.ResponseStreamEvent).validate_python
    checks = {"responses": (openai.types.responses.Response.model_validate, event)}
    checks["chat"] = (
        openai.types.chat.ChatCompletion.model_validate,
        openai.types.chat.ChatCompletionChunk.model_validate,
    )
    try:
        import anthropic.types as anthropic
    except ModuleNotFoundError:
        return checks
    event = pydantic.TypeAdapter(anthropic.RawMessageStreamEvent).validate_python
    return checks | {"messages": (anthropic.Message.model_validate, event)}


def test_streams_and_whole_answers_agree(served):
    """1,000 random texts with and without calls, cut at random places, in every API."""
    rng, checks = random.Random(0), validators()
    jobs = {name: API[name].read(body, served) for name, body in ASKED.items()}
    for i in range(1000):
        text = "".join(rng.choices(PIECES, k=rng.randint(0, 8)))
        tokens = served.chat.answer_ids(text).tolist()
        cuts = sorted(rng.choices(range(len(tokens) + 1), k=3))
        reason = rng.choice(["stop", "length"])
        for name in [*ASKED] if i % 50 == 0 else [rng.choice([*ASKED])]:
            _, body, _ = whole(API[name], jobs[name], served, tokens, reason)
            events = streamed(API[name], jobs[name], served, tokens, cuts, reason)
            if i % 50 == 0 and name in checks:
                check_whole, check_event = checks[name]
                check_whole(body, strict=True)
                for event in filter(None, events):
                    check_event(event)
            assert JOINED[name](events) == SAID[name](body), text


def test_a_call_in_every_api(served):
    tokens = served.chat.answer_ids(f"I look.\n{CALL}").tolist()
    bodies = {name: whole(API[name], API[name].read(ASKED[name], served), served, tokens)[1] for name in ASKED}
    assert said_chat(bodies["chat"]) == ("I look.", [("look", {"at": 5, "how": "é"})], "tool_calls")
    text, call = bodies["messages"]["content"]
    assert text == {"type": "text", "text": "I look."}
    assert call == {"type": "tool_use", "id": call["id"], "name": "look", "input": {"at": 5, "how": "é"}}
    assert bodies["messages"]["stop_reason"] == "tool_use"
    message, item = bodies["responses"]["output"]
    assert message["content"][0]["text"] == "I look."
    assert (item["name"], item["arguments"]) == ("look", '{"at": 5, "how": "é"}')
    (choice,) = bodies["generate"]["choices"]
    assert choice["token_ids"] == tokens
    assert [e["token"] for e in choice["logprobs"]["content"]] == [f"token_id:{t}" for t in tokens]


DEMANDS = {
    "chat": ("required", {"type": "function", "function": {"name": "look"}}),
    "responses": ("required", {"type": "function", "name": "look"}),
    "messages": ({"type": "any"}, {"type": "tool", "name": "look"}),
}
"""Values of `tool_choice` that demand a call: of any tool, of one."""


@pytest.mark.parametrize("name", DEMANDS)
def test_a_call_that_is_demanded_begins_in_the_prompt(served, name):
    free, call = API[name].read(ASKED[name], served).prompts[0].ids, CALL.replace("\n", "")
    call_ids = served.chat.answer_ids(call).tolist()
    for choice, prefill in zip(DEMANDS[name], (call[: call.index(' "look"')], call[: call.index(" {")]), strict=True):
        job = API[name].read(ASKED[name] | {"tool_choice": choice}, served)
        assert job.prompts[0].ids.tolist() == [*free, *served.vocabulary.encode(prefill)]
        tokens = served.chat.answer_ids(call.removeprefix(prefill)).tolist()
        said = SAID[name](whole(API[name], job, served, tokens)[1])
        assert said == JOINED[name](streamed(API[name], job, served, tokens, [3], "stop"))
        free_answer = whole(API[name], API[name].read(ASKED[name], served), served, call_ids)[1]
        assert said[:2] == SAID[name](free_answer)[:2], "all but the numbers of tokens"


CODEX = [
    {"type": "function", "name": "exec", "strict": False, "parameters": LOOK, "description": "d"},
    {"type": "namespace", "name": "agents", "description": "others", "tools": [
        {"type": "function", "name": "close", "parameters": {"type": "object", "properties": {}}},
    ]},
    {"type": "custom", "name": "patch", "description": "d", "format": {"type": "text"}},
    {"type": "web_search", "external_web_access": True},
]  # fmt: skip
"""Tools in the forms that Codex sends."""


def test_custom_and_namespaced_tools_of_responses(served):
    """An answer that calls them has items of their kinds, which make the same calls when they come back."""
    api, body = API["responses"], ASKED["responses"] | {"tools": CODEX}
    job = api.read(body, served)
    offered = {t["function"]["name"]: t["function"]["parameters"] for t in job.conversation.tools}
    assert list(offered) == ["exec", "close", "patch"] and offered["patch"]["required"] == ["input"]
    calls = [("exec", {"at": 1}), ("close", {}), ("patch", {"input": "*** a\n"}), ("patch", {"text": 1})]
    texts = [f"<tool_call>\n{json.dumps({'name': n, 'arguments': a})}\n</tool_call>" for n, a in calls]
    tokens = served.chat.answer_ids("\n".join(texts)).tolist()
    _, whole_body, _ = whole(api, job, served, tokens)
    openai.types.responses.Response.model_validate(whole_body, strict=True)
    exec_, close, patch, other = items = whole_body["output"]
    assert (exec_["type"], exec_["arguments"], exec_.get("namespace")) == ("function_call", '{"at": 1}', None)
    assert (close["type"], close["namespace"]) == ("function_call", "agents")
    assert (patch["type"], patch["input"]) == ("custom_tool_call", "*** a\n")
    assert (other["type"], other["input"]) == ("custom_tool_call", '{"text": 1}')
    check_event = pydantic.TypeAdapter(openai.types.responses.ResponseStreamEvent).validate_python
    events = streamed(api, job, served, tokens, [])
    for event in events:
        check_event(event)
    assert [e["input"] for e in events if e["type"] == "response.custom_tool_call_input.done"] == [
        patch["input"], other["input"],
    ]  # fmt: skip
    results = [{"type": f"{item['type']}_output", "call_id": item["call_id"], "output": "ok"} for item in items]
    again = api.read(body | {"input": [{"role": "user", "content": "go"}, *items, *results]}, served)
    _, _, answer, *said = again.conversation.messages
    assert [(c["function"]["name"], c["function"]["arguments"]) for c in answer["tool_calls"]] == [
        *calls[:3], ("patch", {"input": '{"text": 1}'}),
    ]  # fmt: skip
    assert [m["tool_call_id"] for m in said] == [item["call_id"] for item in items]


def test_the_stop_sequence_is_told(served):
    job = API["messages"].read(ASKED["messages"] | {"stop_sequences": ["never", "k."]}, served)
    tokens = served.chat.tokenizer("I look.")["input_ids"]
    _, body, _ = whole(API["messages"], job, served, tokens)
    assert body["content"] == [{"type": "text", "text": "I loo"}]
    assert (body["stop_reason"], body["stop_sequence"]) == ("stop_sequence", "k.")


# ---- conversations


def test_a_history_is_the_same_in_all_apis(served):
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": {"at": 5}}}
    want = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "go\nnow"},
        {"role": "assistant", "content": "I look.", "tool_calls": [call, call | {"id": "c2"}]},
        {"role": "tool", "content": "a door", "tool_call_id": "c1"},
        {"role": "tool", "content": "a wall", "tool_call_id": "c2"},
        {"role": "user", "content": "and?"},
    ]
    text = lambda kind, *texts: [{"type": kind, "text": t} for t in texts]  # noqa: E731
    use = {"type": "tool_use", "name": "look", "input": {"at": 5}}
    messages = [
        {"role": "user", "content": text("text", "go", "now")},
        {"role": "assistant", "content": [*text("text", "I look."), use | {"id": "c1"}, use | {"id": "c2"}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c1", "content": text("text", "a door"), "is_error": False},
            {"type": "tool_result", "tool_use_id": "c2", "content": "a wall", "cache_control": {"type": "ephemeral"}},
            *text("text", "and?"),
        ]},
    ]  # fmt: skip
    called = {"type": "function_call", "name": "look", "arguments": '{"at":5}', "id": "fc", "status": "completed"}
    items = [
        {"role": "user", "content": text("input_text", "go", "now")},
        {
            "type": "message",
            "id": "m",
            "status": "completed",
            "role": "assistant",
            "content": text("output_text", "I look."),
        },
        called | {"call_id": "c1"},
        called | {"call_id": "c2"},
        {"type": "function_call_output", "call_id": "c1", "output": "a door"},
        {"type": "function_call_output", "call_id": "c2", "output": text("input_text", "a wall")},
        {"type": "message", "role": "user", "content": "and?"},
    ]
    jobs = [
        API["messages"].read(ASKED["messages"] | {"messages": messages}, served),
        API["responses"].read(ASKED["responses"] | {"input": items}, served),
    ]
    for job in jobs:
        assert job.conversation.messages == want
        function = {"name": "look", "description": "d", "parameters": LOOK}
        assert job.conversation.tools == [{"type": "function", "function": function}]
    assert np.array_equal(jobs[0].prompts[0].ids, jobs[1].prompts[0].ids)
    count = read_count(
        {k: v for k, v in ASKED["messages"].items() if k != "max_tokens"} | {"messages": messages}, served
    )
    assert len(count.prompts[0].ids) == len(jobs[0].prompts[0].ids)


def test_thoughts_of_other_models_reach_the_template(served):
    thinking = [{"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "redacted_thinking", "data": "x"}]
    said = [
        {"role": "assistant", "content": [*thinking, {"type": "text", "text": "a"}]},
        {"role": "user", "content": "b"},
    ]
    job = API["messages"].read(ASKED["messages"] | {"messages": [*ASKED["messages"]["messages"], *said]}, served)
    item = {
        "type": "reasoning",
        "id": "r",
        "summary": [{"type": "summary_text", "text": "hm"}],
        "encrypted_content": None,
    }
    items = [
        {"role": "user", "content": "go"},
        item,
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "b"},
    ]
    for found in (job, API["responses"].read(ASKED["responses"] | {"input": items}, served)):
        assert found.conversation.messages[2] == {"role": "assistant", "content": "a", "reasoning_content": "hm"}


def again(name, body, reply, call):
    """Return the next request of a client that sends everything back as it came."""
    if name == "messages":
        results = [
            {"type": "tool_result", "tool_use_id": b["id"], "content": "a door"}
            for b in reply["content"]
            if b["type"] == "tool_use"
        ]
        said = {"role": "assistant", "content": reply["content"]}
        return body | {"messages": [*body["messages"], said, {"role": "user", "content": results or "and?"}]}
    results = [
        {"type": "function_call_output", "call_id": i["call_id"], "output": "a door"}
        for i in reply["output"]
        if i["type"] == "function_call"
    ]
    before = body["input"] if isinstance(body["input"], list) else [{"role": "user", "content": body["input"]}]
    return body | {"input": [*before, *reply["output"], *(results or [{"role": "user", "content": "and?"}])]}


@pytest.mark.parametrize("name", ["messages", "responses"])
def test_a_conversation_continues_with_the_sampled_tokens(session, served, name):
    """Text with a call spelt in another way, calls alone, two calls, nothing at all."""
    api, body, stream = API[name], ASKED[name], []
    spaced = CALL.replace('"at": 5', '"at" : 5')
    before = None
    for said in (f"I look. \n{spaced}", CALL, f"{CALL}\n{CALL}", "", "end"):
        job = session.begin(session.read(body, api.read, served))
        assert job.call.before is before and job.prompts[0].ids.tolist()[: len(stream)] == stream
        tokens = served.chat.answer_ids(said).tolist()
        choice, reply, completion = whole(api, job, served, tokens)
        job.call.sampled()
        job.call.answered(completion, choice.text, choice.message)
        stream, before = job.call.stream.tolist(), job.call
        body = again(name, body, json.loads(json.dumps(reply)), job.call)


@pytest.mark.parametrize("name", ["messages", "responses"])
def test_any_answer_sent_back_continues(served, name):
    """150 random texts, with and without calls."""
    rng, api = random.Random(1), API[name]
    rules = SessionRules(SamplingParams(max_tokens=200, stop_ids=served.chat.stop_ids), (1, 0, 7, 3), 2, 1)
    for _ in range(150):
        session, said = Session(rules), "".join(rng.choices(PIECES, k=rng.randint(0, 8)))
        job = session.begin(session.read(ASKED[name], api.read, served))
        choice, reply, completion = whole(api, job, served, served.chat.answer_ids(said).tolist())
        job.call.sampled()
        job.call.answered(completion, choice.text, choice.message)
        body = again(name, ASKED[name], json.loads(json.dumps(reply)), job.call)
        after = session.begin(session.read(body, api.read, served))
        stream = job.call.stream.tolist()
        assert after.call.before is job.call and after.prompts[0].ids.tolist()[: len(stream)] == stream, said


def test_settings_of_a_session_count_in_every_api(session, served):
    asked = {"temperature": 0.5, "seed": 4}
    for name in ("messages", "responses"):
        job = session.read(ASKED[name] | asked, API[name].read, served)
        assert job.params.temperature == 1 and set(job.overridden) == asked.keys()
    body = ASKED["generate"] | {"sampling_params": asked}
    assert set(session.read(body, API["generate"].read, served).overridden) == asked.keys()


# ---- what is refused


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("messages", {"max_tokens": None}, "max_tokens"),
        ("messages", {"tool_choice": {"type": "some"}}, "tool_choice: must have the type auto, none or any"),
        ("messages", {"tool_choice": {"type": "tool", "name": "x"}}, "tool_choice: must name one of the tools"),
        ("messages", {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]"),
        ("messages", {"messages": [{"role": "user", "content": []}]}, "messages[0].content: is empty"),
        ("messages", {"messages": [{"role": "assistant", "content": "x"}]}, "must end with a user's message"),
        ("messages", {"stop": ["x"]}, "stop: is not a known field"),
        ("messages", {"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
        ("messages", {"n": 2}, "n: is not a known field"),
        ("responses", {"previous_response_id": "resp_1"}, "nothing is stored"),
        ("responses", {"conversation": "c"}, "conversation: is not supported"),
        ("responses", {"background": True}, "background: is not supported"),
        ("responses", {"tool_choice": "required", "tools": []}, "tool_choice: needs tools"),
        ("responses", {"tool_choice": {"type": "allowed_tools"}}, "tool_choice: must be 'auto'"),
        ("responses", {"tools": [{"type": "local_shell"}]}, "tools[0].type"),
        ("responses", {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "mcp"}]}]}, "tools[0].tools[0].type"),
        ("responses", {"tools": [{"type": "custom", "name": "a"}, {"type": "function", "name": "a"}]}, "tools[1].name"),
        ("responses", {"input": []}, "input: is empty"),
        ("responses", {"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ("responses", {"text": {"format": {"type": "json_schema", "name": "x", "schema": {}}}}, "text.format.type"),
        ("responses", {"include": ["message.output_text.logprobs"]}, "include"),
        ("generate", {"token_ids": [999]}, "token_ids[0]"),
        ("generate", {"token_ids": []}, "token_ids"),
        ("generate", {"sampling_params": {"min_tokens": 3}}, "sampling_params.min_tokens: is not supported"),
        ("generate", {"sampling_params": {"temprature": 3}}, "did you mean temperature"),
        ("generate", {"sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ("generate", {"sampling_params": {"stream": True}}, "belongs beside"),
        ("generate", {"features": {}}, "features"),
    ],
)  # fmt: skip
def test_a_refusal_names_the_field(served, name, change, says):
    with pytest.raises(ApiError) as e:
        API[name].read(ASKED[name] | change, served)
    assert e.value.status == 400 and says in e.value.message
    assert error_json(e.value) == {
        "type": "error",
        "error": {"type": "invalid_request_error", "message": e.value.message},
    }


def damaged(rng, value):
    """Return a JSON value with one random part replaced, removed or wrapped."""
    junk = (
        None,
        True,
        0,
        -1,
        1.5,
        2**70,
        "",
        "x",
        "text",
        [],
        {},
        [None],
        [[]],
        {"type": "text"},
        {"type": "tool_use"},
    )
    if isinstance(value, (dict, list)) and value and rng.random() < 0.85:
        value = copy.copy(value)
        key = rng.choice([*value] if isinstance(value, dict) else range(len(value)))
        if rng.random() < 0.1:
            del value[key]
        else:
            value[key] = damaged(rng, value[key])
        return value
    return rng.choice([*junk, [value], {"type": value if isinstance(value, str) else "x"}])


@pytest.mark.parametrize("n", [200, pytest.param(10_000, marks=pytest.mark.sweep)])
def test_a_damaged_body_is_a_refusal(served, n):
    rng, refused = random.Random(n), 0
    histories = {
        "messages": {"messages": [
            *ASKED["messages"]["messages"],
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "h", "signature": "s"}, {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "c1", "name": "look", "input": {"at": 5}},
            ]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "a door"}]},
        ]},
        "responses": {"input": [
            {"role": "user", "content": [{"type": "input_text", "text": "go"}]},
            {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "h"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
            {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "a door"},
        ]},
        "chat": {}, "generate": {},
    }  # fmt: skip
    for _ in range(n):
        name = rng.choice([*ASKED])
        body = damaged(rng, ASKED[name] | histories[name])
        for _ in range(rng.randint(0, 3)):
            body = damaged(rng, body)
        if not isinstance(body, dict):
            continue
        try:
            job = API[name].read(body, served)
            tokens = served.chat.answer_ids(CALL).tolist()
            whole(API[name], job, served, tokens)
        except ApiError as e:
            refused += 1
            assert e.status in (400, 404) and e.message
    assert n / 4 < refused < n
