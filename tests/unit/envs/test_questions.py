"""Questions with answers: prompts, correct answers, custom rewards, and data in other formats."""

import asyncio
import dataclasses
import functools
import json
import math
import os
import pickle
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from rolljax.envs import checks
from rolljax.envs.catalog import make_spec, ref_of
from rolljax.envs.mixture import Domain, Mixture
from rolljax.envs.pool import EnvPool, PoolConfig
from rolljax.envs.questions import BOXED, Questions
from rolljax.envs.records import Records
from rolljax.errors import ConfigError, DataError, EnvError
from rolljax.types import Message
from rolljax.validate import main as validate

SAMPLE = Path(__file__).parents[2] / "data" / "word_problems.jsonl"
SPEC = Questions(str(SAMPLE))
PLACES = ("any", "boxed", "last", "Answer: {answer}", "<answer>{answer}</answer>")


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def ask(spec, answer, index=0):
    env = spec.make()
    env.reset(spec.task(index))
    return env.step(answer)


# ---- episodes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", PLACES)
def test_reference_answers_score_one_and_the_next_number_none(where):
    spec = dataclasses.replace(SPEC, answer_in=where)
    assert spec.num_questions == 20
    for i in range(20):
        env = spec.make()
        env.reset(spec.task(i))
        reference = env.reference_answer()
        assert "<<" not in reference
        result = env.step(reference)
        assert (result.reward, result.success, result.terminated) == (1, True, True)
        wrong = "12345"
        result = ask(spec, f"\\boxed{{{wrong}}}\n<answer>{wrong}</answer>\nAnswer: {wrong}", i)
        assert (result.reward, result.success) == (0, False)
        assert result.metrics == {"no_answer_n": 0.0, "unverified_n": 0.0}


def test_what_is_asked():
    env = SPEC.make()
    question = "A train needs 3 hours for 270 km. How fast is it in km/h?"
    assert env.reset(SPEC.task(3)) == (Message("user", BOXED.replace("{question}", question)),)
    assert SPEC.task(3).content == SPEC.task(23).content == question
    assert env.reference_answer() == "270/3=90 km/h.\n\\boxed{90}"
    other = dataclasses.replace(SPEC, answer_in="#### {answer}", prompt="{question} #### N", system="Be brief.")
    env = other.make()
    assert env.reset(other.task(3)) == (Message("system", "Be brief."), Message("user", question + " #### N"))
    assert env.reference_answer() == "270/3=90 km/h.\n#### 90"
    assert env.step("I do not know.").metrics["no_answer_n"] == 1.0
    with pytest.raises(EnvError, match="after the episode's end"):
        env.step("90")


def test_settings_that_cannot_work(tmp_path):
    with pytest.raises(ConfigError, match="is not a file") as e:
        Questions(str(tmp_path / "none.jsonl"))
    assert e.value.setting == "Questions.path"
    for settings, match in (
        ({"prompt": "question"}, "does not contain"),
        ({"answer_in": "box"}, "no way to find"),
        ({"answer_in": "{answer}"}, "no way to find"),
        ({"records": [{"question": "1+1?", "answer": "2"}]}, "instead of a path"),
        ({"path": "", "records": []}, "holds no row"),
        ({"path": "", "records": [{"question": {1, 2}}]}, "no JSON object"),
        ({"path": ""}, "is empty"),
    ):
        with pytest.raises(ConfigError, match=match):
            dataclasses.replace(SPEC, **settings)


def test_a_changed_file_is_noticed(tmp_path):
    rows = [{"question": "1+1?", "answer": "2"}, {"question": "1+2?", "answer": "3"}]
    spec = Questions(write(tmp_path / "a.jsonl", *rows))
    task, env = spec.task(1), spec.make()
    write(tmp_path / "a.jsonl", rows[0], {"question": "1+2+0?", "answer": "3"})
    with pytest.raises(EnvError, match="was the file changed"):
        env.reset(task)


# ---- data in others' shapes -----------------------------------------------------------------------------------------

