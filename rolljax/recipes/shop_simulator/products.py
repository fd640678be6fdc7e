"""The goods of the shop, made from word lists: families of products that differ in one attribute."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from collections.abc import Iterator, Mapping

from rolljax.envs.bm25 import Bm25


@dataclasses.dataclass(frozen=True)
class Category:
    """A part of the shop. Slots are in order of importance; a value is one word and belongs to one slot."""

    department: str
    types: tuple[str, ...]
    attributes: Mapping[str, tuple[str, ...]]
    options: Mapping[str, tuple[str, ...]]
    """Slot -> values that every product of the category can be bought in."""
    prices: tuple[int, int]
    """Lowest and highest base price of the category's products."""


_COLORS = ("red", "blue", "green", "white", "black", "grey")
_SIZES = ("small", "medium", "large", "giant")
CATEGORIES = (
    Category(
        "kitchen",
        ("mug", "pan", "bowl", "kettle"),
        {
            "color": _COLORS,
            "material": ("steel", "glass", "ceramic", "bamboo", "enamel", "copper"),
            "finish": ("matte", "glossy", "brushed", "hammered", "etched", "raw"),
            "handle": ("folding", "double", "curved", "straight", "removable", "cork"),
        },
        {"size": _SIZES, "pack": ("single", "pair", "trio", "dozen")},
        (8, 50),
    ),
    Category(
        "clothing",
        ("shirt", "scarf", "jacket", "hat"),
        {
            "color": _COLORS,
            "fabric": ("wool", "cotton", "linen", "silk", "denim", "fleece"),
            "pattern": ("plain", "striped", "checked", "dotted", "floral", "paisley"),
            "closure": ("zip", "buttons", "velcro", "toggles", "laces", "snaps"),
        },
        {"size": _SIZES, "cut": ("slim", "regular", "loose", "cropped")},
        (12, 70),
    ),
    Category(
        "electronics",
        ("lamp", "radio", "speaker", "keyboard"),
        {
            "color": _COLORS,
            "body": ("plastic", "aluminium", "rubber", "oak", "carbon", "resin"),
            "power": ("battery", "solar", "mains", "crank", "usb", "magnetic"),
            "warranty": ("none", "annual", "biennial", "triennial", "decade", "lifetime"),
        },
        {"size": _SIZES, "plug": ("european", "british", "american", "swiss")},
        (15, 80),
    ),
    Category(
        "sports",
        ("ball", "tent", "rope", "racket"),
        {
            "color": _COLORS,
            "level": ("beginner", "club", "expert", "junior", "school", "league"),
            "ground": ("indoor", "grass", "sand", "snow", "clay", "gravel"),
            "grip": ("soft", "hard", "tacky", "ribbed", "smooth", "padded"),
        },
        {"size": _SIZES, "bag": ("bagless", "pouch", "backpack", "case")},
        (6, 60),
    ),
    Category(
        "garden",
        ("planter", "bench", "rake", "hose"),
        {
            "color": _COLORS,
            "stuff": ("cedar", "iron", "stone", "wicker", "zinc", "teak"),
            "season": ("spring", "summer", "autumn", "winter", "monsoon", "evergreen"),
            "base": ("spiked", "wheeled", "flat", "hanging", "bolted", "tripod"),
        },
        {"size": _SIZES, "delivery": ("pickup", "doorstep", "assembled", "express")},
        (10, 75),
    ),
)
_BRANDS = "arbo belvi cosmo dunra elvas fjorn gantu hexel ilmar jorvi kesto lumar".split()
MAX_TYPES = 4
MAX_ATTRIBUTES = 4
MAX_OPTIONS = 2
MAX_VALUES = 6


@dataclasses.dataclass(frozen=True, slots=True)
class Product:
    """One thing on sale."""

    id: str
    category: int
    """Index of the product's category."""
    type: str
    title: str
    attributes: Mapping[str, str]
    """Slot -> value."""
    price: int
    """Base price; each task draws its own price from it."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The size and detail of a catalogue. `Shop` documents the fields."""

    num_products: int
    num_categories: int
    num_types: int
    num_attributes: int
    num_options: int
    num_values: int
    indexed_attributes: int
    family_size: int

    @property
    def most_products(self) -> int:
        """Maximum number of products: no two families of a type share all of their indexed attributes."""
        return self.num_categories * self.num_types * self.num_values**self.indexed_attributes * self.family_size


class ShopCatalog:
    """All products and the index of their titles."""

    def __init__(self, sizes: Sizes, seed: int) -> None:
        rng = random.Random(f"catalogue {seed}")
        drafts = list(itertools.islice(_drafts(sizes, rng), sizes.num_products))
        rng.shuffle(drafts)  # neither place nor id tells which product of a family came first
        self.products = tuple(dataclasses.replace(p, id=f"P{i:04d}") for i, p in enumerate(drafts))
        self.by_id = {p.id: i for i, p in enumerate(self.products)}
        self.index = Bm25([p.title for p in self.products])


@functools.lru_cache(maxsize=16)
def catalogue(sizes: Sizes, seed: int) -> ShopCatalog:
    """Return the catalogue of these settings; made once per process."""
    return ShopCatalog(sizes, seed)


@functools.lru_cache(maxsize=128)
def schema(sizes: Sizes, category: int) -> Category:
    """Return a category reduced to the slots, types and values in use."""
    full = CATEGORIES[category]
    return dataclasses.replace(
        full,
        types=full.types[: sizes.num_types],
        attributes={k: v[: sizes.num_values] for k, v in list(full.attributes.items())[: sizes.num_attributes]},
        options={k: v[: sizes.num_values] for k, v in list(full.options.items())[: sizes.num_options]},
    )


def _drafts(sizes: Sizes, rng: random.Random) -> Iterator[Product]:
    """Yield family after family, alternating between categories."""
    kinds = []
    for c in range(sizes.num_categories):
        s = schema(sizes, c)
        slots = list(s.attributes)[: sizes.indexed_attributes]
        shared = [dict(zip(slots, v, strict=True)) for v in itertools.product(*(s.attributes[k] for k in slots))]
        families = [(t, values) for t in s.types for values in shared]
        rng.shuffle(families)
        kinds.append([(c, s, t, values) for t, values in families])
    for c, s, kind, shared in itertools.chain.from_iterable(zip(*kinds, strict=True)):
        yield from _family(sizes, c, s, kind, shared, rng)


def _family(
    sizes: Sizes, c: int, s: Category, kind: str, shared: Mapping[str, str], rng: random.Random
) -> Iterator[Product]:
    """Yield a base product, its twin of another brand, and variants that differ from the base in one unindexed
    attribute.

    They share type, indexed attributes and all words of the title but the brand.
    """
    free = [slot for slot in s.attributes if slot not in shared]
    base = {**shared, **{slot: rng.choice(s.attributes[slot]) for slot in free}}
    base = {slot: base[slot] for slot in s.attributes}
    changes = [{slot: v} for slot in free for v in s.attributes[slot] if v != base[slot]]
    rng.shuffle(changes)
    usual = rng.randint(*s.prices)
    for change in [{}, {}, *changes, *([{}] * sizes.family_size)][: sizes.family_size]:
        attributes = {**base, **change}
        title = " ".join([rng.choice(_BRANDS), *(attributes[slot] for slot in shared), kind])
        yield Product("", c, kind, title, attributes, usual)
