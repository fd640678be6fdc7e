"""An OpenAI-compatible HTTP server over the in-process sampler, as an ASGI application.

    bytes -> openai_types (fields) -> openai_read (Job) -> openai_answer (Sampler.submit) -> openai_text -> JSON or SSE

Every request is watched while it is answered: when its client hangs up, its work in the sampler is aborted.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import hmac
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rolljax.sampler.client import Sampler
from rolljax.sampler.openai_answer import Json, Run, dump
from rolljax.sampler.openai_read import read_chat, read_completion
from rolljax.sampler.openai_session import Session, Sessions
from rolljax.sampler.openai_types import ApiError, Job, Served, parse_json
from rolljax.sampler.server_metrics import ServerMetrics

T = TypeVar("T")
LARGE_BODY = 32 * 1024
"""Bytes from which a body is parsed and tokenised beside the event loop."""
GENERATING = ("/v1/completions", "/v1/chat/completions")
PATHS = (*GENERATING, "/v1/models", "/health", "/metrics")


@dataclasses.dataclass(frozen=True)
class Limits:
    """keys: bearer tokens that open the server (none: it is open). concurrency: requests answered at the same time."""

    keys: tuple[str, ...] = ()
    concurrency: int = 1024
    body_bytes: int = 8 * 2**20


class HungUp(Exception):
    """The client has left."""


class Service:
    """The server's state, and its endpoints. `app` is the ASGI application.

    sessions: with them, the key of an open session lets its program in, and its calls are recorded; without another key
    in `limits` nobody else is let in.
    """

    def __init__(self, sampler: Sampler, served: Served, limits: Limits, sessions: Sessions | None = None) -> None:
        self.sampler, self.served, self.limits, self.sessions = sampler, served, limits, sessions
        self.metrics = ServerMetrics(sampler)
        self.metrics.open.set_function(lambda: self.open)
        self.draining = False
        self.open = 0
        """Requests for tokens that are being answered."""
        self.runs: set[Run] = set()
        self._created = int(time.time())
        self._reader = concurrent.futures.ThreadPoolExecutor(1, "rolljax-serve-reader")
        self.app: ASGIApp = Gate(
            Starlette(
                routes=[
                    Route("/v1/completions", self.completions, methods=["POST"]),
                    Route("/v1/chat/completions", self.chat, methods=["POST"]),
                    Route("/v1/models", self.models),
                    Route("/v1/models/{name:path}", self.one_model),
                    Route("/health", self.health),
                    Route("/metrics", self.show_metrics),
                ],
                exception_handlers={
                    ApiError: _api_error,
                    HTTPException: _http_error,
                    HungUp: _gone,
                    ClientDisconnect: _gone,
                    Exception: _internal_error,
                },
            ),
            self,
        )

    # ---- endpoints

    async def completions(self, request: Request) -> Response:
        return await self._answer(request, chat=False)

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, chat=True)

    async def models(self, _: Request) -> Response:
        return _json({"object": "list", "data": [self._model()]})

    async def one_model(self, request: Request) -> Response:
        if request.path_params["name"] != self.served.name:
            message = f"the model is {self.served.name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return _json(self._model())

    async def health(self, _: Request) -> Response:
        reason = self.unavailable()
        if reason:
            return _json({"status": "unavailable", "reason": reason}, 503)
        return _json({"status": "ok", "policy_version": self.sampler.version})

    async def show_metrics(self, _: Request) -> Response:
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    def unavailable(self) -> str:
        """Why no request can be taken now; empty when one can."""
        if self.draining:
            return "the server is shutting down"
        return f"the sampler has stopped: {self.sampler.error}" if self.sampler.error else ""

    def _model(self) -> Json:
        return {
            "id": self.served.name,
            "object": "model",
            "created": self._created,
            "owned_by": "rolljax",
            "max_model_len": self.served.max_context,
        }

    # ---- one request for tokens

    async def _answer(self, request: Request, *, chat: bool) -> Response:
        started_s = time.perf_counter()
        session: Session | None = request.scope.get("rolljax_session")
        body = await self._body(request)
        if len(body) < LARGE_BODY:
            job = self._read(body, chat, session)
        else:
            job = await asyncio.get_running_loop().run_in_executor(self._reader, self._read, body, chat, session)
        run = Run(self, job if session is None else session.begin(job), started_s)
        if job.stream:
            return EventStream(run)
        try:
            return _json(await until_hangup(request.receive, run.whole()))
        finally:
            run.close()

    def _read(self, body: bytes, chat: bool, session: Session | None) -> Job:
        raw = parse_json(body)
        if session is not None:
            return session.read(raw, chat, self.served)
        return read_chat(raw, self.served) if chat else read_completion(raw, self.served)

    async def _body(self, request: Request) -> bytes:
        """The body of a JSON request, unless it is too large."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            message = f"content-type: must be application/json, got {kind or 'none'}"
            raise ApiError(415, message, param="content-type")
        if request.headers.get("content-encoding", "identity").lower() != "identity":
            raise ApiError(415, "content-encoding: bodies must not be compressed", param="content-encoding")
        body, limit = bytearray(), self.limits.body_bytes
        async for part in request.stream():
            body += part
            if len(body) > limit:
                message = f"the body is larger than {limit / 2**20:g} MiB; send less, or raise --max_body_mib"
                raise ApiError(413, message)
        return bytes(body)

    # ---- the end

    def end(self, session: Session) -> None:
        """Take no more calls of a session, and give up those that are running."""
        assert self.sessions is not None
        self.sessions.end(session)
        for run in list(self.runs):
            if run.job.call is not None and run.job.call.session is session:
                run.abort()

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests, wait for those that are open, abort what is left after `timeout_s`."""
        self.draining = True
        deadline_s = time.monotonic() + timeout_s
        while self.open and time.monotonic() < deadline_s:
            await asyncio.sleep(0.02)
        for run in list(self.runs):
            run.abort()

    def close(self) -> None:
        self._reader.shutdown()


class Gate:
    """Before every endpoint: keys, draining, the limit of open requests, and the counting of all of it."""

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
        service.open += generating
        try:
            if refusal is not None:
                await _error(refusal)(scope, receive, counted)
            else:
                await self._app(scope, receive, counted)
        finally:
            service.open -= generating
            service.metrics.requests.labels(path if path in PATHS else "other", str(status[0])).inc()
            if generating:
                service.metrics.seconds.observe(time.perf_counter() - started_s)

    def _refusal(self, scope: Scope, path: str, generating: bool) -> ApiError | None:
        service, limits = self._service, self._service.limits
        if path != "/health" and (refusal := self._let_in(scope)):
            return refusal
        if generating and (reason := service.unavailable()):
            return ApiError(503, reason, code="unavailable", headers={"Retry-After": "5"})
        if generating and service.open >= limits.concurrency:
            message = f"{service.open} requests are open, which is the most at a time; try again (--max_concurrency)"
            return ApiError(429, message, code="too_many_requests", headers={"Retry-After": "1"})
        return None

    def _let_in(self, scope: Scope) -> ApiError | None:
        """Look at the key, and put the session that it opens into the scope."""
        keys, sessions = self._service.limits.keys, self._service.sessions
        if not keys and sessions is None:
            return None
        kind, _, given = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
        key = given.strip() if kind.lower() == b"bearer" else b""
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
    """Server-sent events of a run."""

    def __init__(self, run: Run) -> None:
        super().__init__(
            media_type="text/event-stream", headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        )
        del self.headers["content-length"]
        self._run = run

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def write() -> None:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for events in self._run.events():
                await send({"type": "http.response.body", "body": events, "more_body": True})
            await send({"type": "http.response.body", "body": b""})

        try:
            with contextlib.suppress(HungUp):
                await until_hangup(receive, write())
        finally:
            self._run.close()


async def until_hangup(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client hangs up (`HungUp`). The body must have been read."""

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


def _json(value: Json, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(dump(value), status, headers, media_type="application/json")


def _error(error: ApiError) -> Response:
    return _json(error.json(), error.status, error.headers)


async def _api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _error(error)


async def _http_error(request: Request, error: Exception) -> Response:
    """Unknown routes and methods, in OpenAI's shape."""
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path}"
    message = {404: f"{what}: no such route; there are {', '.join(PATHS)}", 405: f"{what}: use another method"}
    return _error(ApiError(error.status_code, message.get(error.status_code, error.detail), headers=error.headers))


async def _gone(_: Request, __: Exception) -> Response:
    return Response(status_code=499)  # which nobody reads: it is for the metrics


async def _internal_error(_: Request, error: Exception) -> Response:
    return _error(ApiError(500, f"the server failed: {type(error).__name__}", code="internal_error"))
