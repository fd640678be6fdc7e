"""MCP over streamable HTTP, with a limit on the size of the server's messages."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from rolljax.envs.http_body import ACCEPTED, BadBody, Unpacker

TOO_LONG = ("the body has more than", "Server-sent event exceeded")
"""Messages of `http_transport` and of the SDK's reader of events for a body over the size limit."""
FAILED = "Server returned an error response"
"""The SDK's message for a server that answers with an error status instead of a message."""


@contextlib.asynccontextmanager
async def http_transport(url: str, max_bytes: int) -> AsyncIterator[Any]:
    """Open the SDK's transport over streamable HTTP: a stream of messages from the server, and one to it."""
    import httpx2
    from mcp.client.streamable_http import streamable_http_client
    from mcp.shared._httpx_utils import MCP_DEFAULT_SSE_READ_TIMEOUT, MCP_DEFAULT_TIMEOUT

    class Unpacked(httpx2.AsyncByteStream):
        """A body that is unpacked in pieces; reading it fails once it is too long."""

        def __init__(self, body: httpx2.AsyncByteStream, unpacker: Unpacker) -> None:
            self.body, self.unpacker = body, unpacker

        async def __aiter__(self) -> AsyncIterator[bytes]:
            try:
                async for chunk in self.body:
                    for piece in self.unpacker.feed(chunk):
                        yield piece
                self.unpacker.end()
            except BadBody as e:
                raise httpx2.StreamError(str(e)) from e

        async def aclose(self) -> None:
            await self.body.aclose()

    class Transport(httpx2.AsyncHTTPTransport):
        """Limits the size of whole bodies, where the SDK limits only each event of a stream. Fails if the server lost
        the session."""

        async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
            response = await super().handle_async_request(request)
            if response.status_code == 404 and request.method == "POST" and "mcp-session-id" in request.headers:
                await response.aclose()
                raise httpx2.RemoteProtocolError("the server has forgotten this session")
            is_stream = response.headers.get("content-type", "").startswith("text/event-stream")
            assert isinstance(response.stream, httpx2.AsyncByteStream)
            try:
                encoding = response.headers.pop("content-encoding", "")
                unpacker = Unpacker(encoding, None if is_stream else max_bytes)
            except BadBody as e:
                await response.aclose()
                raise httpx2.RemoteProtocolError(str(e)) from e
            response.stream = Unpacked(response.stream, unpacker)
            return response

    timeout = httpx2.Timeout(MCP_DEFAULT_TIMEOUT, read=MCP_DEFAULT_SSE_READ_TIMEOUT)
    async with (
        httpx2.AsyncClient(transport=Transport(), timeout=timeout, headers=ACCEPTED) as client,
        streamable_http_client(url, http_client=client, max_sse_event_size=max_bytes) as streams,
    ):
        yield streams
