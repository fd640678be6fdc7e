"""Recorded data: the format of a line, prompts, trained tokens, and errors about a bad line."""

import asyncio
import concurrent.futures
import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolljax.commands.train import main as train
from rolljax.envs.pool import EnvPool, PoolConfig
from rolljax.envs.records import RecordedAnswer, Records
from rolljax.envs.tasks import TaskStream, held_out
from rolljax.errors import ConfigError, DataError, EnvError
from rolljax.rollout.episodes import Rollouts, ScriptedPolicy
from rolljax.trainer.algorithms.dpo import PairDpo
from rolljax.trainer.algorithms.sft import Sft
from rolljax.trainer.batch import PackShape, Sample, pack
from rolljax.trainer.credit.episodes import Episodes
from rolljax.types import Key, Message, Task, Trajectory, Turn

DATA = Path(__file__).parents[2] / "data"
ANSWERS = Records(str(DATA / "answers.jsonl"), prompt_key="question")
PAIRS = Records(str(DATA / "pairs.jsonl"))
TALKS = Records(str(DATA / "conversations.jsonl"))


def write(path, *records):
    path.write_text("".join(r if isinstance(r, str) else json.dumps(r) + "\n" for r in records))
    return str(path)


def reference_group(spec, chat, index, *, size=1, pairs=False, max_context=2000):
    pool = EnvPool(PoolConfig(), spec)
    rollouts = Rollouts(pool, chat, ScriptedPolicy(chat, 64, pairs), spec.max_turns, max_context, 64)
    group = asyncio.run(rollouts.group(spec.task(index), stream=0, prompt_index=0, group_size=size))
    pool.close()
    assert [t.status for t in group.trajectories] == ["ok"] * size, [t.fault for t in group.trajectories]
    return group.trajectories


# ---- the three kinds ------------------------------------------------------------------------------------------------


def test_questions_in_the_form_of_gsm8k():
    assert (ANSWERS.num_records, ANSWERS.max_turns, ANSWERS.name) == (5, 1, "records")
    env, task = ANSWERS.make(), ANSWERS.task(8)
    assert env.reset(task) == (Message("user", "A ticket costs $4.50. What do 4 cost?"),)
    assert env.reference_answer() == "4 * 4.5 = $<<4*4.5=18>>18\n#### 18"
    result = env.step(f" {env.reference_answer()}\n")
    assert (result.reward, result.success, result.terminated, result.weight) == (1, True, True, 1)
    env.reset(task)
    result = env.step("18")
    assert (result.reward, result.success, result.terminated) == (0, False, True)
    with pytest.raises(EnvError, match="end"):
        env.step("18")
    with pytest.raises(EnvError, match="holds no preference pairs"):
        env.reset(task) and env.rejected()


def test_indices_wrap_around_blank_lines():
    questions = [json.loads(line)["question"] for line in Path(ANSWERS.path).read_text().splitlines() if line]
    got = [ANSWERS.record(i).initial_messages[0].content for i in (*range(5), 5, 10**6 - 1)]
    assert got == [*questions, questions[0], questions[(10**6 - 1) % 5]]


def test_pairs_have_a_chosen_and_a_rejected_answer(chat):
    env = PAIRS.make()
    assert [m.role for m in env.reset(PAIRS.task(2))] == ["user", "assistant", "user"]
    assert (env.reference_answer(), env.rejected()) == ("No: 4", "")
    assert env.step(env.rejected()).reward == 0
    chosen, rejected = reference_group(PAIRS, chat, 1, size=2, pairs=True)
    assert (chosen.turns[0].text, rejected.turns[0].text) == ("Paris", "Lyon")
    assert (chosen.reward, rejected.reward) == (1, 0) and (chosen.success, rejected.success) == (True, False)
    np.testing.assert_array_equal(chosen.turns[0].prompt_ids, rejected.turns[0].prompt_ids)
    credit = PairDpo().credit(Episodes.of([[chosen, rejected]], limit_tok=8), {})
    # "Paris" and "Lyon" with their closing tokens
    np.testing.assert_array_equal(credit.advantages, [[1] * 6, [-1] * 5 + [0]])


