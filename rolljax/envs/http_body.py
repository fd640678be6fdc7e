"""Bodies of untrusted servers, read as a stream; both the received and the unpacked size are limited.

Every HTTP client of rolljax reads its answers here: chat models, environments and tools behind a server. A body is
unpacked in small pieces, and the event loop runs between them, so that a deadline of the caller fires while it is read.
"""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import httpx2

ACCEPTED = {"Accept-Encoding": "gzip"}
"""Request header that asks for the only compression that `Unpacker` reads."""
MAX_PIECE = 1 << 16
"""Maximum number of bytes that are unpacked at a time."""
MAX_ERROR_BYTES = 1 << 16
"""Maximum number of bytes that are read of an error's body."""
_GZIP = zlib.MAX_WBITS | 16


class BadBody(ValueError):
    """A body that is too long, damaged, or compressed in another way than `ACCEPTED`."""


class Unpacker:
    """Unpacks a body piece by piece.

    Args:
      encoding: the header `Content-Encoding`; empty: none. max_bytes: most bytes that arrive, and most that they unpack
        to; None: no limit, for a stream of events.
    """

    def __init__(self, encoding: str, max_bytes: int | None) -> None:
        encoding = encoding.strip().lower()
        if encoding not in ("", "identity", "gzip", "x-gzip"):
            raise BadBody(f"the body is packed as {encoding[:40]!r}, and only gzip was accepted")
        self._zip = zlib.decompressobj(_GZIP) if "gzip" in encoding else None
        self._max_bytes, self._arrived, self._unpacked = max_bytes, 0, 0

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Unpack the next bytes of the body; yield pieces of at most `MAX_PIECE` bytes.

        Raises:
          BadBody: there are too many of them, or they are not gzip.
        """
        self._arrived += len(data)
        self._check(self._arrived)
        if self._zip is None:
            for start in range(0, len(data), MAX_PIECE):
                yield data[start : start + MAX_PIECE]
            return
        while True:
            try:
                piece = self._zip.decompress(data, MAX_PIECE)
            except zlib.error as e:
                raise BadBody(f"the body is not gzip: {e}") from e
            self._unpacked += len(piece)
            self._check(self._unpacked)
            if piece:
                yield piece
            if self._zip.unused_data:
                raise BadBody("the body has data after the end of its gzip")
            data = self._zip.unconsumed_tail
            if not data and len(piece) < MAX_PIECE:
                return

    def end(self) -> None:
        """Check that the body is complete.

        Raises:
          BadBody: its gzip has no end.
        """
        if self._zip is not None and self._arrived and not self._zip.eof:
            raise BadBody("the gzip of the body ends too early")

    def _check(self, size: int) -> None:
        if self._max_bytes is not None and size > self._max_bytes:
            raise BadBody(f"the body has more than {self._max_bytes} bytes")


async def read_body(response: httpx2.Response, max_bytes: int) -> bytes:
    """Return the unpacked body of a response whose stream has not been read.

    Args:
      max_bytes: most bytes that arrive, and most that they unpack to.

    Raises:
      BadBody: it cannot be used. What httpx2 raises: the connection failed.
    """
    found = bytearray()
    await _read(response, max_bytes, found)
    return bytes(found)


async def read_error(response: httpx2.Response) -> str:
    """Return the beginning of the body of an error, as text for a message, however broken the rest is."""
    found = bytearray()
    with contextlib.suppress(BadBody):
        await _read(response, MAX_ERROR_BYTES, found)
    return found[:2000].decode(errors="replace")[:500]


async def _read(response: httpx2.Response, max_bytes: int, into: bytearray) -> None:
    unpacker = Unpacker(response.headers.get("content-encoding", ""), max_bytes)
    async for data in response.aiter_raw():
        for piece in unpacker.feed(data):
            into += piece
            await asyncio.sleep(0)
    unpacker.end()
