"""Interfaces of tools, in the form of the Model Context Protocol: a name, a JSON schema of its arguments, a text as
result.

`Tools` are settings (frozen, hashable, picklable). `Tools.open()` gives the `ToolSet` of one episode, which is called
from worker threads. A mistake of the policy and a failure inside a tool are results with an error text, never
exceptions; only a dead server or sandbox raises an `InfraError`.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from rolljax.envs.text import MAX_DEPTH
from rolljax.envs.tools.schema import problem_of
from rolljax.errors import ConfigError, InfraError, Range, check_fields

Kind = Literal["ok", "unknown_tool", "bad_arguments", "exception", "timeout", "limit", "unparsed"]


class ToolError(Exception):
    """An error of a tool, whose text is the tool's answer."""


@dataclasses.dataclass(frozen=True)
class ToolLimits:
    """Limits of tool calls."""

    calls_per_turn: Annotated[int, Range(low=1)] = 4
    """Maximum number of tool calls in one turn; further calls are not run."""
    calls_per_episode: Annotated[int, Range(low=1)] = 5
    """Maximum number of tool calls in one episode; further calls are not run."""
    shown_bytes: Annotated[int, Range(low=64)] = 16 * 1024
    """Maximum number of bytes of a result that the policy sees; the middle of a longer result is left out."""
    kept_bytes: int = 1024 * 1024
    """Maximum number of bytes of a result that are recorded."""
    call_s: Annotated[float, Range(above=0)] = 5.0
    """Longest time in seconds that one call may take; all calls of an answer must fit into `PoolConfig.step_s`."""
    concurrency: Annotated[int, Range(low=1)] = 64
    """Maximum number of concurrent calls to one server, in this process."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.kept_bytes < self.shown_bytes:
            raise ConfigError(
                "is less than the limit of a result for the policy",
                setting="ToolLimits.kept_bytes",
                value=self.kept_bytes,
                remedy=f"at least ToolLimits.shown_bytes, {self.shown_bytes}",
            )


DEFAULT_LIMITS = ToolLimits()


@dataclasses.dataclass(frozen=True)
class ToolSpec:
    """The description of a tool for the policy."""

    name: str
    description: str = ""
    input_schema: Mapping[str, Any] = dataclasses.field(default_factory=lambda: {"type": "object", "properties": {}})
    """JSON schema of the object of its arguments."""
    annotations: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Hints of MCP (`readOnlyHint`); rolljax does not rely on them."""

    @property
    def parameters(self) -> Mapping[str, Mapping[str, Any]]:
        """Schema of each argument, in order."""
        return self.input_schema.get("properties") or {}

    @property
    def text_parameter(self) -> str | None:
        """The argument that receives a call's bare text: the only required argument, or the only one if none is
        required; None if there is no such argument or it is not a string."""
        required = list(self.input_schema.get("required") or ())
        names = required if len(required) == 1 else list(self.parameters) if not required else []
        if len(names) == 1 and self.parameters.get(names[0], {}).get("type") == "string":
            return names[0]
        return None


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """A call that a policy wrote."""

    name: str
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    problem: str = ""
    """Reason why the call could not be parsed; there are then no arguments."""


@dataclasses.dataclass(frozen=True)
class ToolResult:
    """The result of a tool call."""

    text: str
    """Text of the result, at most `ToolLimits.kept_bytes` of it."""
    structured: Any = None
    """The result as a JSON value, if the tool returned one."""
    is_error: bool = False
    kind: Kind = "ok"
    """`ok`, or the kind of failure."""
    ms: float = 0.0
    """Duration of the call in milliseconds."""
    bytes: int = 0
    """Size of the whole text in bytes."""
    truncated: bool = False
    """Whether `text` is shorter than the whole result."""

    @staticmethod
    def error(kind: Kind, text: str) -> ToolResult:
        return ToolResult(text, is_error=True, kind=kind)

    def told(self, limits: ToolLimits = DEFAULT_LIMITS) -> str:
        """Return the text for the policy: the start and the end of the text, if all of it is too long."""
        return clip(self.text, limits.shown_bytes)[0]


