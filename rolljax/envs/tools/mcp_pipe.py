"""MCP over the standard streams of a process, with a limit on the size of the server's messages.

The protocol writes one JSON-RPC message per line. A line over the limit is discarded as it arrives, and its call fails
with an error that names the limit; the connection and its other calls continue.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator
from typing import Any

from rolljax.concurrency.child import LINE_ENDS, Child, ChildError

REFUSED = -32050
"""Code of the JSON-RPC error that replaces a rejected message of the server."""
_ID = re.compile(rb'"id"\s*:\s*([0-9]{1,15})')


@contextlib.asynccontextmanager
async def pipe_transport(server: Child) -> AsyncIterator[tuple[Any, Any]]:
    """Open the SDK's transport over pipes: a stream of messages from the server, and one to it."""
    import anyio
    from mcp.shared.message import SessionMessage

    to_client, from_server = anyio.create_memory_object_stream[Any](0)
    to_server, from_client = anyio.create_memory_object_stream[SessionMessage](0)

    async def read() -> None:
        async with to_client:
            with contextlib.suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):
                while True:
                    try:
                        message = _message(await server.areceive())
                    except ChildError as e:
                        if e.kind == "ended":
                            return
                        message = _refusal(e.line, str(e))
                    if message is not None:
                        await to_client.send(message)

    async def write() -> None:
        async with from_client:
            with contextlib.suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):
                async for message in from_client:
                    server.send(message.message.model_dump_json(by_alias=True, exclude_unset=True).encode())

    try:
        async with anyio.create_task_group() as group:
            group.start_soon(read)
            group.start_soon(write)
            try:
                yield from_server, to_server
            finally:
                group.cancel_scope.cancel()
    finally:
        for stream in (to_client, from_server, to_server, from_client):
            stream.close()


def _message(line: bytes) -> Any:
    """Parse a line as a message. For a line that cannot be read, return an error of the call that it answers."""
    import mcp_types as types
    from mcp.shared.message import SessionMessage

    try:
        return SessionMessage(types.jsonrpc_message_adapter.validate_json(line, by_name=False))
    except ValueError as e:
        return _refusal(line, f"sent a message that cannot be read: {str(e)[:200]}")


def _refusal(line: bytes, problem: str) -> Any:
    """Make the error of the call that a line answers; None if the line names no call."""
    import mcp_types as types
    from mcp.shared.message import SessionMessage

    number = _ID.search(line, 0, LINE_ENDS) or _ID.search(line, max(0, len(line) - LINE_ENDS))
    if not number:
        return None
    error = types.ErrorData(code=REFUSED, message=f"the server {problem}")
    return SessionMessage(types.JSONRPCError(jsonrpc="2.0", id=int(number[1]), error=error))
