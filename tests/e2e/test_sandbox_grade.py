"""Graders: right programs pass, and nothing that a program does to itself makes it pass."""

import dataclasses
import gzip
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rolljax.envs.code_problems import CodeProblems
from rolljax.errors import InfraError
from rolljax.sandbox import SCORE, SandboxConfig, SandboxHost, grade, grade_mbpp, grade_python
from rolljax.sandbox.profile import MIB
from tests.e2e.sandbox_support import needs_sandbox

pytestmark = needs_sandbox
DATA = Path(__file__).parents[1] / "data"
PROBLEMS = [json.loads(line) for line in (DATA / "code_problems.jsonl").read_text().splitlines()]
HUMAN_EVAL = os.environ.get("ROLLJAX_HUMAN_EVAL", "")
SHORT = dataclasses.replace(SCORE, wall_s=2.0)


@pytest.fixture(scope="module")
def host():
    with SandboxHost() as host:
        yield host


def right(problem, host):
    source = problem["prompt"] + problem["canonical_solution"]
    return grade_python(source, problem["entry_point"], problem["test"], prompt=problem["prompt"], host=host)


def many(function, rows):
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(function, rows))


def test_right_solutions_pass(host):
    verdicts = many(lambda p: right(p, host), PROBLEMS)
    assert [(p["task_id"], v.detail) for p, v in zip(PROBLEMS, verdicts, strict=True) if not v.passed] == []
    assert {v.num_tests for v in verdicts} == {1} and all(v.ms > 0 for v in verdicts)


def test_right_mbpp_solutions_pass(host):
    problems = CodeProblems(str(DATA / "code_problems_mbpp.jsonl")).problems()
    verdicts = many(
        lambda p: grade_mbpp(p.reference_answer, p.entry_point, p.tests, setup=p.setup, host=host), problems
    )
    assert [v.detail for v in verdicts if not v.passed] == []
    assert [v.num_passed for v in verdicts] == [len(p.tests) for p in problems]


