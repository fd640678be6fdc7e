"""Bodies of requests as fields, checked one by one.

    bytes -> JSON (strict) -> a body of one API (pydantic) -> Job (serving.requests)

Every refusal is an `ApiError` that names the field, the value and the remedy. Fields that do not affect the
answer are accepted; fields whose meaning is not implemented are refused unless they hold their neutral value, and so
are unknown fields.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from rolljax import reading
from rolljax.envs.tools.base import ToolSpec
from rolljax.envs.tools.parsers import Parser
from rolljax.model.tokenizer import Chat
from rolljax.model.vocabulary import Vocabulary
from rolljax.serving.tool_calls import parser_of
from rolljax.types import SamplingParams

if TYPE_CHECKING:
    from rolljax.serving.session import Call

MAX_DEPTH = 64
MAX_STOP_CHARS = 256
INT64 = 2**63

IGNORED = frozenset({
    "user", "metadata", "store", "service_tier", "parallel_tool_calls", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention", "request_id",
})  # fmt: skip
"""Fields of OpenAI's older APIs that do not affect the answer."""
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "response_format": ({"type": "text"},),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "min_tokens": (0,),
    "suffix": ("",),
    "echo": (False,),
    "functions": ([],),
    "function_call": ("auto", "none"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "use_beam_search": (False,),
    "skip_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}
"""Fields of OpenAI's older APIs that are not implemented, and the values with which they mean nothing (null is always
one)."""


class ApiError(Exception):
    """A refusal in OpenAI's shape. `param` names the field it is about."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    def json(self) -> dict[str, Any]:
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(
            self.status, "server_error" if self.status >= 500 else "invalid_request_error"
        )
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def refuse(param: str, message: str, value: Any = ...) -> ApiError:
    """Return a 400 about one field."""
    got = "" if value is ... else f", got {short(value)}"
    return ApiError(400, f"{param}: {message}{got}", param=param)


@dataclasses.dataclass(frozen=True, eq=False)
class ServedModel:
    """The context for checking a request."""

    name: str
    tokenizer: Any
    chat: Chat | None
    """None for a tokenizer without a chat template."""
    vocab_size: int
    max_context: int

    @functools.cached_property
    def vocabulary(self) -> Vocabulary:
        return self.chat.vocabulary if self.chat is not None else Vocabulary(self.tokenizer)

    @functools.cached_property
    def tool_parser(self) -> Parser | None:
        """The parser of the calls that the model writes; None: they stay text."""
        return None if self.chat is None else parser_of(self.chat)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end an answer, unless a request sets `ignore_eos`."""
        if self.chat is not None:
            return self.chat.stop_ids
        eos = self.tokenizer.eos_token_id
        return () if eos is None else (eos,)


@dataclasses.dataclass(frozen=True, eq=False)
class TokenizedPrompt:
    """`ids [P]` int32; text as the request holds it, or as the ids spell it."""

    ids: np.ndarray
    text: str


@dataclasses.dataclass(frozen=True, eq=False)
class Conversation:
    """A conversation as chat templates take it: text as content, tool arguments as objects."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    options: dict[str, Any]
    must_call: str | None = None
    """Name of the tool that the answer must call; empty: any; None: the policy decides."""

    @property
    def tool_specs(self) -> list[ToolSpec]:
        """Return the tools as parsers of calls take them."""
        functions = [tool["function"] for tool in self.tools]
        return [ToolSpec(f["name"], input_schema=f.get("parameters") or {}) for f in functions]


@dataclasses.dataclass(frozen=True, eq=False)
class Job:
    """One HTTP request as the sampler understands it."""

    prompts: tuple[TokenizedPrompt, ...]
    params: SamplingParams
    seed: int | None
    """None: a random one."""
    priority: int
    stream: bool
    n: int = 1
    alternatives: int | None = None
    """Likely tokens reported next to each sampled one; None: no log-probs at all."""
    raw_logprobs: bool = False
    """Whether to report log-probs of the model's own distribution instead of the distribution sampled from."""
    echo: bool = False
    return_token_ids: bool = False
    include_usage: bool = False
    repeated: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of the request that the answer repeats."""
    tool_parser: Parser | None = None
    """The parser of calls in the answers; None: the request has no tools, or calls stay text."""
    prefill: str = ""
    """The beginning of the call that the request demands; the prompt ends with it."""
    conversation: Conversation | None = None
    """Conversation of a chat request. In a session, `overridden` lists the fields that have no effect, `call` is the
    record, and `address` is the address of the randomness (otherwise it follows from the seed)."""
    overridden: tuple[str, ...] = ()
    call: Call | None = None
    address: tuple[int, ...] | None = None
    min_version: int = 0
    """Policy version with which the session's group began; no older weights sample the answer."""


# ---- the fields


def stop_texts(value: Any) -> Any:
    """Return stop texts as a tuple."""
    stops = [value] if isinstance(value, str) else value or []
    if not isinstance(stops, list) or not all(isinstance(s, str) and 0 < len(s) <= MAX_STOP_CHARS for s in stops):
        raise ValueError(f"must be a text of 1 to {MAX_STOP_CHARS} characters, or a list of up to 4 of them")
    if len(stops) > 4:
        raise ValueError("must be at most 4 texts")
    if any("\ufffd" in s for s in stops):
        raise ValueError("cannot hold U+FFFD, which answers show for bytes that are no text")
    return tuple(stops)


class StreamOptions(BaseModel):
    """`stream_options` of a request."""

    model_config = ConfigDict(strict=True, extra="forbid")
    include_usage: bool = False
    include_obfuscation: bool | None = None


class AnyBody(BaseModel):
    """Fields of every request for tokens. None means the default."""

    model_config = ConfigDict(strict=True, extra="allow")
    ignored: ClassVar[frozenset[str]] = IGNORED
    """Further fields that do not affect the answer. neutral: see `NEUTRAL`."""
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = NEUTRAL
    model: str | None = None
    priority: int | None = Field(None, ge=-(2**31), lt=2**31)
    stream: bool | None = None


class SamplingBody(AnyBody):
    """Fields of a request that hold sampling settings."""

    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-INT64, lt=INT64)
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None


