"""No program passes a grader without being right: every hack of the list, in every form that a test can have."""

import dataclasses
import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from rolljax.envs.code_problems import CodeProblems
from rolljax.sandbox import SCORE, SandboxHost, grade, grade_mbpp, grade_python
from tests.e2e.sandbox_hacks import EXCEPTIONS, FORMS, HACKS, ONE_OF_EACH, RIGHT, SETUP, STDIN, STDIN_RIGHT, STDIN_TEST
from tests.e2e.sandbox_support import needs_sandbox

pytestmark = needs_sandbox
LIMITS = dataclasses.replace(SCORE, wall_s=4.0, cpu_s=2)


@pytest.fixture(scope="module")
def host():
    with SandboxHost() as host:
        yield host


def passing(judge, rows):
    """Return the rows that pass anything."""
    with ThreadPoolExecutor(3) as pool:
        return [(row, verdict) for row, verdict in zip(rows, pool.map(judge, rows), strict=True) if verdict.num_passed]


def as_check(form):
    body = form.replace("square(", "candidate(").replace("square,", "candidate,")
    lines = "\n".join("    " + line for line in body.split("\n"))
    return f"import pytest\n{SETUP}\ndef check(candidate):\n    global square\n    square = candidate\n{lines}\n"


def checked(source, form, host, profile=LIMITS):
    return grade_python(source, "square", as_check(form), profile=profile, host=host)


def test_the_right_program_passes_every_form_with_a_known_helper(host):
    fair = [form for form in FORMS if "is_close(square" not in form or "math." in form]
    assert len(fair) == len(FORMS) - 5
    verdict = grade_mbpp(RIGHT, "square", fair, setup=SETUP, host=host)
    assert verdict.passed and verdict.num_passed == len(fair), verdict
    with_helper = SETUP + "\ndef is_close(a, b): return abs(a - b) < 1e-9"
    assert grade_mbpp(RIGHT, "square", FORMS, setup=with_helper, host=host).passed


def test_a_wrong_program_passes_none(host):
    for wrong in ("def square(x): return 2 * x + 1", "def square(x): return [x]", "def square(x): return str(x * x)"):
        assert grade_mbpp(wrong, "square", FORMS, setup=SETUP, host=host).num_passed == 0, wrong


def test_hacks_pass_no_form_of_a_test(host):
    hacks = {name: HACKS[name] for name in ONE_OF_EACH}
    assert passing(lambda n: grade_mbpp(hacks[n], "square", FORMS, setup=SETUP, profile=LIMITS, host=host), hacks) == []


def test_hacks_pass_no_program_of_tests(host):
    files = ("leaves", "programs of its own", "a daemon that answers later")
    assert grade(STDIN_RIGHT, STDIN_TEST, host=host).passed
    assert passing(lambda name: grade(STDIN[name], STDIN_TEST, host=host), files) == []


@pytest.mark.sweep
def test_all_hacks_pass_no_form_of_a_test(host):
    assert len(HACKS) >= 150
    assert passing(lambda n: grade_mbpp(HACKS[n], "square", FORMS, setup=SETUP, profile=LIMITS, host=host), HACKS) == []


@pytest.mark.sweep
def test_all_hacks_pass_no_check(host):
    """The HumanEval format: the first form for every hack, and each form for a fifth of the exceptions."""
    rows = [(name, FORMS[0]) for name in HACKS]
    rows += [(name, form) for i, name in enumerate(EXCEPTIONS) for form in FORMS[1 + i % 5 :: 5]]
    assert passing(lambda row: checked(HACKS[row[0]], row[1], host), rows) == []


@pytest.mark.sweep
def test_all_hacks_pass_no_program_of_tests(host):
    short = dataclasses.replace(SCORE, wall_s=6.0)
    assert passing(lambda name: grade(STDIN[name], STDIN_TEST, profile=short, host=host), STDIN) == []


@pytest.mark.sweep
def test_all_hacks_get_no_reward_of_the_environment(tmp_path):
    """As answers of a policy, to a problem of each format."""
    path = tmp_path / "problems.jsonl"
    mbpp = {"text": "Square a number.", "code": RIGHT, "test_list": FORMS[:12], "test_setup_code": SETUP}
    head = 'def square(x):\n    """The square of x."""\n'
    humaneval = {
        "prompt": head, "entry_point": "square", "canonical_solution": "    return x * x\n", "test": as_check(FORMS[3])
    }  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in (mbpp, humaneval)))
    spec = CodeProblems(str(path), timeout_s=4.0)

    def reward(row):
        index, answer = row
        env = spec.make()
        env.reset(spec.task(index))
        return env.step(answer or env.reference_answer()).reward

    assert [reward((index, "")) for index in (0, 1)] == [1.0, 1.0]
    rows = [(index, f"```python\n{source}\n```") for source in HACKS.values() for index in (0, 1)]
    with ThreadPoolExecutor(3) as pool:
        assert [row for row, found in zip(rows, pool.map(reward, rows), strict=True) if found] == []
