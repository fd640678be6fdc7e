"""Build a task's machine inside a sandbox, and run its tests. This is a separate program: it is passed to `python3 -I
-c` as text, and imports only the standard library.

Standard input, JSON: `{"nonce", "steps": [["put", path, mode, base64] or ["run", command, folder, variables], ...]}`,
and for a test also `"exam": {"foreign": [path, ...], "clear": [path, ...], "deleted": [path, ...], "folders": [path,
...], "left": [[path, mode, base64], ...], "tests": {path: base64}, "files": {path: source}, "cases": {path: [name,
...]}, "workdir", "env", "timeout_s"}`.
Standard output, JSON: `{"nonce", "failed": "" or the step that failed, "cases": {"path::name": "" or why it failed}}`;
the exit code is 0 if every step worked and every test passed.

What the tests start may be programs that a policy wrote. Therefore
- the sources of the tests come through standard input and never lie on disk;
- this process cannot be looked into (it is not dumpable, so /proc shows nothing of it to others of the same user);
- the verdict carries a nonce that no other program knows, so what others write to the same pipe only spoils it;
- each file runs in a child: when that ends early, for whatever reason, the tests that were not reported have failed;
- code of the policy's files does not run in that child: an import of it, a library or a pickled class is refused there;
- a script that writes its own verdict runs from memory, and nothing that it started may outlive it: what is left could
  have written the verdict.
A test that evaluates a text of the policy's in its own process still gives it the power to report anything; tests that
matter start a program instead.
"""

from __future__ import annotations

import base64
import ctypes
import functools
import inspect
import itertools
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import types
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 4, 36
REWARD = "/logs/verifier/reward.txt"


class Skipped(Exception):
    """A test that skips has failed: nothing was shown."""


def main() -> int:
    """Execute the order on standard input inside the sandbox; return the exit code."""
    order = json.loads(sys.stdin.buffer.read())
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    out = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    failed = build(order["steps"])
    exam = order.get("exam")
    cases = take_exam(exam) if exam and not failed else {}
    text = json.dumps({"nonce": order["nonce"], "failed": failed, "cases": cases}).encode()
    while text:
        text = text[os.write(out, text) :]
    return 1 if failed or any(cases.values()) or (exam and not cases) else 0


def build(steps: list[list[Any]]) -> str:
    """Do the steps in order; returns the first that failed, and how."""
    for kind, *step in steps:
        if kind == "put":
            try:
                put(*step)
            except OSError as e:
                return f"writing {step[0]}: {e.strerror}"
            continue
        command, folder, variables = step
        done = subprocess.run(
            ["/bin/bash", "-c", command],
            cwd=folder,
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        if done.returncode != 0:
            return f"RUN {command[:200]}: code {done.returncode}: {done.stdout.decode(errors='replace')[-300:]}"
    return ""


def put(path: str, mode: int, data: str | bytes) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as f:
        f.write(base64.b64decode(data))
    os.chmod(path, mode)


def take_exam(exam: dict[str, Any]) -> dict[str, str]:
    """Copy the policy's files, then run the tests."""
    lay_in(exam)
    for path, data in exam["tests"].items():
        put(f"/tests/{path}", 0o555 if path.endswith(".sh") else 0o444, data)
    os.environ.update(exam["env"], PYTHONNOUSERSITE="1")
    os.chdir(exam["workdir"])
    deadline = time.monotonic() + exam["timeout_s"]
    if not exam["files"]:
        return {"test.sh": run_script(base64.b64decode(exam["tests"]["test.sh"]), deadline)}
    cases = {}
    for path, source in exam["files"].items():
        cases.update(run_file(path, source, exam["cases"][path], exam["foreign"], deadline))
    return cases


def lay_in(exam: dict[str, Any]) -> None:
    """Replace the task's files by the policy's; files that cannot be written are skipped."""
    for root in exam["clear"]:
        if os.path.isdir(root) and not os.path.islink(root):
            for name in os.listdir(root):
                remove(os.path.join(root, name))
        else:
            remove(root)
    for path in exam["deleted"]:
        remove(path)
    for folder in exam["folders"]:
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError:
            pass
    for step in exam["left"]:
        try:
            put(*step)
        except OSError:
            pass


def remove(path: str) -> None:
    try:
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path, ignore_errors=True)
        else:
            os.unlink(path)
    except OSError:
        pass


