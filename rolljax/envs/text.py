"""Shared readers of a policy's text: its length limit, code blocks, JSON.

Every reader of such text takes time linear in it: no pattern has two repetitions that can match the same part, and no
scan restarts at every position. `tests/unit/envs/test_hostile_text.py` tests all of them.
"""

from __future__ import annotations

import functools
import json
import math
import re
from typing import Any

from rolljax import reading
from rolljax.errors import ConfigError, needed

MAX_ANSWER_CHARS = 2**20
"""Maximum number of characters of an answer that an environment gets; the rest is cut off."""
MAX_DEPTH = 32
"""Maximum depth of nested lists and objects in JSON of a policy."""
END_OF_THINKING = "</think>"
"""Tag that models write between their thoughts and their answer."""

_BLOCK = re.compile(r"```([^\n`]*)\n(.*?)(?:\n?```|\Z)", re.DOTALL)


@functools.lru_cache(maxsize=64)
def linear_pattern(pattern: str, setting: str) -> Any:
    """Compile a user's regular expression with RE2, in which a dot matches any character.

    RE2 takes time linear in any text; Python's own engine can take hours on a malicious one.

    Args:
      setting: the setting with this value.

    Raises:
      ConfigError: the pattern is invalid, or RE2 is missing.
    """
    with needed("re2", setting, install="google-re2"):
        import re2

    options = re2.Options()
    options.dot_nl, options.log_errors = True, False
    try:
        return re2.compile(pattern, options)
    except re2.error as e:
        said = e.args[0].decode() if isinstance(e.args[0], bytes) else e
        raise ConfigError(f"is not a regular expression of RE2: {said}", setting=setting, value=pattern) from e


def bounded(answer: str) -> str:
    """Return the part of an answer that an environment gets."""
    return answer[:MAX_ANSWER_CHARS]


def after_thinking(text: str) -> str:
    """Return the text after the last `END_OF_THINKING`, unchanged; the whole text if there is none."""
    return text.rpartition(END_OF_THINKING)[2]


def split_thinking(text: str) -> tuple[str, str]:
    """Split a text into thoughts and answer: before and after the first `END_OF_THINKING`. An answer that is cut off
    while thinking has only thoughts; without the tags all of it is answer."""
    head, mark, tail = text.partition(END_OF_THINKING)
    if not mark:
        before, opened, thought = text.partition("<think>")
        return (thought.strip(), before.strip()) if opened else ("", text.strip())
    return head.replace("<think>", "", 1).strip(), tail.strip()


def clean(text: str) -> str:
    """Replace every lone surrogate by U+FFFD, so that the text has a UTF-8 form."""
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def code_blocks(text: str) -> list[tuple[str, str]]:
    """Return language and body of every block between three backticks. An unclosed block ends with the text."""
    return _BLOCK.findall(text)


def read_json(text: str, *, unique: bool = False) -> Any:
    """Parse a whole text as one JSON value by the rules of `json_at`.

    Raises:
      ValueError: it is not one; the message says why, in words for the policy.
    """
    value, end = json_at(text, 0, unique=unique)
    if rest := text[end:].lstrip():
        raise ValueError(f"unexpected text after the JSON value: {rest[:20]!r}")
    return value


def json_at(text: str, start: int, *, unique: bool = False) -> tuple[Any, int]:
    """Parse the JSON value at `start`; return it and where it ends. Its numbers are finite, it has `MAX_DEPTH` levels
    at most, and line breaks are allowed in its texts.

    Args:
      unique: refuse an object that has a key twice; otherwise the last one counts.

    Raises:
      ValueError: there is none; the message says why, in words for the policy.
    """
    while text[start : start + 1].isspace():
        start += 1
    try:
        value, end = (_UNIQUE_DECODER if unique else _DECODER).raw_decode(text, start)
    except json.JSONDecodeError as e:
        raise ValueError(f"{e.msg} at character {e.pos - start}") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if _depth(value) > MAX_DEPTH:
        raise ValueError("it is nested too deeply")
    return value, end


def _whole(digits: str) -> int:
    try:
        return int(digits)
    except ValueError:  # Python's own limit of digits
        raise ValueError("a number has more digits than are read") from None


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"{digits[:20]} is not JSON" if digits[-1:].isalpha() else "a number is too large")
    return value


_unique = reading.unique_keys(lambda key: ValueError(f"the key {key[:40]!r} is given twice"))
_DECODER = json.JSONDecoder(strict=False, parse_int=_whole, parse_float=_finite, parse_constant=_finite)
_UNIQUE_DECODER = json.JSONDecoder(
    strict=False, parse_int=_whole, parse_float=_finite, parse_constant=_finite, object_pairs_hook=_unique
)


def _depth(value: Any) -> int:
    """Return the levels of lists and objects, at most one more than `MAX_DEPTH`."""
    depth, level = 0, [value]
    while depth <= MAX_DEPTH and (level := [v for v in level if isinstance(v, (dict, list))]):
        level = [inner for v in level for inner in (v.values() if isinstance(v, dict) else v)]
        depth += 1
    return depth
