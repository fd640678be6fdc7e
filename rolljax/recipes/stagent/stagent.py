"""STAgent's curation (arXiv 2512.24957): a taxonomy of intents, graded difficulty, routing by a policy's success rate,
and repetition of rare combinations of tools (thresholds are ours where the paper gives none).

The funnel before it is `dedup.MinHash`, `vectors.EmbeddingDedup` and `vectors.KCenter`.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import random
import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from rolljax.data.attempts import rates, rewards_of
from rolljax.data.base import Place, Record, RecordSource, Stage, text_of, value_of
from rolljax.data.judge import VerdictStage
from rolljax.errors import Checked, ConfigError, DataError, Range, check_fields
from rolljax.judging.verdict import last_object

OTHER = "Other"
INDUCE = """Here are requests of users, one a line. Name the intents behind them: short names that do not overlap, \
at most {most}, one a line, and nothing else.{known}

{samples}"""
TAG = """Choose the intents of the request below from this list, or Other:
{intents}

Request: {text}

Answer with one JSON object: {{"primary": ..., "secondary": [...], "constraints": [...]}}"""
GRADE = """Grade how difficult this request is for an assistant with tools, by cognitive load, by how many tool calls \
must follow one another, and by how its constraints interact.
-1: no request for such an assistant; 0: needs no tool; 1 (one simple call) to 5 (long chains, conflicting constraints).

Request: {text}

Answer with one JSON object: {"reasons": ..., "difficulty": ...}"""


@dataclasses.dataclass(frozen=True)
class Taxonomy(VerdictStage):
    """Label records with intents: columns `intent` (primary), `intents` (secondary) and `constraints`.

    The intents are given, or a model names them from samples. It then tags every record; while too many are tagged
    Other, it is shown some of those, names further intents, and tags them again.
    """

    intents: tuple[str, ...] = ()
    """Known intents; empty: the stage induces them from the records."""
    most: Annotated[int, Range(low=1)] = 30
    """Maximum number of intents."""
    key: str = ""
    """The column of the text; empty: `Pipeline.key`."""
    samples: Annotated[int, Range(low=1)] = 40
    """Number of texts that the model sees when it names intents."""
    other_frac: Annotated[float, Range(low=0, high=1)] = 0.1
    """Share of Other from which on the taxonomy is extended."""
    rounds: Annotated[int, Range(low=0)] = 2
    """Maximum number of times the taxonomy is extended."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self)

    def run(self, source: RecordSource, place: Place) -> Iterator[Record]:
        intents = list(self.intents)
        if not intents:
            intents = self._named(source, list(range(len(source))), intents, place, 0)
        tags = self._tagged(source, range(len(source)), intents, place, 0)
        for i in range(1, self.rounds + 1):
            other = [n for n, tag in tags.items() if tag["primary"] == OTHER]
            place.number(f"other_before_round_{i}", len(other))
            if len(other) <= self.other_frac * len(source) or len(intents) >= self.most:
                break
            known = len(intents)
            intents = self._named(source, other, intents, place, i)
            if len(intents) == known:
                break
            tags |= self._tagged(source, other, intents, place, i)
        place.number("intents", len(intents))
        for n, record in enumerate(source):
            if (tag := tags.get(n)) is None:
                place.drop(record, "no_tag")
                continue
            place.count(f"intent {tag['primary']}")
            yield {
                **record,
                "intent": tag["primary"],
                "intents": tag["secondary"],
                "constraints": tag["constraints"],
            }

    def _named(
        self, source: RecordSource, numbers: Sequence[int], known: Sequence[str], place: Place, round_: int
    ) -> list[str]:
        """Return the known intents and the intents that the model names for a sample of records."""
        drawn = sorted(random.Random(place.seed + round_).sample(numbers, min(self.samples, len(numbers))))
        texts = [" ".join(text_of(source.record(n), self.key).split())[:300] for n in drawn]
        left = self.most - len(known)
        told = f" These are known already: {', '.join(known)}." if known else ""
        prompt = INDUCE.format(most=left, known=told, samples="\n".join(texts))

        def parse(text: str) -> list[str] | None:
            names = [re.sub(r"^[\s\d.*-]+", "", line).strip()[:60] for line in text.splitlines()]
            return [name for name in names if name] or None

        ask = functools.partial(self.ask_until, place, {"round": round_}, prompt, parse, round_=round_)
        found = place.asker.one(ask)
        if found is None:
            raise DataError(f"stage {place.label}: the model named no intents in {self.tries} answers")
        return list(dict.fromkeys([*known, *(name for name in found if name != OTHER)]))[: self.most]

    def _tagged(
        self, source: RecordSource, numbers: Sequence[int], intents: Sequence[str], place: Place, round_: int
    ) -> dict[int, dict[str, Any]]:
        """Return the model's labels of some records; records whose answer cannot be parsed are missing."""
        listed = "\n".join(f"- {name}" for name in (*intents, OTHER))

        def parse(text: str) -> dict[str, Any] | None:
            said = last_object(text)
            if said.get("primary") not in (*intents, OTHER):
                return None
            return {"primary": said["primary"], **{n: _texts(said.get(n)) for n in ("secondary", "constraints")}}

        async def tag(record: Record) -> dict[str, Any] | None:
            prompt = TAG.format(intents=listed, text=text_of(record, self.key))
            return await self.ask_until(place, record, prompt, parse, round_=round_)

        asked = place.asker.each((source.record(n) for n in numbers), tag)
        return {n: said for n, (_, said) in zip(numbers, asked, strict=True) if said is not None}


