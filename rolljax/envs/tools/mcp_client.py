"""Tools of MCP servers, through the `mcp` SDK.

The SDK is asyncio; tools are called from threads. One event loop in a thread of its own runs the clients of this
process, one per server, which all episodes share.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import dataclasses
import importlib
import importlib.util
import logging
import os
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any, Literal

from rolljax.concurrency.child import Child
from rolljax.envs.tools.base import ToolLimits, ToolResult, Tools, ToolSet, ToolSpec
from rolljax.envs.tools.mcp_http import FAILED, TOO_LONG, http_transport
from rolljax.envs.tools.mcp_pipe import REFUSED, pipe_transport
from rolljax.errors import ConfigError, InfraError, boundary

RETRY_S = 1.0
"""Seconds until a server that did not start is tried again."""
END_S = 1.0
"""Seconds that a server has to end once its input is closed."""
GRACE_S = 5.0
"""Seconds past their own limit for which calls of this module wait for the event loop."""


@dataclasses.dataclass(frozen=True)
class McpTools(Tools):
    """The tools of one MCP server. Exactly one of `command`, `url` and `server` is set."""

    command: tuple[str, ...] = ()
    """Command that starts a server that communicates over its standard streams."""
    where: Literal["sandbox", "process"] = "sandbox"
    """`sandbox` (no network, no files of this machine but `files`) or `process`, a plain process of this user, for
    servers that are trusted."""
    files: tuple[tuple[str, str], ...] = ()
    """Files that are copied into the sandbox's work folder, as (name in the sandbox, path on this machine)."""
    url: str = ""
    """URL of a server that uses streamable HTTP."""
    server: str = ""
    """Import path of a server in this process (an `MCPServer` or `Server` of the SDK, or a function that makes one)."""
    shared: bool = True
    """Whether all episodes of a process share one connection; if False, each episode has its own connection, and with
    `command` its own server."""
    max_bytes: int = 4 * 1024 * 1024
    """Maximum number of bytes that the server may send in one message; a longer result is refused."""
    start_s: float = 20.0
    """Longest time until the server has listed its tools."""

    def __post_init__(self) -> None:
        targets = [n for n in ("command", "url", "server") if getattr(self, n)]
        if len(targets) != 1:
            raise ConfigError(
                "needs exactly one of command, url and server",
                setting="McpTools",
                value=targets,
                remedy="set one of them",
            )
        if self.where not in ("sandbox", "process"):
            raise ConfigError(
                "is no place for a server", setting="McpTools.where", value=self.where, remedy="sandbox or process"
            )
        if self.files and (not self.command or self.where != "sandbox"):
            raise ConfigError("are only put into a sandbox", setting="McpTools.files", value=self.files)
        if importlib.util.find_spec("mcp") is None:
            raise ConfigError("needs the MCP SDK", setting="McpTools", remedy="pip install 'rolljax[tools]'")

    @property
    def waits(self) -> bool:
        return True

    @property
    def title(self) -> str:
        return self.url or self.server or " ".join(self.command)

    def open(self) -> ToolSet:
        return McpToolSet(_shared(self) if self.shared else _Connection(self).started(), own=not self.shared)


class McpToolSet(ToolSet):
    """An episode's use of an MCP server. It counts as stateful, because the server's state is unknown and cannot be
    copied."""

    stateful = True

    def __init__(self, connection: _Connection, *, own: bool) -> None:
        self._connection = connection
        self._own = own

    def list(self) -> tuple[ToolSpec, ...]:
        return self._connection.specs

    def problem(self, spec: ToolSpec, arguments: Mapping[str, Any]) -> str:
        return ""  # the server looks for itself

    def run(self, spec: ToolSpec, arguments: Mapping[str, Any], limits: ToolLimits) -> ToolResult:
        return self._connection.call(spec.name, dict(arguments), limits)

    def close(self) -> None:
        if self._own:
            self._connection.close()


