"""Sessions: precedence of settings, prompts that continue sampled tokens, streams, limits."""

import numpy as np
import pytest

from rolljax.model.tokenizer import Chat, byte_tokenizer
from rolljax.serving.requests import read_chat, read_completion
from rolljax.serving.schema import ApiError, ServedModel
from rolljax.serving.session import ENDED_KEPT, Session, SessionRules, Sessions
from rolljax.types import Completion, Sampled, SamplingParams

CONTEXT = 400
USER = {"role": "user", "content": "17*3?"}
AGAIN = {"role": "user", "content": "51"}


@pytest.fixture(scope="module")
def served():
    chat = Chat(byte_tokenizer())
    return ServedModel("policy", chat.tokenizer, chat, 264, CONTEXT)


@pytest.fixture
def session(served):
    params = SamplingParams(temperature=0.8, max_tokens=20, stop_ids=served.chat.stop_ids)
    return Session(SessionRules(params, (1, 0, 7, 3), max_calls=4, max_restarts=1))


def begin(session, served, messages=None, **fields):
    body = fields if messages is None else {"messages": messages} | fields
    return session.begin(session.read(body, read_completion if messages is None else read_chat, served))


def answer(job, served, tokens, text=None):
    """Answer a call with sampled ids, and return the program's message; its text may tokenise to other ids."""
    tokens = np.array(tokens, np.int32)
    logp = -np.arange(1, len(tokens) + 1, dtype=np.float32)
    reason = "stop" if tokens[-1] in served.chat.stop_ids else "length"
    completion = Completion(Sampled.of(tokens, logp, np.full(len(tokens), 2, np.int32)), reason)
    job.call.sampled()
    text = served.vocabulary.text(tokens) if text is None else text
    job.call.answered(completion, text, {"role": "assistant", "content": text})
    job.call.close()
    return job.call.message


def ids(served, text):
    return served.chat.answer_ids(text).tolist()


def odd_ids(served):
    """Return an answer whose ids are not those of its text: half a character and a special token, which texts do not
    show."""
    first = served.chat.tokenizer("é")["input_ids"][0]
    user = served.chat.tokenizer.convert_tokens_to_ids("<|user|>")
    return [first, user, *ids(served, "calc(17*3)")]


def prompt(served, messages):
    return served.chat.conversation_ids(messages)


# ---- whose settings count


def test_the_law_is_the_trainers(session, served):
    asked = {"temperature": 0, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "seed": 4, "ignore_eos": True, "model": "gpt-4o"}
    job = begin(session, served, [USER], **asked)
    assert job.params == SamplingParams(temperature=0.8, max_tokens=20, stop_ids=served.chat.stop_ids)
    assert job.seed is None and job.address == (1, 0, 7, 3, 0)
    assert set(job.call.overridden) == asked.keys() - {"model"}


def test_what_agrees_is_not_counted_as_overridden(session, served):
    job = begin(session, served, [USER], temperature=0.8, top_p=1.0, ignore_eos=False)
    assert job.call.overridden == ()


def test_answers_get_shorter_but_never_longer_than_the_trainer_says(session, served):
    given = [{"max_tokens": 5}, {"max_completion_tokens": 300}, {}]
    assert [session.read({"messages": [USER]} | g, read_chat, served).params.max_tokens for g in given] == [5, 20, 20]
    assert session.read({"prompt": "x"}, read_completion, served).params.max_tokens == 16


def test_stops_of_the_program_are_honoured(session, served):
    job = begin(session, served, [USER], stop=["\n"], stop_token_ids=[65])
    assert job.params.stop == ("\n",) and set(job.params.stop_ids) == {65, *served.chat.stop_ids}
    with pytest.raises(ApiError, match="stop_token_ids"):
        session.read({"messages": [USER], "stop_token_ids": [65, 66, 67, 68], "ignore_eos": True}, read_chat, served)


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ({"prompt": "x", "n": 2}, "n"),
        ({"prompt": ["x", "y"]}, "prompt"),
        ({"prompt": "x", "echo": True}, "echo"),
        ({"prompt": "x", "max_tokens": 0, "echo": True}, "echo"),
        ({"prompt": "x", "temperature": -1}, "temperature"),
        ({"prompt": "x", "model": 7}, "model"),
    ],
)
def test_what_a_session_refuses(session, served, body, name):
    with pytest.raises(ApiError) as e:
        session.read(body, read_completion, served)
    assert (e.value.status, e.value.param) == (400, name)
    assert not session.calls


