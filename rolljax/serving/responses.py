"""The answers of one HTTP request: its requests to the sampler, and the JSON or events of the response."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rolljax.errors import SamplerError
from rolljax.model.vocabulary import TextStream
from rolljax.sampler.client import Pending
from rolljax.serving.schema import ApiError, Job
from rolljax.serving.text import CompletionLogprobs, chat_logprobs
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

    def __init__(self, service: Service, job: Job, started_s: float) -> None:
        self.service, self.job = service, job
        self._started_s = started_s
        self._submitted_s = time.perf_counter()
        self._id = f"{'chatcmpl' if job.chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._events: asyncio.Queue[tuple[int, Sampled | None]] = asyncio.Queue()
        self._pending: list[Pending] = []
        self._choices = [Choice(service, job, i) for i in range(len(job.prompts) * job.n)]
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
        job = self.job
        prompt_logp = await self._prompt_logp()
        done = [await self._completion(i) for i in range(len(self._choices))]
        entries = []
        for i, (choice, completion) in enumerate(zip(self._choices, done, strict=True)):
            head = choice.head(prompt_logp[i // job.n]) if job.echo else {}
            fields = choice.fields(completion.sampled, last=True)
            entry = _joined(head, fields) | {"index": i, "finish_reason": choice.reason(completion)}
            if job.chat:
                entry["message"] = {"role": "assistant", "content": entry.pop("text"), "refusal": None}
            elif job.return_token_ids:
                entry["prompt_token_ids"] = choice.prompt.ids.tolist()
            entries.append(entry)
        self._record(done)
        reply = self._envelope(entries) | {"usage": self._usage(done)}
        if job.chat and job.return_token_ids:
            reply["prompt_token_ids"] = job.prompts[0].ids.tolist()
        return reply

    async def events(self) -> AsyncIterator[bytes]:
        """Return the answer as server-sent events, several at once when they are ready."""
        job, done = self.job, dict[int, Completion]()
        chunks: list[Json] = []
        try:
            prompt_logp = await self._prompt_logp()
            chunks = [self._first(choice, prompt_logp[i // job.n]) for i, choice in enumerate(self._choices)]
            while len(done) < len(self._choices):
                if chunks and self._events.empty():
                    yield b"".join(map(_event, chunks))
                    chunks = []
                i, sampled = await self._events.get()
                if sampled is None:
                    done[i] = await self._completion(i)
                chunks += self._chunks(i, sampled, done.get(i))
            self._record([done[i] for i in sorted(done)])
            if job.include_usage:
                usage = self._usage([done[i] for i in sorted(done)])
                chunks.append(self._envelope([], ".chunk") | {"usage": usage})
        except ApiError as e:
            chunks.append(e.json())
        yield b"".join(map(_event, chunks)) + b"data: [DONE]\n\n"

    def _first(self, choice: Choice, prompt_logp: np.ndarray | None) -> Json:
        """Return the chunk that opens an answer: its role, the echoed prompt, the prompt's ids."""
        job = self.job
        entry: Json = {"index": choice.index, "finish_reason": None}
        if job.chat:
            entry |= {"delta": {"role": "assistant", "content": ""}, "logprobs": None}
        else:
            entry |= choice.head(prompt_logp) if job.echo else {"text": "", "logprobs": None}
        chunk = self._envelope([entry], ".chunk")
        if job.return_token_ids:
            (chunk if job.chat else entry)["prompt_token_ids"] = choice.prompt.ids.tolist()
        return chunk

    def _chunks(self, i: int, sampled: Sampled | None, done: Completion | None) -> list[Json]:
        """Return the event for new tokens, or for the end of an answer."""
        job, choice = self.job, self._choices[i]
        fields = choice.fields(NOTHING if sampled is None else sampled, last=sampled is None)
        if sampled is not None and not fields["text"] and job.alternatives is None and not job.return_token_ids:
            return []
        entry = fields | {"index": i, "finish_reason": None}
        if sampled is None and done is not None:
            entry["finish_reason"] = choice.reason(done)
        if job.chat:
            text = entry.pop("text")
            entry["delta"] = {"content": text} if text else {}
        return [self._envelope([entry], ".chunk")]

    # ---- parts of both

    def _record(self, done: Sequence[Completion]) -> None:
        """Put the answer of a session's call on record, before its program can see the end of it."""
        if self.job.call is not None:
            self.job.call.answered(done[0], self._choices[0].text)

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

    async def _prompt_logp(self) -> list[np.ndarray | None]:
        """Return log-probs of every prompt, where they are echoed."""
        job = self.job
        if not job.echo or job.alternatives is None:
            return [None] * len(job.prompts)
        try:
            return list(await asyncio.gather(*(self.service.sampler.score(p.ids) for p in job.prompts)))
        except SamplerError as e:
            raise self._failed(e) from e

    def _failed(self, error: SamplerError) -> ApiError:
        if reason := self.service.unavailable():
            return ApiError(503, reason, code="unavailable")
        return ApiError(400, str(error))

    def _envelope(self, entries: list[Json], suffix: str = "") -> Json:
        chat = self.job.chat
        envelope: Json = {
            "id": self._id,
            "object": f"chat.completion{suffix}" if chat else "text_completion",
            "created": self._created,
            "model": self.service.served.name,
            "system_fingerprint": f"policy-{self.service.sampler.version}",
            "choices": entries,
        }
        return envelope | {"usage": None} if suffix and self.job.include_usage else envelope

    def _usage(self, done: Sequence[Completion]) -> Json:
        n = self.job.n
        prompt = sum(len(p.ids) for p in self.job.prompts)
        sampled = sum(len(c.tokens) for c in done)
        cached = sum(min(c.cached_tok for c in done[i : i + n]) for i in range(0, len(done), n))
        return {
            "prompt_tokens": prompt,
            "completion_tokens": sampled,
            "total_tokens": prompt + sampled,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


class Choice:
    """One of OpenAI's choices, built as its tokens come.

    index: of the choice in its response.
    """

    def __init__(self, service: Service, job: Job, index: int) -> None:
        self._job, self._vocabulary = job, service.served.vocabulary
        self.index, self.prompt = index, job.prompts[index // job.n]
        self._text = TextStream(self._vocabulary.decoder(self.prompt.ids), job.params.stop)
        self._logprobs = CompletionLogprobs(self._vocabulary, self.prompt.ids)

    def head(self, prompt_logp: np.ndarray | None) -> Json:
        """Return the echoed prompt."""
        entries = None if prompt_logp is None else self._logprobs.prompt(prompt_logp, self.prompt.text)
        return {"text": self.prompt.text, "logprobs": entries}

    def fields(self, sampled: Sampled, *, last: bool) -> Json:
        """Return text, log-probs and ids of further tokens."""
        job = self._job
        fields: Json = {"text": self._text.add(sampled.tokens.tolist(), last=last), "logprobs": None}
        if job.alternatives is not None and job.chat:
            fields["logprobs"] = chat_logprobs(self._vocabulary, sampled, job.raw_logprobs)
        elif job.alternatives is not None:
            fields["logprobs"] = self._logprobs.sampled(sampled, job.raw_logprobs)
        if job.return_token_ids:
            fields |= {"token_ids": sampled.tokens.tolist(), "versions": sampled.versions.tolist()}
        return fields

    @property
    def text(self) -> str:
        """The whole text that `fields` has returned."""
        return self._text.shown

    def reason(self, completion: Completion) -> str:
        return "stop" if self._text.stopped or completion.finish_reason == "stop" else "length"


def _joined(head: Json, tail: Json) -> Json:
    """Join an echoed prompt and its answer into one choice."""
    if not head:
        return tail
    logprobs = tail["logprobs"]
    if logprobs is not None:
        logprobs = {name: [*head["logprobs"][name], *entries] for name, entries in logprobs.items()}
    return tail | {"text": head["text"] + tail["text"], "logprobs": logprobs}


def _event(chunk: Json) -> bytes:
    return b"data: " + dump(chunk) + b"\n\n"


def dump(value: Json) -> bytes:
    """Serialize a value as JSON bytes; arrays keep every digit."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
