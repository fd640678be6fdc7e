"""Serve environments over HTTP as ROCK serves GEM's: `python -m rolljax.envs.adapters.gem_server frozen_lake 'rg:*'`.

    POST /apis/v1/envs/gem/make   {env_id}             -> {sandbox_id}
    POST /apis/v1/envs/gem/reset  {sandbox_id, seed}   -> {observation, info}
    POST /apis/v1/envs/gem/step   {sandbox_id, action} -> {observation, reward, terminated, truncated, info}
    POST /apis/v1/envs/gem/close  {sandbox_id}         -> {sandbox_id}

An `env_id` is a reference of the catalog. A seed is the index of a task. `info` says what the five values cannot:
`messages`, `success`, `reward_parts`, `metrics`. With `--shells`, rocklet's verbs for sandboxes are served as well
(`rolljax.envs.adapters.shells`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rolljax.envs.adapters.serving import (
    MAX_BODY_BYTES,
    BearerAuth,
    EnvSession,
    EnvSessions,
    Full,
    SessionLimits,
    message_list,
    metadata,
    parser,
    run,
    whole_text,
)
from rolljax.errors import ConfigError, EnvError, InfraError, RolljaxError

PATH = "/apis/v1/envs/gem/"
Body = dict[str, Any]
Verb = Callable[[Body], Awaitable[Body]]


def make_app(offered: Sequence[str], limits: SessionLimits, shells: bool = False) -> Any:
    """Return the ASGI application that serves the environments `offered`: references, or patterns like `rg:*`."""
    server = _GemServer(EnvSessions(offered, limits))
    verbs: dict[str, Verb] = {
        PATH + "make": server.make,
        PATH + "reset": server.reset,
        PATH + "step": server.step,
        PATH + "close": server.close,
    }
    boxes = None
    if shells:
        from rolljax.envs.adapters.shells import Shells

        boxes = Shells(limits.sessions)
        verbs |= boxes.verbs()
    routes = [Route(path, _endpoint(verb), methods=["POST"]) for path, verb in verbs.items()]
    routes.append(Route("/health", _health))

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        reaper = asyncio.ensure_future(server.sessions.reap())
        yield
        reaper.cancel()
        server.sessions.shutdown()
        if boxes is not None:
            await asyncio.to_thread(boxes.stop)

    return BearerAuth(Starlette(routes=routes, lifespan=lifespan), limits.token)


class _GemServer:
    def __init__(self, sessions: EnvSessions) -> None:
        self.sessions = sessions

    async def make(self, body: Body) -> Body:
        session = await self.sessions.open(text_of(body, "env_id"))
        return {"sandbox_id": session.id}

    async def reset(self, body: Body) -> Body:
        session, seed = self._session(body), body.get("seed")
        if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool)):
            raise ConfigError("is no whole number", setting="seed", value=seed)
        messages = await session.reset(seed)
        info = {"messages": message_list(messages), **metadata(session, None)}
        return {"observation": whole_text(messages), "info": info}

    async def step(self, body: Body) -> Body:
        session = self._session(body)
        result = await session.step(text_of(body, "action"))
        return {
            "observation": whole_text(result.messages),
            "reward": result.reward,
            "terminated": result.terminated,
            "truncated": result.truncated,
            "info": {"messages": message_list(result.messages), **metadata(session, result)},
        }

    async def close(self, body: Body) -> Body:
        session = self._session(body)
        await self.sessions.close(session)
        return {"sandbox_id": session.id}

    def _session(self, body: Body) -> EnvSession:
        name = text_of(body, "sandbox_id")
        if name not in self.sessions.open_ones:
            raise ConfigError("is not open (it may have been idle for too long)", setting="sandbox_id", value=name[:64])
        return self.sessions.open_ones[name]


def text_of(body: Body, key: str) -> str:
    """Return a required text of a request."""
    value = body.get(key)
    if not isinstance(value, str):
        raise ConfigError("is missing, or no text", setting=key)
    return value


async def _health(_: Request) -> Response:
    return JSONResponse({"status": "healthy"})


def _endpoint(verb: Verb) -> Callable[[Request], Awaitable[Response]]:
    """Wrap a verb in JSON. Errors are one sentence, never a traceback."""

    async def endpoint(request: Request) -> Response:
        try:
            body = await _body(request)
            return JSONResponse(await verb(body))
        except RolljaxError as e:
            status = _status(e)
            return JSONResponse({"detail": str(e), "owner": e.owner}, status)

    return endpoint


def _status(error: RolljaxError) -> int:
    """Map an error to a status. 400: the request is wrong. 409: it does not fit the episode's state, or the
    environment failed. 429: no session is free. 503: the machine failed; try again."""
    if isinstance(error, Full):
        return 429
    if isinstance(error, InfraError):
        return 503
    return 409 if isinstance(error, EnvError) else 400


async def _body(request: Request) -> Body:
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > MAX_BODY_BYTES:
            raise ConfigError(f"is longer than {MAX_BODY_BYTES} bytes", setting="body")
    try:
        body = json.loads(bytes(data))
    except (ValueError, RecursionError) as e:
        raise ConfigError("is no JSON", setting="body") from e
    if not isinstance(body, dict):
        raise ConfigError("is no JSON object", setting="body")
    return body


def main(argv: list[str] | None = None) -> int:
    """Serve environments by GEM's protocol until the process is ended; returns the exit code."""
    arguments = parser("rolljax.envs.adapters.gem_server", "Serve environments over HTTP, as ROCK serves GEM's.")
    arguments.add_argument("envs", nargs="+", help="references of environments, or patterns of them like 'rg:*'")
    arguments.add_argument("--shells", action="store_true", help="serve sandboxes too, by rocklet's verbs")
    args = arguments.parse_args(argv)
    return run(args, lambda limits: make_app(args.envs, limits, args.shells))


if __name__ == "__main__":
    sys.exit(main())
