"""A sandbox as tools: `bash`, `python`, `read_file` and `write_file` over one session per episode."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

from rolljax.envs.tools.base import ToolError, ToolLimits, ToolResult, Tools, ToolSet, ToolSpec
from rolljax.envs.tools.schema import schema_of
from rolljax.errors import ConfigError, EnvError, boundary

if TYPE_CHECKING:
    from rolljax.sandbox import Sandbox

VERBS = ("bash", "python", "read_file", "write_file")


@dataclasses.dataclass(frozen=True)
class SandboxTools(Tools):
    """A policy's tools in its own sandbox: no network, no files of this machine, limits on everything."""

    verbs: tuple[str, ...] = VERBS
    """Tools that the policy gets, out of `bash`, `python`, `read_file` and `write_file`."""
    profile: str = "TERMINAL"
    """Name of a profile of `rolljax.sandbox` (`CODE`, `TERMINAL`), or the import path of one."""
    files: tuple[tuple[str, str], ...] = ()
    """Contents of the work folder at the start, as (path, text)."""

    def __post_init__(self) -> None:
        unknown = [v for v in self.verbs if v not in VERBS]
        if unknown or not self.verbs:
            raise ConfigError(
                "are not all verbs of a sandbox",
                setting="SandboxTools.verbs",
                value=self.verbs,
                remedy=f"some of {', '.join(VERBS)}",
            )

    @property
    def waits(self) -> bool:
        return True

    def open(self) -> ToolSet:
        from rolljax.sandbox import Sandbox

        module, _, name = self.profile.rpartition(".")
        with boundary(ConfigError, f"SandboxTools.profile {self.profile!r}"):
            profile = getattr(importlib.import_module(module or "rolljax.sandbox"), name)
        files = {path: text.encode() for path, text in self.files}
        return SandboxToolSet(Sandbox.open(profile, files=files), self.verbs)


class SandboxToolSet(ToolSet):
    """The verbs over one live sandbox, which ends with the episode."""

    stateful = True

    def __init__(self, box: Sandbox, verbs: tuple[str, ...] = VERBS) -> None:
        self._box = box
        self._specs = tuple(ToolSpec(verb, *_DESCRIBED[verb]) for verb in verbs)

    def list(self) -> tuple[ToolSpec, ...]:
        return self._specs

    def run(self, spec: ToolSpec, arguments: Mapping[str, Any], limits: ToolLimits) -> ToolResult:
        return _RUN[spec.name](self._box, limits, **arguments)

    def close(self) -> None:
        self._box.close()


def bash(command: str) -> None:
    """Run a command in a bash shell that keeps its folder and variables."""


def python(code: str) -> None:
    """Run a Python program."""


def read_file(path: str) -> None:
    """Read a text file."""


def write_file(path: str, text: Annotated[str, "all of the file"]) -> None:
    """Write a text file, in place of what was there."""


_DESCRIBED = {f.__name__: schema_of(f) for f in (bash, python, read_file, write_file)}


def _bash(box: Sandbox, limits: ToolLimits, command: str) -> ToolResult:
    done = box.run(command, timeout_s=limits.call_s)
    if done.killed_by:
        return ToolResult.error("limit", f"{done.output}\n[the sandbox is gone: {done.killed_by}]")
    if done.timed_out:
        return ToolResult.error("timeout", f"{done.output}\n[stopped after {limits.call_s:g} s]")
    notes = [f"[exit code {done.returncode}]"] if done.returncode else []
    notes += ["[the shell was lost; this is a new one]"] if done.restarted else []
    return _ended("\n".join([done.output.rstrip("\n"), *notes] if notes else [done.output]), bool(done.returncode))


def _python(box: Sandbox, limits: ToolLimits, code: str) -> ToolResult:
    done = box.execute(["/usr/bin/python3", "-"], stdin=code.encode("utf-8", "replace"), timeout_s=limits.call_s)
    output = (done.stdout + done.stderr).decode("utf-8", "replace")
    if done.timed_out:
        return ToolResult.error("timeout", f"{output}\n[stopped after {limits.call_s:g} s]")
    if done.killed_by:
        return ToolResult.error("limit", f"{output}\n[killed: {done.killed_by}]")
    return _ended(output if not done.returncode else f"{output}\n[exit code {done.returncode}]", bool(done.returncode))


def _ended(text: str, failed: bool) -> ToolResult:
    return ToolResult(text, is_error=failed, kind="exception" if failed else "ok")


def _read_file(box: Sandbox, limits: ToolLimits, path: str) -> ToolResult:
    try:
        return ToolResult(box.get(path, limits.kept_bytes).decode("utf-8", "replace"))
    except EnvError as e:
        return _failed(box, e)


def _write_file(box: Sandbox, limits: ToolLimits, path: str, text: str) -> ToolResult:
    try:
        box.put(path, text.encode("utf-8", "replace"))
    except EnvError as e:
        return _failed(box, e)
    return ToolResult(f"wrote {len(text)} characters")


def _failed(box: Sandbox, error: EnvError) -> ToolResult:
    """Raise a `ToolError`, which the policy sees, for a file that cannot be read or written; raise other errors
    again."""
    if type(error) is not EnvError:
        raise error
    raise ToolError(str(error)) from error


_RUN: Mapping[str, Callable[..., ToolResult]] = {
    "bash": _bash,
    "python": _python,
    "read_file": _read_file,
    "write_file": _write_file,
}
