"""A shop to search, look around and buy in, for a shopper with a wish. After ShopSimulator (arXiv 2601.18225), whose
catalogue of real goods is replaced by a made one, and whose language-model shopper by a script."""

from __future__ import annotations

import dataclasses
import functools
import math
import random
from collections.abc import Mapping
from typing import Any, Literal

from rolljax.envs.base import Env, EnvSpec, PureEnv, StepResult
from rolljax.errors import ConfigError, EnvError, Range
from rolljax.recipes.shop_simulator import shopper
from rolljax.recipes.shop_simulator.pages import PageView, ShopPages, Shown, Style, parse
from rolljax.recipes.shop_simulator.products import (
    CATEGORIES,
    MAX_ATTRIBUTES,
    MAX_OPTIONS,
    MAX_TYPES,
    MAX_VALUES,
    Sizes,
    catalogue,
    schema,
)
from rolljax.recipes.shop_simulator.purchase import Score, hits, type_score
from rolljax.types import Message, Task

TINY: Mapping[str, Any] = {
    "num_products": 24,
    "num_categories": 2,
    "num_types": 3,
    "num_attributes": 1,
    "num_options": 1,
    "num_values": 3,
    "indexed_attributes": 0,
    "family_size": 4,
    "shown": "row",
    "page_size": 4,
    "max_turns": 5,
}
"""Settings for byte-level models of about a million parameters: a perfect episode takes four turns and about 200
tokens."""
TINY_DIALOGUE: Mapping[str, Any] = {**TINY, "dialogue": True, "max_turns": 7}
"""The same with a dialogue, in which the policy must ask the shopper first: six turns and about 260 tokens."""
_BUY = ("buy", "buy now")
_RULES = (
    "You shop for somebody else. Act with one of search[words], click[what]{ask} in each answer. Find the product that "
    "has everything that is wanted within the budget, choose its options, and end with click[buy]."
)


@dataclasses.dataclass(frozen=True)
class Shop(EnvSpec):
    """Shopping over `num_products` made goods. Products come in families that share their title but for the brand and
    differ in one attribute, so the first result is seldom the right one. Prices, and the order of equally good results,
    are drawn again for every task.

    Actions: `search[words]` on the front page and on results, `click[what]` for a product, an option, a sub page,
    `next`, `prev`, `back` and `buy`, and with a dialogue `ask[question]`; the last one in the policy's text counts.
    An action that is impossible on the current page changes nothing, costs a turn, and is counted (`illegal_n`,
    `legal_ratio`).

    The episode ends with the purchase. `reward_parts` holds the sub-scores type, attributes, options and price; success
    is all four being 1. Gold is a buyer who knows only what the shopper said and looks through the results one by one.
    """

    runs = "inline"

    num_products: int = 500
    """Number of products."""
    num_categories: int = 5
    """Number of kinds of goods."""
    num_types: int = 4
    """Number of types of each kind of goods."""
    num_attributes: int = 4
    """Number of attributes of each kind of goods."""
    num_options: int = 2
    """Number of options of each kind of goods."""
    num_values: int = 6
    """Maximum number of values of each attribute and option."""
    indexed_attributes: int = 2
    """Number of attributes in the title, which the search covers."""
    family_size: int = 6
    """Products that share a title, brand aside."""
    shown: Shown = "page"
    """Place where the attributes that are not in the title are shown: in the rows of the results, on the item's page,
    or on its attributes page."""
    page_size: int = 10
    """Number of results on a page."""
    dialogue: bool = False
    """Whether the policy must ask the shopper, who first tells only the type of the product. An answer covers at most
    `answers_per_ask` slots. The shopper refuses up to `refusals` purchases while slots are open, and names the open
    slots."""
    answers_per_ask: int = 2
    """Maximum number of slots that the shopper answers per question."""
    refusals: int = 2
    """Maximum number of purchases that the shopper refuses."""
    persona: bool = False
    """Whether a part of the wish is stated as a habit in the shopper's persona, among habits for other kinds of
    goods."""
    reward: Literal["strict", "loose"] = "strict"
    """`strict`, the product of the sub-scores; `loose`, type times the share of wishes met."""
    style: Style = "short"
    """`short` is for small models (few bytes, everything has a number: `click[2]`), `full` is prose."""
    max_turns: int = 35
    """Actions before the episode is cut."""
    seed: int = 0
    """Seed of the goods and the tasks."""

    def __post_init__(self) -> None:
        bounds = {
            "num_categories": (1, len(CATEGORIES)),
            "num_types": (1, MAX_TYPES),
            "num_attributes": (1, MAX_ATTRIBUTES),
            "num_options": (0, MAX_OPTIONS),
            "num_values": (2, MAX_VALUES),
            "indexed_attributes": (0, self.num_attributes),
            "family_size": (1, self.page_size),
            "num_products": (1, self.sizes.most_products),
            "answers_per_ask": (1, 100),
            "refusals": (0, 100),
        }
        for name, (low, high) in bounds.items():
            Range(low=low, high=high, remedy="the range depends on the other settings").check(self, name)
        if self.max_turns < self.turns_needed:
            raise ConfigError(
                "is too few to look at all products of a family",
                setting="Shop.max_turns",
                value=self.max_turns,
                remedy=f"at least {self.turns_needed}",
            )

    @property
    def name(self) -> str:
        return "shop"

    @property
    def sizes(self) -> Sizes:
        """The settings that make the catalogue."""
        return Sizes(**{f.name: getattr(self, f.name) for f in dataclasses.fields(Sizes)})

    @property
    def pages(self) -> ShopPages:
        return ShopPages(self.sizes, self.seed, self.style, self.shown, self.page_size)

    @property
    def turns_needed(self) -> int:
        """Turns that a perfect buyer needs if the right product is the last one of its family."""
        slots = self.num_attributes + self.num_options + 1
        asks = math.ceil(slots / self.answers_per_ask) if self.dialogue else 0
        in_vain = {"row": 0, "item": 2, "page": 4}[self.shown] * (self.family_size - 1)
        look = 3 if self.shown == "page" else 1
        return asks + 1 + in_vain + look + self.num_options + 1

    def task(self, index: int) -> Task:
        return Task(self.name, index, _wish(self, index).to_text())

    def make(self) -> Env:
        return ShopEnv(self)

    def bad_actions(self) -> tuple[str, ...]:
        return (*super().bad_actions(), "click[buy]", "search[mug]", "click[1]", "click[" * 1000, "click[99999]")


