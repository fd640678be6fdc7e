"""Writes config objects that a program built in Python as gin text, which people can read and every verb loads.

Each object of the tree becomes the bindings of its fields. A class with one value in the tree is bound without a scope,
one with several in a scope for each. A value that no file can name (a lambda, a nested function, a live object) is
written as `%gin.REQUIRED` with a comment; whoever loads the file must set it.
"""

from __future__ import annotations

import inspect
import pathlib
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rolljax.config.classes import default, fields, is_config
from rolljax.config.resolved import flatten

REQUIRED = "%gin.REQUIRED"
MAX_SOURCE_LINES = 60
"""Longest function whose source is written into a comment."""
_SCALARS = (bool, int, float, str)


def gin_text(root: object) -> str:
    """Return a gin file whose root equals `root`, a frozen dataclass, as far as its parts can be named."""
    return _Writer(root).text()


def is_literal(value: object) -> bool:
    """Return whether gin can write a value: a number, text, None, a path, or lists, tuples and dicts of them."""
    if type(value) in (list, tuple):
        return all(map(is_literal, value))  # type: ignore[call-overload]
    if type(value) is dict:
        return all(is_literal(part) for pair in value.items() for part in pair)
    return value is None or type(value) in _SCALARS or isinstance(value, pathlib.PurePath)


def literal(value: object) -> str:
    """Return a literal as gin text."""
    if isinstance(value, pathlib.PurePath):
        return repr(str(value))
    return repr(value).replace("inf", "1e999") if isinstance(value, float) else repr(value)


def is_importable(value: object) -> bool:
    """Return whether a class or function can be imported by its own name; `__main__` counts, in this process."""
    found: object = sys.modules.get(getattr(value, "__module__", None) or "")
    for part in getattr(value, "__qualname__", "<none>").split("."):
        found = getattr(found, part, None)
    return found is value


def symbols(modules: Iterable[str]) -> dict[str, str]:
    """Return the name of each module in a file: the last part of its path, or all of it where two share that."""
    names = sorted(set(modules))
    shared = Counter(module.rpartition(".")[2] for module in names)
    return {m: last if shared[last := m.rpartition(".")[2]] == 1 else m.replace(".", "_") for m in names}


def import_lines(found: Mapping[str, str]) -> list[str]:
    """Return the first lines of a file that uses these `symbols`."""
    return ["from __gin__ import dynamic_registration", *(_import_line(m, name) for m, name in found.items())]


def _import_line(module: str, symbol: str) -> str:
    parent, _, last = module.rpartition(".")
    line = f"from {parent} import {last}" if parent else f"import {module}"
    return line if symbol == last else f"{line} as {symbol}"


class _Writer:
    """Writes one tree of objects as text."""

    def __init__(self, root: object) -> None:
        self._root = root
        self._values: dict[type, list[object]] = {}
        self._used: list[Any] = []
        self._collect(root)
        self._names = symbols(obj.__module__ for obj in (*self._values, *self._used))

    def text(self) -> str:
        lines = [*import_lines(self._names), ""]
        for cls, values in self._values.items():
            for value in values:
                lines += self._bindings(cls, value)
        return "\n".join(lines).rstrip() + "\n"

    def _collect(self, value: object) -> None:
        """Note every object, class and function below `value`."""
        if _is_named_config(value):
            known = self._values.setdefault(type(value), [])
            if not any(_is_same(value, other) for other in known):
                known.append(value)
            for name in fields(type(value)):
                self._collect(getattr(value, name))
        elif isinstance(value, Mapping):
            self._collect_all(value.values())
        elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
            self._collect_all(value)
        elif _is_named(value):
            self._used.append(value)

    def _collect_all(self, values: Iterable[object]) -> None:
        for value in values:
            self._collect(value)

    def _bindings(self, cls: type, value: object) -> list[str]:
        """Return the fields of one object that differ from their defaults."""
        lines, before = [], self._scope(cls, value)
        for name, field in fields(cls).items():
            inner = getattr(value, name)
            if is_literal(inner) and _is_same(inner, default(field)):
                continue
            if not self._is_written(inner):
                lines += _comment(inner)
            lines.append(f"{before}{self._selector(cls)}.{name} = {self._shown(inner)}")
        return [*lines, ""] if lines else []

    def _is_written(self, value: object) -> bool:
        return REQUIRED not in self._shown(value)

    def _shown(self, value: object) -> str:
        """Return a value as gin text."""
        if is_literal(value):
            return _written_literal(value)
        if _is_named_config(value):
            return f"@{self._scope(type(value), value)}{self._selector(type(value))}()"
        if isinstance(value, Mapping):
            return "{" + ", ".join(f"{literal(k)}: {self._shown(v)}" for k, v in value.items()) + "}"
        if type(value) in (list, tuple):
            return "[" + ", ".join(map(self._shown, value)) + "]"  # type: ignore[call-overload]
        return f"@{self._selector(value)}" if _is_named(value) else REQUIRED

    def _scope(self, cls: type, value: object) -> str:
        values = self._values[cls]
        if len(values) == 1:
            return ""
        number = next(i for i, other in enumerate(values) if _is_same(value, other))
        label = getattr(value, "name", None)  # that of a phase, where it is a word of its own
        own = isinstance(label, str) and label.isidentifier() and sum(_label(v) == label for v in values) == 1
        return f"{label if own else f'{cls.__name__.lower()}_{number}'}/"

    def _selector(self, obj: Any) -> str:
        return f"{self._names[obj.__module__]}.{obj.__qualname__}"


def _label(value: object) -> object:
    return getattr(value, "name", None)


def _is_named_config(value: object) -> bool:
    """Return whether a value is an object of a config class that a file can name."""
    return is_config(type(value)) and is_importable(type(value))


def _is_named(value: object) -> bool:
    """Return whether a class or function can be written as `@module.name`."""
    return (inspect.isclass(value) or inspect.isroutine(value)) and is_importable(value)


def _is_same(a: object, b: object) -> bool:
    """Return whether two values are equal and written in the same way: 1, 1.0 and True are not."""
    return a is b or (type(a) is type(b) and bool(a == b) and flatten(a) == flatten(b))


def _written_literal(value: object) -> str:
    """Return the text of a literal, including nested tuples, lists and dicts."""
    if type(value) in (list, tuple):
        inner = [_written_literal(item) for item in value]  # type: ignore[attr-defined]
        closed = f"({', '.join(inner)}{',' * (len(inner) == 1)})"
        return closed if type(value) is tuple else f"[{', '.join(inner)}]"
    if type(value) is dict:
        return "{" + ", ".join(f"{_written_literal(k)}: {_written_literal(v)}" for k, v in value.items()) + "}"
    return literal(value)


def _comment(value: object) -> list[str]:
    """Return a comment on a value that cannot be written: its name or repr, and its source if available."""
    shown = getattr(value, "__qualname__", None) or repr(value)
    said = ["# given by the program that started the run, and to be given again:", *_commented(shown)]
    try:
        source = inspect.getsource(value).splitlines() if inspect.isroutine(value) else []
    except (OSError, TypeError):
        source = []
    return [*said, *_commented("\n".join(source[:MAX_SOURCE_LINES]))]


def _commented(text: str) -> list[str]:
    return [f"#   {line}" for line in text.splitlines()]
