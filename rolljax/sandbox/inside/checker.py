"""Runs trusted tests against a candidate in another sandbox. What a test gets from there is plain data made here, so
that `==` is Python's own. Channel: the socket on descriptor 0; the verdict goes to descriptor 1 as one JSON line.

The task (argument 1, a JSON file) has `kind` check (a `check(candidate)` function, as HumanEval has it), asserts (a
list of statements, as MBPP has it) or box (functions `test_*(box)` that run programs and read files)."""

import ast
import builtins
import fcntl
import json
import os
import sys
import traceback

from plain import Codec  # type: ignore[import-not-found]
from wire import Lost, receive, send  # type: ignore[import-not-found]


class RemoteError(Exception):
    """An exception of the candidate that has no class of that name here."""


class Fatal(BaseException):
    """The candidate cannot answer any more; no test may catch this."""


class BrokenTests(Exception):
    """The trusted tests themselves cannot be loaded."""


class Remote:
    """An object that stays with the candidate: it can be passed back, and equals nothing but itself."""

    def __init__(self, number, kind):
        self._number, self._kind = number, kind

    def __repr__(self):
        return f"<{self._kind} of the candidate>"


class Candidate:
    """The other sandbox. `lost` stays set when it exits, hangs up, or breaks the protocol, whatever tests catch."""

    def __init__(self, channel):
        self.channel = channel
        self.calls = 0
        self.lost = ""
        self.remotes = {}

    def ask(self, blob=b"", **order):
        if self.lost:
            raise Fatal(self.lost)
        try:
            send(self.channel, order, blob)
            answer, blob = receive(self.channel)
        except Lost as e:
            self.lost = f"the candidate exited ({e})"
            raise Fatal(self.lost) from None
        if answer.get("fatal"):
            self.lost = f"the candidate exited ({answer.get('error')})"
            raise Fatal(self.lost)
        return answer, blob

    def load(self, source):
        """Run the candidate's program; the names it defines."""
        answer, _ = self.ask(source.encode("utf-8", "surrogatepass"), op="load")
        if "error" in answer:
            self.lost = f"{answer['error']}: {str(answer.get('text'))[:200]}"
            raise Fatal(self.lost)
        names = answer.get("names")
        return [name for name in names if type(name) is str] if type(names) is list else []

    def function(self, name):
        def call(*args, **kwargs):
            self.calls += 1
            codec = Codec(self.number_of, self.remote)
            answer, _ = self.ask(op="call", name=name, args=codec.encode(args), kwargs=codec.encode(kwargs))
            if "error" in answer:
                raise exception(str(answer["error"]), str(answer.get("text", "")))
            try:
                return codec.decode(answer["value"])
            except Exception as e:
                self.lost = f"the candidate's answer is no plain data ({type(e).__name__})"
                raise Fatal(self.lost) from None

        call.__name__ = call.__qualname__ = name
        return call

    def remote(self, number, kind):
        return self.remotes.setdefault(int(number), Remote(int(number), str(kind)[:50]))

    def number_of(self, value):
        if type(value) is not Remote:
            raise TypeError(f"{type(value).__name__} cannot be sent to a candidate")
        return value._number, value._kind


class Completed:
    def __init__(self, returncode, stdout, stderr):
        self.returncode, self.stdout, self.stderr = returncode, stdout, stderr


class Box:
    """Programs and files of the candidate's sandbox."""

    def __init__(self, candidate):
        self._candidate = candidate

    def run(self, argv, stdin="", timeout_s=10.0):
        """Run a program there; its return code and output as text."""
        self._candidate.calls += 1
        answer, blob = self._candidate.ask(
            stdin.encode(), op="execute", argv=list(argv), timeout_s=timeout_s, limit=1 << 20
        )
        cut = int(answer["stdout_n"])
        out, err = (part.decode(errors="replace") for part in (blob[:cut], blob[cut:]))
        return Completed(int(answer["code"]), out, err)

    def read(self, path):
        """The bytes of a regular file there; FileNotFoundError when it is not one."""
        self._candidate.calls += 1
        answer, blob = self._candidate.ask(op="get", path=path, limit=16 << 20)
        if answer.get("error"):
            raise FileNotFoundError(f"{path}: {answer['error']}")
        return blob


