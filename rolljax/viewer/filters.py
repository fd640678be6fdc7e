"""The search for trajectories: `reward<1 status:failed env:lake len>200 "left the room"`.

A term is a field, a relation and a value, or a text that must occur (case ignored); `-` before it negates it. All
terms must hold.
"""

from __future__ import annotations

import dataclasses
import operator
import re
from collections.abc import Callable

from rolljax.fields import Json
from rolljax.viewer.records import Record, summary

_RELATIONS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
    "=": operator.eq,
    ":": operator.eq,
}
_TERM = re.compile(r'(-?)(?:(\w+)(>=|<=|[><=:]))?(?:"([^"]*)"?|(\S+))')
NUMBERS = {
    "reward": "reward",
    "len": "sampled_tok",
    "prompt": "prompt_tok",
    "turns": "turns",
    "prompt_index": "prompt_index",
    "sibling": "sibling",
}
"""Fields that are compared as numbers, and where a summary has them."""
WORDS = ("status", "fault", "stage", "env", "success", "part")
"""Fields that are compared as texts: a value fits where it occurs. `part` compares a reward's part: `part:score>0`."""


class BadFilter(ValueError):
    """A filter's term is invalid; the text gives the reason."""


@dataclasses.dataclass(frozen=True)
class Term:
    """One condition."""

    field: str
    """Empty for a text."""
    relation: str
    value: str
    negated: bool

    def holds(self, record: Record, of: Json) -> bool:
        """Return whether it holds for a record and its `summary`."""
        return self._holds(record, of) != self.negated

    def _holds(self, record: Record, of: Json) -> bool:
        if not self.field:
            return any(self.value in text.lower() for text in record.texts)
        if self.field in NUMBERS:
            return _RELATIONS[self.relation](float(of[NUMBERS[self.field]]), float(self.value))
        if self.field == "part":
            name, relation, value = _part(self.value)
            return name in of["parts"] and _RELATIONS[relation](of["parts"][name], value)
        return self.value in self._word(of)

    def _word(self, of: Json) -> str:
        fault = of["fault"] or {}
        match self.field:
            case "success":
                return "yes" if of["success"] else "no"
            case "fault":
                return str(fault.get("kind", "none"))
            case "stage":
                return str(fault.get("stage", ""))
        return str(of[self.field]).lower()


@dataclasses.dataclass(frozen=True)
class Filter:
    """All of `terms`; none: everything."""

    terms: tuple[Term, ...] = ()

    @staticmethod
    def parse(text: str) -> Filter:
        """Read a search.

        Raises:
          BadFilter: a field is not known, or its value is not a number where it must be one.
        """
        return Filter(tuple(_term(m) for m in _TERM.finditer(text.strip())))

    def holds(self, record: Record) -> bool:
        """Return whether all terms hold for a trajectory."""
        if not self.terms:
            return True
        of = summary(record)
        return all(term.holds(record, of) for term in self.terms)


def _term(found: re.Match[str]) -> Term:
    negated, field, relation, quoted, bare = found.groups()
    value = (bare if quoted is None else quoted).lower()
    if not field:
        return Term("", "", value, bool(negated))
    field = field.lower()
    if field not in NUMBERS and field not in WORDS:
        raise BadFilter(f"{field!r} is no field; there are {', '.join((*NUMBERS, *WORDS))}; put texts in quotes")
    if field == "part":
        _part(value)
    elif field in NUMBERS and not _is_number(value):
        raise BadFilter(f"{field} is compared with a number, not {value!r}")
    elif field in WORDS and relation not in (":", "="):
        raise BadFilter(f"{field} is a word: write {field}:{value}")
    return Term(field, relation, value, bool(negated))


def _part(text: str) -> tuple[str, str, float]:
    found = re.fullmatch(r"(.+?)(>=|<=|[><=])(.+)", text)
    if not found or not _is_number(found[3]):
        raise BadFilter("a part of the reward is compared with a number: part:score>0")
    return found[1], found[2], float(found[3])


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
