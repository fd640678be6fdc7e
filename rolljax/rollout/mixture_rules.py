"""Rules for the shares of a mixture's domains: by step, by results, or learned.

A `MixtureRule` is a setting (`Phase.mixture`); without one the shares are the domains' weights. A rule keeps what it
has learned in a memory of plain JSON, which checkpoints save. For any rule, `shares.StepPlan` turns shares into whole
groups.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from rolljax.errors import Checked, ConfigError, Range, check_fields
from rolljax.rollout.shares import Shares, normalised
from rolljax.trainer.paper import Stated
from rolljax.types import Group

Memory = Mapping[str, Any]
"""The learned state of a rule, as JSON; empty at the beginning of a phase."""


@dataclasses.dataclass(frozen=True)
class Perplexities:
    """Perplexities of one domain's validation set: exp of the mean cross-entropy of its reference tokens."""

    student: float
    teacher: float


def ratios_of(names: Iterable[str], found: Mapping[str, Perplexities]) -> dict[str, float]:
    """Return the student's perplexity over the teacher's, by domain."""
    return {name: found[name].student / found[name].teacher for name in names}


class MixtureRule(abc.ABC):
    """Settings of a rule. Subclasses are frozen dataclasses."""

    @property
    def measure_every(self) -> int:
        """Steps between two measurements of perplexities, the first before the phase's first step (0: no
        measurements)."""
        return 0

    @property
    def validation(self) -> int:
        """Tasks of each domain that perplexities are taken of."""
        return 0

    def check(self, names: Sequence[str]) -> None:  # noqa: B027  # most work with any
        """Raise `ConfigError` if this rule cannot work with these domains."""

    @abc.abstractmethod
    def shares(self, weights: Shares, step: int, memory: Memory) -> Shares:
        """Return the shares of step `step` of the phase.

        Args:
          weights: of the domains, adding up to 1.
        """

    def learn(self, weights: Shares, memory: Memory, outcomes: Mapping[str, Sequence[bool]]) -> Memory:
        """Return the memory after a step.

        Args:
          outcomes: by domain, for each of the step's trajectories without a failure, whether it solved its task.
        """
        return memory

    def measured(self, weights: Shares, memory: Memory, found: Mapping[str, Perplexities]) -> Memory:
        """Return the memory after a new measurement of perplexities."""
        return memory


@dataclasses.dataclass(frozen=True)
class Scheduled(MixtureRule):
    """Weights by step."""

    at: Mapping[int, Mapping[str, float]]
    """Weights of all domains by the step of the phase from which on they hold; step 0 must be included."""
    between: Literal["step", "linear"] = "linear"
    """Rule for the weights between two of the listed steps. step: the weights of the earlier step; linear: linear
    interpolation to the next step."""
    every: Annotated[int, Range(low=0)] = 0
    """Steps between two measurements of perplexities, for the metrics only (0: no measurements); only for `Distill`."""
    tasks: Annotated[int, Range(low=1)] = 500
    """Number of tasks of each domain on which perplexities are measured."""

    def __post_init__(self) -> None:
        check_fields(self)
        if 0 not in self.at or min(self.at) < 0:
            raise ConfigError(
                "does not say what holds from step 0 on",
                setting="Scheduled.at",
                value=dict(self.at),
                remedy="{0: {'math': 0.9, 'code': 0.1}, 100: {'math': 0.5, 'code': 0.5}}",
            )

    @property
    def measure_every(self) -> int:
        return self.every

    @property
    def validation(self) -> int:
        return self.tasks if self.every else 0

    def measured(self, weights: Shares, memory: Memory, found: Mapping[str, Perplexities]) -> Memory:
        return {"ratios": ratios_of(weights, found)}

    def check(self, names: Sequence[str]) -> None:
        for step, weights in self.at.items():
            check_domains("Scheduled.at", weights, names)
            if missing := [name for name in names if name not in weights]:
                raise ConfigError(
                    f"says nothing of {', '.join(missing)} at step {step}",
                    setting="Scheduled.at",
                    value=dict(weights),
                    remedy="give every domain a weight; 0 leaves it out",
                )
            normalised(weights)

    def shares(self, weights: Shares, step: int, memory: Memory) -> Shares:
        before = max(s for s in self.at if s <= step)
        after = min((s for s in self.at if s > step), default=None)
        first = normalised(self.at[before])
        if after is None or self.between == "step":
            return {name: first[name] for name in weights}
        last, done = normalised(self.at[after]), (step - before) / (after - before)
        return normalised({name: (1 - done) * first[name] + done * last[name] for name in weights})


@dataclasses.dataclass(frozen=True)
class Curriculum(Checked, MixtureRule):
    """More of the domains whose tasks are neither too hard nor too easy: a domain's weight counts by how near its pass
    rate is to a target."""

    target: Annotated[float, Range(low=0, high=1)] = 0.5
    """Pass rate that is wanted."""
    width: Annotated[float, Range(above=0)] = 0.2
    """Distance from `target` at which the pass rate lowers a domain's score by the factor e^-1/2."""
    floor: Annotated[
        float, Range(above=0, high=1, remedy="without a floor a domain that is left out never comes back")
    ] = 0.3
    """Fraction of a step that is divided by the weights, regardless of the pass rates, so that no domain starves."""
    memory: Annotated[float, Range(low=0, below=1)] = 0.9
    """Weight of the old value in a domain's running pass rate; the first pass rate of a domain is taken as it is."""

    def shares(self, weights: Shares, step: int, memory: Memory) -> Shares:
        score = {
            name: weight * math.exp(-0.5 * ((memory.get(name, self.target) - self.target) / self.width) ** 2)
            for name, weight in weights.items()
        }
        whole = math.fsum(score.values())
        if whole < 1e-9:
            return weights
        return {name: self.floor * weights[name] + (1 - self.floor) * score[name] / whole for name in weights}

    def learn(self, weights: Shares, memory: Memory, outcomes: Mapping[str, Sequence[bool]]) -> Memory:
        now = {name: sum(solved) / len(solved) for name, solved in outcomes.items() if solved}
        mean = {
            name: rate if name not in memory else self.memory * memory[name] + (1 - self.memory) * rate
            for name, rate in now.items()
        }
        return {**memory, **mean}


