"""Frames between the two ends of a sandbox: two lengths (32 bits each, big endian), a JSON object, and bytes that
belong to it."""

from __future__ import annotations

import json
import os
import select
import struct
import time
from collections.abc import Mapping
from typing import Any

HEAD = struct.Struct(">II")
CHUNK = 1 << 16
MAX_HEADER = 16 << 20


class Lost(Exception):
    """The other end is gone, or violates the protocol."""


def send(fd: int, header: Mapping[str, Any], blob: bytes = b"", deadline: float | None = None) -> None:
    """Write one frame. deadline: time of `time.monotonic` until which the whole frame must be written."""
    text = json.dumps(header).encode()
    left = memoryview(HEAD.pack(len(text), len(blob)) + text + blob)
    try:
        while left:
            if deadline is not None:
                wait(fd, select.POLLOUT, deadline)
            try:
                left = left[os.write(fd, left) :]
            except BlockingIOError:
                continue
    except OSError as e:
        raise Lost(str(e)) from None


def receive(
    fd: int, max_blob: int = 64 << 20, max_header: int = MAX_HEADER, deadline: float | None = None
) -> tuple[dict[str, Any], bytes]:
    """Read the next frame: header and blob."""
    header_n, blob_n = HEAD.unpack(read_exactly(fd, HEAD.size, deadline))
    if header_n > max_header or blob_n > max_blob:
        raise Lost("a frame is too large")
    try:
        header = json.loads(read_exactly(fd, header_n, deadline))
    except (ValueError, RecursionError):
        raise Lost("a frame is not JSON") from None
    if type(header) is not dict:
        raise Lost("a frame is not an object")
    return header, read_exactly(fd, blob_n, deadline)


def wait(fd: int, event: int, deadline: float) -> None:
    poll = select.poll()
    poll.register(fd, event)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise Lost("too late")


def read_exactly(fd: int, n: int, deadline: float | None = None) -> bytes:
    parts = bytearray()
    while len(parts) < n:
        if deadline is not None:
            wait(fd, select.POLLIN, deadline)
        try:
            part = os.read(fd, min(n - len(parts), 1 << 20))
        except BlockingIOError:
            continue
        except OSError as e:
            raise Lost(str(e)) from None
        if not part:
            raise Lost("closed")
        parts += part
    return bytes(parts)


class HeadTail:
    """Keeps the first and the last half of `limit` bytes of a stream, and counts all."""

    def __init__(self, limit: int) -> None:
        self.half, self.total = limit // 2, 0
        self.head, self.tail = bytearray(), bytearray()

    def add(self, part: bytes) -> None:
        self.total += len(part)
        room = self.half - len(self.head)
        self.head += part[:room]
        self.tail += part[room:]
        if len(self.tail) > 2 * self.half + CHUNK:
            del self.tail[: len(self.tail) - self.half]

    @property
    def truncated(self) -> bool:
        return self.total > 2 * self.half

    def value(self) -> bytes:
        cut = self.total - 2 * self.half
        if not self.truncated:
            return bytes(self.head + self.tail)
        return bytes(self.head + b"\n[... %d bytes cut ...]\n" % cut + self.tail[len(self.tail) - self.half :])
