"""Recorded answers to learn from: questions with answers, preference pairs and conversations, from custom files.

For questions whose answers are checked instead of imitated: `rolljax.envs.questions`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from rolljax.envs.base import Env, EnvSpec, StepResult
from rolljax.envs.data import columns, messages
from rolljax.envs.data.columns import Columns, Role
from rolljax.envs.data.rows import BadRow, InMemoryRows, Row, Rows, in_memory
from rolljax.envs.data.table import BadRows, Table, Taken, check_source, source_name, table
from rolljax.errors import ConfigError, EnvError
from rolljax.types import Message, Task

Kind = Literal["auto", "answers", "pairs", "conversations"]
ROLES: Mapping[Kind, Sequence[str]] = {
    "answers": ("prompt", "answer"),
    "pairs": ("prompt", "chosen", "rejected"),
    "conversations": ("messages",),
}
"""Kind of record -> the roles of its columns."""
USUAL: Mapping[str, Sequence[Sequence[str]]] = {
    "prompt": (("prompt", "question", "problem", "instruction", "query", "input"),),
    "answer": (("answer", "completion", "response", "output"), ("solution", "target")),
    "chosen": (("chosen",),),
    "rejected": (("rejected",),),
    "messages": (("messages", "conversation", "conversations"),),
}
"""Usual names of columns, in tiers (`columns.Role`)."""


@dataclasses.dataclass(frozen=True)
class Records(EnvSpec):
    """Recorded data from local files: JSON Lines (also gzip), a JSON array, Parquet, Arrow, or a folder of one of
    these, such as `datasets.save_to_disk` writes. All rows are of one kind:

    - answers: a prompt, and the answer to it;
    - pairs: a prompt, and a chosen and a rejected answer; the reference answer is the chosen one. Without a prompt it
      is the common beginning of both;
    - conversations: messages of system, user, assistant and tool. They are replayed: the assistant's messages are the
      reference answers, and the recorded messages follow whatever was answered. An assistant's message with `"weight":
      0` or `"error": true` is part of the conversation, but not of the loss.

    A prompt is a text or a list of messages; so are answers, whose list ends with one of the assistant. Lists may be
    JSON text, and the messages' keys OpenAI's (role, content) or ShareGPT's (from, value).

    Index i is record i modulo their number. Records with equal messages to the policy are the same task, so that a
    held-out prompt is never trained on with another answer. Reward: among the answers that are part of the loss, the
    share that equals the recorded ones, white space at the ends aside; solved: all of them.
    """

    path: str = ""
    """A file, a folder, a pattern (`data/train-*.parquet`), or the name of a file that comes with rolljax."""
    records: InMemoryRows | Sequence[Row] | None = None
    """The rows themselves, as dicts, instead of a path."""
    kind: Kind = "auto"
    """Kind of the rows; auto: determined from the columns, with an error if they fit more than one kind."""
    prompt_key: str = ""
    """Column of the prompt; dots reach into objects. Empty: found by its usual names (`USUAL`)."""
    answer_key: str = ""
    """Column of the answer; dots reach into objects. Empty: found by its usual names (`USUAL`)."""
    chosen_key: str = ""
    """Column of the chosen answer; dots reach into objects. Empty: found by its usual names (`USUAL`)."""
    rejected_key: str = ""
    """Column of the rejected answer; dots reach into objects. Empty: found by its usual names (`USUAL`)."""
    messages_key: str = ""
    """Column of the conversation's messages; dots reach into objects. Empty: found by its usual names (`USUAL`)."""
    bad_rows: BadRows = "error"
    """Handling of rows that are not a record: `error` raises an error that names them, `skip` leaves them out with a
    warning."""
    domain: str = "records"
    """Name of these tasks in metrics."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "records", in_memory(self.records))
        check_source(self, "Records")
        kinds = ("auto", *ROLES)
        if self.kind not in kinds:
            raise ConfigError(
                "is no kind of record", setting="Records.kind", value=self.kind, remedy=f"one of {', '.join(kinds)}"
            )

    @property
    def name(self) -> str:
        return self.domain

    @property
    def max_turns(self) -> int:
        """Largest number of assistant messages in one record."""
        self._table()
        return _most_turns[self]

    @property
    def num_records(self) -> int:
        """Number of records in the files."""
        return len(self._table())

    @property
    def num_tasks(self) -> int | None:
        return self.num_records

    def warnings(self) -> Sequence[str]:
        complaint = self._table().complaint
        return (complaint,) if complaint else ()

    def record(self, index: int) -> RecordedExample:
        """Return record `index` modulo the number of records.

        Raises:
          DataError: a row is no record. ConfigError: columns that are not found, or rows of more than one kind.
        """
        return self._table().record(index)

    def location(self, index: int) -> str:
        return self._table().location(index)

    def columns_taken(self) -> str:
        return self._table().columns_taken

    def task(self, index: int) -> Task:
        return Task(self.name, index, self.record(index).content)

    def reference(self, task: Task) -> str | None:
        answers = self.record(task.index).answers
        return answers[0].text if len(answers) == 1 else None

    def warm(self) -> None:
        self._table()

    def make(self) -> Env:
        return RecordsEnv(self)

    def _table(self) -> Table[RecordedExample]:
        return table(self, "Records", self._reader)

    def _reader(self, rows: Rows, path: str) -> tuple[Callable[[Row], RecordedExample], Taken]:
        """Return the function that makes records of rows with these columns; it notes the most turns of a record."""
        read, taken = _reader_of(self, Columns.of(rows), path)
        _most_turns[self] = 1

        def noting(row: Row) -> RecordedExample:
            record = read(row)
            _most_turns[self] = max(_most_turns[self], len(record.answers))
            return record

        return noting, taken


_most_turns: dict[Records, int] = {}


@dataclasses.dataclass(frozen=True, slots=True)
class RecordedAnswer:
    """A recorded answer, its weight in a supervised loss (0 or 1), and the messages before the next answer."""

    text: str
    weight: float = 1.0
    then: tuple[Message, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class RecordedExample:
    """A row: the messages before the first answer, and the answers."""

    initial_messages: tuple[Message, ...]
    answers: tuple[RecordedAnswer, ...]
    rejected: str | None = None

    @property
    def content(self) -> str:
        """All messages to the policy, as JSON: two records with the same messages are the same task."""
        told = [*self.initial_messages, *(m for a in self.answers for m in a.then)]
        return json.dumps([[m.role, m.content] for m in told], ensure_ascii=False)


class RecordsEnv(Env):
    """One record, replayed."""

    def __init__(self, spec: Records) -> None:
        self._spec = spec
        self._record: RecordedExample | None = None
        self._turn, self._share, self._right = 0, 0.0, True

    def reset(self, task: Task) -> tuple[Message, ...]:
        record = self._spec.record(task.index)
        if record.content != task.content:
            raise EnvError(
                f"record {task.index} of {source_name(self._spec)} is not the task that was asked for: was the file "
                "changed?"
            )
        self._record, self._turn, self._right = record, 0, True
        self._share = 1 / sum(a.weight for a in record.answers)
        return record.initial_messages

    def step(self, action: str) -> StepResult:
        answer = self._answer()
        equal = action.strip() == answer.text.strip()
        self._turn += 1
        self._right = self._right and (equal or not answer.weight)
        over = not answer.then
        return StepResult(
            answer.then,
            self._share * answer.weight * equal,
            terminated=over,
            success=over and self._right,
            reward_parts={"match": float(equal)},
            weight=answer.weight,
        )

    def reference_answer(self) -> str:
        return self._answer().text

    def rejected(self) -> str:
        self._answer()
        if self._record is None or self._record.rejected is None:
            raise EnvError(f"{source_name(self._spec)} holds no preference pairs: its rows lack chosen and rejected")
        return self._record.rejected

    def _answer(self) -> RecordedAnswer:
        if self._record is None or self._turn == len(self._record.answers):
            raise EnvError("step before reset, or after the episode's end")
        return self._record.answers[self._turn]


# ---- columns --------------------------------------------------------------------------------------------------------


def _reader_of(spec: Records, names: Columns, path: str) -> tuple[Callable[[Row], RecordedExample], Taken]:
    roles = {r: Role(f"Records.{r}_key", getattr(spec, f"{r}_key"), usual) for r, usual in USUAL.items()}
    kind = _kind(spec, roles, names, path)
    need = lambda role: columns.need(roles[role], names, path)  # noqa: E731
    if kind == "conversations":
        key = need("messages")
        return (lambda row: _conversation(columns.value(row, key), key)), {"messages": key}
    if kind == "answers":
        asked, answered = need("prompt"), need("answer")
        return (lambda row: _answered(row, asked, answered)), {"prompt": asked, "answer": answered}
    chosen, rejected = need("chosen"), need("rejected")
    prompt = columns.find(roles["prompt"], names, path)
    taken = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    return (lambda row: _pair(row, prompt, chosen, rejected)), taken


def _kind(spec: Records, roles: Mapping[str, Role], names: Columns, path: str) -> Kind:
    """Return the kind of all rows: the user's choice, or the only one that fits the columns."""
    named = {name for name, role in roles.items() if role.key}
    kinds = [kind for kind in ROLES if spec.kind in ("auto", kind) and named <= set(ROLES[kind])]
    if not kinds:
        raise ConfigError(
            f"names columns of different kinds: {', '.join(sorted(roles[name].setting for name in named))}",
            setting="Records.kind",
            value=spec.kind,
            remedy="; ".join(f"{kind}: {', '.join(needed)}" for kind, needed in ROLES.items()),
        )
    if spec.kind != "auto":
        return spec.kind
    needed = {kind: [roles[r] for r in ROLES[kind] if (kind, r) != ("pairs", "prompt")] for kind in kinds}
    found = [kind for kind in kinds if all(map(names.has_usual, needed[kind]))]
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigError(
            f"is not set, and the rows of {path} can be read as {' or '.join(found)}",
            setting="Records.kind",
            remedy=f"{' or '.join(f'Records.kind = {kind!r}' for kind in found)}; columns: {names}",
        )
    raise ConfigError(
        f"cannot be determined: {path} has neither a prompt and an answer, nor chosen and rejected, nor messages",
        setting="Records.kind",
        remedy=f"name its columns with Records.prompt_key and so on; there are {names}",
    )


# ---- rows -----------------------------------------------------------------------------------------------------------


def _answered(row: Row, asked: str, answered: str) -> RecordedExample:
    initial_messages = messages.prompt(columns.value(row, asked), asked)
    before, answer = _said(columns.value(row, answered), answered)
    return RecordedExample(_agreeing(initial_messages, before, answered), (RecordedAnswer(answer),))


def _pair(row: Row, prompt: str | None, chosen: str, rejected: str) -> RecordedExample:
    good, bad = columns.value(row, chosen), columns.value(row, rejected)
    if prompt is None:
        initial_messages, good, bad = _shared_beginning(good, bad, chosen, rejected)
    else:
        initial_messages = messages.prompt(columns.value(row, prompt), prompt)
    before, better = _said(good, chosen)
    initial_messages = _agreeing(initial_messages, before, chosen)
    before, worse = _said(bad, rejected, empty=True)
    return RecordedExample(_agreeing(initial_messages, before, rejected), (RecordedAnswer(better),), worse)


def _said(value: Any, key: str, *, empty: bool = False) -> tuple[tuple[Message, ...], str]:
    """Return the answer in an answer column, and the messages before it if the column is a list of messages."""
    if not messages.is_list(value):
        return (), messages.text(messages.written(value, key), key, empty=empty)
    found = messages.messages(value, key)
    if found[-1].role != "assistant":
        raise BadRow(f"{key} does not end with a message of the assistant")
    return found[:-1], found[-1].content


def _agreeing(initial_messages: tuple[Message, ...], before: tuple[Message, ...], key: str) -> tuple[Message, ...]:
    """Return the prompt; an answer's list of messages may repeat it, with a system message in front."""
    if not before or before == initial_messages:
        return initial_messages
    if before[0].role == "system" and before[1:] == initial_messages:
        return before
    if initial_messages[0].role == "system" and initial_messages[1:] == before:
        return initial_messages
    raise BadRow(f"{key} begins with other messages than the prompt")


def _shared_beginning(good: Any, bad: Any, chosen: str, rejected: str) -> tuple[tuple[Message, ...], Any, Any]:
    """Return the prompt of a pair without its own column: the common beginning of chosen and rejected."""
    if messages.is_list(good) and messages.is_list(bad):
        before, _ = _said(good, chosen)
        if not before or before != _said(bad, rejected, empty=True)[0]:
            raise BadRow(f"{chosen} and {rejected} do not begin with the same messages, and there is no prompt")
        return before, good, bad
    good, bad = messages.text(good, chosen), messages.text(bad, rejected)
    end = next((i for i, (a, b) in enumerate(zip(good, bad, strict=False)) if a != b), min(len(good), len(bad)))
    while end and not good[end - 1].isspace():
        end -= 1
    if not good[:end].strip():
        raise BadRow(f"{chosen} and {rejected} begin with different texts, and there is no prompt")
    return (Message("user", good[:end].rstrip()),), good[end:], bad[end:]


def _conversation(value: Any, key: str) -> RecordedExample:
    value = messages.unpacked(value)
    said = messages.messages(value, key)
    replies = [i for i, m in enumerate(said) if m.role == "assistant"]
    if not replies:
        raise BadRow(f"{key} has none of the assistant: there is nothing to learn")
    if replies[0] == 0:
        raise BadRow(f"{key}[0] is the assistant's: nothing comes before it that it could answer")
    for before, after in zip(replies, replies[1:], strict=False):
        if after == before + 1:
            raise BadRow(f"{key}[{before}] and {key}[{after}] are both the assistant's: join them")
    weights = [_weight(m, said[i].role, f"{key}[{i}]") for i, m in enumerate(value)]
    if not any(weights[i] for i in replies):
        raise BadRow("no message of the assistant counts: each has weight 0 or an error")
    ends = [*replies[1:], replies[-1] + 1]  # messages after the last answer have no answer
    answers = [
        RecordedAnswer(said[i].content, weights[i], said[i + 1 : end]) for i, end in zip(replies, ends, strict=True)
    ]
    return RecordedExample(said[: replies[0]], tuple(answers))


def _weight(message: Mapping[str, Any], role: str, location: str) -> float:
    stated, error = message.get("weight"), message.get("error")
    if role != "assistant":
        if stated is not None or error is not None:
            raise BadRow(f"{location} has weight or error, but is never trained on: mark the assistant's message")
        return 0.0
    weight = 1 if stated is None else stated
    if isinstance(weight, bool) or weight not in (0, 1):
        raise BadRow(f"{location}.weight is {weight!r}, not 0 or 1")
    if not isinstance(error, bool | None):
        raise BadRow(f"{location}.error is {error!r}, not true or false")
    return float(weight and not error)
