"""A filter by a model's verdicts, and the base class of all stages that parse a model's answers."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
from collections.abc import Callable, Iterator
from typing import Annotated, TypeVar

from rolljax.chat_models.base import Asking
from rolljax.data.base import AskingStage, Place, Record, RecordSource, fingerprint, seed_of, text_of
from rolljax.envs.text import after_thinking, linear_pattern
from rolljax.errors import ConfigError, Range, check_fields
from rolljax.judging.judge import ask
from rolljax.judging.prompts import SLOT, Prompt, filled, guarded, mark_of, quoted
from rolljax.judging.verdict import Unreadable
from rolljax.types import Message

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class VerdictStage(AskingStage):
    """The settings of every stage that parses a model's answers."""

    _: dataclasses.KW_ONLY
    tries: Annotated[int, Range(low=1)] = 3
    """Maximum number of requests for an answer that can be parsed; a record without one is left out."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self)

    async def ask_until(
        self,
        place: Place,
        record: Record,
        prompt: str | Prompt,
        parse: Callable[[str], T | None],
        *,
        vote: int = 0,
        round_: int = 0,
    ) -> T | None:
        """Ask until an answer can be parsed, each time with another seed; None: none of `tries` could, or the prompt is
        too long. An answer that was cut is not parsed.

        Args:
          parse: returns None, or raises `Unreadable`, for an answer that cannot be used. vote: which of several
            independent answers this is. round_: which of several rounds of questions.
        """
        messages = (Message("user", prompt),) if isinstance(prompt, str) else prompt
        address = fingerprint([record, messages[-1].content])
        for i in range(self.tries):
            how = Asking(self.temperature, self.max_tok, seed_of(place.seed, round_, address, vote, i))
            try:
                found = await ask(place.asker, messages, how, parse)
            except Unreadable as e:
                if e.kind == "too_long":
                    return None
                found = None
            if found is not None:
                return found
            place.count("unparsed_answers")
        return None


@dataclasses.dataclass(frozen=True)
class JudgeFilter(VerdictStage):
    """Keep records that a model accepts."""

    prompt: str = ""
    """Prompt of the judge. `{column}` is replaced by the text of that column, between marks; a system message says that
    the text between the marks is material to judge, not instructions."""
    verdict: str = r"(?i)verdict:\s*(\w+)"
    """A regular expression with one group; its last match after the model's thinking is the verdict, in small
    letters."""
    accept: tuple[str, ...] = ("yes",)
    """Verdicts that keep a record."""
    votes: Annotated[int, Range(low=1)] = 1
    """Independent answers, of which the majority decides; ties reject."""
    column: str = ""
    """Column to which the share of accepting votes is written; empty: not written."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self)
        if not SLOT.search(self.prompt):
            raise ConfigError(
                "shows the judge no column of the record",
                setting="JudgeFilter.prompt",
                value=self.prompt,
                remedy="such as 'Is this a question about travel? {prompt}\\nEnd with Verdict: yes or Verdict: no'",
            )
        if linear_pattern(self.verdict, "JudgeFilter.verdict").groups != 1:
            raise ConfigError("does not have one group", setting="JudgeFilter.verdict", value=self.verdict)

    def run(self, source: RecordSource, place: Place) -> Iterator[Record]:
        def parse(text: str) -> str | None:
            found = linear_pattern(self.verdict, "JudgeFilter.verdict").findall(after_thinking(text))
            return found[-1].lower() if found else None

        async def judge(record: Record) -> list[str | None]:
            texts = {name: text_of(record, name) for name in SLOT.findall(self.prompt)}
            mark = mark_of(place.seed, *texts.values())
            prompt = guarded(mark, filled(self.prompt, {name: quoted(mark, text) for name, text in texts.items()}))
            asked = (self.ask_until(place, record, prompt, parse, vote=vote) for vote in range(self.votes))
            return list(await asyncio.gather(*asked))

        for record, verdicts in place.asker.each(source, judge):
            given = collections.Counter(v for v in verdicts if v is not None)
            total, good = sum(given.values()), sum(given[v] for v in self.accept)
            place.ledger.counts.update({f"verdict_{v}": n for v, n in given.items()})
            if not total:
                place.drop(record, "no_verdict")
            elif 2 * good <= total:
                place.drop(record, "rejected")
            else:
                yield {**record, self.column: good / total} if self.column else record
