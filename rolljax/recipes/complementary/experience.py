"""An environment that shows experiences to half of a group, and a tool that asks for one (arXiv 2603.17621)."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from rolljax.envs.base import Env, EnvSpec, Runs, StepResult
from rolljax.envs.run_limits import RunLimits
from rolljax.envs.tools.base import ToolSet
from rolljax.envs.tools.functions import FunctionToolSet
from rolljax.errors import EnvError, Range, check_fields
from rolljax.recipes.complementary.bank import Bank, Experience, Retrieval, banks_of
from rolljax.recipes.complementary.key_rules import KeyRules
from rolljax.types import EVAL_STREAM, Key, Message, Task

PART = "experience"
"""Part of the reward with the number of the experience that an episode was shown, 0 for none. It is for the record, and
for `Grpo.split_by`."""
NEWEST = 10**9
_FORM = "with experience "


@dataclasses.dataclass(frozen=True)
class WithExperience(EnvSpec):
    """`env`, with an experience after the opening text of every second member of a group.

    A task has its experience from the bank of its round; which round that is follows from its position in the task
    stream, so that a resumed run shows the same one. Dynamic sampling and spare episodes change these positions, so a
    run with experiences has neither.
    """

    env: EnvSpec = KeyRules()
    """The environment itself."""
    bank: str = ""
    """Path of the file of the bank; empty: there is no bank."""
    shown: Literal["half", "all", "none"] = "half"
    """The episodes that are shown an experience: those of the siblings with odd numbers, all, or none. An evaluation
    with one attempt has siblings 0 alone."""
    prompts_per_round: Annotated[int, Range(low=1)] = NEWEST
    """Number of tasks of a round, at whose end the bank changes."""
    retrieval: Retrieval = Retrieval()
    """Settings of retrieval."""
    seed: int = 0
    """Seed of the demotion of recently used experiences."""

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def runs(self) -> Runs:  # type: ignore[override]  # it depends on the settings
        """The value of `env`."""
        return self.env.runs

    @property
    def needs_worker(self) -> str:
        return self.env.needs_worker

    @property
    def name(self) -> str:
        return self.env.name

    @property
    def max_turns(self) -> int:
        return self.env.max_turns

    @property
    def num_tasks(self) -> int | None:
        return self.env.num_tasks

    def task(self, index: int) -> Task:
        return self.env.task(index)

    def form(self, task: Task, key: Key) -> Task:
        round_ = NEWEST if key.stream == EVAL_STREAM else key.prompt_index // self.prompts_per_round
        shown = self.shown == "all" or (self.shown == "half" and key.sibling % 2 == 1)
        address = f"{self.seed} {key.stream} {key.prompt_index}"
        content = {"task": task.content, "id": task.id, "round": round_, "shown": shown, "address": address}
        return dataclasses.replace(task, content=_FORM + json.dumps(content))

    def reference(self, task: Task) -> str | None:
        return self.env.reference(task)

    def final_answer(self, task: Task, text: str) -> str | None:
        return self.env.final_answer(task, text)

    def warm(self) -> None:
        self.env.warm()

    def run_limits(self) -> RunLimits | None:
        return self.env.run_limits()

    def make(self) -> Env:
        return ExperienceEpisode(self)

    def bad_actions(self) -> Sequence[str]:
        return self.env.bad_actions()


class ExperienceEpisode(Env):
    """An episode of `WithExperience.env`, and the experience that it is shown."""

    def __init__(self, spec: WithExperience) -> None:
        self._spec = spec
        self._inner = spec.env.make()
        self._form: dict[str, Any] = {}
        self._shown: Experience | None = None
        self._reported = False

    def reset(self, task: Task) -> tuple[Message, ...]:
        is_form = task.content.startswith(_FORM)
        self._form = json.loads(task.content.removeprefix(_FORM)) if is_form else {"task": task.content, "shown": False}
        messages = self._inner.reset(dataclasses.replace(task, content=self._form["task"]))
        self._reported = False
        self._shown = self._find(messages[-1].content) if self._form["shown"] else None
        if self._shown is None:
            return messages
        last = dataclasses.replace(messages[-1], content=f"{messages[-1].content}\n{self._shown.text}")
        return (*messages[:-1], last)

    def _find(self, query: str) -> Experience | None:
        bank = bank_at(Path(self._spec.bank), self._form["round"]) if self._spec.bank and "id" in self._form else Bank()
        return bank.retrieve(query, self._spec.retrieval, self._form.get("address", ""), self._form.get("id", ""))

    def tools(self) -> ToolSet:
        """Return the tool `search_and_ask`: `ToolEnv(WithExperience(...))` gives it to the policy."""
        return FunctionToolSet((self.search_and_ask,))

    def search_and_ask(self, query: str) -> str:
        """Ask for an experience of earlier episodes.

        Args:
          query: the situation.
        """
        found = self._find(query)
        return found.text if found else "no experience fits"

    def step(self, action: str) -> StepResult:
        self._inner.run_limit_s = self.run_limit_s
        result = self._inner.step(action)
        if self._reported:
            return result
        self._reported = True
        number = float(self._shown.number if self._shown else 0)
        return dataclasses.replace(result, reward_parts={**result.reward_parts, PART: number})

    def reference_answer(self) -> str:
        return self._inner.reference_answer()

    def rejected(self) -> str:
        return self._inner.rejected()

    def close(self) -> None:
        self._inner.close()


def bank_at(path: Path, round_: int) -> Bank:
    """Return the bank of a round from a file; of a later round than the file has, its last one. An empty bank if there
    is no file, or if it begins later.

    Raises:
      EnvError: the file cannot be read.
    """
    try:
        size = path.stat().st_size if path.exists() else 0
    except OSError as e:
        raise EnvError(f"the bank {path} cannot be read: {e}") from e
    found = [bank for bank in _banks(path, size) if bank.round <= round_]
    return max(found, key=lambda bank: bank.round, default=Bank())


@functools.lru_cache(maxsize=4)
def _banks(path: Path, size: int) -> list[Bank]:
    """Return the banks of a file, which only grows. size: of the file, in bytes."""
    return banks_of(path)