# ---- prompts


def test_a_conversation_goes_on_with_what_was_sampled(session, served):
    first = begin(session, served, [USER])
    assert first.prompts[0].ids.tolist() == prompt(served, [USER]).tolist()
    said = answer(first, served, odd_ids(served))
    talk = [USER, said, AGAIN]
    job = begin(session, served, talk)
    delta = served.chat.delta_ids([], closed=True).tolist()[:-1]
    assert not delta, "the closing token was sampled"
    stream = [*first.prompts[0].ids, *odd_ids(served)]
    fresh = prompt(served, talk).tolist()
    assert job.prompts[0].ids.tolist()[: len(stream)] == stream
    assert fresh[: len(stream)] != stream, "tokenised again the answer would be other tokens"
    tail = [*served.chat.tokenizer("<|user|>51<|assistant|>")["input_ids"]]
    assert job.prompts[0].ids.tolist() == stream + tail
    assert job.call.before is first.call and job.call.new_ids.tolist() == tail
    assert job.address[-1] == 1


def test_an_answer_without_its_end_gets_one(session, served):
    first = begin(session, served, [USER])
    cut = served.chat.tokenizer("calc(17")["input_ids"]
    said = answer(first, served, cut)
    job = begin(session, served, [USER, said, AGAIN])
    tail = served.chat.tokenizer("<|end|><|user|>51<|assistant|>")["input_ids"]
    assert job.call.new_ids.tolist() == tail


def test_a_stop_text_that_the_program_did_not_see_stays_in_the_stream(session, served):
    first = begin(session, served, [USER], stop=[")"])
    tokens = served.chat.tokenizer("calc(17*3)")["input_ids"]
    said = answer(first, served, tokens, text="calc(17*3")
    job = begin(session, served, [USER, said, AGAIN])
    assert job.call.before is first.call
    assert job.prompts[0].ids.tolist()[len(first.prompts[0].ids) :][: len(tokens)] == tokens


@pytest.mark.parametrize(
    "change",
    [
        lambda said: [USER, said | {"content": said["content"].strip()}, AGAIN],
        lambda said: [{"role": "system", "content": "other"}, USER, said, AGAIN],
        lambda said: [USER | {"content": "17*4?"}, said, AGAIN],
        lambda said: [USER, AGAIN],
        lambda said: [USER],
    ],
)
def test_another_conversation_is_a_stream_of_its_own(session, served, change):
    first = begin(session, served, [USER])
    said = answer(first, served, ids(served, "  calc(17*3)"))
    job = begin(session, served, change(said))
    assert job.call.before is None and job.prompts[0].ids.tolist() == prompt(served, change(said)).tolist()
    answer(job, served, ids(served, "x"))
    assert session.streams() == [[first.call], [job.call]]


def test_other_tools_are_another_conversation(session, served):
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
    first = begin(session, served, [USER], tools=tools)
    said = answer(first, served, ids(served, "look()"))
    assert begin(session, served, [USER, said, AGAIN]).call.before is None
    job = begin(session, served, [USER, said, {"role": "tool", "content": "a door", "tool_call_id": "1"}], tools=tools)
    assert job.call.before is first.call


def test_ids_that_the_program_gives_back_are_taken_as_they_are(session, served):
    first = begin(session, served, prompt=[65, 66])
    answer(first, served, [67, 68])
    job = begin(session, served, prompt=[65, 66, 67, 68, 69])
    assert job.call.before is first.call and job.call.new_ids.tolist() == [69]
    answer(job, served, [70])
    complete = begin(session, served, prompt=[65, 66, 67, 68, 69, 70])
    assert complete.call.new_ids.tolist() == []


