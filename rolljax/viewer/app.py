"""The server: addresses, and access control. Everything it sends is made of files of the package or is JSON."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, urlencode

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rolljax.serving.http_server import Bounds
from rolljax.serving.http_server import make_server as make_http_server
from rolljax.viewer import answers
from rolljax.viewer.export import page_of
from rolljax.viewer.filters import BadFilter, Filter
from rolljax.viewer.runs import NotThere, Runs

ASSETS = Path(__file__).parent / "assets"
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
"""Nothing but the package's own files runs, and no text can become markup."""
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
COOKIE = "rolljax_view"
LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")
"""Host names of loopback addresses in browsers. Without a token, requests with another host name are rejected, such as
those of a foreign page whose name resolves to this machine."""
LOOK_S = 0.5
"""Seconds between two checks of the files of runs while a page is open."""
ALIVE_S = 15.0
CLOSING_S = 3
"""Seconds that open connections get at the end; every open page has one."""
HEAD_S, KEEP_ALIVE_S = 10.0, 5.0
"""Seconds for the head of a request to arrive, and that a connection stays open without a request."""
CONNECTIONS, BODY_BYTES = 256, 4096
"""Connections at the same time, beyond which those without a whole request are closed; bytes of a request's body."""


def make_server(runs: Runs, token: str | None, head_s: float = HEAD_S) -> uvicorn.Server:
    """Return the viewer as a server that has no socket yet; it logs errors only.

    Args:
      token: secret that a browser must send once, as `?token=`; None: everyone with access to a loopback address.
      head_s: seconds for the request line and headers of a request to arrive.
    """
    app = make_app(runs, token, lambda: server.should_exit)
    bounds = Bounds(connections=CONNECTIONS, head_s=head_s, body_bytes=BODY_BYTES)
    server = make_http_server(app, bounds, _refused, keep_alive_s=KEEP_ALIVE_S, closing_s=CLOSING_S)
    return server


def make_app(runs: Runs, token: str | None, closing: Callable[[], bool]) -> ASGIApp:
    """Return the viewer as an ASGI application.

    Args:
      closing: whether the server is shutting down; open pages then receive no more events.
    """
    served = Served(runs, closing)
    api = [
        Route("/api/runs", served.answer(lambda r: answers.run_list(runs))),
        Route("/api/runs/{run}/rows", served.answer(served.rows)),
        Route("/api/runs/{run}/config", served.answer(lambda r: served.run(r).config)),
        Route("/api/runs/{run}/heldout", served.answer(lambda r: answers.heldout(served.run(r)))),
        Route("/api/runs/{run}/search", served.answer(served.search)),
        Route("/api/runs/{run}/steps/{step}", served.answer(served.step)),
        Route("/api/runs/{run}/steps/{where}/{line}", served.answer(served.trajectory)),
    ]
    others = [
        Route("/", asset("index.html")),
        Route("/assets/{name}", asset()),
        Route("/api/events", served.events),
        Route("/export/{run}/{where}", served.export),
        Route("/export/{run}/{where}/{line}", served.export),
    ]
    handlers: Any = {NotThere: _refusal(404), BadFilter: _refusal(400)}
    site = Starlette(routes=[*api, *others], exception_handlers=handlers)
    site.router.redirect_slashes = False  # no address is made of what a request says
    return Guard(site, token)


class Served:
    """The endpoints about `runs`."""

    def __init__(self, runs: Runs, closing: Callable[[], bool]) -> None:
        self._runs, self._closing = runs, closing

    def answer(self, of: Callable[[Request], Any]) -> Callable[[Request], Any]:
        """Return an endpoint that computes a JSON answer in a thread."""

        async def endpoint(request: Request) -> Response:
            return Response(await run_in_threadpool(lambda: dump(of(request))), media_type="application/json")

        return endpoint

    def run(self, request: Request) -> Any:
        return self._runs.find(request.path_params["run"])

    def rows(self, request: Request) -> Any:
        query = request.query_params
        return answers.rows(self.run(request), _whole(query.get("after", "0")), query.get("generation", ""))

    def search(self, request: Request) -> Any:
        query, newest = request.query_params, request.query_params.get("from")
        wanted = Filter.parse(query.get("q", ""))
        return answers.search(self.run(request), wanted, None if newest is None else _whole(newest))

    def step(self, request: Request) -> Any:
        wanted = Filter.parse(request.query_params.get("q", ""))
        return answers.step(self.run(request), _whole(request.path_params["step"]), wanted)

    def trajectory(self, request: Request) -> Any:
        place = request.path_params
        return answers.trajectory(self.run(request), where(place["where"]), _whole(place["line"]))

    async def export(self, request: Request) -> Response:
        """Return a self-contained page with a step or a trajectory, as a download."""
        place = request.path_params
        step, line = where(place["where"]), _whole(place["line"]) if "line" in place else None
        page = await run_in_threadpool(lambda: page_of(self.run(request), step, line))
        name = "-".join(str(part) for part in (place["run"], step, line) if part is not None)
        safe = "".join(c if c.isascii() and (c.isalnum() or c in "-_.") else "_" for c in name)
        headers = {"Content-Disposition": f'attachment; filename="{safe}.html"'}
        return Response(page, media_type="text/html", headers=headers)

    async def events(self, request: Request) -> Response:
        """Stream server-sent events: the names of runs whenever they change."""
        return StreamingResponse(self._events(), media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})

    async def _events(self) -> AsyncIterator[str]:
        seen = await run_in_threadpool(self._stamps)
        silent_s = 0.0
        yield ": here\n\n"
        while not self._closing():
            await asyncio.sleep(LOOK_S)
            now = await run_in_threadpool(self._stamps)
            changed = [name for name, stamp in now.items() if seen.get(name) != stamp]
            seen, silent_s = now, silent_s + LOOK_S
            if changed or silent_s >= ALIVE_S:
                silent_s = 0.0
                yield f"data: {dump(changed).decode()}\n\n" if changed else ": still here\n\n"

    def _stamps(self) -> dict[str, list[float | int]]:
        return {run.name: run.stamp for run in self._runs.all()}


