"""A config that a program built in Python, as gin would have built it: checked, and with settings over its fields."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from rolljax.config import check, objects
from rolljax.config.classes import fields, is_config
from rolljax.config.loaded import Loaded
from rolljax.config.values import map_leaves
from rolljax.errors import ConfigError

T = TypeVar("T")


def given(root: T, settings: Mapping[str, object] | None = None) -> Loaded[T]:
    """A tree of frozen dataclasses as a config.

    Values that do not fit their annotations are refused, and a list is taken for a tuple and an int for a float where
    the annotation says so, as in a gin file.

    Args:
      settings: `Class.field` -> value: of every object of that class in the tree, as in a gin file without scopes.

    Raises:
      ConfigError: a value that does not fit, or a setting that no object of the tree has.
    """
    tree = _Tree(dict(settings or {}))
    value = tree.built(root)
    tree.check_all_read()
    return Loaded(value, check.flatten(value), objects.gin_text(value), lambda _: "")


class _Tree:
    """Rebuilds the objects of a tree where a value was set or converted."""

    def __init__(self, settings: dict[str, object]) -> None:
        self._settings = settings
        self._read: set[str] = set()
        self._known: set[str] = set()

    def built(self, value: Any) -> Any:
        """`value` with what was set below it."""
        cls = type(value)
        if not is_config(cls):
            return value
        changes = {}
        for name in fields(cls):
            before = getattr(value, name)
            after = self._fitted(cls, name, self._set_to(cls, name, before))
            if after is not before:
                changes[name] = after
        return dataclasses.replace(value, **changes) if changes else value

    def check_all_read(self) -> None:
        """Every setting reached an object."""
        for name, value in self._settings.items():
            if name not in self._read:
                scoped = "/" in name
                raise ConfigError(
                    "has a scope, and objects have none" if scoped else "is no field of an object of this config",
                    setting=name,
                    value=value,
                    remedy="change the object itself" if scoped else check.nearest(name, self._known, "settings"),
                )

    def _set_to(self, cls: type, name: str, before: Any) -> Any:
        own = f"{cls.__name__}.{name}"
        self._known.add(own)
        full = f".{check.full_name(cls)}.{name}"
        for setting, value in self._settings.items():
            if full.endswith(f".{setting}") and "." in setting:
                self._read.add(setting)
                return value
        return before

    def _fitted(self, cls: type, name: str, value: Any) -> Any:
        """A field's value as its annotation wants it, and what is below it built; the same object where nothing is
        changed."""
        inner = map_leaves(value, self.built)
        try:
            fitted = check.fit(inner, check.hints(cls)[name])
        except check.Mismatch as e:
            raise ConfigError(str(e), setting=f"{cls.__name__}.{name}", value=value, remedy=e.remedy) from None
        return value if type(fitted) is type(value) and _all_same(fitted, value) else fitted


def _all_same(a: Any, b: Any) -> bool:
    """Whether two values hold the very same leaves."""
    if type(a) is not type(b):
        return False
    if type(a) in (list, tuple):
        return len(a) == len(b) and all(map(_all_same, a, b))
    if type(a) is dict:
        return a.keys() == b.keys() and all(_all_same(a[key], b[key]) for key in a)
    return a is b
