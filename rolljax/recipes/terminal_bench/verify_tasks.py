"""A stage of a data pipeline that plays terminal tasks, and keeps those whose tests mean something."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from rolljax.data.base import Place, Record, RecordSource, Stage, text_of
from rolljax.envs.base import EnvSpec
from rolljax.errors import Checked, ConfigError, DataError, Range
from rolljax.recipes.terminal_bench.actions import FINISH
from rolljax.recipes.terminal_bench.harbor import HarborTask
from rolljax.recipes.terminal_bench.terminal import HarborTasks

_MARK = "/tmp/.before"
_TESTS = 8000
"""Characters of the tests that a judge is shown."""


@dataclasses.dataclass(frozen=True)
class VerifyTasks(Checked, Stage):
    """Play every task folder in the sandbox. Keep the tasks that their own solution solves each time, and that three
    players without the solution do not solve: one that does nothing, one that leaves the solution's files empty, and
    one that fills them with other text.

    Adds the columns `name`, `prompt` (a task's content in rollouts, for `attempts.FromRollouts`), `instruction`,
    `solution`, `tests` and `category`, which a `judge.JudgeFilter` behind this stage can be shown.
    """

    key: str = "folder"
    """The column with the path of a task folder (Harbor's or Terminal-Bench's layout)."""
    repeats: Annotated[int, Range(low=1)] = 3
    """Times that the solution is played; all must pass."""
    concurrency: Annotated[int, Range(low=1)] = 2
    """Tasks that are played side by side."""
    have: tuple[str, ...] = ()
    """As `HarborTasks.have`."""

    def run(self, source: RecordSource, place: Place) -> Iterator[Record]:
        with concurrent.futures.ThreadPoolExecutor(self.concurrency) as threads:
            waiting = [(record, threads.submit(self._judged, text_of(record, self.key))) for record in source]
            for record, future in waiting:
                task, fault = future.result()
                if task is None or fault:
                    place.drop(record, fault)
                    continue
                yield {
                    **record,
                    "name": task.name,
                    "prompt": task.content,
                    "instruction": task.instruction,
                    "solution": task.solution,
                    "tests": "\n".join(t.decode(errors="replace") for t in task.tests.values())[:_TESTS],
                    "category": task.category,
                }

    def _judged(self, folder: str) -> tuple[HarborTask | None, str]:
        """Return the task, and why it is dropped; empty: it is kept."""
        try:
            spec = HarborTasks(path=folder, have=self.have)
            [task] = spec.tasks()
        except (ConfigError, DataError):
            return None, "unusable"
        if not task.solution:
            return task, "no_solution"
        passed = [play(spec, task.solution) for _ in range(self.repeats)]
        if not all(passed):
            return task, "unstable" if any(passed) else "solution_fails"
        for name, script in attacks(task).items():
            if play(spec, script):
                return task, name
        return task, ""


def attacks(task: HarborTask) -> dict[str, str]:
    """Return the scripts that must not solve a task, by the reason to drop it if one does: no command, and the solution
    with the content of its files lost."""
    places = " ".join(shlex.quote(str(Path(task.workdir, p))) for p in task.artifacts)
    files = f"find {places} -type f -newer {_MARK} -print0 2>/dev/null | xargs -0 -r -n 1 sh -c"
    run = f"touch {_MARK}\nsleep 0.05\n(\n{task.solution}\n)"
    return {
        "passes_untouched": FINISH,
        "passes_empty": f"{run}\n{files} ': > \"$0\"'",
        "passes_other_text": f"{run}\n{files} 'echo 31415926 > \"$0\"'",
    }


def play(spec: EnvSpec, script: str) -> bool:
    """Return whether a script as the only command solves the first task of `spec`."""
    env = spec.make()
    try:
        env.reset(spec.task(0))
        result = env.step(script)
        if not result.terminated and not result.truncated:
            result = env.step(FINISH)
        return bool(result.success)
    finally:
        env.close()