class _Connection:
    """One client. A task of the event loop holds it open, because the SDK's contexts must be left in the task that
    entered them."""

    def __init__(self, cfg: McpTools) -> None:
        self.cfg = cfg
        self.specs: tuple[ToolSpec, ...] = ()
        self.dead = ""
        self._client: Any = None
        self._process: Child | None = None
        self._process_state = ""
        self._running = 0
        self._ready: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._loop = _loop()
        self._stop = asyncio.Event()
        self._ended = asyncio.Condition()
        self._task: concurrent.futures.Future[None] | None = None

    def started(self) -> _Connection:
        """Connect to the server, and return this connection.

        Raises:
          InfraError: the server does not start.
        """
        self._task = asyncio.run_coroutine_threadsafe(self._live(), self._loop)
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self.close)
            try:
                self._ready.result(self.cfg.start_s + GRACE_S)
            except concurrent.futures.TimeoutError as e:
                raise InfraError(f"MCP server {self.cfg.title}: the event loop does not answer") from e
            on_failure.pop_all()
        return self

    async def _live(self) -> None:
        from mcp.client import Client

        try:
            async with contextlib.AsyncExitStack() as stack:
                async with asyncio.timeout(self.cfg.start_s):
                    client = Client(self._target(stack), cache=None, read_timeout_seconds=self.cfg.start_s)
                    self._client = await stack.enter_async_context(client)
                    self.specs = await _specs(self._client)
                self._ready.set_result(None)
                await self._stop.wait()
        except BaseException as e:  # border: the SDK reports a dead server as groups of any exceptions
            self.dead = f"MCP server {self.cfg.title}: {_reason(e)}"
            if isinstance(e, TimeoutError):
                self.dead = f"MCP server {self.cfg.title} has not told its tools within {self.cfg.start_s:g} s"
            if self._process is not None:
                self.dead += f" (its process {self._process_state})"
            if not self._ready.done():
                error = e if isinstance(e, ConfigError) else InfraError(self.dead)
                self._ready.set_exception(error)
        finally:
            self.dead = self.dead or f"MCP server {self.cfg.title}: the connection is closed"

    def _target(self, stack: contextlib.AsyncExitStack) -> Any:
        """Return the server for the SDK's client: a transport, or a server object. stack: ends the server."""
        if self.cfg.url:
            return http_transport(self.cfg.url, self.cfg.max_bytes)
        if self.cfg.server:
            return _imported(self.cfg.server)
        command = self.cfg.command
        if self.cfg.where == "sandbox":
            files = [f"--file={path}:{name}" for name, path in self.cfg.files]
            command = (sys.executable, "-m", "rolljax.sandbox", "run", "--profile", "mcp", *files, "--", *command)
        env = {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
        self._process = Child(command, env, max_bytes=self.cfg.max_bytes, skip_long=True)
        stack.push_async_callback(self._end, self._process)
        return pipe_transport(self._process)

    async def _end(self, process: Child) -> None:
        self._process_state = process.state()
        await process.astop(END_S)

    @property
    def gone(self) -> bool:
        """Return whether the server has failed for good, or its process has ended."""
        return bool(self.dead) or (self._process is not None and not self._process.alive)

    def call(self, name: str, arguments: dict[str, Any], limits: ToolLimits) -> ToolResult:
        """Run a tool of the server.

        Raises:
          InfraError: the server is dead, or had no free place for too long.
        """
        if self.dead:
            raise InfraError(self.dead)
        future = asyncio.run_coroutine_threadsafe(self._call(name, arguments, limits), self._loop)
        try:
            return future.result(2 * limits.call_s + GRACE_S)
        except concurrent.futures.TimeoutError as e:
            future.cancel()
            raise InfraError(f"MCP server {self.cfg.title}: the event loop does not answer") from e

    async def _call(self, name: str, arguments: dict[str, Any], limits: ToolLimits) -> ToolResult:
        async with self._ended:
            try:
                async with asyncio.timeout(limits.call_s):
                    await self._ended.wait_for(lambda: self._running < limits.concurrency)
            except TimeoutError as e:
                busy = f"{self._running} calls are running, and none ended in {limits.call_s:g} s"
                raise InfraError(f"MCP server {self.cfg.title}: {busy}") from e
            self._running += 1
        try:
            return await self._answer(name, arguments, limits)
        finally:
            async with self._ended:
                self._running -= 1
                self._ended.notify()

    async def _answer(self, name: str, arguments: dict[str, Any], limits: ToolLimits) -> ToolResult:
        import mcp_types as types
        from mcp.shared.exceptions import MCPError

        try:
            async with asyncio.timeout(limits.call_s):
                return _result(await self._client.call_tool(name, arguments, limits.call_s + GRACE_S))
        except TimeoutError:
            return ToolResult.error("timeout", f"{name} gave no result within {limits.call_s:g} s")
        except MCPError as e:
            if any(said in e.message for said in TOO_LONG):
                return ToolResult.error("limit", f"the result has more than {self.cfg.max_bytes} bytes")
            if e.code == types.CONNECTION_CLOSED or (self.cfg.url and e.message == FAILED):
                self._die(e.message)
                raise InfraError(self.dead) from e
            return ToolResult.error("limit" if e.code == REFUSED else "exception", e.message)
        except Exception as e:  # border: whatever the SDK raises when its connection breaks
            if self.gone:
                raise InfraError(self.dead or f"MCP server {self.cfg.title}: {_reason(e)}") from e
            raise

    def _die(self, why: str) -> None:
        """Record that the server is gone, and how it ended, if that is known."""
        if self._process is not None:
            why = self._process.state()
        self.dead = self.dead or f"MCP server {self.cfg.title}: {why}"
        self._stop.set()

    def close(self) -> None:
        """Disconnect; a server that this connection started ends with it."""
        if self._task is None or not self._loop.is_running():
            return
        self._loop.call_soon_threadsafe(self._stop.set)
        done, _ = concurrent.futures.wait([self._task], GRACE_S)
        if not done:
            self._task.cancel()


_lock = threading.RLock()
_connections: dict[McpTools, _Connection] = {}
_opening: dict[McpTools, threading.Lock] = {}
_failed: dict[McpTools, tuple[float, str]] = {}
"""Time and reason of each connection's last failure."""
_loop_of: dict[int, asyncio.AbstractEventLoop] = {}


def _loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of this process (a forked child has its own)."""
    with _lock:
        pid = os.getpid()
        if pid not in _loop_of:
            _loop_of.clear()
            _connections.clear()
            _loop_of[pid] = loop = asyncio.new_event_loop()
            logging.getLogger("mcp").addHandler(logging.NullHandler())  # errors are reported in results
            threading.Thread(target=loop.run_forever, name="rolljax-mcp", daemon=True).start()
        return _loop_of[pid]


def _shared(cfg: McpTools) -> _Connection:
    """Return the connection of this process to a server; a new one if the last is dead."""
    _loop()
    with _lock:
        opening = _opening.setdefault(cfg, threading.Lock())
    asked_s = time.monotonic()
    with opening:
        connection = _connections.get(cfg)
        if connection is not None:
            if not connection.gone:
                return connection
            connection.close()
        failed_s, why = _failed.get(cfg, (0.0, ""))
        if failed_s > asked_s - RETRY_S:
            raise InfraError(why)
        try:
            connection = _connections[cfg] = _Connection(cfg).started()
        except InfraError as e:
            _failed[cfg] = time.monotonic(), str(e)
            raise
        return connection


@atexit.register
def _close_connections() -> None:
    """Close the connections of this process."""
    if os.getpid() not in _loop_of:
        return
    with _lock:
        connections = [*_connections.values()]
        _connections.clear()
    for connection in connections:
        connection.close()


def _imported(path: str) -> Any:
    module, _, name = path.rpartition(".")
    with boundary(ConfigError, f"McpTools.server {path!r}"):
        found = getattr(importlib.import_module(module), name)
        return found() if callable(found) else found


async def _specs(client: Any) -> tuple[ToolSpec, ...]:
    specs: list[ToolSpec] = []
    cursor = None
    for _ in range(100):
        page = await client.list_tools(cursor=cursor)
        for tool in page.tools:
            hints = tool.annotations.model_dump(exclude_none=True) if tool.annotations else {}
            specs.append(ToolSpec(tool.name, tool.description or "", tool.input_schema, hints))
        cursor = page.next_cursor
        if not cursor:
            break
    return tuple(specs)


def _result(answer: Any) -> ToolResult:
    texts = [part.text if part.type == "text" else _other(part) for part in answer.content]
    kind: Literal["exception", "ok"] = "exception" if answer.is_error else "ok"
    return ToolResult("\n".join(texts), answer.structured_content, bool(answer.is_error), kind)


def _other(part: Any) -> str:
    """Return a text in place of content that is not text."""
    resource = getattr(part, "resource", None)
    if resource is not None and getattr(resource, "text", None) is not None:
        return resource.text
    size = len(getattr(part, "data", "") or getattr(resource, "blob", "") or "")
    return f"[{part.type}: {getattr(part, 'mime_type', None) or getattr(part, 'uri', '')} {size} characters]"


def _reason(e: BaseException) -> str:
    while isinstance(e, BaseExceptionGroup):
        e = e.exceptions[0]
    return str(e) or f"the connection broke ({type(e).__name__})"
