"""Build the machine of a terminal task, and grade the policy's work: its files are copied into a new sandbox, where the
tests run.

The policy's sandbox never holds the tests or the verdict. Of its files only regular ones below the task's artifacts are
taken, as bytes; whatever else it left behind (processes, links, settings of its shell) stays where it was.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import json
import posixpath
import secrets
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rolljax.errors import EnvError, InfraError
from rolljax.recipes.terminal_bench.dockerfile import Put
from rolljax.recipes.terminal_bench.harbor import HarborTask

if TYPE_CHECKING:
    from rolljax.sandbox import Profile, Sandbox

MAX_FILES = 1000
MAX_BYTES = 16 << 20
BUILD_S = 20.0
"""Longest time in seconds to build a task's machine."""


@dataclasses.dataclass(frozen=True, slots=True)
class Left:
    """The files that a policy left, as (path, mode, content), folders, and the paths that could not be copied."""

    files: tuple[tuple[str, int, bytes], ...]
    folders: tuple[str, ...]
    refused: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Grade:
    """The result of a task's tests."""

    passed: bool
    """Whether there was a test and every test passed."""
    cases: Mapping[str, str]
    """Result of each test, by name: "" if it passed, otherwise the reason for its failure."""

    @property
    def num_passed(self) -> int:
        return sum(not why for why in self.cases.values())


def build(box: Sandbox, task: HarborTask) -> None:
    """Run the steps of the task's Dockerfile in a new sandbox.

    Raises:
      EnvError: a step of the task's Dockerfile failed.
    """
    order = {"nonce": secrets.token_hex(16), "steps": _steps(task)}
    result = box.execute(_argv(), stdin=json.dumps(order).encode(), timeout_s=BUILD_S)
    _check_built(task, _report(result.stdout, order["nonce"]), result.stderr)


def enter(workdir: str, variables: Mapping[str, str]) -> str:
    """Return a shell command that enters a folder and sets variables."""
    sets = "".join(f"export {key}={shlex.quote(value)}; " for key, value in variables.items())
    return f"{sets}cd {shlex.quote(workdir)}"


def list_files(box: Sandbox, roots: list[str]) -> list[tuple[str, int, str]]:
    """List kind (f, d, or another), mode and path of everything below `roots`, as the policy's sandbox reports them."""
    argv = ["/usr/bin/find", *roots, "-xdev", "-printf", r"%y %m %p\0"]
    result = box.execute(argv, timeout_s=BUILD_S)
    found = []
    for entry in result.stdout.decode(errors="replace").split("\0"):
        kind, _, rest = entry.partition(" ")
        mode, _, path = rest.partition(" ")
        if path.startswith("/") and ".." not in path.split("/") and len(mode) <= 4 and set(mode) <= set("01234567"):
            found.append((kind, int(mode or "644", 8) & 0o777, path))
    return sorted(found, key=lambda entry: entry[2])


def leave(box: Sandbox, task: HarborTask) -> Left:
    """Copy the policy's version of the task's artifacts out of its sandbox."""
    roots = _roots(task)
    files: list[tuple[str, int, bytes]] = []
    folders, refused = [], []
    size = 0
    for kind, mode, path in list_files(box, roots):
        if not any(path == root or path.startswith(f"{root}/") for root in roots):
            continue
        if kind == "d":
            folders.append(path)
        elif kind != "f" or len(files) == MAX_FILES:
            refused.append(path)
        else:
            try:
                data = box.get(path, max_bytes=MAX_BYTES - size)
            except InfraError:
                raise
            except EnvError:  # gone, changed or too large
                refused.append(path)
                continue
            size += len(data)
            files.append((path, mode, data))
    return Left(tuple(files), tuple(folders), tuple(refused))


def grade(task: HarborTask, left: Left, profile: Profile, timeout_s: float) -> Grade:
    """Run the task's tests in a new sandbox, on the files that the policy left in its own.

    Raises:
      EnvError: the task's machine could not be made.
    """
    from rolljax.sandbox import run

    nonce = secrets.token_hex(16)
    exam = {
        "clear": _roots(task),
        "folders": left.folders,
        "left": [_put(*file) for file in left.files],
        "tests": {path: _text(data) for path, data in task.tests.items() if path not in task.cases},
        "files": {path: task.tests[path].decode() for path in task.cases},
        "cases": task.cases,
        "workdir": task.workdir,
        "env": task.env,
        "timeout_s": timeout_s,
    }
    order = json.dumps({"nonce": nonce, "steps": _steps(task), "exam": exam}).encode()
    limits = dataclasses.replace(profile, wall_s=timeout_s + BUILD_S)
    result = run(_argv(), stdin=order, profile=limits)
    said = _report(result.stdout, nonce)
    if said.get("failed"):
        _check_built(task, said, result.stderr)
    names = [f"{path}::{name}" for path, names in task.cases.items() for name in names] or ["test.sh"]
    cases = said.get("cases")
    if not isinstance(cases, dict) or set(cases) != set(names):
        cases = dict.fromkeys(names, "the verdict is missing: the tests were killed")
    return Grade(result.returncode == 0 and not any(cases.values()), {name: str(cases[name]) for name in names})


def _roots(task: HarborTask) -> list[str]:
    return [posixpath.normpath(posixpath.join(task.workdir, path)) for path in task.artifacts]


def _steps(task: HarborTask) -> list[list[Any]]:
    return [
        ["put", *_put(step.path, step.mode, step.data)]
        if isinstance(step, Put)
        else ["run", step.command, step.workdir, step.env]
        for step in task.steps
    ]


def _put(path: str, mode: int, data: bytes) -> list[Any]:
    return [path, mode, _text(data)]


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _report(stdout: bytes, nonce: object) -> dict[str, Any]:
    """Parse the report of the program inside; empty without a report that has the right nonce."""
    try:
        said = json.loads(stdout)
    except (ValueError, RecursionError):
        return {}
    return said if isinstance(said, dict) and said.get("nonce") == nonce else {}


def _check_built(task: HarborTask, said: Mapping[str, Any], stderr: bytes) -> None:
    if said.get("failed") != "":
        why = said.get("failed") or f"no answer {stderr[-300:].decode(errors='replace')}"
        raise EnvError(f"task {task.name} could not be set up: {why}")


@functools.cache
def _program() -> str:
    return Path(__file__).with_name("inside.py").read_text()


def _argv() -> list[str]:
    return ["python3", "-I", "-c", _program()]
