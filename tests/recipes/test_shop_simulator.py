"""The shop: search, pages, the shopper, the reward, and how far simple buyers come."""

import dataclasses
import itertools
import json
import math
import pickle
import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolljax.envs.bm25 import Bm25
from rolljax.envs.catalog import make_spec, ref_of
from rolljax.errors import ConfigError, EnvError
from rolljax.recipes.shop_simulator import shopper
from rolljax.recipes.shop_simulator.pages import parse
from rolljax.recipes.shop_simulator.products import CATEGORIES, catalogue
from rolljax.recipes.shop_simulator.purchase import Score, hits, same, type_score
from rolljax.recipes.shop_simulator.shop import TINY, TINY_DIALOGUE, Shop
from rolljax.types import Task

SHOPS = {
    "plain": {},
    "full": {"style": "full", "reward": "loose"},
    "dialogue": {"dialogue": True},
    "dialogue_full": {"dialogue": True, "style": "full", "persona": True},
    "persona": {"persona": True},
    "item": {"shown": "item", "num_values": 4, "indexed_attributes": 1, "num_products": 300},
    "tiny": TINY,
    "tiny_dialogue": TINY_DIALOGUE,
}
each = pytest.mark.parametrize("settings", SHOPS.values(), ids=SHOPS)


def play(spec, task, act, most=100):
    """Step results of an episode, and everything that was said to the policy."""
    env = spec.make()
    told, results = [env.reset(task)[-1].content], []
    while len(results) < most:
        results.append(env.step(act(env, told)))
        if results[-1].terminated or results[-1].truncated:
            break
        told.append(results[-1].messages[-1].content)
    return told, results


def share(spec, act, num=150):
    """Share of full successes."""
    return sum(play(spec, spec.task(i), act)[1][-1].success for i in range(num)) / num


def reference(env, told):
    return env.reference_answer()


# ---- search -----------------------------------------------------------------------------------------------------------


def test_bm25_is_its_formula():
    index = Bm25(["red mug", "red red pan", "blue"], k1=1.2, b=0.75)
    idf = math.log(1 + (3 - 2 + 0.5) / 2.5)
    mean = 2.0
    one = idf * 1 * 2.2 / (1 + 1.2 * (0.25 + 0.75 * 2 / mean))
    two = idf * 2 * 2.2 / (2 + 1.2 * (0.25 + 0.75 * 3 / mean))
    assert index.scores("RED") == {0: pytest.approx(one), 1: pytest.approx(two)}
    assert index.scores("red red") == index.scores("red")
    assert index.scores("teapot") == index.scores("") == {}


def test_rarer_words_weigh_more():
    scores = Bm25(["red mug", "red pan", "red bowl", "blue mug"]).scores("blue red")
    assert max(scores, key=scores.get) == 3


# ---- the catalogue ----------------------------------------------------------------------------------------------------


def test_every_value_belongs_to_one_slot_of_a_category():
    for c in CATEGORIES:
        values = [v for vs in (*c.attributes.values(), *c.options.values()) for v in vs] + list(c.types)
        assert len(values) == len(set(values)) and not any(v.isdigit() for v in values)


def test_products_differ_from_their_family_in_one_attribute():
    spec = Shop()
    goods = catalogue(spec.sizes, spec.seed)
    assert len(goods.products) == len({p.id for p in goods.products}) == 500
    assert {p.category for p in goods.products} == set(range(5))
    key = lambda p: (p.category, p.type, *itertools.islice(p.attributes.values(), 2))  # noqa: E731
    families = [list(f) for _, f in itertools.groupby(sorted(goods.products, key=key), key)]
    assert max(map(len, families)) == 6 and sum(map(len, families)) == 500
    for family in families:
        assert len({tuple(p.title.split()[1:]) for p in family}) == 1
        values = [tuple(p.attributes.values()) for p in family]
        apart = [[sum(a != b for a, b in zip(v, w, strict=True)) for w in values] for v in values]
        if len(family) == 6:
            assert any(sorted(row) == [0, 0, 1, 1, 1, 1] for row in apart)  # the base: a twin, and four one step away