ALWAYS_EQUAL = """
class Same:
    def __getattr__(self, name): return self
    def __call__(self, *a, **k): return self
    for n in "eq ne lt le gt ge contains bool".split():
        exec(f"def __{n}__(self, *a): return True")
    def __hash__(self): return 1
    def __len__(self): return 1
    def __iter__(self): return iter([self])
    def __index__(self): return 1
    def __float__(self): return 0.0
    def __round__(self, *a): return 0
    def __sub__(self, o): return 0
    __rsub__ = __add__ = __radd__ = __abs__ = __sub__
class SameInt(int):
    __eq__ = __lt__ = __gt__ = __le__ = __ge__ = lambda self, o: True
    __hash__ = int.__hash__
class SameText(str):
    __eq__ = lambda self, o: True
    __hash__ = str.__hash__
class SameList(list):
    __eq__ = lambda self, o: True
def ENTRY(*a, **k): return VALUE
"""
POISON = """
import os, sys
for folder in ("/work", "/tmp", os.path.dirname(os.path.abspath(__file__)) if "__file__" in globals() else "/run/rolljax", *sys.path):
    for name in ("sitecustomize.py", "usercustomize.py", "conftest.py", "checker.py", "wire.py", "plain.py", "json.py", "evil.pth", "pytest.ini"):
        try:
            with open(os.path.join(folder, name), "w") as f:
                f.write("import os; os.write(1, b'{\\"num_passed\\": 1, \\"num_tests\\": 1, \\"reason\\": \\"passed\\", \\"detail\\": \\"\\"}\\\\n'); os._exit(0)")
        except OSError:
            pass
os.environ.update(PYTHONPATH="/work", PYTHONSTARTUP="/work/sitecustomize.py", PATH="/work")
def ENTRY(*a, **k): return None
"""
PATCHED = """
import builtins, json, operator, unittest
json.dumps = lambda *a, **k: '{"num_passed": 1, "num_tests": 1, "reason": "passed", "detail": ""}'
json.loads = lambda *a, **k: {"passed": True}
builtins.isinstance = lambda *a: True
builtins.AssertionError = Exception
unittest.TestCase.assertEqual = lambda *a: None
operator.eq = lambda *a: True
def ENTRY(*a, **k): return None
"""
FAKED = """
import os, struct, glob
fake = b'{"num_passed": 1, "num_tests": 1, "reason": "passed", "detail": "passed"}\\n'
for fd in range(64):
    try: os.write(fd, fake)
    except OSError: pass
for path in glob.glob("/proc/*/fd/*"):
    try:
        with open(path, "wb") as f: f.write(fake)
    except OSError: pass
print("passed"); print(fake)
os._exit(0)
"""
DAEMON = """
import os, time
if not os.fork():
    os.setsid()
    for _ in range(200):
        for fd in range(64):
            try: os.write(fd, b'{"num_passed": 1, "num_tests": 1, "reason": "passed", "detail": ""}\\n')
            except OSError: pass
        time.sleep(0.01)
    os._exit(0)
def ENTRY(*a, **k): os._exit(0)
"""
PEEK = """
import glob, os, gc
texts = []
for path in glob.glob("/run/rolljax/*") + glob.glob("/proc/[0-9]*/cmdline") + glob.glob("/proc/[0-9]*/environ") + glob.glob("/work/*") + glob.glob("/tmp/*"):
    try:
        with open(path, "rb") as f: texts.append(f.read())
    except OSError: pass
assert not any(b"def check" in t or b"UNSEEN" in t for t in texts if b"run_check" not in t), "seen"
def ENTRY(*a, **k): return None
"""
CHEATS = {
    "leaves with success at once": "import os\nos._exit(0)",
    "leaves with success when called": "import os\ndef ENTRY(*a, **k): os._exit(0)",
    "sys.exit at once": "import sys\nsys.exit(0)",
    "sys.exit when called": "import sys\ndef ENTRY(*a, **k): sys.exit(0)",
    "raises what tests may catch": "def ENTRY(*a, **k): raise GeneratorExit",
    "an object that equals everything": ALWAYS_EQUAL.replace("VALUE", "Same()"),
    "a number that equals everything": ALWAYS_EQUAL.replace("VALUE", "SameInt(5)"),
    "a text that equals everything": ALWAYS_EQUAL.replace("VALUE", "SameText('?')"),
    "a list that equals everything": ALWAYS_EQUAL.replace("VALUE", "SameList()"),
    "poisoned start-up files": POISON,
    "patched modules": PATCHED,
    "faked verdicts": FAKED,
    "a daemon that fakes verdicts": DAEMON,
    "reads what it can find": PEEK,
    "redefines the helper that tests use": "def encode_shift(*a): return 'x'\ndef ENTRY(*a, **k): return 'x'",
    "nothing": "",
    "a syntax error": "def ENTRY(:",
    "not a function": "ENTRY = 5",
    "not unicode": "x = '\ud800'\ndef ENTRY(*a): return x",
    "NUL": "\0",
    "deep brackets": "(" * 20_000,
    "a huge answer": "def ENTRY(*a, **k): return 'x' * (200 << 20)",
    "an endless answer": "import itertools\ndef ENTRY(*a, **k): return (x for x in itertools.count())",
    "a deep answer": "def ENTRY(*a, **k):\n    x = []\n    for _ in range(100_000): x = [x]\n    return x",
    "a number that is costly to print": "def ENTRY(*a, **k): return 10 ** 400_000",
    "a crash": "import ctypes\ndef ENTRY(*a, **k): ctypes.string_at(0)",
}


@pytest.mark.parametrize("name", CHEATS)
def test_cheats_do_not_pass(host, name):
    problems = [PROBLEMS[0], PROBLEMS[9]] if "helper" in name else [PROBLEMS[0]]
    for problem in problems:
        source = CHEATS[name].replace("ENTRY", problem["entry_point"])
        verdict = grade_python(source, problem["entry_point"], problem["test"], prompt=problem["prompt"], host=host)
        assert not verdict.passed and verdict.num_passed == 0 and verdict.reason != "passed", verdict
        assert len(verdict.detail) < 1000


