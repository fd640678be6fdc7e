"""The settings of an agent program."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Annotated

from rolljax.envs.base import EnvSpec
from rolljax.errors import ConfigError, Range, check_fields


@dataclasses.dataclass(frozen=True)
class AgentProgram:
    """A program that plays the episodes of an environment with a model it reaches over OpenAI's or Anthropic's API."""

    command: tuple[str, ...] = ()
    """Command line to run; empty: the one that the environment brings (`EnvSpec.program`). `{task}` stands for the text
    of the environment's last message. A leading `python` means the interpreter that runs the training; with
    `sandbox = 'task'`, the sandbox's own."""
    sandbox: str = ""
    """Where it runs. 'task': inside the sandbox of its episode, where it reaches the policy and nothing else; the
    environment scores the files that it leaves. 'none': as a process of this user, with this user's rights. There is no
    default: without a sandbox the command must be one that you trust."""
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Environment variables that the program gets in addition to `OPENAI_BASE_URL`, `OPENAI_API_KEY`, the same of
    `ANTHROPIC`, and those of the sandbox; without one, `PATH`, `HOME`, `VIRTUAL_ENV`, `LD_LIBRARY_PATH`, the language,
    the time zone and the temporary folder."""
    reuse: bool = False
    """One process plays many episodes, one after the other (starting Python and a client takes about a second)."""
    concurrency: Annotated[int, Range(low=1)] = 8
    """Maximum number of programs that run at the same time."""
    deadline_s: Annotated[float, Range(above=0)] = 300.0
    """Longest time of an episode in seconds, without the time in which the sampler answers."""
    max_calls: Annotated[int, Range(low=1)] = 16
    """Maximum number of calls of the model in an episode."""
    max_restarts: Annotated[int, Range(low=0)] = 2
    """Maximum number of times that an episode may start a conversation that does not continue an earlier one. Each is a
    separate sequence to the trainer, which must have room for it."""
    output_bytes: Annotated[int, Range(low=1024)] = 2**20
    """Maximum number of bytes that the program may print in an episode."""

    def __post_init__(self) -> None:
        if not all(isinstance(c, str) and c for c in self.command):
            raise ConfigError(
                "must be a program and its arguments",
                setting="AgentProgram.command",
                value=self.command,
                remedy="('python', 'my_agent.py')",
            )
        if self.sandbox not in ("task", "none"):
            raise ConfigError(
                "must say where the program runs",
                setting="AgentProgram.sandbox",
                value=self.sandbox,
                remedy="'task': in the sandbox of its episode; 'none': with your rights, if you trust it",
            )
        if self.reuse and (self.sandbox == "task" or self.command_of("") != self.command):
            raise ConfigError(
                "is not possible: a sandbox ends with its episode, and a command line with {task} has one task",
                setting="AgentProgram.reuse",
                remedy="leave it out",
            )
        check_fields(self)

    def for_env(self, env: EnvSpec) -> AgentProgram:
        """Return the settings with the command for an environment.

        Raises:
          ConfigError: neither has one, or both have.
        """
        if bool(self.command) == bool(env.program):
            why = (
                f"must be left out: {env.name} brings its own"
                if self.command
                else "must be a program and its arguments"
            )
            remedy = "" if self.command else "('python', 'my_agent.py')"
            raise ConfigError(why, setting="AgentProgram.command", value=self.command, remedy=remedy)
        return dataclasses.replace(self, command=self.command or env.program)

    def command_of(self, task: str) -> tuple[str, ...]:
        """Return the command line for a task."""
        return tuple(part.replace("{task}", task) for part in self.command)


def own_program(env: EnvSpec) -> AgentProgram | None:
    """Return the settings with which an evaluation runs the program that an environment brings; None if it brings none.
    The program gets this process's variables about certificates and uv, to install what it needs."""
    passed = {name: value for name, value in os.environ.items() if name.startswith(("SSL_CERT_", "UV_"))}
    return AgentProgram(sandbox="none", reuse=True, env=passed) if env.program else None