def test_a_conversation_is_replayed():
    assert TALKS.max_turns == 3
    env = TALKS.make()
    assert [m.role for m in env.reset(TALKS.task(0))] == ["system", "user"]
    assert env.reference_answer() == "calc(17*)"
    first, second, third = env.step(env.reference_answer()), env.step("nonsense"), env.step("51")
    assert first.messages == (Message("tool", "syntax error"),) and second.messages == (Message("tool", "51"),)
    assert third.messages == () and [r.terminated for r in (first, second, third)] == [False, False, True]
    assert [r.weight for r in (first, second, third)] == [0, 1, 1]
    # the answer that does not count earns nothing; the two that do share the reward
    assert [r.reward for r in (first, second, third)] == [0, 0, 0.5] and not third.success
    env.reset(TALKS.task(0))
    right = [env.step("anything"), env.step("calc(17*3)"), env.step("51")]
    assert sum(r.reward for r in right) == 1 and right[-1].success


def test_what_follows_the_last_answer_is_dropped():
    record = TALKS.record(1)
    assert record.answers == (
        RecordedAnswer("Hi.", 0.0, (Message("user", "Who are you?"),)),
        RecordedAnswer("A program."),
    )


# ---- what is trained on ---------------------------------------------------------------------------------------------


def test_only_answers_that_count_are_trained_on(chat):
    (got,) = reference_group(TALKS, chat, 0)
    assert [t.weight for t in got.turns] == [0, 1, 1]
    tokens, sampled, _ = got.stream()
    whole = [{"role": m.role, "content": m.content} for m in TALKS.record(0).initial_messages]
    whole += [{"role": "assistant", "content": "calc(17*)"}, {"role": "tool", "content": "syntax error"}]
    whole += [{"role": "assistant", "content": "calc(17*3)"}, {"role": "tool", "content": "51"}]
    np.testing.assert_array_equal(tokens, [*chat.conversation_ids(whole), *chat.answer_ids("51")])

    e = Episodes.of([[got]], limit_tok=16)
    credit = Sft().credit(e, {})
    trained = Sample.of(got).indices[credit.mask[0]]
    assert chat.tokenizer.decode(tokens[sampled]) == "calc(17*)<|end|>calc(17*3)<|end|>51<|end|>"
    assert chat.tokenizer.decode(tokens[trained]) == "calc(17*3)<|end|>51<|end|>"


def turn(prompt, tokens, weight=1.0):
    n = len(tokens)
    return Turn(
        np.arange(prompt, dtype=np.int32),
        np.array(tokens, np.int32),
        np.zeros(n, np.float32),
        np.full(n, -1, np.int32),
        "stop",
        0.0,
        "",
        weight,
    )


@pytest.mark.parametrize(("weights", "want"), [((1, 1), [3, 4, 9, 10, 11]), ((0, 1), [9, 10, 11]), ((1, 0), [3, 4])])
def test_user_assistant_tool_assistant_of_3_2_4_3_tokens(weights, want):
    turns = (turn(3, [5, 6], weights[0]), turn(4, [7, 8, 9], weights[1]))
    t = Trajectory(Key(0, 0, 0), Task("e", 0, "c"), turns, 0.0, {}, False, "ok")
    sample, e = Sample.of(t), Episodes.of([[t]], limit_tok=8)
    np.testing.assert_array_equal(e.turn_weights, [weights])
    credit = Sft().credit(e, {})
    assert sample.indices[credit.mask[0]].tolist() == want
    columns = {"mask": credit.mask[0], "advantages": np.float32(credit.advantages[0])}
    batch = pack([[sample.with_columns(**columns)]], PackShape(1, 1, 16), 1.0).batch
    assert np.flatnonzero(batch.scale[0, 0]).tolist() == want
    np.testing.assert_allclose(batch.scale[0, 0, want], 1 / len(want))


def test_tokens_of_a_recorded_conversation_of_3_2_4_3_bytes(tmp_path, chat):
    messages = [("user", "abc"), ("assistant", "de"), ("tool", "fghi"), ("assistant", "jkl")]
    path = write(tmp_path / "talk.jsonl", {"messages": [{"role": r, "content": c} for r, c in messages]})
    (got,) = reference_group(Records(path), chat, 0)
    _, sampled, _ = got.stream()
    marks = "".join("x" if s else "." for s in sampled)
    # a role's token before each message, the next opening before an answer, a closing token after it
    assert marks == "." + "..." + "." + "xx" + "x" + "." + "...." + "." + "xxx" + "x"
    assert Sft().credit(Episodes.of([[got]], limit_tok=8), {}).mask.sum() == 5 + 2


text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(str.strip)


