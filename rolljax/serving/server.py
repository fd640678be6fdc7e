"""An HTTP server over the in-process sampler, which speaks OpenAI's and Anthropic's APIs, as an ASGI application.

    http_server (connections) -> middleware (keys, counts) -> server -> reader of an API (Job)
        -> generation (Sampler) -> encoder of the API -> JSON or server-sent events

Every request is watched while it is answered: when its client hangs up, its work in the sampler is aborted.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import functools
import time
from collections.abc import AsyncIterator, Callable

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Scope

from rolljax.sampler.client import SamplerClient
from rolljax.serving.apis import APIS, CHAT, COMPLETIONS, Api
from rolljax.serving.generation import Generation, Json, dump
from rolljax.serving.http_server import Bounds, make_server
from rolljax.serving.messages import COUNT_PATH, read_count
from rolljax.serving.metrics import ServerMetrics
from rolljax.serving.middleware import EXCEPTION_HANDLERS, AccessMiddleware, EventStream, json_response, until_hangup
from rolljax.serving.requests import Reader, conversation_ids
from rolljax.serving.schema import ApiError, Job, ServedModel, parse_json, short
from rolljax.serving.session import Session, Sessions

SMALL_BODY, LARGE_BODY = 4 * 1024, 128 * 1024
"""Largest body that is parsed and tokenised on the event loop; larger ones go to a thread."""
WARM_UP_ROUNDS = 8
"""Rounds of requests of the server's own before it is ready."""
HELD_BODIES = 8
"""Bodies of full size whose bytes may be held before they are tokenised."""


@dataclasses.dataclass(frozen=True)
class ServerLimits:
    """Limits and keys of a server."""

    keys: tuple[str, ...] = ()
    """Bearer tokens that open it (none: it is open)."""
    concurrency: int = 1024
    """Requests answered at the same time."""
    body_bytes: int = 8 * 2**20
    """Maximum number of bytes in the body of one request."""
    body_s: float = 30.0
    """Maximum time in seconds for the body of a request to arrive."""
    head_s: float = 10.0
    """Maximum time in seconds for the head of a request to arrive."""

    @property
    def bounds(self) -> Bounds:
        """Limits of connections; idle ones are closed first."""
        return Bounds(2 * self.concurrency, self.head_s, self.body_bytes)

    @property
    def held_bytes(self) -> int:
        """Bytes of all large bodies that are not tokenised yet, beyond `LARGE_BODY` of each."""
        return HELD_BODIES * self.body_bytes


