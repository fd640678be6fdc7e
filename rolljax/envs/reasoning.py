"""Tasks of reasoning-gym: generated and scored by that library, one question and one answer each."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

from rolljax.envs.base import NUM_INDICES, Env, EnvSpec, StepResult
from rolljax.errors import ConfigError, EnvError, boundary
from rolljax.types import Message, Task

_EXECUTES = "its scorer executes the text of the answer"
_DIFFERS = "its tasks are not the same in every process, so a run could not be continued"
REFUSED: Mapping[str, str] = {
    **dict.fromkeys(
        "binary_matrix countdown intermediate_integration n_queens polynomial_multiplication puzzle24 "
        "simple_integration spiral_matrix string_insertion".split(),
        _EXECUTES,
    ),
    **dict.fromkeys(("isomorphic_strings", "ransom_note", "list_functions"), _DIFFERS),
    "codeio": "it executes programs while it makes its tasks",
    "game_of_life_halting": "its scorer takes any text for right",
    "coin_flip": "its scorer can be kept busy by a short answer",
    "acre": "it makes all of its tasks up front",
}
"""Families that are not offered, and why."""

SOLVED = 0.99
"""Scores from here on count as solved; many scorers give a little for any wrong text."""


@dataclasses.dataclass(frozen=True)
class ReasoningGym(EnvSpec):
    """One family of reasoning-gym (https://github.com/open-thought/reasoning-gym).

    family: its name there, such as `spell_backward` or `chain_sum`. config: its own settings (`{'min_word_len': 3}`).
    seed: of its generator. partial_credit: reward is the library's score; off: 1 for a solved task and 0 for all else.
    prompt: how a question is put to the policy; `{question}` is replaced.
    """

    family: str = "chain_sum"
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    seed: int = 0
    partial_credit: bool = False
    prompt: str = "{question}"

    def __post_init__(self) -> None:
        if self.family in REFUSED:
            raise ConfigError(
                f"is not offered: {REFUSED[self.family]}",
                setting="ReasoningGym.family",
                value=self.family,
                remedy="choose another family",
            )
        if "{question}" not in self.prompt:
            raise ConfigError(
                "does not contain {question}", setting="ReasoningGym.prompt", value=self.prompt, remedy="add {question}"
            )
        _dataset(self.family, self.config, self.seed)

    @property
    def name(self) -> str:
        return self.family

    @property
    def dataset(self) -> Any:
        """The library's lazy, indexable data set."""
        return _dataset(self.family, self.config, self.seed)

    def task(self, index: int) -> Task:
        with boundary(EnvError, f"reasoning-gym {self.family}, item {index}"):
            return Task(self.family, index, self.dataset[index]["question"])

    def make(self) -> Env:
        return ReasoningGymEnv(self)


class ReasoningGymEnv(Env):
    """Question, answer, score."""

    def __init__(self, spec: ReasoningGym) -> None:
        self._spec = spec
        self._entry: dict[str, Any] | None = None

    def reset(self, task: Task) -> tuple[Message, ...]:
        self._entry = self._spec.dataset[task.index]
        assert self._entry is not None
        if self._entry["question"] != task.content:
            raise EnvError(f"item {task.index} of {self._spec.family} is not the task that was asked for")
        return (Message("user", self._spec.prompt.replace("{question}", self._entry["question"])),)

    def step(self, action: str) -> StepResult:
        if self._entry is None:
            raise EnvError("step before reset, or after the episode's end")
        entry, self._entry = self._entry, None
        try:
            score = float(self._spec.dataset.score_answer(action, entry))
        except Exception:  # border: some scorers parse without looking; what they choke on is no answer
            score = 0.0
        solved = score >= SOLVED
        reward = score if self._spec.partial_credit else float(solved)
        return StepResult((), reward, terminated=True, success=solved, reward_parts={"score": score})

    def gold(self) -> str:
        if self._entry is None or self._entry["answer"] is None:
            raise EnvError(f"reasoning-gym gives no reference answer for {self._spec.family}")
        return str(self._entry["answer"])


def _frozen(value: Any) -> Any:
    if isinstance(value, Mapping):
        return tuple(sorted((k, _frozen(v)) for k, v in value.items()))
    return tuple(map(_frozen, value)) if isinstance(value, (list, tuple)) else value


_datasets: dict[Any, Any] = {}


def _dataset(family: str, config: Mapping[str, Any], seed: int) -> Any:
    key = (family, _frozen(config), seed)
    if key not in _datasets:
        _datasets[key] = _make_dataset(family, config, seed)
    return _datasets[key]


def _make_dataset(family: str, config: Mapping[str, Any], seed: int) -> Any:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if family not in DATASETS:
        near = difflib.get_close_matches(family, DATASETS, 3)
        raise ConfigError(
            "is not a reasoning-gym family",
            setting="ReasoningGym.family",
            value=family,
            remedy=f"did you mean {' or '.join(near)}?" if near else f"one of {', '.join(sorted(DATASETS))}",
        )
    fields = {f.name for f in dataclasses.fields(DATASETS[family][1])} - {"seed", "size"}
    for name in config:
        if name not in fields:
            near = difflib.get_close_matches(name, fields, 1)
            raise ConfigError(
                f"{name!r} is not a setting of reasoning-gym's {family}",
                setting="ReasoningGym.config",
                value=dict(config),
                remedy=(f"did you mean {near[0]}? " if near else "") + f"settings: {', '.join(sorted(fields))}",
            )
    try:
        return reasoning_gym.create_dataset(family, seed=seed, size=NUM_INDICES, **dict(config))
    except (AssertionError, TypeError, ValueError) as e:
        raise ConfigError(
            f"reasoning-gym refuses it: {e}",
            setting="ReasoningGym.config",
            value=dict(config),
            remedy="see the family's settings",
        ) from e
