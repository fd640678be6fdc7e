"""Ask models for a stage: many records concurrently, every answer written to the journal before it is used."""

from __future__ import annotations

import asyncio
import collections
import itertools
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from rolljax.chat_models.base import Asking, ChatAnswer, ChatModel, ChatModelConfig, ChatTooLong
from rolljax.concurrency.event_loop import SteppedLoop
from rolljax.data.base import Record, fingerprint
from rolljax.storage.journal import Journal
from rolljax.types import Message

T = TypeVar("T")
WINDOW = 4
"""Records under way for each question that the model takes at a time: some wait for others before them."""


class Asker:
    """Asks one model for one stage.

    model: settings; it is opened by the first question that the journal cannot answer. label: of the stage.
    concurrency: most questions at a time.
    """

    def __init__(self, model: ChatModelConfig, journal: Journal, label: str, concurrency: int) -> None:
        self._config, self._journal, self._label = model, journal, label
        self._concurrency = concurrency
        self._model: ChatModel | None = None
        self._under_way: dict[str, asyncio.Future[ChatAnswer]] = {}
        self._gate: asyncio.Semaphore | None = None
        self.counts = +collections.Counter(damaged=journal.damaged)

    async def ask(self, messages: Sequence[Message], how: Asking) -> ChatAnswer:
        """Return the answer to a conversation; equal questions are asked once.

        Raises:
          InfraError: there is none. ChatTooLong: it does not fit.
        """
        said = [[m.role, m.content] for m in messages]
        key = fingerprint([self._label, self._config.identity, said, how.temperature, how.max_tok, how.seed])
        if (kept := self._journal.get(key)) is not None:
            self.counts["from_journal"] += 1
            if kept["finish_reason"] == "too_long":
                raise ChatTooLong(kept["text"])
            return ChatAnswer(**kept)
        if key not in self._under_way:
            self._under_way[key] = asyncio.ensure_future(self._asked(key, messages, how))
            self._under_way[key].add_done_callback(lambda done: self._over(key, done))
        return await asyncio.shield(self._under_way[key])

    def _over(self, key: str, done: asyncio.Future[ChatAnswer]) -> None:
        self._under_way.pop(key, None)
        if not done.cancelled():
            done.exception()  # waiting callers have the exception; there may be none

    async def _asked(self, key: str, messages: Sequence[Message], how: Asking) -> ChatAnswer:
        if self._model is None:
            self._model = self._config.open()
        if self._gate is None:
            self._gate = asyncio.Semaphore(self._concurrency)
        async with self._gate:
            self.counts["asked"] += 1
            try:
                answer = await self._model.ask(messages, how)
            except ChatTooLong as e:
                self._journal.put(key, {"text": str(e), "finish_reason": "too_long"})
                raise
        kept = {"text": answer.text, "finish_reason": answer.finish_reason, "num_tok": answer.num_tok}
        self._journal.put(key, kept)
        self.counts["answer_tok"] += answer.num_tok
        return answer

    def each(self, source: Iterable[Record], work: Callable[[Record], Awaitable[T]]) -> Iterator[tuple[Record, T]]:
        """Yield the result of `work` for every record, in the order of the records, with many under way at a time.

        Raises:
          Whatever `work` raises; answers received until then are in the journal.
        """
        with SteppedLoop() as loop:
            waiting = iter(source)
            window: collections.deque[tuple[Record, asyncio.Task[T]]] = collections.deque()

            async def begin(records: Sequence[Record]) -> None:
                window.extend((record, asyncio.create_task(_run(work, record))) for record in records)

            try:
                loop.run(begin(list(itertools.islice(waiting, WINDOW * self._concurrency))))
                while window:
                    record, task = window.popleft()
                    made = loop.run(_result(task))
                    self._journal.sync()
                    yield record, made
                    loop.run(begin(list(itertools.islice(waiting, 1))))
            finally:
                for _, task in window:
                    task.cancel()
                loop.run(self._closed([task for _, task in window]))

    def one(self, work: Callable[[], Awaitable[T]]) -> T:
        """The result for one record."""
        return next(iter(self.each([{}], lambda _: work())))[1]

    async def _closed(self, cancelled: Sequence[asyncio.Task[T]]) -> None:
        """Wait for the open requests, which are paid for, then close the model's connections."""
        await asyncio.gather(*cancelled, *self._under_way.values(), return_exceptions=True)
        if self._model is not None:
            self.counts.update({name: n for name, n in self._model.counts().items() if name not in ("requests",)})
            await self._model.close()
        self._model, self._gate = None, None


async def _run(work: Callable[[Record], Awaitable[T]], record: Record) -> T:
    return await work(record)


async def _result(task: asyncio.Task[T]) -> T:
    return await task
