"""Writes answers in the form of OpenAI's completions and chat completions: choices in an envelope."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any, ClassVar

from rolljax.serving.generation import NOTHING, Choice, Encoder, Json, arguments_text, dump
from rolljax.serving.schema import ApiError
from rolljax.serving.text import CompletionLogprobs, chat_logprobs
from rolljax.types import Completion, Sampled


class DataEncoder(Encoder):
    """The encoder of an API whose events have no names, and whose streams end with `[DONE]`."""

    @abc.abstractmethod
    def _chunk_of(self, entries: list[Json]) -> Json:
        """Return a part of a stream with entries of choices."""

    def last(self, done: Sequence[Completion]) -> list[bytes]:
        counts = self._chunk_of([]) | {"usage": usage(self, done)}
        return [*([data_event(counts)] if self.job.include_usage else []), DONE]

    def failed(self, error: ApiError) -> list[bytes]:
        return [data_event(error.json()), DONE]


class ChoicesEncoder(DataEncoder):
    """What completions and chat completions share."""

    kind: ClassVar[str]
    """`object` of a whole answer. chunk_kind: of a part of one."""
    chunk_kind: ClassVar[str]

    def body(self, done: Sequence[Completion]) -> Json:
        entries = [
            self._whole(choice, completion) | {"index": choice.index, "finish_reason": choice.reason(completion)}
            for choice, completion in zip(self.choices, done, strict=True)
        ]
        return self._envelope(self.kind, entries) | {"usage": usage(self, done)}

    def more(self, choice: Choice, sampled: Sampled, text: str) -> list[bytes]:
        if not text and self.job.alternatives is None and not self.job.return_token_ids:
            return []
        return [self._chunk(self._part(choice, sampled, text) | {"index": choice.index, "finish_reason": None})]

    def end(self, choice: Choice, completion: Completion, text: str) -> list[bytes]:
        end = self._part(choice, NOTHING, text) | {"index": choice.index, "finish_reason": choice.reason(completion)}
        return [self._chunk(self._with_calls(end, choice))]

    @abc.abstractmethod
    def _whole(self, choice: Choice, completion: Completion) -> Json:
        """Return the fields of a complete choice."""

    @abc.abstractmethod
    def _part(self, choice: Choice, sampled: Sampled, text: str) -> Json:
        """Return the fields of a part of a choice."""

    def _with_calls(self, part: Json, choice: Choice) -> Json:
        return part

    def _ids(self, sampled: Sampled) -> Json:
        if not self.job.return_token_ids:
            return {}
        return {"token_ids": sampled.tokens.tolist(), "versions": sampled.versions.tolist()}

    def _chunk(self, entry: Json) -> bytes:
        chunk = self._chunk_of([entry])
        return data_event(chunk | {"usage": None} if self.job.include_usage else chunk)

    def _chunk_of(self, entries: list[Json]) -> Json:
        return self._envelope(self.chunk_kind, entries)

    def _envelope(self, kind: str, entries: list[Json]) -> Json:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created_s,
            "model": self.service.served.name,
            "system_fingerprint": f"policy-{self.service.sampler.version}",
            "choices": entries,
        }


class CompletionsEncoder(ChoicesEncoder):
    """The form of `/v1/completions`."""

    prefix = "cmpl-"
    kind = chunk_kind = "text_completion"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._logprobs = [CompletionLogprobs(self.vocabulary, choice.prompt.ids) for choice in self.choices]

    def first(self) -> list[bytes]:
        ids = self.job.return_token_ids
        return [
            self._chunk(
                {"index": choice.index, "finish_reason": None}
                | (self._echo(choice) if self.job.echo else {"text": "", "logprobs": None})
                | ({"prompt_token_ids": choice.prompt.ids.tolist()} if ids else {})
            )
            for choice in self.choices
        ]

    def _whole(self, choice: Choice, completion: Completion) -> Json:
        echo = self._echo(choice) if self.job.echo else {}
        whole = self._part(choice, completion.sampled, choice.content)
        if echo:
            logprobs = whole["logprobs"]
            if logprobs is not None:
                logprobs = {name: [*echo["logprobs"][name], *entries] for name, entries in logprobs.items()}
            whole |= {"text": echo["text"] + whole["text"], "logprobs": logprobs}
        return whole | ({"prompt_token_ids": choice.prompt.ids.tolist()} if self.job.return_token_ids else {})

    def _part(self, choice: Choice, sampled: Sampled, text: str) -> Json:
        job, logprobs = self.job, self._logprobs[choice.index]
        entries = None if job.alternatives is None else logprobs.sampled(sampled, job.raw_logprobs)
        return {"text": text, "logprobs": entries} | self._ids(sampled)

    def _echo(self, choice: Choice) -> Json:
        logp, text = choice.prompt_logp, choice.prompt.text
        return {"text": text, "logprobs": None if logp is None else self._logprobs[choice.index].prompt(logp, text)}


class ChatEncoder(ChoicesEncoder):
    """The form of `/v1/chat/completions`."""

    prefix = "chatcmpl-"
    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def body(self, done: Sequence[Completion]) -> Json:
        ids = {"prompt_token_ids": self.job.prompts[0].ids.tolist()} if self.job.return_token_ids else {}
        return super().body(done) | ids

    def first(self) -> list[bytes]:
        ids = self.job.return_token_ids
        chunks = []
        for choice in self.choices:
            delta = {"role": "assistant", "content": ""}
            entry = {"index": choice.index, "finish_reason": None, "delta": delta, "logprobs": None}
            chunk = self._chunk_of([entry])
            chunk |= {"usage": None} if self.job.include_usage else {}
            chunks.append(data_event(chunk | ({"prompt_token_ids": choice.prompt.ids.tolist()} if ids else {})))
        return chunks

    def _whole(self, choice: Choice, completion: Completion) -> Json:
        calls = _calls(choice)
        message: Json = {"role": "assistant", "content": choice.content or (None if calls else ""), "refusal": None}
        return {"message": message | ({"tool_calls": calls} if calls else {})} | self._tokens(completion.sampled)

    def _part(self, choice: Choice, sampled: Sampled, text: str) -> Json:
        return {"delta": {"content": text} if text else {}} | self._tokens(sampled)

    def _with_calls(self, part: Json, choice: Choice) -> Json:
        if calls := _calls(choice):
            part["delta"]["tool_calls"] = [{"index": k} | call for k, call in enumerate(calls)]
        return part

    def _tokens(self, sampled: Sampled) -> Json:
        job = self.job
        entries = None
        if job.alternatives is not None:
            entries = chat_logprobs(self.vocabulary, sampled, job.raw_logprobs)
        return {"logprobs": entries} | self._ids(sampled)


def _calls(choice: Choice) -> list[Json]:
    return [
        call | {"function": {"name": call["function"]["name"], "arguments": arguments_text(call)}}
        for call in choice.tool_calls
    ]


def usage(encoder: Encoder, done: Sequence[Completion]) -> Json:
    """Return the numbers of tokens as OpenAI's older APIs and vLLM's hold them."""
    prompt, sampled, cached = encoder.counts(done)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


DONE = b"data: [DONE]\n\n"


def data_event(value: Json) -> bytes:
    """Return a server-sent event without a name."""
    return b"data: " + dump(value) + b"\n\n"
