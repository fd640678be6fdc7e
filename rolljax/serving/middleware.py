"""Wraps the server's endpoints: keys, counting, hang-ups, and errors in the shape of each API."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import time
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, ExceptionHandler, Message, Receive, Scope, Send

from rolljax.serving.apis import APIS
from rolljax.serving.generation import Generation, Json, dump
from rolljax.serving.messages import COUNT_PATH, error_json
from rolljax.serving.messages import PATH as MESSAGES_PATH
from rolljax.serving.schema import ApiError

if TYPE_CHECKING:
    from rolljax.serving.server import Service

T = TypeVar("T")
GENERATING = tuple(api.path for api in APIS)
OPEN_TO_ALL = ("/health", "/ready")
PATHS = (*GENERATING, COUNT_PATH, "/v1/models", *OPEN_TO_ALL, "/metrics")


class HungUp(Exception):
    """The client has left."""


class AccessMiddleware:
    """Runs before every endpoint: checks keys, draining and the limit of open requests, and counts requests.

    Args:
      app: answers the admitted requests. service: provides keys, sessions, limits and metrics.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        service, path = self._service, scope["path"]
        started_s, status = time.perf_counter(), [499]

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                status[0] = message["status"]
            await send(message)

        generating = path in GENERATING and scope["method"] == "POST"
        refusal = self._refusal(scope, path, generating)
        try:
            if refusal is not None:
                await error_response(refusal, path)(scope, receive, counted)
            else:
                await self._app(scope, receive, counted)
        finally:
            service.open -= scope.get("rolljax_admitted", False)
            service.metrics.requests.labels(path if path in PATHS else "other", str(status[0])).inc()
            if generating:
                service.metrics.seconds.observe(time.perf_counter() - started_s)

    def _refusal(self, scope: Scope, path: str, generating: bool) -> ApiError | None:
        if path not in OPEN_TO_ALL and (refusal := self._let_in(scope)):
            return refusal
        return self._service.full() if generating else None

    def _let_in(self, scope: Scope) -> ApiError | None:
        """Look at the key, and put the session that it opens into the scope."""
        keys, sessions = self._service.limits.keys, self._service.sessions
        if not keys and sessions is None:
            return None
        headers = dict(scope["headers"])
        kind, _, credentials = headers.get(b"authorization", b"").partition(b" ")
        key = credentials.strip() if kind.lower() == b"bearer" else headers.get(b"x-api-key", b"")
        fits = [hmac.compare_digest(key, k.encode()) for k in keys]
        if any(fits):
            return None
        try:
            session = None if sessions is None else sessions.find(key.decode("latin-1"))
        except ApiError as e:
            return e
        if session is not None:
            scope["rolljax_session"] = session
            return None
        message = "no valid key: send the header 'Authorization: Bearer KEY' with a key the server was started with"
        return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


class EventStream(Response):
    """The server-sent events of a generation."""

    def __init__(self, generation: Generation) -> None:
        super().__init__(
            media_type="text/event-stream", headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        )
        del self.headers["content-length"]
        self._generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def write() -> None:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for events in self._generation.events():
                await send({"type": "http.response.body", "body": events, "more_body": True})
            await send({"type": "http.response.body", "body": b""})

        try:
            with contextlib.suppress(HungUp):
                await until_hangup(receive, write())
        finally:
            self._generation.close()


async def until_hangup(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`; cancel it when the client hangs up (`HungUp`). The body must have been read."""

    async def hangup() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks = working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(hangup())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise HungUp
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.wait(tasks)


def json_response(value: Json, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return a value as a JSON response."""
    return Response(dump(value), status, headers, media_type="application/json")


def error_response(error: ApiError, path: str) -> Response:
    """Return an error in the form of the path's API: Anthropic's, or OpenAI's."""
    form = error_json(error) if path in (MESSAGES_PATH, COUNT_PATH) else error.json()
    return json_response(form, error.status, error.headers)


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error, request.url.path)


async def _http_error(request: Request, error: Exception) -> Response:
    """Answer unknown routes and methods with an error."""
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path}"
    message = {404: f"{what}: no such route; there are {', '.join(PATHS)}", 405: f"{what}: use another method"}
    refusal = ApiError(error.status_code, message.get(error.status_code, error.detail), headers=error.headers)
    return error_response(refusal, request.url.path)


async def _gone(_: Request, __: Exception) -> Response:
    return Response(status_code=499)  # which no client reads: it is for the metrics


async def _internal_error(request: Request, error: Exception) -> Response:
    failure = ApiError(500, f"the server failed: {type(error).__name__}", code="internal_error")
    return error_response(failure, request.url.path)


EXCEPTION_HANDLERS: dict[Any, ExceptionHandler] = {
    ApiError: _api_error,
    HTTPException: _http_error,
    HungUp: _gone,
    ClientDisconnect: _gone,
    Exception: _internal_error,
}