class Service:
    """The server's state, and its endpoints. `app` is the ASGI application.

    sessions: with them, the key of an open session lets its program in, and its calls are recorded; without another key
    in `limits` all other clients are refused.
    """

    def __init__(
        self, sampler: SamplerClient, served: ServedModel, limits: ServerLimits, sessions: Sessions | None = None
    ) -> None:
        self.sampler, self.served, self.limits, self.sessions = sampler, served, limits, sessions
        self.metrics = ServerMetrics(sampler)
        self.metrics.open.set_function(lambda: self.open)
        self.draining = False
        self.compiled: tuple[int, int] | None = None
        """While the server warms up: programs that are compiled, and all of them."""
        self.open = 0
        """Requests for tokens that have arrived completely and are being answered."""
        self.generations: set[Generation] = set()
        self._held_bytes = 0
        self._created = int(time.time())
        self._reader, self._large_reader = (
            concurrent.futures.ThreadPoolExecutor(1, f"rolljax-serve-{name}") for name in ("reader", "large-reader")
        )
        self.app: ASGIApp = AccessMiddleware(
            Starlette(
                routes=[
                    *(Route(a.path, functools.partial(self._answer, api=a), methods=["POST"]) for a in APIS),
                    Route(COUNT_PATH, self.count_tokens, methods=["POST"]),
                    Route("/v1/models", self.models),
                    Route("/v1/models/{name:path}", self.one_model),
                    Route("/session", self.session),
                    Route("/health", self.health),
                    Route("/ready", self.ready),
                    Route("/metrics", self.show_metrics),
                ],
                exception_handlers=EXCEPTION_HANDLERS,
            ),
            self,
        )

    def make_server(self, *, keep_alive_s: float, closing_s: int) -> uvicorn.Server:
        """Return an HTTP server of it that has no socket yet; see `http_server.make_server`."""

        def refusal(status: int, message: str) -> bytes:
            return dump(ApiError(status, message).json())

        return make_server(self.app, self.limits.bounds, refusal, keep_alive_s=keep_alive_s, closing_s=closing_s)

    # ---- endpoints

    async def count_tokens(self, request: Request) -> Response:
        async with self._received(request) as body:
            job = await self._read(body, read_count, request.scope.get("rolljax_session"))
        return json_response({"input_tokens": len(job.prompts[0].ids)})

    async def models(self, _: Request) -> Response:
        return json_response({"object": "list", "data": [self._model()]})

    async def one_model(self, request: Request) -> Response:
        if request.path_params["name"] != self.served.name:
            message = f"the model is {self.served.name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return json_response(self._model())

    async def session(self, request: Request) -> Response:
        """Tell how long the sampler has worked for the session of the key."""
        session: Session | None = request.scope.get("rolljax_session")
        if session is None:
            raise ApiError(404, "this server has no sessions: it is not that of a run's agent programs")
        return json_response({"busy_s": session.busy_s()})

    async def health(self, _: Request) -> Response:
        reason = self.unavailable()
        if reason:
            return json_response({"status": "unavailable", "reason": reason}, 503)
        return json_response({"status": "ok", "policy_version": self.sampler.version})

    async def show_metrics(self, _: Request) -> Response:
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def ready(self, _: Request) -> Response:
        reason = self.unready()
        if not reason:
            return json_response({"status": "ready", "policy_version": self.sampler.version})
        done, programs = self.compiled or (0, 0)
        return json_response({"status": "unready", "reason": reason, "compiled": done, "programs": programs}, 503)

    def unavailable(self) -> str:
        """Return why the server cannot be used; empty when it can."""
        if self.draining:
            return "the server is shutting down"
        return f"the sampler has stopped: {self.sampler.error}" if self.sampler.error else ""

    def unready(self) -> str:
        """Return why no request can be taken now; empty when one can."""
        if self.compiled is None:
            return self.unavailable()
        done, programs = self.compiled
        return self.unavailable() or f"the server is compiling: {done} of {programs} programs"

    async def warm_up(self, show: Callable[[int, int], None]) -> None:
        """Compile the programs for all requests first; `show` is called with the numbers of done and of all programs.

        Raises:
          SamplerError: the sampler has stopped.
        """

        def done(programs: int, of: int) -> None:
            self.compiled = programs, of
            show(programs, of)

        self.compiled = 0, 0
        await self.sampler.warm_up(done)
        await self._answer_own_requests()
        self.compiled = None

    async def _answer_own_requests(self) -> None:
        """Send warm-up requests to this server, so that the first client's request is answered at full speed."""
        ours: list[tuple[Api, Json]] = [
            (COMPLETIONS, {"prompt": "x"}),
            (CHAT, {"messages": [{"role": "user", "content": "x"}]}),
        ]
        for api, body in ours[: 1 + (self.served.chat is not None)] * WARM_UP_ROUNDS:
            with contextlib.suppress(ApiError):  # a template may refuse it
                job = await self._read(dump(body | {"max_tokens": 9}), api.read, None)
                for stream in (False, True):
                    ours_s = time.perf_counter()
                    generation = Generation(self, dataclasses.replace(job, stream=stream), api.encoder, ours_s)
                    with contextlib.closing(generation):
                        if stream:
                            async for _ in generation.events():
                                pass
                        else:
                            dump(await generation.body())

    def _model(self) -> Json:
        return {
            "id": self.served.name,
            "object": "model",
            "created": self._created,
            "owned_by": "rolljax",
            "max_model_len": self.served.max_context,
        }

    # ---- one request for tokens

    async def _answer(self, request: Request, *, api: Api) -> Response:
        started_s = time.perf_counter()
        session: Session | None = request.scope.get("rolljax_session")
        async with self._received(request) as body:
            self._admit(request.scope)
            job = await self._read(body, api.read, session)
        generation = Generation(self, job if session is None else session.begin(job), api.encoder, started_s)
        if job.stream:
            return EventStream(generation)
        try:
            return json_response(await until_hangup(request.receive, generation.body()))
        finally:
            generation.close()

    def _admit(self, scope: Scope) -> None:
        """Count a complete request as being answered, until the middleware is left.

        Raises:
          ApiError: the limit of open requests is reached, or no more are accepted.
        """
        if refusal := self.full():
            raise refusal
        self.open += 1
        scope["rolljax_admitted"] = True

    def full(self) -> ApiError | None:
        """Return why no further request can be answered."""
        if reason := self.unready():
            return ApiError(503, reason, code="unavailable", headers={"Retry-After": "5"})
        if self.open >= self.limits.concurrency:
            message = f"{self.open} requests are open, which is the most at a time; try again (--max_concurrency)"
            return ApiError(429, message, code="too_many_requests", headers={"Retry-After": "1"})
        return None

    async def _read(self, body: bytes, read_body: Reader, session: Session | None) -> Job:
        def read() -> Job:
            raw = parse_json(body)
            if session is not None:
                return session.read(raw, read_body, self.served)
            return read_body(raw, self.served, conversation_ids)

        if len(body) <= SMALL_BODY:
            return read()
        reader = self._reader if len(body) <= LARGE_BODY else self._large_reader
        return await asyncio.get_running_loop().run_in_executor(reader, read)

    @contextlib.asynccontextmanager
    async def _received(self, request: Request) -> AsyncIterator[bytes]:
        """Read the complete body of a JSON request. While in use, its bytes beyond `LARGE_BODY` count as held."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            message = f"content-type: must be application/json, got {short(kind) if kind else 'none'}"
            raise ApiError(415, message, param="content-type")
        if request.headers.get("content-encoding", "identity").lower() != "identity":
            raise ApiError(415, "content-encoding: bodies must not be compressed", param="content-encoding")
        length = request.headers.get("content-length", "0")
        body, large = bytearray(), 0
        self._check_size(int(length) if length.isdecimal() else 0)
        try:
            try:
                async with asyncio.timeout(self.limits.body_s):
                    async for part in request.stream():
                        body += part
                        large += self._hold(len(body), large)
            except TimeoutError:
                message = f"no whole body within {self.limits.body_s:g} s, but {len(body)} bytes of it (--body_s)"
                raise ApiError(408, message) from None
            yield bytes(body)
        finally:
            self._held_bytes -= large

    def _hold(self, size: int, large: int) -> int:
        """Hold a body that has grown to `size` bytes, of which `large` are counted; return how many more are."""
        if size > self.limits.body_bytes:
            message = (
                f"the body is larger than {self.limits.body_bytes / 2**20:g} MiB; send less, or raise --max_body_mib"
            )
            raise ApiError(413, message)
        more = max(size - LARGE_BODY, 0) - large
        if self._held_bytes + more > self.limits.held_bytes:
            message = "too many large bodies are being received; try again, or send less at a time"
            raise ApiError(429, message, code="too_many_requests", headers={"Retry-After": "1"})
        self._held_bytes += more
        return more

    def _check_size(self, size: int) -> None:
        limit = self.limits.body_bytes
        if size > limit:
            raise ApiError(413, f"the body is larger than {limit / 2**20:g} MiB; send less, or raise --max_body_mib")

    # ---- the end

    def end(self, session: Session) -> None:
        """Accept no more calls of a session, and cancel its running ones."""
        assert self.sessions is not None
        self.sessions.end(session)
        for generation in list(self.generations):
            if generation.job.call is not None and generation.job.call.session is session:
                generation.abort()

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests, wait for open ones, abort the rest after `timeout_s`."""
        self.draining = True
        deadline_s = time.monotonic() + timeout_s
        while self.open and time.monotonic() < deadline_s:
            await asyncio.sleep(0.02)
        for generation in list(self.generations):
            generation.abort()

    def close(self) -> None:
        for reader in (self._reader, self._large_reader):
            reader.shutdown()