DAPO_ASK = "Solve it. The last line should be of the form Answer: $Answer.\n\nWhat is $2+2$?"
DAPO = {
    "data_source": "math_dapo",
    "prompt": [{"content": DAPO_ASK, "role": "user"}],
    "ability": "MATH",
    "reward_model": {"ground_truth": "4", "style": "rule-lighteval/MATH_v2"},
    "extra_info": {"index": "9a9b6eb4-a1cb-49d1-8c1e-62eaf2f74079"},
}
DEEPMATH = {
    "question": "Evaluate $\\int_0^1 x\\,dx$.",
    "final_answer": "\\dfrac{1}{2}",
    "difficulty": 3.5,
    "topic": "Calculus",
    "r1_solution_1": "The integral is one half.",
}
MATH = {
    "problem": "What is $1/4+1/4$?",
    "level": "Level 1",
    "solution": "It is $\\boxed{\\frac{1}{2}}$.",
    "type": "Algebra",
}
OPENR1 = {
    "problem": "Find $x$.",
    "solution": "Well, $x = \\boxed{7}$.",
    "answer": "7",
    "messages": [{"role": "user", "content": "Find $x$."}, {"role": "assistant", "content": "Well, 7."}],
}
AIME = {"ID": "2024-I-1", "Problem": "How long?", "Answer": 204}
OPENAI = {
    "messages": json.dumps([{"role": "system", "content": "S"}, {"role": "user", "content": "2+2?"}]),
    "answer": "4",
}
SKYWORK = {"prompt": [{"role": "user", "content": "2+2?"}], "reward_model": '{"ground_truth": "4"}'}
OLYMPIAD = {"question": "Which interval?", "final_answer": ["(0, 1]"]}


@pytest.mark.parametrize(
    "row, told, right, wrong",
    [
        (DAPO, DAPO_ASK, "So\nAnswer: $4$", "Answer: 5"),
        (DEEPMATH, DEEPMATH["question"], "\\boxed{0.5}", "\\boxed{2}"),
        (MATH, MATH["problem"], "\\boxed{\\frac12}", "\\boxed{\\frac14}"),
        (OPENR1, "Find $x$.", "x is 7", "x is 8"),
        (AIME, "How long?", "\\boxed{204}", "\\boxed{20}"),
        (OPENAI, "2+2?", "4", "22"),
        (SKYWORK, "2+2?", "4", "22"),
        (OLYMPIAD, "Which interval?", "\\boxed{(0,1]}", "I say all"),
    ],
)
def test_files_of_others_need_no_settings(tmp_path, row, told, right, wrong):
    if not isinstance(row.get("messages"), str):
        path = tmp_path / "data.parquet"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), path)
    else:
        path = write(tmp_path / "data.jsonl", row)
    spec = Questions(str(path))
    initial_messages = spec.question(0).initial_messages
    assert initial_messages[-1].content.startswith(told) and initial_messages[-1].role == "user"
    assert initial_messages[-1].content.endswith("in \\boxed{}.") == (row not in (DAPO, SKYWORK, OPENAI))
    env = spec.make()
    env.reset(spec.task(0))
    assert env.step(env.reference_answer()).reward == 1
    assert ask(spec, right).reward == 1 and ask(spec, wrong).reward == 0


def test_messages_are_put_as_they_are_and_texts_with_the_question_what_to_do(tmp_path):
    assert Questions(write(tmp_path / "a.jsonl", DAPO)).question(0).initial_messages == (Message("user", DAPO_ASK),)
    put = Questions(write(tmp_path / "a.jsonl", DAPO), prompt="Q: {question}").question(0)
    assert put.initial_messages == (Message("user", f"Q: {DAPO_ASK}"),)
    assert put.content == json.dumps([["user", DAPO_ASK]])
    openai = write(tmp_path / "b.jsonl", OPENAI)
    assert [m.content for m in Questions(openai).question(0).initial_messages] == ["S", "2+2?"]
    assert [m.content for m in Questions(openai, system="T").question(0).initial_messages] == ["T", "2+2?"]


@pytest.mark.parametrize(
    "row, settings, why",
    [
        ({"question": "?", "answer": None}, {"answer_key": "answer"}, "is no column"),
        ({"question": "?", "answer": ["1", "2"]}, {}, "holds 2 answers, not one"),
        ({"question": "?", "answer": {"value": 1}}, {}, "answer is an object, not a text"),
        ({"question": "?", "answer": True}, {}, "answer is true or false"),
        ({"question": "?", "answer": "####"}, {}, "holds no final answer"),
        ({"question": "?", "answer": "x" * 501}, {}, "holds no final answer of at most 500"),
        ({"question": "?", "answer": "Paris"}, {"answer_in": "last"}, "no number"),
        ({"question": ["?"], "answer": "1"}, {}, "question\\[0\\] is not an object"),
        ({"messages": [{"role": "assistant", "content": "?"}], "answer": "1"}, {}, "no message before"),
        ({"question": "?", "id": 1}, {}, "answer_key is not set"),
        ({"question": "?", "problem": "?", "answer": "1"}, {}, "more than one column"),
        ({"question": "?", "ground_truth": "1", "final_answer": "1"}, {}, "more than one column"),
    ],
)
def test_rows_that_are_no_question(tmp_path, row, settings, why):
    with pytest.raises((DataError, ConfigError), match=why):
        Questions(write(tmp_path / "a.jsonl", row), **settings).task(0)


