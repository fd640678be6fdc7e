"""Runs trusted tests against a candidate in another sandbox. A test receives plain data made in this process, so
that `==` is Python's own. Channel: the socket on descriptor 0; the verdict goes to descriptor 1 as one JSON line.

The task (argument 1, a JSON file) has `kind` check (a `check(candidate)` function, as HumanEval has it), asserts (a
list of statements, as MBPP has it) or box (functions `test_*(box)` that run programs and read files).

No object of the candidate has behaviour here. Its exceptions arrive as text and fail the test, whatever the test
catches, unless it expects one by `with pytest.raises(ValueError):`. Only the function under test gives data;
every other call of a name that only the candidate defines gives objects that can be passed back to it."""

from __future__ import annotations

import ast
import builtins
import fcntl
import functools
import json
import os
import re
import sys
import traceback
import types
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from plain import Codec  # type: ignore[import-not-found]
from wire import Lost, receive, send  # type: ignore[import-not-found]

Task = dict[str, Any]
Test = tuple[str, Callable[[], object]]
"""A test's name, and the function that runs it."""


class Fatal(BaseException):
    """The candidate cannot answer any more; no test may catch this."""


class Failed(BaseException):
    """The candidate failed the test, even if the test catches this: `Candidate.failures` lists it."""

    def __init__(self, reason: str, text: str) -> None:
        self.reason = reason
        super().__init__(text)


class Raised(Failed):
    """A call of the candidate raised. kinds: names of the exception's classes, as the candidate reports them."""

    def __init__(self, name: str, kinds: list[str], text: str) -> None:
        self.kinds, self.text = kinds, text
        super().__init__("error", f"{name} raised {kinds[0]}: {text[:200]}")


class BrokenTests(Exception):
    """The trusted tests themselves cannot be loaded."""


class CandidateObject:
    """An object that stays with the candidate: it can be passed back. A test that uses or compares its value fails."""

    def __init__(self, number: int, kind: str, candidate: Candidate) -> None:
        self._number, self._kind, self._candidate = number, kind, candidate

    def __repr__(self) -> str:
        return f"<{self._kind} of the candidate>"

    def _judged(self, *_: object) -> NoReturn:
        self._candidate.fail(Failed("wrong", f"the answer is no plain data, but {self!r}"))

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = _judged
    __hash__ = object.__hash__


class Candidate:
    """The candidate's program, which runs in another sandbox. `lost` is set when the candidate exits, closes its
    channel or breaks the protocol, and stays set even if a test catches the exception.

    answers: number of answers that could be judged. expected: exceptions that a test expects. failures: of
    the running test.
    """

    def __init__(self, channel: int) -> None:
        self.channel = channel
        self.answers = self.expected = 0
        self.lost = ""
        self.remotes: dict[int, CandidateObject] = {}
        self.failures: list[Failed] = []

    def lose(self, why: str) -> NoReturn:
        self.lost = self.lost or why
        raise Fatal(self.lost) from None

    def fail(self, failure: Failed) -> NoReturn:
        self.failures.append(failure)
        raise failure

    def ask(self, blob: bytes = b"", **order: Any) -> tuple[dict[str, Any], bytes]:
        if self.lost:
            raise Fatal(self.lost)
        try:
            send(self.channel, order, blob)
            answer, blob = receive(self.channel)
        except Lost as e:
            self.lose(f"the candidate exited ({e})")
        except MemoryError:
            self.lose("the candidate's answer is too large")
        if answer.get("fatal"):
            self.lose(f"the candidate exited ({str(answer.get('error'))[:100]})")
        return answer, blob

    def load(self, source: str) -> list[str]:
        """Run the candidate's program; return the names it defines."""
        answer, _ = self.ask(source.encode("utf-8", "surrogatepass"), op="load")
        if "error" in answer:
            self.lose(f"{answer['error']}: {str(answer.get('text'))[:200]}")
        return texts(answer.get("names"))

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], opaque: bool) -> Any:
        codec = Codec(self.number_of, self.remote)
        args, kwargs = codec.encode(args), codec.encode(kwargs)
        answer, _ = self.ask(op="call", name=name, args=args, kwargs=kwargs, opaque=opaque)
        if "error" in answer:
            kinds = [str(answer["error"])[:100], *texts(answer.get("kinds"))]
            self.fail(Raised(name, kinds, str(answer.get("text", ""))))
        try:
            return codec.decode(answer["value"])
        except (LookupError, TypeError, ValueError, ArithmeticError, RecursionError, MemoryError) as e:
            self.lose(f"the candidate's answer is no plain data ({type(e).__name__})")

    def function(self, name: str) -> Callable[..., Any]:
        """Return the function under test, which returns plain data."""

        def call(*args: Any, **kwargs: Any) -> Any:
            value = self.call(name, args, kwargs, opaque=False)
            self.answers += 1
            return value

        call.__name__ = call.__qualname__ = name
        return call

    def maker(self, name: str) -> Callable[..., CandidateObject]:
        """Return another name of the candidate, such as a class for making arguments; a call of it returns a handle of
        the object."""

        def make(*args: Any, **kwargs: Any) -> CandidateObject:
            made = self.call(name, args, kwargs, opaque=True)
            return made if type(made) is CandidateObject else self.lose("the candidate breaks the protocol")

        make.__name__ = make.__qualname__ = name
        return make

    def remote(self, number: Any, kind: Any) -> CandidateObject:
        return self.remotes.setdefault(int(number), CandidateObject(int(number), str(kind)[:50], self))

    def number_of(self, value: object) -> tuple[int, str]:
        if type(value) is not CandidateObject:
            raise TypeError(f"{type(value).__name__} cannot be sent to a candidate")
        return value._number, value._kind


