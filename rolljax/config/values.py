"""Values as gin files write them: what stands for objects, functions and macros."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Ref:
    """`@scope/module.Class()` or `@module.function` in a value; `obj` is what the selector names."""

    scope: str
    selector: str
    call: bool
    obj: Any = None

    def __repr__(self) -> str:
        return f"@{self.scope}{'/' * bool(self.scope)}{self.selector}{'()' * self.call}"


@dataclasses.dataclass(frozen=True)
class Macro:
    """`%name` in a value."""

    name: str

    def __repr__(self) -> str:
        return f"%{self.name}"


def map_leaves(value: Any, fn: Callable[[Any], Any]) -> Any:
    """`value` with `fn` applied to every leaf of its lists, tuples and dicts."""
    if type(value) in (list, tuple):
        return type(value)(map_leaves(item, fn) for item in value)
    if type(value) is dict:
        return {map_leaves(key, fn): map_leaves(item, fn) for key, item in value.items()}
    return fn(value)


def leaves(value: Any, kind: type[T]) -> list[T]:
    """The leaves of `value` that are of one class."""
    found: list[Any] = []
    map_leaves(value, found.append)
    return [leaf for leaf in found if isinstance(leaf, kind)]
