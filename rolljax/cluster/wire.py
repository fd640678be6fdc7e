"""Frames over authenticated TCP, between a controller and the samplers of other processes.

A frame has a kind, fields and arrays: the lengths of the frame and of its MessagePack head, the head, the bytes of the
arrays. Nothing is pickled, so a peer with the key can send wrong numbers but no code. Both sides prove that they have
the key; frames are not encrypted.

Each connection has a thread that writes and one that reads, so that a peer which is stopped blocks no other thread. TCP
reports nothing about a peer that is stopped or cut off: a `Pulse` sends heartbeats from a thread of its own, and ends
connections that have been silent for too long.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any, BinaryIO, cast

import msgpack
import numpy as np

from rolljax.concurrency.waits import Inbox
from rolljax.errors import SamplerError

MAX_FRAME_BYTES = 2**30
"""Most bytes of a frame; a longer one ends the connection."""
READ_BYTES = 2**16
"""Most bytes that are read at a time: of a frame, or of all frames that have come."""
HANDSHAKE_S = 10.0
"""Longest time for a peer to prove that it has the key."""
HEARTBEAT = "heartbeat"
DTYPES = {np.dtype(name).str for name in ("bool", "i1", "u1", "<i2", "<u2", "<i4", "<u4", "<f4")}
"""Types of the arrays in frames."""
_LENGTHS = struct.Struct("<II")


@dataclasses.dataclass(frozen=True, eq=False)
class Frame:
    """A message between two processes."""

    kind: str
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Values that MessagePack knows, by name; tuples arrive as lists."""
    arrays: Sequence[np.ndarray] = ()
    """Arrays of the types in `DTYPES`; received ones are read-only."""


def encode(frame: Frame) -> bytes:
    """Return the bytes of a frame."""
    arrays = [np.ascontiguousarray(x) for x in frame.arrays]
    head = msgpack.packb([frame.kind, dict(frame.fields), [[x.dtype.str, list(x.shape)] for x in arrays]])
    lengths = _LENGTHS.pack(len(head) + sum(x.nbytes for x in arrays), len(head))
    return b"".join([lengths, head, *(x.data.cast("B") if x.size else b"" for x in arrays)])


def read(stream: BinaryIO) -> Frame:
    """Return the next frame of a stream.

    Raises:
      EOFError: the stream has ended. SamplerError: the next bytes are no frame.
    """
    lengths = stream.read(_LENGTHS.size)
    if len(lengths) < _LENGTHS.size:
        raise EOFError
    size, head = _LENGTHS.unpack(lengths)
    if size > MAX_FRAME_BYTES:
        raise SamplerError(f"a frame of {size} bytes is too long")
    data = stream.read(size)
    if len(data) < size:
        raise EOFError
    try:
        kind, fields, shapes = msgpack.unpackb(memoryview(data)[:head])
        if not (isinstance(kind, str) and isinstance(fields, dict)):
            raise ValueError("its head is damaged")
        start, arrays = head, []
        for dtype, shape in shapes:
            if dtype not in DTYPES or not all(isinstance(n, int) and n >= 0 for n in shape):
                raise ValueError(f"it has an array of type {dtype!r} and shape {shape!r}")
            count = math.prod(shape)
            arrays.append(np.frombuffer(data, dtype, count, start).reshape(shape))
            start += arrays[-1].nbytes
        if start != len(data):
            raise ValueError(f"it has {len(data) - start} bytes too many")
    except (ValueError, TypeError, msgpack.UnpackException) as e:
        raise SamplerError(f"a frame of {len(data)} bytes cannot be read: {e}") from None
    return Frame(kind, fields, arrays)


