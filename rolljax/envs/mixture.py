"""Several environments as one: a mixture of domains, each with a weight that sets its share of training.

`Mixture({"math": Domain(...), "code": Domain(...)})` is an environment. `Task.env` of its tasks is the name of their
domain, by which metrics, evaluations and teachers tell them apart. Each domain keeps the tasks, the split and the kind
of worker that its environment has alone.
"""

from __future__ import annotations

import dataclasses
import math
import pickle
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from rolljax.envs.base import Env, EnvSpec, StepResult
from rolljax.envs.catalog import make_spec
from rolljax.envs.run_limits import RunLimits
from rolljax.errors import ConfigError, EnvError, Range, check_fields
from rolljax.types import Key, Message, Task

NAME = re.compile(r"[\w.:-]+")
"""Valid names of domains: metrics contain them between slashes."""


@dataclasses.dataclass(frozen=True)
class Domain:
    """One environment of a mixture."""

    env: EnvSpec
    """Environment that provides the domain's tasks."""
    weight: Annotated[float, Range(low=0)] = 1.0
    """Weight of the domain; its share is this weight over the sum of all domains' weights, unless a rule sets the
    shares (`Phase.mixture`)."""
    num_tasks: Annotated[int, Range(low=0)] = 0
    """Number of different tasks to train on, from the first (0: all)."""
    max_turns: Annotated[int, Range(low=0)] = 0
    """Maximum number of turns in the domain's episodes, at most the environment's own maximum (0: the environment's
    maximum)."""
    when_dry: Literal["renew", "error"] = "renew"
    """Action when training has used all tasks of a finite domain (recorded data, every row once, or `num_tasks`).
    renew: the tasks are repeated in another order; error: the run ends."""

    def __post_init__(self) -> None:
        check_fields(self)
        if isinstance(self.env, Mixture):
            raise ConfigError("is a mixture already", setting="Domain.env", remedy="name its domains one by one")
        if self.max_turns > self.env.max_turns:
            raise ConfigError(
                f"is more than an episode of {self.env.name} can have ({self.env.max_turns})",
                setting="Domain.max_turns",
                value=self.max_turns,
                remedy="leave it out, or raise max_turns of the environment",
            )


