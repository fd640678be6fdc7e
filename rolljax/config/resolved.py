"""Resolved configs: every setting of a tree by its path, as JSON holds it. `flatten` makes one, `diff` compares two,
`build` makes objects of one again.

A file of settings names every class and function of a run, also those of the script or notebook that started it. The
resolved config has the value of each setting, so that some of them can be had where the others cannot.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pathlib
from collections.abc import Collection, Mapping
from typing import Any

from rolljax.config import check
from rolljax.config.classes import fields, is_config
from rolljax.errors import ConfigError, boundary

ABSENT = "(absent)"
"""Value that `diff` shows for a path that one side does not have."""
CLASS = "__class__"


def flatten(value: Any, path: str = "") -> dict[str, object]:
    """Return dotted path -> JSON-able value for every field; `<path>.__class__` names the class of each dataclass."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        out: dict[str, object] = {_join(path, CLASS): check.full_name(type(value))}
        for field in dataclasses.fields(value):
            out |= flatten(getattr(value, field.name), _join(path, field.name))
        return out
    if _holds_dataclass(value):
        if isinstance(value, Mapping):
            pairs = [(_join(path, str(key)), item) for key, item in value.items()]
        else:
            pairs = [(f"{path}[{i}]", item) for i, item in enumerate(value)]
        return {key: leaf for inner, item in pairs for key, leaf in flatten(item, inner).items()}
    return {path: _plain(value)}


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _holds_dataclass(value: Any) -> bool:
    if isinstance(value, (list, tuple, Mapping)):
        return any(map(_holds_dataclass, value.values() if isinstance(value, Mapping) else value))
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _plain(value: Any) -> object:
    """Convert a leaf to JSON: scalars unchanged, containers of them, names of functions, text of the rest."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((_plain(item) for item in value), key=repr)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, pathlib.PurePath):
        return str(value)
    if inspect.isclass(value) or callable(value) and hasattr(value, "__qualname__"):
        return check.full_name(value)
    return check.full_name(type(value)) if " at 0x" in repr(value) else repr(value)


def diff(old: Mapping[str, object], new: Mapping[str, object]) -> list[tuple[str, object, object]]:
    """Return the paths where two resolved configs differ, with both values (`ABSENT` where a side lacks the path)."""
    pairs = [(path, old.get(path, ABSENT), new.get(path, ABSENT)) for path in dict.fromkeys((*old, *new))]
    return [(path, a, b) for path, a, b in pairs if a != b or isinstance(a, bool) != isinstance(b, bool)]


def build(resolved: Mapping[str, Any], path: str, annotation: Any = Any) -> Any:
    """Return the value at a path: an object of its recorded class, a tuple of such objects, or a plain value.

    Args:
      annotation: the type annotation that the value must fit.

    Raises:
      ConfigError: the path has no value, its class cannot be imported, or the value does not fit the annotation.
    """
    try:
        return check.fit(_value(resolved, path), annotation)
    except check.Mismatch as e:
        raise ConfigError(str(e), setting=path, value=resolved.get(path), remedy=e.remedy) from None


def build_fields(resolved: Mapping[str, Any], cls: type, leave_out: Collection[str]) -> dict[str, Any]:
    """Return the fields of a class at the root of a resolved config, but for those to leave out and those it lacks.
    Raises as `build` does."""
    names = [name for name in fields(cls) if name not in leave_out and has(resolved, name)]
    return {name: build(resolved, name, check.hints(cls)[name]) for name in names}


def has(resolved: Mapping[str, Any], path: str) -> bool:
    """Return whether a path has a value."""
    return path in resolved or f"{path}.{CLASS}" in resolved or _has_items(resolved, path)


def _has_items(resolved: Mapping[str, Any], path: str) -> bool:
    return f"{path}[0]" in resolved or f"{path}[0].{CLASS}" in resolved


def _value(resolved: Mapping[str, Any], path: str) -> Any:
    if name := resolved.get(f"{path}.{CLASS}"):
        cls = _class(str(name), path)
        inner = {field: f"{path}.{field}" for field in fields(cls)}
        given = {f: build(resolved, p, check.hints(cls)[f]) for f, p in inner.items() if has(resolved, p)}
        with boundary(ConfigError, f"{path} cannot be built again"):
            return cls(**given)
    if path in resolved:
        return resolved[path]
    found: list[Any] = []
    while has(resolved, item := f"{path}[{len(found)}]"):
        found.append(_value(resolved, item))
    if not found:
        raise ConfigError("is missing from the settings", setting=path)
    return tuple(found)


def _class(name: str, path: str) -> Any:
    """Return the frozen dataclass of a full name, whose module may have any number of parts."""
    parts = name.split(".")
    for i in range(len(parts) - 1, 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:i]))
            for part in parts[i:]:
                found = getattr(found, part)
        except (ImportError, AttributeError):
            continue
        if is_config(found) and dataclasses.is_dataclass(found):
            return found
    raise ConfigError(
        "is of a class that is not here",
        setting=path,
        value=name,
        remedy="put the class into a module that is installed",
    )
