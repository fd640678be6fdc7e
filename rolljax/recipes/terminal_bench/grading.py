"""Build the machine of a terminal task, and grade the policy's work: its files are copied into a new sandbox, where the
tests run. In an image only the changed ones are.

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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rolljax.errors import EnvError, InfraError
from rolljax.recipes.terminal_bench.dockerfile import Put
from rolljax.recipes.terminal_bench.harbor import HarborTask

if TYPE_CHECKING:
    from rolljax.sandbox import Profile, Sandbox, SandboxProvider

MAX_FILES = 1000
MAX_BYTES = 16 << 20
BUILD_S = 20.0
"""Longest time in seconds to build a task's machine."""


@dataclasses.dataclass(frozen=True, slots=True)
class Left:
    """What a policy left: files, as (path, mode, content), folders, the paths that it deleted, and the paths that could
    not be copied."""

    files: tuple[tuple[str, int, bytes], ...]
    folders: tuple[str, ...]
    deleted: tuple[str, ...]
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
    result = box.execute(_argv(task), stdin=json.dumps(order).encode(), timeout_s=BUILD_S)
    _check_built(task, _report(result.stdout, order["nonce"]), result.stderr)


def enter(workdir: str, variables: Mapping[str, str]) -> str:
    """Return a shell command that enters a folder and sets variables."""
    sets = "".join(f"export {key}={shlex.quote(value)}; " for key, value in variables.items())
    return f"{sets}cd {shlex.quote(workdir)}"


def list_files(box: Sandbox, task: HarborTask, also: Sequence[str]) -> tuple[list[tuple[str, int, str]], list[str]]:
    """List kind (f: regular file, d: folder, o: other), mode and path of what the policy may have written: the task's
    artifacts, its folder, and `also`; in an image everything that changed. Return also the paths that it deleted, which
    are known in an image only."""
    if not task.image:
        return box.list_files([*dict.fromkeys((*_roots(task), task.workdir, *also))]), []
    changes = box.changes()
    deleted = [path for kind, path in changes if kind == "D"]
    return box.list_files([path for kind, path in changes if kind != "D"], below=False), deleted


def leave(box: Sandbox, task: HarborTask, listed: Sequence[tuple[str, int, str]], deleted: Sequence[str]) -> Left:
    """Copy the policy's version of the task's artifacts out of its sandbox. listed, deleted: of `list_files`."""
    roots = _roots(task)
    files: list[tuple[str, int, bytes]] = []
    folders, refused = [], []
    size = 0
    for kind, mode, path in listed:
        if not _is_below(path, roots):
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
    gone = tuple(path for path in deleted if _is_below(path, roots))
    return Left(tuple(files), tuple(folders), gone, tuple(refused))


def _is_below(path: str, roots: Sequence[str]) -> bool:
    return any(path == root or path.startswith(f"{root.rstrip('/')}/") for root in roots)


def grade(
    task: HarborTask, left: Left, profile: Profile, timeout_s: float, host: SandboxProvider | None = None
) -> Grade:
    """Run the task's tests in a new sandbox, on the files that the policy left in its own.

    Args:
      host: the maker of both sandboxes; None: bubblewrap.

    Raises:
      EnvError: the task's machine could not be made.
    """
    from rolljax.sandbox import shared_host

    nonce = secrets.token_hex(16)
    exam = {
        "foreign": _roots(task),
        "clear": [] if task.image else _roots(task),
        "deleted": left.deleted,
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
    result = (host or shared_host()).run(_argv(task), stdin=order, profile=limits)
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


def _argv(task: HarborTask) -> list[str]:
    """Return the command of the program inside: by an image's own Python, which has the modules that its tests need;
    else by this machine's."""
    program = ["-I", "-c", _program()]
    if not task.image:
        return ["python3", *program]
    from rolljax.sandbox.containers import interpreter

    ours = shlex.join(interpreter().python)
    choice = f'command -v python3 > /dev/null && exec python3 "$@"; exec {ours} "$@"'
    return ["/bin/sh", "-c", choice, "sh", *program]
