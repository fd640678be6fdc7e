"""Math word problems with one number as the answer, from a local file in the format of GSM8K (Cobbe et al., "Training
Verifiers to Solve Math Word Problems", arXiv 2110.14168)."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Literal

from rolljax.envs.base import Env, EnvSpec, PureEnv, StepResult
from rolljax.envs.records import Record, Records
from rolljax.errors import ConfigError, DataError, EnvError
from rolljax.types import Message, Task

AnswerForm = Literal["any", "boxed", "hashes", "last"]
FORMS: tuple[AnswerForm, ...] = ("any", "boxed", "hashes", "last")
MAX_CHARS = 8192
"""Characters at the end of an answer in which its number is looked for."""
MAX_DIGITS = 60
"""Digits of a number; one with more is none."""


@dataclasses.dataclass(frozen=True)
class WordProblems(EnvSpec):
    r"""Problems from a JSONL file whose lines have a question and an answer that ends with `#### number`.

    The reward is 1 for the right number, however it is written: `1,200`, `$1200.00`, `2400/2` and `\frac{2400}{2}` are
    the same number; currency, percent signs and units are let pass. Gold is the recorded solution without its
    `<<2*3=6>>` annotations, with the number in the form that the policy is asked for.

    Every line is checked when the file is first used. Index i is problem i modulo their number.

    path: the file. question_key, answer_key: of its lines.
    answer: where the policy's number is read: the last `\boxed{...}`, behind the last `####`, or the last number of the
      text. `any` takes the first of these three that is there. A box or a `####` line that holds several different
      numbers is no answer.
    prompt: how a question is put; `{question}` is replaced.
    """

    path: str
    question_key: str = "question"
    answer_key: str = "answer"
    answer: AnswerForm = "any"
    prompt: str = "{question}\nThink step by step, then write the final number in \\boxed{}."

    def __post_init__(self) -> None:
        if "{question}" not in self.prompt:
            raise ConfigError(
                "does not contain {question}", setting="WordProblems.prompt", value=self.prompt, remedy="add {question}"
            )
        if self.answer not in FORMS:
            raise ConfigError(
                "is no place for an answer",
                setting="WordProblems.answer",
                value=self.answer,
                remedy=f"one of {', '.join(FORMS)}",
            )
        try:
            _ = self._records
        except ConfigError as e:
            e.setting = e.setting.replace("Records.", "WordProblems.").replace("prompt_key", "question_key")
            raise

    @property
    def _records(self) -> Records:
        return Records(self.path, self.question_key, self.answer_key)

    @property
    def name(self) -> str:
        return "word_problems"

    @property
    def num_problems(self) -> int:
        """Problems in the file."""
        return self._checked().num_records

    def _checked(self) -> Records:
        """The records, all of them looked through since the file last changed."""
        records = self._records
        path = Path(records.path)
        stat = path.stat() if path.is_file() else None
        _check(records, (stat.st_ino, stat.st_size, stat.st_mtime_ns) if stat else ())
        return records

    def problem(self, index: int) -> Problem:
        """Problem `index` modulo their number.

        Raises:
          DataError: a line of the file is none.
        """
        return _problem(self._checked().record(index))

    def task(self, index: int) -> Task:
        return Task(self.name, index, self.problem(index).question)

    def make(self) -> Env:
        return WordProblemsEnv(self)

    def bad_actions(self) -> Sequence[str]:
        deep, long = "\\boxed{" * 2000, "9" * 20_000
        return (*super().bad_actions(), deep, deep + "}" * 2000, long, f"#### {long}", "\\boxed{9**9**9}", "#### ١٢")


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """A question, the steps to its answer, and the answer."""

    question: str
    solution: str
    number: Fraction
    written: str


class WordProblemsEnv(PureEnv):
    """One problem, one answer."""

    def __init__(self, spec: WordProblems) -> None:
        self._spec = spec
        self._problem: Problem | None = None

    def reset(self, task: Task) -> tuple[Message, ...]:
        problem = self._spec.problem(task.index)
        if problem.question != task.content:
            raise EnvError(
                f"problem {task.index} of {self._spec.path} is not the task that was asked for: was the file changed?"
            )
        self._problem = problem
        return (Message("user", self._spec.prompt.replace("{question}", problem.question)),)

    def step(self, action: str) -> StepResult:
        problem = self._open()
        self._problem = None
        number = read_answer(action, self._spec.answer)
        right = number == problem.number
        return StepResult(
            (),
            float(right),
            terminated=True,
            success=right,
            reward_parts={"right": float(right)},
            metrics={"no_number_n": float(number is None)},
        )

    def gold(self) -> str:
        problem = self._open()
        last = f"#### {problem.written}" if self._spec.answer in ("hashes", "last") else f"\\boxed{{{problem.written}}}"
        return f"{problem.solution}\n{last}"

    def _open(self) -> Problem:
        if self._problem is None:
            raise EnvError("step before reset, or after the episode's end")
        return self._problem


# ---- lines ----------------------------------------------------------------------------------------------------------


def _problem(record: Record) -> Problem:
    if len(record.opening) != 1 or len(record.answers) != 1 or record.rejected is not None:
        raise DataError("is no question with one answer")
    steps, mark, written = record.answers[0].text.rpartition("####")
    if not mark:
        raise DataError("the answer has no line '#### number'")
    written = written.strip()
    number = the_number(written)
    if number is None:
        raise DataError(f"{written[:40]!r} behind #### is not a number")
    return Problem(record.opening[0].content, re.sub(r"<<[^<>]*>>", "", steps).strip(), number, written)


@functools.lru_cache(maxsize=64)
def _check(records: Records, state: tuple[int, ...]) -> None:
    """Look through the whole file, once in a process for each state of it."""
    for i in range(records.num_records):
        try:
            _problem(records.record(i))
        except DataError as e:
            raise DataError(f"{records.path}, line {_line(records.path, i)}: {e}") from None


def _line(path: str, record: int) -> int:
    """Number of the line that holds a record: lines of white space hold none."""
    with open(path, "rb") as f:
        return [number for number, line in enumerate(f, 1) if line.strip()][record]


# ---- numbers --------------------------------------------------------------------------------------------------------

_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
_NUMBER = re.compile(
    rf"(?P<sign>(?<![0-9A-Za-z)])-)?"
    rf"(?:(?P<whole>{_DIGITS}) (?=[0-9]{{1,9}}/[0-9]))?"
    rf"(?P<top>{_DIGITS}(?:\.[0-9]+)?|\.[0-9]+)(?: ?/ ?(?P<bottom>{_DIGITS}(?:\.[0-9]+)?))?"
)
_FRAC = re.compile(r"(-?)\\[dt]?frac\s?\{(-?)([0-9.,]{1,60})\}\s?\{([0-9.,]{1,60})\}")
_LATEX = re.compile(r"\\[,;:! ]|\\(?:text|mathrm|mathbf|textbf)\b|[{}$\\]")


def read_answer(text: str, form: AnswerForm) -> Fraction | None:
    """The number that a policy's answer gives, or None. Time is linear in the length of the text."""
    text = text[-MAX_CHARS:].replace("\u2212", "-")
    if form in ("any", "boxed"):
        boxed = _boxed(text)
        if boxed is not None or form == "boxed":
            return the_number(boxed or "")
    if form in ("any", "hashes"):
        _, mark, rest = text.rpartition("####")
        if mark or form == "hashes":
            return the_number(rest.strip().split("\n")[0]) if mark else None
    found = _found(text)
    return _value(found[-1]) if found else None


