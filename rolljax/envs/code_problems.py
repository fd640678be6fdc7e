"""Coding problems: the policy answers with a program, which runs against checks in a sandbox.

A file has a JSON object on each line (plain or gzip), in one of two formats:

    humaneval: task_id, prompt (a function's head), entry_point, canonical_solution, test (defines check(candidate))
    mbpp:      text or prompt, code, test_list (one assert each), and if needed test_setup_code or test_imports, and
               entry_point (the function that is asked for, where the tests use several of code)
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import functools
import re
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from rolljax.envs.base import Env, EnvSpec, StepResult
from rolljax.envs.data.rows import BadRow, Row, find_files, open_rows
from rolljax.envs.run_limits import RUN_S, AdaptiveTimeout, RunLimits
from rolljax.envs.text import after_thinking, code_blocks
from rolljax.errors import ConfigError, DataError, EnvError, Range, check_fields
from rolljax.types import Message, Task

if TYPE_CHECKING:
    from rolljax.sandbox import GradeResult

MAX_ANSWER_CHARS = 65_536


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """One problem of either format."""

    id: str
    question: str
    """The prompt for the policy."""
    head: str
    """Head of the function to write (HumanEval); empty for MBPP."""
    entry_point: str
    tests: tuple[str, ...]
    """One program that defines `check` (HumanEval), or asserts (MBPP)."""
    setup: str
    """Code that runs before the asserts."""
    reference_answer: str
    """A correct program."""


@dataclasses.dataclass(frozen=True)
class CodeProblems(EnvSpec):
    """Problems of a file in the format of HumanEval or of MBPP. Reward is 1 if every check passes.

    The answer may be code or text with a code block; for HumanEval the whole function or what follows its head.
    A program that crashes, hangs or passes a limit gets 0. A sandbox that fails is an `InfraError`, and no reward.
    """

    path: str = ""
    """Path of the file of problems."""
    format: Literal["auto", "humaneval", "mbpp"] = "auto"
    """Format of the file's lines; auto: detected from their keys."""
    timeout_s: Annotated[float, Range(above=0)] = 5.0
    """Longest time in seconds that a program may run."""
    adaptive_timeout: AdaptiveTimeout | None = None
    """Shorter time-out during training for programs whose problem has fast correct answers (None: not used). With it,
    equal actions do not always give equal episodes."""
    tests_shown: Annotated[int, Range(low=0)] = 1
    """Asserts of an MBPP problem that the prompt shows (they contain the name of the function)."""
    sandbox: Literal["bwrap", "none"] = "bwrap"
    """`bwrap`, or `none` to run programs without any isolation: only for answers that you trust."""

    runs = "thread"

    def __post_init__(self) -> None:
        if not self.path or len(find_files(self.path, "CodeProblems.path")) != 1:
            raise ConfigError(
                "is not a file",
                setting="CodeProblems.path",
                value=self.path,
                remedy="name a local file with a problem on each line, or one that comes with rolljax",
            )
        choices = {"format": ("auto", "humaneval", "mbpp"), "sandbox": ("bwrap", "none")}
        for field, values in choices.items():
            if getattr(self, field) not in values:
                raise ConfigError(
                    "is not known",
                    setting=f"CodeProblems.{field}",
                    value=getattr(self, field),
                    remedy=f"one of {', '.join(values)}",
                )
        check_fields(self)
        if self.adaptive_timeout and self.adaptive_timeout.low_s >= self.timeout_s:
            raise ConfigError(
                f"can have no effect: no program runs longer than CodeProblems.timeout_s = {self.timeout_s:g}",
                setting="AdaptiveTimeout.low_s",
                value=self.adaptive_timeout.low_s,
                remedy="raise timeout_s (30 in RollPacker), or lower it",
            )

    @property
    def name(self) -> str:
        return "code"

    def problems(self) -> tuple[Problem, ...]:
        """Return all problems of the file.

        Raises:
          DataError: a line is no problem; the message names it and the missing field.
        """
        (path,) = find_files(self.path, "CodeProblems.path")
        stat = path.stat()
        return _problems(str(path), self.format, self.tests_shown, stat.st_mtime_ns, stat.st_size)

    @property
    def num_tasks(self) -> int | None:
        return len(self.problems())

    def task(self, index: int) -> Task:
        problems = self.problems()
        return Task(self.name, index, problems[index % len(problems)].question)

    def make(self) -> Env:
        return CodeEnv(self)

    def run_limits(self) -> RunLimits | None:
        return RunLimits(self.adaptive_timeout, self.timeout_s) if self.adaptive_timeout else None

    def bad_actions(self) -> tuple[str, ...]:
        exits = "```python\nimport os, sys\nos._exit(0)\n```"
        equal = "```python\nclass E:\n    def __eq__(self, other):\n        return True\n```"
        return ("", "\x00", "nonsense " * 50, exits, equal, "(" * 10_000)


