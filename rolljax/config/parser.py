"""The text of gin files: statements, and the values in them. The grammar is gin's own; nothing else of gin is used.

The package gin is imported when the first text is read. Who builds a `Recipe` in Python does not need it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import tokenize
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from rolljax.errors import ConfigError, needed

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Ref:
    """`@scope/module.Class()` or `@module.function` in a value; `obj` is the object that the selector names."""

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
    """Return `value` with `fn` applied to every leaf of its lists, tuples and dicts."""
    if type(value) in (list, tuple):
        return type(value)(map_leaves(item, fn) for item in value)
    if type(value) is dict:
        return {map_leaves(key, fn): map_leaves(item, fn) for key, item in value.items()}
    return fn(value)


def leaves(value: Any, kind: type[T]) -> list[T]:
    """Return the leaves of `value` that are of one class."""
    found: list[Any] = []
    map_leaves(value, found.append)
    return [leaf for leaf in found if isinstance(leaf, kind)]


class _Delegate:
    """Makes the values of `@` and `%` for gin's parser."""

    def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> Ref:
        scope, _, selector = scoped_configurable_name.rpartition("/")
        return Ref(scope, selector, evaluate)

    def macro(self, macro_name: str) -> Macro:
        return Macro(macro_name)


def _parser(text: str) -> Any:
    with needed("gin", "reading a gin file", install="gin-config", otherwise="build a rolljax.Recipe in Python"):
        from gin import config_parser
    return config_parser.ConfigParser(text, _Delegate())


def statements(text: str, path: str) -> Iterator[Any]:
    """Yield the statements of a file, by gin's own parser; its errors become `ConfigError`."""
    parser = None
    try:
        parser = _parser(text)
        yield from parser
    except (SyntaxError, tokenize.TokenError) as e:
        if isinstance(e, SyntaxError):
            message, line = e.msg, e.lineno or 1
            remedy = "a line is `module.Class.field = value` or `name = value`"
        else:  # the end of the file inside brackets or quotes: name the last line that has something
            message, line = e.args[0], parser.current_token.start[0] if parser else e.args[1][0]
            remedy = "a bracket or quote is open"
        _, _, word = message.partition("Failed to parse token ")
        remedy = f"text goes in quotes: {word}" if word else remedy
        message = f"cannot read the value {word}" if word else f"syntax error: {message.strip()}"
        lines = [*text.splitlines(), ""]
        written = lines[min(line, len(lines)) - 1].strip()
        raise ConfigError(message, value=written, remedy=remedy, where=f"{path}:{line}") from None


def setting_value(text: str, where: str) -> Any:
    """Parse a gin value; a bare word or path is a string."""
    with contextlib.suppress(SyntaxError, tokenize.TokenError):
        found = list(_parser(f"value = {text}"))
        if len(found) == 1:
            return found[0].value
    if text[0] in "@%[({'\"":
        raise ConfigError("cannot read the value", value=text, remedy="is a quote or bracket missing?", where=where)
    return text
