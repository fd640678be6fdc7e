"""Verdicts as judges write them: one label in a JSON object, read strictly and in time linear in the text."""

from __future__ import annotations

import collections
import re
from collections.abc import Mapping, Sequence

from rolljax.envs.text import END_OF_THINKING, after_thinking, json_at

_FIELD = re.compile(r'"([^"\\]{1,64})"\s{0,16}:\s{0,16}(?:"([^"\\]{0,64})"|(-?\d{1,6}|true|false)(?=[\s,}]|\Z))')
"""A field of an object and its value, a short text, number or flag."""


def read_label(text: str, field: str, labels: Mapping[str, str]) -> str:
    """Return the label that a judge gives.

    It is the value of `field` in the JSON object that begins at the first brace after the judge's thinking. Of an
    object that is cut off or broken, all places that look like the field are read, and must agree. Text around
    the object is ignored.

    Args:
      labels: value as the judge writes it (true and numbers as JSON writes them) -> label. Values must match exactly,
        white space around a text aside.

    Raises:
      ValueError: there is no such field, or its value is no label; the message holds nothing of the text.
    """
    text = after_thinking(text)
    start = text.find("{")
    if start < 0:
        raise ValueError("no JSON object")
    try:
        value, _ = json_at(text, start, unique=True)
    except ValueError:
        return _cut(text[start:], field, labels)
    if not isinstance(value, dict) or field not in value:
        raise ValueError("no such field")
    return _label(value[field], labels)


def _label(value: object, labels: Mapping[str, str]) -> str:
    said = str(value).lower() if isinstance(value, bool) else str(value).strip()
    if not isinstance(value, (str, bool, int)) or said not in labels:
        raise ValueError("the value is no label")
    return labels[said]


def _cut(text: str, field: str, labels: Mapping[str, str]) -> str:
    """The label of an object that is no JSON."""
    found = [(quoted, bare) for name, quoted, bare in _FIELD.findall(text) if name == field]
    values = {quoted.strip() or bare for quoted, bare in found}
    if len(values) != 1:
        raise ValueError("not JSON, and the field occurs with several values" if values else "not JSON")
    (value,) = values
    if value not in labels:
        raise ValueError("the value is no label")
    return labels[value]


def majority(votes: Sequence[str | None]) -> str | None:
    """Return the label with most votes; None without votes, or for a tie. A vote of None is not counted."""
    found = collections.Counter(vote for vote in votes if vote is not None).most_common(2)
    if not found or len(found) > 1 and found[0][1] == found[1][1]:
        return None
    return found[0][0]


def split_thinking(text: str) -> tuple[str, str]:
    """Split a text into thoughts and answer: before and after the first `</think>`. An answer that is cut off
    while thinking has only thoughts; without the tags all of it is answer."""
    head, mark, tail = text.partition(END_OF_THINKING)
    if not mark:
        before, opened, thought = text.partition("<think>")
        return (thought.strip(), before.strip()) if opened else ("", text.strip())
    return head.replace("<think>", "", 1).strip(), tail.strip()
