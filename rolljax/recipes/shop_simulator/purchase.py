"""Scores how well a purchase fits a wish: four sub-scores between 0 and 1, and two rewards made of them.

ShopSimulator (arXiv 2601.18225), whose rules for the type follow WebShop (Yao et al., arXiv 2207.01206).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher

from rolljax.envs.bm25 import words

SAME = 0.85
"""Texts whose similarity is above this are the same attribute or option."""


@dataclasses.dataclass(frozen=True, slots=True)
class Score:
    """A purchase against a wish."""

    type: float
    """Score of the product's type: 1, 0.5, 0.1 or 0. `attribute_hits` of `attributes` and `option_hits` of `options`
    wanted slots have the wanted value."""
    attribute_hits: int
    attributes: int
    option_hits: int
    options: int
    price: bool
    """Whether the price is within the budget."""

    @property
    def parts(self) -> dict[str, float]:
        """The four sub-scores; the share of none is 1."""
        return {
            "type": self.type,
            "attributes": self.attribute_hits / self.attributes if self.attributes else 1.0,
            "options": self.option_hits / self.options if self.options else 1.0,
            "price": float(self.price),
        }

    @property
    def loose(self) -> float:
        """The type's score times the share of met wishes (attributes, options and price). A nearly right purchase gets
        nearly the full reward."""
        hits = self.attribute_hits + self.option_hits + self.price
        return self.type * hits / (self.attributes + self.options + 1)

    @property
    def strict(self) -> float:
        """The product of the four sub-scores."""
        p = self.parts
        return p["type"] * p["attributes"] * p["options"] * p["price"]

    @property
    def full(self) -> bool:
        """Return whether all four sub-scores are 1."""
        return all(v == 1 for v in self.parts.values())


def same(a: str, b: str) -> bool:
    """Return whether two short texts are equal up to spelling."""
    a, b = a.lower().strip(), b.lower().strip()
    return a == b or SequenceMatcher(None, a, b).ratio() > SAME


def hits(wanted: Mapping[str, str], got: Mapping[str, str]) -> int:
    """Return the number of slots of `wanted` that have the same value in `got`, up to spelling."""
    return sum(slot in got and same(value, got[slot]) for slot, value in wanted.items())


def type_score(
    wanted: tuple[str, Sequence[str], str],
    got: tuple[str, Sequence[str], str],
) -> float:
    """Score the similarity of a product to the wanted one; each is (type, path of its category, title).

    1 for the same type, two common nodes of the path, or more than a fifth of the title's words; else 0.5. A title with
    less than a tenth of the words gives 0.1, one with none of them 0, whatever the category.
    """
    meant = set(words(wanted[2]))
    overlap = len(meant & set(words(got[2]))) / max(1, len(meant))
    if overlap == 0:
        return 0.0
    if overlap < 0.1:
        return 0.1
    nodes = len(set(wanted[1]) & set(got[1]))
    return 1.0 if wanted[0] == got[0] or nodes >= 2 or overlap > 0.2 else 0.5
