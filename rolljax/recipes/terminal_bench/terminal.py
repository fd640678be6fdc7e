"""Tasks at a terminal: the policy runs commands in a sandbox, then the task's tests check the resulting files."""

from __future__ import annotations

import collections
import dataclasses
import difflib
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from rolljax.envs.base import Env, EnvSpec, ProgramLaunch, StepResult
from rolljax.errors import ConfigError, DataError, EnvError, InfraError, Range, check_fields
from rolljax.recipes.terminal_bench.actions import FINISH, parse_action
from rolljax.recipes.terminal_bench.dockerfile import Put
from rolljax.recipes.terminal_bench.grading import Grade, Left, build, enter, grade, leave, list_files
from rolljax.recipes.terminal_bench.harbor import HarborTask, find_tasks, load_task
from rolljax.recipes.terminal_bench.images import in_image
from rolljax.recipes.terminal_bench.tampering import PLACES, suspicious_files, suspicious_words
from rolljax.sandbox import check_egress
from rolljax.types import Message, Task

if TYPE_CHECKING:
    from rolljax.sandbox import ContainerHost, Profile

OWN_TASKS = Path(__file__).with_name("terminal_tasks")
PROMPT = """{instruction}

You are at a bash shell in {workdir}, {network}. Answer with one command, or with a script in a ```bash block;
you will be shown the exit code and the output. Answer finish when the task is done. You have {max_turns} turns."""


@dataclasses.dataclass(frozen=True)
class TerminalTasks(EnvSpec):
    """Sixteen tasks, two of each of eight domains, that bash, the core utilities and Python's standard library solve.

    Every command runs in one sandbox, in a shell that keeps its state. The episode ends when the policy finishes, at
    `max_turns`, or when it repeats itself; then the task's artifacts are copied into a new sandbox and tested there.
    Reward is 1 if all tests pass; the fraction that passed is a metric only.
    """

    only: tuple[str, ...] = ()
    """Names of the tasks to use; empty: all."""
    max_turns: Annotated[int, Range(above=0)] = 30
    """Commands before the episode is cut."""
    command_timeout_s: Annotated[float, Range(above=0)] = 10.0
    """Longest time in seconds that one command may run; the policy then gets a note, and the episode continues."""
    test_timeout_s: Annotated[float, Range(above=0)] = 10.0
    """Longest time in seconds that the tests may run, unless the task sets less. Both together, and the second it takes
    to start a sandbox, must stay below `PoolConfig.step_s`."""
    max_output_chars: Annotated[int, Range(above=0)] = 2000
    """Characters of a command's output that are shown, from its start and its end."""
    max_answer_chars: Annotated[int, Range(above=0)] = 16_384
    """Maximum number of characters of an answer; a longer one is not run."""
    max_repeats: int = 3
    """The episode is cut when one command gave one result this many times in a row; 0: never."""
    prompt: str = PROMPT
    """The first message to the policy, with the task's {instruction}, its {workdir}, {network} and {max_turns}."""
    egress: tuple[str, ...] = ()
    """Servers that programs in the policy's sandbox may connect to, through a proxy (`HTTPS_PROXY`): `host:port`, or
    `*.domain:port` for all hosts below a domain. Empty: there is no network. Whoever controls such a server can read
    what the policy sends there; the tests run without a network in any case."""
    readable: tuple[str, ...] = ()
    """Folders of this machine that the policy's sandbox may read, at the same paths: an agent program
    (`AgentProgram.sandbox = 'task'`) and its libraries. Everybody must have the right to read them."""
    images: Literal["", "docker", "podman"] = ""
    """Engine that runs each task in a container of its own image, which the task names or its Dockerfile makes. Empty:
    bubblewrap, on this machine's own system. An image is made when its task is first played, which may take longer than
    `PoolConfig.reset_s`: `python -m rolljax.recipes.terminal_bench.images FOLDER ENGINE` makes all of them."""
    solution_by_line: bool = False
    """Whether the solution is played line by line, each line a command of its own, as an expert of several turns
    (`start_states.ExpertStarts`)."""

    runs = "thread"
    has_sandbox = True

    def __post_init__(self) -> None:
        check_fields(self)
        check_egress(self.egress, f"{type(self).__name__}.egress")
        if self.max_repeats < 0 or self.max_repeats == 1:
            raise ConfigError(
                "cannot be kept to",
                setting=f"{type(self).__name__}.max_repeats",
                value=self.max_repeats,
                remedy="0 to let every repetition pass, or 2 and more",
            )
        for path in self.readable:
            if not Path(path).is_absolute() or not Path(path).is_dir():
                raise ConfigError(
                    "is no folder", setting=f"{type(self).__name__}.readable", value=path, remedy="give its full path"
                )
        if "{instruction}" not in self.prompt:
            raise ConfigError(
                "does not tell the task", setting=f"{type(self).__name__}.prompt", remedy="put {instruction} into it"
            )

    @property
    def name(self) -> str:
        return "terminal"

    @property
    def folder(self) -> Path:
        """The folder of the task folders."""
        return OWN_TASKS

    def tasks(self) -> tuple[HarborTask, ...]:
        """Return the tasks, by name.

        Raises:
          DataError: a folder cannot be read, or needs a feature that the sandbox does not have.
          ConfigError: `only` names a task that does not exist.
        """
        return _tasks(self.folder, self.only, type(self).__name__, images=bool(self.images))

    @property
    def num_tasks(self) -> int | None:
        return len(self.tasks())

    def task(self, index: int) -> Task:
        tasks = self.tasks()
        task = tasks[index % len(tasks)]
        return Task(self.name, index, task.content)

    def category(self, task: Task) -> str:
        return self.tasks()[task.index % len(self.tasks())].category

    def make(self) -> Env:
        return TerminalEnv(self)