# ---- custom rewards -------------------------------------------------------------------------------------------------


def short(prompt, answer, record):
    return max(0.0, 1 - len(answer) / 10)


def parts(prompt, answer, record):
    return {"right": np.float32(record["answer"].endswith(answer)), "asked": "?" in prompt, "long": -0.5}


def no_number(prompt, answer, record):
    return {"nan": math.nan, "inf": math.inf, "text": "1.0", "none": None, "parts": {"a": 1.0, "b": math.nan}}[answer]


def broken(prompt, answer, record):
    return 1 / len(answer)


def test_a_reward_is_a_function(tmp_path):
    spec = dataclasses.replace(SPEC, reward=short, solved_at=0.5)
    assert ask(spec, "12345").reward == 0.5 and ask(spec, "12345").success and not ask(spec, "123456").success
    assert ask(spec, "12345").reward_parts == {"short": 0.5}
    result = ask(dataclasses.replace(SPEC, reward=parts), "90", 3)
    assert result.reward == 1.5 and result.reward_parts == {"right": 1.0, "asked": 1.0, "long": -0.5}
    only_prompts = Questions(write(tmp_path / "a.jsonl", {"prompt": "Tell a joke."}), reward=short)
    assert ask(only_prompts, "Ha").reward == 0.8
    env = only_prompts.make()
    env.reset(only_prompts.task(0))
    with pytest.raises(EnvError, match="no recorded answers"):
        env.reference_answer()


@pytest.mark.parametrize("answer", ["nan", "inf", "text", "none", "parts"])
def test_what_is_no_number_is_a_fault_and_no_reward(answer):
    with pytest.raises(
        EnvError, match=r"test_questions\.no_number gave .*word_problems\.jsonl, line 1: not a finite number"
    ):
        ask(dataclasses.replace(SPEC, reward=no_number), answer)


def test_records_in_memory_are_those_of_a_file(tmp_path):
    rows = [{"question": "1+1?", "answer": "2"}, {"question": "1+2?", "answer": "3"}]
    spec, of_file = Questions(records=rows), Questions(write(tmp_path / "a.jsonl", *rows))
    for i in range(2):
        assert spec.task(i) == of_file.task(i) and spec.record(i) == rows[i] == of_file.record(i)
    rows[0]["answer"] = "5"  # the rows were copied
    assert spec.question(0).answer == "2" and spec == Questions(records=spec.records)
    assert spec != Questions(records=rows) and hash(spec) != hash(Questions(records=rows))
    assert pickle.loads(pickle.dumps(spec)) == spec and "2 rows in memory" in repr(spec)
    with pytest.raises(DataError, match="record 1 of 2 rows in memory .* answer is empty"):
        Questions(records=[rows[0], {"question": "1+1?", "answer": ""}]).task(0)


def test_a_reward_may_be_anything_that_can_be_called():
    rows = [{"question": "1+1?"}]
    spec = Questions(records=rows, reward=lambda prompt, answer, record: len(answer))
    assert ask(spec, "four", 0).reward == 4
    spec = Questions(records=rows, reward=functools.partial(lambda n, *_: n, 0.5))
    assert ask(spec, "x", 0).reward_parts == {"partial": 0.5}


def test_with_an_own_reward_the_recorded_answer_is_the_full_text():
    """It may be in a form that only the function knows: nothing is cut out of it, and `reference_answer` gives it as it stands."""
    for answer in ("a\n#### b #### c", "so \\boxed{7} eggs", "<<1+1=2>>", "x" * 1000):
        spec = Questions(records=[{"question": "?", "answer": answer}], reward=short)
        env = spec.make()
        env.reset(spec.task(0))
        assert env.reference_answer() == spec.question(0).answer == answer and spec.question(0).solution == ""
    spec = Questions(records=[OPENR1], reward=short)
    env = spec.make()
    env.reset(spec.task(0))
    assert env.reference_answer() == OPENR1["solution"]
    spec = Questions(records=[OPENR1 | {"answer": "seven"}], reward=short)
    env = spec.make()
    env.reset(spec.task(0))
    assert env.reference_answer() == OPENR1["solution"] + "\nseven"


def test_a_row_with_prompt_and_messages_is_a_choice(tmp_path):
    row = {"prompt": "1+1?", "messages": [{"role": "user", "content": "What is 1+1?"}], "answer": "2"}
    path = write(tmp_path / "a.jsonl", row)
    with pytest.raises(ConfigError, match="more than one column it could be: 'prompt' and 'messages'") as e:
        Questions(path).task(0)
    assert "Questions.prompt_key = 'messages'" in e.value.remedy
    spec = Questions(path, prompt_key="messages")
    assert spec.question(0).initial_messages[-1].content == "What is 1+1?"
    assert spec.columns_taken() == "prompt from `messages`, answer from `answer`"


