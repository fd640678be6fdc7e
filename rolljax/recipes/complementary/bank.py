"""The experience bank of Complementary RL (arXiv 2603.17621): short texts with their uses. Retrieval is a pure function
of a bank and an address, so a resumed run is shown the same experiences.

The file of a bank has one JSON line for each round: the whole bank as the actor sees it in this round.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from rolljax.envs.bm25 import words
from rolljax.errors import Checked, Range
from rolljax.recipes.complementary.operations import Add, Operation, Update
from rolljax.storage import journal


@dataclasses.dataclass(frozen=True)
class Experience:
    """An experience. It keeps its number for good."""

    number: int
    """From 1, in the order in which experiences were added."""
    title: str
    """The situation that it is about; retrieval compares it with the actor's task."""
    content: str
    """The advice."""
    sources: tuple[str, ...] = ()
    """Ids of the tasks whose episodes it was made from; it is not shown in their episodes."""
    uses: int = 0
    """Episodes that were shown it."""
    last_round: int = -1
    """The last round with such an episode; -1: none."""
    extractions: int = 0
    """Extractions that wrote it, all of which the extractor is trained on."""

    @property
    def text(self) -> str:
        """The text that the actor is shown."""
        return f"{self.title}: {self.content}"


@dataclasses.dataclass(frozen=True)
class Retrieval(Checked):
    """Settings of retrieval: the experience for a task is the one with the highest score among the most similar."""

    popularity: Annotated[float, Range(low=0)] = 0.4
    """Penalty lambda: `similarity - lambda log(1 + uses)`."""
    nearest: Annotated[int, Range(low=1)] = 16
    """Number of most similar experiences that are scored."""
    demotion: Annotated[float, Range(low=0, high=1)] = 0.5
    """Probability that 1 is subtracted from the score of an experience that was used in the round before."""
    least_similarity: Annotated[float, Range(low=0, high=1)] = 0.0
    """Least similarity of an experience that may be shown."""


@dataclasses.dataclass(frozen=True)
class Bank:
    """Experiences in the order in which they were last written, as the actor sees them in a round."""

    round: int = 0
    experiences: tuple[Experience, ...] = ()
    added: int = 0
    """Number of experiences that were ever added."""

    def used(self, episodes: Mapping[int, int], round_: int) -> Bank:
        """Return the bank after a round. episodes: number of episodes that were shown each experience, by number."""

        def after(e: Experience) -> Experience:
            shown = episodes.get(e.number, 0)
            return dataclasses.replace(e, uses=e.uses + shown, last_round=round_) if shown else e

        return dataclasses.replace(self, experiences=tuple(map(after, self.experiences)))

    def applied(self, operation: Operation, source: str) -> tuple[Bank, int]:
        """Return the bank after an operation of the extractor, and the number of the experience that it wrote; 0 if
        there is none. Adding what an experience of this title already says, alone or before more, merges the two;
        updating an unknown number has no effect. What is written becomes the newest, so that an experience that
        episodes confirm stays.

        source: id of the task whose episode the extractor saw.
        """
        if isinstance(operation, Add):
            same = (e for e in self.experiences if e.title == operation.title and _begins(e.content, operation.content))
            if (old := next(same, None)) is None:
                new = Experience(self.added + 1, operation.title, operation.content, (source,), extractions=1)
                bank = dataclasses.replace(self, experiences=(*self.experiences, new), added=new.number)
                return bank, new.number
            written = old
        elif isinstance(operation, Update):
            if (old := self.get(operation.number)) is None:
                return self, 0
            written = dataclasses.replace(old, content=operation.content)
        else:
            return self, 0
        sources = tuple(dict.fromkeys((*written.sources, source)))
        written = dataclasses.replace(written, sources=sources, extractions=written.extractions + 1)
        every = (*(e for e in self.experiences if e is not old), written)
        return dataclasses.replace(self, experiences=every), written.number

    def get(self, number: int) -> Experience | None:
        """Return the experience of this number; None if there is none."""
        return next((e for e in self.experiences if e.number == number), None)

    def newest(self, capacity: int, *, one_per_title: bool = False) -> Bank:
        """Return the bank with the `capacity` experiences that were written last, of each title one or any number."""
        kept = self.experiences
        if one_per_title:
            last = {e.title: e.number for e in kept}
            kept = tuple(e for e in kept if last[e.title] == e.number)
        return dataclasses.replace(self, experiences=kept[-capacity:])

    def retrieve(self, query: str, settings: Retrieval, address: str, task_id: str = "") -> Experience | None:
        """Return the experience to show for a task; None if there is none.

        Args:
          query: the first messages that the actor gets. address: of the randomness: equal addresses give equal results.
          task_id: of the task; experiences from its own episodes are left out, because they may hold its answer.
        """
        similar = [(similarity(query, e.title), e) for e in self.experiences if task_id not in e.sources]
        similar = [(s, e) for s, e in similar if s >= settings.least_similarity]
        near = heapq.nlargest(settings.nearest, similar, key=lambda pair: pair[0])
        if not near:
            return None
        recent = [e.last_round >= 0 and e.last_round == self.round - 1 for _, e in near]
        demoted = [
            was and random.Random(f"{address} {e.number}").random() < settings.demotion
            for was, (_, e) in zip(recent, near, strict=True)
        ]
        found = scores([s for s, _ in near], [e.uses for _, e in near], demoted, settings.popularity)
        return near[int(np.argmax(found))][1]

    def to_json(self) -> dict[str, Any]:
        """Return the bank as a JSON value."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(record: Mapping[str, Any]) -> Bank:
        """Return the bank of a value that `to_json` made."""
        every = tuple(Experience(**e | {"sources": tuple(e["sources"])}) for e in record["experiences"])
        return Bank(record["round"], every, record["added"])

    def append_to(self, path: Path) -> None:
        """Append the bank to a file, and wait until the disk has it. Raises `StorageError`."""
        journal.append(path, self.to_json())


def banks_of(path: Path) -> list[Bank]:
    """Return the banks of a file, round after round; of a round that was repeated, all are equal. Raises
    `CheckpointError`."""
    return journal.read_lines(path, Bank.from_json)


def _begins(text: str, words: str) -> bool:
    """Return whether a text has these words at its beginning."""
    return f"{text} ".startswith(f"{words} ")


def scores(
    similarities: Sequence[float], uses: Sequence[int], demoted: Sequence[bool], popularity: float = 0.4
) -> np.ndarray:
    """Return the scores of experiences, `similarity - popularity log(1 + uses) - demoted` (arXiv 2603.17621)."""
    return np.asarray(similarities) - popularity * np.log1p(np.asarray(uses)) - np.asarray(demoted)


def similarity(a: str, b: str) -> float:
    """Return the cosine of the word counts of two texts."""
    left, right = Counter(words(a)), Counter(words(b))
    norm = math.sqrt(sum(n * n for n in left.values()) * sum(n * n for n in right.values()))
    return sum(n * right[word] for word, n in left.items()) / norm if norm else 0.0
