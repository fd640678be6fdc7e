"""What docstrings of settings say, and values as text: for the pages that are made from the code."""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import Any


def read_doc(cls: type, names: list[str]) -> tuple[list[str], dict[str, str]]:
    """Paragraphs of a docstring, and what it says about settings (`name, name: meaning.`)."""
    paragraphs, meanings = [], {}
    either = "|".join(map(re.escape, names))
    entry = re.compile(rf"(?:^|(?<=[.;)] ))((?:{either})(?:, (?:{either}))*): ") if names else re.compile("(?!)")
    for block in re.split(r"\n\s*\n", inspect.cleandoc(cls.__doc__ or "")):
        text = " ".join(block.split())
        found = list(entry.finditer(text))
        prose = text[: found[0].start()].strip() if found else text
        if prose:
            paragraphs.append(prose)
        for match, after in zip(found, [*found[1:], None], strict=False):
            meaning = text[match.end() : after.start() if after else len(text)].strip()
            meanings.update(dict.fromkeys(match[1].split(", "), meaning))
    return paragraphs, meanings


def meanings_of(cls: type) -> dict[str, str]:
    """What docstrings say about each setting, a class over its bases.

    Raises:
      KeyError: a setting that no docstring explains.
    """
    names = [f.name for f in dataclasses.fields(cls)]
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base):
            found |= read_doc(base, names)[1]
    if unexplained := [name for name in names if name not in found]:
        raise KeyError(f"{cls.__module__}.{cls.__qualname__}: the docstring explains no {', '.join(unexplained)}")
    return found


def linked(text: str) -> str:
    """Papers as links."""
    text = re.sub(r"arXiv (\d{4}\.\d{4,5})", r"[arXiv \1](https://arxiv.org/abs/\1)", text)
    return re.sub(r"doi (10\.\d+/[\w.]+\w)", r"[doi \1](https://doi.org/\1)", text)


def shown(value: Any) -> str:
    """A default as it is written in code, fields of objects only where they differ from their own defaults."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        pairs = [(f, getattr(value, f.name)) for f in dataclasses.fields(value)]
        given = [f"{f.name}={shown(v)}" for f, v in pairs if v != field_default(f)]
        return f"{type(value).__name__}({', '.join(given)})"
    return repr(value)


def field_default(field: dataclasses.Field) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def cell(text: str) -> str:
    return text.replace("|", "\\|")
