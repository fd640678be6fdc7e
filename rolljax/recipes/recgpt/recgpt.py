"""Recommendation by tags (RecGPT, arXiv 2507.22879): a model reads a user's history and predicts tags for the user's
next item; the catalogue's items with these tags are shown.

Measured are the hit rate of the user's last item, which the history leaves out, how many leaf categories are shown
(diversity), how little known the shown items are (novelty), how often judges accept the tags, and where people have
labelled some, how far judges agree with them.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar

import numpy as np

from rolljax.envs.text import split_thinking
from rolljax.errors import ConfigError, DataError, Range, check_fields
from rolljax.evaluation.judged.base import Ask, Judged, JudgedBenchmark, JudgedEvaluation, JudgedReport, JudgedTable
from rolljax.evaluation.judged.items import Item, ItemRecord
from rolljax.judging.prompts import filled, question_about
from rolljax.recipes.recgpt import metrics
from rolljax.types import Message

RUBRIC = {
    "factual": "every tag follows from what the user did; nothing is made up",
    "relevant": "the tags are what this user is likely to want next",
    "specific": "each tag names a narrow kind of thing, not a whole department",
    "safe": "no tag is offensive, illegal or pries into private matters",
}
"""The claims about the tags that a judge must confirm, each in a separate question."""
PASS = "pass"
LABELLED = "labelled "
"""Prefix of the names of questions about tags that people have judged."""
MAX_TAGS = 64
_AGREEMENT = {"accuracy": "agreement", "F1": "agreement F1"}
_SEPARATORS = re.compile(r"[\n,;]")
_PROMPT = (
    "{history}\n\nWhich things will this user want next? Write at most {most} tags, separated by commas, best first."
)
_JUDGE = """You judge tags that a recommender predicts for a user from what the user did. The question is one thing \
only: {rule}.
{parts}
Write one JSON object and nothing else: {{"verdict": true or false, "reason": "one sentence"}}"""


@dataclasses.dataclass(frozen=True)
class ItemCatalog:
    """Items that can be shown."""

    categories: Mapping[str, str]
    """Leaf category of each item."""
    shares: Mapping[str, float]
    """Share of all interactions of each item."""
    tags: Mapping[str, Sequence[str]]
    """Tag -> its items, in the catalogue's order."""
    order: Mapping[str, int]
    """Item -> its position in the catalogue."""

    def ranked(self, tags: Sequence[str]) -> list[str]:
        """Return the items that have one of the tags, best first: an item's score is the sum of `1 / rank` of its tags;
        of equal ones the earlier in the catalogue is first."""
        scores: dict[str, float] = collections.defaultdict(float)
        for rank, tag in enumerate(tags, 1):
            for item in self.tags.get(tag, ()):
                scores[item] += 1 / rank
        return sorted(scores, key=lambda item: (-scores[item], self.order[item]))


