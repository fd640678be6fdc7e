"""Tasks of verifiers 0.4 (https://github.com/PrimeIntellect-ai/verifiers): its own harness plays them, its own rewards
score them, and the policy is the model.

    task -> verifiers_program.py, in a Python of its own -> harness -> calls -> rolljax's sessions -> trajectory
                                                        -> rewards -> answer -> StepResult

verifiers pins libraries that rolljax has in other versions, so it needs a virtual environment of its own. The sessions
of agent programs record what was sampled, so every conversation is trained token for token.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar

from rolljax.envs.base import EnvSpec, PureEnv, Runs, StepResult
from rolljax.envs.pool.episode_runner import number, table
from rolljax.errors import ConfigError, EnvError, Range, boundary, check_fields
from rolljax.types import Message, Task

PROGRAM = Path(__file__).with_name("verifiers_program.py")
LIST_S = 300.0
"""Longest time in seconds that verifiers may take to list the tasks."""


@dataclasses.dataclass(frozen=True)
class Verifiers(EnvSpec):
    """A taskset of verifiers. Set `Recipe.agent = @AgentProgram()` too, with `sandbox = 'none'`: the harness is its
    program, with this user's rights."""

    runs: ClassVar[Runs] = "inline"

    id: str = ""
    """Id of the taskset: a package or module that the other Python can import."""
    python: str = ""
    """Path of a Python with verifiers 0.4."""
    max_tasks: Annotated[int, Range(low=1)] = 1000
    """Most tasks that are read, from the first."""
    taskset: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Further settings of the taskset."""
    harness: str = "null"
    """Id of verifiers' harness, which plays the tasks; `null` is a plain chat."""
    runtime: str = "subprocess"
    """Where verifiers runs the harness: one of its runtimes that needs no settings."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.id:
            raise ConfigError("is empty", setting="Verifiers.id", remedy="name a taskset, such as 'textarena'")
        if not Path(self.python).is_file():
            remedy = "python -m venv FOLDER; FOLDER/bin/pip install verifiers==0.4.0; then FOLDER/bin/python"
            raise ConfigError("is no Python", setting="Verifiers.python", value=self.python, remedy=remedy)

    @property
    def name(self) -> str:
        return self.id

    @property
    def num_tasks(self) -> int:
        return len(_prompts(self.program, self.max_tasks))

    @property
    def program(self) -> tuple[str, ...]:
        python = str(Path(self.python).absolute())  # not resolved: a virtual environment's is a link
        return (python, "-P", str(PROGRAM), self._config)  # -P: this folder has modules with names of packages

    @property
    def _config(self) -> str:
        agent = {"harness": {"id": self.harness}, "runtime": {"type": self.runtime}}
        return json.dumps({"taskset": {"id": self.id, **self.taskset}, "agent": agent}, sort_keys=True)

    def task(self, index: int) -> Task:
        prompts = _prompts(self.program, self.max_tasks)
        return Task(self.name, index, f"{index % len(prompts)}\n{prompts[index % len(prompts)]}")

    def make(self) -> PureEnv:
        return VerifiersEnv()


class VerifiersEnv(PureEnv):
    """One task; the answer is what verifiers' program has found."""

    _over = True

    def reset(self, task: Task) -> tuple[Message, ...]:
        self._over = False
        return (Message("user", task.content),)

    def step(self, action: str) -> StepResult:
        if self._over:
            raise EnvError("step before reset, or after the episode's end")
        self._over = True
        if not action:  # the program was out of time or calls
            return StepResult((), 0.0, terminated=True)
        with boundary(EnvError, "the answer of verifiers' program"):
            found = json.loads(action)
            reward = number(found["reward"])
            parts, metrics = table(found["parts"], "rewards"), table(found["metrics"], "metrics")
        return StepResult((), reward, True, success=reward >= 1, reward_parts=parts, metrics=metrics)

    def reference_answer(self) -> str:
        raise EnvError("verifiers records no answers")


@functools.lru_cache(maxsize=8)
def _prompts(program: tuple[str, ...], num: int) -> tuple[str, ...]:
    """Return the prompts of the first tasks.

    Raises:
      ConfigError: verifiers failed.
    """
    listed = subprocess.run([*program, "--tasks", str(num)], capture_output=True, text=True, timeout=LIST_S)
    if listed.returncode != 0:
        raise ConfigError(f"verifiers cannot list its tasks: {listed.stderr[-1000:].strip()}", setting="Verifiers.id")
    prompts = tuple(json.loads(line) for line in listed.stdout.splitlines())
    if not prompts:
        raise ConfigError("has no task", setting="Verifiers.id")
    return prompts
