"""Rewards by rule: answers compared with reference answers, lengths, formats, repetition, languages.

Every rule takes time linear in an answer, or runs in a process where a bad answer can only end its own check.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import unicodedata
from collections import Counter
from typing import Annotated, Any, ClassVar, Literal

from rolljax.envs.base import EnvSpec, Runs
from rolljax.envs.data import answers, verifier
from rolljax.envs.pool import PoolConfig
from rolljax.envs.questions import Questions, is_same
from rolljax.envs.text import END_OF_THINKING, after_thinking, linear_pattern, read_json
from rolljax.errors import Checked, ConfigError, EnvError, Range, check_fields
from rolljax.rewards.base import Reward, RewardContext
from rolljax.rewards.workers import Rule, Said
from rolljax.types import Task

MAX_JSON_CHARS = 65_536
Script = Literal["latin", "han", "cyrillic", "arabic", "devanagari", "greek", "hangul", "hebrew", "kana", "thai"]
_SCRIPTS: dict[str, tuple[str, ...]] = {
    "latin": ("LATIN",), "han": ("CJK",), "cyrillic": ("CYRILLIC",), "arabic": ("ARABIC",),
    "devanagari": ("DEVANAGARI",), "greek": ("GREEK",), "hangul": ("HANGUL",), "hebrew": ("HEBREW",),
    "kana": ("HIRAGANA", "KATAKANA"), "thai": ("THAI",),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Answer(Rule):
    r"""1 if the last answer equals the task's reference answer in any notation, which also counts as solved; else 0.
    Formulas are compared by math-verify, in a separate process with limits; an answer that exceeds them is wrong."""

    runs: ClassVar[Runs] = "process"

    where: str = "any"
    """Place in the answer from which its final answer is read, as in `Questions.answer_in`."""
    pattern: str = ""
    """Instead of `where`, an RE2 regular expression whose first group is the final answer (its last match counts)."""
    field: str = ""
    """Instead of `where`, a field of the JSON object that makes up the answer, apart from its thinking."""
    answer_key: str = ""
    """The column with the right answer; empty: the reference answer."""
    timeout_s: Annotated[float, Range(above=0)] = 30.0
    """Longest time in seconds that the check of an answer may take."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.pattern:
            linear_pattern(self.pattern, "Answer.pattern")
        if self.pattern and self.field:
            raise ConfigError(
                "has no effect with pattern", setting="Answer.field", value=self.field, remedy="leave one of them out"
            )
        if self.where not in answers.ANSWER_FORMATS and answers.SLOT not in self.where:
            raise ConfigError(
                "is no way to find an answer",
                setting="Answer.where",
                value=self.where,
                remedy=f"one of {', '.join(answers.ANSWER_FORMATS)}, or a text with {answers.SLOT}",
            )

    @property
    def name(self) -> str:
        return "right"

    @property
    def pool(self) -> PoolConfig:
        return PoolConfig(where="process", workers=2, step_s=self.timeout_s, memory_gib=0.0)

    def check(self, around: RewardContext) -> None:
        recorded(around.env, around.env.task(0), self.answer_key)

    def warm(self, env: EnvSpec) -> None:
        env.warm()
        verifier.warm()

    def reward(self, env: EnvSpec, task: Task, said: Said) -> Reward:
        reference = recorded(env, task, self.answer_key)
        found = self._find(said.text, reference)
        right = found is not None and is_same(reference, found) is True
        return Reward(float(right), {"no_answer": float(found is None)}, right)

    def _find(self, text: str, reference: str) -> str | None:
        if self.pattern:
            found = list(linear_pattern(self.pattern, "Answer.pattern").finditer(text[-answers.MAX_CHARS :]))
            return found[-1].group(1) if found else None
        if self.field:
            value = json_field(text, self.field)
            return None if value is None else str(value)
        return answers.find(text, self.where, number=answers.is_number(reference))


