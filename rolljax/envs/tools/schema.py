"""JSON schemas of Python functions, and a check of arguments against them.

The check knows the keywords that `schema_of` writes: type, properties, required, additionalProperties, items, enum and
anyOf. Other keywords allow everything.
"""

from __future__ import annotations

import collections.abc
import inspect
import json
import math
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Union

from rolljax.errors import ConfigError

_NAMES: dict[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
_LISTS = (list, tuple, collections.abc.Sequence, collections.abc.Iterable)
_OBJECTS = (dict, collections.abc.Mapping)


def schema_of(function: Callable[..., Any]) -> tuple[str, dict[str, Any]]:
    """Derive description and input schema of a function from its docstring, signature and type hints.

    Raises:
      ConfigError: a parameter has no type hint, or one without a JSON type.
    """
    name = getattr(function, "__name__", repr(function))
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except (NameError, TypeError, AttributeError, SyntaxError) as e:
        raise ConfigError(f"has type hints that cannot be read: {e}", setting="tool", value=name) from e
    description, told = _documented(inspect.getdoc(function) or "")
    properties: dict[str, Any] = {}
    required = []
    for p in inspect.signature(function).parameters.values():
        if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD, p.POSITIONAL_ONLY) or p.name not in hints:
            raise ConfigError(
                f"parameter {p.name!r} cannot be described to a policy",
                setting="tool",
                value=name,
                remedy="give it a name and a type hint, like (city: str, nights: int = 1)",
            )
        properties[p.name] = _type_schema(hints[p.name], f"{name}({p.name})")
        if p.name in told:
            properties[p.name].setdefault("description", told[p.name])
        if p.default is p.empty:
            required.append(p.name)
        elif p.default is None or isinstance(p.default, (str, int, float, bool)):
            properties[p.name]["default"] = p.default
    schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return description, schema


def _type_schema(hint: Any, where: str) -> dict[str, Any]:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return {}
    if hint in _NAMES:
        return {"type": _NAMES[hint]}
    if origin is Annotated:
        told = next((a for a in args[1:] if isinstance(a, str)), None)
        return _type_schema(args[0], where) | ({"description": told} if told else {})
    if origin is Literal:
        kinds = {_NAMES[type(a)] for a in args}
        return ({"type": kinds.pop()} if len(kinds) == 1 else {}) | {"enum": list(args)}
    if origin in (Union, types.UnionType):
        return {"anyOf": [_type_schema(a, where) for a in args]}
    if hint in _LISTS or origin in _LISTS:
        inner = [a for a in args if a is not Ellipsis]
        return {"type": "array"} | ({"items": _type_schema(inner[0], where)} if len(inner) == 1 else {})
    if hint in _OBJECTS or origin in _OBJECTS:
        return {"type": "object"} | ({"additionalProperties": _type_schema(args[1], where)} if args else {})
    raise ConfigError(
        f"has a type that JSON has no word for: {hint}",
        setting="tool",
        value=where,
        remedy="use str, int, float, bool, list[...], dict[str, ...], Literal[...] or None",
    )


def _documented(doc: str) -> tuple[str, dict[str, str]]:
    """Return the first paragraph of a docstring, and the description of each parameter in its `Args:` section."""
    head, _, rest = doc.partition("Args:\n")
    told: dict[str, str] = {}
    name = ""
    for line in rest.split("\n"):
        if line and not line[0].isspace():
            break
        if found := re.match(r" {1,4}(\w+)(?: \([^)]*\))?: *(.*)", line):
            name, told[found[1]] = found[1], found[2].strip()
        elif name and line.strip():
            told[name] += " " + line.strip()
    return " ".join(head.strip().split("\n\n")[0].split()), told


def problem_of(schema: Mapping[str, Any], value: Any, name: str = "") -> str:
    """Return a message for the policy that describes the first violation of `schema` by `value`; empty if it is
    valid."""
    called = f"argument {name!r}" if name else "the arguments"
    if "anyOf" in schema:
        problems = [problem_of(s, value, name) for s in schema["anyOf"]]
        return "" if "" in problems else " or ".join(dict.fromkeys(problems))
    kind = schema.get("type")
    if isinstance(kind, str) and not _is(kind, value):
        return f"{called} must be {'an' if kind[0] in 'aeiou' else 'a'} {kind}"
    if "enum" in schema and not any(type(v) is type(value) and v == value for v in schema["enum"]):
        return f"{called} must be one of {json.dumps(schema['enum'], ensure_ascii=False)}"
    if isinstance(value, list) and isinstance(schema.get("items"), Mapping):
        return next((p for i, v in enumerate(value) if (p := problem_of(schema["items"], v, f"{name}[{i}]"))), "")
    if isinstance(value, Mapping):
        return _object_problem(schema, value, name)
    return ""


def _object_problem(schema: Mapping[str, Any], value: Mapping[str, Any], name: str) -> str:
    properties = schema.get("properties") or {}
    inside = f"{name}." if name else ""
    for key in schema.get("required") or ():
        if key not in value:
            return f"argument {inside + key!r} is missing"
    rest = schema.get("additionalProperties", True)
    for key, v in value.items():
        if key in properties:
            problem = problem_of(properties[key], v, inside + key)
        elif rest is False:
            takes = ", ".join(properties) or "none"
            problem = f"there is no argument {inside + str(key)[:80]!r}; arguments: {takes}"
        else:
            problem = problem_of(rest, v, inside + str(key)[:80]) if isinstance(rest, Mapping) else ""
        if problem:
            return problem
    return ""


def _is(kind: str, value: Any) -> bool:
    if kind in ("integer", "number"):
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        return is_integer or (kind == "number" and isinstance(value, float) and math.isfinite(value))
    types_of = {"string": str, "boolean": bool, "array": list, "object": Mapping, "null": type(None)}
    return kind not in types_of or isinstance(value, types_of[kind])