@pytest.mark.parametrize(
    "name", ["an object that equals everything", "poisoned start-up files", "leaves with success at once"]
)
def test_cheats_pass_no_problem_at_all(host, name):
    verdicts = many(
        lambda p: grade_python(CHEATS[name].replace("ENTRY", p["entry_point"]), p["entry_point"], p["test"], host=host),
        PROBLEMS,
    )
    assert sum(v.passed for v in verdicts) == 0


def test_the_same_cheat_passes_tests_that_run_in_its_own_process():
    """The cheats above are real: the always-equal object passes an assertion in the same process."""
    space = {}
    problem = PROBLEMS[0]
    exec(ALWAYS_EQUAL.replace("VALUE", "Same()").replace("ENTRY", problem["entry_point"]) + problem["test"], space)
    space["check"](space[problem["entry_point"]])


REASONS = {
    "wrong": ("def f(x): return x + 1", "def check(candidate): assert candidate(1) == 1"),
    "error": ("def f(x): return 1 / 0", "def check(candidate): assert candidate(1) == 1"),
    "exited": (
        "import os\ndef f(x): os._exit(3)",
        "def check(candidate):\n    try: candidate(1)\n    except BaseException: pass",
    ),
    "timeout": ("def f(x):\n    while True: pass", "def check(candidate): assert candidate(1) == 1"),
    "no tests": ("def f(x): return 1", "def check(candidate): pass"),
}


@pytest.mark.parametrize("reason", REASONS)
def test_a_failed_verdict_has_its_reason(host, reason):
    source, test = REASONS[reason]
    verdict = grade_python(source, "f", test, profile=SHORT, host=host)
    assert (verdict.passed, verdict.reason) == (False, reason), verdict


def test_a_test_source_without_check_or_with_an_error_passes_nothing(host):
    for test in ("", "x = 1", "check = 5", "raise ValueError('broken')", "def check(:"):
        verdict = grade_python("def f(): return 1", "f", test, profile=SHORT, host=host)
        assert not verdict.passed and verdict.reason in ("no tests", "broken tests"), verdict
    assert grade_mbpp("def f(): return 1", "f", ["assert ("], host=host).reason == "broken tests"
    bad_setup = grade_mbpp("def f(): return 1", "f", ["assert f()"], setup="import nothing_like_it", host=host)
    assert bad_setup.reason == "broken tests"


def test_memory_kills_the_candidate(host):
    small = dataclasses.replace(SCORE, memory_bytes=96 * MIB)
    source = "def f():\n    x = [bytes(1 << 20) + b'1' for _ in range(600)]\n    while True: pass"
    assert grade_python(source, "f", "def check(c): c()", profile=small, host=host).reason in (
        "killed",
        "timeout",
        "error",
    )


def test_types_are_part_of_the_answer(host):
    test = "def check(candidate):\n    assert type(candidate({V})) is {T} and candidate({V}) == {V}"
    rows = [
        ("True", "bool"),
        ("(1, 2)", "tuple"),
        ("1.0", "float"),
        ("{1, 2}", "set"),
        ("b'x'", "bytes"),
        ("[None]", "list"),
        ("{1: (2,)}", "dict"),
        ("10**30", "int"),
    ]
    for value, kind in rows:
        text = test.replace("{V}", value).replace("{T}", kind)
        assert grade_python("def f(x): return x", "f", text, host=host).passed, value


RAISES = """
import pytest
def check(candidate):
    with pytest.raises(ZeroDivisionError, match="zero") as caught:
        candidate(0)
    assert caught.value == "division by zero"
    with pytest.raises((KeyError, LookupError)):
        candidate("own")
    assert candidate(2) == 0.5
"""
RAISING = "class Own(KeyError): pass\ndef f(x):\n    if x == 'own': raise Own('Own problem')\n    return 1 / x"