def the_number(text: str) -> Fraction | None:
    """The one number in a text: None where there is none, where there are different ones, or something to work out."""
    found = set() if re.search(r"[*^+]", text) else set(numbers(text))
    return found.pop() if len(found) == 1 and None not in found else None


def numbers(text: str) -> list[Fraction | None]:
    """All numbers in a text, in order; None for one with too many digits or a divisor of 0."""
    return [_value(m) for m in _found(text)]


def _found(text: str) -> list[re.Match[str]]:
    text = _LATEX.sub("", _FRAC.sub(r" \1\2\3/\4 ", text.replace("{,}", ",")))
    return list(_NUMBER.finditer(text))


def _value(found: re.Match[str]) -> Fraction | None:
    if len(found[0]) > MAX_DIGITS:
        return None
    whole, top, bottom = ((found[k] or "").replace(",", "") for k in ("whole", "top", "bottom"))
    if bottom and Fraction(bottom) == 0:
        return None
    value = Fraction(top) / (Fraction(bottom) if bottom else 1) + (Fraction(whole) if whole else 0)
    return -value if found["sign"] else value


def _boxed(text: str) -> str | None:
    r"""What stands in the last `\boxed{...}`; None where there is none that is closed."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    for i in range(start + len("\\boxed"), len(text)):
        depth += (text[i] == "{") - (text[i] == "}")
        if depth == 0:
            return text[start + len("\\boxed{") : i]
    return None