@dataclasses.dataclass(frozen=True)
class Ddk(Checked, MixtureRule):
    """DDK (arXiv 2407.16154): in distillation, larger shares of the domains in which the student lags its teacher most.

    Every `every` steps both models' perplexities `l` are measured on the same held-out tasks of each of the N domains.
    The first shares are `softmax(l_student / l_teacher)`; later ones `r <- a psi / sum psi + (1 - a) / N` with
    `psi = r exp(l_student / l_teacher)`. The domains' own weights have no effect.
    """

    every: Annotated[int, Range(low=1)] = 1000
    """Steps between two measurements."""
    tasks: Annotated[int, Range(low=1)] = 500
    """Number of tasks of each domain in a measurement."""
    smoothing: Annotated[float, Range(above=0, below=1, remedy="0.5 is usual; 1 lets domains starve")] = 0.5
    """Smoothing factor a in the formula of the shares, `r <- a psi / sum psi + (1 - a) / N`."""
    max_ratio: Annotated[float, Range(above=1)] = 10.0
    """A larger ratio counts as this one (the paper: none; e^ratio overflows)."""

    paper: ClassVar[Mapping[str, Stated]] = {
        "every": Stated(1000, "arXiv 2407.16154, section 4.1: the distillation interval"),
        "tasks": Stated(500, "arXiv 2407.16154, section 4.1: samples of each domain's validation set"),
        "smoothing": Stated(0.5, "arXiv 2407.16154, section 4.1: alpha"),
    }

    @property
    def measure_every(self) -> int:
        return self.every

    @property
    def validation(self) -> int:
        return self.tasks

    def shares(self, weights: Shares, step: int, memory: Memory) -> Shares:
        return {name: memory["shares"][name] for name in weights}

    def measured(self, weights: Shares, memory: Memory, found: Mapping[str, Perplexities]) -> Memory:
        ratios = ratios_of(weights, found)
        gain = {name: math.exp(min(ratio, self.max_ratio)) for name, ratio in ratios.items()}
        if not memory:
            return {"shares": normalised(gain), "ratios": ratios}
        psi = normalised({name: memory["shares"][name] * gain[name] for name in weights})
        even = (1 - self.smoothing) / len(weights)
        return {"shares": {name: self.smoothing * psi[name] + even for name in weights}, "ratios": ratios}


class MixtureShares:
    """The shares of a phase: a rule and what it has learned.

    Args:
      weights: of the domains. rule: None: the weights stay.
    """

    def __init__(self, weights: Mapping[str, float], rule: MixtureRule | None) -> None:
        self._weights, self._rule = normalised(weights), rule
        self._memory: Memory = {}
        self._measured_at = -1

    def shares(self, step: int) -> Shares:
        """Return the current shares of a step of the phase."""
        if self._rule is None:
            return self._weights
        return self._rule.shares(self._weights, step, self._memory)

    def asks(self, step: int) -> int:
        """Return the number of tasks of each domain whose perplexities the rule needs before `step` begins; 0: none."""
        every = self._rule.measure_every if self._rule else 0
        return self._rule.validation if self._rule and every and step % every == 0 and step > self._measured_at else 0

    def measured(self, step: int, found: Mapping[str, Perplexities]) -> None:
        """Record the requested perplexities."""
        assert self._rule is not None
        self._memory, self._measured_at = self._rule.measured(self._weights, self._memory, found), step

    def learn(self, groups: Sequence[Group]) -> None:
        """Take in how a step's groups went."""
        outcomes: dict[str, list[bool]] = {name: [] for name in self._weights}
        for group in groups:
            outcomes[group.task.env] += [t.success for t in group.trajectories if t.status != "failed"]
        if self._rule is not None:
            self._memory = self._rule.learn(self._weights, self._memory, outcomes)

    def row(self) -> dict[str, float]:
        """Return the metrics: the ratios of perplexities if a rule measures them."""
        return {f"domain/{name}/perplexity_ratio": r for name, r in self._memory.get("ratios", {}).items()}

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as a JSON value."""
        return {"memory": dict(self._memory), "measured_at": self._measured_at}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`."""
        self._memory, self._measured_at = dict(state["memory"]), state["measured_at"]


def check_domains(setting: str, names: Sequence[str] | Mapping[str, object], known: Sequence[str]) -> None:
    """Raise `ConfigError` if a name is not that of a domain of the run."""
    for name in names:
        if name not in known:
            raise ConfigError(
                f"names {name!r}, which is no domain of this run",
                setting=setting,
                value=list(names),
                remedy=f"its domains are {', '.join(known)}",
            )
