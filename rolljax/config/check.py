"""Values against annotations.

`fit` converts the three things gin cannot write (a list for a tuple, an int for a float, a string for a Path) and
refuses everything else that does not match. Deliberately absent: coercion of strings, and any guess.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import difflib
import functools
import inspect
import pathlib
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

_NONE_TYPE = type(None)


class Mismatch(Exception):
    """A value does not fit its annotation. want: completes the message `must be {want}`. remedy: how to fix it."""

    def __init__(self, want: str, remedy: str = "") -> None:
        super().__init__(f"must be {want}")
        self.want, self.remedy = want, remedy


def nearest(name: str, valid: Iterable[str], label: str = "valid") -> str:
    """Return a remedy: the nearest valid name, then all of them."""
    names = sorted(set(valid))
    found = near(name, names)
    listed = f"{label}: {', '.join(names)}" if names else ""
    return "; ".join(part for part in (f"did you mean '{found}'?" if found else "", listed) if part)


def near(name: str, valid: Iterable[str]) -> str:
    """Return the valid name that was probably meant; empty if none is similar."""
    names = sorted(set(valid))
    found = difflib.get_close_matches(name, names, 1, 0.6) or [n for n in names if n.lower() == name.lower()]
    return found[0] if found else ""


# ---- annotations ----------------------------------------------------------------------------------------------------


@functools.cache
def hints(cls: type) -> dict[str, Any]:
    """Return the annotation of each field, strings resolved; `Any` for one that cannot be resolved here (TYPE_CHECKING
    imports)."""
    found = {}
    for field in dataclasses.fields(cls):
        owner = next(base for base in cls.__mro__ if field.name in inspect.get_annotations(base))
        alone = type("_", (), {"__annotations__": {field.name: field.type}, "__module__": owner.__module__})
        try:
            found[field.name] = typing.get_type_hints(alone)[field.name]
        except (NameError, AttributeError):
            found[field.name] = Any
    return found


def classes_in(tp: Any) -> Iterator[type]:
    """Yield the dataclasses in an annotation, at any depth."""
    if isinstance(tp, type) and dataclasses.is_dataclass(tp):
        yield tp
    for arg in typing.get_args(tp):
        yield from classes_in(arg)


def describe(tp: Any) -> str:
    """Describe an annotation for users."""
    origin, args = typing.get_origin(tp), typing.get_args(tp)
    if tp in (None, _NONE_TYPE):
        return "None"
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe(arg) for arg in args)
    if origin is typing.Literal:
        return " or ".join(repr(arg) for arg in args)
    if origin in (collections.abc.Callable, typing.Callable) or tp is typing.Callable:
        return "a function (@module.function)"
    if args:
        inner = ", ".join("..." if arg is ... else describe(arg) for arg in args)
        return f"{getattr(origin, '__name__', origin)}[{inner}]"
    return getattr(tp, "__name__", str(tp))


def fit(value: Any, tp: Any) -> Any:
    """Return `value` converted to the annotation `tp` (list -> tuple, int -> float, str -> Path), or raise
    `Mismatch`."""
    origin, args = typing.get_origin(tp), typing.get_args(tp)
    if isinstance(tp, typing.NewType):
        return fit(value, tp.__supertype__)
    if origin is typing.Annotated:
        return fit(value, args[0])
    if origin in (typing.Union, types.UnionType):
        return _fit_union(value, tp, args)
    if origin is typing.Literal:
        if not any(type(arg) is type(value) and arg == value for arg in args):
            raise Mismatch(describe(tp), nearest(str(value), map(str, args), "allowed"))
        return value
    if tp in (bool, int, float, str):
        return _fit_scalar(value, tp)
    kind = origin or tp
    if kind in (tuple, list, collections.abc.Sequence):
        return _fit_sequence(value, tp, list if kind is list else tuple, args)
    if kind in (dict, collections.abc.Mapping):
        return _fit_dict(value, tp, args)
    if kind in (collections.abc.Callable, typing.Callable):
        if not callable(value):
            raise Mismatch(describe(tp), "write @module.function, without quotes, and import the module")
        return value
    if kind is pathlib.Path and isinstance(value, str):
        return pathlib.Path(value)
    return _fit_class(value, _NONE_TYPE if tp is None else kind)


def _fit_union(value: Any, tp: Any, arms: tuple[Any, ...]) -> Any:
    """Return the value as the first arm takes it unchanged, else as the first takes it converted."""
    converted, remedies = [], []
    for arm in arms:
        try:
            fitted = fit(value, arm)
        except Mismatch as e:
            remedies.append(e.remedy)
            continue
        if type(fitted) is type(value):
            return fitted
        converted.append(fitted)
    if not converted:
        raise Mismatch(describe(tp), min(remedies, key=lambda r: (not r.startswith("did you mean"), not r)))
    return converted[0]


def _fit_scalar(value: Any, tp: type) -> Any:
    if type(value) is tp or (isinstance(value, tp) and not isinstance(value, bool)):
        return value
    if tp is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    remedy = ""
    if tp is int and isinstance(value, bool):
        remedy = f"write {int(value)}"
    elif tp is int and isinstance(value, float):
        remedy = f"write {int(value)}" if value.is_integer() else f"write an integer, such as {_near_int(value)}"
    elif tp is bool:
        remedy = f"write {str(value).lower() in ('1', '1.0', 'true', 'yes', 'on')}"
    elif tp is str and isinstance(value, (int, float)):
        remedy = f"write '{value}', with quotes"
    elif isinstance(value, str):
        remedy = f"write {'an integer' if tp is int else 'a number'} without quotes"
    raise Mismatch(tp.__name__, remedy)


def _near_int(value: float) -> int:
    return round(value) if abs(value) < 2**63 else 1


def _fit_sequence(value: Any, tp: Any, build: type, args: tuple[Any, ...]) -> Any:
    if not isinstance(value, (list, tuple)):
        raise Mismatch(describe(tp), "write a list in brackets: [first, second]")
    if build is tuple and args and (len(args) < 2 or args[1] is not ...) and typing.get_origin(tp) is tuple:
        if len(args) != len(value):
            raise Mismatch(f"{describe(tp)}: {len(args)} values, not {len(value)}")
        items = args
    else:
        items = (args[0] if args else Any,) * len(value)
    return build(_fit_item(f"item {i}", item, arg) for i, (item, arg) in enumerate(zip(value, items, strict=True)))


def _fit_dict(value: Any, tp: Any, args: tuple[Any, ...]) -> Any:
    if not isinstance(value, Mapping):
        raise Mismatch(describe(tp), "write {'key': value}")
    key_type, item_type = args or (str, Any)
    return {_fit_item("key", k, key_type): _fit_item(f"[{k!r}]", v, item_type) for k, v in value.items()}


def _fit_item(which: str, value: Any, tp: Any) -> Any:
    try:
        return fit(value, tp)
    except Mismatch as e:
        raise Mismatch(f"{e.want} ({which} is {value!r})", e.remedy) from None


def _fit_class(value: Any, tp: Any) -> Any:
    """Check classes by isinstance and protocols by their public members; accept anything else."""
    if not isinstance(tp, type) or tp in (object, Any) or typing.is_typeddict(tp):
        return value
    if getattr(tp, "_is_protocol", False):
        lacking = [name for name in _members(tp) if not hasattr(value, name)]
        if lacking:
            raise Mismatch(f"an object like {tp.__name__} (it has no {', '.join(lacking)})")
        return value
    if isinstance(value, tp):
        return value
    remedy = ""
    if isinstance(value, type) and issubclass(value, tp):
        remedy = f"add (): @{value.__module__.rpartition('.')[2]}.{value.__qualname__}()"
    elif dataclasses.is_dataclass(tp):
        remedy = f"write @{tp.__module__.rpartition('.')[2]}.{tp.__qualname__}() and import {tp.__module__}"
    elif isinstance(value, str):
        remedy = f"a class, called: @package.module.Class(), where Class derives from {tp.__name__}"
    elif dataclasses.is_dataclass(value):
        remedy = f"derive {type(value).__name__} from {tp.__module__}.{tp.__qualname__}"
    raise Mismatch(describe(tp), remedy)


def _members(protocol: type) -> list[str]:
    """Return the public attributes and methods of a Protocol."""
    names: set[str] = set()
    for base in protocol.__mro__:
        if getattr(base, "_is_protocol", False):
            names |= set(base.__dict__) | set(inspect.get_annotations(base))
    return sorted(name for name in names if name == "__call__" or not name.startswith("_"))


def full_name(obj: Any) -> str:
    """Return `package.module.Class`, the name of a class or function in resolved configs and error texts."""
    return f"{obj.__module__}.{obj.__qualname__}"
