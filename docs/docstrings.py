"""What docstrings of settings say, and values as text: for the pages that are made from the code."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import re
import textwrap
from typing import Any


def paragraphs_of(cls: type) -> list[str]:
    """Return the paragraphs of a class docstring, a line each."""
    blocks = re.split(r"\n\s*\n", inspect.cleandoc(cls.__doc__ or ""))
    return [" ".join(block.split()) for block in blocks if block.strip()]


def attribute_docs(cls: type) -> dict[str, str]:
    """Return the attribute docstrings of a class: the string under each field, by the field's name."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body
    return {
        field.target.id: " ".join(below.value.value.split())
        for field, below in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(below, ast.Expr)
        and isinstance(below.value, ast.Constant)
        and isinstance(below.value.value, str)
    }


def meanings_of(cls: type) -> dict[str, str]:
    """Return the explanation of each setting; a class overrides its bases.

    Raises:
      KeyError: a setting has no attribute docstring.
    """
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        if not base.__module__.startswith(("abc", "typing", "collections")):
            found |= attribute_docs(base)
    names = [f.name for f in dataclasses.fields(cls)]
    if unexplained := [name for name in names if name not in found]:
        raise KeyError(f"{cls.__module__}.{cls.__qualname__}: no string under {', '.join(unexplained)}")
    return {name: found[name] for name in names}


def linked(text: str) -> str:
    """Replace papers by links."""
    text = re.sub(r"arXiv (\d{4}\.\d{4,5})", r"[arXiv \1](https://arxiv.org/abs/\1)", text)
    return re.sub(r"doi (10\.\d+/[\w.]+\w)", r"[doi \1](https://doi.org/\1)", text)


def shown(value: Any) -> str:
    """Format a default as code, with fields of objects only where they differ from their own defaults."""
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