# ---- reward -----------------------------------------------------------------------------------------------------------


def test_the_published_examples():
    near = Score(1.0, 2, 3, 1, 2, True)
    assert near.loose == pytest.approx(4 / 6) and near.strict == pytest.approx(1 / 3) and not near.full
    dear = dataclasses.replace(near, price=False)
    assert dear.strict == 0 and dear.loose == pytest.approx(0.5)
    other = Score(0.5, 3, 3, 2, 2, True)
    assert other.loose == pytest.approx(0.5) and other.strict == pytest.approx(0.5) and not other.full
    assert Score(1.0, 3, 3, 2, 2, True).full and Score(1.0, 3, 3, 2, 2, True).strict == 1


def test_the_share_of_no_options_is_one():
    assert Score(1.0, 1, 1, 0, 0, True).parts["options"] == 1 and Score(1.0, 1, 1, 0, 0, True).full


@given(st.sampled_from([1.0, 0.5, 0.1, 0.0]), st.integers(0, 4), st.integers(0, 2), st.booleans())
def test_strict_is_never_above_loose(kind, attributes, options, price):
    score = Score(kind, attributes, 4, options, 2, price)
    assert 0 <= score.strict <= score.loose + 1e-12 <= 1 + 1e-12
    assert score.full == (score.strict == 1) == (score.loose == 1)


def test_spelling_is_forgiven_up_to_a_point():
    assert same("Aluminium", "aluminum") and same(" red ", "RED")
    assert not same("red", "grey") and not same("small", "smell ") and not same("", "red")
    assert hits({"color": "red", "size": "small"}, {"color": "Red", "pack": "small"}) == 1


def test_type_rules():
    mug = ("mug", ("home", "drinking", "mugs"), "red coffee mug")
    assert type_score(mug, mug) == 1
    assert type_score(mug, ("cup", ("home", "drinking", "cups"), "tea mug")) == 1  # two common nodes
    assert type_score(mug, ("cup", ("office", "desk"), "coffee cup")) == 1  # a third of the words
    six = ("mug", ("home", "mugs"), "red enamel camping coffee mug outdoors")
    assert type_score(six, ("cup", ("office", "cups"), "coffee cup")) == 0.5  # a sixth of them
    many = ("mug", ("home", "mugs"), " ".join(f"word{i}" for i in range(20)) + " mug")
    assert type_score(many, ("cup", ("home", "mugs"), "word3 cup")) == 0.1
    assert type_score(mug, ("mug", ("home", "drinking", "mugs"), "something else")) == 0


# ---- actions and pages ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, want",
    [
        ("search[red  Mug]", ("search", "red mug")),
        ("I think so.\nClick[2]", ("click", "2")),
        ("click[1] or rather click[buy]", ("click", "buy")),
        ("ask[what size?]", ("ask", "what size?")),
        ("click[]", ("click", "")),
        ("research[x]", None),
        ("click(2)", None),
        ("click[a\nb]", None),
        ("", None),
    ],
)
def test_the_last_action_counts(text, want):
    assert parse(text) == want


@pytest.mark.parametrize("text", ["click[" * 100_000, "[" * 1_000_000, "\x00" * 1000, "click[" + "9" * 100_000 + "]"])
def test_any_text_is_an_action_or_none(text):
    spec = Shop()
    told, results = play(spec, spec.task(0), lambda env, told: text)
    assert results[-1].truncated and results[-1].metrics["legal_ratio"] == 0
    assert sum(r.metrics["illegal_n"] for r in results) == spec.max_turns


