"""Conversations in rows: texts, lists of messages in OpenAI's or ShareGPT's keys, and either as JSON text."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from rolljax.envs.data.rows import BadRow, read_json
from rolljax.types import Message

ROLES = ("system", "user", "assistant", "tool")
_OTHER_ROLES = {"human": "user", "gpt": "assistant", "developer": "system", "observation": "tool"}


def is_list(value: Any) -> bool:
    """Return whether a value is a list of messages, or the JSON text of one."""
    return isinstance(unpacked(value), list)


def unpacked(value: Any) -> Any:
    """Return the list of objects that a text spells as JSON; return anything else unchanged.

    Raises:
      BadRow: an object of the list has a key twice, or a number that is none.
    """
    if isinstance(value, str) and value.lstrip()[:1] == "[":
        try:
            found = json.loads(value)
        except (ValueError, RecursionError):
            return value
        if isinstance(found, list) and found and all(isinstance(item, dict) for item in found):
            try:
                return read_json(value)
            except ValueError as e:
                raise BadRow(f"holds messages as JSON text, but {e}") from None
    return value


def prompt(value: Any, key: str) -> tuple[Message, ...]:
    """Return a prompt: a text becomes one message of the user; a list must end with a message to the policy."""
    value = unpacked(value)
    if isinstance(value, str):
        return (Message("user", text(value, key)),)
    if not isinstance(value, list):
        raise BadRow(f"{key} is {kind(value)}, neither a text nor a list of messages")
    found = messages(value, key)
    for i, m in enumerate(value):
        if m.get("weight") is not None or m.get("error") is not None:
            raise BadRow(f"{key}[{i}] has weight or error, but no message of a prompt is trained on")
    if found[-1].role == "assistant":
        raise BadRow(f"{key} ends with a message of the assistant: there is nothing to answer")
    return found


def messages(value: Any, key: str) -> tuple[Message, ...]:
    """Return a list of messages."""
    value = unpacked(value)
    if not isinstance(value, list):
        raise BadRow(f"{key} is {kind(value)}, not a list of messages")
    if not value:
        raise BadRow(f"{key} is an empty list")
    return tuple(_message(m, f"{key}[{i}]") for i, m in enumerate(value))


def text(value: Any, location: str, *, empty: bool = False) -> str:
    """Return a text that can be encoded."""
    if not isinstance(value, str):
        raise BadRow(f"{location} is {kind(value)}, not a text")
    if not empty and not value.strip():
        raise BadRow(f"{location} is empty")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise BadRow(f"{location} holds half of a surrogate pair, which is no character") from None
    return value


def written(value: Any, location: str) -> Any:
    """Return a number as text, and anything else unchanged. Raise `BadRow` if the number is not finite."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return value
    if not math.isfinite(value):
        raise BadRow(f"{location} is {value}, not a finite number")
    return repr(value).removesuffix(".0")


def kind(value: Any) -> str:
    """Name the type of a value in words."""
    kinds = {
        type(None): "null",
        bool: "true or false",
        int: "a number",
        float: "a number",
        list: "a list",
        str: "a text",
    }
    return kinds.get(type(value), "an object")


def _message(value: Any, location: str) -> Message:
    if not isinstance(value, Mapping):
        raise BadRow(f"{location} is not an object with role and content")
    keys = ("from", "value") if "from" in value and "role" not in value else ("role", "content")
    for key in keys:
        if key not in value:
            raise BadRow(f"{location} lacks {key!r}")
    said, content = (value[key] for key in keys)
    role = _OTHER_ROLES.get(said, said) if isinstance(said, str) else said
    if role not in ROLES:
        raise BadRow(f"{location}.role is {said!r}, not one of {', '.join(ROLES)}")
    if value.get("tool_calls"):
        raise BadRow(f"{location} has tool_calls: write each call into content, as text for the model to produce")
    return Message(role, text(_joined(content, location), f"{location}.{keys[1]}", empty=role != "assistant"))


def _joined(content: Any, location: str) -> Any:
    """Join the text of OpenAI's content parts."""
    if not isinstance(content, Sequence) or isinstance(content, str):
        return content
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise BadRow(f"{location}.content has a part that is no text")
    return "".join(part["text"] for part in content)