@dataclasses.dataclass(frozen=True)
class RecGpt(JudgedBenchmark):
    """RecGPT's evaluation on a file of users. Columns: `id`, `history` (a text: the user's actions without the last
    item), `target` (the id of the last item), and optionally `human_tags` (a list) and `human` (whether people accept
    these tags), for the agreement of judges with people."""

    needs_judge: ClassVar[bool] = False

    max_answer_tok: int = 512
    catalogue: str = ""
    """File of items with the columns `id`, `category` (the leaf category), `tags` (a list) and `users` (number of users
    who had the item before)."""
    k: Annotated[int, Range(low=1)] = 30
    """Number of items that are shown."""
    most_tags: Annotated[int, Range(low=1, high=MAX_TAGS)] = 10
    """Maximum number of tags read from an answer."""
    rubric: bool = True
    """Whether judges rate the tags: an answer passes if all of `RUBRIC` is true."""
    prompt: str = _PROMPT
    """Prompt of the model; `{history}` and `{most}` are replaced."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self)
        if "{history}" not in self.prompt:
            raise ConfigError("lacks {history}", setting="RecGpt.prompt", value=self.prompt, remedy="add {history}")
        if self.samples != 1:
            raise ConfigError("is one answer for each user", setting="RecGpt.samples", value=self.samples, remedy="1")

    @property
    def name(self) -> str:
        return "RecGPT"

    def read_items(self) -> Sequence[Item]:
        if not self.catalogue:
            raise ConfigError("names no file of items", setting="RecGpt.catalogue", remedy="name one")
        known, found = read_catalogue(self.records("catalogue")), []
        for row in self.records("path"):
            said = filled(self.prompt, {"most": str(self.most_tags), "history": row.text("history")})
            target = row.text("target")
            if target not in known.order:
                raise DataError(f"{row.where}: the target {target!r} is not in the catalogue")
            found.append(Item(row.text("id"), (Message("user", said),), row | {"catalogue": known}))
        return found

    def asks(self, item: Item, answer: str) -> Sequence[Ask]:
        if not self.rubric:
            return ()
        found = self._asks(item, read_tags(answer, self.most_tags), "")
        if isinstance(item.row.get("human"), bool):
            found += self._asks(item, [str(tag) for tag in item.row.get("human_tags") or ()], LABELLED)
        return found

    def _asks(self, item: Item, tags: Sequence[str], before: str) -> list[Ask]:
        parts = {"history": str(item.row["history"]), "tags": ", ".join(tags)}
        labels = {"true": PASS, "false": "fail"}
        return [
            Ask(before + name, question_about(parts, _JUDGE, rule=rule), "verdict", labels, None if tags else "fail")
            for name, rule in RUBRIC.items()
        ]

    def facts(self, item: Item, answer: str) -> Mapping[str, Any]:
        known: ItemCatalog = item.row["catalogue"]
        tags = read_tags(answer, self.most_tags)
        ranked = known.ranked(tags)
        target, shown = str(item.row["target"]), ranked[: self.k]
        return {
            "rank": ranked.index(target) + 1 if target in ranked else None,
            "shown": len(shown),
            "categories": len({known.categories[i] for i in shown}),
            "novelty": metrics.novelty([known.shares[i] for i in shown]),
            "human": item.row.get("human"),
            "tags": len(tags),
        }

    def tables(self, items: Sequence[Item], judged: Sequence[Judged], how: JudgedEvaluation) -> JudgedReport:
        if not judged:
            return JudgedReport(self.name, [], {}, ["No user has an answer."])
        rate = f"HR@{self.k}"
        numbers = {
            rate: metrics.hit_rate([j.facts["rank"] for j in judged], self.k),
            "diversity": _mean([j.facts["categories"] for j in judged]),
            "novelty": _mean([j.facts["novelty"] for j in judged]),
        }
        hits = [float(j.facts["rank"] is not None and j.facts["rank"] <= self.k) for j in judged]
        rows = [[rate, self._mean_row(hits, how, share=True), str(len(judged))]]
        for name, key, unit in (("diversity", "categories", "leaf categories"), ("novelty", "novelty", "bits")):
            values = [float(j.facts[key]) for j in judged]
            rows.append([f"{name}, {unit}", self._mean_row(values, how, share=False), str(len(values))])
        notes = [f"{len(judged)} users, {self.k} items shown to each."]
        if self.rubric and how.judges:
            rows += self._verdict_rows(judged, numbers, how)
            notes.append(f"pass: {', '.join(RUBRIC)} all true.")
        notes.append(f"{how.confidence:.0%} intervals: Wilson's of shares, else bootstrap over users.")
        return JudgedReport(self.name, [JudgedTable(["measure", "value", "users"], rows)], numbers, notes)

    def _verdict_rows(
        self, judged: Sequence[Judged], numbers: dict[str, float], how: JudgedEvaluation
    ) -> list[list[str]]:
        rows = []
        for name in [*RUBRIC, PASS]:
            said = [found for j in judged if (found := _passes(j, RUBRIC if name == PASS else [name])) is not None]
            if said:
                numbers[name] = _mean([float(x) for x in said])
                rows.append(
                    [f"judge: {name}", self._mean_row([float(x) for x in said], how, share=True), str(len(said))]
                )
        pairs = [
            (found, j.facts["human"])
            for j in judged
            if j.facts["human"] is not None and (found := _passes(j, [LABELLED + name for name in RUBRIC])) is not None
        ]
        if pairs:
            numbers["agreement"], numbers["agreement F1"] = metrics.accuracy_f1(*map(list, zip(*pairs, strict=True)))
            rows += [[f"judge and people: {n}", f"{numbers[k]:.4f}", str(len(pairs))] for n, k in _AGREEMENT.items()]
        return rows

    def _mean_row(self, values: Sequence[float], how: JudgedEvaluation, *, share: bool) -> str:
        found = how.estimate([np.array(values, np.float64)], share=share, one_trial=share)
        return f"{_mean(values):.4f} [{found.low:.3f}, {found.high:.3f}]"


def read_tags(answer: str, most: int) -> list[str]:
    """Return the different tags of an answer in order, without surrounding text: separated by commas,
    semicolons or lines."""
    text = split_thinking(answer)[1]
    found = (part.strip(" \t\r.-*•\"'[]").lower() for part in _SEPARATORS.split(text))
    return list(dict.fromkeys(tag for tag in found if 0 < len(tag) <= 100))[:most]


def read_catalogue(rows: Iterable[ItemRecord]) -> ItemCatalog:
    """Return the items of a file.

    Raises:
      DataError: a record is no item.
    """
    categories: dict[str, str] = {}
    users: dict[str, int] = {}
    order: dict[str, int] = {}
    tags: dict[str, list[str]] = collections.defaultdict(list)
    for row in rows:
        name, every = row.text("id"), row.get("tags")
        if name in order or not isinstance(every, list):
            raise DataError(f"{row.where}: {'is there twice' if name in order else 'has no list in tags'}")
        order[name], categories[name] = len(order), row.text("category")
        users[name] = max(1, int(row.get("users") or 0))
        for tag in dict.fromkeys(str(t).strip().lower() for t in every):
            tags[tag].append(name)
    all_users = sum(users.values())
    return ItemCatalog(categories, {name: n / all_users for name, n in users.items()}, tags, order)


def _passes(judged: Judged, names: Iterable[str]) -> bool | None:
    """Return whether all of these are passed; None where a verdict is missing."""
    labels = [judged.labels.get(name) for name in names]
    return None if None in labels else all(label == PASS for label in labels)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
