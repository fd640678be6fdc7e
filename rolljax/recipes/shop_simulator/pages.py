"""The shop's pages: the visitor's current page, its possible actions, and its text.

index --search--> results --item--> item --attributes, description, features, reviews--> sub page
                  <------back------      <------back------
"""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Mapping, Sequence
from typing import Literal

from rolljax.recipes.shop_simulator.products import Category, Product, ShopCatalog, Sizes, catalogue, schema

Style = Literal["short", "full"]
Shown = Literal["row", "item", "page"]
SUB_PAGES = ("attributes", "description", "features", "reviews")
MAX_ACTION_CHARS = 4000
_ACTION = re.compile(r"\b(search|click|ask)\[([^\[\]\n]{0,400})\]", re.IGNORECASE)


def parse(text: str) -> tuple[str, str] | None:
    """Return the last `search[..]`, `click[..]` or `ask[..]` in the policy's text, as (verb, argument); None without
    one."""
    found = _ACTION.findall(text[-MAX_ACTION_CHARS:])
    return (found[-1][0].lower(), " ".join(found[-1][1].lower().split())) if found else None


@dataclasses.dataclass(slots=True)
class PageView:
    """The page that a visitor sees."""

    page: Literal["index", "results", "item", "sub"] = "index"
    query: str = ""
    found: tuple[int, ...] = ()
    """Products (indices), best match first."""
    first: int = 0
    """Position in `found` of the first product on this page."""
    item: int = -1
    """The product that is open."""
    sub: str = ""
    selected: dict[str, str] = dataclasses.field(default_factory=dict)
    """Option slot -> value, of that product."""


