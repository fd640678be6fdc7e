"""Tasks at a terminal that a tiny model can learn: read a number from a file, and write it into another.

`python -m rolljax.recipes.terminal_bench.number_files FOLDER` writes them in Harbor's layout. `NumberFiles` has the
same conversations without a sandbox, for a warm start.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
from pathlib import Path
from typing import Annotated

from rolljax.envs.base import EnvSpec, PureEnv, StepResult
from rolljax.errors import EnvError, Range, check_fields
from rolljax.types import Message, Task

SYSTEM = "sh"
"""The system message of `cli_agent.yaml`."""
TOML = """version = "1.0"
artifacts = ["/work/out"]

[metadata]
category = "files"

[verifier]
timeout_sec = 10.0
"""
TEST = """def test_number():
    with open("/work/out") as f:
        assert f.read().strip() == "{number}"
"""


def task_of(index: int) -> tuple[str, str]:
    """Return the file's name and the number in it, for the task at `index`."""
    rng = random.Random(f"number file {index}")
    return rng.choice("abcdefgh"), str(rng.randrange(10, 100))


@dataclasses.dataclass(frozen=True)
class NumberFiles(EnvSpec):
    """The conversation of a good agent with the tasks of `write_tasks`: its two commands, and what the first one
    prints. Nothing is run."""

    careless_frac: Annotated[float, Range(low=0, high=1)] = 0.0
    """Share of the tasks in which the recorded agent, which is imitated, forgets to write the number into the file: a
    habit that reinforcement in the sandbox has to break."""

    runs = "inline"

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def max_turns(self) -> int:
        return 2

    @property
    def name(self) -> str:
        return "number_files"

    def task(self, index: int) -> Task:
        name, number = task_of(1_000_000 + index)  # none of `write_tasks`
        return Task(self.name, index, f"{name} {number}")

    def make(self) -> NumberFile:
        return NumberFile(self)


class NumberFile(PureEnv):
    """One conversation."""

    def __init__(self, spec: NumberFiles) -> None:
        self.spec = spec

    def reset(self, task: Task) -> tuple[Message, ...]:
        self.file, self.number = task.content.split()
        self.careless = random.Random(f"careless {task.index}").random() < self.spec.careless_frac
        self.turn = 0
        return Message("system", SYSTEM), Message("user", self.file)

    def step(self, action: str) -> StepResult:
        if self.turn == 2:
            raise EnvError("step after the episode's end")
        self.turn += 1
        if self.turn == 1:
            return StepResult((Message("user", self.number),), 0.0, terminated=False)
        right = action.strip() == self.reference_answer()
        return StepResult((), float(right), terminated=True, success=right)

    def reference_answer(self) -> str:
        if not self.turn:
            return f"cat {self.file}"
        return f"echo {self.number}" if self.careless else f"echo {self.number} >out"


def write_tasks(folder: Path, num: int = 200) -> None:
    """Write task folders `task-000`, `task-001`, ..."""
    for index in range(num):
        name, number = task_of(index)
        files = {
            "task.toml": TOML,
            "instruction.md": name,
            "environment/Dockerfile": f"FROM python:3.11-slim\nWORKDIR /work\nRUN echo {number} > {name}\n",
            "solution/solve.sh": f"cat {name} > out\n",
            "tests/test_outputs.py": TEST.format(number=number),
        }
        for path, text in files.items():
            target = folder / f"task-{index:03}" / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)


def main() -> None:
    """Write the tasks into the folder that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--num", type=int, default=200)
    args = parser.parse_args()
    write_tasks(args.folder, args.num)


if __name__ == "__main__":
    main()
