"""Recorded data: questions with answers, preference pairs and conversations, a JSON object on each line of a file.

A file is read through once, when it is first used: every line is checked, and the places where records begin are kept
(8 bytes each). From then on a record is read from disk when it is asked for.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import threading
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from rolljax.envs.base import Env, EnvSpec, StepResult
from rolljax.errors import ConfigError, DataError, EnvError
from rolljax.types import Message, Task

ROLES = ("system", "user", "assistant", "tool")


@dataclasses.dataclass(frozen=True)
class Records(EnvSpec):
    """Recorded data from a local JSONL file. A line is one of

    - `{"prompt": P, "answer": "..."}`,
    - `{"prompt": P, "chosen": "...", "rejected": "..."}`: a preference pair; the gold answer is the chosen one,
    - `{"messages": [{"role": ..., "content": "..."}, ...]}`: a conversation of system, user, assistant and tool. It is
      replayed: the assistant's messages are the gold answers, and what follows each is told, whatever was answered. An
      assistant's message with `"weight": 0` or `"error": true` is part of the conversation, but not of the loss.

    P is a text or a list of messages; other keys are let pass. A file holds pairs on all of its lines or on none.

    Index i is record i modulo their number. Records in which the policy is told the same are the same task, so that a
    held-out prompt is never trained on with another answer. Reward: the share of answers that equal the recorded ones,
    white space at the ends aside, of those that are part of the loss; solved: all of them.

    path: the file, or the name of one that comes with rolljax. prompt_key, answer_key: other names of those two keys
    (`question` in GSM8K). domain: name of these tasks in metrics.
    """

    path: str
    prompt_key: str = "prompt"
    answer_key: str = "answer"
    domain: str = "records"

    def __post_init__(self) -> None:
        _find(self.path)
        taken = {"messages", "chosen", "rejected"}
        for name, other in (("prompt_key", ""), ("answer_key", self.prompt_key)):
            if getattr(self, name) in taken | {"", other}:
                raise ConfigError(
                    "would make records ambiguous",
                    setting=f"Records.{name}",
                    value=getattr(self, name),
                    remedy=f"two different keys, none of them {', '.join(sorted(taken))}",
                )

    @property
    def name(self) -> str:
        return self.domain

    @property
    def max_turns(self) -> int:
        """Most messages of the assistant in one record."""
        return _file(self).max_turns

    @property
    def num_records(self) -> int:
        """Records in the file."""
        return len(_file(self))

    def record(self, index: int) -> Record:
        """Record `index` modulo their number.

        Raises:
          DataError: a line of the file is no record.
        """
        return _file(self).record(index)

    def task(self, index: int) -> Task:
        return Task(self.name, index, self.record(index).content)

    def make(self) -> Env:
        return RecordsEnv(self)


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """What was answered, its weight in a supervised loss (0 or 1), and what was said before the next answer."""

    text: str
    weight: float = 1.0
    then: tuple[Message, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """A line of the file: what comes before the first answer, and the answers."""

    opening: tuple[Message, ...]
    answers: tuple[Answer, ...]
    rejected: str | None = None

    @property
    def content(self) -> str:
        """All that the policy is told, as JSON: what makes two records the same task."""
        told = [*self.opening, *(m for a in self.answers for m in a.then)]
        return json.dumps([[m.role, m.content] for m in told], ensure_ascii=False)


class RecordsEnv(Env):
    """One record, replayed."""

    def __init__(self, spec: Records) -> None:
        self._spec = spec
        self._record: Record | None = None
        self._turn, self._share, self._right = 0, 0.0, True

    def reset(self, task: Task) -> tuple[Message, ...]:
        record = self._spec.record(task.index)
        if record.content != task.content:
            raise EnvError(
                f"record {task.index} of {self._spec.path} is not the task that was asked for: was the file changed?"
            )
        self._record, self._turn, self._right = record, 0, True
        self._share = 1 / sum(a.weight for a in record.answers)
        return record.opening

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

    def gold(self) -> str:
        return self._answer().text

    def rejected(self) -> str:
        self._answer()
        if self._record is None or self._record.rejected is None:
            raise EnvError(f"{self._spec.path} holds no preference pairs: its lines lack chosen and rejected")
        return self._record.rejected

    def _answer(self) -> Answer:
        if self._record is None or self._turn == len(self._record.answers):
            raise EnvError("step before reset, or after the episode's end")
        return self._record.answers[self._turn]


# ---- lines ----------------------------------------------------------------------------------------------------------


class _Bad(Exception):
    """What is wrong with a line."""


def _parse(line: bytes, prompt_key: str, answer_key: str) -> Record:
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as e:
        raise _Bad(f"is not JSON: {e}") from None
    if not isinstance(data, dict):
        raise _Bad("is not a JSON object")
    forms = {"answer": (prompt_key, answer_key), "pair": (prompt_key, "chosen", "rejected"), "talk": ("messages",)}
    found = [form for form, keys in forms.items() if all(key in data for key in keys)]
    if not found:
        _refuse_keys(data, forms)
    if len(found) > 1:
        several = " and ".join(" + ".join(forms[form]) for form in found)
        raise _Bad(f"can be read in several ways, as {several}: drop one")
    if found == ["talk"]:
        return _conversation(data["messages"])
    opening = _prompt(data[prompt_key], prompt_key)
    if found == ["answer"]:
        return Record(opening, (Answer(_text(data[answer_key], answer_key)),))
    rejected = _text(data["rejected"], "rejected", empty=True)
    return Record(opening, (Answer(_text(data["chosen"], "chosen")),), rejected)


def _refuse_keys(data: Mapping[str, Any], forms: Mapping[str, Sequence[str]]) -> NoReturn:
    """Name what the nearest form lacks: the one with the most of its keys here, of those the shortest."""
    here = {form: sum(key in data for key in keys) for form, keys in forms.items()}
    keys = forms[min(forms, key=lambda form: (-here[form], bool(here[form]) * len(forms[form])))]
    lacks = " and ".join(repr(k) for k in keys if k not in data)
    wanted = ", or ".join(" + ".join(keys) for keys in forms.values())
    raise _Bad(f"lacks {lacks}: a record has {wanted}; this one has {', '.join(map(str, data)) or 'nothing'}")


def _prompt(value: Any, key: str) -> tuple[Message, ...]:
    if isinstance(value, str):
        return (Message("user", _text(value, key)),)
    messages = _messages(value, key)
    for i, m in enumerate(value):
        if set(m) & {"weight", "error"}:
            raise _Bad(f"{key}[{i}] has weight or error, but no message of a prompt is trained on")
    if messages[-1].role == "assistant":
        raise _Bad(f"{key} ends with a message of the assistant: there is nothing to answer")
    return messages


def _conversation(value: Any) -> Record:
    messages = _messages(value, "messages")
    at = [i for i, m in enumerate(messages) if m.role == "assistant"]
    if not at:
        raise _Bad("messages has none of the assistant: there is nothing to learn")
    if at[0] == 0:
        raise _Bad("messages[0] is the assistant's: nothing comes before it that it could answer")
    for before, after in zip(at, at[1:], strict=False):
        if after == before + 1:
            raise _Bad(f"messages[{before}] and messages[{after}] are both the assistant's: join them")
    weights = [_weight(m, f"messages[{i}]") for i, m in enumerate(value)]
    if not any(weights[i] for i in at):
        raise _Bad("no message of the assistant counts: each has weight 0 or an error")
    ends = [*at[1:], at[-1] + 1]  # what stands behind the last answer was never answered
    answers = [Answer(messages[i].content, weights[i], messages[i + 1 : end]) for i, end in zip(at, ends, strict=True)]
    return Record(messages[: at[0]], tuple(answers))


def _messages(value: Any, key: str) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise _Bad(f"{key} is not {'a text or ' if key != 'messages' else ''}a list of messages")
    return tuple(_message(m, f"{key}[{i}]") for i, m in enumerate(value))


def _message(value: Any, place: str) -> Message:
    if not isinstance(value, dict):
        raise _Bad(f"{place} is not an object with role and content")
    for key in ("role", "content"):
        if key not in value:
            raise _Bad(f"{place} lacks {key!r}")
    if value["role"] not in ROLES:
        raise _Bad(f"{place}.role is {value['role']!r}, not one of {', '.join(ROLES)}")
    if value.get("tool_calls"):
        raise _Bad(f"{place} has tool_calls: write each call into content, as the text that the model shall produce")
    return Message(value["role"], _text(value["content"], f"{place}.content", empty=value["role"] != "assistant"))


def _weight(message: Mapping[str, Any], place: str) -> float:
    if message["role"] != "assistant":
        if set(message) & {"weight", "error"}:
            raise _Bad(f"{place} has weight or error, but is never trained on: mark the assistant's message")
        return 0.0
    weight = 1 if message.get("weight") is None else message["weight"]
    error = message.get("error") or False
    if isinstance(weight, bool) or weight not in (0, 1):
        raise _Bad(f"{place}.weight is {weight!r}, not 0 or 1")
    if not isinstance(error, bool):
        raise _Bad(f"{place}.error is {error!r}, not true or false")
    return float(weight and not error)


def _text(value: Any, place: str, *, empty: bool = False) -> str:
    if not isinstance(value, str):
        raise _Bad(f"{place} is {_kind(value)}, not a text")
    if not empty and not value.strip():
        raise _Bad(f"{place} is empty")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _Bad(f"{place} holds half of a surrogate pair, which is no character") from None
    return value


def _kind(value: Any) -> str:
    kinds = {type(None): "null", bool: "true or false", int: "a number", float: "a number", list: "a list"}
    return kinds.get(type(value), "an object")


# ---- files ----------------------------------------------------------------------------------------------------------


class _File:
    """A file that was looked through: where its records begin, and the most turns of one."""

    def __init__(self, path: Path, spec: Records) -> None:
        self._path, self._keys = path, (spec.prompt_key, spec.answer_key)
        self._raw = open(path, "rb", buffering=0)  # noqa: SIM115  # open as long as it is read from
        self._starts = array("q")
        self.max_turns = 1
        self._scan()

    def __len__(self) -> int:
        return len(self._starts) - 1

    def record(self, index: int) -> Record:
        """A pread: threads do not get into each other's way."""
        i = index % len(self)
        start, end = self._starts[i], self._starts[i + 1]
        try:
            return _parse(os.pread(self._raw.fileno(), end - start, start).strip(), *self._keys)
        except _Bad as e:
            raise DataError(f"{self._path}, record {i}: {e}; was the file changed?") from None

    def _scan(self) -> None:
        at, pairs, path = 0, None, self._path
        with open(path, "rb") as f:
            for number, line in enumerate(f, 1):
                if line.strip():
                    try:
                        record = _parse(line, *self._keys)
                        pairs = (record.rejected is not None) if pairs is None else pairs
                        if pairs != (record.rejected is not None):
                            raise _Bad(f"is {'no' if pairs else 'a'} preference pair, unlike the lines before it")
                    except _Bad as e:
                        raise DataError(f"{path}, line {number}: {e}") from None
                    self._starts.append(at)
                    self.max_turns = max(self.max_turns, len(record.answers))
                at += len(line)
        if not self._starts:
            raise DataError(f"{path} holds no records")
        self._starts.append(at)


_files: dict[Records, tuple[tuple[int, ...], _File]] = {}
_lock = threading.Lock()


def _file(spec: Records) -> _File:
    """The file of a spec; looked through again when it has changed."""
    path = _find(spec.path)
    stat = os.stat(path)
    signature = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)
    with _lock:
        known, file = _files.get(spec, ((), None))
        if file is None or known != signature:
            file = _File(path, spec)
            _files[spec] = signature, file
        return file


def _find(name: str) -> Path:
    """A file as the user named it: a path, or the name of one that comes with rolljax."""
    path = Path(name)
    if path.is_file():
        return path
    package = Path(__file__).parents[1]
    for folder in (package / "configs", package.parent / "configs"):
        if path.name == name and (folder / name).is_file():
            return folder / name
    beside = [p.name for p in path.parent.glob("*.jsonl")] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, beside, 1)
    raise ConfigError(
        "is not a file",
        setting="Records.path",
        value=name,
        remedy=f"did you mean {near[0]}?" if near else "name a local file with a JSON object on each line",
    )
