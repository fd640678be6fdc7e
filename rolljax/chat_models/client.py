"""A chat model behind an OpenAI-compatible server: a client that tells the model's answers from the server's faults.

A request that times out, is refused with 408, 429 or 5xx, breaks off, or is answered with what is no chat completion
is the infrastructure's fault: it is counted under its kind and asked again, `retries` times, and after that it has
failed (`InfraError`), which is never an answer. 401, 403, 404 and 405 end the work: they would be the answer to every
request.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import json
import os
import random
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

import httpx2

from rolljax.chat_models.base import Asking, ChatAnswer, ChatModelConfig, ChatTooLong
from rolljax.envs.text import clean
from rolljax.errors import ConfigError, InfraError, RolljaxError, check_range
from rolljax.types import FinishReason, Message

HOPELESS = {
    401: "the key is not accepted",
    403: "the key may not use this model",
    404: "there is no such model or route",
    405: "there is no such route",
}
PASSING = {408, 409, 425, 429}
"""Refusals, beside 5xx, after which the same request may be asked again."""
MAX_WAIT_S = 60.0
"""Longest wait before a request is asked again."""
MAX_REPLY_BYTES = 64 << 20
_TOO_LONG = re.compile(r"context.?(?:length|window|size)|maximum context|prompt is too long", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class Reply:
    """A chat completion. prompt_ids, token_ids, sampler_logp: empty where the server does not tell them; tokens: how
    many it says that the answer has, 0 where it does not say; thinking: what it sends as `reasoning_content`, or as
    `reasoning`."""

    text: str
    finish_reason: FinishReason
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    sampler_logp: tuple[float, ...]
    tokens: int
    seconds: float
    thinking: str = ""


@dataclasses.dataclass(frozen=True)
class EndpointConfig(ChatModelConfig):
    """A chat model behind an OpenAI-compatible server, and how it is asked.

    url: up to `/v1`. model: the name that requests use; empty: the only one that `/models` lists.
    timeout_s: longest time for an answer. retries: how often a request is asked again. backoff_s: the pause before the
      first time, about; before the second it is twice as long, and so on. concurrency: most requests at a time.
    key_env: the environment variable that holds the bearer token; where it is not set, none is sent.
    request: fields of every request over those that are sent anyway; None takes one away
      (`{"max_tokens": None, "max_completion_tokens": 4096, "return_token_ids": True}`).
    completions: for base models, of which servers know no chat template: ask `/completions`. The prompt is the texts of
      the messages as they are, with blank lines between them.
    """

    url: str
    model: str = ""
    timeout_s: float = 600.0
    retries: int = 5
    backoff_s: float = 1.0
    concurrency: int = 64
    key_env: str = "OPENAI_API_KEY"
    request: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    completions: bool = False

    def __post_init__(self) -> None:
        if not re.match(r"https?://[^/]", self.url):
            raise ConfigError("is not the address of a server", setting=_URL, value=self.url, remedy=_LIKE)
        check_range(self, "timeout_s", above=0)
        check_range(self, "retries", "backoff_s", low=0)
        check_range(self, "concurrency", low=1)

    @property
    def base(self) -> str:
        """The address, without what requests add to it."""
        return self.url.rstrip("/").removesuffix("/chat/completions").removesuffix("/completions")

    @property
    def identity(self) -> str:
        return f"{self.model} at {self.base}"

    def open(self) -> Endpoint:
        key = os.environ.get(self.key_env, "")
        return Endpoint(the_only_model(self, key), key)


_URL = "EndpointConfig.url"
_LIKE = "like http://127.0.0.1:8000/v1 (eval: --endpoint, of a judge --judge)"
_MODEL = "EndpointConfig.model (eval: --model_name, of a judge --judge_model)"
"""Settings as configs name them, and in brackets as the command line does."""


class Endpoint:
    """A client of one server, with a count of what went wrong. It lives on one event loop.

    Args:
      key: bearer token; empty: none.
    """

    def __init__(self, cfg: EndpointConfig, key: str = "") -> None:
        self.cfg = cfg
        self._counts: collections.Counter[str] = collections.Counter()
        self.fatal: RolljaxError | None = None
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._open: tuple[httpx2.AsyncClient, asyncio.Semaphore] | None = None

    async def close(self) -> None:
        """Close the connections; the next request opens new ones, on whatever event loop it is made."""
        if self._open is not None:
            await self._open[0].aclose()
            self._open = None

    def counts(self) -> Mapping[str, int]:
        """`requests` that were sent; `answers`; every fault under its kind."""
        return self._counts

    async def ask(self, messages: Sequence[Message], how: Asking) -> ChatAnswer:
        """See `ChatModel.ask`."""
        reply = await self.chat(messages, {"temperature": how.temperature, "max_tokens": how.max_tok, "seed": how.seed})
        return ChatAnswer(reply.text, reply.finish_reason, reply.tokens)

    async def chat(self, messages: Sequence[Message], fields: Mapping[str, Any]) -> Reply:
        """The model's answer to a conversation.

        Raises:
          InfraError: the server gave none, also when asked again. ChatTooLong: the conversation does not fit.
        """
        said: dict[str, Any] = {"messages": [{"role": m.role, "content": m.content} for m in messages]}
        if self.cfg.completions:
            said = {"prompt": "\n\n".join(m.content for m in messages)}
        every = {"model": self.cfg.model, **said, **fields, **self.cfg.request}
        body = {name: value for name, value in every.items() if value is not None}
        kind, detail, wait_s = "", "", 0.0
        for attempt in range(self.cfg.retries + 1):
            http, gate = self._connections()
            async with gate:
                if self.fatal is not None:
                    raise InfraError(str(self.fatal), stage="endpoint")
                try:
                    return await self._ask(http, body)
                except _Passing as e:
                    kind, detail, wait_s = e.kind, e.detail, e.wait_s
            self._counts[kind] += 1
            if attempt < self.cfg.retries:
                backoff_s = self.cfg.backoff_s * 2**attempt * random.uniform(0.5, 1.5)
                await asyncio.sleep(min(max(wait_s, backoff_s), MAX_WAIT_S))
        raise InfraError(f"no answer after {self.cfg.retries + 1} requests; the last one: {detail}", stage="endpoint")

    async def _ask(self, http: httpx2.AsyncClient, body: Mapping[str, Any]) -> Reply:
        """One request.

        Raises:
          _Passing: a fault of the server. InfraError: it refuses the request. ChatTooLong.
        """
        start_s = time.monotonic()
        self._counts["requests"] += 1
        try:
            route = "completions" if self.cfg.completions else "chat/completions"
            response = await http.post(f"{self.cfg.base}/{route}", json=body)
        except httpx2.TimeoutException as e:
            raise _Passing("timeout", f"{type(e).__name__} after {self.cfg.timeout_s:g} s") from e
        except httpx2.HTTPError as e:
            raise _Passing("connection", f"{type(e).__name__}: {e}") from e
        self._check_status(response)
        try:
            reply = read_reply(response.content, time.monotonic() - start_s)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as e:
            start = response.text[:200]
            raise _Passing("garbage", f"no completion ({type(e).__name__}: {e}): {start!r}") from e
        self._counts["answers"] += 1
        return reply

    def _connections(self) -> tuple[httpx2.AsyncClient, asyncio.Semaphore]:
        if self._open is None:
            limits = httpx2.Limits(max_connections=self.cfg.concurrency)
            http = httpx2.AsyncClient(headers=self._headers, timeout=self.cfg.timeout_s, limits=limits)
            self._open = http, asyncio.Semaphore(self.cfg.concurrency)
        return self._open

    def _check_status(self, response: httpx2.Response) -> None:
        status = response.status_code
        if status == 200:
            if len(response.content) > MAX_REPLY_BYTES:
                raise _Passing("garbage", f"{len(response.content)} bytes")
            return
        text = response.text[:500]
        if status in PASSING or status >= 500:
            raise _Passing(f"status_{status}", f"status {status}: {text}", _retry_after(response))
        if status in HOPELESS:
            self.fatal = ConfigError(
                f"says {status}, {HOPELESS[status]}: {text}", setting=_URL, value=self.cfg.url, remedy=_KEY
            )
            raise InfraError(str(self.fatal), stage="endpoint")
        if status in (400, 413, 422) and _TOO_LONG.search(text):
            raise ChatTooLong(text)
        self._counts[f"status_{status}"] += 1
        raise InfraError(f"the server refuses the request with status {status}: {text}", stage="endpoint")


_KEY = f"see {_MODEL}; the key is read from the variable that EndpointConfig.key_env (--api_key_env) names"


class _Passing(Exception):
    """A fault after which the same request may be asked again. kind: as it is counted. wait_s: that the server asks
    for."""

    def __init__(self, kind: str, detail: str, wait_s: float = 0.0) -> None:
        self.kind, self.detail, self.wait_s = kind, detail, wait_s
        super().__init__(detail)


def _retry_after(response: httpx2.Response) -> float:
    try:
        return max(0.0, float(response.headers.get("retry-after", 0)))
    except ValueError:  # a date
        return 0.0


def read_reply(content: bytes, seconds: float) -> Reply:
    """A completion, of a chat or of a prompt, from the bytes of a response.

    Raises:
      ValueError, LookupError, TypeError, AttributeError, RecursionError: it is none.
    """
    reply = json.loads(content)
    choice = reply["choices"][0]
    message = {"content": choice["text"]} if "text" in choice else choice["message"]
    text = message.get("content")
    if not (text is None or isinstance(text, str)):
        raise TypeError("the content of the message is no text")
    thought = message.get("reasoning_content") or message.get("reasoning") or ""
    thought = clean(thought) if isinstance(thought, str) else ""
    reasons: dict[Any, FinishReason] = {"length": "length", "content_filter": "abort"}
    ids = _ids(choice.get("token_ids"))
    told = choice.get("logprobs") or {}
    logp = tuple(float(entry["logprob"]) for entry in told.get("content") or ())
    logp = logp or tuple(map(float, told.get("token_logprobs") or ()))
    tokens = int((reply.get("usage") or {}).get("completion_tokens") or len(ids))
    prompt = _ids(reply.get("prompt_token_ids")) if ids else ()
    reason = reasons.get(choice.get("finish_reason"), "stop")
    logp = logp if len(logp) == len(ids) else ()
    return Reply(clean(text or ""), reason, prompt, ids, logp, max(0, tokens), seconds, thought)


def _ids(value: Any) -> tuple[int, ...]:
    found = tuple(map(int, value or ()))
    if not all(0 <= i < 2**31 for i in found):
        raise ValueError("a token id out of range")
    return found


def the_only_model(cfg: EndpointConfig, key: str = "") -> EndpointConfig:
    """The settings with the name of the model that the server lists, if none is given.

    Raises:
      ConfigError: it cannot be reached, or lists another number of models.
    """
    if cfg.model:
        return cfg
    try:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        response = httpx2.get(f"{cfg.base}/models", headers=headers, timeout=min(cfg.timeout_s, 30.0))
        names = [str(entry["id"]) for entry in response.raise_for_status().json()["data"]]
    except (httpx2.HTTPError, ValueError, LookupError, TypeError) as e:
        raise ConfigError(
            f"does not list its models: {type(e).__name__}: {e}",
            setting=_URL,
            value=cfg.url,
            remedy=f"check the address, {_LIKE}, or set {_MODEL}",
        ) from e
    if len(names) != 1:
        raise ConfigError(
            f"lists {len(names)} models: {', '.join(names[:10])}", setting=_URL, value=cfg.url, remedy=f"set {_MODEL}"
        )
    return dataclasses.replace(cfg, model=names[0])
