"""MCP over the standard streams of a process, with a cap on what the server may send.

The protocol writes one JSON-RPC message per line. A line over the cap is thrown away as it comes in, and the call that
it answers fails with an error that says so; the connection and its other calls continue.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

CHUNK = 2**16
REFUSED = -32050
"""Code of the errors that stand for messages of the server that were not taken."""
TAIL = 300
"""Characters of a server's standard error that an error message quotes."""
END = 200
"""Bytes at either end of a line in which the number of the call is looked for."""
_ID = re.compile(rb'"id"\s*:\s*([0-9]{1,15})')
_INHERITED = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "PYTHONPATH", "VIRTUAL_ENV")


class ServerProcess:
    """A server, its streams and its last words."""

    def __init__(self, command: Sequence[str]) -> None:
        self.command = tuple(command)
        self.process: asyncio.subprocess.Process | None = None
        self._tail = b""

    async def start(self) -> asyncio.subprocess.Process:
        self.process = await asyncio.create_subprocess_exec(
            *self.command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={k: os.environ[k] for k in _INHERITED if k in os.environ},
            start_new_session=True,
        )
        return self.process

    async def read_errors(self) -> None:
        assert self.process is not None and self.process.stderr is not None
        while data := await self.process.stderr.read(CHUNK):
            self._tail = (self._tail + data)[-CHUNK:]

    def epitaph(self) -> str:
        """How it ended, and what it wrote to standard error at last."""
        code = self.process.returncode if self.process is not None else None
        tail = " ".join(self._tail.decode("utf-8", "replace").split())[-TAIL:]
        ended = "is running" if code is None else f"ended with exit code {code}"
        return ended + (f"; its last words: {tail}" if tail else "")

    async def stop(self, grace_s: float = 1.0) -> None:
        """Close its input, give it time to end, then kill its process group."""
        if self.process is None:
            return
        with contextlib.suppress(OSError, RuntimeError):
            assert self.process.stdin is not None
            self.process.stdin.close()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.process.wait(), grace_s)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.process.wait(), grace_s)


class LineCutter:
    """Cuts a stream of bytes into lines. Of a line that grows over `max_bytes` only its two ends are kept."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._parts: list[bytes] = []
        self._size = 0

    def feed(self, data: bytes) -> Iterator[tuple[bytes, int]]:
        """Lines that are complete now, each with its size."""
        *ended, rest = data.split(b"\n")
        for part in ended:
            self._add(part)
            line, size = b"".join(self._parts), self._size
            self._parts, self._size = [], 0
            yield line, size
        self._add(rest)

    def _add(self, part: bytes) -> None:
        self._size += len(part)
        self._parts.append(part)
        if self._size > self._max_bytes:
            kept = b"".join(self._parts)
            self._parts = [kept[:END], kept[END:][-END:]]


@contextlib.asynccontextmanager
async def pipe_transport(server: ServerProcess, max_bytes: int) -> AsyncIterator[tuple[Any, Any]]:
    """The SDK's transport: a stream of messages from the server, and one to it."""
    import anyio
    from mcp.shared.message import SessionMessage

    process = await server.start()
    assert process.stdin is not None and process.stdout is not None
    to_client, from_server = anyio.create_memory_object_stream[Any](0)
    to_server, from_client = anyio.create_memory_object_stream[SessionMessage](0)
    stdin, stdout = process.stdin, process.stdout

    async def read() -> None:
        lines = LineCutter(max_bytes)
        async with to_client:
            with contextlib.suppress(anyio.ClosedResourceError, anyio.BrokenResourceError, ConnectionError):
                while data := await stdout.read(CHUNK):
                    for line, size in lines.feed(data):
                        message = _message(line, size, max_bytes) if size else None
                        if message is not None:
                            await to_client.send(message)
                await asyncio.wait([asyncio.ensure_future(process.wait())], timeout=1)

    async def write() -> None:
        async with from_client:
            with contextlib.suppress(anyio.ClosedResourceError, anyio.BrokenResourceError, OSError):
                async for message in from_client:
                    text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
                    stdin.write(text.encode() + b"\n")
                    await stdin.drain()

    try:
        async with anyio.create_task_group() as group:
            group.start_soon(read)
            group.start_soon(write)
            group.start_soon(server.read_errors)
            try:
                yield from_server, to_server
            finally:
                with anyio.CancelScope(shield=True):
                    await server.stop()
                group.cancel_scope.cancel()
    finally:
        for stream in (to_client, from_server, to_server, from_client):
            stream.close()


def _message(line: bytes, size: int, max_bytes: int) -> Any:
    """A line as a message; one that is too long or cannot be read as the error of the call that it answers, if it names
    that call."""
    import mcp_types as types
    from mcp.shared.message import SessionMessage

    problem = f"the result has {size} bytes, the limit is {max_bytes}"
    if size <= max_bytes:
        try:
            return SessionMessage(types.jsonrpc_message_adapter.validate_json(line, by_name=False))
        except ValueError as e:
            problem = f"the server's message cannot be read: {str(e)[:200]}"
    number = _ID.search(line, 0, END) or _ID.search(line, max(0, len(line) - END))
    if not number:
        return None
    error = types.ErrorData(code=REFUSED, message=problem)
    return SessionMessage(types.JSONRPCError(jsonrpc="2.0", id=int(number[1]), error=error))