class Body(SamplingBody):
    """Fields that completions, chat and token ids share."""

    max_tokens: int | None = Field(None, ge=0, lt=INT64)
    n: int | None = Field(None, ge=1, le=128)
    best_of: int | None = None
    stop: Annotated[tuple[str, ...], BeforeValidator(stop_texts)] = ()
    logprobs_mode: Literal["processed_logprobs", "raw_logprobs"] | None = None
    return_token_ids: bool | None = None
    stream_options: StreamOptions | None = None


class CompletionBody(Body):
    """The body of `/v1/completions`."""

    prompt: Any
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=20)


class ChatBody(Body):
    """The body of `/v1/chat/completions`."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    max_completion_tokens: int | None = Field(None, ge=1, lt=INT64)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)


# ---- from bytes to a body


def parse_json(raw: bytes) -> dict[str, Any]:
    """Parse a JSON object strictly: UTF-8, no duplicate keys, finite numbers, no lone surrogates, bounded nesting."""
    try:
        body = json.loads(raw.decode(), object_pairs_hook=_object, parse_float=_finite, parse_constant=_finite)
    except UnicodeDecodeError as e:
        raise ApiError(400, f"the body is not UTF-8: byte {e.start} is {raw[e.start]:#04x}") from None
    except RecursionError:
        raise ApiError(400, f"the body is nested too deeply, at most {MAX_DEPTH} levels") from None
    except ValueError as e:
        raise ApiError(400, f"the body is not JSON: {e}") from None
    if not isinstance(body, dict):
        raise ApiError(400, f"the body must be a JSON object, got {short(body)}")
    _check(body, "", 0)
    return body


_object = reading.unique_keys(lambda key: refuse(key, "is given more than once"))


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ApiError(400, f"the body holds {text[:40]}, which is not a finite number")
    return value


def _check(value: Any, where: str, depth: int) -> None:
    if isinstance(value, str):
        if not value.isascii() and any("\ud800" <= c <= "\udfff" for c in value):
            raise refuse(where, "holds half of a surrogate pair, which is no text")
    elif isinstance(value, (dict, list)):
        if depth > MAX_DEPTH:
            raise ApiError(400, f"the body is nested too deeply, at most {MAX_DEPTH} levels")
        named = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in named:
            _check(key, where or str(key), depth)
            if not isinstance(item, (int, float)):
                _check(item, _path((where, key)), depth + 1)


def _path(parts: Sequence[str | int]) -> str:
    path = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in parts if p != "")
    return path.removeprefix(".")


def short(value: Any) -> str:
    """Return a value as text of at most 80 characters."""
    text = repr(value) if not isinstance(value, (dict, list, str)) else json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


B = TypeVar("B", bound=AnyBody)


def check_body(kind: type[B], raw: dict[str, Any], where: str = "") -> B:
    """Validate the body, or the object `where` of it, and return its fields.

    Raises:
      ApiError: a field is missing, malformed, unknown, or not implemented and not at its neutral value.
    """
    try:
        body = kind.model_validate(raw)
    except ValidationError as e:
        first = e.errors(include_url=False)[0]
        path = _path((where, *first["loc"]))
        if first["type"] == "missing":
            raise refuse(path, "is missing") from None
        raise refuse(path, first["msg"].removeprefix("Value error, "), first["input"]) from None
    for name, value in (body.model_extra or {}).items():
        if value is None or name in kind.ignored:
            continue
        if name not in kind.neutral:
            known = [field.alias or own for own, field in kind.model_fields.items()]
            near = difflib.get_close_matches(name, [*known, *kind.neutral, *kind.ignored], 1)
            remedy = f"; did you mean {near[0]}?" if near else "; leave it out"
            raise refuse(_path((where, name)), "is not a known field" + remedy)
        if not any(value == v and isinstance(value, bool) == isinstance(v, bool) for v in kind.neutral[name]):
            raise refuse(_path((where, name)), "is not supported; leave it out", value)
    return body
