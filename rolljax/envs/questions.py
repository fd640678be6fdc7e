r"""Questions with checkable answers from custom files, and custom rewards.

{"question": "What is 6 * 7?", "answer": "6 * 7 = 42\n#### 42"}                                     (GSM8K)
{"problem": "Solve $x^2 = 8$ for $x > 0$.", "solution": "... \\boxed{2\\sqrt{2}}"}                     (MATH)
{"prompt": [{"role": "user", "content": "..."}], "reward_model": {"ground_truth": "34"}}             (verl, DAPO)
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from rolljax.envs.base import EnvSpec, PureEnv, Runs, StepResult
from rolljax.envs.bounded import TooMuch
from rolljax.envs.data import answers, columns, messages, verifier
from rolljax.envs.data.columns import Columns, Role
from rolljax.envs.data.rows import BadRow, InMemoryRows, Row, Rows, in_memory
from rolljax.envs.data.table import BadRows, Table, Taken, check_source, source_name, table
from rolljax.errors import ConfigError, EnvError, boundary
from rolljax.types import Message, Task

Reward = Callable[[str, str, Row], float | Mapping[str, float]]
"""`reward(prompt, answer, record)`: the text of the message that was answered, the policy's answer, and the row
with all its columns. Returns the reward, or its parts by name, which are added up."""

USUAL_PROMPTS = (("prompt", "question", "problem"), ("messages", "conversations", "instruction", "query", "input"))
RIVALS = {"prompt": "messages"}
USUAL_SOLUTIONS = (("solution",),)
USUAL_ANSWERS = (
    ("reward_model.ground_truth", "ground_truth", "final_answer", "expected_answer", "reference_answer", "gold_answer"),
    ("answer",),
    ("solution", "target", "label", "output", "completion", "response"),
)
"""Usual names of columns, in tiers, and pairs of names of which neither is preferred (`columns.Role`)."""
BOXED = "{question}\nThink step by step, then write the final answer in \\boxed{}."


@dataclasses.dataclass(frozen=True)
class Questions(EnvSpec):
    r"""Questions with answers from local files: JSON Lines (also gzip), a JSON array, Parquet, Arrow, or a folder of
    one of these, such as `datasets.save_to_disk` writes.

    The reference answer follows the last `####`, else is in the last `\boxed{...}`, else is all of the text; the part
    before it is a worked solution, which `reference_answer` gives. The reward is 1 for the same answer in any notation,
    and 0 for any other: numbers are compared exactly (`1,200`, `$1200.00`, `\frac{2400}{2}`), formulas by math-verify.
    Text of the policy is parsed in worker processes, and an answer that keeps the verifier busy for too long is wrong.

    Every row is checked when the files are first used. Index i is record i modulo their number.
    """

    runs: ClassVar[Runs] = "process"

    path: str = ""
    """A file, a folder, a pattern (`data/train-*.parquet`), or the name of a file that comes with rolljax."""
    records: InMemoryRows | Sequence[Row] | None = None
    """The rows themselves, as dicts, instead of a path."""
    prompt_key: str = ""
    """Column of the prompt; dots reach into objects. Empty: found by its usual names (`USUAL_PROMPTS`). A prompt is a
    text or messages, also as JSON text; a final assistant message is dropped."""
    answer_key: str = ""
    """Column of the answer; dots reach into objects. Empty: found by its usual names (`USUAL_ANSWERS`)."""
    solution_key: str = ""
    """Column of the solution; dots reach into objects. Empty: found by its usual names (`USUAL_SOLUTIONS`). Solutions
    may be missing."""
    prompt: str | None = None
    """Template of the question; `{question}` is replaced. None: `BOXED` for prompts that are texts; prompts that are
    messages stay unchanged."""
    system: str = ""
    """A system message, instead of the recorded one."""
    answer_in: str = "any"
    """Place from which the policy's answer is read. `boxed`: a box; `last`: the last number; `full`: the whole text; a
    text with `{answer}`, such as `Answer: {answer}` or `<answer>{answer}</answer>`: the part at `{answer}`; `any`: the
    first that exists of a box, a line after `####`, a line after `Answer:`, the text if it is one line without words,
    the last number."""
    reward: Reward | None = None
    """A custom function (`Reward`) that replaces the check of the answer; rows then need no answer. An exception or a
    result that is not finite is a fault of the environment, not a reward. The recorded answer is then the full text of
    its column, and `reference_answer` returns that text unchanged, after the solution if there is one."""
    solved_at: float = 1.0
    """Reward from which on a task counts as solved."""
    bad_rows: BadRows = "error"
    """Handling of rows that are not a question with an answer: `error` raises an error that names them, `skip` leaves
    them out with a warning."""
    domain: str = "questions"
    """Name of these tasks in metrics."""
    category_key: str = ""
    """Column of the question's category, for the tables of an evaluation; empty: none."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "records", in_memory(self.records))
        check_source(self, "Questions")
        if self.prompt is not None and "{question}" not in self.prompt:
            raise ConfigError(
                "does not contain {question}", setting="Questions.prompt", value=self.prompt, remedy="add {question}"
            )
        where, formats = self.answer_in, answers.ANSWER_FORMATS
        if where not in formats and (answers.SLOT not in where or not where.split(answers.SLOT)[0].strip()):
            raise ConfigError(
                "is no way to find an answer",
                setting="Questions.answer_in",
                value=where,
                remedy=f"one of {', '.join(answers.ANSWER_FORMATS)}, or a text with a fixed part before {{answer}}",
            )

    @property
    def name(self) -> str:
        return self.domain

    @property
    def needs_worker(self) -> str:
        return "" if self.reward else "its verifier can be kept busy by an answer"

    @property
    def num_questions(self) -> int:
        """Number of questions in the files."""
        return len(self._table())

    @property
    def num_tasks(self) -> int | None:
        return self.num_questions

    def warnings(self) -> Sequence[str]:
        complaint = self._table().complaint
        return (complaint,) if complaint else ()

    def question(self, index: int) -> Question:
        """Return question `index` modulo their number.

        Raises:
          DataError: a row is no question. ConfigError: columns are not found.
        """
        return self._table().record(index)

    def record(self, index: int) -> Row:
        """Return the row of a question with all its columns."""
        return self._table().row(index)

    def location(self, index: int) -> str:
        return self._table().location(index)

    def columns_taken(self) -> str:
        return self._table().columns_taken

    def task(self, index: int) -> Task:
        return Task(self.name, index, self.question(index).content)

    def warm(self) -> None:
        self._table()
        if self.reward is None:
            verifier.warm()

    def make(self) -> QuestionsEnv:
        return QuestionsEnv(self)

    def final_answer(self, task: Task, text: str) -> str | None:
        if self.reward is not None:
            return None
        number = answers.is_number(self.question(task.index).answer)
        found_answer = answers.find(text, self.answer_in, number=number)
        return None if found_answer is None else answers.canonical(found_answer)

    def reference(self, task: Task) -> str | None:
        return self.question(task.index).answer or None

    def category(self, task: Task) -> str:
        if not self.category_key:
            return ""
        return str(columns.value(self.record(task.index), self.category_key))

    def bad_actions(self) -> Sequence[str]:
        if self.reward is not None:  # only the author of the function knows which actions are bad
            return ()
        deep, long = "\\boxed{" * 2000, "9" * 20_000
        return (*super().bad_actions(), deep, deep + "}" * 2000, long, f"#### {long}", "\\boxed{9**9**9}", "#### ١٢")

    def _table(self) -> Table[Question]:
        return table(self, "Questions", self._reader)

    def _reader(self, rows: Rows, path: str) -> tuple[Callable[[Row], Question], Taken]:
        names = Columns.of(rows)
        asked = columns.need(Role("Questions.prompt_key", self.prompt_key, USUAL_PROMPTS, RIVALS), names, path)
        role = Role("Questions.answer_key", self.answer_key, _without(USUAL_ANSWERS, asked))
        answered = (columns.need if self.reward is None else columns.find)(role, names, path)
        role = Role("Questions.solution_key", self.solution_key, _without(USUAL_SOLUTIONS, answered or ""))
        solved = columns.find(role, names, path)
        taken = {"prompt": asked, "answer": answered, "solution": solved, "category": self.category_key}
        return (lambda row: self._read(row, asked, answered, solved)), taken

    def _read(self, row: Row, asked: str, answered: str | None, solved: str | None) -> Question:
        initial_messages, content = _opening(columns.value(row, asked), asked, self.prompt)
        if self.system:
            initial_messages = (
                Message("system", self.system),
                *initial_messages[initial_messages[0].role == "system" :],
            )
        if answered is None:
            return Question(initial_messages, content, "", "")
        recorded = _recorded(columns.value(row, answered), answered)
        if self.reward is not None:  # only the user's function knows the form of an answer
            solution, answer = "", recorded
        else:
            solution, answer = answers.split_recorded(recorded)
        if not answer or len(answer) > answers.MAX_ANSWER_CHARS and self.reward is None:
            raise BadRow(f"{answered} holds no final answer of at most {answers.MAX_ANSWER_CHARS} characters")
        if self.answer_in == "last" and self.reward is None and not answers.is_number(answer):
            raise BadRow(f"{answered} is {answer[:40]!r}, no number, which Questions.answer_in = 'last' asks for")
        if solved is not None and isinstance(worked := columns.value(row, solved), str):
            solution = worked.strip()
        return Question(initial_messages, content, solution, answer)