def test_what_cannot_be_done_changes_nothing():
    spec = Shop(style="full")
    env = spec.make()
    front = env.reset(spec.task(0))[-1].content.split("\n")[-2:]
    for action in ("click[1]", "click[buy]", "click[back]", "click[next]", "ask[size]", "search[]", "dance[now]"):
        result = env.step(action)
        assert result.messages[-1].content.split("\n") == ["That cannot be done here.", *front]
        assert result.metrics["illegal_n"] == 1 and not result.terminated and result.reward == 0
    assert env.step("search[mug]").metrics["illegal_n"] == 0
    assert env.step("click[buy]").metrics["illegal_n"] == env.step("click[99]").metrics["illegal_n"] == 1


def test_pages_lead_where_they_say():
    spec = Shop()
    env = spec.make()
    env.reset(spec.task(0))
    first = env.step("search[ball]").messages[0].content
    assert first.startswith("1 ball ") and first.endswith("\nnext back") and len(first.split("\n")) == 11
    second = env.step("click[next]").messages[0].content
    assert second != first and second.endswith("\nnext prev back")
    assert env.step("click[prev]").messages[0].content == first
    item = env.step("click[3]").messages[0].content
    assert first.split("\n")[2] == f"3 {item.splitlines()[0]}"
    chosen = env.step("click[2]").messages[0].content
    assert chosen == item.replace("2 ", "2 *", 1) == env.step("click[MEDIUM]").messages[0].content
    assert env.step("click[1]").messages[0].content == item.replace("1 ", "1 *", 1)  # one value per slot
    assert env.step("click[attributes]").messages[0].content.endswith("\nback")
    env.step("click[back]")
    assert env.step("click[back]").messages[0].content == first
    assert env.step("click[back]").messages[0].content == "search"
    assert env.step("search[nothing like that]").messages[0].content == "nothing\nback"


def test_every_thing_to_click_in_full_style_can_be_clicked():
    spec = Shop(style="full")
    page, todo = "", [["search[red steel mug]"]]
    seen = set()
    while todo:
        path = todo.pop()
        env = spec.make()
        env.reset(spec.task(0))
        for action in path:
            result = env.step(action)
            assert result.metrics["illegal_n"] == 0, path
        if result.terminated or len(path) > 4:
            continue
        page = result.messages[0].content
        names = re.findall(r"click\[([a-z]+)\]", page) + [
            i.lower() for i in re.findall(r"^\[(P\d+)\] .*price", page, re.MULTILINE)
        ][:1] * page.count("results for")
        if page not in seen:
            seen.add(page)
            todo += [[*path, f"click[{n}]"] for n in dict.fromkeys(names)]
    kinds = " ".join(seen)
    assert (
        all(f"] {sub}: " in kinds for sub in ("attributes", "description", "features", "reviews"))
        and "(chosen)" in kinds
    )


# ---- the shopper ------------------------------------------------------------------------------------------------------

WISH = shopper.Wish(
    0, "mug", {"color": "red", "material": "steel"}, {"size": "small"}, 20, 1, {"color": "red", "cut": "slim"}
)


def test_shopper_tells_what_is_asked_and_no_more():
    known = ["color", "material", "size", "budget", "fabric"]
    assert shopper.asked("Which SIZE, and what can you spend?", known, 2) == ["size", "budget"]
    assert shopper.asked("color size budget", known, 2) == ["color", "size"]
    assert shopper.asked("tell me everything", known, 2) == []
    assert shopper.answer(WISH, ["size", "budget"], short=True) == "size small budget 20"
    assert shopper.answer(WISH, ["fabric"], short=True) == "fabric any"
    assert shopper.answer(WISH, ["color"], short=False) == "The shopper says: color as usual."
    assert shopper.answer(WISH, [], short=True) == "?"
    assert shopper.opening(WISH, vague=True, short=True) == "mug"
    assert shopper.opening(WISH, vague=False, short=True) == "mug steel small <=20"
    assert shopper.persona(WISH, short=True) == "usual red slim"