class Guard:
    """Runs before every endpoint: checks access, and sets the headers that restrict a page to its own files."""

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self._app, self._token = app, token
        # of this token: cookies do not tell ports apart, and there may be another viewer. A token may hold any
        # character, a cookie may not
        self._cookie, self._key = f"{COOKIE}_{_digest('name', token)[:8]}", _digest("key", token)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = {name.lower() for name, _ in message["headers"]}
                more = [(k.lower().encode(), v.encode()) for k, v in HEADERS.items()]
                message["headers"] = [*message["headers"], *(kv for kv in more if kv[0] not in own)]
            await send(message)

        answer = self._refusal(Request(scope)) or self._app
        await answer(scope, receive, with_headers)

    def _refusal(self, request: Request) -> Response | None:
        if request.method not in ("GET", "HEAD"):
            return PlainTextResponse("this server only shows", 405)
        if self._token is None:
            host = request.headers.get("host", "")
            name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
            return None if name in LOCAL_NAMES else PlainTextResponse("ask for it as 127.0.0.1 or localhost", 421)
        return self._door(request)

    def _door(self, request: Request) -> Response | None:
        """Admit requests with the token: in a cookie, as a bearer, or once in the address, which then sets the cookie
        and redirects to the address without it."""
        assert self._token is not None
        # not of `request.url`, which is made of the header Host and may be no URL
        query = parse_qs(request.scope["query_string"].decode("latin-1"), keep_blank_values=True)
        if _same(query.get("token", [""])[-1], self._token):
            rest = urlencode({k: v for k, v in query.items() if k != "token"}, doseq=True)
            # a path that begins with two slashes would name another host
            here = "/" + quote(request.scope["path"].lstrip("/"), safe="/:")
            answer = Response(status_code=303, headers={"Location": here + (f"?{rest}" if rest else "")})
            answer.set_cookie(self._cookie, self._key, httponly=True, samesite="strict")
            return answer
        kind, _, bearer = request.headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer":
            is_known = _same(bearer.strip(), self._token)
        else:
            is_known = _same(request.cookies.get(self._cookie, ""), self._key)
        if is_known:
            return None
        return PlainTextResponse("open the address that the viewer printed, with its ?token=", 401)


def asset(name: str = "") -> Callable[[Request], Any]:
    """Return an endpoint that serves a file of the package.

    Args:
      name: of the file; default: the last part of the address.
    """

    async def endpoint(request: Request) -> Response:
        path = {file.name: file for file in ASSETS.iterdir()}.get(name or request.path_params["name"])
        if path is None or path.suffix not in TYPES:
            return PlainTextResponse("no such file", 404)
        return Response(path.read_bytes(), media_type=f"{TYPES[path.suffix]}; charset=utf-8")

    return endpoint


def dump(value: Any) -> bytes:
    """Serialize a value as JSON for browsers: plain ASCII, and None for numbers that are not finite."""
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
    except ValueError:
        return json.dumps(answers.finite(value), allow_nan=False, separators=(",", ":")).encode()


def where(text: str) -> int | str:
    """Parse a step, or the name of a held-out evaluation (`heldout:start`)."""
    if text.startswith("heldout:"):
        return text.removeprefix("heldout:")
    return _whole(text)


def _whole(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 12:
        raise NotThere(f"{text!r} is no number")
    return int(text)


def _refusal(status: int) -> Callable[[Request, Exception], Response]:
    return lambda request, error: Response(dump({"error": str(error)}), status, media_type="application/json")


def _refused(status: int, message: str) -> bytes:
    return dump({"error": message})


def _digest(of: str, token: str | None) -> str:
    return hashlib.sha256(f"{of} {token or ''}".encode()).hexdigest()


def _same(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode(), token.encode())
