"""Plain data as JSON values that keep their exact types.

Plain data are None, bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset, range and deque; an
iterator is sent as its remaining items. Subclasses are sent as their base: nothing that arrives has behaviour of its
own.
"""

from __future__ import annotations

import collections
import types
from collections.abc import Callable, Iterable
from typing import Any

MAX_DEPTH = 100
MAX_ITEMS = 1_000_000
ITERATORS: tuple[type[Iterable], ...] = (
    types.GeneratorType,
    map,
    filter,
    zip,
    enumerate,
    reversed,
    type(iter([])),
    type(iter(())),
    type(iter({})),
    type({}.keys()),
    type({}.values()),
    type({}.items()),
)
SEQUENCES = (list, tuple, set, frozenset, collections.deque)
MAKERS: dict[str, Callable] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": collections.deque,
    "iterator": iter,
}

Handle = Callable[[Any], tuple[int, str]]
"""Returns the number and the kind of an object that is not sent itself."""


class Codec:
    """Plain data to JSON values and back. `handle(x)` names an object that is not plain, `resolve` finds it again;
    without them such objects are an error (TypeError)."""

    def __init__(self, handle: Handle | None = None, resolve: Callable[..., Any] | None = None) -> None:
        self.handle, self.resolve = handle, resolve
        self.items = 0

    def encode(self, value: Any, depth: int = 0) -> Any:
        self.items += 1
        if depth > MAX_DEPTH or self.items > MAX_ITEMS:
            raise ValueError("too deep or too large to send")
        if value is None or value is True or value is False:
            return value
        if isinstance(value, int):
            value = int.__index__(value)
            return value if -(2**53) < value < 2**53 else ["int", format(value, "x")]
        if isinstance(value, float):
            value = float.__add__(value, 0.0) if value else float.__float__(value)
            return value if value - value == 0 else ["float", repr(value)]
        if isinstance(value, str):
            return str.__str__(value)
        if isinstance(value, complex):
            return ["complex", self.encode(value.real), self.encode(value.imag)]
        if isinstance(value, (bytes, bytearray)):
            return ["bytes", bytes(value).hex()]
        if isinstance(value, range):
            return ["range", *(self.encode(n) for n in (value.start, value.stop, value.step))]
        if isinstance(value, dict):
            return ["dict", *([self.encode(k, depth + 1), self.encode(v, depth + 1)] for k, v in dict.items(value))]
        kind = next((k for k in SEQUENCES if isinstance(value, k)), None)
        if kind is not None:
            return [kind.__name__, *(self.encode(v, depth + 1) for v in value)]
        if isinstance(value, ITERATORS):
            return ["iterator", *(self.encode(v, depth + 1) for v in value)]
        if self.handle is None:
            raise TypeError(f"{type(value).__name__} is not plain data")
        return ["object", *self.handle(value)]

    def decode(self, value: Any) -> Any:
        if value is None or type(value) in (bool, int, float, str):
            return value
        kind, *rest = value
        if kind == "int":
            return int(rest[0], 16)
        if kind == "float":
            return float(rest[0])
        if kind == "bytes":
            return bytes.fromhex(rest[0])
        if kind == "object":
            if self.resolve is None:
                raise TypeError("an object where only plain data can be")
            return self.resolve(*rest)
        if kind == "dict":
            return {self.decode(k): self.decode(v) for k, v in rest}
        rest = [self.decode(v) for v in rest]
        if kind == "complex":
            return complex(*rest)
        if kind == "range":
            return range(*rest)
        if kind == "list":
            return rest
        return MAKERS[kind](rest)