def test_every_sampled_token_is_in_one_stream_only(session, served):
    """Two calls that continue the same one: the second is a separate stream, and repeats the tokens before it."""
    first = begin(session, served, [USER])
    said = answer(first, served, ids(served, "calc(17*3)"))
    second, third = begin(session, served, [USER, said, AGAIN]), begin(session, served, [USER, said, USER])
    for job in (third, second):
        answer(job, served, ids(served, "51"))
    assert session.streams() == [[first.call, second.call], [third.call]]
    assert (
        third.call.new_ids.tolist()
        == [*first.call.stream, *served.chat.delta_ids([], closed=True)[:-1]]
        + (served.chat.tokenizer("<|user|>17*3?<|assistant|>")["input_ids"])
    )


def test_two_conversations_in_turns_are_two_streams(session, served):
    other = {"role": "user", "content": "another"}
    a = begin(session, served, [USER])
    said_a = answer(a, served, ids(served, "a"))
    b = begin(session, served, [other])
    said_b = answer(b, served, ids(served, "b"))
    a2 = begin(session, served, [USER, said_a, AGAIN])
    answer(a2, served, ids(served, "aa"))
    b2 = begin(session, served, [other, said_b, AGAIN])
    answer(b2, served, ids(served, "bb"))
    assert session.streams() == [[a.call, a2.call], [b.call, b2.call]]


# ---- limits and ends


def test_calls_and_conversations_are_limited(session, served):
    for _ in range(2):
        answer(begin(session, served, [USER]), served, ids(served, "x"))
    with pytest.raises(ApiError) as e:
        begin(session, served, [AGAIN])
    assert (e.value.status, e.value.code, session.limit) == (403, "max_restarts", "2 conversations")
    said = {"role": "assistant", "content": "x"}
    job = begin(session, served, [USER, said, AGAIN])
    said = answer(job, served, ids(served, "y"))
    assert session.limit == ""
    answer(begin(session, served, [USER, {"role": "assistant", "content": "x"}, AGAIN, said]), served, ids(served, "z"))
    with pytest.raises(ApiError) as e:
        begin(session, served, [USER])
    assert (e.value.status, e.value.code, session.limit) == (403, "max_calls", "4 calls")


def test_a_conversation_that_does_not_fit_is_a_limit(session, served):
    with pytest.raises(ApiError) as e:
        begin(session, served, [{"role": "user", "content": "x" * CONTEXT}])
    assert e.value.code == "context_length_exceeded" and session.limit == f"the context of {CONTEXT} tokens"


def test_a_call_that_was_given_up_leaves_its_number_only(session, served):
    lost = begin(session, served, [USER])
    lost.call.close()
    again = begin(session, served, [USER])
    assert again.address[-1] == 1 and session.dropped == 1 and session.calls == [again.call]
    said = answer(again, served, ids(served, "x"))
    retried = begin(session, served, [USER, said])
    retried.call.close()
    assert begin(session, served, [USER, said]).call.before is again.call


def test_the_clock_of_the_sampler_runs_while_calls_are_open(session, served):
    assert session.busy_s() == 0
    job, other = begin(session, served, [USER]), begin(session, served, [AGAIN])
    while not session.busy_s():
        pass
    job.call.sampled()
    before = session.busy_s()
    while session.busy_s() == before:
        pass
    other.call.close()
    assert session.busy_s() == session.busy_s() > before


def test_sessions_by_key(session, served):
    sessions = Sessions()
    one, two = sessions.open(session.rules), sessions.open(session.rules)
    assert sessions.find(one.key) is one and sessions.find(two.key) is two and one.key != two.key
    assert sessions.find("") is None and sessions.find("session-guess") is None
    job = one.read({"messages": [USER]}, read_chat, served)
    sessions.end(one)
    for late in (lambda: sessions.find(one.key), lambda: one.begin(job)):
        with pytest.raises(ApiError) as e:
            late()
        assert e.value.status == 410
    assert sessions.find(two.key) is two
    for _ in range(ENDED_KEPT):
        sessions.end(sessions.open(session.rules))
    assert sessions.find(one.key) is None
