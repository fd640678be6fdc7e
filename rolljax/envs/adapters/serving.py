"""Shared parts of the environment servers: sessions over host pools, token authentication, the server process."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import fnmatch
import hmac
import ipaddress
import os
import re
import secrets
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any

from rolljax.concurrency import signals
from rolljax.envs.base import NUM_INDICES, StepResult
from rolljax.envs.catalog import make_spec, names, prefixes
from rolljax.envs.pool import EnvPool, Episode, PoolConfig
from rolljax.errors import Checked, ConfigError, EnvError, InfraError, Range, RolljaxError
from rolljax.types import Message

TOKEN = "ROLLJAX_ENV_TOKEN"
"""Environment variable that holds the bearer token, of servers and clients."""
MAX_BODY_BYTES = 2**20
_NAME = re.compile(r"[\w.]+")


@dataclasses.dataclass(frozen=True)
class SessionLimits(Checked):
    """Limits of an environment server, and its bearer token."""

    token: str = ""
    """Bearer token of the server (empty: no token needed)."""
    sessions: Annotated[int, Range(low=1)] = 64
    """Maximum number of concurrent sessions."""
    idle_s: Annotated[float, Range(above=0)] = 900.0
    """Seconds without a request after which a session is closed."""
    pool: PoolConfig = PoolConfig()
    """Settings of each environment's host pool."""


class Full(InfraError):
    """No session is free."""


class EnvSession:
    """One client's session: episodes of one environment, one after the other, one call at a time."""

    def __init__(self, ref: str, pool: EnvPool) -> None:
        self.id = secrets.token_hex(8)
        self.ref, self.spec = ref, pool.spec
        self.used_s = time.monotonic()
        self.steps, self.total, self.index = 0, 0.0, -1
        self._pool = pool
        self._episode: Episode | None = None
        self._busy = asyncio.Lock()

    async def reset(self, seed: int | None) -> tuple[Message, ...]:
        """Start the task whose index is `seed`; any task where it is None."""
        async with self._busy:
            self.used_s = time.monotonic()
            await self._leave()
            self.index = secrets.randbelow(NUM_INDICES) if seed is None else seed % NUM_INDICES
            task = await asyncio.to_thread(self.spec.task, self.index)
            self._episode = await self._pool.open(task)
            self.steps, self.total = 0, 0.0
            self.used_s = time.monotonic()
            return self._episode.initial_messages

    async def step(self, action: str) -> StepResult:
        """Take an action. An episode that reaches the environment's `max_turns` is cut.

        Raises:
          EnvError: before a reset, after the end, or the environment failed.
        """
        async with self._busy:
            self.used_s = time.monotonic()
            if self._episode is None:
                raise EnvError("step before reset, or after the episode's end")
            result = await self._episode.step(action)
            self.steps += 1
            self.total += result.reward
            if self.steps >= self.spec.max_turns and not (result.terminated or result.truncated):
                result = dataclasses.replace(result, truncated=True)
            if result.terminated or result.truncated:
                await self._leave()
            self.used_s = time.monotonic()
            return result

    async def close(self) -> None:
        async with self._busy:
            await self._leave()

    @property
    def busy(self) -> bool:
        return self._busy.locked()

    async def _leave(self) -> None:
        episode, self._episode = self._episode, None
        if episode is not None:
            await episode.close()


class EnvSessions:
    """All sessions of a server, and a host pool for each environment that clients requested.

    offered: references, or patterns of them (`rg:*`), that clients may request.
    """

    def __init__(self, offered: Sequence[str], limits: SessionLimits) -> None:
        self.offered, self.limits = tuple(offered), limits
        self.open_ones: dict[str, EnvSession] = {}
        self._pools: dict[str, EnvPool] = {}

    async def open(self, ref: str) -> EnvSession:
        """Open a session.

        Raises:
          Full: there are as many as allowed.
          ConfigError: the environment is not offered, or does not exist.
        """
        if not self._offers(ref):
            raise ConfigError("is not offered here", setting="env_id", value=ref[:200])
        if ref not in self._pools:
            spec = await asyncio.to_thread(make_spec, ref)
            self._pools.setdefault(ref, EnvPool(self.limits.pool, spec))
        if len(self.open_ones) >= self.limits.sessions:
            raise Full(f"all {self.limits.sessions} sessions are taken")
        session = EnvSession(ref, self._pools[ref])
        self.open_ones[session.id] = session
        return session

    async def close(self, session: EnvSession) -> None:
        if self.open_ones.pop(session.id, None) is not None:
            await session.close()

    async def reap(self) -> None:
        """Close sessions that have been idle for too long; runs forever."""
        while True:
            await asyncio.sleep(min(self.limits.idle_s / 4, 30.0))
            late = time.monotonic() - self.limits.idle_s
            for session in [s for s in self.open_ones.values() if s.used_s < late and not s.busy]:
                await self.close(session)

    def shutdown(self) -> None:
        """End all pools."""
        for pool in self._pools.values():
            pool.close()

    def _offers(self, ref: str) -> bool:
        """Return whether `ref` was named exactly, or fits a pattern that begins with the same short name."""
        name = _NAME.match(ref)
        if ref in self.offered or name is None:
            return ref in self.offered
        known = name[0] in names() or name[0] in prefixes()
        fitting = (o for o in self.offered if (begin := _NAME.match(o)) and begin[0] == name[0])
        return known and any(fnmatch.fnmatchcase(ref, o) for o in fitting)