@dataclasses.dataclass(frozen=True)
class LengthBand(Rule):
    """1 for answers whose length is inside a band, falling linearly to 0 on both sides of it (LiveThinking, arXiv
    2510.07685): `max(0, 1 - d / eps)`, where d is the distance of the length from the band `[low L, high L]` in tokens,
    and L the reference length.

    Combine it with `compose.Gate`, so that only right answers get it: otherwise short wrong answers are rewarded.
    """

    ref_tok: Annotated[float, Range(low=0)] = 0.0
    """Reference length L in tokens, the same for all tasks."""
    ref_key: str = ""
    """Instead of `ref_tok`, the dataset column with the reference length L (the length of the answer that was
    imitated)."""
    low: Annotated[float, Range(low=0)] = 0.3
    """Lower end of the band, as a share of the reference length L."""
    high: float = 0.6
    """Upper end of the band, as a share of the reference length L."""
    eps_frac: Annotated[float, Range(above=0)] = 0.25
    """The distance `eps` from the band at which the reward is 0, as a share of L."""
    count: Literal["all", "thinking"] = "all"
    """`all`: every sampled token; `thinking`: those before the last `</think>`, by their share of the characters."""

    def __post_init__(self) -> None:
        check_fields(self)
        Range(low=self.low).check(self, "high")
        if bool(self.ref_tok) == bool(self.ref_key):
            raise ConfigError(
                "is what a band refers to, unless ref_key is",
                setting="LengthBand.ref_tok",
                value=self.ref_tok,
                remedy="set one of them",
            )

    @property
    def name(self) -> str:
        return "length"

    def check(self, around: RewardContext) -> None:
        self._ref_tok(around.env, around.env.task(0))

    def reward(self, env: EnvSpec, task: Task, said: Said) -> Reward:
        ref, num_tok = self._ref_tok(env, task), float(sum(said.num_tok))
        if self.count == "thinking":
            num_tok = sum(n * _thinking_share(text) for n, text in zip(said.num_tok, said.texts, strict=True))
        outside = max(self.low * ref - num_tok, num_tok - self.high * ref, 0.0)
        return Reward(max(0.0, 1 - outside / (self.eps_frac * ref)), {"outside_tok": outside, "counted_tok": num_tok})

    def _ref_tok(self, env: EnvSpec, task: Task) -> float:
        if not self.ref_key:
            return self.ref_tok
        columns = row(env, task, "LengthBand.ref_key")
        try:
            ref = float(columns[self.ref_key])
        except (KeyError, TypeError, ValueError):
            ref = 0.0
        if not (math.isfinite(ref) and ref > 0):
            raise EnvError(f"the row of task {task.index} has no length in {self.ref_key!r}")
        return ref


@dataclasses.dataclass(frozen=True)
class Format(Rule):
    """1 where every answer has the required form, else 0."""

    pattern: str = ""
    """A regular expression of RE2 that all of an answer must match (`.` is any character)."""
    json_fields: tuple[str, ...] = ()
    """Instead of `pattern`, fields of the single JSON object that an answer must consist of, apart from its
    thinking."""

    def __post_init__(self) -> None:
        if bool(self.pattern) == bool(self.json_fields):
            raise ConfigError(
                "must be set, or json_fields, but not both",
                setting="Format.pattern",
                value=self.pattern,
                remedy="set one of them",
            )
        if self.pattern:
            linear_pattern(self.pattern, "Format.pattern")

    @property
    def name(self) -> str:
        return "format"

    def reward(self, env: EnvSpec, task: Task, said: Said) -> Reward:
        return Reward(float(all(map(self._has_form, said.texts))))

    def _has_form(self, text: str) -> bool:
        if self.pattern:
            return linear_pattern(self.pattern, "Format.pattern").fullmatch(text) is not None
        value = json_object(text)
        return value is not None and all(name in value for name in self.json_fields)


@dataclasses.dataclass(frozen=True)
class Repetition(Checked, Rule):
    """A penalty for repetition: minus the share of an answer's word n-grams that occurred earlier in the answer, from 0
    (no repetition) to nearly -1. The most repetitive answer of an episode counts."""

    ngram: Annotated[int, Range(low=1)] = 3
    """Words of an n-gram."""
    free: Annotated[float, Range(low=0, below=1)] = 0.0
    """Share of repeated n-grams without a penalty; the penalty grows linearly above it, to 1 at a share of 1."""

    @property
    def name(self) -> str:
        return "repetition"

    def reward(self, env: EnvSpec, task: Task, said: Said) -> Reward:
        share = max((repeated_share(text, self.ngram) for text in said.texts), default=0.0)
        return Reward(-max(0.0, share - self.free) / (1 - self.free) + 0.0, {"share": share})


