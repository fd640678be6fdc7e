"""The classes that settings name: frozen dataclasses, their fields, and the modules they are imported from."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import pkgutil
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from rolljax.config import check
from rolljax.config.parser import leaves
from rolljax.errors import ConfigError, boundary


def is_config(cls: Any) -> bool:
    """Return whether `cls` is a frozen dataclass that its fields construct."""
    params = getattr(cls, "__dataclass_params__", None) if isinstance(cls, type) else None
    return params is not None and params.frozen and params.init


def fields(cls: type) -> dict[str, dataclasses.Field]:
    """Return the fields that can be set, by name."""
    return {field.name: field for field in dataclasses.fields(cls) if field.init}


def default(field: dataclasses.Field) -> Any:
    """Return the field's default, a new one from its factory, or `dataclasses.MISSING`."""
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def objects_below(value: Any) -> list[Any]:
    """Return the config objects in a value, at any depth."""
    found = [leaf for leaf in leaves(value, object) if is_config(type(leaf))]
    return found + [below for o in found for name in fields(type(o)) for below in objects_below(getattr(o, name))]


def default_classes(cls: type) -> list[type]:
    """Return the classes of the objects in the defaults of `cls`."""
    found = [type(leaf) for field in fields(cls).values() for leaf in leaves(default(field), object)]
    return [cls for cls in found if is_config(cls)]


def mentioned_classes(cls: type) -> list[type]:
    """Return the config classes in the annotations of a class."""
    return [c for tp in check.hints(cls).values() for c in check.classes_in(tp) if is_config(c)]


def closure(start: Iterable[type], grow: Callable[[type], list[type]]) -> dict[type, None]:
    """Return the classes, the classes that `grow` finds for each, and so on; keys in the order found."""
    seen: dict[type, None] = {}
    todo = list(start)
    while todo:
        if (cls := todo.pop()) not in seen:
            seen[cls] = None
            todo += grow(cls)
    return seen


def check_class(cls: Any, selector: str, where: str) -> None:
    """Raise `ConfigError` unless `cls`, which `selector` names, is a frozen dataclass."""
    if not is_config(cls):
        remedy = "set fields of a frozen dataclass; @module.Class() builds one, @module.function names a function"
        if isinstance(cls, type):
            remedy = f"put @dataclasses.dataclass(frozen=True) on {cls.__name__}"
        raise ConfigError("is not a frozen dataclass", setting=selector, remedy=remedy, where=where)


def import_module(module: str, where: str) -> ModuleType:
    """Import a module that a file or a setting names.

    Raises:
      ConfigError: there is none, or importing it failed.
    """
    try:
        with boundary(ConfigError, "was found, but importing it failed"):
            return importlib.import_module(module)
    except ConfigError as e:
        broken = e.__cause__ or e
        if isinstance(broken, ModuleNotFoundError) and broken.name and f"{module}.".startswith(f"{broken.name}."):
            raise ConfigError(
                f"cannot be imported: there is no module '{broken.name}'",
                setting=module,
                remedy=modules_near(broken.name),
                where=where,
            ) from None
        remedy = f"run: python -c 'import {module}'"
        raise ConfigError(e.message, setting=module, remedy=remedy, where=where) from broken


def shipped_beside(classes: Iterable[type], selector: str) -> list[type]:
    """Return rolljax's config classes in the packages of `classes` and in recipes whose paths end with `selector`.
    No modules but theirs are imported."""
    name = selector.rpartition(".")[2]
    modules = [m for m in _modules_beside(classes) if f".{m}.{name}".endswith(f".{selector}")]
    found = [getattr(importlib.import_module(m), name) for m in modules if name in _classes_in(m)]
    return [cls for cls in found if is_config(cls)]


def names_beside(classes: Iterable[type]) -> set[str]:
    """Return the names of all classes in rolljax's packages of `classes` and in recipes, which are not imported."""
    return {name for module in _modules_beside(classes) for name in _classes_in(module) if name[0] != "_"}


def _modules_beside(classes: Iterable[type]) -> list[str]:
    """Return the modules in those packages of rolljax that hold `classes`, and in the packages of recipes."""
    homes = {home for cls in classes if (home := cls.__module__.rpartition(".")[0]).startswith("rolljax.")}
    recipes = importlib.import_module("rolljax.recipes")
    homes |= {info.name for info in pkgutil.iter_modules(recipes.__path__, f"{recipes.__name__}.")}
    packages = [importlib.import_module(home) for home in sorted(homes)]
    return [info.name for p in packages for info in pkgutil.iter_modules(p.__path__, f"{p.__name__}.")]


def _classes_in(module: str) -> list[str]:
    """Return the names of the classes that a module's source defines."""
    spec = importlib.util.find_spec(module)
    source = Path(spec.origin) if spec and spec.origin else None
    return re.findall(r"^class (\w+)[:(]", source.read_text(encoding="utf-8"), re.MULTILINE) if source else []


def modules_near(module: str) -> str:
    """Return a remedy for a module that does not exist: the nearest name in its package."""
    parent, _, last = module.rpartition(".")
    beside = pkgutil.iter_modules(getattr(importlib.import_module(parent), "__path__", [])) if parent else []
    remedy = check.nearest(last, [m.name for m in beside], f"modules in {parent}")
    return remedy or "check the spelling, and that it is installed or its folder is in PYTHONPATH"