class Raises:
    """`with pytest.raises(ValueError, match="negative") as caught:` a call in it must end in that exception of the
    candidate's. `caught.value`: its text. Any other error in it fails the test."""

    def __init__(self, candidate: Candidate, kinds: Any, match: str | None = "") -> None:
        self.kinds = kinds if type(kinds) is tuple else (kinds,)
        if not self.kinds or not all(isinstance(kind, type) and issubclass(kind, Exception) for kind in self.kinds):
            raise TypeError("pytest.raises takes a class of exceptions, or a tuple of them")
        self.candidate, self.match = candidate, match or ""
        self.value: str | None = None

    def __enter__(self) -> Raises:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> bool:
        wanted = {kind.__name__ for kind in self.kinds}
        assert kind is not None, f"did not raise {' or '.join(sorted(wanted))}"
        if type(error) is not Raised or not wanted & set(error.kinds) or not re.search(self.match, error.text):
            return False
        self.candidate.failures.remove(error)
        self.candidate.expected += 1
        self.value = error.text
        return True


class Completed:
    """The result of a program in the candidate's sandbox."""

    def __init__(self, returncode: int, stdout: str, stderr: str) -> None:
        self.returncode, self.stdout, self.stderr = returncode, stdout, stderr


class Box:
    """Programs and files of the candidate's sandbox."""

    def __init__(self, candidate: Candidate) -> None:
        self._candidate = candidate

    def run(self, argv: Sequence[str], stdin: str = "", timeout_s: float = 10.0) -> Completed:
        """Run a program there; return its exit code and output as text."""
        answer, blob = self._candidate.ask(
            stdin.encode(), op="execute", argv=list(argv), timeout_s=timeout_s, limit=1 << 20
        )
        cut, code = answer.get("stdout_n"), answer.get("code")
        if type(cut) is not int or type(code) is not int:
            self._candidate.lose(f"programs cannot be started any more ({str(answer.get('error'))[:100]})")
        self._candidate.answers += 1
        out, err = (part.decode(errors="replace") for part in (blob[:cut], blob[cut:]))
        return Completed(code, out, err)

    def read(self, path: str) -> bytes:
        """Return the bytes of a regular file there; FileNotFoundError when it is not one."""
        answer, blob = self._candidate.ask(op="get", path=path, limit=16 << 20)
        self._candidate.answers += 1
        if answer.get("error"):
            raise FileNotFoundError(f"{path}: {answer['error']}")
        return blob


def texts(value: Any) -> list[str]:
    """Return the texts of a value that should be a list of texts."""
    return [text for text in value if type(text) is str] if type(value) is list else []


def loaded(space: dict[str, Any], name: str, text: str) -> None:
    """Run a trusted source in `space`."""
    error = error_of(lambda: exec(compile(text, name, "exec", dont_inherit=True), space))
    if error is not None:
        raise BrokenTests(f"{name}: {type(error).__name__}: {str(error)[:200]}")


def check_tests(task: Task, candidate: Candidate) -> list[Test]:
    """Return the one test: the `check` function of the test source, with the prompt's own helpers in scope. The test
    source's definitions take precedence, also under the name of the function that is tested."""
    space: dict[str, Any] = {"__name__": "tests"}
    function = candidate.function(task["entry_point"])
    loaded(space, "prompt.py", task["prompt"])
    space[task["entry_point"]] = function
    loaded(space, "tests.py", task["test"])
    load_program(task, candidate)
    check = space.get("check")
    return [("check", lambda: check(function))] if callable(check) else []


def load_program(task: Task, candidate: Candidate) -> set[str]:
    """Run the candidate's program; return the names it defines, including the tested function."""
    own = set(candidate.load(task["source"]))
    if task["entry_point"] not in own:
        candidate.lose(f"there is no function {task['entry_point']}")
    return own


