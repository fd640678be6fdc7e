"""The answers of one HTTP request: its requests to the sampler, and what the encoder of an API makes of them.

Job -> Generation (sampler) -> Choice (text, calls, ids of one answer) -> Encoder -> JSON or events
"""

from __future__ import annotations

import abc
import asyncio
import functools
import json
import os
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from rolljax.errors import SamplerError
from rolljax.model.vocabulary import TextStream
from rolljax.sampler.client import Pending
from rolljax.serving.schema import ApiError, Job
from rolljax.serving.tool_calls import AnswerParts
from rolljax.types import Completion, Sampled

if TYPE_CHECKING:
    from rolljax.serving.server import Service

Json = dict[str, Any]
NOTHING = Sampled.of(np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32))


class Generation:
    """The sampler requests of one HTTP request: an answer for each prompt and sibling.

    Raises:
      ApiError: the sampler refuses the request, or has stopped.
    """

    def __init__(self, service: Service, job: Job, encoder: type[Encoder], started_s: float) -> None:
        self.service, self.job = service, job
        self._started_s = started_s
        self._submitted_s = time.perf_counter()
        self._events: asyncio.Queue[tuple[int, Sampled | None]] = asyncio.Queue()
        self._pending: list[Pending] = []
        self._choices = [Choice(service, job, i) for i in range(len(job.prompts) * job.n)]
        self._encoder = encoder(service, job, self._choices)
        service.generations.add(self)
        try:
            self._submit()
        except SamplerError as e:
            self.close()
            raise self._failed(e) from e

    def _submit(self) -> None:
        if not self.job.params.max_tokens:
            for i in range(len(self._choices)):
                self._events.put_nowait((i, None))
            return
        seeded = self.job.seed is not None
        seed = self.job.seed % 2**62 if self.job.seed is not None else int.from_bytes(os.urandom(7), "big")
        for i in range(len(self._choices)):
            pending = self.service.sampler.submit(
                self.job.prompts[i // self.job.n].ids,
                self.job.params,
                self.job.address or (int(seeded), seed >> 31, seed & (2**31 - 1), i),
                priority=self.job.priority,
                on_tokens=functools.partial(self._on_tokens, i) if self.job.stream else None,
                min_version=self.job.min_version,
            )
            self._pending.append(pending)
            pending.completion.add_done_callback(functools.partial(self._on_done, i))

    def _on_tokens(self, i: int, sampled: Sampled) -> None:
        self._events.put_nowait((i, sampled))

    def _on_done(self, i: int, completion: asyncio.Future[Completion]) -> None:
        completion.exception()  # marks an error as seen, in case this answer is not awaited any more
        if self.job.call is not None:
            self.job.call.sampled()
        self._events.put_nowait((i, None))

    def abort(self) -> None:
        """Cancel running requests; tokens sampled so far are delivered."""
        for pending in self._pending:
            if not pending.completion.done():
                pending.abort()

    def close(self) -> None:
        """Release everything; must be called at the end, also after an error."""
        self.service.generations.discard(self)
        self.abort()
        if self.job.call is not None:
            self.job.call.close()

    # ---- the two forms of an answer

    async def body(self) -> Json:
        """Return the answer as one JSON body."""
        await self._score_prompts()
        done = [await self._completion(i) for i in range(len(self._choices))]
        for choice, completion in zip(self._choices, done, strict=True):
            choice.add(completion.sampled, last=True)
        self._record(done)
        return self._encoder.body(done)

    async def events(self) -> AsyncIterator[bytes]:
        """Return the answer as server-sent events, several at once when they are ready."""
        done, encoder = dict[int, Completion](), self._encoder
        ready: list[bytes] = []
        try:
            await self._score_prompts()
            ready = encoder.first()
            while len(done) < len(self._choices):
                if ready and self._events.empty():
                    yield b"".join(ready)
                    ready = []
                i, sampled = await self._events.get()
                choice = self._choices[i]
                if sampled is None:
                    done[i] = await self._completion(i)
                    ready += encoder.end(choice, done[i], choice.add(NOTHING, last=True))
                else:
                    ready += encoder.more(choice, sampled, choice.add(sampled, last=False))
            complete = [done[i] for i in sorted(done)]
            self._record(complete)
            ready += encoder.last(complete)
        except ApiError as e:
            ready += encoder.failed(e)
        yield b"".join(ready)

    # ---- parts of both

    def _record(self, done: Sequence[Completion]) -> None:
        """Put the answer of a session's call on record, before its program can see the end of it."""
        if self.job.call is not None:
            self.job.call.answered(done[0], self._choices[0].text, self._choices[0].message)

    async def _completion(self, i: int) -> Completion:
        if not self.job.params.max_tokens:
            return Completion(NOTHING, "length")
        try:
            await asyncio.wait([self._pending[i].completion])  # which, unlike awaiting it, never cancels it
            completion = self._pending[i].completion.result()
        except SamplerError as e:
            raise self._failed(e) from e
        if completion.finish_reason == "abort":
            reason = self.service.unavailable() or "its session has ended"
            raise ApiError(503, f"the answer was given up: {reason}", code="unavailable")
        self.service.metrics.answered(self._submitted_s - self._started_s, completion)
        return completion

    async def _score_prompts(self) -> None:
        """Give every choice the log-probs of its prompt, where they are echoed."""
        job = self.job
        if not job.echo or job.alternatives is None:
            return
        try:
            scores = await asyncio.gather(*(self.service.sampler.score(p.ids) for p in job.prompts))
        except SamplerError as e:
            raise self._failed(e) from e
        for choice in self._choices:
            choice.prompt_logp = scores[choice.index // job.n]

    def _failed(self, error: SamplerError) -> ApiError:
        if reason := self.service.unavailable():
            return ApiError(503, reason, code="unavailable")
        return ApiError(400, str(error))


class Choice:
    """One answer, built as its tokens come.

    index: of the choice in its response. prompt_logp `[P]`: log-probs of the prompt if they are echoed.
    """

    def __init__(self, service: Service, job: Job, index: int) -> None:
        self.index, self.prompt = index, job.prompts[index // job.n]
        self.prompt_logp: np.ndarray | None = None
        self._text = TextStream(service.served.vocabulary.decoder(self.prompt.ids), job.params.stop)
        self._parts: AnswerParts | None = None
        if job.tool_parser and job.conversation:
            self._parts = AnswerParts(job.tool_parser, job.conversation.tool_specs)
            self._parts.add(job.prefill, last=False)
        # the same in each replay of a session, because templates may write it; Mistral's take 9 letters and digits only
        self._call_id = uuid.uuid4().hex[:5] if job.call is None else f"c{job.call.index:04d}"

    def add(self, sampled: Sampled, *, last: bool) -> str:
        """Take further tokens; return the text, without tool calls, that can be shown now."""
        text = self._text.add(sampled.tokens.tolist(), last=last)
        return self._parts.add(text, last=last) if self._parts else text

    @property
    def text(self) -> str:
        """The whole text so far, as the model wrote it, up to a stop text."""
        return self._text.shown

    @property
    def content(self) -> str:
        """The text so far without tool calls."""
        return self._parts.content if self._parts else self.text

    @property
    def tool_calls(self) -> list[Json]:
        """The calls of the complete answer, as a conversation holds them (`Conversation`)."""
        return [
            {
                "id": f"{self._call_id}{i:04d}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for i, call in enumerate(self._parts.calls if self._parts else ())
        ]

    @property
    def message(self) -> Json:
        """The complete answer as a conversation holds it (`Conversation`)."""
        calls = self.tool_calls
        return {"role": "assistant", "content": self.content} | ({"tool_calls": calls} if calls else {})

    @property
    def stop(self) -> str:
        """The stop text that ended the answer; empty if none did."""
        return self._text.stopped

    def reason(self, completion: Completion) -> str:
        """Return why the complete answer ended: `length`, `stop` or `tool_calls`."""
        if not (self._text.stopped or completion.finish_reason == "stop"):
            return "length"
        return "tool_calls" if self._parts and self._parts.calls else "stop"


class Encoder(abc.ABC):
    """Writes the answers of one request in the form of an API.

    Of a stream `first` comes first, then `more` for new tokens and `end` for the end of each choice, then `last`;
    `failed` ends it early.
    """

    prefix: ClassVar[str]
    """Beginning of the ids of answers."""

    def __init__(self, service: Service, job: Job, choices: Sequence[Choice]) -> None:
        self.service, self.job, self.choices = service, job, choices
        self.vocabulary = service.served.vocabulary
        self.id = self.prefix + uuid.uuid4().hex
        self.created_s = int(time.time())

    @abc.abstractmethod
    def body(self, done: Sequence[Completion]) -> Json:
        """Return the body for complete choices."""

    def first(self) -> list[bytes]:
        """Return the events before any token."""
        return []

    @abc.abstractmethod
    def more(self, choice: Choice, sampled: Sampled, text: str) -> list[bytes]:
        """Return the events for new tokens, and for text of the choice that can be shown now."""

    @abc.abstractmethod
    def end(self, choice: Choice, completion: Completion, text: str) -> list[bytes]:
        """Return the events for the rest of a choice's text, its calls, and its end."""

    def last(self, done: Sequence[Completion]) -> list[bytes]:
        """Return the events after the end of all choices."""
        return []

    @abc.abstractmethod
    def failed(self, error: ApiError) -> list[bytes]:
        """Return the events that end a stream with an error."""

    def counts(self, done: Sequence[Completion]) -> tuple[int, int, int]:
        """Return the numbers of prompt tokens, of sampled tokens, and of prompt tokens found in the cache."""
        n = self.job.n
        cached = sum(min(c.cached_tok for c in done[i : i + n]) for i in range(0, len(done), n))
        return sum(len(p.ids) for p in self.job.prompts), sum(len(c.tokens) for c in done), cached


def dump(value: Json) -> bytes:
    """Serialize a value as JSON bytes; arrays keep every digit."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def arguments_text(call: Json) -> str:
    """Return the arguments of a call as the JSON text in which OpenAI's APIs hold them."""
    return json.dumps(call["function"]["arguments"], ensure_ascii=False)
