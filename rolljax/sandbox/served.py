"""A program in a live sandbox that can reach one server of the host, and nothing else.

    program --TCP, the sandbox's own loopback--> listening socket --this process--> the server's address

The sandbox's network has no other machine in it. The host holds the listening socket, so each sandbox has its own way
to the server, and it ends with the program.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from rolljax.errors import InfraError
from rolljax.sandbox.inside.wire import CHUNK
from rolljax.sandbox.provider import Result
from rolljax.sandbox.session import Sandbox

MAX_CONNECTIONS = 64
"""Connections of one program at the same time; more wait."""
LOOK_S = 0.25
"""Seconds between two looks at the program's clock."""
CONNECT_S = 10.0


class Forward:
    """Forwards the connections of a listening socket.

    Args:
      connect: returns the socket of the other end for a new connection; None if it has refused the connection.
    """

    def __init__(self, listener: socket.socket, connect: Callable[[socket.socket], socket.socket | None]) -> None:
        self.port: int = listener.getsockname()[1]
        self.broken = ""
        """The last error of `connect`; empty while there was none."""
        self._listener, self._connect = listener, connect
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._closed = False
        self._thread(self._accept)

    def close(self) -> None:
        """End all connections."""
        with self._lock:
            self._closed = True
            sockets = [self._listener, *self._sockets]
        for s in sockets:
            with contextlib.suppress(OSError):
                s.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Forward:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @staticmethod
    def _thread(call: Callable[..., None], *args: object) -> threading.Thread:
        thread = threading.Thread(target=call, args=args, name="rolljax-sandbox-forward", daemon=True)
        thread.start()
        return thread

    def _accept(self) -> None:
        with self._listener:
            while not self._closed:
                self._free.acquire()
                try:
                    theirs, _ = self._listener.accept()
                except OSError:  # closed
                    return
                self._thread(self._serve, theirs)

    def _serve(self, theirs: socket.socket) -> None:
        """Forward one connection until either side ends it."""
        with contextlib.ExitStack() as ends:
            ends.callback(self._free.release)
            if not self._holds(theirs, ends):
                return
            try:
                ours = self._connect(theirs)
            except OSError as e:
                self.broken = str(e)
                return
            if ours is None or not self._holds(ours, ends):
                return
            ours.settimeout(None)
            back = self._thread(self._copy, ours, theirs)
            self._copy(theirs, ours)
            back.join()

    def _holds(self, end: socket.socket, ends: contextlib.ExitStack) -> bool:
        """Close a socket at the end; return whether it may be used: `close` ends it from now on."""
        ends.enter_context(end)
        with self._lock:
            if self._closed:
                return False
            self._sockets.add(end)
        ends.callback(self._leaves, end)
        return True

    def _leaves(self, end: socket.socket) -> None:
        with self._lock:
            self._sockets.discard(end)

    @staticmethod
    def _copy(source: socket.socket, target: socket.socket) -> None:
        """Copy bytes until the source ends, then end the target's input."""
        with contextlib.suppress(OSError):
            while part := source.recv(CHUNK):
                target.sendall(part)
        for s, how in ((target, socket.SHUT_WR), (source, socket.SHUT_RD)):
            with contextlib.suppress(OSError):
                s.shutdown(how)


def run_served(
    box: Sandbox,
    argv: Sequence[str],
    address: tuple[str, int],
    variables: Callable[[str], Mapping[str, str]],
    *,
    stdin: Callable[[str], bytes] = lambda url: b"",
    folder: str = "",
    deadline_s: float,
    excluded_s: Callable[[], float] = lambda: 0.0,
) -> Result:
    """Run a program in a live sandbox while it can reach a server of the host.

    Args:
      address: host and port of the server. variables, stdin: environment variables and standard input of the program,
        for the server's URL as it sees it, without a path. folder: where the program starts; empty: where the sandbox's
        files are. deadline_s: its longest time, without the seconds that `excluded_s` returns; then it is killed
        (`Result.timed_out`). excluded_s: is asked only when the program may be out of time.

    Raises:
      EnvError: the code in the sandbox has ended it. InfraError: the server or the machine has failed.
    """
    with Forward(box.listen(), lambda _: socket.create_connection(address, CONNECT_S)) as way:
        url = f"http://127.0.0.1:{way.port}"
        start = time.monotonic()
        box.start(argv, stdin(url), folder=folder, variables=variables(url))
        excluded, result = 0.0, box.wait(LOOK_S)
        while result is None:
            ran_s = time.monotonic() - start
            if ran_s - excluded > deadline_s:
                excluded = excluded_s()
            result = box.wait(LOOK_S, stop=ran_s - excluded > deadline_s or bool(way.broken))
    if way.broken:
        raise InfraError(f"the server at {address[0]}:{address[1]} cannot be reached: {way.broken}")
    return result