def assert_tests(task: Task, candidate: Candidate) -> list[Test]:
    """Return one test per statement. A name that neither Python, the setup nor a module has makes objects of the
    candidate."""
    space: dict[str, Any] = {"__name__": "tests"}
    loaded(space, "setup.py", task["setup"])
    own = load_program(task, candidate)
    space[task["entry_point"]] = candidate.function(task["entry_point"])
    tests: list[Test] = []
    for i, text in enumerate(task["tests"]):
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError) as e:
            raise BrokenTests(f"test {i}: {e}") from None
        for name in {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}:
            if name in space or hasattr(builtins, name):
                continue
            if name in sys.stdlib_module_names or name == "pytest":
                space[name] = __import__(name)
            elif name in own:
                space[name] = candidate.maker(name)
        code = compile(tree, f"test_{i}.py", "exec", dont_inherit=True)
        tests.append((f"test {i}", functools.partial(exec, code, space)))
    return tests


def box_tests(task: Task, candidate: Candidate) -> list[Test]:
    """Return one test per function `test_*`."""
    space: dict[str, Any] = {"__name__": "tests"}
    loaded(space, "tests.py", task["test"])
    answer, _ = candidate.ask(op="hello")
    if not answer.get("ready"):
        candidate.lose("the candidate's sandbox does not answer")
    box = Box(candidate)
    found = [(name, value) for name, value in space.items() if name.startswith("test_") and callable(value)]
    return [(name, functools.partial(value, box)) for name, value in found]


def verdict(task: Task, candidate: Candidate) -> dict[str, Any]:
    """Count passed tests. A test that only expects exceptions counts if another test had an answer to judge."""
    tests = {"check": check_tests, "asserts": assert_tests, "box": box_tests}[task["kind"]](task, candidate)
    passed, problems = 0, []
    for name, test in tests:
        problem = run_test(test, candidate)
        if candidate.lost:
            break
        if problem:
            problems.append((problem[0], f"{name}: {problem[1]}"))
        else:
            passed += 1
    reason, detail = problems[0] if problems else ("passed", "")
    if candidate.lost:
        reason, detail = "exited", candidate.lost
    elif not tests:
        reason, detail = "no tests", "there is no test"
    elif not candidate.answers:
        passed = 0
        if not problems:
            reason, detail = "no tests", "no call of the candidate's had an answer"
    return {"num_passed": passed, "num_tests": len(tests), "reason": reason, "detail": detail}


def run_test(test: Callable[[], object], candidate: Candidate) -> tuple[str, str] | None:
    """Run one test; return reason and text of its failure, None when it passed."""
    answers, expected, candidate.failures, line = candidate.answers, candidate.expected, [], ""
    error = error_of(test)
    if isinstance(error, (Fatal, Failed)):
        line = where(error)
    elif isinstance(error, AssertionError):
        return "wrong", f"assertion failed{where(error)}"
    elif error is not None:
        return "error", f"{type(error).__name__}: {str(error)[:200]}{where(error)}"
    if candidate.failures:
        return candidate.failures[0].reason, f"{candidate.failures[0]}{line}"
    if (candidate.answers, candidate.expected) == (answers, expected):
        return "no tests", "nothing of the candidate was called"
    return None


def error_of(call: Callable[[], object]) -> BaseException | None:
    """Return the exception of the tests' own code; None if it ends without one."""
    try:
        call()
    except BaseException as e:  # border: the code of a test, which may also exit
        return e
    return None


def where(error: BaseException) -> str:
    """Return the line of the test that raised an error."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.startswith("test")]
    return f" (line {frames[-1].lineno})" if frames else ""


def main() -> None:
    channel = fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, 10)
    out = fcntl.fcntl(1, fcntl.F_DUPFD_CLOEXEC, 10)
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    os.dup2(0, 1)
    with open(sys.argv[1], encoding="utf-8", errors="surrogatepass") as f:
        task = json.load(f)
    candidate = Candidate(channel)
    sys.modules["pytest"] = types.ModuleType("pytest")
    sys.modules["pytest"].raises = functools.partial(Raises, candidate)  # type: ignore[attr-defined]
    try:
        said = verdict(task, candidate)
    except Fatal:
        tests = len(task["tests"]) if task["kind"] == "asserts" else 1
        said = {"num_passed": 0, "num_tests": tests, "reason": "exited", "detail": candidate.lost}
    except BrokenTests as e:
        said = {"num_passed": 0, "num_tests": 0, "reason": "broken tests", "detail": str(e)}
    os.write(out, json.dumps(said).encode() + b"\n")


if __name__ == "__main__":
    main()
