"""Arithmetic that is too long to do in the head, with and without a calculator."""

from __future__ import annotations

import dataclasses
import functools
import random
import re
import sys
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from rolljax.envs.base import Env, EnvSpec, PureEnv, Runs, StepResult
from rolljax.envs.tools.base import ToolError, ToolLimits, ToolResult, Tools
from rolljax.envs.tools.env import ToolEnv
from rolljax.envs.tools.functions import PythonTools
from rolljax.envs.tools.mcp_client import McpTools
from rolljax.errors import ConfigError, EnvError, Range, check_fields
from rolljax.types import Message, Task

MAX_CHARS = 256
MAX_DEPTH = 16


def calc(expression: str) -> str:
    """Work out whole numbers with + - * // and ( )."""
    if len(expression) > MAX_CHARS:
        raise ToolError(f"longer than {MAX_CHARS} characters")
    tokens = re.findall(r"[0-9]+|//|[-+*()]|\S", expression)
    value, position = _sum(tokens, 0, 0)
    if position < len(tokens):
        raise ToolError(f"cannot read {tokens[position]!r}")
    return str(value)


def _sum(tokens: list[str], position: int, depth: int) -> tuple[int, int]:
    """Return the value of the sum that begins at token `position`, and the position after it."""
    value, position = _product(tokens, position, depth)
    while position < len(tokens) and tokens[position] in "+-":
        term, after = _product(tokens, position + 1, depth)
        value, position = (value + term if tokens[position] == "+" else value - term), after
    return value, position


def _product(tokens: list[str], position: int, depth: int) -> tuple[int, int]:
    value, position = _factor(tokens, position, depth)
    while position < len(tokens) and tokens[position] in ("*", "//"):
        term, after = _factor(tokens, position + 1, depth)
        if tokens[position] == "//" and term == 0:
            raise ToolError("division by zero")
        value, position = (value * term if tokens[position] == "*" else value // term), after
    return value, position


def _factor(tokens: list[str], position: int, depth: int) -> tuple[int, int]:
    if position == len(tokens):
        raise ToolError("a number is missing at the end")
    if depth > MAX_DEPTH:
        raise ToolError("nested too deeply")
    if tokens[position] == "-":
        value, position = _factor(tokens, position + 1, depth + 1)
        return -value, position
    if tokens[position] == "(":
        value, position = _sum(tokens, position + 1, depth + 1)
        if position == len(tokens) or tokens[position] != ")":
            raise ToolError("a bracket is not closed")
        return value, position + 1
    if not re.fullmatch("[0-9]+", tokens[position]):
        raise ToolError(f"cannot read {tokens[position]!r}")
    return int(tokens[position]), position + 1


@dataclasses.dataclass(frozen=True)
class Arithmetic(EnvSpec):
    """Questions like `4817*93=`, to be answered in the head. Reward is 1 for the right number."""

    runs = "inline"

    digits: Annotated[int, Range(low=2, high=12)] = 4
    """Maximum number of digits of each number; at least 2."""
    terms: Annotated[int, Range(low=2, high=12)] = 2
    """Numbers in a question."""
    operators: str = "+-*"
    """Operators that may stand between the numbers."""
    seed: int = 0
    """Seed of the tasks."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.operators or set(self.operators) - set("+-*"):
            raise ConfigError("must be of + - *", setting=f"{type(self).__name__}.operators", value=self.operators)

    @property
    def name(self) -> str:
        return "arithmetic"

    def task(self, index: int) -> Task:
        rng = random.Random(f"{self.seed}/{index}")
        question = ""
        for i in range(self.terms):
            digits = rng.randint(2, self.digits)
            question += (rng.choice(self.operators) if i else "") + str(rng.randrange(10 ** (digits - 1), 10**digits))
        return Task(self.name, index, question)

    def reference(self, task: Task) -> str | None:
        return calc(task.content)

    def make(self) -> Env:
        return ArithmeticEnv()


class ArithmeticEnv(PureEnv):
    """One question, one answer."""

    def __init__(self) -> None:
        self._question = ""

    def reset(self, task: Task) -> tuple[Message, ...]:
        self._question = task.content
        return (Message("user", f"{task.content}="),)

    def step(self, action: str) -> StepResult:
        if not self._question:
            raise EnvError("step before reset, or after the episode's end")
        right = action.strip() == self.reference_answer()
        self._question = ""
        return StepResult((), float(right), terminated=True, success=right)

    def reference_answer(self) -> str:
        return calc(self._question)

    def reference_call(self, results: Sequence[ToolResult]) -> tuple[str, dict[str, Any]] | None:
        """Return one call of the calculator, or None once there is a result."""
        return None if results else ("calc", {"expression": self._question})


@dataclasses.dataclass(frozen=True)
class CalculatorTask(EnvSpec):
    """`Arithmetic` with a calculator: `calc(4817*93)` is a call, its result follows, and the next answer counts.

    A model too small for arithmetic has only to learn to call it, and to copy. The prompt does not mention the tool.
    """

    digits: int = 4
    """Maximum number of digits of each number; at least 2."""
    terms: int = 2
    """Numbers in a question."""
    operators: str = "+-*"
    """Operators that may stand between the numbers."""
    via: Literal["python", "mcp", "mcp-stdio"] = "python"
    """Location of the calculator: a `python` function, an `mcp` server in this process, or an MCP server in its own
    process (`mcp-stdio`)."""
    seed: int = 0
    """Seed of the tasks."""

    def __post_init__(self) -> None:
        if self.via not in VIA:
            raise ConfigError(
                "is no place for a calculator",
                setting="CalculatorTask.via",
                value=self.via,
                remedy=f"one of {', '.join(VIA)}",
            )
        _ = self._env

    @functools.cached_property
    def _env(self) -> ToolEnv:
        questions = Arithmetic(self.digits, self.terms, self.operators, self.seed)
        limits = ToolLimits(calls_per_turn=1, calls_per_episode=1)
        return ToolEnv(questions, _tools(self.via), parser="compact", style="none", limits=limits, last_note="")

    @property
    def runs(self) -> Runs:  # type: ignore[override]  # it depends on the settings
        return "inline" if self.via == "python" else self._env.runs

    @property
    def name(self) -> str:
        return "calculator"

    @property
    def max_turns(self) -> int:
        return self._env.max_turns

    def task(self, index: int) -> Task:
        return dataclasses.replace(self._env.task(index), env=self.name)

    def reference(self, task: Task) -> str | None:
        return self._env.reference(task)

    def make(self) -> Env:
        return self._env.make()

    def bad_actions(self) -> Sequence[str]:
        return (*super().bad_actions(), "calc(1)", "calc(", "calc(9**9**9)")


VIA = ("python", "mcp", "mcp-stdio")


def _tools(via: str) -> Tools:
    if via == "python":
        return TOOLS
    if via == "mcp":
        return McpTools(server="rolljax.envs.tools.calculator_server.server")
    return McpTools(command=(sys.executable, "-m", "rolljax.envs.tools.calculator_server"), where="process")


TOOLS = PythonTools((calc,))
"""The calculator as a function of this process."""
