"""A config that is built and checked, and how two of them differ."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from rolljax.errors import ConfigError

T = TypeVar("T")
ABSENT = "(absent)"
"""What `diff` shows for a path that one side does not have."""


@dataclasses.dataclass(frozen=True)
class Loaded(Generic[T]):
    """A config, built and checked.

    Attributes: value: the root object.
    """

    value: T
    resolved: dict[str, object]
    """Dotted path -> JSON-able value for every field of the tree, defaults included; `<path>.__class__` names each
    dataclass, `phases[0].steps` is a field of an item."""
    operative: str
    """One gin file with the imports and bindings that were read; loading it gives an equal `value`. Where objects were
    given (`config.objects`), the file is written from these."""
    where: Callable[[str], str] = dataclasses.field(repr=False, compare=False)
    """Origin of a setting ("Class.field"): file:line, --set text, or default."""

    def locate(self, error: ConfigError) -> ConfigError:
        """The error with `where` filled from its `setting` ("Class.field"): file:line, --set text, or default."""
        return error.located_at(self.where(error.setting))


def diff(old: Mapping[str, object], new: Mapping[str, object]) -> list[tuple[str, object, object]]:
    """Paths of two resolved configs that differ, with both values (`ABSENT` where a side lacks the path)."""
    pairs = [(path, old.get(path, ABSENT), new.get(path, ABSENT)) for path in dict.fromkeys((*old, *new))]
    return [(path, a, b) for path, a, b in pairs if a != b or isinstance(a, bool) != isinstance(b, bool)]
