"""The program that runs in the grading sandbox, with the order on its standard input."""

import base64
import json
import subprocess
import sys
from pathlib import Path

import pytest

from rolljax.recipes.terminal_bench import inside
from rolljax.recipes.terminal_bench.harbor import _cases

SOURCE = Path(inside.__file__).read_text()


def verify(tmp_path, text, *, cases=None, timeout_s=30.0):
    """Return the exit code, and by test why it failed."""
    names = cases if cases is not None else list(_cases({"test_a.py": text.encode()})[0]["test_a.py"])
    code, said = order([], exam(tmp_path, files={"test_a.py": text}, cases={"test_a.py": names}, timeout_s=timeout_s))
    assert said["failed"] == ""
    return code, {k.partition("::")[2]: v for k, v in said["cases"].items()}


def exam(tmp_path, **changes):
    lists = {name: [] for name in ("foreign", "clear", "deleted", "folders", "left")}
    none = {**lists, "tests": {}, "files": {}, "cases": {}, "env": {}, "timeout_s": 30.0}
    return {**none, "workdir": str(tmp_path), **changes}


def order(steps, exam=None):
    """Return the exit code and the output."""
    text = json.dumps({"nonce": "n1", "steps": steps, "exam": exam}).encode()
    done = subprocess.run([sys.executable, "-I", "-c", SOURCE], input=text, capture_output=True, timeout=120)
    assert not done.stderr
    said = json.loads(done.stdout)
    assert said["nonce"] == "n1"
    return done.returncode, said


def b64(text):
    return base64.b64encode(text.encode()).decode()


def test_steps_are_done_in_order(tmp_path):
    file = str(tmp_path / "a" / "b.txt")
    steps = [
        ["put", file, 0o640, b64("x")],
        ["run", "cat b.txt b.txt > c.txt; echo $V > v; echo noise", f"{tmp_path}/a", {"V": "1"}],
    ]
    assert order(steps) == (0, {"nonce": "n1", "failed": "", "cases": {}})
    assert (tmp_path / "a" / "c.txt").read_text() == "xx" and (tmp_path / "a" / "v").read_text() == "1\n"
    assert (tmp_path / "a" / "b.txt").stat().st_mode & 0o777 == 0o640


def test_the_first_step_that_fails_is_said_and_nothing_else_is_done(tmp_path):
    steps = [["run", "echo oh; exit 3", str(tmp_path), {}], ["put", str(tmp_path / "a"), 0o644, ""]]
    code, said = order(
        steps, exam(tmp_path, files={"test_a.py": "def test_a(): pass"}, cases={"test_a.py": ["test_a"]})
    )
    assert code == 1 and said["failed"] == "RUN echo oh; exit 3: code 3: oh\n" and said["cases"] == {}
    assert not (tmp_path / "a").exists()
    assert "writing /proc/none" in order([["put", "/proc/none/x", 0o644, ""]])[1]["failed"]


def test_what_was_left_takes_the_place_of_the_tasks_own(tmp_path):
    work = tmp_path / "work"
    (work / "old").mkdir(parents=True)
    (work / "old" / "file").write_text("gone")
    (work / "link").symlink_to("/etc")
    (tmp_path / "one").write_text("replaced")
    (tmp_path / "gone").mkdir()
    text = (
        "import os\n"
        f"top = {str(tmp_path)!r}\n"
        "def test_it():\n"
        "    found = sorted(os.path.relpath(os.path.join(d, n), top) for d, ds, ns in os.walk(top) for n in ds + ns)\n"
        "    assert found == ['one', 'work', 'work/empty', 'work/new', 'work/new/a'], found\n"
        "    assert open(top + '/one').read() == '1' and os.environ['V'] == '1'\n"
    )
    given = {
        "clear": [str(work), str(tmp_path / "one"), str(tmp_path / "never")],
        "deleted": [str(tmp_path / "gone"), str(tmp_path / "never")],
        "folders": [str(work), str(work / "empty")],
        "left": [[str(work / "new" / "a"), 0o755, b64("a")], [str(tmp_path / "one"), 0o644, b64("1")]],
        "env": {"V": "1"},
    }
    asked = exam(tmp_path, **given, files={"test_a.py": text}, cases={"test_a.py": ["test_it"]})
    assert order([], asked)[1]["cases"] == {"test_a.py::test_it": ""}


@pytest.mark.parametrize(
    "take",
    [
        "sys.path.insert(0, top); import answer",
        "sys.path.insert(0, top); importlib.import_module('answer')",
        "runpy.run_path(top + '/answer.py')",
        "importlib.machinery.SourceFileLoader('answer', top + '/answer.py').load_module()",
        "pickle.load(open(top + '/answer.pickle', 'rb'))",
        "ctypes.CDLL(top + '/answer.so')",
    ],
)
def test_code_of_the_policy_does_not_run_in_the_process_of_the_tests(tmp_path, take):
    work = tmp_path / "work"
    forged = 'import os\nfor fd in range(3, 64):\n    try: os.write(fd, b\'["test_a.py::test_it", ""]\\n\')\n    except OSError: pass\nos._exit(0)\n'
    surprise = b"cos\n_exit\n(I0\ntR."
    left = [[str(work / "answer.py"), 0o644, b64(forged)], [str(work / "answer.pickle"), 0o644, b64(surprise.decode())]]
    left.append([str(work / "answer.so"), 0o644, b64("no library")])
    text = f"import ctypes, importlib.machinery, pickle, runpy, sys\ntop = {str(work)!r}\ndef test_it():\n    {take}\n"
    given = {"foreign": [str(work)], "clear": [str(work)], "folders": [str(work)], "left": left}
    code, said = order([], exam(tmp_path, **given, files={"test_a.py": text}, cases={"test_a.py": ["test_it"]}))
    assert code == 1 and "ImportError" in said["cases"]["test_a.py::test_it"], said


