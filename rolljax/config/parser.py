"""The parser of gin files and of values in them. The grammar is gin's own (`gin.config_parser`).

This is where the package gin is imported. Who builds a `Recipe` in Python does not need it.
"""

from __future__ import annotations

import contextlib
import tokenize
from collections.abc import Iterator
from typing import Any

from rolljax.config.values import Macro, Ref
from rolljax.errors import ConfigError, needed

with needed("gin", "reading a gin file", install="gin-config", otherwise="build a rolljax.Recipe in Python"):
    import gin
    import gin.config
    from gin import config_parser

__all__ = ["config_parser", "gin", "setting_value", "statements"]


class _Delegate(config_parser.ParserDelegate):
    """What gin's parser makes of `@` and `%`."""

    def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> Ref:
        scope, _, selector = scoped_configurable_name.rpartition("/")
        return Ref(scope, selector, evaluate)

    def macro(self, macro_name: str) -> Macro:
        return Macro(macro_name)


def statements(text: str, path: str) -> Iterator[Any]:
    """The statements of a file, by gin's own parser; its errors as `ConfigError`."""
    parser = None
    try:
        parser = config_parser.ConfigParser(text, _Delegate())
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
    """A gin value; a bare word or path is a string."""
    with contextlib.suppress(SyntaxError, tokenize.TokenError):
        found = list(config_parser.ConfigParser(f"value = {text}", _Delegate()))
        if len(found) == 1:
            return found[0].value
    if text[0] in "@%[({'\"":
        raise ConfigError("cannot read the value", value=text, remedy="is a quote or bracket missing?", where=where)
    return text
