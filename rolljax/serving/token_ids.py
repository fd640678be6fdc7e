"""Token ids in, token ids out, as vLLM's `/inference/v1/generate` has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field

from rolljax.serving.completions import DataEncoder, data_event, usage
from rolljax.serving.generation import NOTHING, Choice, Json
from rolljax.serving.requests import Prompts, check_ids, check_length, choice_fields, conversation_ids, make_job
from rolljax.serving.schema import (
    IGNORED,
    NEUTRAL,
    AnyBody,
    Body,
    Job,
    ServedModel,
    StreamOptions,
    TokenizedPrompt,
    check_body,
    refuse,
)
from rolljax.serving.text import chat_logprobs
from rolljax.types import Completion, Sampled

OUTER = ("model", "priority", "stream", "stream_options")
"""Fields of the body that are checked together with the sampling settings."""


class GenerateBody(AnyBody):
    """The body of `/inference/v1/generate`."""

    ignored: ClassVar[frozenset[str]] = frozenset({"assistant_tokens_mask", "token_offsets"})
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {"features": (), "kv_transfer_params": ({},)}
    token_ids: list[Any]
    sampling_params: dict[str, Any]
    stream_options: StreamOptions | None = None
    request_id: str | None = None
    cache_salt: str | None = Field(None, min_length=1)


class GenerateSettings(Body):
    """The `sampling_params` of a `GenerateBody`, with those fields of the body that are in `OUTER`."""

    ignored: ClassVar[frozenset[str]] = IGNORED | {
        "detokenize", "include_stop_str_in_output", "output_kind", "skip_special_tokens",
        "spaces_between_special_tokens",
    }  # fmt: skip
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **NEUTRAL,
        "allowed_token_ids": (),
        "bad_words": ([],),
        "extra_args": ({},),
        "prompt_logprobs": (),
        "structured_outputs": (),
    }
    logprobs: int | None = Field(None, ge=0, le=20)


def read_generate(raw: dict[str, Any], served: ServedModel, _: Prompts = conversation_ids) -> Job:
    """Return the job of a `/inference/v1/generate` body, which holds no conversation."""
    body = check_body(GenerateBody, raw)
    where = "sampling_params"
    if taken := body.sampling_params.keys() & {*OUTER}:
        raise refuse(f"{where}.{min(taken)}", f"belongs beside {where}")
    outer = {name: raw[name] for name in OUTER if name in raw}
    settings = check_body(GenerateSettings, body.sampling_params | outer, where)
    if settings.max_tokens == 0:
        raise refuse(f"{where}.max_tokens", "must be at least 1", 0)
    if len(body.token_ids) < served.max_context:
        check_ids("token_ids", body.token_ids, served)
    prompt = TokenizedPrompt(check_length("token_ids", body.token_ids, served), "")
    fields = choice_fields(settings, 1, settings.logprobs) | {"repeated": {"request_id": body.request_id}}
    return make_job(settings, served, (prompt,), settings.max_tokens or served.max_context, settings.stop, **fields)


class TokenIdsEncoder(DataEncoder):
    """The form of `/inference/v1/generate`, with the policy versions that sampled the tokens."""

    prefix = "generate-tokens-"

    def body(self, done: Sequence[Completion]) -> Json:
        choices = [
            self._tokens(choice, completion.sampled, choice.reason(completion))
            for choice, completion in zip(self.choices, done, strict=True)
        ]
        named = {"model": self.service.served.name, "created": self.created_s}
        return self._chunk_of(choices) | named | {"usage": usage(self, done), "prompt_logprobs": None}

    def more(self, choice: Choice, sampled: Sampled, text: str) -> list[bytes]:
        return [data_event(self._chunk_of([self._tokens(choice, sampled, None)]))]

    def end(self, choice: Choice, completion: Completion, text: str) -> list[bytes]:
        return [data_event(self._chunk_of([self._tokens(choice, NOTHING, choice.reason(completion))]))]

    def _chunk_of(self, entries: list[Json]) -> Json:
        return {"request_id": self.job.repeated["request_id"] or self.id, "choices": entries}

    def _tokens(self, choice: Choice, sampled: Sampled, reason: str | None) -> Json:
        entries = None
        if self.job.alternatives is not None:
            entries = chat_logprobs(self.vocabulary, sampled, self.job.raw_logprobs, "token_id:{}".format)
        return {
            "index": choice.index,
            "token_ids": sampled.tokens.tolist(),
            "versions": sampled.versions.tolist(),
            "logprobs": entries,
            "finish_reason": reason,
        }