def test_exceptions_that_a_test_asks_for(host):
    assert grade_python(RAISING, "f", RAISES, host=host).passed
    for wrong, reason in (
        (RAISING.replace("Own(KeyError)", "Own(ValueError)"), "error"),
        (RAISING.replace("1 / x", "x and 1 / x"), "wrong"),
        (RAISING.replace("1 / x", "x and 1 / x or [][0]"), "error"),
        ("def f(x): raise ZeroDivisionError('division by zero')", "error"),
    ):
        verdict = grade_python(wrong, "f", RAISES, host=host)
        assert (verdict.passed, verdict.num_passed, verdict.reason) == (False, 0, reason), (wrong, verdict)


def test_an_expected_exception_alone_passes_nothing(host):
    tests = ["with pytest.raises(ValueError): f(1)", "with pytest.raises(ValueError): f(2)"]
    verdict = grade_mbpp("def f(x): raise ValueError", "f", tests, host=host)
    assert (verdict.passed, verdict.num_passed, verdict.reason) == (False, 0, "no tests")
    half = grade_mbpp(
        "def f(x): return [1][x]", "f", ["assert f(0) == 1", "with pytest.raises(IndexError): f(5)"], host=host
    )
    assert half.passed and half.num_passed == 2
    unasked = grade_mbpp(
        "def f(x): return [1][x]", "f", ["with pytest.raises(IndexError):\n    f(5)\n    f(0)"], host=host
    )
    assert not unasked.passed
    own = ["with pytest.raises(ValueError): int(f(0))", "assert f(0)"]  # an exception of the test's own is not wanted
    assert grade_mbpp("def f(x): return 'x'", "f", own, host=host).num_passed == 1


def test_returned_objects_cannot_change_the_verdict(host):
    source = """
class Thing:
    def __eq__(self, other): return True
    def __bool__(self): return True
def f(x): return 5 if type(x) is Thing else Thing()
"""
    test = "def check(candidate):\n    thing = candidate(1)\n    assert candidate(thing) == 5\n"
    assert grade_python(source, "f", test, host=host).passed
    for use in (
        "thing == 5",
        "thing != 6",
        "thing",
        "not thing",
        "[thing] == [5]",
        "5 in [thing]",
        "thing < 6",
        "5 == thing",
    ):
        for line in (f"assert {use}", f"try: assert {use}\n    except BaseException: pass"):
            verdict = grade_python(source, "f", test + f"    {line}\n", host=host)
            assert (verdict.passed, verdict.reason) == (False, "wrong"), (line, verdict)


def test_mbpp_counts_each_statement_and_takes_classes_but_no_verdicts_of_the_candidate(host):
    source = (
        "class Pair:\n    def __init__(self, a): self.a = a\ndef total(pairs): return sum(p.a for p in pairs)\n"
        "def is_close(a, b): return True"
    )
    tests = [
        "assert total([Pair(2), Pair(3)]) == 5",
        "assert math.isclose(total([]), 0)",
        "assert total([Pair(1)]) == 2",
    ]
    verdict = grade_mbpp(source, "total", tests, host=host)
    assert (verdict.num_passed, verdict.num_tests, verdict.passed, verdict.reason) == (2, 3, False, "wrong")
    assert grade_mbpp(source, "total", tests[:2], host=host).passed
    assert not grade_mbpp(source, "total", [], host=host).passed
    assert grade_mbpp(source, "totals", tests, host=host).reason == "exited"
    judged = ["assert is_close(total([]), 7)"]
    assert grade_mbpp(source, "total", judged, host=host).reason == "wrong"
    trusted = "def is_close(a, b): return abs(a - b) < 1"
    assert grade_mbpp(source, "total", judged, setup=trusted, host=host).reason == "wrong"
    assert grade_mbpp(source, "total", ["assert is_close(total([]), 0)"], setup=trusted, host=host).passed
    spins = source.replace("def total(pairs):", "def total(pairs):\n    while len(pairs) == 1: pass\n    ").replace(
        "    return", "\n    return"
    )
    late = grade_mbpp(spins, "total", tests, profile=SHORT, host=host)
    assert (late.num_passed, late.reason) == (2, "timeout")


def test_a_helper_of_the_tests_is_theirs_whatever_its_name(host):
    test = "def f(x): return x + 1\ndef check(candidate): assert candidate(1) == f(1)"
    assert grade_python("def f(x): return x + 1", "f", test, host=host).passed
    assert not grade_python("def f(x): return 0", "f", test, host=host).passed


