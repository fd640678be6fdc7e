"""Tasks of reasoning-gym: generated and scored by that library, one question and one answer each.

The text of an answer is never executed: where the library would do so, something else stands in its place (`LITERALS`,
`ARITHMETIC`, `ALGEBRA`).
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import importlib
import re
from collections.abc import Mapping
from typing import Any, ClassVar

from rolljax.envs.adapters.border import BorrowedRandom, in_worker
from rolljax.envs.adapters.expressions import exact, is_plain
from rolljax.envs.base import NUM_INDICES, Env, EnvSpec, Runs, StepResult
from rolljax.errors import ConfigError, EnvError, boundary
from rolljax.types import Message, Task

SOLVED = 0.99
"""Scores from here on count as solved; many scorers give a little for any wrong text."""

REFUSED: Mapping[str, str] = {
    "codeio": "it makes its tasks by running programs, some of which give other results in every process",
    "composite": "it is a mixture of the others",
}
"""Names there that are not offered, and why."""

LITERALS = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
"""Their scorers execute an answer to see whether it is a list; here it is read as a Python literal instead."""

ARITHMETIC = frozenset({"countdown", "puzzle24"})
"""Their scorers execute the answer, and puzzle24's takes any four numbers for right. Scored here, exactly."""

ALGEBRA = frozenset({"simple_integration", "intermediate_integration", "polynomial_multiplication"})
"""Their scorers hand the answer to SymPy, which executes it: only plain expressions get there, and only in a worker."""

EXACT = frozenset({"game_of_life_halting"})
"""The library's scorer takes any text for right; here the answer must equal the reference."""

NUM_TASKS = {"acre": 1000, "word_ladder": 20_000}
"""Families that make all their tasks at the start, or refuse to make more; indices beyond begin again."""

MAX_ANSWER_CHARS = 8192
"""A longer answer is no answer, unless the reference is long itself (4 times its length is then the limit)."""

_NUMBER = re.compile(r"\s*[-+]?[\d,.]{1,40}([eE][-+]?\d{1,3})?(\s*/\s*[\d,]{1,40})?\s*", re.ASCII)


@dataclasses.dataclass(frozen=True)
class ReasoningGym(EnvSpec):
    """One family of reasoning-gym (https://github.com/open-thought/reasoning-gym).

    family: its name there, such as `spell_backward` or `chain_sum`. config: its own settings (`{'min_word_len': 3}`).
    seed: of its generator. partial_credit: reward is the library's score; off: 1 for a solved task and 0 for all else.
    prompt: how a question is put to the policy; `{question}` is replaced.
    """

    runs: ClassVar[Runs] = "process"

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

    def item(self, index: int) -> dict[str, Any]:
        """Question, answer and metadata of a task, as the library makes them."""
        index %= NUM_TASKS.get(self.family, NUM_INDICES)
        with boundary(EnvError, f"reasoning-gym {self.family}, item {index}"):
            if self.family == "list_functions":  # one of its generators draws from the global random module
                with BorrowedRandom(self.seed + index).lent():
                    return self.dataset[index]
            return self.dataset[index]

    def task(self, index: int) -> Task:
        return Task(self.family, index, self.item(index)["question"])

    def warm(self) -> None:
        self.task(0)

    def make(self) -> Env:
        return ReasoningGymEnv(self)


class ReasoningGymEnv(Env):
    """Question, answer, score."""

    def __init__(self, spec: ReasoningGym) -> None:
        self._spec = spec
        self._entry: dict[str, Any] | None = None

    def reset(self, task: Task) -> tuple[Message, ...]:
        self._entry = self._spec.item(task.index)
        if self._entry["question"] != task.content:
            raise EnvError(f"item {task.index} of {self._spec.family} is not the task that was asked for")
        return (Message("user", self._spec.prompt.replace("{question}", self._entry["question"])),)

    def step(self, action: str) -> StepResult:
        if self._entry is None:
            raise EnvError("step before reset, or after the episode's end")
        if self._spec.family in ALGEBRA and not in_worker():
            raise EnvError(f"answers to {self._spec.family} are scored in a worker process only: they can keep it busy")
        entry, self._entry = self._entry, None
        score = _score(self._spec, action, entry)
        solved = score >= SOLVED
        reward = score if self._spec.partial_credit else float(solved)
        return StepResult((), reward, terminated=True, success=solved, reward_parts={"score": score})

    def gold(self) -> str:
        if self._entry is None or self._entry["answer"] is None:
            raise EnvError(f"reasoning-gym gives no reference answer for {self._spec.family}")
        return str(self._entry["answer"])


def _score(spec: ReasoningGym, answer: str, entry: dict[str, Any]) -> float:
    """0 to 1. An answer that a scorer cannot read is wrong."""
    family, reference = spec.family, entry["answer"]
    if len(answer) > max(MAX_ANSWER_CHARS, 4 * len(str(reference))):
        return 0.0
    if family in EXACT:
        return float(answer.strip() == reference)
    if family in ARITHMETIC:
        found = exact(answer)
        numbers = entry["metadata"]["numbers"]
        target = entry["metadata"].get("target", 24)
        return float(found is not None and sorted(found[1]) == sorted(numbers) and abs(found[0] - target) < 1e-6)
    if family in ALGEBRA and not is_plain(answer):
        return 0.0
    if family == "coin_flip" and not _NUMBER.fullmatch(answer):  # others make numbers of a billion digits
        return 0.0
    try:
        score = float(spec.dataset.score_answer(answer, entry))
    except Exception:  # border: some scorers parse without looking; what they choke on is no answer
        return 0.0
    return score if 0 <= score <= 1 else 0.0


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
    size = NUM_TASKS.get(family, NUM_INDICES)
    try:
        return _mended(family, reasoning_gym.create_dataset(family, seed=seed, size=size, **dict(config)))
    except (AssertionError, TypeError, ValueError) as e:
        raise ConfigError(
            f"reasoning-gym refuses it: {e}",
            setting="ReasoningGym.config",
            value=dict(config),
            remedy="see the family's settings",
        ) from e


class _Letters(tuple[str, ...]):
    """Letters in one order everywhere, where the library keeps them in a set."""

    def __sub__(self, others: Any) -> _Letters:
        return _Letters(letter for letter in self if letter not in others)


def _mended(family: str, dataset: Any) -> Any:
    """The data set with what would differ between processes put in order, and without `eval`."""
    if family in LITERALS:
        vars(importlib.import_module(type(dataset).__module__))["eval"] = ast.literal_eval
    if family in ("isomorphic_strings", "ransom_note"):
        dataset.letters = _Letters(sorted(dataset.letters))
    if family == "polynomial_multiplication":
        monomials = dataset._get_monomials
        dataset._get_monomials = lambda rng: sorted(monomials(rng), key=str)
    return dataset
