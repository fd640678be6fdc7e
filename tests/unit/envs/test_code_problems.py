"""Files of coding problems, and the program in an answer."""

import ast
import gzip
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolljax.envs.catalog import make_spec, ref_of
from rolljax.envs.code_problems import CodeProblems, program_of
from rolljax.errors import ConfigError, DataError

HEAD = 'from math import sqrt\n\ndef half(x):\n    return x / 2\n\ndef root(x: float) -> float:\n    """Root of x."""\n'
HUMANEVAL = {
    "task_id": "own/0",
    "prompt": HEAD,
    "entry_point": "root",
    "canonical_solution": "    return sqrt(x)\n",
    "test": "def check(candidate):\n    assert candidate(4) == 2\n",
}
MBPP = {
    "task_id": 7,
    "text": "Add.",
    "code": "def add(a, b):\r\n    return a + b",
    "test_list": ["assert add(1, 2) == 3"],
}


def spec(tmp_path, *records, name="p.jsonl", **settings):
    path = tmp_path / name
    text = "".join(json.dumps(r) + "\n\n" for r in records).encode()
    path.write_bytes(gzip.compress(text) if name.endswith("gz") else text)
    return CodeProblems(str(path), **settings)


@pytest.mark.parametrize("name", ["p.jsonl", "p.jsonl.gz", "gz_by_its_bytes_gz"])
def test_humaneval(tmp_path, name):
    (problem,) = spec(tmp_path, HUMANEVAL, name=name).problems()
    assert HEAD.rstrip() in problem.question and problem.entry_point == "root"
    assert problem.reference_answer == HEAD + HUMANEVAL["canonical_solution"]


def test_mbpp_of_both_kinds(tmp_path):
    tests = ["assert add(1, 2) == 3", "assert add(0, 0) == 0", "assert add(-1, 1) == 0"]
    setup = {"test_imports": ["import math"], "test_list": tests}
    sanitised = {"task_id": 8, "prompt": "Add two.", "code": MBPP["code"], **setup}
    first, second = spec(tmp_path, MBPP, sanitised).problems()
    assert "\r" not in first.reference_answer and first.entry_point == "add" and first.setup == ""
    assert second.question.startswith("Add two.") and second.setup == "import math" and len(second.tests) == 3
    assert tests[0] in second.question and tests[1] not in second.question
    assert all(t in spec(tmp_path, sanitised, tests_shown=3).problems()[0].question for t in tests)
    assert "assert" not in spec(tmp_path, sanitised, tests_shown=0).problems()[0].question


CLOSE = "def close(a, b):\n    return abs(a - b) < 1e-6\n"


@pytest.mark.parametrize(
    "changes",
    [
        {"test_list": ["assert isclose(add(1, 2), 3)"], "test_setup_code": "from math import isclose"},
        {"test_list": ["assert close(add(1, 2), 3)"], "test_setup_code": CLOSE},
        {"test_list": ["assert close(add(1, 2), 3)"], "test_setup_code": CLOSE, "code": CLOSE + MBPP["code"]},
        {"test_list": ["assert close(add(1, 2), 3)"], "entry_point": "add", "code": CLOSE + MBPP["code"]},
        {"test_list": ["assert right(3)"], "test_setup_code": "def right(n):\n    return add(1, 2) == n"},
        {"test_list": ["assert sum([add(Pair(1), 2)]) == 3"], "code": "class Pair: pass\nsum = 0\n" + MBPP["code"]},
        {"test_list": ["assert [*map(add, [1], [2])] == [3]"], "code": "add = lambda a, b: a + b"},
    ],
)
def test_the_function_that_is_tested_is_the_solutions_and_no_helper(tmp_path, changes):
    (problem,) = spec(tmp_path, {**MBPP, **changes}).problems()
    assert problem.entry_point == "add"


@pytest.mark.parametrize(
    "record, part",
    [
        (
            {**MBPP, "test_list": ["assert close(add(1, 2), 3)"], "code": CLOSE + MBPP["code"]},
            "uses add, close of code",
        ),
        ({**MBPP, "test_list": ["assert sum([1]) == 1"]}, "no function that code defines"),
        ("text", "line 3: is not a JSON object"),
        ({**HUMANEVAL, "test": ""}, "has no 'test'"),
        ({**HUMANEVAL, "canonical_solution": "  return )"}, "is not Python"),
        ({k: v for k, v in HUMANEVAL.items() if k != "entry_point"}, "has no 'entry_point'"),
        ({**MBPP, "test_list": []}, "test_list is not a list of asserts"),
        ({**MBPP, "test_list": ["assert ("]}, "test_list is not Python"),
        ({**MBPP, "code": 3}, "has no 'code'"),
    ],
)
def test_bad_lines_are_named(tmp_path, record, part):
    with pytest.raises(DataError) as caught:
        spec(tmp_path, HUMANEVAL, record).task(0)
    assert part in str(caught.value) and "line 3" in str(caught.value)