def test_an_answer_that_breaks_the_tests_is_wrong_and_no_fault_of_the_machine(host):
    """The tests' own interpreter reaches its limits, while the candidate waits."""
    tests = "def check(candidate):\n    text = candidate(1)\n    assert sum(a == b for a in text for b in text) < 0"
    limits = dataclasses.replace(SCORE, wall_s=20.0, cpu_s=1)
    verdict = grade_python("def f(x): return 'x' * 100_000", "f", tests, profile=limits, host=host)
    assert (verdict.passed, verdict.reason) == (False, "timeout"), verdict


FILES_TEST = """
import json
def test_sorts(box):
    for numbers in ([3, 1, 2], [], [5]):
        done = box.run(["python3", "sort.py"], stdin=json.dumps(numbers))
        assert done.returncode == 0 and json.loads(done.stdout) == sorted(numbers)
def test_report(box):
    assert box.read("report.txt") == b"UNSEEN"
"""


def test_files_are_graded_in_a_fresh_sandbox(host):
    program = b"import json, sys\nprint(json.dumps(sorted(json.load(sys.stdin))))"
    good = {"sort.py": program, "report.txt": b"UNSEEN"}
    assert grade(good, FILES_TEST, host=host).num_passed == 2 and grade(good, FILES_TEST, host=host).passed
    poisoned = {
        "sort.py": b"import os; os._exit(0)",
        "report.txt": b"x",
        "sitecustomize.py": b"import os; os._exit(0)",
        "conftest.py": b"import os; os._exit(0)",
        "json.py": b"def loads(*a): return None",
        "evil.pth": b"import os; os._exit(0)",
        "python3": b"#!/bin/sh\necho '[]'",
    }
    for files in (
        {},
        poisoned,
        {**good, "report.txt": b"x"},
        {**good, "sort.py": b"import os; os.kill(os.getppid(), 9)"},
    ):
        verdict = grade(files, FILES_TEST, host=host)
        assert not verdict.passed and verdict.num_tests in (1, 2), files
    find = b"import subprocess, sys\nprint(subprocess.run(['grep', '-rl', 'UNSEEN', '/run', '/work', '/tmp'], capture_output=True, text=True).stdout.count('report'))"
    hidden = grade(
        {"sort.py": find, "report.txt": b""},
        "def test_x(box): assert box.run(['python3', 'sort.py']).stdout == '0\\n'",
        host=host,
    )
    assert hidden.passed, hidden
    assert not grade(good, "x = 1", host=host).passed
    assert not grade(good, "def test_nothing(box): pass", host=host).passed


@pytest.mark.slow
def test_a_machine_failure_is_no_verdict(host):
    with SandboxHost(SandboxConfig(slots=1, slot_wait_s=0.05)) as narrow, pytest.raises(InfraError):
        grade_python("def f(): return 1", "f", "def check(c): assert c() == 1", host=narrow)


@pytest.mark.slow
@pytest.mark.skipif(not HUMAN_EVAL, reason="ROLLJAX_HUMAN_EVAL does not name the HumanEval file")
def test_human_eval(host):
    opener = gzip.open if HUMAN_EVAL.endswith(".gz") else open
    with opener(HUMAN_EVAL, "rt") as f:
        rows = [json.loads(line) for line in f]
    verdicts = many(lambda p: right(p, host), rows)
    assert [(p["task_id"], v) for p, v in zip(rows, verdicts, strict=True) if not v.passed] == []
    for name in (
        "an object that equals everything",
        "leaves with success at once",
        "leaves with success when called",
        "poisoned start-up files",
    ):
        cheats = many(
            lambda p, name=name: grade_python(
                p["prompt"] + "    pass\n" + CHEATS[name].replace("ENTRY", p["entry_point"]),
                p["entry_point"],
                p["test"],
                prompt=p["prompt"],
                host=host,
            ),
            rows,
        )
        assert [p["task_id"] for p, v in zip(rows, cheats, strict=True) if v.passed] == [], name