@dataclasses.dataclass(frozen=True, slots=True)
class Question:
    """Return the prompt, the question's identity, the steps to the answer, and the answer; the last two
    are empty where none is recorded."""

    initial_messages: tuple[Message, ...]
    content: str
    solution: str
    answer: str


class QuestionsEnv(PureEnv):
    """One question, one answer."""

    def __init__(self, spec: Questions) -> None:
        self._spec = spec
        self._index = -1
        self._question: Question | None = None

    def reset(self, task: Task) -> tuple[Message, ...]:
        question = self._spec.question(task.index)
        if question.content != task.content:
            raise EnvError(
                f"question {task.index} of {source_name(self._spec)} is not the task that was asked for: was the file "
                "changed?"
            )
        self._index, self._question = task.index, question
        return question.initial_messages

    def step(self, action: str) -> StepResult:
        question = self._open()
        self._question = None
        if self._spec.reward is not None:
            return self._rewarded(self._spec.reward, question, action)
        found_answer = answers.find(action, self._spec.answer_in, number=answers.is_number(question.answer))
        right = is_same(question.answer, found_answer) if found_answer is not None else False
        return StepResult(
            (),
            float(right is True),
            terminated=True,
            success=right is True,
            reward_parts={"right": float(right is True)},
            metrics={"no_answer_n": float(found_answer is None), "unverified_n": float(isinstance(right, TooMuch))},
        )

    def reference_answer(self) -> str:
        question, where = self._open(), self._spec.answer_in
        if not question.answer:
            raise EnvError(f"{source_name(self._spec)} has no recorded answers: they can be rewarded, not imitated")
        if where == "full":
            return question.answer
        if self._spec.reward is not None:
            worked, answer = question.solution, question.answer
            return worked if answer in worked else f"{worked}\n{answer}".lstrip("\n")
        if answers.find(question.solution, "boxed" if where == "any" else where) == question.answer:
            return question.solution
        if answers.SLOT in where:
            last = where.replace(answers.SLOT, question.answer)
        else:
            last = f"#### {question.answer}" if where == "last" else f"\\boxed{{{question.answer}}}"
        return f"{question.solution}\n{last}".lstrip("\n")

    def _rewarded(self, reward: Reward, question: Question, action: str) -> StepResult:
        """Compute the reward with the user's own function, which must return finite numbers."""
        spec, own = self._spec, getattr(reward, "__name__", type(reward).__name__)
        name = f"{reward.__module__}.{getattr(reward, '__qualname__', own)}"
        with boundary(EnvError, f"{name} for {spec.location(self._index)}"):
            value = reward(question.initial_messages[-1].content, action, spec.record(self._index))
        parts = value if isinstance(value, Mapping) else {own: value}
        for part, number in parts.items():
            if not _is_finite(number):
                raise EnvError(f"{name} gave {part} = {number!r} for {spec.location(self._index)}: not a finite number")
        parts = {str(part): float(number) for part, number in parts.items()}
        total = sum(parts.values())
        return StepResult((), total, terminated=True, success=total >= spec.solved_at, reward_parts=parts)

    def _open(self) -> Question:
        if self._question is None:
            raise EnvError("step before reset, or after the episode's end")
        return self._question


