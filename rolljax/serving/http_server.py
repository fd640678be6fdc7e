"""Connections and the requests on them: uvicorn's HTTP/1.1 with deadlines and bounds for what arrives in parts.

A client that opens connections and leaves them, or sends its request byte by byte, occupies a connection for at most
`Bounds.head_s` seconds, and the oldest of these are closed when connections run out. `server.Service` sets a deadline
for reading a body. This module is independent of the service.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, cast

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

HEAD_BYTES = 32 * 1024
"""Limit of a request line and headers together, and of trailers."""
HEAD_FIELDS = 100
URL_BYTES = 8 * 1024
PIPELINED = 16
"""Requests of a connection that wait for the answers before theirs."""
LINGER_S = 2.0
"""Seconds for which the rest of a body is discarded after its request was answered; then the connection ends."""


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Limits of connections."""

    connections: int
    """Maximum number of simultaneous connections; beyond it, idle connections are closed."""
    head_s: float
    """Seconds for a request line and headers to arrive."""
    body_bytes: int
    """Maximum number of bytes in the body of one request."""


def make_server(
    app: ASGIApp, bounds: Bounds, refusal: Callable[[int, str], bytes], *, keep_alive_s: float, closing_s: int
) -> uvicorn.Server:
    """Return an HTTP server that has no socket yet; it logs errors only.

    Args:
      refusal: makes the JSON body of the response to an invalid request, from the status and a message.
      keep_alive_s: seconds that a connection stays open without a request. closing_s: that connections get at the end.
    """
    config = uvicorn.Config(
        app,
        http=cast(Any, functools.partial(Protocol, ConnectionLimiter(bounds), refusal)),
        ws="none",
        lifespan="off",
        log_config=None,  # uvicorn's would close the handlers of others, and with them a notebook's stderr
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=cast(int, keep_alive_s),
        timeout_graceful_shutdown=closing_s,
    )
    return uvicorn.Server(config)


@dataclasses.dataclass(frozen=True)
class Refusal:
    """The reason why a request is malformed, and the status of the answer."""

    status: int
    message: str


class ConnectionLimiter:
    """The connections of a server that have no complete request, the longest waiting first."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.waiting: dict[Protocol, None] = {}

    def enter(self, connection: Protocol) -> None:
        """Take in a connection; where there are too many, the one that has waited longest goes."""
        self.waiting[connection] = None
        if len(connection.connections) > self.bounds.connections:
            next(iter(self.waiting)).transport.abort()

    def wait(self, connection: Protocol) -> None:
        """Register a connection that waits for its next request."""
        self.waiting.pop(connection, None)
        self.waiting[connection] = None

    def leave(self, connection: Protocol) -> None:
        """Remove a connection that has a complete request, or is gone."""
        self.waiting.pop(connection, None)


class Protocol(HttpToolsProtocol):
    """One connection."""

    def __init__(
        self, limiter: ConnectionLimiter, body_of: Callable[[int, str], bytes], *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._limiter, self._body_of = limiter, body_of
        self._part: Literal["none", "head", "body"] = "none"
        """Of the request that is being received."""
        self._part_bytes = self._fields = self._field_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._refusal: Refusal | None = None

    # ---- the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._begin_head()
        self._limiter.enter(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._limiter.leave(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._part == "none":
            self._begin_head()
        self._part_bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._part == "head" and self._part_bytes > HEAD_BYTES:
            self._refuse(_head_too_large())
        elif self._part == "body" and self._part_bytes > 2 * self._limiter.bounds.body_bytes + HEAD_BYTES:
            self.transport.abort()  # the most that chunks of a sensible size add was refused before

    def send_400_response(self, msg: str) -> None:
        self._refuse(self._refusal or Refusal(400, "this is not HTTP/1.1"))

    # ---- the parts of a request, as the parser finds them

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._part == "none":
            self._begin_head()
        self._fields = self._field_bytes = 0

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > URL_BYTES:
            self._stop_parsing(Refusal(414, f"the URL is longer than {URL_BYTES} bytes"))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._fields += 1
        self._field_bytes += len(name) + len(value)
        if self._fields > HEAD_FIELDS or self._field_bytes > HEAD_BYTES:
            self._stop_parsing(_head_too_large())
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= PIPELINED:
            self._stop_parsing(Refusal(429, f"more than {PIPELINED} requests wait on this connection"))
        self._part, self._part_bytes = "body", 0
        self._stop_timer()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._part = "none"
        self._stop_timer()
        self._limiter.leave(self)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing() or not self.cycle.response_complete:
            return
        self._limiter.wait(self)
        if self._part == "body":
            self._start_timer(LINGER_S, self.transport.close)

    # ---- deadlines and refusals

    def _begin_head(self) -> None:
        self._part, self._part_bytes = "head", 0
        self._start_timer(self._limiter.bounds.head_s, self._late)

    def _late(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:  # it may be that nothing is read meanwhile
            self._start_timer(self._limiter.bounds.head_s, self._late)
            return
        if self._part_bytes:
            self._refuse(Refusal(408, f"no whole request within {self._limiter.bounds.head_s:g} s"))
        else:
            self.transport.close()

    def _start_timer(self, seconds: float, call: Any) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(seconds, call)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _stop_parsing(self, error: Refusal) -> None:
        """Leave the parser, which passes it on as an invalid request."""
        self._refusal = error
        raise ValueError(error.message)

    def _refuse(self, error: Refusal) -> None:
        """Answer a malformed request, and end the connection; in the middle of another answer only end it."""
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            body = self._body_of(error.status, error.message)
            head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
            self.transport.write(STATUS_LINE[error.status] + head.encode() + body)
        self.transport.close()


def _head_too_large() -> Refusal:
    return Refusal(431, f"the headers are more than {HEAD_FIELDS}, or larger than {HEAD_BYTES} bytes")