class ShopEnv(PureEnv):
    """One visit."""

    def __init__(self, spec: Shop) -> None:
        self._spec = spec
        self._pages = spec.pages
        self._over = True

    def reset(self, task: Task) -> tuple[Message, ...]:
        spec = self._spec
        try:
            self._wish = shopper.Wish.of(task.content)
        except (ValueError, TypeError) as e:
            raise EnvError(f"task {task.index} is no wish: {e}") from None
        self._prices, self._order = _draw(spec.sizes, spec.seed, self._wish.prices)
        self._view = PageView()
        self._told = set(self._wish.habits if spec.dialogue else self._wish.slots)
        self._seen: set[int] = set()
        self._turns = self._legal = self._refused = 0
        self._over = False
        short = spec.style == "short"
        rules = _RULES.format(ask=", ask[question]" if spec.dialogue else "")
        parts = [
            "" if short else rules,
            shopper.persona(self._wish, short=short),
            shopper.opening(self._wish, vague=spec.dialogue, short=short),
            self._pages.render(self._view, self._prices),
        ]
        return (Message("user", "\n".join(p for p in parts if p)),)

    def step(self, action: str) -> StepResult:
        if self._over:
            raise EnvError("step before reset, or after the episode's end")
        verb, what = parse(action) or ("", "")
        self._turns += 1
        missing = self._missing() if self._spec.dialogue else []
        buying = verb == "click" and what in _BUY and self._view.page == "item"
        if buying and not (missing and self._refused < self._spec.refusals):
            self._legal += 1
            return self._buy()
        note, legal = "", True
        if buying:
            self._refused += 1
            note = shopper.refusal(missing, short=self._spec.style == "short")
        elif verb == "ask" and self._spec.dialogue:
            note = self._ask(what)
        else:
            legal = self._move(verb, what)
        self._legal += legal
        metrics = {"illegal_n": float(not legal), "asks_n": float(verb == "ask" and legal)}
        if self._turns == self._spec.max_turns:
            self._over = True
            nothing = dict.fromkeys(("type", "attributes", "options", "price"), 0.0)
            ratio = {"legal_ratio": self._legal / self._turns}
            return StepResult((), 0.0, False, truncated=True, reward_parts=nothing, metrics=metrics | ratio)
        return StepResult((self._observe(note, legal),), 0.0, terminated=False, metrics=metrics)

    def reference_answer(self) -> str:
        """Return the next action of a patient buyer who uses only the shopper's answers and the pages seen so far."""
        wish, view, pages = self._wish, self._view, self._pages
        ask = [slot for slot in wish.open_slots if slot not in self._told]
        if ask:
            return f"ask[{', '.join(ask[: self._spec.answers_per_ask])}]"
        query = " ".join([*list(wish.attributes.values())[: self._spec.indexed_attributes], wish.type])
        if view.page == "index" or (view.page == "results" and (view.query, view.first) != (query, 0)):
            return f"search[{query}]"
        if view.page == "sub":
            return "click[back]"
        if view.page == "results":
            fit = next(i for i in pages.rows(view) if not self._ruled_out(i))
            return self._click(pages.goods.products[fit].id.lower())
        if self._ruled_out(view.item):
            return "click[back]"
        if view.item not in self._seen:
            return "click[attributes]"
        to_choose = [v for slot, v in wish.options.items() if view.selected.get(slot) != v]
        return self._click(to_choose[0]) if to_choose else "click[buy]"

    def random_action(self, rng: random.Random) -> str:
        """Return a random possible action."""
        can = [f"click[{name}]" for name in (*self._pages.numbered(self._view), *self._pages.buttons(self._view))]
        if self._view.page in ("index", "results"):
            can.append(f"search[{self._wish.type}]")
        if self._spec.dialogue:
            can.append(f"ask[{rng.choice(list(self._wish.slots))}]")
        return rng.choice(can)

    def _click(self, name: str) -> str:
        if self._spec.style == "full":
            return f"click[{name}]"
        return f"click[{self._pages.numbered(self._view).index(name) + 1}]"

    def _ruled_out(self, i: int) -> bool:
        """Return whether the known attributes of a product contradict the wish."""
        wish, product = self._wish, self._pages.goods.products[i]
        known = product.attributes if i in self._seen else self._pages.on_row(product)
        fits = all(wish.attributes[slot] == value for slot, value in known.items() if slot in wish.attributes)
        return product.type != wish.type or not fits or self._prices[i] > wish.budget

    def _move(self, verb: str, what: str) -> bool:
        view, pages = self._view, self._pages
        if verb == "search":
            return pages.search(view, what, self._order)
        if verb != "click" or what in _BUY or not pages.click(view, what):
            return False
        if (view.page, view.sub) == ("sub", "attributes") or (view.page == "item" and self._spec.shown != "page"):
            self._seen.add(view.item)
        return True

    def _ask(self, question: str) -> str:
        spec = self._spec
        kinds = [schema(spec.sizes, c) for c in range(spec.num_categories)]
        slots = dict.fromkeys([s for k in kinds for s in (*k.attributes, *k.options)] + [shopper.BUDGET])
        named = shopper.asked(question, slots, spec.answers_per_ask)
        self._told.update(named)
        return shopper.answer(self._wish, named, short=spec.style == "short")

    def _missing(self) -> list[str]:
        """Return the open slots: those the policy has not asked about, and options it has not chosen."""
        wish = self._wish
        unasked = [slot for slot in wish.slots if slot not in self._told]
        return unasked + [s for s in wish.options if s not in unasked and s not in self._view.selected]

    def _buy(self) -> StepResult:
        self._over = True
        wish, view, pages = self._wish, self._view, self._pages
        product = pages.product(view)
        kinds = [(p.type, (schema(pages.sizes, p.category).department, p.type), p.type) for p in (wish, product)]
        score = Score(
            type_score(*kinds),
            hits(wish.attributes, product.attributes),
            len(wish.attributes),
            hits(wish.options, view.selected),
            len(wish.options),
            self._prices[view.item] <= wish.budget,
        )
        reward = score.strict if self._spec.reward == "strict" else score.loose
        metrics = {"illegal_n": 0.0, "asks_n": 0.0, "legal_ratio": self._legal / self._turns}
        return StepResult((), reward, terminated=True, success=score.full, reward_parts=score.parts, metrics=metrics)

    def _observe(self, note: str, legal: bool) -> Message:
        """Return the page after the shopper's words; in the short style the words alone."""
        short = self._spec.style == "short"
        if not legal:
            note = "?" if short else "That cannot be done here."
        page = self._pages.render(self._view, self._prices)
        return Message("user", note if note and short and legal else "\n".join(p for p in (note, page) if p))