def is_same(reference: str, answer: str) -> bool | TooMuch:
    """Return whether two final answers are equal, in any notation.

    Plain rules decide if they can, otherwise math-verify in a forked child. `TooMuch`: the answer exceeded the limits
    on time or memory, which makes it wrong.
    """
    plainly = answers.compare(reference, answer)
    if plainly is not None:
        return plainly
    for want, got in answers.to_verify(reference, answer):
        plainly = answers.compare(want, got)
        verdict = verifier.equal(want, got) if plainly is None else plainly
        if verdict is not True:
            return verdict
    return True


def is_right(text: str, reference: str, where: str = "any") -> bool:
    """Return whether a policy's text gives the recorded `reference_answer`, as the default reward does.

    where: as `Questions.answer_in`.
    """
    found_answer = answers.find(text, where, number=answers.is_number(reference))
    return found_answer is not None and is_same(reference, found_answer) is True


# ---- rows -----------------------------------------------------------------------------------------------------------


def _opening(value: Any, key: str, put: str | None) -> tuple[tuple[Message, ...], str]:
    """Return the prompt, and the identity of the question."""
    if messages.is_list(value):
        said = messages.messages(value, key)
        if said[-1].role == "assistant":
            said = said[:-1]
        if not said or said[-1].role == "assistant":
            raise BadRow(f"{key} has no message before the assistant's that asks for an answer")
        content = json.dumps([[m.role, m.content] for m in said], ensure_ascii=False)
        last = Message(said[-1].role, said[-1].content if put is None else _put(put, said[-1].content))
        return (*said[:-1], last), content
    question = messages.text(value, key)
    return (Message("user", _put(BOXED if put is None else put, question)),), question


def _put(how: str, question: str) -> str:
    return how.replace("{question}", question)


def _recorded(value: Any, key: str) -> str:
    """Return a recorded answer as text: a number, a list of one, a message of the assistant."""
    value = messages.unpacked(value)
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, list):
        raise BadRow(f"{key} holds {len(value)} answers, not one")
    return messages.text(messages.written(value, key), key)


def _without(tiers: Sequence[Sequence[str]], taken: str) -> Sequence[Sequence[str]]:
    return [[name for name in tier if name != taken.lower()] for tier in tiers]


def _is_finite(value: Any) -> bool:
    """Return whether a value is a finite number of Python or NumPy, or a truth value."""
    try:
        return not isinstance(value, str | bytes) and math.isfinite(value)
    except (TypeError, ValueError, OverflowError):
        return False
