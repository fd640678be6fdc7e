"""Python functions as tools."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import importlib
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rolljax.envs.tools.base import DEFAULT_LIMITS, ToolLimits, ToolResult, Tools, ToolSet, ToolSpec
from rolljax.envs.tools.schema import schema_of
from rolljax.errors import ConfigError, InfraError


@dataclasses.dataclass(frozen=True)
class PythonTools(Tools):
    """Functions of this process: their names, arguments and purpose are read from signature, type hints and docstring.

    A function returns a text, or a JSON value. The policy gets its exception as `Type: text`, and a `ToolError`
    as its text alone.
    """

    functions: tuple[Callable[..., Any] | str, ...]
    """Functions, or their import paths (`module.function`)."""
    waits: bool = False
    """Whether the functions wait on something outside (a database, a web service); each call then has its own thread
    and must end within `ToolLimits.call_s`. Functions that do not wait are run where they are called, and must end by
    themselves."""

    def __post_init__(self) -> None:
        _described(self.functions)

    def open(self) -> ToolSet:
        return FunctionToolSet(self.functions, waits=self.waits)


class FunctionToolSet(ToolSet):
    """Functions or bound methods as the tools of one episode. Any state that they change belongs to the environment."""

    def __init__(self, functions: Sequence[Callable[..., Any] | str], *, waits: bool = False) -> None:
        self._functions = _described(tuple(functions))
        self._waits = waits

    def list(self) -> tuple[ToolSpec, ...]:
        return tuple(spec for spec, _ in self._functions.values())

    def run(self, spec: ToolSpec, arguments: Mapping[str, Any], limits: ToolLimits = DEFAULT_LIMITS) -> ToolResult:
        function = functools.partial(self._functions[spec.name][1], **arguments)
        if not self._waits:
            return _result(function())
        done, _ = concurrent.futures.wait([future := _start(function, spec.name, limits)], limits.call_s)
        if not done:
            return ToolResult.error("timeout", f"{spec.name} gave no result within {limits.call_s:g} s")
        return _result(future.result())


_running: dict[str, int] = {}
_ended = threading.Condition()


def _start(function: Callable[[], Any], name: str, limits: ToolLimits) -> concurrent.futures.Future[Any]:
    """Run in a separate thread. A call that never returns keeps its thread."""
    with _ended:
        if not _ended.wait_for(lambda: _running.get(name, 0) < limits.concurrency, limits.call_s):
            raise InfraError(f"{limits.concurrency} calls of {name} are running, and none ended in {limits.call_s:g} s")
        _running[name] = _running.get(name, 0) + 1
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def work() -> None:
        try:
            result, error = function(), None
        except BaseException as e:  # border: raised again in the waiting thread
            result, error = None, e
        with _ended:
            _running[name] -= 1
            _ended.notify_all()
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    threading.Thread(target=work, name=f"rolljax-tool-{name}", daemon=True).start()
    return future


@functools.lru_cache(maxsize=256)
def _function_of(function: Callable[..., Any] | str) -> tuple[ToolSpec, Callable[..., Any]]:
    return _describe(function)


def _describe(function: Callable[..., Any] | str) -> tuple[ToolSpec, Callable[..., Any]]:
    if isinstance(function, str):
        module, _, name = function.rpartition(".")
        try:
            function = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError, ValueError) as e:
            raise ConfigError(f"cannot be imported: {e}", setting="PythonTools.functions", value=function) from e
    if not callable(function):
        raise ConfigError("is not a function", setting="PythonTools.functions", value=function)
    description, schema = schema_of(function)
    return ToolSpec(function.__name__, description, schema), function


def _described(functions: tuple[Callable[..., Any] | str, ...]) -> dict[str, tuple[ToolSpec, Callable[..., Any]]]:
    """Return specs and functions by name. Bound methods hold their episode and are not cached."""
    found = {}
    for function in functions:
        spec, called = _describe(function) if hasattr(function, "__self__") else _function_of(function)
        if spec.name in found:
            raise ConfigError("two functions have this name", setting="PythonTools.functions", value=spec.name)
        found[spec.name] = (spec, called)
    return found


def _result(value: Any) -> ToolResult:
    if isinstance(value, ToolResult):
        return value
    if isinstance(value, str):
        return ToolResult(value)
    try:
        return ToolResult(json.dumps(value, ensure_ascii=False), structured=value)
    except TypeError:
        return ToolResult(json.dumps(value, ensure_ascii=False, default=str))