def run_script(source: bytes, deadline: float) -> str:
    """Run the text of /tests/test.sh; "" if it ended with code 0, wrote a reward of 1 and left nothing running."""
    os.makedirs(os.path.dirname(REWARD), exist_ok=True)
    ctypes.CDLL(None).prctl(
        PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0
    )  # a process that loses its parent becomes a child of this one
    argv = ["/bin/bash", "-c", os.fsdecode(source), "/tests/test.sh"]
    try:
        code = subprocess.run(argv, timeout=deadline - time.monotonic()).returncode
        if has_children():
            return "a program that it started outlived it, and could have written the reward"
        with open(REWARD) as f:
            reward = float(f.read(100))
    except subprocess.TimeoutExpired:
        return "timed out"
    except (OSError, ValueError) as e:
        return f"no reward in {REWARD}: {e}"
    return "" if reward == 1 and code == 0 else f"reward {reward:g}, code {code}"


def has_children() -> bool:
    """Return whether a child process is left, running or not."""
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return False
    return True


def run_file(path: str, source: str, names: list[str], foreign: list[str], deadline: float) -> dict[str, str]:
    """Run the tests of a file in a child process; a test that it did not report before it ended counts as failed."""
    wanted = {f"{path}::{name}": "did not run: the test process ended early" for name in names}
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        try:
            keep_out(foreign)
            run_tests(path, source, names, writer)
        finally:
            os._exit(0)
    os.close(writer)
    text = b""
    reported: set[str] = set()
    while len(reported) < len(wanted):
        ready, _, _ = select.select([reader], [], [], max(0.0, deadline - time.monotonic()))
        chunk = os.read(reader, 65536) if ready else b""
        if not chunk:
            if not ready:
                wanted.update((name, "timed out") for name in wanted.keys() - reported)
            break
        *lines, text = (text + chunk).split(b"\n")
        for line in lines:
            name, why = json.loads(line)
            if name in wanted and name not in reported:
                wanted[name] = why
                reported.add(name)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(reader)
    return wanted


def keep_out(roots: list[str]) -> None:
    """Forbid this process to run code from files below `roots` or to make objects of classes in pickled data."""
    foreign = [os.path.realpath(root) for root in roots]

    def watch(event: str, args: tuple[Any, ...]) -> None:
        if event == "pickle.find_class":
            raise ImportError(f"pickled data name {args[0]}.{args[1]}: only plain data are taken from the policy")
        path = args[0].co_filename if event == "exec" else args[0] if event == "ctypes.dlopen" else None
        if event == "import":
            path = args[1]
        if isinstance(path, (str, bytes)) and path:
            path = os.path.realpath(os.fsdecode(path))
            if any(path == root or path.startswith(root + "/") for root in foreign):
                raise ImportError(f"{path} is the policy's: start it as a program")

    sys.addaudithook(watch)


def run_tests(path: str, source: str, names: list[str], writer: int) -> None:
    def report(name: str, why: str) -> None:
        os.write(writer, json.dumps([f"{path}::{name}", why]).encode() + b"\n")

    sys.modules["pytest"] = stand_in()
    module = types.ModuleType(path.removesuffix(".py"))
    module.__file__ = f"/tests/{path}"
    sys.modules[module.__name__] = module
    code = f"/tests/{path}"
    broken = failure_of(lambda: exec(compile(source, code, "exec", dont_inherit=True), module.__dict__))
    if broken:
        for name in names:
            report(name, broken)
        return
    fixtures = Fixtures(module)
    for name in names:
        report(name, failure_of(functools.partial(run_test, module, name, fixtures)))


def failure_of(call: Callable[[], object]) -> str:
    """Return why code of a test file failed; empty if it did not."""
    try:
        call()
    except BaseException as e:  # border: whatever a test throws, an exit too, is its failure
        return describe(e)
    return ""


def run_test(module: types.ModuleType, name: str, fixtures: Fixtures) -> None:
    cls_name, _, method = name.rpartition(".")
    if not cls_name:
        run_function(getattr(module, name), fixtures)
        return
    cls = getattr(module, cls_name)
    owner = cls(method) if issubclass(cls, unittest.TestCase) else cls()
    for hook in ("setUpClass", "setup_class", "setUp"):
        getattr(owner, hook, lambda: None)()
    if hasattr(owner, "setup_method"):
        owner.setup_method(*[getattr(owner, method)] * len(inspect.signature(owner.setup_method).parameters))
    run_function(getattr(owner, method), fixtures)
    getattr(owner, "tearDown", lambda: None)()