def test_which_columns_are_taken_is_said(tmp_path, capsys):
    assert Questions(records=[DAPO]).columns_taken() == "prompt from `prompt`, answer from `reward_model.ground_truth`"
    taken = "prompt from `problem`, answer from `answer`, solution from `solution`"
    assert Questions(records=[OPENR1]).columns_taken() == taken
    assert Records(records=[{"prompt": "?", "chosen": "a", "rejected": "b"}]).columns_taken() == (
        "prompt from `prompt`, chosen from `chosen`, rejected from `rejected`"
    )
    mixed = Mixture(
        {"sums": Domain(Questions(records=[DAPO], domain="sums")), "lake": Domain(make_spec("frozen_lake"))}
    )
    assert mixed.columns_taken() == "sums: prompt from `prompt`, answer from `reward_model.ground_truth`"
    path = write(tmp_path / "a.jsonl", {"question": "1+1?", "final_answer": "2"})
    validate([f"questions(path={path!r})", "--tasks", "1", "--seconds", "1"])
    said = capsys.readouterr().out
    assert "prompt from `question`" in said and "`final_answer`" in said


def test_what_a_reward_raises_names_it_and_the_record():
    with pytest.raises(EnvError, match=r"test_questions\.broken for .*word_problems\.jsonl, line 3: ZeroDivisionError"):
        ask(dataclasses.replace(SPEC, reward=broken), "", 2)


def test_references_name_functions_by_their_path():
    name = f"{__name__}.short"
    spec = make_spec(f"questions(path={str(SAMPLE)!r}, answer_in='last', reward={name!r})")
    assert spec == dataclasses.replace(SPEC, answer_in="last", reward=short)
    assert make_spec(ref_of(spec)) == spec and repr(name) in ref_of(spec)
    assert pickle.loads(pickle.dumps(spec)) == spec
    with pytest.raises(ConfigError, match="cannot be imported"):
        make_spec(f"questions(path={str(SAMPLE)!r}, reward='my_rewards.none')")


async def in_pool(spec, answers):
    pool = EnvPool(PoolConfig(workers=1), spec)
    try:
        found = []
        for answer in answers:
            episode = await pool.open(spec.task(0))
            try:
                found.append(await episode.step(answer))
            except EnvError as e:
                found.append(e)
            await episode.close()
        return found
    finally:
        pool.close()


def test_workers_score_by_verifier_and_by_functions(tmp_path):
    spec = Questions(write(tmp_path / "a.jsonl", {"question": "?", "answer": "2\\sqrt{2}"}))
    right, wrong = asyncio.run(in_pool(spec, ["\\boxed{\\sqrt{8}}", "\\boxed{\\sqrt{7}}"]))
    assert (right.reward, right.success, wrong.reward) == (1.0, True, 0.0)
    half, fault = asyncio.run(in_pool(dataclasses.replace(spec, reward=broken), ["12", ""]))
    assert half.reward == 0.5 and "ZeroDivisionError" in str(fault) and "a.jsonl, line 1" in str(fault)


def test_the_verifier_is_not_run_in_threads_of_the_trainer():
    assert SPEC.needs_worker and not dataclasses.replace(SPEC, reward=short).needs_worker


@pytest.mark.parametrize("reward", [None, short])
def test_checks_of_environments(reward):
    spec = dataclasses.replace(SPEC, reward=reward, solved_at=-1.0 if reward else 1.0)
    for check in (checks.well_formed, checks.ends_are_final, checks.interleave, checks.snapshots_continue):
        check(spec, 2)


# ---- real files -----------------------------------------------------------------------------------------------------


@pytest.mark.skipif("ROLLJAX_GSM8K" not in os.environ, reason="ROLLJAX_GSM8K names no file")
@pytest.mark.parametrize("where", PLACES)
def test_gsm8k_loads_and_its_own_answers_are_right(where):
    spec = Questions(os.environ["ROLLJAX_GSM8K"], answer_in=where)
    assert spec.num_questions in (1319, 7473)
    for i in range(spec.num_questions):
        env = spec.make()
        env.reset(spec.task(i))
        assert env.step(env.reference_answer()).reward == 1, spec.question(i)


def test_what_attempts_vote_for():
    """Where the answer is read, in one form; nothing where there is none, or a function says what is good."""
    first = SPEC.task(0)
    said = ["\\boxed{9}", "so\n#### 9.0", "Answer: 9 rolls", "it is 18/2"]
    assert {SPEC.final_answer(first, text) for text in said} == {"9"}
    assert SPEC.final_answer(first, "no idea") is None
    assert Questions(str(SAMPLE), reward=short).final_answer(first, "9") is None
