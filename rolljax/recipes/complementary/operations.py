"""The extractor's answer: at most three operations on the bank, each a JSON object between `<op>` and `</op>`.

<op>{"op": "add", "title": "room ab", "content": "red"}</op>
<op>{"op": "update", "number": 12, "content": "blue"}</op>
<op>{"op": "return"}</op>
"""

from __future__ import annotations

import dataclasses
import json

from rolljax.envs.text import clean, read_json

MAX_OPERATIONS = 3
MAX_CHARS = 2000
"""Maximum number of characters of a title or content."""
OPEN, CLOSE = "<op>", "</op>"


@dataclasses.dataclass(frozen=True)
class Add:
    """A new experience."""

    title: str
    content: str


@dataclasses.dataclass(frozen=True)
class Update:
    """A new content for the experience of this number."""

    number: int
    content: str


@dataclasses.dataclass(frozen=True)
class Return:
    """No change."""


Operation = Add | Update | Return


def read_operations(answer: str) -> tuple[Operation, ...] | None:
    """Read an answer strictly: nothing outside the tags but space, no other key, no empty text. Takes linear time.

    Returns:
      None: the answer is not in this form, and has no effect.
    """
    text = clean(answer).strip()
    found: list[Operation] = []
    if len(text) > MAX_OPERATIONS * (3 * MAX_CHARS):
        return None
    while text:
        body, closed, rest = text.removeprefix(OPEN).partition(CLOSE)
        if not (text.startswith(OPEN) and closed) or len(found) == MAX_OPERATIONS:
            return None
        try:
            operation = _operation(read_json(body, unique=True))
        except ValueError:
            return None
        if operation is None:
            return None
        found.append(operation)
        text = rest.lstrip()
    return tuple(found) or None


def written(operation: Operation) -> str:
    """Return an operation as the extractor writes it."""
    kind = type(operation).__name__.lower()
    value = {"op": kind, **dataclasses.asdict(operation)}
    return OPEN + json.dumps(value, separators=(",", ":")) + CLOSE


def _operation(value: object) -> Operation | None:
    match value:
        case {"op": "add", "title": str(title), "content": str(content), **rest} if not rest:
            return Add(title.strip(), content.strip()) if _fits(title) and _fits(content) else None
        case {"op": "update", "number": int(number), "content": str(content), **rest} if not rest:
            return Update(number, content.strip()) if _fits(content) and not isinstance(number, bool) else None
        case {"op": "return", **rest} if not rest:
            return Return()
    return None


def _fits(text: str) -> bool:
    return bool(text.strip()) and len(text) <= MAX_CHARS