class BearerAuth:
    """ASGI middleware that rejects requests without the right bearer token, except to `/health`. With an empty token
    every request passes."""

    def __init__(self, app: Any, token: str) -> None:
        self._app, self._token = app, token.encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] not in ("http", "websocket") or scope["path"] == "/health" or self._opens(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": "wrong or missing token"})
        else:
            body = b'{"detail": "wrong or missing bearer token"}'
            headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": body})

    def _opens(self, scope: Any) -> bool:
        header = dict(scope["headers"]).get(b"authorization", b"")
        return not self._token or hmac.compare_digest(header, b"Bearer " + self._token)


def metadata(session: EnvSession, result: StepResult | None) -> dict[str, Any]:
    """Return the information that a client receives in addition to the observation."""
    about: dict[str, Any] = {"env": session.ref, "index": session.index}
    if result is not None:
        about |= {
            "truncated": result.truncated,
            "success": result.success,
            "reward_parts": dict(result.reward_parts),
            "metrics": dict(result.metrics),
        }
    return about


def message_list(messages: Sequence[Message]) -> list[dict[str, str]]:
    """Encode messages as JSON objects with `role` and `content`."""
    return [{"role": m.role, "content": m.content} for m in messages]


def whole_text(messages: Sequence[Message]) -> str:
    """Render a conversation as one text, for clients without roles."""
    return "\n\n".join(m.content for m in messages)


# ---- the process


def parser(prog: str, what: str) -> argparse.ArgumentParser:
    """Return the argument parser of a server's command."""
    parser = argparse.ArgumentParser(prog=f"python -m {prog}", description=what)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="0 picks a free one (default: %(default)s)")
    parser.add_argument(
        "--sessions", type=int, default=SessionLimits.sessions, help="open at a time (default: %(default)s)"
    )
    parser.add_argument(
        "--idle_s", type=float, default=SessionLimits.idle_s, help="of a session (default: %(default)s)"
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=PoolConfig.workers,
        help="per environment; 0: by its kind (default: %(default)s)",
    )
    parser.add_argument("--step_s", type=float, default=PoolConfig.step_s, help="of one step (default: %(default)s)")
    return parser


def run(args: argparse.Namespace, make_app: Callable[[SessionLimits], Any]) -> int:
    """Serve until SIGTERM or Ctrl-C; returns the exit code. The token comes from `$ROLLJAX_ENV_TOKEN`; without one, a
    server that others can reach makes one and shows it."""
    import uvicorn

    try:
        token = os.environ.get(TOKEN, "")
        with _listen(args.host, args.port) as listener:
            host, port = listener.getsockname()[:2]
            if not token and not ipaddress.ip_address(host).is_loopback:
                token = secrets.token_urlsafe(24)
                _say(f"token, as this address is open to others: {token}")
            limits = SessionLimits(
                token, args.sessions, args.idle_s, PoolConfig(workers=args.workers, step_s=args.step_s)
            )
            config = uvicorn.Config(
                make_app(limits),
                log_level="warning",
                access_log=False,
                server_header=False,
                ws_max_size=MAX_BODY_BYTES,
                timeout_graceful_shutdown=5,
            )
            asyncio.run(
                _serve(uvicorn.Server(config), listener, f"http://{f'[{host}]' if ':' in host else host}:{port}")
            )
        return 0
    except RolljaxError as e:
        sys.stderr.write(f"{e}\n")
        return e.exit_code


async def _serve(server: Any, listener: socket.socket, url: str) -> None:
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    while not server.started and not serving.done():
        await asyncio.sleep(0.01)
    signals.in_loop(setattr, server, "should_exit", True)
    _say(f"serving at {url}")
    await serving


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, OverflowError) as e:
        raise ConfigError(
            f"cannot be listened on: {e}",
            setting="--host, --port",
            value=f"{host}:{port}",
            remedy="choose another port (0 picks a free one) or an address of this machine",
        ) from e


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
