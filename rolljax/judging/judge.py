"""Ask chat models for verdicts. Faults are kept apart from verdicts, by kind."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol, TypeVar

from rolljax.chat_models.base import Asking, ChatAnswer, ChatModelConfig, ChatTooLong, seed_of
from rolljax.errors import InfraError
from rolljax.judging.verdict import Unreadable, majority
from rolljax.types import Message

T = TypeVar("T")


class Answers(Protocol):
    """Something that answers conversations: an open chat model, or calls to one."""

    async def ask(self, messages: Sequence[Message], how: Asking) -> ChatAnswer:
        """Return the answer; see `ChatModel.ask`."""


async def ask(model: Answers, messages: Sequence[Message], how: Asking, read: Callable[[str], T]) -> T:
    """Request one answer and return the verdict in it.

    Args:
      read: parses an answer; raises `Unreadable` if it holds no verdict.

    Raises:
      Unreadable: there is no verdict: `too_long` if the prompt does not fit, `cut` if the answer was cut, else the kind
        of `read`. InfraError: there is no answer.
    """
    try:
        answer = await model.ask(messages, how)
    except ChatTooLong as e:
        raise Unreadable(f"what is to be judged does not fit: {e}", "too_long") from e
    if not answer.is_whole:
        cut = f"the answer was cut ({answer.finish_reason}, max_tok is {how.max_tok})"
        raise Unreadable(cut, "cut", answer.text)
    try:
        return read(answer.text)
    except Unreadable as e:
        e.answer = answer.text
        raise


async def all_of(asked: Sequence[Awaitable[T]]) -> list[T]:
    """Return all results; if one fails, the others are cancelled."""
    tasks = [asyncio.ensure_future(a) for a in asked]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


@dataclasses.dataclass(frozen=True)
class Ballot:
    """The votes of all judges on one question."""

    label: str | None
    """The label of the majority; None for a tie, or without a vote."""
    votes: Sequence[str | None]
    """The labels by judge, None for a judge that failed."""
    faults: Mapping[str, int]
    """Number of votes without a label, by kind: unreadable, cut, too_long, unreachable."""
    texts: Sequence[str]
    """The judges' answers."""


class JudgePanel:
    """Open judges that vote on labels. They live on one event loop.

    Args:
      votes: of each judge on a question. how: their temperature and tokens; the seed is part of every request's.
    """

    ALL_FAILED = 32
    """Votes that find a judge unreachable, without any answer before, after which it is an error."""

    def __init__(self, models: Sequence[ChatModelConfig], votes: int, how: Asking) -> None:
        self._models, self._votes, self._how = [model.open() for model in models], votes, how
        self._answered = self._unreachable = 0

    async def ballot(self, messages: Sequence[Message], read: Callable[[str], str], address: str) -> Ballot:
        """Return all votes on a question.

        Args:
          address: of the question: equal addresses and seeds give equal requests.

        Raises:
          InfraError: no judge has ever answered, after `ALL_FAILED` attempts.
        """
        jobs = [(model, f"{address}/{n}/{v}") for n, model in enumerate(self._models) for v in range(self._votes)]
        votes = await asyncio.gather(*(self._vote(model, messages, read, where) for model, where in jobs))
        faults = collections.Counter(fault for _, fault, _ in votes if fault)
        if faults["unreachable"] and self._unreachable >= self.ALL_FAILED and not self._answered:
            raise InfraError(f"no judge answers: {self._unreachable} verdicts were asked for", stage="judge")
        labels = [label for label, _, _ in votes]
        return Ballot(majority(labels), labels, faults, [text for _, _, text in votes])

    async def _vote(
        self, model: Answers, messages: Sequence[Message], read: Callable[[str], str], address: str
    ) -> tuple[str | None, str, str]:
        """Return label, fault and text of one vote."""
        how = dataclasses.replace(self._how, seed=seed_of(f"{self._how.seed}/{address}"))
        try:
            text, label = await ask(model, messages, how, lambda text: (text, read(text)))
        except InfraError:
            self._unreachable += 1
            return None, "unreachable", ""
        except Unreadable as e:
            self._answered += e.kind != "too_long"
            return None, {"garbage": "unreadable"}.get(e.kind, e.kind), e.answer
        self._answered += 1
        return label, "", text

    def counts(self) -> Mapping[str, int]:
        """Return the counts of all judges: requests, answers, and every fault under its kind."""
        return sum((collections.Counter(model.counts()) for model in self._models), collections.Counter())

    async def close(self) -> None:
        """Release connections or weights."""
        for model in self._models:
            await model.close()
