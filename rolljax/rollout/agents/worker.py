"""One process of an agent program: an episode goes in as a line of JSON, its answer comes out as a line of JSON.

    {"id": "0-3-1-5", "messages": [...], "base_url": "http://127.0.0.1:P/v1", "api_key": "..."}  ->  stdin
    stdout  ->  {"answer": "..."}          from a program that plays many episodes: {"id": "0-3-1-5", "answer": "..."}

Any other line on stdout is skipped. The program's stderr is kept for error messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Mapping
from typing import Any

from rolljax.errors import ConfigError, EnvError, InfraError
from rolljax.rollout.agents.program import AgentProgram

INHERITED = ("PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TMPDIR", "TZ", "SYSTEMROOT")
STDERR_KEPT = 2000
"""Characters of stderr in an error message."""
GRACE_S = 2.0
"""Seconds a program has to end by itself once its input is closed."""


class AgentProcess:
    """A running program. `await Worker.start(...)` makes one."""

    def __init__(self, program: AgentProgram, process: asyncio.subprocess.Process) -> None:
        self._program, self._process = program, process
        self._errors = ""
        self._reading_errors = asyncio.ensure_future(self._read_errors())

    @staticmethod
    async def start(program: AgentProgram, variables: Mapping[str, str]) -> AgentProcess:
        """A new process, in a process group of its own.

        Raises:
          InfraError: the machine could not start it.
        """
        env = {name: os.environ[name] for name in INHERITED if name in os.environ}
        try:
            process = await asyncio.create_subprocess_exec(
                *resolve(program.command),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=env | dict(variables) | dict(program.env),
                limit=program.output_bytes,
                start_new_session=True,
            )
        except (OSError, ValueError) as e:
            raise InfraError(f"{program.command[0]} could not be started: {e}", stage="program") from e
        return AgentProcess(program, process)

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    async def ask(self, episode: Mapping[str, Any]) -> str:
        """Play an episode; returns the program's answer.

        Raises:
          EnvError: the program ended before it answered, printed too much, or its answer is no text.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(ConnectionError):  # it has ended, and says more about it on its way out
            self._process.stdin.write(json.dumps(episode).encode() + b"\n")
            await self._process.stdin.drain()
        printed = 0
        while True:
            try:
                line = await self._process.stdout.readline()
            except ValueError:  # a line longer than the reader's limit
                line = b" " * (self._program.output_bytes + 1)
            printed += len(line)
            if printed > self._program.output_bytes:
                raise EnvError(f"printed more than {self._program.output_bytes} bytes", stage="program")
            if not line.endswith(b"\n"):
                return self._last(line, await self._ending(), episode["id"])
            answer = read_answer(line, episode["id"], own=not self._program.reuse)
            if answer is not None:
                return answer

    def kill(self) -> None:
        """End the program and everything it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def stop(self, grace_s: float = GRACE_S) -> None:
        """Close the program's input, give it `grace_s` to end, and end what is left of it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        ending = asyncio.gather(self._process.wait(), self._read_rest())
        try:
            await asyncio.wait([ending], timeout=grace_s)
        finally:
            self.kill()
            await asyncio.wait([ending], timeout=GRACE_S)  # what left the process group may hold the pipes open
            ending.cancel()
            self._reading_errors.cancel()

    def _last(self, line: bytes, ending: str, name: str) -> str:
        """The answer in a last line without a line break, if it is one."""
        answer = read_answer(line, name, own=not self._program.reuse)
        if answer is None:
            raise EnvError(f"{ending} before it answered{': ' if self._errors else ''}{self._errors}", stage="program")
        return answer

    async def _ending(self) -> str:
        """How the program ended, once its output is closed."""
        with contextlib.suppress(asyncio.TimeoutError):
            both = asyncio.gather(asyncio.shield(self._reading_errors), self._process.wait())
            await asyncio.wait_for(both, GRACE_S / 2)
        code = self._process.returncode
        return "closed its output" if code is None else f"ended with code {code}"

    async def _read_rest(self) -> None:
        """Read the output to its end, so that the pipe closes."""
        assert self._process.stdout is not None
        while await self._process.stdout.read(2**16):
            pass

    async def _read_errors(self) -> None:
        assert self._process.stderr is not None
        while more := await self._process.stderr.read(2**16):
            self._errors = (self._errors + more.decode(errors="replace"))[-STDERR_KEPT:]


def check_machine(program: AgentProgram) -> None:
    """Raise `ConfigError` if the program cannot run here."""
    resolve(program.command)


def resolve(command: tuple[str, ...]) -> list[str]:
    """The command with the path of its program.

    Raises:
      ConfigError: there is no such program.
    """
    if command[0] == "python":
        return [sys.executable, *command[1:]]
    path = shutil.which(command[0])
    if path is None:
        raise ConfigError(
            "is not a program on this machine",
            setting="AgentProgram.command",
            value=command[0],
            remedy="give its path, or put it on PATH",
        )
    return [path, *command[1:]]


def read_answer(line: bytes, name: str, *, own: bool) -> str | None:
    """The answer in a line that holds one for episode `name`; `own`: it may leave the name out.

    Raises:
      EnvError: the answer is no text.
    """
    if b'"answer"' not in line:
        return None
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or "answer" not in value or value.get("id", name if own else None) != name:
        return None
    if not isinstance(value["answer"], str):
        raise EnvError(f"answered with {str(value['answer'])[:40]}, which is no text", stage="program")
    return value["answer"].encode("utf-8", "replace").decode()