class CodeEnv(Env):
    """One problem, one answer."""

    def __init__(self, spec: CodeProblems) -> None:
        self._spec = spec
        self._problem: Problem | None = None

    def reset(self, task: Task) -> tuple[Message, ...]:
        from rolljax.sandbox import shared_host

        self._host = shared_host(self._spec.sandbox)  # ConfigError where nothing can be isolated
        problems = self._spec.problems()
        self._problem = problems[task.index % len(problems)]
        if self._problem.question != task.content:
            raise EnvError(f"task {task.index} is another problem here: {self._spec.path} has changed")
        return (Message("user", self._problem.question),)

    def step(self, action: str) -> StepResult:
        if self._problem is None:
            raise EnvError("step before reset, or after the episode's end")
        problem, self._problem = self._problem, None
        verdict = self._judge(problem, action)
        metrics = {
            "tests_passed_frac": verdict.num_passed / max(1, verdict.num_tests),
            "timeouts_n": float(verdict.reason == "timeout"),
            "no_code_n": float(verdict.reason == "no code"),
        }
        if self.run_limit_s is not None:
            cut = verdict.reason == "timeout" and self.run_limit_s < self._spec.timeout_s
            metrics |= {RUN_S: verdict.ms / 1e3, "early_timeouts_n": float(cut)}
        reward = float(verdict.passed)
        parts = {"tests": reward}
        return StepResult((), reward, terminated=True, success=verdict.passed, reward_parts=parts, metrics=metrics)

    def reference_answer(self) -> str:
        if self._problem is None:
            raise EnvError("reference_answer before reset, or after the episode's end")
        return f"```python\n{self._problem.reference_answer.rstrip()}\n```"

    def _judge(self, problem: Problem, action: str) -> GradeResult:
        from rolljax.sandbox import SCORE, GradeResult, grade_mbpp, grade_python

        program = program_of(action, problem)
        if program is None:
            return GradeResult(False, 0, len(problem.tests), "no code")
        limit_s = self.run_limit_s or self._spec.timeout_s
        limits = dataclasses.replace(SCORE, wall_s=limit_s, cpu_s=int(limit_s) + 1)
        if problem.head:
            return grade_python(
                program,
                problem.entry_point,
                problem.tests[0],
                prompt=problem.head,
                profile=limits,
                host=self._host,
            )
        return grade_mbpp(
            program, problem.entry_point, problem.tests, setup=problem.setup, profile=limits, host=self._host
        )


def program_of(answer: str, problem: Problem) -> str | None:
    """Return the complete program in an answer; None if there is none.

    If there are several code blocks, take the first that defines the requested function, else the first.
    """
    text = after_thinking(answer)
    if len(text) > MAX_ANSWER_CHARS or "\0" in text or not text.strip() or not _is_text(text):
        return None
    # after `^` match only blanks that do not end a line, so that a run of empty lines is scanned once
    head = rf"(?:async[ \t]+)?def[ \t]+{re.escape(problem.entry_point)}\b"
    defines = re.compile(rf"^[ \t]*{head}", re.MULTILINE)
    code = text
    if "```" in text:
        blocks = [body for _, body in code_blocks(text)] or [text.replace("```", "")]
        code = next((b for b in blocks if defines.search(b)), blocks[0])
    if not problem.head:
        return code
    if defines.search(code):
        start = re.search(f"^{head}", problem.head, re.MULTILINE)
        return f"{problem.head[: start.start()] if start else ''}\n{textwrap.dedent(code)}"
    return problem.head.rstrip("\n") + "\n" + _indented(code)


