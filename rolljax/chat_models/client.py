"""A chat model behind an OpenAI-compatible server: a client that separates answers from server faults.

A request that times out, is refused with 408, 429 or 5xx, breaks off, or gets a response that is not a chat completion
is an infrastructure fault. It is counted under its kind and repeated `retries` times, and after that it has failed
(`InfraError`), which never counts as an answer. 401, 403, 404 and 405 end the work at once, because every request would
get the same response. All responses are read within limits on size and time (`envs.http_body`).
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import dataclasses
import json
import os
import random
import re
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NoReturn

from rolljax.chat_models.base import Asking, ChatAnswer, ChatModelConfig, ChatTooLong
from rolljax.chat_models.completion import MAX_BODY_BYTES, Reply, read_object, reply_of
from rolljax.envs.http_body import ACCEPTED, BadBody, read_body, read_error
from rolljax.envs.text import clean
from rolljax.errors import ConfigError, InfraError, Range, RolljaxError, check_fields, needed
from rolljax.types import Message

with needed("httpx2", "a chat model behind a server"):
    import httpx2

HOPELESS = {
    401: "the key is not accepted",
    403: "the key may not use this model",
    404: "there is no such model or route",
    405: "there is no such route",
}
PASSING = {408, 409, 425, 429}
"""Statuses, in addition to 5xx, after which the same request may be repeated."""
MAX_WAIT_S = 60.0
"""Longest wait before a request is repeated."""
MODELS_S = 30.0
"""Longest time for the list of a server's models."""
_TOO_LONG = re.compile(r"context.?(?:length|window|size)|maximum context|prompt is too long", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class EndpointConfig(ChatModelConfig):
    """The address of a chat model on an OpenAI-compatible server, and the settings for calling it."""

    url: str
    """Address up to `/v1`."""
    model: str = ""
    """The name in requests; empty: the only one that `/models` lists."""
    timeout_s: Annotated[float, Range(above=0)] = 600.0
    """Longest time for an answer, from the connection to its last byte."""
    retries: Annotated[int, Range(low=0)] = 5
    """Number of times a failed request is repeated."""
    backoff_s: Annotated[float, Range(low=0)] = 1.0
    """Approximate pause before the first retry; doubled before each further one."""
    concurrency: Annotated[int, Range(low=1)] = 64
    """Maximum number of concurrent requests."""
    key_env: str = "OPENAI_API_KEY"
    """The environment variable that holds the bearer token; where it is not set, none is sent."""
    request: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Fields to add to every request, which override the usual ones; None removes a field (`{"max_tokens": None,
    "max_completion_tokens": 4096, "return_token_ids": True}`)."""
    completions: bool = False
    """Whether to use `/completions`, for base models whose servers have no chat template. The prompt is then the
    unmodified texts of the messages, separated by blank lines."""

    def __post_init__(self) -> None:
        if not re.match(r"https?://[^/]", self.url):
            raise ConfigError("is not the address of a server", setting=_URL, value=self.url, remedy=_LIKE)
        check_fields(self)
        try:
            json.dumps(dict(self.request), allow_nan=False).encode()
        except (TypeError, ValueError) as e:
            raise ConfigError(
                f"cannot be sent as JSON: {e}", setting="EndpointConfig.request (eval: --request)", value=self.request
            ) from e

    @property
    def base(self) -> str:
        """The address, without the path that requests add to it."""
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
    """A client of one server, with a count of its faults. Used from one event loop.

    Args:
      key: bearer token; empty: none.
    """

    def __init__(self, cfg: EndpointConfig, key: str = "") -> None:
        self.cfg = cfg
        self._counts: collections.Counter[str] = collections.Counter()
        self.fatal: RolljaxError | None = None
        self._headers = _headers(key)
        self._open: tuple[httpx2.AsyncClient, asyncio.Semaphore] | None = None

    async def close(self) -> None:
        """Close the connections; the next request opens new ones, on the event loop of that request."""
        if self._open is not None:
            await self._open[0].aclose()
            self._open = None

    def counts(self) -> Mapping[str, int]:
        """Return the number of `requests` sent, of `answers`, and of every kind of fault."""
        return self._counts

    async def ask(self, messages: Sequence[Message], how: Asking) -> ChatAnswer:
        """See `ChatModel.ask`."""
        reply = await self.chat(messages, {"temperature": how.temperature, "max_tokens": how.max_tok, "seed": how.seed})
        return ChatAnswer(reply.text, reply.finish_reason, reply.tokens)

    async def chat(self, messages: Sequence[Message], fields: Mapping[str, Any]) -> Reply:
        """Return the model's answer to a conversation.

        Raises:
          InfraError: the server gave none after all retries. ChatTooLong: the conversation does not fit.
        """
        said: dict[str, Any] = {"messages": [{"role": m.role, "content": clean(m.content)} for m in messages]}
        if self.cfg.completions:
            said = {"prompt": clean("\n\n".join(m.content for m in messages))}
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
        """Send one request.

        Raises:
          _Passing: a fault of the server. InfraError: the server refuses the request. ChatTooLong.
        """
        start_s = time.monotonic()
        self._counts["requests"] += 1
        try:
            route = "completions" if self.cfg.completions else "chat/completions"
            async with asyncio.timeout(self.cfg.timeout_s):
                async with http.stream("POST", f"{self.cfg.base}/{route}", json=body) as response:
                    if response.status_code != 200:
                        self._refused(response, await read_error(response))
                    content = await read_body(response, MAX_BODY_BYTES)
                said = response.headers.get("content-type", "")
                reply = await reply_of(content, said, time.monotonic() - start_s, of_prompt=self.cfg.completions)
        except (TimeoutError, httpx2.TimeoutException) as e:
            raise _Passing("timeout", f"{type(e).__name__} after {self.cfg.timeout_s:g} s") from e
        except BadBody as e:
            raise _Passing("garbage", str(e)) from e
        except (_Passing, ChatTooLong, RolljaxError):
            raise
        except Exception as e:  # border: any error of the HTTP library
            raise _Passing("connection", f"{type(e).__name__}: {e}") from e
        self._counts["answers"] += 1
        return reply

    def _connections(self) -> tuple[httpx2.AsyncClient, asyncio.Semaphore]:
        if self._open is None:
            # every request has its own connection: bytes after one answer never become the answer to the next
            limits = httpx2.Limits(max_connections=self.cfg.concurrency, max_keepalive_connections=0)
            http = httpx2.AsyncClient(headers=self._headers, timeout=self.cfg.timeout_s, limits=limits)
            self._open = http, asyncio.Semaphore(self.cfg.concurrency)
        return self._open

    def _refused(self, response: httpx2.Response, text: str) -> NoReturn:
        """Raise the error for a status other than 200. text: beginning of the body."""
        status = response.status_code
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


def _headers(key: str) -> dict[str, str]:
    return ACCEPTED | ({"Authorization": f"Bearer {key}"} if key else {})


class _Passing(Exception):
    """A fault after which the request may be repeated. kind: name of its count. wait_s: wait that the server
    requests."""

    def __init__(self, kind: str, detail: str, wait_s: float = 0.0) -> None:
        self.kind, self.detail, self.wait_s = kind, detail, wait_s
        super().__init__(detail)


def _retry_after(response: httpx2.Response) -> float:
    try:
        return max(0.0, float(response.headers.get("retry-after", 0)))
    except ValueError:  # a date
        return 0.0


def the_only_model(cfg: EndpointConfig, key: str = "") -> EndpointConfig:
    """Return the settings with the name of the model that the server lists, if none is given.

    Raises:
      ConfigError: it cannot be reached, or lists another number of models.
    """
    if cfg.model:
        return cfg
    try:
        with concurrent.futures.ThreadPoolExecutor(1) as apart:  # the caller may be in an event loop
            names = apart.submit(asyncio.run, _models(cfg, key)).result()
    except Exception as e:  # border: any response, even of something that is not an HTTP server
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


async def _models(cfg: EndpointConfig, key: str) -> list[str]:
    """Return the names of the models that a server lists."""
    timeout_s = min(cfg.timeout_s, MODELS_S)
    async with asyncio.timeout(timeout_s), httpx2.AsyncClient(headers=_headers(key), timeout=timeout_s) as http:
        async with http.stream("GET", f"{cfg.base}/models") as response:
            if response.status_code != 200:
                raise BadBody(f"status {response.status_code}: {await read_error(response)}")
            body = await read_body(response, MAX_BODY_BYTES)
        return [str(entry["id"]) for entry in read_object(body, response.headers.get("content-type", ""))["data"]]