@dataclasses.dataclass(frozen=True)
class Language(Rule):
    """The share of an answer's letters that are of the wanted scripts; 1 where it has no letters."""

    scripts: tuple[Script, ...] = ("latin",)
    """One or more of latin, han, cyrillic, arabic, devanagari, greek, hangul, hebrew, kana, thai."""
    at_least: Annotated[float | None, Range(above=0, high=1)] = None
    """Share of letters from which on the reward is 1; below it the reward is 0. None: the reward is the share
    itself."""

    def __post_init__(self) -> None:
        unknown = [s for s in self.scripts if s not in _SCRIPTS]
        if unknown or not self.scripts:
            raise ConfigError(
                "names no scripts that are known",
                setting="Language.scripts",
                value=self.scripts,
                remedy=f"one or more of {', '.join(_SCRIPTS)}",
            )
        check_fields(self)

    @property
    def name(self) -> str:
        return "language"

    def reward(self, env: EnvSpec, task: Task, said: Said) -> Reward:
        share = script_share("".join(said.texts), self.scripts)
        return Reward(share if self.at_least is None else float(share >= self.at_least), {"share": share})


# ---- what rules read ------------------------------------------------------------------------------------------------


def row(env: EnvSpec, task: Task, setting: str) -> Any:
    """Return the row of a task, with all its columns.

    Raises:
      ConfigError: the environment has no rows.
    """
    if not isinstance(env, Questions):
        raise ConfigError(
            f"reads a column, but the tasks of {env.name} have none",
            setting=setting,
            remedy="an environment of envs.questions",
        )
    return env.record(task.index)


def recorded(env: EnvSpec, task: Task, key: str = "") -> str:
    """Return the task's reference answer: column `key` of its row, else the environment's own.

    Raises:
      ConfigError: there is none.
    """
    if key:
        value = row(env, task, "Answer.answer_key").get(key)
        reference = answers.split_recorded(str(value))[1] if value is not None else ""
    else:
        reference = env.question(task.index).answer if isinstance(env, Questions) else ""
    if not reference:
        raise ConfigError(
            f"finds no recorded answer of task {task.index} of {env.name}",
            setting="Answer.answer_key",
            value=key,
            remedy="an environment of envs.questions, and the column with its answers; compose.Gate and "
            "rewards.environment take what other environments say",
        )
    return reference


def json_object(text: str) -> dict[str, Any] | None:
    """Return the JSON object that the text after the thinking consists of, possibly in a code block; None if it is
    none."""
    text = after_thinking(text).strip()
    if text.startswith("```") and text.endswith("```"):
        text = text[3:-3].removeprefix("json").strip()
    if len(text) > MAX_JSON_CHARS:
        return None
    try:
        value = read_json(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def json_field(text: str, name: str) -> str | None:
    """Return a field of `json_object` as a text; None if it is missing or neither a text nor a number."""
    value = (json_object(text) or {}).get(name)
    return str(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else None


def repeated_share(text: str, n: int) -> float:
    """Return the share of a text's word n-grams that occurred in it before; 0 for a text without n-grams."""
    words = text.split()
    grams = Counter(zip(*(itertools.islice(words, i, None) for i in range(n)), strict=False))
    total = sum(grams.values())
    return 1 - len(grams) / total if total else 0.0


def script_share(text: str, scripts: tuple[str, ...]) -> float:
    """Return the share of a text's letters that are of some scripts; 1 where it has no letters."""
    letters = Counter(c for c in text if c.isalpha())
    names = tuple(name for script in scripts for name in _SCRIPTS[script])
    total = sum(letters.values())
    of_them = sum(n for c, n in letters.items() if unicodedata.name(c, "").startswith(names))
    return of_them / total if total else 1.0


def _thinking_share(text: str) -> float:
    thinking, mark, _ = text.rpartition(END_OF_THINKING)
    return len(thinking + mark) / len(text) if mark else float(bool(text))