def _indented(body: str) -> str:
    """Return the body of a function, indented again if its answer lost the leading spaces."""
    lines = body.strip("\n").split("\n")
    if lines[0][:1].isspace():
        return "\n".join(lines)
    if len(lines) > 1 and all(not line.strip() or line[0].isspace() for line in lines[1:]):
        return "\n".join(["    " + lines[0], *lines[1:]])
    return textwrap.indent("\n".join(lines), "    ")


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


# ---- files ----------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=8)
def _problems(path: str, kind: str, tests_shown: int, *_changed: int) -> tuple[Problem, ...]:
    rows, problems = open_rows([Path(path)]), []
    for i in range(len(rows)):
        try:
            problems.append(_problem(rows.row(i), kind, tests_shown))
        except (BadRow, ValueError, RecursionError) as e:
            raise DataError(f"{rows.location(i)}: {e}") from None
    return tuple(problems)


def _problem(record: Row, kind: str, tests_shown: int) -> Problem:
    if kind == "auto":
        kind = "mbpp" if "test_list" in record else "humaneval"
    return _humaneval(record) if kind == "humaneval" else _mbpp(record, tests_shown)


def _humaneval(record: dict[str, Any]) -> Problem:
    head, entry = _string(record, "prompt"), _string(record, "entry_point")
    order = "Complete this function. Answer with the whole function in a ```python block."
    question = f"{order}\n\n```python\n{head.rstrip()}\n```"
    reference = head + _string(record, "canonical_solution")
    _parses(reference, "prompt and canonical_solution")
    _parses(_string(record, "test"), "test")
    return Problem(str(record.get("task_id", "")), question, head, entry, (record["test"],), "", reference)


def _mbpp(record: dict[str, Any], tests_shown: int) -> Problem:
    text = _string(record, "text" if "text" in record else "prompt").strip()
    tests = record.get("test_list")
    if not isinstance(tests, list) or not tests or not all(isinstance(t, str) for t in tests):
        raise ValueError("test_list is not a list of asserts")
    reference = _string(record, "code").replace("\r\n", "\n")
    imports = record.get("test_imports") or []
    setup = "\n".join([*imports, record.get("test_setup_code") or ""]).strip()
    for key, source in (("code", reference), ("test_list", "\n".join(tests)), ("test_setup_code", setup)):
        _parses(source, key)
    entry = record.get("entry_point") or _tested(tests, setup, reference)
    shown = "\n".join(tests[:tests_shown])
    question = f"{text}\nAnswer with Python code in a ```python block."
    if shown:
        question += f" It must pass this test:\n\n```python\n{shown}\n```"
    return Problem(str(record.get("task_id", "")), question, "", entry, tuple(tests), setup, reference)


def _tested(tests: list[str], setup: str, reference: str) -> str:
    """Return the function under test: the tests use it, the solution defines it and the setup does not; else the only
    class.

    Raises:
      ValueError: there is none, or more than one, so that one could judge another's answers.
    """
    trees = [ast.parse(source) for source in (*tests, setup)]
    used = {n.id for tree in trees for n in ast.walk(tree) if isinstance(n, ast.Name)} - _defined(trees[-1])
    classes = {n.name for n in ast.parse(reference).body if isinstance(n, ast.ClassDef)} & used
    found = (_defined(ast.parse(reference)) & used) - classes or classes
    found = {name for name in found if not hasattr(builtins, name)} or found
    if len(found) == 1:
        return found.pop()
    if not found:
        raise ValueError("test_list uses no function that code defines")
    raise ValueError(
        f"test_list uses {', '.join(sorted(found))} of code: name the function that is asked for as entry_point, and "
        "put everything else that the tests need into test_setup_code"
    )


def _defined(program: ast.Module) -> set[str]:
    """Return the functions, classes and variables that a program defines at its top level."""
    named = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    blocks = [node for node in program.body if not isinstance(node, named)]
    stored = (n.id for b in blocks for n in ast.walk(b) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
    return {node.name for node in program.body if isinstance(node, named)} | set(stored)


def _string(record: dict[str, Any], key: str) -> str:
    value = record.get(key)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"has no {key!r}")
    return value


def _parses(source: str, key: str) -> None:
    try:
        ast.parse(source)
    except SyntaxError as e:
        raise ValueError(f"{key} is not Python: {e.msg} (its line {e.lineno})") from None