def exception(name, text):
    found = getattr(builtins, name, None)
    if isinstance(found, type) and issubclass(found, Exception):
        try:
            return found(text)
        except TypeError:
            pass
    return RemoteError(f"{name}: {text}")


def loaded(sources):
    """The names that trusted sources define together."""
    space: dict[str, object] = {"__name__": "tests"}
    for name, text in sources.items():
        try:
            exec(compile(text, name, "exec"), space)
        except BaseException as e:
            raise BrokenTests(f"{name}: {type(e).__name__}: {str(e)[:200]}") from None
    return space


def run_check(task, candidate):
    """One test: the `check` function of the test source, with the prompt's own helpers in scope."""
    space = loaded({"prompt.py": task["prompt"], "tests.py": task["test"]})
    if task["entry_point"] not in candidate.load(task["source"]):
        candidate.lost = f"there is no function {task['entry_point']}"
        raise Fatal(candidate.lost)
    function = candidate.function(task["entry_point"])
    space[task["entry_point"]] = function
    check = space.get("check")
    return [("check", lambda: check(function))] if callable(check) else []


def run_asserts(task, candidate):
    """One test per statement. Names that neither Python, the setup nor a module has are the candidate's."""
    space = loaded({"setup.py": task["setup"]})
    own = set(candidate.load(task["source"]))
    tests = []
    for i, text in enumerate(task["tests"]):
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError) as e:
            raise BrokenTests(f"test {i}: {e}") from None
        for name in {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}:
            if name in space or hasattr(builtins, name):
                continue
            if name in sys.stdlib_module_names:
                space[name] = __import__(name)
            elif name in own:
                space[name] = candidate.function(name)
        code = compile(tree, f"test_{i}.py", "exec")
        tests.append((f"test {i}", lambda code=code: exec(code, space)))
    return tests


def run_box(task, candidate):
    """One test per function `test_*`."""
    space = loaded({"tests.py": task["test"]})
    answer, _ = candidate.ask(op="hello")
    if not answer.get("ready"):
        raise Fatal("the candidate's sandbox does not answer")
    box = Box(candidate)
    found = [(name, value) for name, value in space.items() if name.startswith("test_") and callable(value)]
    return [(name, lambda value=value: value(box)) for name, value in found]


def verdict(task, candidate):
    tests = {"check": run_check, "asserts": run_asserts, "box": run_box}[task["kind"]](task, candidate)
    passed, reason, detail = 0, "", ""
    for name, test in tests:
        calls = candidate.calls
        try:
            test()
        except Fatal:
            break
        except AssertionError:
            reason, detail = reason or "wrong", detail or f"{name}: assertion failed{where()}"
        except BaseException as e:
            reason, detail = reason or "error", detail or f"{name}: {type(e).__name__}: {str(e)[:200]}{where()}"
        else:
            if candidate.lost:
                break
            if candidate.calls == calls:
                reason, detail = reason or "no tests", detail or f"{name}: nothing of the candidate was called"
            else:
                passed += 1
    if candidate.lost:
        reason, detail = "exited", candidate.lost
    elif not tests:
        reason, detail = "no tests", "there is no test"
    return {"num_passed": passed, "num_tests": len(tests), "reason": reason or "passed", "detail": detail}


def where():
    """The line of the test that failed."""
    frames = [f for f in traceback.extract_tb(sys.exc_info()[2]) if f.filename.startswith("test")]
    return f" (line {frames[-1].lineno})" if frames else ""


def main():
    channel = fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, 10)
    out = fcntl.fcntl(1, fcntl.F_DUPFD_CLOEXEC, 10)
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    os.dup2(0, 1)
    with open(sys.argv[1], encoding="utf-8", errors="surrogatepass") as f:
        task = json.load(f)
    candidate = Candidate(channel)
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