def test_bad_files(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "broken.gz").write_bytes(b"\x1f\x8bnot gzip")
    for name, part in (("empty.jsonl", "holds no rows"), ("broken.gz", "cannot be read")):
        with pytest.raises(DataError, match=part):
            CodeProblems(str(tmp_path / name)).task(0)
    with pytest.raises(ConfigError, match="is not a file"):
        CodeProblems(str(tmp_path / "none"))


@pytest.mark.parametrize(
    "settings", [{"format": "apps"}, {"sandbox": "docker"}, {"timeout_s": 0}, {"tests_shown": -1}], ids=str
)
def test_settings_that_cannot_work(tmp_path, settings):
    with pytest.raises(ConfigError, match=next(iter(settings))):
        spec(tmp_path, HUMANEVAL, **settings)


def test_names_in_the_catalog(tmp_path):
    made = spec(tmp_path, HUMANEVAL, MBPP, timeout_s=2.0)
    assert make_spec(ref_of(made)) == made == make_spec(f"code:{made.path}(timeout_s=2.0)")
    assert made.task(0) == made.task(0) != made.task(1) and made.task(2).id == made.task(0).id


def test_a_file_that_changed_is_read_again(tmp_path):
    made = spec(tmp_path, HUMANEVAL)
    assert len(made.problems()) == 1
    spec(tmp_path, HUMANEVAL, MBPP)
    assert len(made.problems()) == 2


WHOLE = "def root(x):\n    return x ** 0.5"


@pytest.mark.parametrize(
    "answer",
    [
        WHOLE,
        f"Here it is.\n```python\n{WHOLE}\n```\nIt works.",
        f"```py\n{WHOLE}",
        f"<think>```python\ndef root(x): ...\n```</think>```\n{WHOLE}\n```",
        f"First a test:\n```python\nassert root(4) == 2\n```\nthen\n```python\n{WHOLE}\n```",
        "  def root(x):\n      return x ** 0.5",
        "    return x ** 0.5",
        "\n    y = x ** 0.5\n    return y\n",
        "return x ** 0.5",
        "y = x ** 0.5\n    return y",
        "y = x ** 0.5\nreturn y",
        "if x:\n    return x ** 0.5\nreturn 0",
        "```python\n    return half(2 * sqrt(x))\n```",
        f"{WHOLE}\n\nprint(root(4))",
    ],
)
def test_whole_functions_and_bodies_become_programs(tmp_path, answer):
    (problem,) = spec(tmp_path, HUMANEVAL).problems()
    names = {}
    exec(program_of(answer, problem), names)
    assert names["root"](9) == 3 and names["half"](4) == 2


@pytest.mark.parametrize("answer", ["", "  \n", "a\0b", "x" * 70_000, "\ud800", "<think>x</think>"])
def test_no_program(tmp_path, answer):
    for problem in spec(tmp_path, HUMANEVAL, MBPP).problems():
        assert program_of(answer, problem) is None


@given(text=st.text(), mark=st.sampled_from(["", "```", "```python\n", "def root", "</think>"]))
def test_any_answer_gives_a_text_or_none(tmp_path_factory, text, mark):
    for problem in spec(tmp_path_factory.getbasetemp(), HUMANEVAL, MBPP).problems():
        program = program_of(mark + text + mark, problem)
        assert program is None or isinstance(program.encode(), bytes)


def test_the_problems_for_tests_are_right():
    """The asserts hold for the recorded programs: run here, they are our own."""
    from pathlib import Path

    path = Path(__file__).parents[2] / "data" / "code_problems_mbpp.jsonl"
    problems = CodeProblems(str(path)).problems()
    assert len(problems) == 6
    for problem in problems:
        names = {}
        exec("\n".join([problem.setup, problem.reference_answer, *problem.tests]), names)
        assert problem.entry_point in names and ast.parse(problem.reference_answer)
