"""Parses untrusted JSON: every field must have its declared type."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from rolljax import reading

Json = dict[str, Any]

TOO_DEEP = "nested too deeply"
MOST = 2**53
"""Whole numbers up to this are the same in a browser."""
SHORT_CHARS = 40
_NEEDED = object()


class Damaged(ValueError):
    """A file or a line is malformed; the text names the field."""


def is_there(path: Path, *, folder: bool = False) -> bool:
    """Return whether a path leads to a regular file, or to a folder; False where that is not known."""
    try:
        return path.is_dir() if folder else path.is_file()
    except (OSError, ValueError):
        return False


def parse(data: bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
      Damaged: it is not JSON, or is nested too deeply.
    """
    try:
        return reading.parse(data)
    except ValueError as e:
        raise Damaged(TOO_DEEP if TOO_DEEP in str(e) else "not JSON") from e


class Fields:
    """Typed access to the fields of a JSON object.

    Every method takes the field's name and raises `Damaged` if the field is missing or has another type. With a
    `default` a field may be missing, or null where the default is None.

    Args:
      place: the object's place in its file, for messages.
    """

    def __init__(self, value: Any, place: str = "") -> None:
        if not isinstance(value, dict):
            raise Damaged(f"{place or 'the line'} is {_short(value)}, not an object")
        self._value, self._place = value, f"{place}." if place else ""

    def _take(self, name: str, default: Any) -> Any:
        value = self._value.get(name, default)
        if value is _NEEDED:
            raise Damaged(f"{self._place}{name} is missing")
        return value

    def wrong(self, name: str, wanted: str) -> Damaged:
        """Return the error with a field's value and its expected type."""
        return Damaged(f"{self._place}{name} is {_short(self._value.get(name))}, not {wanted}")

    def __contains__(self, name: str) -> bool:
        return name in self._value

    def has(self, name: str) -> bool:
        """Return whether the field is there, and not null."""
        return self._value.get(name) is not None

    def is_list(self, name: str) -> bool:
        """Return whether the field is a list."""
        return isinstance(self._value.get(name), list)

    def text(self, name: str, default: Any = _NEEDED) -> Any:
        """Return a text."""
        value = self._take(name, default)
        if not isinstance(value, str) and value is not default:
            raise self.wrong(name, "a text")
        return value

    def whole(self, name: str, default: Any = _NEEDED, *, low: int = -MOST, high: int = MOST) -> int:
        """Return a whole number from `low` to `high`."""
        value = self._take(name, default)
        if type(value) is not int or not low <= value <= high:
            raise self.wrong(name, f"a whole number from {low} to {high}")
        return value

    def number(self, name: str, default: Any = _NEEDED) -> float:
        """Return a number, which may be NaN or infinite."""
        value = as_number(self._take(name, default))
        if value is None:
            raise self.wrong(name, "a number")
        return value

    def finite(self, name: str, default: Any = _NEEDED, *, low: float = -math.inf) -> float:
        """Return a finite number that is at least `low`."""
        value = as_number(self._take(name, default))
        if value is None or not math.isfinite(value) or value < low:
            raise self.wrong(name, "a finite number" if low == -math.inf else f"a finite number of at least {low:g}")
        return value

    def flag(self, name: str, default: Any = _NEEDED) -> bool:
        """Return true or false."""
        value = self._take(name, default)
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def items(self, name: str) -> list[Any]:
        """Return a list."""
        value = self._take(name, _NEEDED)
        if not isinstance(value, list):
            raise self.wrong(name, "a list")
        return value

    def wholes(self, name: str, *, low: int, high: int) -> list[int]:
        """Return a list of whole numbers from `low` to `high`."""
        found = self.items(name)
        if not all(type(x) is int and low <= x <= high for x in found):
            raise self.wrong(name, f"a list of whole numbers from {low} to {high}")
        return found

    def numbers(self, name: str, *, size: int) -> list[float]:
        """Return a list of `size` numbers."""
        found = self.items(name)
        if len(found) != size or not all(type(x) is float or as_number(x) is not None for x in found):
            raise self.wrong(name, f"a list of {size} numbers")
        return found

    def inside(self, name: str) -> Fields:
        """Return the fields of an object in this one."""
        return Fields(self._take(name, _NEEDED), f"{self._place}{name}")

    def maybe_inside(self, name: str) -> Fields | None:
        """Return the fields of an object in this one; None if there is none, or null."""
        return self.inside(name) if self.has(name) else None

    def all_inside(self, name: str) -> list[Fields]:
        """Return the fields of every object of a list."""
        return [Fields(x, f"{self._place}{name}[{i}]") for i, x in enumerate(self.items(name))]

    def by_name(self, name: str) -> dict[str, float]:
        """Return the numbers of an object by their names; empty if there is no such object."""
        value = self._take(name, {})
        if not isinstance(value, dict) or any(as_number(x) is None for x in value.values()):
            raise self.wrong(name, "an object of numbers")
        return {key: float(x) for key, x in value.items()}


def as_number(value: Any) -> float | None:
    """Return a number that has a place in a float, else None; true and false are none."""
    if type(value) is float:
        return value
    if type(value) is not int:
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def as_whole(value: Any) -> int | None:
    """Return a whole number that is not negative and the same in a browser, else None."""
    return value if type(value) is int and 0 <= value <= MOST else None


def as_text(value: Any) -> str:
    """Return a text; empty for anything else."""
    return value if isinstance(value, str) else ""


def _short(value: Any) -> str:
    if isinstance(value, list | dict):
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    if type(value) is int and abs(value) > MOST:
        return "a number out of range"
    shown = repr(value) if value is not None else "null"
    return shown if len(shown) <= SHORT_CHARS else f"{shown[:SHORT_CHARS]}…"
