"""Tasks at a terminal that a tiny model can learn: read a number from a file, and write it into another.

`python -m rolljax.recipes.terminal_bench.number_files FOLDER` writes them in Harbor's layout; with `--chains`, tasks of
several files, each of which names the next. `NumberFiles` and `FileChains` have the same conversations without a
sandbox.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import re
from collections.abc import Mapping
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
DIGITS, READS = "0123456789", 4
"""Names of the files, and how many of a chain get into the log."""
READ, WRITE = "tee -a log <{}", "tee out <{}"
CHAIN_TEST = """def test_log():
    with open("/work/log") as f:
        assert f.read().split() == {read}


def test_out():
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


def chain_of(index: int) -> tuple[str, str]:
    """Return the first file's name and the contents of the files 0 to 9, a digit each, for the chain at `index`."""
    rng = random.Random(f"file chain {index}")
    path = rng.sample(DIGITS, READS + 1)
    contents = {name: rng.choice(DIGITS) for name in DIGITS} | dict(zip(path, path[1:], strict=False))
    return path[0], "".join(contents.values())


def chain_commands(first: str, contents: str) -> list[str]:
    """Return the commands that solve a chain."""
    names = [first]
    for _ in range(READS):
        names.append(contents[int(names[-1])])
    return [READ.format(name) for name in names[:-1]] + [WRITE.format(names[-1])]


@dataclasses.dataclass(frozen=True)
class FileChains(EnvSpec):
    """The tasks of `write_chains` without a sandbox; only commands of the solution's two forms do something.

    Each file holds the name of the next, and names are digits. The policy appends four files to a log, in order, and
    copies the fifth to `out`. A wrong file stays in the log, and there are no spare turns: commands of the right forms
    with random names succeed once in three million episodes.
    """

    num_tasks: Annotated[int, Range(low=1)] = 256
    """Different chains."""
    aimless: bool = False
    """Whether the recorded agent, which is imitated, fills both forms of commands with random names and numbers, which
    then count as the solution: a warm start that knows nothing but the forms."""

    runs = "inline"

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def max_turns(self) -> int:
        return READS + 1

    @property
    def name(self) -> str:
        return "file_chains"

    def task(self, index: int) -> Task:
        return Task(self.name, index, " ".join(chain_of(1_000_000 + index % self.num_tasks)))

    def make(self) -> FileChain:
        return FileChain(self)


class FileChain(PureEnv):
    """One chain."""

    def __init__(self, spec: FileChains) -> None:
        self._spec = spec

    def reset(self, task: Task) -> tuple[Message, ...]:
        first, self.contents = task.content.split()
        self.solution, self.done = chain_commands(first, self.contents), list[str]()
        if self._spec.aimless:
            rng = random.Random(f"aimless {task.index}")
            self.solution = [form.format(rng.choice(DIGITS)) for form in rng.choices((READ, WRITE), k=READS + 1)]
        return (Message("user", first),)

    def step(self, action: str) -> StepResult:
        if len(self.done) == self._spec.max_turns:
            raise EnvError("step after the episode's end")
        self.done.append(action.strip())
        if len(self.done) == self._spec.max_turns:
            right = self.done == self.solution
            return StepResult((), float(right), terminated=True, success=right)
        read = re.fullmatch(r"tee (?:-a log|out) <([0-9])", self.done[-1])
        seen = f"[exit code 0]\n{self.contents[int(read[1])]}" if read else "[exit code 127]"
        return StepResult((Message("user", seen),), 0.0, terminated=False)

    def reference_answer(self) -> str:
        return self.solution[len(self.done)]


def write_tasks(folder: Path, num: int = 200) -> None:
    """Write task folders `task-000`, `task-001`, ..."""
    for index in range(num):
        name, number = task_of(index)
        _write(folder / f"task-{index:03}", name, {name: number}, f"cat {name} > out\n", TEST.format(number=number))


def write_chains(folder: Path, num: int = 200) -> None:
    """Write task folders `chain-000`, `chain-001`, ..., each with ten files, of which five are a chain."""
    for index in range(num):
        first, contents = chain_of(index)
        commands = chain_commands(first, contents)
        read = [contents[int(command[-1])] for command in commands]
        test = CHAIN_TEST.format(read=read[:-1], number=read[-1])
        files = dict(zip(DIGITS, contents, strict=True))
        _write(folder / f"chain-{index:03}", first, files, "\n".join(commands), test, '"/work/log", ')


def _write(
    folder: Path, instruction: str, contents: Mapping[str, str], solution: str, test: str, log: str = ""
) -> None:
    made = " && ".join(f"echo {text} > {name}" for name, text in contents.items())
    files = {
        "task.toml": TOML.replace("[", f"[{log}", 1),
        "instruction.md": instruction,
        "environment/Dockerfile": f"FROM python:3.11-slim\nWORKDIR /work\nRUN {made}\n",
        "solution/solve.sh": solution,
        "tests/test_outputs.py": test,
    }
    for path, text in files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)


def main() -> None:
    """Write the tasks into the folder that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--num", type=int, default=200)
    parser.add_argument("--chains", action="store_true", help="write chains of files")
    args = parser.parse_args()
    (write_chains if args.chains else write_tasks)(args.folder, args.num)


if __name__ == "__main__":
    main()