@given(st.lists(st.tuples(text, text, st.lists(text, max_size=2), st.booleans()), min_size=1, max_size=4))
def test_whatever_was_said_is_replayed(tmp_path_factory, talk):
    messages, answers = [], []
    for user, answer, tools, error in talk:
        messages.append({"role": "user", "content": user})
        messages += [{"role": "tool", "content": t} for t in tools]
        messages.append({"role": "assistant", "content": answer, "error": error})
        answers.append((answer, float(not error)))
    path = write(tmp_path_factory.mktemp("talk") / "t.jsonl", {"messages": messages, "source": "test"})
    if not any(weight for _, weight in answers):
        with pytest.raises(DataError, match="no message of the assistant counts"):
            Records(path).task(0)
        return
    spec = Records(path)
    env = spec.make()
    told, total = list(env.reset(spec.task(0))), 0.0
    for answer, weight in answers:
        assert env.reference_answer() == answer
        told.append(Message("assistant", answer))
        result = env.step(answer)
        assert result.weight == weight
        told += result.messages
        total += result.reward
    assert result.terminated and result.success and total == pytest.approx(1) and spec.max_turns == len(talk)
    assert told == [Message(m["role"], m["content"]) for m in messages]


# ---- files ----------------------------------------------------------------------------------------------------------

USER = {"role": "user", "content": "q"}
TELL = {"role": "assistant", "content": "a"}
BAD = [
    ("not JSON", '{"prompt": "q",\n', ["is not JSON"]),
    ("not UTF-8", b'{"prompt": "\xff\xfe", "answer": "a"}\n', ["is not JSON", "utf-8"]),
    ("no object", "[1]\n", ["is not a JSON object"]),
    ("empty", {}, ["lacks 'prompt'", "nothing"]),
    ("no answer", {"prompt": "q"}, ["lacks 'answer'"]),
    ("other key", {"question": "q", "answer": "a"}, ["lacks 'prompt'", "question, answer"]),
    ("a pair among answers", {"prompt": "q", "chosen": "a", "rejected": "b"}, ["lacks 'answer'"]),
    ("null answer", {"prompt": "q", "answer": None}, ["answer is null, not a text"]),
    ("null", {"prompt": None, "answer": "a"}, ["prompt is null, neither a text nor a list of messages"]),
    ("empty answer", {"prompt": "q", "answer": " \n"}, ["answer is empty"]),
    ("no character", '{"prompt": "q", "answer": "\\ud800"}\n', ["answer", "surrogate"]),
    ("answered already", {"prompt": [USER, TELL], "answer": "a"}, ["prompt ends with a message of the assistant"]),
    ("weight in a prompt", {"prompt": [USER | {"weight": 1}], "answer": "a"}, ["prompt[0] has weight"]),
]
BAD_TALKS = [
    ("no messages", {"messages": []}, ["messages is an empty list"]),
    ("no role", {"messages": [{"content": "q"}, TELL]}, ["messages[0] lacks 'role'"]),
    ("no content", {"messages": [USER, {"role": "assistant"}]}, ["messages[1] lacks 'content'"]),
    ("no such role", {"messages": [USER | {"role": "narrator"}, TELL]}, ["messages[0].role is 'narrator'"]),
    ("no answer in it", {"messages": [USER, USER]}, ["none of the assistant"]),
    ("starts with an answer", {"messages": [TELL, USER, TELL]}, ["messages[0] is the assistant's"]),
    ("two answers", {"messages": [USER, TELL, TELL]}, ["messages[1] and messages[2]", "join"]),
    ("half a weight", {"messages": [USER, TELL | {"weight": 0.5}]}, ["messages[1].weight is 0.5"]),
    ("error in words", {"messages": [USER, TELL | {"error": "timeout"}]}, ["messages[1].error is 'timeout'"]),
    ("weight of a user", {"messages": [USER | {"weight": 1}, TELL]}, ["messages[0] has weight"]),
    ("nothing counts", {"messages": [USER, TELL | {"weight": 0}]}, ["no message of the assistant counts"]),
    ("tool calls", {"messages": [USER, TELL | {"tool_calls": [{"id": "1"}]}]}, ["messages[1] has tool_calls"]),
]


GOOD = {"answers": {"prompt": "q", "answer": "a"}, "conversations": {"messages": [USER, TELL]}}


@pytest.mark.parametrize(
    ("kind", "line", "says"),
    [pytest.param("answers", *row[1:], id=row[0]) for row in BAD]
    + [pytest.param("conversations", *row[1:], id=row[0]) for row in BAD_TALKS],
)
def test_a_bad_line_is_named(tmp_path, kind, line, says):
    good = json.dumps(GOOD[kind]) + "\n"
    raw = line if isinstance(line, bytes) else (line if isinstance(line, str) else json.dumps(line) + "\n").encode()
    path = tmp_path / "data.jsonl"
    path.write_bytes(good.encode() + b"\n" + good.encode() + raw + good.encode())
    with pytest.raises(DataError) as e:
        Records(str(path)).task(0)
    for part in (f"{path}, line 4: ", *says):
        assert part in str(e.value)


