"""Detects calls that are repeated without a new result: a sign that an episode is stuck."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any


def call_hash(name: str, arguments: Mapping[str, Any]) -> str:
    """Return 16 hex digits that are equal for the same tool with the same arguments, in any order."""
    text = json.dumps([name, arguments], sort_keys=True, ensure_ascii=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def repeated(calls: Iterable[tuple[str, Mapping[str, Any], str]], times: int = 3) -> list[bool]:
    """Return whether each call is at least the `times`-th of its kind with the same result.

    Args:
      calls: tool, arguments and result text, in order. Other calls may stand between equal ones; a changed result
        starts the count of its call again.
    """
    last: dict[str, tuple[str, int]] = {}
    found = []
    for name, arguments, result in calls:
        key = call_hash(name, arguments)
        before, count = last.get(key, (result, 0))
        last[key] = (result, count + 1 if before == result else 1)
        found.append(last[key][1] >= times)
    return found
