"""Tasks of reasoning-gym: generated and scored by that library, one question and one answer each.

No text of an answer is executed. What the library would execute is read as a literal (`LITERALS`), computed exactly
(`ARITHMETIC`) or passed on only if it is a plain expression, and scored in a child process with limits (`ALGEBRA`).
Where the library accepts texts that are not answers, the answer must have the family's own form (`FORMS`).
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import importlib
import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, ClassVar

from rolljax.envs.adapters.border import BorrowedRandom
from rolljax.envs.adapters.expressions import exact, is_plain
from rolljax.envs.base import NUM_INDICES, Env, EnvSpec, PureEnv, Runs, StepResult
from rolljax.envs.bounded import TooMuch, or_default, scored
from rolljax.errors import ConfigError, EnvError, boundary, needed
from rolljax.types import Message, Task

REFUSED: Mapping[str, str] = {
    "codeio": "it makes its tasks by running programs, some of which give other results in every process",
    "composite": "it is a mixture of the others",
    "propositional_logic": "whatever follows from the premises is right: 'P ∨ Q' solves 80 % of its tasks",
}
"""Families of the library that are not offered, and the reasons."""

NUM_TASKS = {"acre": 1000, "word_ladder": 20_000}
"""Families that make all their tasks at the start, or refuse to make more; higher indices repeat the tasks."""

LITERALS = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
"""Families whose scorers execute an answer to see whether it is a list; here it is read as a Python literal instead."""

ARITHMETIC = frozenset({"countdown", "puzzle24"})
"""Families whose scorers execute the answer (puzzle24's even accepts any four numbers). They are scored here, with
exact arithmetic."""

ALGEBRA = frozenset({"simple_integration", "intermediate_integration", "polynomial_multiplication"})
"""Families whose scorers pass the answer to SymPy, which executes it and may never end. Here only plain expressions
reach SymPy, in a child process with limits."""

EXACT = frozenset({"game_of_life_halting"})
"""Families whose scorer accepts any text; here the answer must equal the reference answer."""

WHOLE = frozenset({"prime_factorization"})
"""Families whose scorer gives a partial score even to a copy of the question; here only a full score counts."""

SOLVED_AT: Mapping[str, float] = {"complex_arithmetic": 0.99, "polynomial_equations": 1 - 2e-5}
"""Families whose score falls with the distance from the right number, with the lowest score that counts as solved (a
rounding error). In other families only a full score counts."""

MAX_ANSWER_CHARS = 8192
"""Maximum length of an answer, or 4 times the length of the reference answer if that is more; longer answers are
wrong."""

_REAL = r"[-+]?(?:\d{1,40}(?:\.\d{0,40})?|\.\d{1,40})"
_MOVE = r"\d?[A-Za-z]w?[\d']{0,2}"
_SAID = r"[A-Za-z]+\s+is\s+an?\s+[A-Za-z]+"
FORMS: Mapping[str, re.Pattern[str]] = {
    name: re.compile(form, re.ASCII)
    for name, form in {
        "coin_flip": r"[-+]?[\d,.]{1,40}(?:[eE][-+]?\d{1,3})?(?:\s*/\s*[\d,]{1,40})?",
        "complex_arithmetic": r"[-+\d.,()ij*\s]{1,100}",
        "knights_knaves": rf"{_SAID}(?:[,;.\s]+(?:and\s+)?{_SAID})*\.?",
        "polynomial_equations": rf'(?:{_REAL}(?:\s*,\s*{_REAL})*)?|""',
        "rubiks_cube": rf"{_MOVE}(?:\s+{_MOVE})*",
        "rush_hour": r"[A-Z][-+]\d(?:[\s,]+[A-Z][-+]\d)*",
    }.items()
}
"""Required form of an answer, for families whose scorer accepts more and may then be wrong, hang or run out of
memory."""

_NOT_FINITE = re.compile(r"(?<![a-z])(?:nan|inf(?:inity)?)j?(?![a-z])", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class ReasoningGym(EnvSpec):
    """One family of reasoning-gym (https://github.com/open-thought/reasoning-gym)."""

    runs: ClassVar[Runs] = "process"

    family: str = "chain_sum"
    """Name of the family in reasoning-gym, such as `spell_backward` or `chain_sum`."""
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The family's own settings (`{'min_word_len': 3}`)."""
    seed: int = 0
    """Seed of the family's generator."""
    partial_credit: bool = False
    """Whether the reward is the library's score; if False, it is 1 for a solved task, else 0."""
    prompt: str = "{question}"
    """Template of the question to the policy; `{question}` is replaced."""

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
    def needs_worker(self) -> str:
        return "SymPy works on its answers" if self.family in ALGEBRA else ""

    @property
    def dataset(self) -> Any:
        """The library's lazy, indexable data set."""
        return _dataset(self.family, self.config, self.seed)

    def item(self, index: int) -> dict[str, Any]:
        """Return question, answer and metadata of a task from the library."""
        index %= NUM_TASKS.get(self.family, NUM_INDICES)
        with boundary(EnvError, f"reasoning-gym {self.family}, item {index}"):
            if self.family == "list_functions":  # one of its generators draws from the global random module
                with BorrowedRandom(self.seed + index).lent():
                    return self.dataset[index]
            entry = self.dataset[index]
            if "Integral(" in str(entry["answer"]):
                entry["answer"] = _integrated(entry["answer"], entry["metadata"]["variable"])
            return entry

    def task(self, index: int) -> Task:
        return Task(self.family, index, self.item(index)["question"])

    def final_answer(self, task: Task, text: str) -> str | None:
        return " ".join(text.split()) or None

    def reference(self, task: Task) -> str | None:
        answer = self.item(task.index)["answer"]
        return None if answer is None else str(answer)

    def warm(self) -> None:
        self.task(0)

    def make(self) -> Env:
        return ReasoningGymEnv(self)


class ReasoningGymEnv(PureEnv):
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
        entry, self._entry = self._entry, None
        found = score_answer(self._spec.family, self._spec.dataset, action, entry)
        score = 0.0 if isinstance(found, TooMuch) else found
        solved = is_solved(self._spec.family, score)
        return StepResult(
            (),
            score if self._spec.partial_credit else float(solved),
            terminated=True,
            success=solved,
            reward_parts={"score": score},
            metrics={"scorer_limit_n": float(isinstance(found, TooMuch))} if self._spec.needs_worker else {},
        )

    def reference_answer(self) -> str:
        if self._entry is None or self._entry["answer"] is None:
            raise EnvError(f"reasoning-gym gives no reference answer for {self._spec.family}")
        return str(self._entry["answer"])


def is_solved(family: str, score: float) -> bool:
    """Return whether an answer of this score is right."""
    return score >= SOLVED_AT.get(family, 1.0)


def score_answer(family: str, dataset: Any, answer: str, entry: Mapping[str, Any]) -> float | TooMuch:
    """Return the score of an answer, 0 to 1. An answer that a scorer cannot read is wrong.

    Raises:
      EnvError, InfraError: it could not be scored, and not by the answer's doing.
    """
    reference = entry["answer"]
    if not _has_form(family, answer, reference):
        return 0.0
    if family in EXACT:
        return float(answer.strip() == reference)
    if family in ARITHMETIC:
        return float(_reaches(answer, entry["metadata"]))
    if family == "coin_flip":
        return float(_is_chance(answer, entry["metadata"]["rational"]))
    if family in ALGEBRA:
        return scored(lambda text: _library(dataset, text, entry), answer, str(reference)) if is_plain(answer) else 0.0
    found = _library(dataset, answer, entry)
    return float(found == 1.0) if family in WHOLE else found


def _has_form(family: str, answer: str, reference: str | None) -> bool:
    if len(answer) > max(MAX_ANSWER_CHARS, 4 * len(str(reference))):
        return False
    if family in FORMS and not FORMS[family].fullmatch(answer.strip()):
        return False
    numbers = reference is not None and any(c.isdigit() for c in str(reference))
    return not (numbers and _NOT_FINITE.search(answer))


def _library(dataset: Any, answer: str, entry: Mapping[str, Any]) -> float:
    found = or_default(lambda: float(dataset.score_answer(answer, entry)), 0.0)
    return found if 0 <= found <= 1 else 0.0


def _reaches(answer: str, metadata: Mapping[str, Any]) -> bool:
    found = exact(answer)
    target = metadata.get("target", 24)
    return found is not None and sorted(found[1]) == sorted(metadata["numbers"]) and abs(found[0] - target) < 1e-6


def _is_chance(answer: str, right: Mapping[str, int]) -> bool:
    """Return whether the answer is within 1e-4 of the right probability and within a thousandth of it."""
    try:
        said = Fraction(answer.replace(",", "").replace(" ", ""))
    except (ValueError, ZeroDivisionError):
        return False
    p = Fraction(right["numerator"], right["denominator"])
    return abs(said - p) <= min(Fraction(1, 10_000), p / 1000)


def _integrated(answer: str, variable: str) -> str:
    """Evaluate a reference answer that the library left as an integral."""
    sympy: Any = importlib.import_module("sympy")
    names = {name: sympy.Symbol(name) for name in (variable, "C")}
    return str(sympy.parse_expr(answer, local_dict=names).doit())


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
    with needed("reasoning_gym", "ReasoningGym", install="reasoning-gym"):
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
    """Return the data set after fixes: its order is the same in all processes, and the scorers of `LITERALS` read only
    literals."""
    if family in LITERALS:
        vars(importlib.import_module(type(dataset).__module__))["eval"] = ast.literal_eval
    if family in ("isomorphic_strings", "ransom_note"):
        dataset.letters = _Letters(sorted(dataset.letters))
    if family == "polynomial_multiplication":
        monomials = dataset._get_monomials
        dataset._get_monomials = lambda rng: sorted(monomials(rng), key=str)
    return dataset
