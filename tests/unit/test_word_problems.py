"""Word problems: numbers however they are written, where an answer's number is read, and lines that are none."""

import dataclasses
import json
import os
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolljax.envs.catalog import make_spec, ref_of
from rolljax.envs.worlds.word_problems import FORMS, WordProblems, numbers, read_answer, the_number
from rolljax.errors import ConfigError, DataError, EnvError
from rolljax.types import Message

SAMPLE = Path(__file__).parents[1] / "data" / "word_problems.jsonl"
SPEC = WordProblems(str(SAMPLE))


@pytest.mark.parametrize(
    "text, want",
    [
        ("18", "18"),
        ("-3", "-3"),
        ("\u22127", None),
        ("$1,200.50", "1200.5"),
        ("-$5", "-5"),
        ("$-5", "-5"),
        ("1,234,567", "1234567"),
        ("20%", "20"),
        ("20\\%", "20"),
        ("\\$1{,}200", "1200"),
        ("1/2", "1/2"),
        ("1 1/2", "3/2"),
        ("6/4", "3/2"),
        ("\\frac{1}{2}", "1/2"),
        ("-\\dfrac{3}{4}", "-3/4"),
        ("2\\frac{1}{2}", "5/2"),
        (".5", "1/2"),
        ("x = 5.00", "5"),
        ("\\text{12 dollars}", "12"),
        ("18 = 18.0 eggs", "18"),
        ("3 or 4", None),
        ("3-5", None),
        ("1,2", None),
        ("9**9", None),
        ("10^3", None),
        ("1/0", None),
        ("9" * 61, None),
        ("1/" + "9" * 100, None),
        ("", None),
        ("twelve", None),
        ("١٢", None),
    ],
)
def test_the_one_number_of_a_text(text, want):
    want = Fraction(want) if want else None
    assert the_number(text) == want if text[:1] != "\u2212" else read_answer(text, "last") == -7


@given(st.integers(-(10**12), 10**12), st.integers(0, 3))
def test_any_way_to_write_a_number_reads_back(n, zeros):
    tail = "." + "0" * zeros if zeros else ""
    for text in (f"{n}{tail}", f"{n:,}{tail}", f"\\boxed{{{n:,}}}", f"{2 * n}/2", f"#### {n}"):
        assert read_answer(text, "any") == n


@given(st.text(max_size=300))
def test_no_text_is_too_strange(text):
    for form in FORMS:
        value = read_answer(text, form)
        assert value is None or isinstance(value, Fraction)


@pytest.mark.parametrize(
    "text, any_, boxed, hashes, last",
    [
        ("so \\boxed{18} eggs", 18, 18, None, 18),
        ("\\boxed{3}, no: \\boxed{\\frac{8}{4}}", 2, 2, None, 2),
        ("1 + 1 = 2\n#### 5", 5, None, 5, 5),
        ("#### 5\n#### 6 eggs\nand 7", 6, None, 6, 7),
        ("\\boxed{4}\n#### 5", 4, 4, 5, 5),
        ("12 - 3 = 9 eggs.", 9, None, None, 9),
        ("\\boxed{7", 7, None, None, 7),
        ("\\boxed{3 or 4}", None, None, None, 4),
        ("#### none of the 5 or 6", None, None, None, 6),
        ("no number", None, None, None, None),
        ("\\boxed{}5", None, None, None, 5),
    ],
)
def test_where_the_number_is_read(text, any_, boxed, hashes, last):
    assert [read_answer(text, form) for form in FORMS] == [any_, boxed, hashes, last]


@pytest.mark.parametrize(
    "text",
    ["9" * 10**6, "\\boxed{" * 10**5, "\\boxed{" + "{" * 10**6, "1/" * 10**6, "1," * 10**6, "1 " * 10**6, "\\frac{" * 10**5, "-" * 10**6, "\x00" * 10**6],
    ids=lambda t: t[:7],
)  # fmt: skip
def test_huge_answers_are_read_to_their_end_only(text):
    for form in FORMS:
        assert read_answer(text, form) in (None, 1)
    assert read_answer(text + "\n#### 12", "hashes") == 12


