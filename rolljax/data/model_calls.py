"""Ask models for a stage: many records concurrently, every answer written to the journal before it is used."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import math
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rolljax.chat_models.base import Asking, ChatAnswer, ChatModel, ChatModelConfig, ChatTooLong
from rolljax.concurrency.event_loop import SteppedLoop
from rolljax.data.base import Record
from rolljax.judging.calls import CallLimits, Calls
from rolljax.storage.journal import Journal
from rolljax.types import Message

T = TypeVar("T")
WINDOW = 4
"""Records in progress per concurrent request: results are in order, so that finished records wait for earlier ones."""
TOO_LONG = "too_long"


class Asker:
    """Asks one model for one stage.

    model: settings; it is opened by the first question that the journal cannot answer. path: of the journal. label: of
    the stage. concurrency: most questions at a time.
    """

    def __init__(self, model: ChatModelConfig, path: Path, label: str, concurrency: int) -> None:
        self._config, self._path, self._label = model, path, label
        self._limits = CallLimits(math.inf, retries=0, concurrency=concurrency, down_after=sys.maxsize)
        self._model: ChatModel | None = None
        self._calls: Calls | None = None
        self.counts: collections.Counter[str] = collections.Counter()

    async def ask(self, messages: Sequence[Message], how: Asking) -> ChatAnswer:
        """Return the model's answer to a conversation. Equal requests are sent once.

        Raises:
          InfraError: the model gave no answer. ChatTooLong: the conversation is too long for the model.
        """

        async def once(_: int) -> dict[str, Any]:
            self._model = self._model or self._config.open()
            try:
                answer = await self._model.ask(messages, how)
            except ChatTooLong as e:
                return {"text": str(e), "finish_reason": TOO_LONG}
            self.counts["answer_tok"] += answer.num_tok
            return dataclasses.asdict(answer)

        assert self._calls is not None, "questions are asked inside of `each`"
        said = [[m.role, m.content] for m in messages]
        what = json.dumps([said, how.temperature, how.max_tok, how.seed])
        kept = await self._calls.answer(what, once, lambda kept: kept)
        if kept["finish_reason"] == TOO_LONG:
            raise ChatTooLong(kept["text"])
        return ChatAnswer(**kept)

    def each(self, source: Iterable[Record], work: Callable[[Record], Awaitable[T]]) -> Iterator[tuple[Record, T]]:
        """Yield the result of `work` for every record, in the order of the records, with many under way at a time.

        Raises:
          Whatever `work` raises; answers received until then are in the journal.
        """
        journal = Journal(self._path)
        self._calls = Calls(self._label, f"{self._label} {self._config.identity}", self._limits, journal, keep_all=True)
        with SteppedLoop() as loop:
            window = WINDOW * self._limits.concurrency
            try:
                with contextlib.closing(loop.each(source, work, window)) as results:
                    for record, made in results:
                        journal.sync()
                        yield record, made
            finally:
                loop.run(self._close(self._calls))

    def one(self, work: Callable[[], Awaitable[T]]) -> T:
        """Return the result of one call of `work`, which needs no record."""
        return next(iter(self.each([{}], lambda _: work())))[1]

    async def _close(self, calls: Calls) -> None:
        """Wait for the requests under way, which are paid for, and close the model."""
        try:
            await calls.close()
        finally:
            counts = collections.Counter(calls.counts())
            damaged = max(self.counts.pop("damaged", 0), counts.pop("damaged", 0))
            self.counts += counts + collections.Counter(damaged=damaged)
            if self._model is not None:
                self.counts.update({name: n for name, n in self._model.counts().items() if name != "requests"})
                await self._model.close()
            self._model = None
