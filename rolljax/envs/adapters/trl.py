"""Environments written for TRL's `environment_factory`: a class whose public methods are tools, with `reset(**row)` and
`get_reward()`.

Read from TRL 1.16. The class runs unchanged; TRL itself is not needed.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from rolljax.envs.adapters.border import BorrowedRandom
from rolljax.envs.base import Env, EnvSpec, Runs, StepResult
from rolljax.envs.data import columns, messages
from rolljax.envs.data.columns import Columns
from rolljax.envs.data.rows import InMemoryRows, Row, Rows, in_memory
from rolljax.envs.data.table import BadRows, Table, Taken, check_source, source_name, table
from rolljax.envs.pool.episode_runner import number
from rolljax.envs.tools.base import DEFAULT_LIMITS, ToolLimits, ToolResult, ToolSpec
from rolljax.envs.tools.functions import FunctionToolSet
from rolljax.errors import ConfigError, EnvError, boundary
from rolljax.types import Message, Task

PROMPT = "prompt"
"""Column of the prompt, which TRL calls so too. Rows without one leave it to `reset`."""
NO_TOOLS = ("reset", "get_reward")


@dataclasses.dataclass(frozen=True)
class TrlEnvironment(EnvSpec):
    """A class of TRL's `environment_factory`, for `ToolEnv.inner`: the environment has its own tools.

    An episode makes an object, and calls `reset` with the columns of a row. The text that `reset` returns is appended
    to the prompt's last message. The answer without a call ends the episode with the reward of `get_reward()`.
    """

    runs: ClassVar[Runs] = "process"

    factory: str = ""
    """Import path of the class (`module.Class`), or of a function that makes the object."""
    path: str = ""
    """Rows: a file, a folder or a pattern, as `Questions.path`."""
    records: InMemoryRows | Sequence[Row] | None = None
    """The rows themselves, as dicts, instead of a path."""
    bad_rows: BadRows = "error"
    """Handling of rows whose prompt is neither a text nor messages: `error` names them, `skip` leaves them out."""
    solved_at: float = 1.0
    """Reward from which on a task counts as solved."""
    seed: int = 0
    """Seed of the global random generators of each task, which such classes use."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "records", in_memory(self.records))
        check_source(self, "TrlEnvironment")
        if "." not in self.factory:
            raise ConfigError("is no module.Class", setting="TrlEnvironment.factory", value=self.factory)

    @property
    def name(self) -> str:
        return self.factory.rpartition(".")[2]

    @property
    def num_tasks(self) -> int | None:
        return len(self._table())

    def warnings(self) -> Sequence[str]:
        complaint = self._table().complaint
        return (complaint,) if complaint else ()

    def row(self, index: int) -> Row:
        """Return row `index` modulo their number."""
        return self._table().row(index)

    def prompt(self, index: int) -> tuple[Message, ...]:
        """Return the prompt of row `index`, without what `reset` adds."""
        return self._table().record(index)

    def task(self, index: int) -> Task:
        return Task(self.name, index, json.dumps(self.row(index), ensure_ascii=False, sort_keys=True, default=str))

    def warm(self) -> None:
        self._table()

    def make(self) -> Env:
        return TrlEpisode(self)

    def make_object(self) -> Any:
        """Make the object of an episode.

        Raises:
          ConfigError: it cannot be imported, has no `reset` or no `get_reward`, or has methods that are coroutines.
        """
        module, _, name = self.factory.rpartition(".")
        try:
            factory = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as e:
            raise self._refused(f"cannot be imported: {e}") from e
        made = factory()
        for needed in NO_TOOLS:
            if not callable(getattr(made, needed, None)):
                raise self._refused(f"has no method {needed}")
        if waiting := [m.__name__ for m in (*methods(made), made.get_reward) if inspect.iscoroutinefunction(m)]:
            raise self._refused(f"has coroutines, which are not supported: {', '.join(waiting)}")
        return made

    def _refused(self, problem: str) -> ConfigError:
        return ConfigError(problem, setting="TrlEnvironment.factory", value=self.factory)

    def _table(self) -> Table[tuple[Message, ...]]:
        return table(self, "TrlEnvironment", self._reader)

    def _reader(self, rows: Rows, path: str) -> tuple[Callable[[Row], tuple[Message, ...]], Taken]:
        column = PROMPT if PROMPT in Columns.of(rows).every else None

        def read(row: Row) -> tuple[Message, ...]:
            return messages.prompt(columns.value(row, PROMPT), PROMPT) if column else (Message("user", ""),)

        return read, {PROMPT: column}


class TrlEpisode(Env):
    """One episode: an object of its own, which sees the task's own state of the global random generators."""

    def __init__(self, spec: TrlEnvironment) -> None:
        self._spec = spec
        self._object: Any = None

    def reset(self, task: Task) -> tuple[Message, ...]:
        if task != self._spec.task(task.index):
            raise EnvError(f"row {task.index} of {source_name(self._spec)} is not the task: was the file changed?")
        self._random = BorrowedRandom(self._spec.seed * 1_000_003 + task.index)
        with self._random.lent(), boundary(EnvError, f"reset of {self._spec.name}"):
            self._object = self._spec.make_object()
            said = self._object.reset(**self._spec.row(task.index))
        if said is not None and not isinstance(said, str):
            raise EnvError(f"reset of {self._spec.name} returned {type(said).__name__}; only texts are supported")
        *before, last = self._spec.prompt(task.index)
        return (*before, dataclasses.replace(last, content=last.content + (said or "")))

    def tools(self) -> FunctionToolSet:
        """Return the object's public methods as tools; called after `reset`."""
        return _Methods(methods(self._object), self._random)

    def step(self, action: str) -> StepResult:
        if self._object is None:
            raise EnvError("step before reset, or after the episode's end")
        with self._random.lent(), boundary(EnvError, f"get_reward of {self._spec.name}"):
            reward = number(self._object.get_reward())
        self._object = None
        parts: Mapping[str, float] = {"env": reward}
        return StepResult((), reward, terminated=True, success=reward >= self._spec.solved_at, reward_parts=parts)

    def reference_answer(self) -> str:
        raise EnvError("environments of TRL have no reference answers")


class _Methods(FunctionToolSet):
    """Methods of an episode's object, called with the episode's random generators."""

    def __init__(self, functions: Sequence[Callable[..., Any]], random: BorrowedRandom) -> None:
        super().__init__(functions)
        self._random = random

    def run(self, spec: ToolSpec, arguments: Mapping[str, Any], limits: ToolLimits = DEFAULT_LIMITS) -> ToolResult:
        with self._random.lent():
            return super().run(spec, arguments, limits)


def methods(made: Any) -> list[Callable[..., Any]]:
    """Return an object's methods that are tools: the public ones of its class, but `reset` and `get_reward`."""
    names = [name for name, _ in inspect.getmembers(type(made), predicate=inspect.isfunction)]
    return [getattr(made, name) for name in names if name not in NO_TOOLS and not name.startswith("_")]
