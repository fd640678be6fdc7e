"""Programs as answers: run in the sandbox against the tests of their task."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from rolljax.envs.base import EnvSpec, Runs
from rolljax.envs.code_problems import CodeProblems, Problem, program_of
from rolljax.envs.pool import PoolConfig
from rolljax.errors import Checked, ConfigError, Range
from rolljax.rewards.base import Reward, RewardContext
from rolljax.rewards.rules import row
from rolljax.rewards.workers import Rule, Said
from rolljax.types import Task


@dataclasses.dataclass(frozen=True)
class Code(Checked, Rule):
    """The share of its task's tests that the program in the last answer passes; passing all of them solves the task.

    The program runs in one sandbox and the tests in another (docs/sandbox.md); a program that crashes, hangs or passes
    a limit fails them. A sandbox failure is an infrastructure fault and gives no reward.
    """

    runs: ClassVar[Runs] = "thread"

    pay: Literal["share", "all"] = "share"
    """`share`: of the tests; `all`: 1 where every one passed, else 0."""
    timeout_s: Annotated[float, Range(above=0)] = 5.0
    """Longest run of a program."""
    tests_key: str = "test_list"
    """Name of the dataset column with the tests, a list of asserts. No effect for tasks of envs.programs.code_problems,
    which have tests."""
    entry_key: str = "entry_point"
    """Name of the dataset column with the name of the function that the tests call. No effect for tasks of
    envs.programs.code_problems, which have tests."""
    setup_key: str = "test_setup_code"
    """Name of the dataset column with the code that runs before the tests. No effect for tasks of
    envs.programs.code_problems, which have tests."""
    sandbox: Literal["bwrap", "none"] = "bwrap"
    """`bwrap`, or `none` to run programs without any isolation: only for answers that you trust."""

    @property
    def name(self) -> str:
        return "tests"

    @property
    def pool(self) -> PoolConfig:
        return PoolConfig(where="thread", step_s=self.timeout_s + 30)

    def check(self, around: RewardContext) -> None:
        self._problem(around.env, around.env.task(0))

    def reward(self, env: EnvSpec, task: Task, said: Said) -> Reward:
        from rolljax.sandbox import SCORE, grade_mbpp, grade_python, shared_host

        problem = self._problem(env, task)
        program = program_of(said.text, problem)
        if program is None:
            return Reward(0.0, {"no_code": 1.0}, False)
        host = shared_host(self.sandbox)
        limits = dataclasses.replace(SCORE, wall_s=self.timeout_s, cpu_s=int(self.timeout_s) + 1)
        how: dict[str, Any] = {"profile": limits, "host": host}
        entry, tests = problem.entry_point, problem.tests
        if problem.head:
            verdict = grade_python(program, entry, tests[0], prompt=problem.head, **how)
        else:
            verdict = grade_mbpp(program, entry, tests, setup=problem.setup, **how)
        share = verdict.num_passed / max(1, verdict.num_tests)
        parts = {"no_code": 0.0, "timeout": float(verdict.reason == "timeout")}
        return Reward(share if self.pay == "share" else float(verdict.passed), parts, verdict.passed)

    def _problem(self, env: EnvSpec, task: Task) -> Problem:
        if isinstance(env, CodeProblems):
            problems = env.problems()
            return problems[task.index % len(problems)]
        columns: Mapping[str, Any] = row(env, task, "Code.tests_key")
        tests, entry = columns.get(self.tests_key), columns.get(self.entry_key)
        if not isinstance(tests, list | tuple) or not tests or not all(isinstance(t, str) for t in tests):
            raise ConfigError(
                f"names no list of asserts in the row of task {task.index}",
                setting="Code.tests_key",
                value=self.tests_key,
                remedy='a column like ["assert double(2) == 4"]',
            )
        if not isinstance(entry, str) or not entry.isidentifier():
            raise ConfigError(
                f"names no function in the row of task {task.index}", setting="Code.entry_key", value=self.entry_key
            )
        setup = columns.get(self.setup_key)
        return Problem("", task.content, "", entry, tuple(tests), setup if isinstance(setup, str) else "", "")