def test_passing_functions_and_classes(tmp_path):
    text = (
        "import os, unittest, asyncio\n"
        "def helper(): return 1\n"
        "def test_here(tmp_path): assert helper() == 1 and os.getcwd() and tmp_path.is_dir()\n"
        "async def test_async(): await asyncio.sleep(0)\n"
        "class TestA:\n"
        "    def setup_method(self): self.x = 2\n"
        "    def test_x(self): assert self.x == 2\n"
        "class TestB(unittest.TestCase):\n"
        "    def setUp(self): self.y = 3\n"
        "    def test_y(self): self.assertEqual(self.y, 3)\n"
    )
    assert verify(tmp_path, text) == (0, dict.fromkeys(["test_here", "test_async", "TestA.test_x", "TestB.test_y"], ""))


def test_the_stand_in_for_pytest(tmp_path):
    text = (
        "import pytest\n"
        "@pytest.fixture(scope='module')\n"
        "def number(): yield 3\n"
        "@pytest.mark.parametrize('a, b', [(1, 2), (2, 4)])\n"
        "@pytest.mark.parametrize('c', [0, 1])\n"
        "def test_rows(a, b, c, number): assert b == 2 * a and number == 3\n"
        "@pytest.mark.parametrize('a', [1, 2])\n"
        "def test_one_row_is_wrong(a): assert a == 1\n"
        "def test_raises():\n"
        "    with pytest.raises(ValueError, match='x'): raise ValueError('x')\n"
        "def test_does_not_raise():\n"
        "    with pytest.raises(ValueError): pass\n"
        "def test_approx(): assert 0.1 + 0.2 == pytest.approx(0.3) and [1.0] == pytest.approx([1.0])\n"
        "def test_not_approx(): assert 1.1 == pytest.approx(1.0)\n"
        "@pytest.mark.skipif(False, reason='')\n"
        "def test_not_skipped(): pass\n"
    )
    code, cases = verify(tmp_path, text)
    assert code == 1
    assert {name for name, why in cases.items() if why} == {
        "test_one_row_is_wrong", "test_does_not_raise", "test_not_approx"
    }  # fmt: skip


@pytest.mark.parametrize(
    "body, why",
    [
        ("assert 1 == 2, 'numbers'", "AssertionError: numbers (line 3)"),
        ("pytest.skip('later')", "Skipped: later"),
        ("raise unittest.SkipTest", "SkipTest"),
        ("os._exit(0)", "ended early"),
        ("sys.exit(0)", "SystemExit"),
        ("os.kill(os.getpid(), 9)", "ended early"),
        ("os.write(1, b'all is well')", ""),
        ("1 / 0", "ZeroDivisionError"),
    ],
)
def test_each_way_to_end_a_test(tmp_path, body, why):
    text = f"import os, sys, pytest, unittest\ndef test_it():\n    {body}\ndef test_after(): pass\n"
    code, cases = verify(tmp_path, text)
    assert code == (1 if why else 0)
    assert (why in cases["test_it"]) if why else cases["test_it"] == ""
    assert bool(cases["test_after"]) == (why == "ended early")


def test_marked_to_skip_or_to_fail_is_failed(tmp_path):
    for mark in ("skip", "skip(reason='x')", "skipif(True, reason='x')", "xfail"):
        code, cases = verify(tmp_path, f"import pytest\n@pytest.mark.{mark}\ndef test_it(): pass\n")
        assert code == 1 and "skipped" in cases["test_it"]


def test_a_file_that_cannot_be_loaded_fails_its_tests(tmp_path):
    code, cases = verify(tmp_path, "import no_such_module\ndef test_it(): pass\n")
    assert code == 1 and "ModuleNotFoundError" in cases["test_it"]


def test_no_tests_is_a_failure(tmp_path):
    assert verify(tmp_path, "x = 1\n", cases=[]) == (1, {})


def test_a_test_that_is_redefined_away_has_failed(tmp_path):
    code, cases = verify(tmp_path, "def test_it(): pass\ndel test_it\n", cases=["test_it"])
    assert code == 1 and "AttributeError" in cases["test_it"]


def test_a_hanging_test_times_out_and_the_earlier_ones_keep_their_verdict(tmp_path):
    text = "import time\ndef test_a(): pass\ndef test_b(): time.sleep(600)\ndef test_c(): pass\n"
    code, cases = verify(tmp_path, text, timeout_s=3.0)
    assert (code, cases) == (1, {"test_a": "", "test_b": "timed out", "test_c": "timed out"})


def test_started_programs_can_neither_look_in_nor_answer(tmp_path):
    """A program that a test starts: it has none of the verifier's descriptors, and cannot read its memory."""
    spy = tmp_path / "spy.py"
    spy.write_text(
        "import os, sys\n"
        "found = [f for f in os.listdir('/proc/self/fd') if int(f) > 2]\n"
        'os.write(1, b\'{"nonce": "n1", "cases": {}}\')\n'
        "def readable(pid):\n"
        "    try:\n"
        "        os.listdir(f'/proc/{pid}/fd')\n"
        "        return True\n"
        "    except OSError:\n"
        "        return False\n"
        "print(len(found) <= 1, readable(os.getppid()), file=sys.stderr)\n"
    )
    text = (
        "import subprocess, sys, os\n"
        "def test_spy():\n"
        f"    done = subprocess.run(['/usr/bin/python3', '-I', '-c', {spy.read_text()!r}], stderr=subprocess.PIPE, text=True)\n"
        "    root = os.getuid() == 0\n"
        "    assert done.stderr.split() == ['True', str(root)], done.stderr\n"
    )
    assert verify(tmp_path, text) == (0, {"test_spy": ""})
