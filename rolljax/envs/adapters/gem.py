"""Environments that follow the calls of GEM: `reset(seed) -> text, info` and `step(text) -> text, reward, terminated,
truncated, info`."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from rolljax.envs.adapters.border import MAX_ACTION_CHARS, BorrowedRandom, library
from rolljax.envs.base import Env, EnvSpec, Runs, StepResult
from rolljax.envs.pool.episode_runner import flag, number
from rolljax.errors import ConfigError, EnvError, Range, boundary, check_fields
from rolljax.types import Message, Task


@dataclasses.dataclass(frozen=True)
class Gem(EnvSpec):
    """One environment of GEM (https://github.com/axon-rl/gem), or any object that is called in the same way."""

    runs: ClassVar[Runs] = "process"

    id: str = "game:GuessTheNumber-v0-easy"
    """Id passed to `maker`, such as `game:GuessTheNumber-v0-easy`."""
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Further keyword arguments of `maker`."""
    maker: str = "gem.make"
    """Function that makes GEM's environment object; `gem.make` is the function of the package gem-llm."""
    success_reward: float = 1.0
    """Last reward from which on an episode counts as solved."""
    max_turns: Annotated[int, Range(low=1)] = 30
    """Turns after which the episode is cut."""
    seed: int = 0
    """Seed of the tasks; task i is `reset` with a seed derived from this seed and i."""

    def __post_init__(self) -> None:
        if "." not in self.maker:
            raise ConfigError("is no module.function", setting="Gem.maker", value=self.maker, remedy="like gem.make")
        if self.maker == "gem.make" and self.id.startswith(("rg:", "code:")):
            raise ConfigError(
                "is scored by executing the answer",
                setting="Gem.id",
                value=self.id,
                remedy="the environment rg:FAMILY" if self.id.startswith("rg:") else "the environment code:FILE",
            )
        check_fields(self)

    @property
    def name(self) -> str:
        return self.id

    def task(self, index: int) -> Task:
        """Return a task that is identified by its seed: the first observation need not show the hidden state."""
        return Task(self.name, index, f"{self.id} with seed {self.reset_seed(index)}")

    def make(self) -> Env:
        return GemEnv(self)

    def reset_seed(self, index: int) -> int:
        """Return the seed that `reset` receives for a task."""
        return (self.seed * 1_000_003 + index) % 2**31

    def make_object(self) -> Any:
        """Make the object with `reset` and `step`."""
        module, _, function = self.maker.rpartition(".")
        found = library(module, "gem-llm") if module == "gem" else importlib.import_module(module)
        return getattr(found, function)(self.id, **self.settings)


class GemEnv(Env):
    """One episode. GEM's environment uses the global random generators; each call runs with them set to the episode's
    state (`BorrowedRandom`)."""

    def __init__(self, spec: Gem) -> None:
        self._spec = spec
        self._object: Any = None
        self._over = True

    def reset(self, task: Task) -> tuple[Message, ...]:
        if task != self._spec.task(task.index):
            raise EnvError(f"task {task.index} is not one of {self._spec.id} with this seed")
        seed = self._spec.reset_seed(task.index)
        self._random = BorrowedRandom(seed)
        with self._random.lent(), boundary(EnvError, f"reset of {self._spec.id}"):
            self._object = self._spec.make_object()
            text, info = self._object.reset(seed=seed)
        self._turns, self._over = 0, False
        return (Message("user", framed(text, info)),)

    def step(self, action: str) -> StepResult:
        if self._over:
            raise EnvError("step before reset, or after the episode's end")
        self._turns += 1
        with self._random.lent(), boundary(EnvError, f"step of {self._spec.id}"):
            answer = self._object.step(action if len(action) <= MAX_ACTION_CHARS else "")
        result = step_result(answer, self._turns == self._spec.max_turns, self._spec.success_reward)
        self._over = result.terminated or result.truncated
        return result

    def reference_answer(self) -> str:
        raise EnvError("GEM has no reference actions")

    def close(self) -> None:
        if hasattr(self._object, "close"):
            self._object.close()


def framed(text: object, info: object) -> str:
    """Return an observation between the prefix and the suffix in `info`."""
    info = info if isinstance(info, Mapping) else {}
    return "\n".join(str(part) for part in (info.get("prefix"), text, info.get("suffix")) if part) or "Your move."


def step_result(answer: Any, last: bool, success_reward: float) -> StepResult:
    """Convert GEM's five values into a `StepResult`.

    An episode that reports both ends at once (GEM's single turns and turn limits do) is terminated. `success` is taken
    from `info` if it is there. last: our own turn limit is reached.
    """
    text, reward, terminated, truncated, info = answer
    terminated, cut, own = flag(terminated, "terminated"), flag(truncated, "truncated"), number(reward)
    truncated = not terminated and (cut or last)
    said = info.get("success") if isinstance(info, Mapping) else None
    success = own >= success_reward if said is None else flag(said, "success")
    over = terminated or truncated
    return StepResult(
        () if over else (Message("user", framed(text, info)),),
        own,
        terminated=terminated,
        truncated=truncated,
        success=over and success,
        reward_parts={"env": own},
    )