def test_a_wish_survives_its_text():
    assert shopper.Wish.of(WISH.to_text()) == WISH
    with pytest.raises(EnvError, match="task 3 is no wish"):
        Shop().make().reset(Task("shop", 3, "{}"))


def test_a_purchase_too_early_is_refused_and_names_what_is_missing():
    spec = Shop(**TINY_DIALOGUE | {"max_turns": 12})
    env = spec.make()
    kind = env.reset(spec.task(0))[-1].content.split("\n")[0]
    env.step(f"search[{kind}]")
    env.step("click[1]")
    assert env.step("click[buy]").messages[0].content == "no, first color, size, budget"
    env.step("ask[color and budget]")
    refused = env.step("click[buy]")
    assert (
        refused.messages[0].content == "no, first size" and not refused.terminated and refused.metrics["illegal_n"] == 0
    )
    assert env.step("click[buy]").terminated  # two refusals are all


def transcript(spec, task, actions):
    env = spec.make()
    told = [env.reset(task)]
    for action in actions:
        result = env.step(action)
        told.append((result.messages, result.terminated))
        if result.terminated:
            break
    return told


@pytest.mark.parametrize("style", ["short", "full"])
def test_the_wish_does_not_leak(style):
    """The text is the same for every wish until the policy asks: wishes that differ in all but type and prices."""
    spec = Shop(dialogue=True, style=style, refusals=100)
    wish = shopper.Wish.of(spec.task(0).content)
    slots = spec.pages.goods.products
    others = [
        p for p in slots if p.type == wish.type and not set(p.attributes.values()) & set(wish.attributes.values())
    ]
    options = {k: next(v for v in CATEGORIES[wish.category].options[k] if v != wish.options[k]) for k in wish.options}
    other = dataclasses.replace(wish, attributes=others[0].attributes, options=options, budget=wish.budget + 7)
    tasks = [Task("shop", 0, w.to_text()) for w in (wish, other)]
    actions = [
        f"search[{wish.type}]",
        "click[next]",
        "click[2]",
        "click[attributes]",
        "click[back]",
        "click[1]",
        "click[buy]",
        "ask[hello]",
        "ask[fabric]",
    ]
    a, b = (transcript(spec, t, actions) for t in tasks)
    assert a == b
    assert transcript(spec, tasks[0], ["ask[size]"]) != transcript(spec, tasks[1], ["ask[size]"])


@each
def test_reference_knows_no_more_than_was_told(settings):
    """The same transcript is followed by the same reference action."""
    spec = Shop(**settings)
    after = {}
    for i in range(60):
        env = spec.make()
        told = env.reset(spec.task(i))[-1].content
        for _ in range(spec.max_turns):
            action = env.reference_answer()
            assert after.setdefault(told, action) == action
            result = env.step(action)
            if result.terminated:
                break
            told += f"\n{action}\n{result.messages[0].content}"


# ---- how far buyers come ----------------------------------------------------------------------------------------------


@each
def test_reference_always_succeeds_in_the_turns_it_has(settings):
    spec = Shop(**settings)
    tight = dataclasses.replace(spec, max_turns=spec.turns_needed)
    for i in range(120):
        _, results = play(tight, spec.task(i), reference)
        assert results[-1].success and results[-1].reward == 1 and results[-1].metrics["legal_ratio"] == 1
        assert results[-1].reward_parts == {"type": 1.0, "attributes": 1.0, "options": 1.0, "price": 1.0}


def first_result(env, told):
    """Search for everything the shopper said, open the first result, take the named options, and buy."""
    words = told[0].split("\n")[0]
    item = told[-1].split("\n")
    if len(told) == 1:
        return f"search[{words}]"
    if item[-1].startswith("next") or item[-1] == "back":
        return "click[1]"
    wanted = [n for n, v in re.findall(r"(\d+) (\w+)", item[1]) if v in words.split()]
    return f"click[{wanted[0]}]" if wanted else "click[buy]"