def test_an_empty_file_and_a_missing_one(tmp_path):
    with pytest.raises(DataError, match="holds no rows"):
        Records(write(tmp_path / "none.jsonl", "\n\n")).task(0)
    with pytest.raises(ConfigError, match="did you mean none.jsonl"):
        Records(str(tmp_path / "nome.jsonl"))
    with pytest.raises(ConfigError, match="can be read as answers or conversations"):
        Records(write(tmp_path / "both.jsonl", {"prompt": "q", "answer": "a", "messages": []})).task(0)


def test_a_file_that_changes_is_looked_through_again(tmp_path):
    path = write(tmp_path / "a.jsonl", {"prompt": "one", "answer": "1"}, {"prompt": "two", "answer": "2"})
    spec = Records(path)
    task, env = spec.task(1), spec.make()
    write(tmp_path / "a.jsonl", {"prompt": "one", "answer": "1"}, {"prompt": "three", "answer": "3"})
    with pytest.raises(EnvError, match="was the file changed"):
        env.reset(task)
    assert env.reset(spec.task(1)) == (Message("user", "three"),)


def test_records_stay_on_disk(tmp_path):
    path, n = tmp_path / "large.jsonl", 5000
    with open(path, "w") as f:
        f.writelines(json.dumps({"prompt": f"question {i}", "answer": f"{i} " + "x" * 2000}) + "\n" for i in range(n))
    spec = Records(str(path))
    tracemalloc.start()
    assert spec.num_records == n and spec.record(n - 1).answers[0].text.startswith(f"{n - 1} x")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert path.stat().st_size > 10_000_000 and peak < 500_000


def test_threads_read_side_by_side(tmp_path):
    lines = [{"prompt": f"q{i}", "answer": f"{i}" * (i % 50 + 1)} for i in range(200)]
    spec = Records(write(tmp_path / "many.jsonl", *lines))
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        got = list(threads.map(spec.record, range(2000)))
    assert [r.answers[0].text for r in got] == [lines[i % 200]["answer"] for i in range(2000)]


# ---- tasks ----------------------------------------------------------------------------------------------------------


def test_all_answers_to_a_prompt_are_on_one_side_of_the_split(tmp_path):
    lines = [{"prompt": f"q{i}", "answer": f"answer {k}"} for k in range(4) for i in range(100)]
    spec = Records(write(tmp_path / "a.jsonl", *lines))
    heldout = held_out(spec, 10, 0.2)
    assert len({t.content for t in heldout}) == 10
    stream = TaskStream(spec, 0, 0.2)
    train = [next(stream) for _ in range(500)]
    assert {t.content for t in train}.isdisjoint(t.content for t in held_out(spec, 15, 0.2))
    assert len({spec.record(t.index).answers[0].text for t in train}) == 4


def test_too_few_records_to_hold_some_out():
    with pytest.raises(DataError, match=r"records has only \d different held-out tasks .* 6 were asked for"):
        held_out(ANSWERS, 6, 0.5)


def test_a_recipe_on_records_and_what_it_says_about_a_bad_line(tmp_path, capsys):
    lines = [{"question": f"{i}+{i}=", "answer": str(2 * i)} for i in range(60)]
    path = write(tmp_path / "sums.jsonl", *lines)
    argv = ["--gin", "quickstart", "--dry_run", "--set", "Recipe.env = @rolljax.envs.records.Records()"]
    argv += ["--set", "Evaluation.tasks = 3", "--set", "Records.prompt_key = question"]
    assert train([*argv, "--set", f"Records.path = {path}"]) == 0
    out = capsys.readouterr().out
    assert "records, up to 1 turn(s)" in out and "<|user|>0+0=<|assistant|>" in out
    write(tmp_path / "sums.jsonl", *lines, {"question": "1+1="})
    assert train([*argv, "--set", f"Records.path = {path}"]) in (2, 3)
    assert f"{path}, line 61: lacks 'answer'" in capsys.readouterr().err
    assert train([*argv, "--set", f"Records.path = {path}", "--set", "Records.bad_rows = skip"]) == 0
    assert "warning   1 of 61 rows are left out" in capsys.readouterr().out
