"""Serve an environment to OpenEnv clients: `python -m rolljax.envs.adapters.openenv_server 'frozen_lake(size=5)'`.

OpenEnv 0.10's wire format: one WebSocket at `/ws` is one session, and JSON messages go to and fro.

    reset {seed, episode_id}  -> observation      the task whose index is the seed; without one, any task
    step  {message}           -> observation
    state                     -> state {episode_id, step_count}
    close

An observation has `observation {message, messages, metadata}`, `reward` (null after a reset), `done` and `metadata`,
which says what OpenEnv has no place for: `truncated`, `success`, `reward_parts`, `metrics`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from rolljax.envs.adapters.border import library
from rolljax.envs.adapters.serving import (
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
from rolljax.envs.base import StepResult
from rolljax.envs.catalog import make_spec
from rolljax.errors import RolljaxError
from rolljax.types import Message

SCHEMA = {
    "action": {
        "title": "TextAction",
        "type": "object",
        "properties": {"message": {"type": "string"}, "metadata": {"type": "object"}},
        "required": ["message"],
    },
    "observation": {
        "title": "TextObservation",
        "type": "object",
        "properties": {
            "message": {"type": "string"},
            "messages": {"type": "array", "items": {"type": "object"}},
            "done": {"type": "boolean"},
            "reward": {"type": ["number", "null"]},
            "metadata": {"type": "object"},
        },
    },
    "state": {
        "title": "State",
        "type": "object",
        "properties": {"episode_id": {"type": ["string", "null"]}, "step_count": {"type": "integer"}},
    },
}


def make_app(ref: str, limits: SessionLimits) -> Any:
    """Return the ASGI application that serves the environment `ref`.

    Raises:
      ConfigError: there is no such environment, or the package `websockets` is missing.
    """
    library("websockets", "websockets")
    make_spec(ref)
    server = _OpenEnvServer(ref, limits)
    routes = [
        Route("/health", server.health),
        Route("/metadata", server.about),
        Route("/schema", server.schema),
        WebSocketRoute("/ws", server.session),
    ]

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        server.sessions.shutdown()

    return BearerAuth(Starlette(routes=routes, lifespan=lifespan), limits.token)


class _OpenEnvServer:
    def __init__(self, ref: str, limits: SessionLimits) -> None:
        self.ref, self.sessions = ref, EnvSessions([ref], limits)

    async def health(self, _: Request) -> Response:
        return JSONResponse({"status": "healthy"})

    async def about(self, _: Request) -> Response:
        return JSONResponse({"name": self.ref, "description": f"{self.ref}, served by rolljax", "version": None})

    async def schema(self, _: Request) -> Response:
        return JSONResponse(SCHEMA)

    async def session(self, socket: WebSocket) -> None:
        """Serve one client from its connection to its end."""
        await socket.accept()
        session: EnvSession | None = None
        try:
            session = await self.sessions.open(self.ref)
            talk = MessageHandler(session)
            while True:
                async with asyncio.timeout(self.sessions.limits.idle_s):
                    text = await socket.receive_text()
                answer = await talk.answer(text)
                if answer is None:
                    break
                await socket.send_text(json.dumps(answer))
        except WebSocketDisconnect:
            pass
        except Full as e:
            sizes = {"active_sessions": len(self.sessions.open_ones), "max_sessions": self.sessions.limits.sessions}
            await _last_word(socket, _error("CAPACITY_REACHED", str(e), **sizes))
        except (RolljaxError, TimeoutError, KeyError) as e:
            why = "nothing was received for too long" if isinstance(e, TimeoutError) else str(e)
            await _last_word(socket, _error("SESSION_ERROR", why))
        finally:
            if session is not None:
                await self.sessions.close(session)
            with contextlib.suppress(RuntimeError, WebSocketDisconnect):
                await socket.close()


async def _last_word(socket: WebSocket, answer: dict[str, Any]) -> None:
    with contextlib.suppress(RuntimeError, WebSocketDisconnect):
        await socket.send_text(json.dumps(answer))


class MessageHandler:
    """Answers messages of one session."""

    def __init__(self, session: EnvSession) -> None:
        self._session = session
        self._episode_id: str | None = None

    async def answer(self, text: str) -> dict[str, Any] | None:
        """Return the answer to a message; None: the client closes the session."""
        try:
            message = json.loads(text)
        except (ValueError, RecursionError):
            return _error("INVALID_JSON", "Invalid JSON")
        if not isinstance(message, dict) or not isinstance(message.get("data", {}), dict):
            return _error("VALIDATION_ERROR", "Invalid message")
        data, session = message.get("data", {}), self._session
        try:
            match message.get("type"):
                case "reset":
                    seed, name = data.get("seed"), data.get("episode_id")
                    is_seed = seed is None or (isinstance(seed, int) and not isinstance(seed, bool) and seed >= 0)
                    if not is_seed or not isinstance(name, (str, type(None))) or len(name or "") > 255:
                        return _error("VALIDATION_ERROR", "seed is a number from 0 on, episode_id a text")
                    initial_messages = await session.reset(seed)
                    self._episode_id = name or f"{session.ref}#{session.index}"
                    return _observation(session, initial_messages, None)
                case "step":
                    if not isinstance(data.get("message"), str):
                        return _error("VALIDATION_ERROR", "an action is {message: text}")
                    result = await session.step(data["message"])
                    return _observation(session, result.messages, result)
                case "state":
                    return {"type": "state", "data": {"episode_id": self._episode_id, "step_count": session.steps}}
                case "close":
                    return None
                case other:
                    return _error("UNKNOWN_TYPE", f"Unknown message type: {str(other)[:100]}")
        except RolljaxError as e:
            return _error("EXECUTION_ERROR", str(e), owner=e.owner)


def _observation(session: EnvSession, messages: Sequence[Message], result: StepResult | None) -> dict[str, Any]:
    about = metadata(session, result)
    seen = {"message": whole_text(messages), "messages": message_list(messages), "metadata": about}
    return {
        "type": "observation",
        "data": {
            "observation": seen,
            "reward": None if result is None else result.reward,
            "done": result is not None and (result.terminated or result.truncated),
            "metadata": about,
        },
    }


def _error(code: str, message: str, **more: Any) -> dict[str, Any]:
    return {"type": "error", "data": {"message": message, "code": code, **more}}


def main(argv: list[str] | None = None) -> int:
    """Serve an environment by OpenEnv's protocol until the process is ended; returns the exit code."""
    arguments = parser("rolljax.envs.adapters.openenv_server", "Serve an environment to OpenEnv clients.")
    arguments.add_argument("env", help="reference of the environment, like frozen_lake(size=5) or rg:chain_sum")
    args = arguments.parse_args(argv)
    return run(args, lambda limits: make_app(args.env, limits))


if __name__ == "__main__":
    sys.exit(main())