class ToolSet(abc.ABC):
    """The tools of one episode."""

    stateful: bool = False
    """Whether a call changes something that the environment's own snapshot does not hold."""

    @abc.abstractmethod
    def list(self) -> tuple[ToolSpec, ...]:
        """Return the tools, always in the same order."""

    def call(self, name: str, arguments: Mapping[str, Any], limits: ToolLimits = DEFAULT_LIMITS) -> ToolResult:
        """Run a tool.

        Raises:
          InfraError: its server or sandbox is dead.
        """
        start = time.perf_counter()
        result = self._answer(name, arguments, limits)
        text, size = clip(result.text, limits.kept_bytes)
        structured = result.structured if size <= limits.kept_bytes else None
        ms = (time.perf_counter() - start) * 1000
        return dataclasses.replace(
            result, text=text, structured=structured, ms=ms, bytes=size, truncated=size > limits.kept_bytes
        )

    def _answer(self, name: str, arguments: Mapping[str, Any], limits: ToolLimits) -> ToolResult:
        specs = {spec.name: spec for spec in self.list()}
        if name not in specs:
            return ToolResult.error("unknown_tool", f"unknown tool {name[:80]!r}; tools: {', '.join(specs)}")
        try:
            arguments = plain(arguments)
        except ValueError as e:
            return ToolResult.error("bad_arguments", f"{name}: {e}")
        if problem := self.problem(specs[name], arguments):
            return ToolResult.error("bad_arguments", f"{name}: {problem}")
        try:
            return self.run(specs[name], arguments, limits)
        except InfraError:
            raise
        except ToolError as e:
            return ToolResult.error("exception", str(e) or name + " failed")
        except Exception as e:  # border: an exception of a tool is an answer to the policy
            return ToolResult.error("exception", f"{type(e).__name__}: {e}")

    def problem(self, spec: ToolSpec, arguments: Mapping[str, Any]) -> str:
        """Describe what is wrong with the arguments; empty if nothing is. Servers that check for themselves do so
        instead."""
        return problem_of(spec.input_schema, arguments)

    @abc.abstractmethod
    def run(self, spec: ToolSpec, arguments: Mapping[str, Any], limits: ToolLimits) -> ToolResult:
        """Run the call. It may raise any exception."""

    def close(self) -> None:  # noqa: B027  # most sets hold nothing
        """Free the episode's resources."""


class Tools(abc.ABC):
    """Settings of tools; subclasses are frozen dataclasses.

    waits: whether calls wait for something outside this process.
    """

    @property
    @abc.abstractmethod
    def waits(self) -> bool: ...

    @abc.abstractmethod
    def open(self) -> ToolSet:
        """Open the tools for one episode.

        Raises:
          InfraError: their server or sandbox does not start.
        """


@dataclasses.dataclass(frozen=True)
class JoinedTools(Tools):
    """Several kinds of tools in one episode. No two tools may have the same name."""

    parts: tuple[Tools, ...]
    """The kinds of tools."""

    @property
    def waits(self) -> bool:
        return any(part.waits for part in self.parts)

    def open(self) -> ToolSet:
        opened: list[ToolSet] = []
        with contextlib.ExitStack() as on_failure:
            for part in self.parts:
                opened.append(part.open())
                on_failure.callback(opened[-1].close)
            joined = JoinedToolSet(opened)
            on_failure.pop_all()
        return joined


class JoinedToolSet(ToolSet):
    """Several tool sets as one."""

    def __init__(self, parts: Sequence[ToolSet]) -> None:
        self.stateful = any(part.stateful for part in parts)
        self._parts = tuple(parts)
        self._of: dict[str, ToolSet] = {}
        for part in parts:
            for spec in part.list():
                if spec.name in self._of:
                    raise ConfigError("two tools have this name", setting="JoinedTools.parts", value=spec.name)
                self._of[spec.name] = part

    def list(self) -> tuple[ToolSpec, ...]:
        return tuple(spec for part in self._parts for spec in part.list())

    def problem(self, spec: ToolSpec, arguments: Mapping[str, Any]) -> str:
        return self._of[spec.name].problem(spec, arguments)

    def run(self, spec: ToolSpec, arguments: Mapping[str, Any], limits: ToolLimits) -> ToolResult:
        return self._of[spec.name].run(spec, arguments, limits)

    def close(self) -> None:
        for part in self._parts:
            part.close()


def plain(value: Any, depth: int = 0) -> Any:
    """Return a JSON value that every encoder accepts: halves of surrogate pairs become question marks.

    Raises:
      ValueError: the value is nested too deeply, or contains a number that is not finite.
    """
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("a number is too large")
    if isinstance(value, (Mapping, list)):
        if depth == MAX_DEPTH:
            raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
        if isinstance(value, list):
            return [plain(v, depth + 1) for v in value]
        return {plain(k): plain(v, depth + 1) for k, v in value.items()}
    return value


def clip(text: str, max_bytes: int) -> tuple[str, int]:
    """Shorten the text to at most `max_bytes` bytes of UTF-8; return it with its original size in bytes.

    A longer text keeps its start and its end, with a line between them that says how much is missing. Halves of
    surrogate pairs, which no tokenizer can encode, become question marks.
    """
    if len(text) <= max_bytes and text.isascii():
        return text, len(text)
    data = text.encode("utf-8", "replace")
    if len(data) <= max_bytes:
        return data.decode("utf-8"), len(data)
    note = f"\n[... {len(data)} bytes, the middle is left out ...]\n"
    room = max(0, max_bytes - len(note))
    head, tail = data[: room - room // 2], data[len(data) - room // 2 :]
    return head.decode("utf-8", "ignore") + note + tail.decode("utf-8", "ignore"), len(data)