@dataclasses.dataclass(frozen=True)
class ShopPages:
    """The pages of a shop: their behaviour and their text."""

    sizes: Sizes
    seed: int
    style: Style
    """Text of a page: `short` is a numbered list of the links with little else; `full` is prose with ids."""
    shown: Shown
    """Place where attributes that the search does not cover are shown: in the row of the results, on the item's page,
    or on its attributes page."""
    page_size: int

    @property
    def goods(self) -> ShopCatalog:
        return catalogue(self.sizes, self.seed)

    def product(self, view: PageView) -> Product:
        return self.goods.products[view.item]

    def schema(self, product: Product) -> Category:
        return schema(self.sizes, product.category)

    # ---- what can be done --------------------------------------------------------------------------------------------

    def rows(self, view: PageView) -> Sequence[int]:
        """Return the products on this page of the results."""
        return view.found[view.first : view.first + self.page_size]

    def numbered(self, view: PageView) -> list[str]:
        """Return the targets of `click[1]`, `click[2]`, ...: ids of products, or values of options."""
        if view.page == "results":
            return [self.goods.products[i].id.lower() for i in self.rows(view)]
        if view.page == "item":
            return [v for values in self.schema(self.product(view)).options.values() for v in values]
        return []

    def buttons(self, view: PageView) -> list[str]:
        """Return the other names that can be clicked here."""
        if view.page == "results":
            more, less = view.first + self.page_size < len(view.found), view.first > 0
            return ["next"] * more + ["prev"] * less + ["back"]
        if view.page == "item":
            return [*self.sub_pages, "buy", "back"]
        return ["back"] if view.page == "sub" else []

    @property
    def sub_pages(self) -> tuple[str, ...]:
        attributes = SUB_PAGES[:1] if self.shown == "page" else ()
        return attributes + (SUB_PAGES[1:] if self.style == "full" else ())

    def search(self, view: PageView, query: str, order: Sequence[float]) -> bool:
        """Search for `query`; products of equal score are ordered by `order[product]`. Return False if this page has no
        search."""
        if view.page not in ("index", "results") or not query.strip():
            return False
        scores = self.goods.index.scores(query)
        view.page, view.query, view.first = "results", query, 0
        view.found = tuple(sorted(scores, key=lambda i: (-scores[i], order[i])))
        return True

    def click(self, view: PageView, name: str) -> bool:
        """Click a link or button other than `buy`. Return False if this page does not have it."""
        numbered, buttons = self.numbered(view), self.buttons(view)
        if re.fullmatch("[0-9]{1,4}", name) and 1 <= int(name) <= len(numbered):
            name = numbered[int(name) - 1]
        if view.page == "results" and name in numbered:
            view.page, view.item, view.selected = "item", self.goods.by_id[name.upper()], {}
        elif view.page == "item" and name in numbered:
            options = self.schema(self.product(view)).options
            view.selected[next(slot for slot, values in options.items() if name in values)] = name
        elif name not in buttons:
            return False
        elif name in ("next", "prev"):
            view.first += self.page_size if name == "next" else -self.page_size
        elif name == "back":
            view.page = {"results": "index", "item": "results", "sub": "item"}[view.page]  # type: ignore[assignment]
        else:
            view.page, view.sub = "sub", name
        return True

    # ---- how it reads ------------------------------------------------------------------------------------------------

    def on_row(self, product: Product) -> dict[str, str]:
        """Return the attributes that the results show."""
        n = self.sizes.num_attributes if self.shown == "row" else self.sizes.indexed_attributes
        return dict(list(product.attributes.items())[:n])

    def on_item(self, product: Product) -> dict[str, str]:
        """Return the attributes that the item's own page shows."""
        return self.on_row(product) if self.shown == "page" else dict(product.attributes)

    def render(self, view: PageView, prices: Sequence[int]) -> str:
        """Render the page as text. prices: of every product."""
        return (self._short if self.style == "short" else self._full)(view, prices)

    def _short(self, view: PageView, prices: Sequence[int]) -> str:
        if view.page == "index":
            return "search"
        if view.page == "results":
            goods = self.goods.products
            rows = [
                f"{n} {' '.join([goods[i].type, *self.on_row(goods[i]).values()])} {prices[i]}"
                for n, i in enumerate(self.rows(view), 1)
            ]
            return "\n".join([*(rows or ["nothing"]), " ".join(self.buttons(view))])
        product = self.product(view)
        if view.page == "sub":
            return " ".join(product.attributes.values()) + "\nback"
        head = " ".join([product.type, *self.on_item(product).values(), str(prices[view.item])])
        picked = view.selected.values()
        options = " ".join(f"{n} {'*' * (v in picked)}{v}" for n, v in enumerate(self.numbered(view), 1))
        return "\n".join([head, *([options] if options else []), " ".join(self.buttons(view))])

    def _full(self, view: PageView, prices: Sequence[int]) -> str:
        lines = {"index": self._index, "results": self._results, "item": self._item, "sub": self._sub}
        return "\n".join([*lines[view.page](view, prices), self._can(view)])

    def _can(self, view: PageView) -> str:
        can = [f"click[{b}]" for b in self.buttons(view)]
        if view.page in ("index", "results"):
            can.insert(0, "search[words]")
        return "Here you can: " + ", ".join(can)

    def _index(self, view: PageView, prices: Sequence[int]) -> list[str]:
        return ["You are on the shop's front page."]

    def _results(self, view: PageView, prices: Sequence[int]) -> list[str]:
        lines = [f'{len(view.found)} results for "{view.query}", from {view.first + 1}; open one with click[its id].']
        for i in self.rows(view):
            product = self.goods.products[i]
            extra = {k: v for k, v in self.on_row(product).items() if v not in product.title.split()}
            lines.append(f"[{product.id}] {product.title}{_listed(extra)}, price {prices[i]}")
        return lines

    def _item(self, view: PageView, prices: Sequence[int]) -> list[str]:
        product = self.product(view)
        lines = [f"[{product.id}] {product.title}, price {prices[view.item]}"]
        if self.shown != "page":
            lines.append("Attributes" + _listed(product.attributes).replace(" (", ": ").rstrip(")"))
        for slot, values in self.schema(product).options.items():
            picked = view.selected.get(slot)
            lines.append(f"Choose {slot}: " + ", ".join(f"click[{v}]{' (chosen)' * (v == picked)}" for v in values))
        return lines

    def _sub(self, view: PageView, prices: Sequence[int]) -> list[str]:
        product = self.product(view)
        return [f"[{product.id}] {view.sub}: {_about(product, view.sub, self.schema(product).department)}"]


def _listed(values: Mapping[str, str]) -> str:
    return f" ({', '.join(f'{k} {v}' for k, v in values.items())})" if values else ""


def _about(product: Product, sub: str, department: str) -> str:
    """Return the text of a sub page; only the attributes distinguish products of a family."""
    if sub == "attributes":
        return ", ".join(f"{k} {v}" for k, v in product.attributes.items())
    if sub == "description":
        return f"A {product.type} by {product.title.split()[0]}, found in {department}."
    if sub == "features":
        return f"Everything one expects of a {product.type}."
    rng = random.Random(f"reviews {product.id}")
    return f"{rng.randint(30, 50) / 10} of 5 stars from {rng.randint(3, 900)} buyers."
