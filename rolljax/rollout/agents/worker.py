"""One process of an agent program: an episode goes in as a line of JSON, its answer comes out as a line of JSON.

    {"id": "0-3-1-5", "messages": [...], "base_url": "http://127.0.0.1:P/v1", "api_key": "..."}  ->  stdin
    stdout  ->  {"answer": "..."}          from a program that plays many episodes: {"id": "0-3-1-5", "answer": "..."}

Any other line on stdout is skipped.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rolljax.concurrency.child import Child, ChildError
from rolljax.errors import ConfigError, EnvError
from rolljax.rollout.agents.program import AgentProgram

GRACE_S = 2.0
"""Seconds a program has to end by itself once its input is closed."""


class AgentProcess:
    """A running program. variables: environment variables for the program in addition to `AgentProgram.env`.

    Raises:
      ChildError: the machine could not start it.
    """

    def __init__(self, program: AgentProgram, variables: Mapping[str, str], task: str = "") -> None:
        self._program = program
        env = dict(variables) | dict(program.env)
        self.child = Child(resolve(program.command_of(task)), env, max_bytes=program.output_bytes)

    async def ask(self, episode: Mapping[str, Any]) -> str:
        """Play an episode; returns the program's answer.

        Raises:
          EnvError: the program ended before it answered, printed too much, or its answer is no text.
        """
        self.child.send(json.dumps(episode).encode())
        printed, limit = 0, self._program.output_bytes
        while True:
            ended = None
            try:
                line = await self.child.areceive()
            except ChildError as e:
                ended, line = e, e.line
            printed += len(line) + 1
            if printed > limit or (ended and ended.kind == "long"):
                raise EnvError(f"printed more than {limit} bytes", stage="program")
            answer = read_answer(line, episode["id"], own=not self._program.reuse)
            if answer is not None:
                return answer
            if ended:
                raise EnvError(str(ended), stage="program") from ended


def check_machine(program: AgentProgram) -> None:
    """Raise `ConfigError` if the program cannot run here."""
    if program.sandbox == "none":
        resolve(program.command)


def resolve(command: Sequence[str]) -> list[str]:
    """Return the command with the path of its program.

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
    """Return the answer to episode `name` in a line; None if it holds none. own: it may leave the name out.

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