@dataclasses.dataclass(frozen=True)
class Mixture(EnvSpec):
    """A mixture of domains.

    Every step trains each domain's exact share of its groups; fractions of a group are carried over to the following
    steps (docs/domains.md). Held-out tasks are shared out by the weights too. Task `index` is task
    `index // number of domains` of domain `index % number of domains`.
    """

    domains: Mapping[str, Domain | str]
    """Domains by name. Each is a `Domain`, or a reference (`'rg:chain_sum'`, see `envs/catalog.py`) to an environment
    that gets weight 1."""

    def __post_init__(self) -> None:
        if not self.domains:
            raise ConfigError("is empty", setting="Mixture.domains", value={}, remedy="name at least one @Domain()")
        for name in self.domains:
            if not NAME.fullmatch(name):
                raise ConfigError(
                    "is no name for a domain",
                    setting="Mixture.domains",
                    value=name,
                    remedy="letters, digits, and any of _ . : -",
                )
        object.__setattr__(self, "domains", {name: _domain(of) for name, of in self.domains.items()})
        if not sum(self.weights.values()):
            raise ConfigError("is 0 for every domain", setting="Domain.weight", value=0.0, remedy="1 is usual")

    @property
    def of(self) -> Mapping[str, Domain]:
        """The domains by name."""
        return self.domains  # type: ignore[return-value]  # references are gone since it was made

    @property
    def weights(self) -> dict[str, float]:
        """The configured weight of each domain."""
        return {name: domain.weight for name, domain in self.of.items()}

    @property
    def specs(self) -> Mapping[str, EnvSpec]:
        return {name: domain.env for name, domain in self.of.items()}

    @property
    def name(self) -> str:
        return "+".join(self.domains)

    @property
    def max_turns(self) -> int:
        return max(map(self._turns, self.of))

    @property
    def needs_worker(self) -> str:
        return next(filter(None, (spec.needs_worker for spec in self.specs.values())), "")

    @property
    def num_tasks(self) -> int | None:
        found = [spec.num_tasks for spec in self.specs.values()]
        return None if None in found else max(n or 0 for n in found) * len(found)

    def turns_of(self, task: Task) -> int:
        return self._turns(task.env) if task.env in self.domains else self.max_turns

    def _turns(self, name: str) -> int:
        domain = self.of[name]
        return domain.max_turns or domain.env.max_turns

    def task(self, index: int) -> Task:
        local, k = divmod(index, len(self.domains))
        name, domain = list(self.of.items())[k]
        return self.outer(name, domain.env.task(local))

    def outer(self, name: str, task: Task) -> Task:
        """Return the mixture's task for a task of the environment of domain `name`."""
        index = task.index * len(self.domains) + list(self.domains).index(name)
        return Task(name, index, task.content)

    def inner(self, task: Task) -> Task:
        """Return the task of the domain's environment for a task of the mixture.

        Raises:
          EnvError: the task belongs to no domain of this mixture.
        """
        if task.env not in self.domains:
            raise EnvError(f"task {task.index} is of {task.env!r}; the mixture has {', '.join(self.domains)}")
        return Task(self.of[task.env].env.name, task.index // len(self.domains), task.content)

    def make(self) -> MixtureEnv:
        return MixtureEnv(self)

    def warm(self) -> None:
        for spec in self.specs.values():
            spec.warm()

    def run_limits(self) -> RunLimits | None:
        found = {name: limits for name, spec in self.specs.items() if (limits := spec.run_limits())}
        return DomainRunLimits(found) if found else None

    def warnings(self) -> Sequence[str]:
        return [f"{name}: {text}" for name, spec in self.specs.items() for text in spec.warnings()]

    def columns_taken(self) -> str:
        return "; ".join(f"{name}: {text}" for name, spec in self.specs.items() if (text := spec.columns_taken()))

    def final_answer(self, task: Task, text: str) -> str | None:
        inner = self.inner(task)
        return self.of[task.env].env.final_answer(inner, text)

    def reference(self, task: Task) -> str | None:
        return self.of[task.env].env.reference(self.inner(task))

    def category(self, task: Task) -> str:
        inner = self.inner(task)
        return self.of[task.env].env.category(inner)

    def variants(self, task: Task) -> Sequence[Task]:
        forms = self.of[task.env].env.variants(self.inner(task))
        return [self.outer(task.env, form) for form in forms]

    def form(self, task: Task, key: Key) -> Task:
        return dataclasses.replace(task, content=self.of[task.env].env.form(self.inner(task), key).content)


def _domain(of: Domain | str) -> Domain:
    return Domain(make_spec(of)) if isinstance(of, str) else of


class MixtureEnv(Env):
    """An episode of its task's domain."""

    def __init__(self, spec: Mixture) -> None:
        self._spec = spec
        self._name = ""
        self._inner: Env | None = None

    def _open(self) -> Env:
        if self._inner is None:
            raise EnvError("the episode was not reset")
        return self._inner

    def reset(self, task: Task) -> tuple[Message, ...]:
        inner = self._spec.inner(task)
        self._make(task.env)
        return self._open().reset(inner)

    def _make(self, name: str) -> None:
        self.close()
        self._name, self._inner = name, self._spec.of[name].env.make()

    def step(self, action: str) -> StepResult:
        self._open().run_limit_s = self.run_limit_s
        return self._open().step(action)

    def reference_answer(self) -> str:
        return self._open().reference_answer()

    def rejected(self) -> str:
        return self._open().rejected()

    def snapshot(self) -> bytes:
        return pickle.dumps((self._name, self._open().snapshot()))

    def restore(self, state: bytes) -> None:
        name, inner = pickle.loads(state)
        self._make(name)
        self._open().restore(inner)

    def close(self) -> None:
        if self._inner is not None:
            self._inner.close()
        self._inner = None


class DomainRunLimits(RunLimits):
    """Time-outs of the domains that have any, each by its own settings."""

    def __init__(self, limits: Mapping[str, RunLimits]) -> None:
        self._limits = limits

    def limit_s(self, task: Task) -> float | None:
        limits = self._limits.get(task.env)
        return limits.limit_s(task) if limits else None

    def learn(self, task: Task, result: StepResult) -> None:
        if limits := self._limits.get(task.env):
            limits.learn(task, result)

    def state(self) -> dict[str, float]:
        return {task: s for limits in self._limits.values() for task, s in limits.state().items()}

    def restore(self, state: dict[str, float]) -> None:
        for limits in self._limits.values():  # tasks of other domains are never asked for
            limits.restore(state)


def shared_out(total: int, weights: Mapping[str, float]) -> dict[str, int]:
    """Divide `total` items in proportion to `weights`, by largest remainders; of equal remainders, the first in
    `weights` is first."""
    whole = sum(weights.values())
    exact = {name: total * weight / whole for name, weight in weights.items()}
    found = {name: math.floor(x + 1e-9) for name, x in exact.items()}
    order = sorted(exact, key=lambda name: found[name] - exact[name])
    for name in order[: total - sum(found.values())]:
        found[name] += 1
    return found