def test_buying_the_first_result_seldom_works():
    assert share(Shop(), first_result, 400) < 0.25


def buy_unasked(env, told):
    """Buy the first result with the first options, and insist when refused."""
    if len(told) == 1:
        return f"search[{told[0].splitlines()[0]}]"
    return {2: "click[1]", 3: "click[1]", 4: "click[5]"}.get(len(told), "click[buy]")


@pytest.mark.parametrize("settings", [{"dialogue": True}, TINY_DIALOGUE], ids=["dialogue", "tiny"])
def test_asking_pays(settings):
    spec = Shop(**settings)
    assert share(spec, reference) - share(spec, buy_unasked) >= 0.2


@each
def test_random_actions_are_legal_and_of_little_use(settings):
    spec = Shop(**settings)
    rng = random.Random(0)
    wins = 0
    for i in range(60):
        _, results = play(spec, spec.task(i), lambda env, told: env.random_action(rng))
        assert not any(r.metrics["illegal_n"] for r in results)
        wins += results[-1].success
    assert wins <= 10


def test_sub_scores_are_of_the_purchase():
    """A buyer who forgets the options loses their share alone."""
    spec = Shop(reward="loose")

    def forget(env, told):
        action = env.reference_answer()
        on_item = told[-1].endswith("buy back")
        return "click[buy]" if on_item and re.fullmatch(r"click\[[1-8]\]", action) else action

    for i in range(20):
        last = play(spec, spec.task(i), forget)[1][-1]
        assert last.reward_parts == {"type": 1.0, "attributes": 1.0, "options": 0.0, "price": 1.0}
        assert last.reward == pytest.approx(5 / 7) and not last.success


def test_prices_and_order_are_drawn_for_every_task():
    spec = Shop(**TINY)
    pages = set()
    for i in range(40):
        env = spec.make()
        env.reset(spec.task(i))
        pages.add(env.step("search[mug]").messages[0].content)
    assert len(pages) == 40
    assert len({re.sub(r"\d+$", "", p, flags=re.MULTILINE) for p in pages}) > 5  # the order too


# ---- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings, named",
    [
        ({"num_products": 10**6}, "num_products"),
        ({"num_categories": 6}, "num_categories"),
        ({"indexed_attributes": 5}, "indexed_attributes"),
        ({"family_size": 11}, "family_size"),
        ({"max_turns": 26}, "max_turns"),
        ({"dialogue": True, "max_turns": 30}, "max_turns"),
        ({"num_values": 1}, "num_values"),
    ],
)
def test_settings_that_cannot_work(settings, named):
    with pytest.raises(ConfigError) as e:
        Shop(**settings)
    assert e.value.setting == f"Shop.{named}"


@each
def test_references_and_snapshots(settings):
    spec = Shop(**settings)
    assert make_spec(ref_of(spec)) == spec
    env, twin = spec.make(), spec.make()
    env.reset(spec.task(5))
    for _ in range(3):
        env.step(env.reference_answer())
    state = env.snapshot()
    assert len(state) < 20_000
    twin.restore(state)
    assert json.dumps(pickle.loads(state)["_turns"]) == "3"
    while True:
        action = env.reference_answer()
        assert twin.reference_answer() == action
        result = env.step(action)
        assert twin.step(action) == result
        if result.terminated:
            break
    with pytest.raises(EnvError, match="after the episode's end"):
        env.step("click[1]")


def test_budgets_fit_the_bytes_of_small_models():
    """A reference episode of the tiny shop in bytes, chat tokens aside."""
    for settings, most in ((TINY, 280), (TINY_DIALOGUE, 330)):
        spec = Shop(**settings)
        for i in range(60):
            acts = []
            told, _ = play(
                spec, spec.task(i), lambda env, told, acts=acts: acts.append(env.reference_answer()) or acts[-1]
            )
            assert len("".join(told + acts)) <= most
            assert max(map(len, acts)) <= 20
