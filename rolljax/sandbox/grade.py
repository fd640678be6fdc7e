"""Graders: the candidate runs in one sandbox, the tests in another, and only plain data pass between them.

Whatever a candidate does to its own interpreter (exits, patches modules, objects that equal everything, faked output)
happens where no verdict is made. Tests and expected values are never in its sandbox.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rolljax.errors import InfraError
from rolljax.sandbox import command_line
from rolljax.sandbox.host import SIGKILL_CODE, SIGXCPU_CODE, SandboxHost, ended_with, shared_host
from rolljax.sandbox.inside.wire import HeadTail
from rolljax.sandbox.launcher import SandboxHandle
from rolljax.sandbox.profile import CODE, SCORE, Profile
from rolljax.sandbox.provider import END_S

MAX_VERDICT = 1 << 16
EXTRA_S = 5.0
"""Seconds that the tests' sandbox outlives the candidate's, to report the tests that passed before."""


@dataclasses.dataclass(frozen=True)
class GradeResult:
    """The result of a program's tests."""

    passed: bool
    """Whether there was a test and every test passed."""
    num_passed: int
    num_tests: int
    reason: str
    """Passed, wrong (an assertion), error (an exception), exited (the candidate's process ended or could not be
    loaded), timeout (wall clock or processor time), killed (memory), no tests (nothing was tested), broken tests (they
    could not be loaded: the task's fault, not the candidate's)."""
    detail: str = ""
    """One line for the record (it may quote a test: not for the policy)."""
    ms: float = 0.0


def grade_python(
    candidate_source: str,
    entry_point: str,
    test_source: str,
    *,
    prompt: str = "",
    profile: Profile = SCORE,
    host: SandboxHost | None = None,
) -> GradeResult:
    """Grade a program by a function `check(candidate)` full of assertions (the HumanEval format).

    candidate_source: the whole program. entry_point: the function of it that is tested. prompt: trusted text that the
    program began with; helpers defined in it are used from there, not from the program.
    An exception of the program fails the test, unless the test expects it: `with pytest.raises(ValueError):` (the test
    imports pytest; only this function of it exists).

    Raises:
      InfraError: the machine failed, not the program.
    """
    task = {"kind": "check", "entry_point": entry_point, "test": test_source, "prompt": prompt}
    return _grade_program(candidate_source, task, 1, profile, host or shared_host())


def grade_mbpp(
    candidate_source: str,
    entry_point: str,
    tests: Sequence[str],
    *,
    setup: str = "",
    profile: Profile = SCORE,
    host: SandboxHost | None = None,
) -> GradeResult:
    """Grade a program by statements that call its function by name (the MBPP format), one test each.

    entry_point: the function that is tested. setup: trusted text with the helpers of the tests. Everything else that
    the tests use of the program (a class, to make arguments with) gives objects for the function, never an answer.

    Raises:
      InfraError: the machine failed, not the program.
    """
    task = {"kind": "asserts", "entry_point": entry_point, "tests": list(tests), "setup": setup}
    return _grade_program(candidate_source, task, len(tests), profile, host or shared_host())


def grade(
    artefacts: Mapping[str, bytes], test_source: str, *, profile: Profile = CODE, host: SandboxHost | None = None
) -> GradeResult:
    """Grade files with tests. `test_source` defines functions `test_*(box)`; `box.run(argv, stdin)` runs a program in a
    new sandbox that holds only the artefacts, and `box.read(path)` reads a file of it.

    Raises:
      InfraError: the machine failed, not the files.
    """
    task = {"kind": "box", "test": test_source}
    return _grade(("agent.py", "wire.py"), artefacts, task, 1, profile, host or shared_host())


def _grade_program(
    source: str, task: dict[str, Any], num_tests: int, profile: Profile, host: SandboxHost
) -> GradeResult:
    files = ("candidate.py", "wire.py", "plain.py")
    return _grade(files, {}, {**task, "source": source}, num_tests, profile, host)


def _grade(
    programs: Sequence[str],
    artefacts: Mapping[str, bytes],
    task: Mapping[str, Any],
    num_tests: int,
    profile: Profile,
    host: SandboxHost,
) -> GradeResult:
    """Start both sandboxes on the two ends of a socket, wait for the verdict of the tests' side, and return the
    result."""
    start = time.monotonic()
    ours, theirs = socket.socketpair()
    out_r, out_w = os.pipe()
    err_r, err_w = os.pipe()
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    handles: list[SandboxHandle] = []
    turn = contextlib.ExitStack()
    try:
        turn.enter_context(host.program())
        private = {name: command_line.inside(name) for name in programs}
        argv = [*command_line.isolated_python(), command_line.inside_path(programs[0])]
        handles.append(host.start(argv, [theirs.fileno(), null, err_w], artefacts, private, profile, profile.wall_s))
        private = {name: command_line.inside(name) for name in ("checker.py", "wire.py", "plain.py")}
        private["task.json"] = json.dumps(task).encode()
        argv = [
            *command_line.isolated_python(),
            command_line.inside_path("checker.py"),
            command_line.inside_path("task.json"),
        ]
        wall_s = profile.wall_s + EXTRA_S
        handles.append(host.start(argv, [ours.fileno(), out_w, err_w], {}, private, profile, wall_s))
        for end in (ours, theirs):
            end.close()
        for fd in (out_w, err_w):
            os.close(fd)
        out_w = err_w = -1
        said = _read_all(out_r)
        handles[1].wait(wall_s + END_S)
    finally:
        for handle in handles:
            handle.kill()
        for handle in handles:
            handle.wait(END_S)
        errors = _read_all(err_r) if err_w < 0 else b""
        for fd in (out_r, out_w, err_r, err_w, null):
            if fd >= 0:
                os.close(fd)
        ours.close()
        theirs.close()
        turn.close()
    ms = (time.monotonic() - start) * 1e3
    return _verdict(handles[0], handles[1], said, errors, num_tests, ms)


def _verdict(
    candidate: SandboxHandle, checker: SandboxHandle, said: bytes, errors: bytes, num_tests: int, ms: float
) -> GradeResult:
    """Combine the report of the tests' side with how both sandboxes ended."""
    for handle in (candidate, checker):
        if not handle.exit:
            raise InfraError("a grading sandbox did not end in time")
        ended_with(handle, errors)
    reason = _out_of(candidate)
    try:
        found = json.loads(said)
        passed, total = int(found["num_passed"]), int(found["num_tests"])
    except (ValueError, KeyError, TypeError):
        # the candidate's answers may push the tests over a limit or crash their interpreter; only the machine kills
        if checker.exit["code"] == SIGKILL_CODE and checker.exit["killed_by"] in ("", "host"):
            raise InfraError(f"the tests were killed: {errors[-500:].decode(errors='replace')}") from None
        reason = reason or _out_of(checker) or "killed"
        return GradeResult(False, 0, num_tests, reason, f"the tests ended with code {checker.exit['code']}", ms)
    right = passed == total > 0 and found["reason"] == "passed"
    return GradeResult(right, passed, total, "passed" if right else reason or found["reason"], found["detail"], ms)


def _out_of(handle: SandboxHandle) -> str:
    """Return the verdict on a sandbox that exceeded a limit; empty for one that did not."""
    if handle.exit["killed_by"] == "wall" or handle.exit["code"] == SIGXCPU_CODE:
        return "timeout"
    return "killed" if handle.exit["killed_by"] == "memory" else ""


def _read_all(fd: int) -> bytes:
    kept = HeadTail(MAX_VERDICT)
    while part := os.read(fd, MAX_VERDICT):
        kept.add(part)
    return kept.value()