@dataclasses.dataclass(frozen=True)
class HarborTasks(TerminalTasks):
    """Tasks at a terminal from a folder of task folders, as Harbor and Terminal-Bench lay them out."""

    path: str = ""
    """Folder of task folders, or a single task folder."""
    have: tuple[str, ...] = ()
    """Packages that Dockerfiles install and that are there (or that the tasks do not need after all); programs in
    /usr/bin are found by themselves."""
    skip_unusable: bool = False
    """Whether to leave out tasks that need packages or features that a sandbox does not have, instead of raising an
    error."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not Path(self.path).is_dir() or not self.path:
            raise ConfigError(
                "is no folder", setting="HarborTasks.path", value=self.path, remedy="name a folder of task folders"
            )

    @property
    def name(self) -> str:
        return "harbor"

    @property
    def folder(self) -> Path:
        return Path(self.path)

    def tasks(self) -> tuple[HarborTask, ...]:
        return _tasks(self.folder, self.only, type(self).__name__, self.have, self.skip_unusable, bool(self.images))


@functools.lru_cache(maxsize=64)
def _tasks(
    folder: Path,
    only: tuple[str, ...],
    cls: str,
    have: tuple[str, ...] = (),
    skip_unusable: bool = False,
    images: bool = False,
) -> tuple[HarborTask, ...]:
    folders = {f.name: f for f in find_tasks(folder)}
    for name in only:
        if name not in folders:
            near = difflib.get_close_matches(name, folders, 3)
            raise ConfigError(
                "is not a task",
                setting=f"{cls}.only",
                value=name,
                remedy=f"did you mean {' or '.join(near)}?" if near else f"one of {', '.join(list(folders)[:20])}",
            )
    tasks = tuple(load_task(f.absolute()) for name, f in folders.items() if not only or name in only)
    lacking = {t.name: "; ".join(reasons) for t in tasks if (reasons := t.lacking(have, images=images))}
    usable = tuple(t for t in tasks if t.name not in lacking)
    if (lacking and not skip_unusable) or not usable:
        raise DataError(
            f"{len(lacking)} of {len(tasks)} tasks in {folder} need what the sandbox does not have (choose others by "
            f"{cls}.only, set skip_unusable, or {cls}.images if they need their image):\n  "
            + "\n  ".join(f"{name}: {reasons}" for name, reasons in list(lacking.items())[:20])
        )
    return usable


class TerminalEnv(Env):
    """One task in one sandbox."""

    def __init__(self, spec: TerminalTasks) -> None:
        self._spec = spec
        self._box: Any = None
        self._host: ContainerHost | None = None
        self._egress: Any = None
        self._over = True

    def reset(self, task: Task) -> tuple[Message, ...]:
        from rolljax.sandbox import Egress, Sandbox, container_host

        tasks = self._spec.tasks()
        self._task = tasks[task.index % len(tasks)]
        if not task.content.startswith(f"{self._task.name}\n"):
            raise EnvError(f"task {task.index} is {self._task.name} here: the folder of tasks has changed")
        self.close()
        if self._spec.images:
            self._host = container_host(self._spec.images)
            self._task = in_image(self._task, self._host)
        profile = dataclasses.replace(_profile(self._task), readable=self._spec.readable)
        self._box = Sandbox.open(profile, host=self._host)
        build(self._box, self._task)
        self._env, network = dict(self._task.env), "without a network"
        if self._spec.egress:
            self._egress = Egress(self._box, self._spec.egress)
            self._env |= self._egress.variables
            network = f"with a proxy (HTTPS_PROXY) to {', '.join(self._spec.egress)} alone"
        self._box.run(enter(self._task.workdir, self._env), timeout_s=self._spec.command_timeout_s)
        self._processes = self._box.stats().get("processes", 0)  # none when the sandbox has ended
        self._turns, self._over, self._last = 0, False, ""
        self._repeated: tuple[tuple[str, str], int] = ("", ""), 0
        text = self._spec.prompt
        said = {"workdir": self._task.workdir, "network": network, "max_turns": str(self._spec.max_turns)}
        for key, value in said.items():
            text = text.replace(f"{{{key}}}", value)
        return (Message("user", text.replace("{instruction}", self._task.instruction)),)

    def step(self, action: str) -> StepResult:
        if self._over:
            raise EnvError("step before reset, or after the episode's end")
        self._turns += 1
        asked = parse_action(action, self._spec.max_answer_chars)
        self._last = asked.command
        counts = collections.Counter(ignored_n=asked.ignored)
        if asked.finish:
            return self._end(counts, terminated=True)
        if asked.problem:
            counts["no_command_n"] += 1
            seen = f"[{asked.problem}]"
        else:
            counts["commands_n"] += 1
            counts["tamper_n"] += bool(suspicious_words(asked.command, self._task.instruction))
            seen = self._run(asked.command, counts)
        if counts["sandbox_lost_n"]:
            return self._end(counts, terminated=True)
        before, times = self._repeated
        self._repeated = (asked.command, seen), times + 1 if before == (asked.command, seen) else 1
        if self._repeated[1] == self._spec.max_repeats:
            counts["stopped_repeating_n"] += 1
            return self._end(counts, terminated=False)
        if self._turns == self._spec.max_turns:
            return self._end(counts, terminated=False)
        return StepResult((Message("user", seen),), 0.0, terminated=False, metrics=_metrics(counts))

    def play(self, program: ProgramLaunch) -> StepResult:
        """Run an agent program in the task's folder, then the task's tests on the files that it left."""
        from rolljax.sandbox import run_served

        if self._over or self._turns:
            raise EnvError("a program plays a whole episode, and this one is under way")
        counts, late, failed = collections.Counter[str](), False, False
        try:
            result = run_served(
                self._box,
                program.argv,
                program.address,
                lambda url: program.variables(url) | self._env,
                stdin=program.stdin,
                folder=self._task.workdir,
                deadline_s=program.deadline_s,
                excluded_s=program.sampler_s,
            )
        except InfraError:
            raise
        except EnvError:  # the program, or a command of it, has ended its own sandbox
            counts["sandbox_lost_n"] = 1
        else:
            late, failed = result.timed_out, result.returncode != 0
            counts["sandbox_lost_n"] += bool(result.killed_by and not late)
        end = self._end(counts, terminated=not late)
        own = {"program_timeouts_n": float(late), "program_failed_n": float(failed)}
        return dataclasses.replace(end, metrics={**end.metrics, **own})

    def reference_answer(self) -> str:
        """Return the solution as one command, or its next line; after it, finish."""
        solution = self._task.solution
        if not solution:
            raise EnvError(f"task {self._task.name} has no solution")
        if self._spec.solution_by_line:
            lines = solution.splitlines()
            return lines[self._turns] if self._turns < len(lines) else FINISH
        return FINISH if self._last == solution else solution

    def close(self) -> None:
        if self._egress is not None:
            self._egress.close()
            self._egress = None
        if self._box is not None:
            self._box.close()

    def _run(self, command: str, counts: collections.Counter[str]) -> str:
        """Run a command; return the output for the policy."""
        limit_s = self._spec.command_timeout_s
        try:
            result = self._box.run(command, timeout_s=limit_s)
            if result.restarted and not result.killed_by:
                self._box.run(enter(self._task.workdir, self._env), timeout_s=limit_s)
        except InfraError:
            raise
        except EnvError:  # a program of the policy has ended or damaged its own sandbox
            counts["sandbox_lost_n"] = 1
            return ""
        counts["sandbox_lost_n"] += bool(result.killed_by)
        counts["timeouts_n"] += result.timed_out
        state = f"exit code {result.returncode}"
        if result.timed_out:
            state = f"stopped after {limit_s:g} s"
        if result.restarted:
            state += "; the shell ended and a new one was started"
        output = clip(result.output, self._spec.max_output_chars)
        return f"[{state}]\n{output}".rstrip("\n")

    def _end(self, counts: collections.Counter[str], *, terminated: bool) -> StepResult:
        """Take the policy's files, grade them elsewhere, and return the result."""
        self._over = True
        left = self._leave(counts)
        counts["egress_refused_n"] += self._egress.num_refused if self._egress else 0
        self.close()
        result = self._grade(left) if left else Grade(False, {})  # a lost sandbox leaves nothing to test
        counts["tests_n"], counts["tests_passed_n"] = len(result.cases), result.num_passed
        metrics = _metrics(counts) | {"tests_passed_frac": result.num_passed / max(1, len(result.cases))}
        reward = float(result.passed)
        return StepResult(
            (),
            reward,
            terminated=terminated,
            truncated=not terminated,
            success=result.passed,
            reward_parts={"tests": reward},
            metrics=metrics,
        )

    def _leave(self, counts: collections.Counter[str]) -> Left | None:
        """Return the policy's files; None if its sandbox has ended."""
        own = [step.path for step in self._task.steps if isinstance(step, Put)]
        try:
            processes = self._box.stats().get("processes", self._processes)  # none when the sandbox has ended
            counts["left_running_n"] += max(0, processes - self._processes)
            listed, deleted = list_files(self._box, self._task, ["/tmp", *PLACES])
            counts["tamper_n"] += len(suspicious_files([path for _, _, path in listed], own))
            left = leave(self._box, self._task, listed, deleted)
            counts["not_taken_n"] += len(left.refused)
            return left
        except InfraError:
            raise
        except EnvError:
            counts["sandbox_lost_n"] = 1
            return None

    def _grade(self, left: Left) -> Grade:
        timeout_s = min(self._spec.test_timeout_s, self._task.verifier_timeout_s)
        return grade(self._task, left, _profile(self._task), timeout_s, self._host)


def _profile(task: HarborTask) -> Profile:
    """Return the resource limits of a task, the same while the policy works and while it is tested."""
    from rolljax.sandbox import TERMINAL

    life_s = max(TERMINAL.session_s, task.agent_timeout_s)
    memory = task.memory_bytes or TERMINAL.memory_bytes
    return dataclasses.replace(TERMINAL, output_bytes=1 << 20, session_s=life_s, memory_bytes=memory, image=task.image)


def clip(text: str, limit: int) -> str:
    """Shorten a text to its start and its end, with a note of the number of characters left out."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[len(text) - half :]}"


_COUNTS = (
    "commands_n", "no_command_n", "ignored_n", "timeouts_n", "sandbox_lost_n", "stopped_repeating_n", "tamper_n",
    "egress_refused_n", "left_running_n", "not_taken_n", "tests_n", "tests_passed_n",
)  # fmt: skip


def _metrics(counts: Mapping[str, int]) -> dict[str, float]:
    return {name: float(counts.get(name, 0)) for name in _COUNTS}