@dataclasses.dataclass(frozen=True)
class GradeDifficulty(VerdictStage):
    """Ask a model for the difficulty of each request: a column `difficulty`, from 1 to 5; -1: irrelevant, 0: needs no
    tool. Records with -1 and 0 are kept, so that a policy can learn to decline and to answer directly;
    `filters.Between` can remove them."""

    key: str = ""
    """The column of the text; empty: `Pipeline.key`."""
    prompt: str = GRADE
    """`{text}` is replaced; the answer holds a JSON object with `difficulty`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if "{text}" not in self.prompt:
            raise ConfigError("does not contain {text}", setting="GradeDifficulty.prompt", value=self.prompt)

    def run(self, source: RecordSource, place: Place) -> Iterator[Record]:
        def parse(text: str) -> int | None:
            value = last_object(text).get("difficulty")
            return value if isinstance(value, int) and not isinstance(value, bool) and -1 <= value <= 5 else None

        async def grade(record: Record) -> int | None:
            prompt = self.prompt.replace("{text}", text_of(record, self.key))
            return await self.ask_until(place, record, prompt, parse)

        for record, value in place.asker.each(source, grade):
            if value is None:
                place.drop(record, "no_grade")
            else:
                place.observe("difficulty", value)
                yield {**record, "difficulty": value}


Route = Literal["trivial", "noise", "sft", "rl"]


@dataclasses.dataclass(frozen=True)
class Learnability(Stage):
    """Route records by a policy's rewards on them: a column `route`, `sft` if the mean is high and the deviation low,
    else `rl`. Tasks that are solved nearly always or nearly never are left out. The column `rollouts` holds `k`, `mu`,
    `sigma` and `score`, the learnability (mean times variance).

    Reads the column `attempts` (`attempts.SampleAttempts`).
    """

    trivial: Annotated[float, Range(low=0, high=1)] = 0.9
    """Mean reward from which on a task is left out, because nothing is left to learn."""
    noise: Annotated[float, Range(low=0, high=1)] = 0.05
    """Mean reward up to which a task is left out, because it is too hard or broken."""
    certain_mu: Annotated[float, Range(low=0, high=1)] = 0.75
    """Lowest mean reward at which a task goes to SFT (if its deviation is at most `certain_sigma`)."""
    certain_sigma: Annotated[float, Range(low=0, high=1)] = 0.45
    """Highest standard deviation of the reward at which a task goes to SFT (if its mean is at least `certain_mu`)."""
    keep_attempts: bool = True
    """Whether to keep the column `attempts` in the record, for `rejection.RejectionSampling`."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.noise >= self.trivial:
            raise ConfigError("is not below Learnability.trivial", setting="Learnability.noise", value=self.noise)

    def run(self, source: RecordSource, place: Place) -> Iterator[Record]:
        for record in source:
            found = rates(rewards_of(record))
            place.observe("mu", found.mu)
            where = self.route(found.mu, found.sigma)
            place.count(where)
            slim = {k: v for k, v in record.items() if self.keep_attempts or k != "attempts"}
            if where in ("trivial", "noise"):
                place.drop({k: v for k, v in record.items() if k != "attempts"}, where)
            else:
                yield {**slim, "rollouts": dataclasses.asdict(found), "route": where}

    def route(self, mu: float, sigma: float) -> Route:
        """Return the route of a task with this mean and deviation."""
        if mu >= self.trivial:
            return "trivial"
        if mu <= self.noise:
            return "noise"
        return "sft" if mu >= self.certain_mu and sigma <= self.certain_sigma else "rl"


@dataclasses.dataclass(frozen=True)
class RareTools(Checked, Stage):
    """Repeat records whose combination of tools is rare, so that it is seen more often."""

    key: str = "tools"
    """A column with the list of tools that a record's conversation uses."""
    target: Annotated[int | None, Range(low=1)] = None
    """Records of each combination in the output; None: as many as the median combination."""
    most: Annotated[int, Range(low=1)] = 4
    """Maximum number of copies of a record."""

    def run(self, source: RecordSource, place: Place) -> Iterator[Record]:
        counts = collections.Counter(self._combination(record) for record in source)
        ranked = sorted(counts.values())
        target = self.target if self.target is not None else ranked[len(ranked) // 2] if ranked else 0
        place.number("combinations", len(counts))
        place.number("target", target)
        met: collections.Counter[str] = collections.Counter()
        for record in source:
            combination = self._combination(record)
            place_in, num = met[combination], counts[combination]
            met[combination] += 1
            wanted = max(num, min(target, num * self.most))
            times = wanted // num + (place_in < wanted % num)
            place.count("repeated", times - 1)
            for _ in range(times):
                yield record

    def _combination(self, record: Record) -> str:
        value = value_of(record, self.key)
        if not isinstance(value, list):
            raise DataError(f"column {self.key!r} is no list of tools: {str(value)[:100]}")
        return json.dumps(sorted({str(v) for v in value}))


def _texts(value: Any) -> list[str]:
    return [str(v) for v in value] if isinstance(value, list) else []