class Channel:
    """A connection to a peer. `send` never waits; frames arrive in a thread of the channel.

    Args:
      connection: authenticated. name: of the peer, for messages.
      take: called with each frame but heartbeats without fields. ended: called once, with the reason, when the
        connection has ended. Both run in the channel's threads.
    """

    def __init__(
        self, connection: socket.socket, name: str, take: Callable[[Frame], None], ended: Callable[[str], None]
    ) -> None:
        self.name = name
        self._connection, self._take, self._ended = connection, take, ended
        self._stream = cast(BinaryIO, connection.makefile("rb", READ_BYTES))
        self._outbox: Inbox[Frame | None] = Inbox(f"the thread that writes to {name}")
        self._heard_s = time.monotonic()
        self._lock = threading.Lock()
        self._reason: str | None = None

    def start(self) -> None:
        """Start the threads."""
        for target in (self._read, self._write):
            threading.Thread(target=target, name=f"rolljax-{self.name}", daemon=True).start()

    @property
    def is_open(self) -> bool:
        """Return whether frames can be sent."""
        return self._reason is None

    def send(self, kind: str, fields: Mapping[str, Any] | None = None, arrays: Sequence[np.ndarray] = ()) -> None:
        """Send a frame; do nothing if the connection has ended."""
        if self._reason is None:
            self._outbox.put(Frame(kind, fields or {}, arrays))

    def silent_s(self) -> float:
        """Return the seconds since the peer sent something."""
        return time.monotonic() - self._heard_s

    def heard(self) -> None:
        """Count the silence from now on."""
        self._heard_s = time.monotonic()

    def finish(self) -> None:
        """End the connection after everything that was sent."""
        self._outbox.put(None)

    def end(self, reason: str) -> None:
        """End the connection at once, in both directions."""
        with self._lock:
            if self._reason is not None:
                return
            self._reason = reason
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)  # wakes both threads
        self._outbox.put(None)
        self._ended(reason)

    def _read(self) -> None:
        reason = "the connection was closed"
        try:
            while self._reason is None:
                frame = read(self._stream)
                self._heard_s = time.monotonic()
                if frame.kind != HEARTBEAT or frame.fields:
                    self._take(frame)
        except EOFError:
            pass
        except OSError as e:
            reason = f"the connection failed: {e}"
        except Exception as e:  # border: the thread ends, and its owner learns why
            reason = str(e) if isinstance(e, SamplerError) else f"{type(e).__name__}: {e}"
        self.end(reason)
        self._stream.close()

    def _write(self) -> None:
        try:
            while (frame := self._outbox.take()) is not None:
                self._connection.sendall(encode(frame))
        except Exception as e:  # border: the thread ends, and its owner learns why
            self.end(f"{type(e).__name__}: {e}")
        self.end("the connection was closed")
        self._connection.close()


class Pulse:
    """Sends a heartbeat over each channel at an interval, and ends channels whose peer has been silent for too long.

    Args:
      fields: returns fields of a heartbeat; without any it only says that this process lives.
    """

    def __init__(self, every_s: float, lost_s: float, fields: Callable[[], Mapping[str, Any]] = dict) -> None:
        self._every_s, self._lost_s, self._fields = every_s, lost_s, fields
        self._channels: set[Channel] = set()
        self._over = threading.Event()
        threading.Thread(target=self._run, name="rolljax-pulse", daemon=True).start()

    def watch(self, channel: Channel) -> None:
        """Watch this channel too, as long as it is open."""
        self._channels = {*(c for c in self._channels if c.is_open), channel}

    def close(self) -> None:
        """End the thread."""
        self._over.set()

    def _run(self) -> None:
        before_s = time.monotonic()
        while not self._over.wait(self._every_s):
            now_s = time.monotonic()
            was_away, before_s = now_s - before_s > self._lost_s / 2, now_s
            for channel in self._channels:
                if was_away:  # this process was stopped: its peers may have spoken meanwhile
                    channel.heard()
                if channel.silent_s() > self._lost_s:
                    channel.end(f"has been silent for {channel.silent_s():.1f} s")
                channel.send(HEARTBEAT, self._fields())


class Port:
    """Listens for peers that have the key.

    Args:
      address: host and port; port 0: a free one.
      welcome: called with each authenticated connection, in a thread of its own.
    """

    def __init__(self, address: tuple[str, int], key: bytes, welcome: Callable[[socket.socket], None]) -> None:
        self._key, self._welcome = key, welcome
        self._listener = socket.create_server(address, reuse_port=False)
        self.number: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name="rolljax-port", daemon=True).start()

    def close(self) -> None:
        """Accept no more."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._shake_hands, args=(peer,), name="rolljax-handshake", daemon=True).start()

    def _shake_hands(self, peer: socket.socket) -> None:
        with contextlib.suppress(OSError, EOFError, AuthenticationError):  # a stranger: nothing is said
            self._welcome(_authenticated(peer, self._key, is_server=True))


def connect(address: tuple[str, int], key: bytes) -> socket.socket:
    """Connect to the `Port` at an address.

    Raises:
      OSError, EOFError: there is none. AuthenticationError: it has another key.
    """
    return _authenticated(socket.create_connection(address, HANDSHAKE_S), key, is_server=False)


def _authenticated(peer: socket.socket, key: bytes, *, is_server: bool) -> socket.socket:
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # send small frames at once
    peer.settimeout(None)
    ending = threading.Timer(HANDSHAKE_S, peer.shutdown, [socket.SHUT_RDWR])
    ending.daemon = True
    ending.start()
    steps: Sequence[Callable[[Connection, bytes], object]] = (deliver_challenge, answer_challenge)
    with contextlib.ExitStack() as unless_known:
        unless_known.callback(peer.close)
        try:
            with Connection(os.dup(peer.fileno())) as connection:
                for step in steps if is_server else reversed(steps):
                    step(connection, key)
        finally:
            ending.cancel()
        unless_known.pop_all()
    return peer