def _wish(spec: Shop, index: int) -> shopper.Wish:
    rng = random.Random(f"shop {spec.seed} {index}")
    target = rng.randrange(spec.num_products)
    prices = rng.getrandbits(32)
    sizes = spec.sizes
    product = catalogue(sizes, spec.seed).products[target]
    price = _draw(sizes, spec.seed, prices)[0][target]
    kind = schema(sizes, product.category)
    options = {slot: rng.choice(values) for slot, values in kind.options.items()}
    wish = shopper.Wish(
        product.category,
        product.type,
        dict(product.attributes),
        options,
        price + rng.randint(0, price // 10),
        prices,
        {},
    )
    return dataclasses.replace(wish, habits=_habits(spec, wish, rng)) if spec.persona else wish


def _habits(spec: Shop, wish: shopper.Wish, rng: random.Random) -> dict[str, str]:
    """Return one wished attribute and one wished option, mixed with a habit for each other category."""
    habits = {}
    for wanted in (wish.attributes, wish.options):
        if wanted:
            slot = rng.choice(list(wanted))
            habits[slot] = wanted[slot]
    for c in range(spec.num_categories):
        other = [(s, v) for s, v in schema(spec.sizes, c).attributes.items() if s not in wish.slots]
        if c != wish.category and other:
            slot, values = rng.choice(other)
            habits[slot] = rng.choice(values)
    told = list(habits.items())
    rng.shuffle(told)
    return dict(told)


@functools.lru_cache(maxsize=1024)
def _draw(sizes: Sizes, seed: int, prices: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Sample a task's price for every product, and the values that rank equally good results."""
    rng = random.Random(f"prices {prices}")
    goods = catalogue(sizes, seed).products
    return tuple(int(p.price * (0.6 + 0.9 * rng.random()) + 0.5) for p in goods), tuple(rng.random() for _ in goods)
