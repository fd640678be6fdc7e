"""Verdicts, parsed from the answers of models.

An answer is untrusted data. Only the text after the model's thinking is searched, in time linear in it, and a verdict
that does not have the requested form is no verdict: `Unreadable`.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rolljax.envs.text import after_thinking, json_at, read_json

MAX_VERDICT_CHARS = 16_384
"""Characters at the end of an answer that are searched for a `VerdictForm`."""
_FIELD = re.compile(r'"([^"\\]{1,64})"\s{0,16}:\s{0,16}(?:"([^"\\]{0,64})"|(-?\d{1,6}|true|false)(?=[\s,}]|\Z))')
"""A field of an object and its value, a short text, number or flag."""


class Unreadable(ValueError):
    """An answer without a verdict. The message holds no text of the answer.

    kind: the name under which it is counted. answer: the text, for records.
    """

    def __init__(self, message: str, kind: str = "garbage", answer: str = "") -> None:
        self.kind, self.answer = kind, answer
        super().__init__(message)


@dataclasses.dataclass(frozen=True)
class VerdictForm:
    """A verdict at the end of an answer: one JSON object, with nothing but the end of a code block after it."""

    labels: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    """The allowed labels of each field that holds one."""
    marks: Mapping[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
    """Lowest and highest mark of each field that holds a number."""
    flags: Sequence[str] = ()
    """The fields that are true or false."""

    def request(self) -> str:
        """Return the instructions for a model on the form of its verdict."""
        parts = [f'"{name}": V' for name in self.labels]
        parts += [f'"{name}": a number from {low:g} to {high:g}' for name, (low, high) in self.marks.items()]
        parts += [f'"{name}": true or false' for name in self.flags]
        where = "".join(f", where V is one of {json.dumps(list(labels))}" for labels in self.labels.values())
        return f"End with one line of JSON: {{{', '.join(parts)}}}{where}."

    def read(self, text: str) -> dict[str, Any]:
        """Return the values of all fields.

        Raises:
          Unreadable: there is no such object at the end.
        """
        found = _object_at_end(text)
        for name in (*self.labels, *self.marks, *self.flags):
            value = found.get(name)
            if name not in found:
                raise Unreadable(f"the verdict has no {name!r}")
            if name in self.labels and not (isinstance(value, str) and value in self.labels[name]):
                raise Unreadable(f"{name!r} is none of its labels")
            if name in self.flags and not isinstance(value, bool):
                raise Unreadable(f"{name!r} is neither true nor false")
            if name in self.marks:
                low, high = self.marks[name]
                if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
                    raise Unreadable(f"{name!r} is not a number from {low:g} to {high:g}")
        return {name: found[name] for name in (*self.labels, *self.marks, *self.flags)}


def _object_at_end(text: str) -> dict[str, Any]:
    """Return the JSON object at the end of an answer; it contains no further objects."""
    text = after_thinking(text)[-MAX_VERDICT_CHARS:].rstrip().removesuffix("```").rstrip()
    start = text.rfind("{")
    if start < 0 or not text.endswith("}"):
        raise Unreadable("the answer does not end with a JSON object")
    try:
        return read_json(text[start:], unique=True)
    except ValueError:
        raise Unreadable("the answer does not end with a JSON object") from None


def last_object(text: str) -> dict[str, Any]:
    """Return the last JSON object of an answer (of the outermost ones) that `json_at` reads; text may follow it.

    At most 100 opening brackets are tried.

    Raises:
      Unreadable: there is none.
    """
    text, last, end = after_thinking(text), None, 0
    for start in [m.start() for m in re.finditer(r"\{", text)][:100]:
        if start >= end:
            try:
                last, end = json_at(text, start)
            except ValueError:
                continue
    if last is None:
        raise Unreadable("the answer has no JSON object")
    return last


def read_label(text: str, field: str, labels: Mapping[str, str]) -> str:
    """Return the label that a judge gives.

    It is the value of `field` in the JSON object that begins at the first brace after the judge's thinking. Of an
    object that is cut off or broken, all places that look like the field are read, and must agree. Text around
    the object is ignored.

    Args:
      labels: value as the judge writes it (true and numbers as JSON writes them) -> label. Values must match exactly,
        white space around a text aside.

    Raises:
      Unreadable: there is no such field, or its value is no label.
    """
    text = after_thinking(text)
    start = text.find("{")
    if start < 0:
        raise Unreadable("no JSON object")
    try:
        found = json_at(text, start, unique=True)[0]
        values = [found[field]] if field in found else []
    except ValueError:
        values = [quoted or bare for name, quoted, bare in _FIELD.findall(text[start:]) if name == field]
    written = {json.dumps(v) if isinstance(v, bool | int) else v.strip() for v in values if isinstance(v, str | int)}
    if len(values) < 1 or len(written) != 1 or not written <= labels.keys():
        raise Unreadable(f"{field!r} is missing, is no label, or occurs with several values")
    return labels[written.pop()]


def majority(votes: Sequence[str | None]) -> str | None:
    """Return the label with most votes; None without votes, or for a tie. A vote of None is not counted."""
    found = collections.Counter(vote for vote in votes if vote is not None).most_common(2)
    if not found or len(found) > 1 and found[0][1] == found[1][1]:
        return None
    return found[0][0]