def run_function(function: Callable[..., Any], fixtures: Fixtures) -> None:
    if getattr(function, "_skip", False):
        raise Skipped("marked to be skipped or to fail")
    tables = getattr(function, "_tables", [])
    for row in itertools.product(*tables):
        arguments = {k: v for values in row for k, v in values.items()}
        needed = [n for n in inspect.signature(function).parameters if n not in arguments]
        result = function(**arguments, **{n: fixtures.value(n) for n in needed})
        if inspect.iscoroutine(result):
            import asyncio

            asyncio.run(result)


class Fixtures:
    """Values by name: of the module's own fixtures, made once, and `tmp_path`."""

    def __init__(self, module: types.ModuleType) -> None:
        self.makers = {getattr(f, "_fixture", ""): f for f in vars(module).values() if getattr(f, "_fixture", "")}
        self.made: dict[str, Any] = {}

    def value(self, name: str) -> Any:
        if name == "tmp_path":
            return Path(tempfile.mkdtemp())
        if name not in self.made:
            maker = self.makers[name]
            made = maker(**{n: self.value(n) for n in inspect.signature(maker).parameters})
            self.made[name] = next(made) if inspect.isgenerator(made) else made
        return self.made[name]


class ExpectedException:
    def __init__(self, kind: Any, match: str | None = None) -> None:
        self.kind, self.match = kind, match
        self.value: BaseException | None = None

    def __enter__(self) -> ExpectedException:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> bool:
        import re

        assert kind is not None, f"did not raise {self.kind}"
        self.value = error
        return issubclass(kind, self.kind) and (self.match is None or re.search(self.match, str(error)) is not None)


class Approx:
    def __init__(self, wanted: Any, rel: float = 1e-6, abs: float = 1e-12) -> None:  # noqa: A002  # pytest's names
        self.wanted, self.rel, self.abs = wanted, rel, abs

    def __eq__(self, other: Any) -> Any:
        if isinstance(self.wanted, (list, tuple)):
            pairs = zip(self.wanted, other, strict=True)
            return len(self.wanted) == len(other) and all(b == Approx(a, self.rel, self.abs) for a, b in pairs)
        bound = max((self.rel or 0) * abs(self.wanted), self.abs or 0)
        return abs(other - self.wanted) <= bound


def stand_in() -> types.ModuleType:
    """Return a module with the part of pytest that simple tests use."""
    pytest = types.ModuleType("pytest")

    def skip(reason: str = "", **_: Any) -> NoReturn:
        raise Skipped(reason)

    def fail(reason: str = "", **_: Any) -> NoReturn:
        raise AssertionError(reason)

    def fixture(function: Any = None, *, name: str = "", **_: Any) -> Any:
        if function is None:
            return lambda f: fixture(f, name=name)
        function._fixture = name or function.__name__
        return function

    def parametrize(names: Any, rows: Any, **_: Any) -> Callable[[Any], Any]:
        keys = [n.strip() for n in names.split(",")] if isinstance(names, str) else list(names)
        table = [dict(zip(keys, row if len(keys) > 1 else [row], strict=True)) for row in rows]

        def mark(function: Any) -> Any:
            function._tables = [*getattr(function, "_tables", []), table]
            return function

        return mark

    class Mark:
        def __getattr__(self, name: str) -> Any:
            if name == "parametrize":
                return parametrize
            if name in ("skip", "xfail"):
                return skipped
            if name == "skipif":
                return lambda condition, **_: skipped if condition else (lambda f: f)
            return lambda *args, **_: args[0] if args and callable(args[0]) else (lambda f: f)

    def skipped(function: Any = None, **_: Any) -> Any:
        if function is None:
            return skipped
        function._skip = True
        return function

    vars(pytest).update(skip=skip, fail=fail, fixture=fixture, mark=Mark(), raises=ExpectedException, approx=Approx)
    return pytest


def describe(error: BaseException) -> str:
    """Return kind, message and line of an error, without the surrounding source."""
    trace, line = error.__traceback__, 0
    while trace is not None:
        if trace.tb_frame.f_code.co_filename.startswith("/tests/"):
            line = trace.tb_lineno
        trace = trace.tb_next
    return f"{type(error).__name__}: {str(error)[:200]} (line {line})"


if __name__ == "__main__":
    sys.exit(main())
