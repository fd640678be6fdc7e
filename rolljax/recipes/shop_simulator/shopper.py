"""The shopper: a wish, and scripted answers that reveal only the slots that the policy asks about."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping

from rolljax.envs.bm25 import words

BUDGET = "budget"
_MEANS = {
    "color": ("color", "colour", "colors", "colours", "shade"),
    "size": ("size", "sizes", "big"),
    BUDGET: ("budget", "price", "cost", "spend", "pay", "money", "expensive", "cheap"),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Wish:
    """A shopper's wish, and how a task's prices are drawn."""

    category: int
    type: str
    attributes: Mapping[str, str]
    options: Mapping[str, str]
    budget: int
    prices: int
    habits: Mapping[str, str]
    """Slot -> value that the policy sees from the start, as the shopper's persona; habits for other kinds of goods are
    among them."""

    def to_text(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def of(text: str) -> Wish:
        return Wish(**json.loads(text))

    @property
    def slots(self) -> dict[str, str]:
        """All parts of the wish except the type: slot -> value, the budget last."""
        return {**self.attributes, **self.options, BUDGET: str(self.budget)}

    @property
    def open_slots(self) -> list[str]:
        """Slots that no habit reveals."""
        return [slot for slot in self.slots if slot not in self.habits]


def asked(text: str, known_slots: Iterable[str], most: int) -> list[str]:
    """Return the slots that a question names, at most `most`, in the order of the question."""
    found: list[str] = []
    for word in words(text[:400]):
        slot = next((s for s in known_slots if word in _MEANS.get(s, (s,))), None)
        if slot and slot not in found:
            found.append(slot)
    return found[:most]


def opening(wish: Wish, *, vague: bool, short: bool) -> str:
    """Return the shopper's first message: only the type, or everything that no habit reveals."""
    told = {} if vague else {slot: wish.slots[slot] for slot in wish.open_slots}
    if short:
        return " ".join([wish.type, *(f"<={v}" if k == BUDGET else v for k, v in told.items())])
    if vague:
        return f"The shopper says: I am looking for a {wish.type}."
    parts = [f"for at most {v}" if k == BUDGET else f"{k} {v}" for k, v in told.items()]
    return f"The shopper says: I am looking for a {wish.type}: {', '.join(parts)}."


def persona(wish: Wish, *, short: bool) -> str:
    """Return the habits as text; empty if there are none."""
    if not wish.habits:
        return ""
    if short:
        return "usual " + " ".join(wish.habits.values())
    return f"The shopper's habits: {', '.join(f'{k} {v}' for k, v in wish.habits.items())}."


def answer(wish: Wish, slots: Iterable[str], *, short: bool) -> str:
    """Return the shopper's answer to a question about these slots."""
    wanted = wish.slots
    told = [f"{s} {'usual' if s in wish.habits else wanted[s]}" if s in wanted else f"{s} any" for s in slots]
    if short:
        return " ".join(told) or "?"
    if not told:
        return "The shopper says: what would you like to know?"
    said = "; ".join(t.replace(" usual", " as usual").replace("budget ", "budget at most ") for t in told)
    return f"The shopper says: {said}."


def refusal(missing: Iterable[str], *, short: bool) -> str:
    """Return the shopper's refusal of a purchase that comes too early; names slots, no values."""
    names = ", ".join(missing)
    return f"no, first {names}" if short else f"The shopper says: do not buy yet, this is not settled: {names}."