# ---- episodes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_gold_answers_score_one_and_the_next_number_none(form):
    spec = dataclasses.replace(SPEC, answer=form)
    assert spec.num_problems == 20
    for i in range(20):
        env = spec.make()
        env.reset(spec.task(i))
        gold = env.gold()
        assert "<<" not in gold
        result = env.step(gold)
        assert (result.reward, result.success, result.terminated) == (1, True, True)
        env.reset(spec.task(i))
        wrong = spec.problem(i).number + 1
        result = env.step(f"\\boxed{{{wrong}}}\n#### {wrong}")
        assert (result.reward, result.success, result.metrics) == (0, False, {"no_number_n": 0.0})


def test_what_is_asked():
    env = SPEC.make()
    question = "A train needs 3 hours for 270 km. How fast is it in km/h?"
    assert env.reset(SPEC.task(3)) == (
        Message("user", question + "\nThink step by step, then write the final number in \\boxed{}."),
    )
    assert SPEC.task(3).content == SPEC.task(23).content == question
    assert env.gold() == "270/3=90 km/h.\n\\boxed{90}"
    assert dataclasses.replace(SPEC, answer="hashes", prompt="{question} #### N").make().reset(SPEC.task(3)) == (
        Message("user", question + " #### N"),
    )
    assert env.step("I do not know.").metrics == {"no_number_n": 1.0}
    with pytest.raises(EnvError, match="after the episode's end"):
        env.step("90")


def test_reference():
    spec = make_spec(f"word_problems(path={str(SAMPLE)!r}, answer='last')")
    assert spec == dataclasses.replace(SPEC, answer="last") and make_spec(ref_of(spec)) == spec


# ---- lines ----------------------------------------------------------------------------------------------------------

GOOD = json.dumps({"question": "1+1?", "answer": "#### 2"})


@pytest.mark.parametrize(
    "line, what",
    [
        ('{"question": "1+1?", "answer": "2"}', "the answer has no line '#### number'"),
        ('{"question": "1+1?", "answer": "#### two"}', "'two' behind #### is not a number"),
        ('{"question": "1+1?", "answer": "#### 2 or 3"}', "'2 or 3' behind #### is not a number"),
        ('{"question": "1+1?"}', "lacks 'answer'"),
        ('{"question": ["1+1?"], "answer": "#### 2"}', "question"),
        ("nonsense", "is not JSON"),
        ('{"messages": [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]}', "#### number"),
    ],
)
def test_bad_lines_are_named_with_file_and_line(tmp_path, line, what):
    path = tmp_path / "problems.jsonl"
    path.write_text(f"{GOOD}\n\n{GOOD}\n{line}\n{GOOD}\n")
    with pytest.raises(DataError) as e:
        WordProblems(str(path)).task(0)
    assert f"{path}, line 4: " in str(e.value) and what in str(e.value)


def test_settings_that_cannot_work(tmp_path):
    with pytest.raises(ConfigError, match="is not a file") as e:
        WordProblems(str(tmp_path / "none.jsonl"))
    assert e.value.setting == "WordProblems.path"
    with pytest.raises(ConfigError) as e:
        dataclasses.replace(SPEC, question_key="answer")
    assert e.value.setting.startswith("WordProblems.")
    with pytest.raises(ConfigError, match="does not contain"):
        dataclasses.replace(SPEC, prompt="question")
    with pytest.raises(ConfigError, match="no place"):
        dataclasses.replace(SPEC, answer="box")


def test_a_changed_file_is_noticed(tmp_path):
    path = tmp_path / "problems.jsonl"
    path.write_text(f"{GOOD}\n{GOOD}\n")
    spec = WordProblems(str(path))
    task, env = spec.task(1), spec.make()
    path.write_text(f"{GOOD}\n{GOOD.replace('1+1', '1+1+0')}\n")
    with pytest.raises(EnvError, match="was the file changed"):
        env.reset(task)
    path.write_text(f"{GOOD}\n{GOOD.replace('####', '')}\n")
    with pytest.raises(DataError, match="line 2: the answer has no line"):
        spec.task(0)


@pytest.mark.skipif("ROLLJAX_GSM8K" not in os.environ, reason="ROLLJAX_GSM8K names no file")
@pytest.mark.parametrize("form", FORMS)
def test_gsm8k_loads_and_its_own_answers_are_right(form):
    spec = WordProblems(os.environ["ROLLJAX_GSM8K"], answer=form)
    assert spec.num_problems in (1319, 7473)
    for i in range(spec.num_problems):
        env = spec.make()
        env.reset(spec.task(i))
        assert env.step(env.gold()).reward == 1, spec.problem(i)
        assert None not in numbers(spec.problem(i).written)
