"""The customer service tasks of tau-bench, from a checkout of it, with a user who follows a script."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import pickle
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from rolljax.envs.adapters.border import MAX_ACTION_CHARS
from rolljax.envs.adapters.expressions import is_plain
from rolljax.envs.base import Env, EnvSpec, Runs, StepResult
from rolljax.envs.pool.episode_runner import flag, number
from rolljax.envs.text import read_json
from rolljax.errors import ConfigError, EnvError, Range, boundary, check_fields
from rolljax.types import Message, Task

SPLITS = {"retail": ("test", "train", "dev"), "airline": ("test",)}
DONE = "DONE"
CONSENT = f"Yes, please do all that I asked for. Say {DONE} when there is nothing left to do."
"""The scripted user's constant answer."""
FORMAT = (
    'To use a tool, answer with nothing but a JSON object: {"name": NAME, "arguments": {...}}. Anything else is said '
    f"to the user. When all is done, tell the user, with the word {DONE} in it."
)
_FENCE = re.compile(r"(?:<tool_call>|```(?:json)?)?\s*(\{.*\})\s*(?:</tool_call>|```)?", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class TauBench(EnvSpec):
    """Tasks of tau-bench (Yao et al. 2024, arXiv:2406.12045; https://github.com/sierra-research/tau-bench).

    The policy reads the rules, the tools and what the user wants; it answers with tool calls as JSON, or with what it
    says to the user. There is no language model for the user: the script tells everything in its first message and
    then agrees to everything; the episode ends when the policy says DONE or transfers the user. The reward is
    tau-bench's: 1 when the data base is as the reference actions leave it and the user got the required information.
    Doing nothing is right where they change nothing (7 of retail's 115 test tasks, 19 of airline's 50).
    """

    runs: ClassVar[Runs] = "process"

    path: str = ""
    """Path of a tau-bench checkout, the folder that contains `tau_bench`; nothing is downloaded. The retail domain has
    the splits test (115 tasks), train (500) and dev (20), the airline domain has test (50); an index beyond the last
    task starts again from the first."""
    domain: Literal["retail", "airline"] = "retail"
    """Domain of the tasks: `retail` or `airline`."""
    split: str = "test"
    """Split of the domain's tasks, such as `test`."""
    max_turns: Annotated[int, Range(low=1)] = 40
    """Messages of the policy before the episode is cut."""

    def __post_init__(self) -> None:
        if not (Path(self.path) / "tau_bench" / "envs" / "base.py").is_file():
            raise ConfigError(
                "is no checkout of tau-bench",
                setting="TauBench.path",
                value=self.path,
                remedy="git clone https://github.com/sierra-research/tau-bench and give its folder",
            )
        if self.split not in SPLITS.get(self.domain, ()):
            raise ConfigError(
                f"tau-bench's {self.domain} has no such tasks",
                setting="TauBench.split",
                value=self.split,
                remedy="; ".join(f"{d}: {', '.join(s)}" for d, s in SPLITS.items()),
            )
        check_fields(self)

    @property
    def name(self) -> str:
        return f"tau_{self.domain}"

    def task(self, index: int) -> Task:
        tasks = _shared(self.path, self.domain, self.split).tasks
        number = index % len(tasks)
        return Task(self.name, index, f"{self.split} {number}: {tasks[number].instruction}")

    def warm(self) -> None:
        self.make().reset(self.task(0))

    def make(self) -> Env:
        return TauBenchEnv(self)


class _ScriptedUser:
    """A simulated user who tells all wishes in the first message, then agrees to everything."""

    def reset(self, instruction: str | None = None) -> str:
        return str(instruction)

    def step(self, content: str) -> str:
        return "###STOP###" if DONE in content else CONSENT

    def get_total_cost(self) -> float:
        return 0.0


class TauBenchEnv(Env):
    """One conversation."""

    def __init__(self, spec: TauBench) -> None:
        self._spec = spec
        self._world: Any = None
        self._over = True

    def reset(self, task: Task) -> tuple[Message, ...]:
        if task != self._spec.task(task.index):
            raise EnvError(f"task {task.index} is not one of {self._spec.name}, {self._spec.split}")
        with boundary(EnvError, f"reset of {self._spec.name}"):
            self._world = _fresh(self._spec.path, self._spec.domain, self._spec.split)
            wants = self._world.reset(task_index=task.index % len(self._world.tasks)).observation
        self._turns, self._over, self._next = 0, False, 0
        tools = json.dumps([tool["function"] for tool in self._world.tools_info])
        rules = f"{self._world.wiki}\n\n# Tools\n{tools}\n\n{FORMAT}"
        return (Message("system", rules), Message("user", wants))

    def step(self, action: str) -> StepResult:
        if self._over:
            raise EnvError("step before reset, or after the episode's end")
        self._turns += 1
        name, arguments = _read(action)
        with boundary(EnvError, f"step of {self._spec.name}"):
            said, reward, done = self._act(name, arguments)
        if self._next < len(self._references()) and self._references()[self._next] == (name, arguments):
            self._next += 1
        self._over = done or self._turns == self._spec.max_turns
        success = done and reward >= 1
        return StepResult(
            () if self._over else (Message("user" if name == "respond" else "tool", said),),
            reward,
            terminated=done,
            truncated=self._over and not done,
            success=success,
            reward_parts={"data_base_and_answers": reward},
            metrics={"tool_calls_n": float(name != "respond"), "tool_errors_n": float(said.startswith("Error"))},
        )

    def reference_answer(self) -> str:
        """Return the next reference action, or at the end the information that the user must get."""
        if self._over:
            raise EnvError("reference_answer before reset, or after the episode's end")
        references = self._references()
        if self._next < len(references):
            name, arguments = references[self._next]
            return json.dumps({"name": name, "arguments": arguments})
        return f"{DONE}. {', '.join(self._world.task.outputs)}"

    def _references(self) -> list[tuple[str, dict[str, Any]]]:
        return [(a.name, a.kwargs) for a in self._world.task.actions if a.name != "respond"]

    def _act(self, name: str, arguments: dict[str, Any]) -> tuple[str, float, bool]:
        if name == "calculate" and not is_plain(str(arguments.get("expression", "")), (), names=False):
            return "Error: not an expression of numbers", 0.0, False  # the tool executes its argument
        action = sys.modules["tau_bench.types"].Action(name=name, kwargs=arguments)
        answer = self._world.step(action)
        return str(answer.observation), number(answer.reward), flag(answer.done, "done")


def _read(text: str) -> tuple[str, dict[str, Any]]:
    """Return the tool that an answer calls and its arguments; an answer without a call is a message to the user."""
    text = text.strip() if len(text) <= MAX_ACTION_CHARS else ""
    found = _FENCE.fullmatch(text)
    if found:
        try:
            call = read_json(found[1])
        except ValueError:
            call = None
        if isinstance(call, dict) and isinstance(call.get("name"), str):
            arguments = call.get("arguments", {})
            if isinstance(arguments, dict) and call["name"] != "respond":
                return call["name"], arguments
    return "respond", {"content": text}


@functools.cache
def _classes(path: str) -> Any:
    """Import tau-bench's two worlds from the checkout. A stub replaces its language model client: the simulated user
    who would need it is never made."""
    if "litellm" not in sys.modules:
        stub = types.ModuleType("litellm")
        vars(stub)["completion"] = None
        sys.modules["litellm"] = stub
    folder = str(Path(path).resolve())
    sys.path.insert(0, folder)
    try:
        with boundary(ConfigError, f"tau-bench cannot be imported from {path}"):
            import tau_bench.envs.airline.env as airline  # type: ignore[import-not-found]
            import tau_bench.envs.retail.env as retail  # type: ignore[import-not-found]
    finally:
        sys.path.remove(folder)
        if vars(sys.modules["litellm"]).get("completion") is None:
            del sys.modules["litellm"]
    if not str(retail.__file__).startswith(folder):
        raise ConfigError(f"tau-bench is already imported from {retail.__file__}", setting="TauBench.path", value=path)
    for module in (retail, airline):
        module.load_data = _copies(module.load_data)
    return {"retail": retail.MockRetailDomainEnv, "airline": airline.MockAirlineDomainEnv}


def _copies(load: Callable[[], Any]) -> Callable[[], Any]:
    """Return a loader that reads the database from its files once per process."""
    data = functools.cache(lambda: pickle.dumps(load(), pickle.HIGHEST_PROTOCOL))
    return lambda: pickle.loads(data())


@functools.cache
def _shared(path: str, domain: str, split: str) -> Any:
    """Return a world to read tasks from."""
    return _fresh(path, domain, split)


def _fresh(path: str, domain: str, split: str) -> Any:
    """Return a new tau-bench environment with the scripted user. It compares databases by the hash of their JSON, which
    takes a tenth of the time of tau-bench's own comparison."""
    world = _classes(path)[domain](user_strategy="human", task_split=split, task_index=0)
    world.user = _ScriptedUser()
    world.get_data_hash = lambda: hashlib.sha256(
        json.dumps(world.data, sort_keys=True, default=sorted).encode()
    ).hexdigest()
    return world
