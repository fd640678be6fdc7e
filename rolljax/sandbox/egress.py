"""A way from a sandbox to named servers and to nothing else: an HTTP proxy that opens tunnels.

    program --CONNECT host:port, the sandbox's own loopback--> this process: is it allowed? --> host:port

The program does the encryption (TLS) itself, so this process sees names and sizes, and no content.
"""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Sequence

from rolljax.errors import ConfigError
from rolljax.sandbox.served import CONNECT_S, Forward
from rolljax.sandbox.session import Sandbox

PLACE = re.compile(r"(\*\.)?[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?:[0-9]{1,5}")
MAX_HEAD_BYTES = 8192
HEAD_S = 10.0
"""Seconds in which a program must say where it wants to connect."""


class Refused(Exception):
    """A program asked for what the proxy does not do. status: of HTTP."""

    def __init__(self, status: str, why: str) -> None:
        super().__init__(why)
        self.status = status


def check_egress(allowed: Sequence[str], setting: str) -> None:
    """Raise `ConfigError` if a name of an allow-list is not `host:port` or `*.domain:port`."""
    remedy = "name a host and a port: 'pypi.org:443', '*.pythonhosted.org:443'"
    for place in allowed:
        if not PLACE.fullmatch(place) or not 0 < int(place.rpartition(":")[2]) < 65536:
            raise ConfigError("is no server", setting=setting, value=place, remedy=remedy)


class Egress:
    """The proxy of one live sandbox. It ends with `close`.

    allowed: `host:port`, or `*.domain:port` for every host below a domain. num_refused: connections to others.
    """

    def __init__(self, box: Sandbox, allowed: Sequence[str]) -> None:
        self.allowed = frozenset(place.lower() for place in allowed)
        self.num_refused = 0
        self._forward = Forward(box.listen(), self._connect)

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables by which programs find the proxy."""
        url, own = f"http://127.0.0.1:{self._forward.port}", "127.0.0.1,localhost"
        return {"HTTPS_PROXY": url, "https_proxy": url, "NO_PROXY": own, "no_proxy": own}

    def close(self) -> None:
        """End all connections, and accept no more."""
        self._forward.close()

    def allows(self, host: str, port: int) -> bool:
        """Return whether a program may connect to a server."""
        host = host.lower().rstrip(".")
        above = [f"*.{part}" for i, c in enumerate(host) if c == "." and (part := host[i + 1 :])]
        return any(f"{name}:{port}" in self.allowed for name in (host, *above))

    def _connect(self, theirs: socket.socket) -> socket.socket | None:
        """Return a connection to the server that a program asks for; None if the program was refused or hung up."""
        theirs.settimeout(HEAD_S)
        head = b""
        while b"\r\n\r\n" not in head and len(head) < MAX_HEAD_BYTES:
            part = theirs.recv(MAX_HEAD_BYTES - len(head))
            if not part:
                return None
            head += part
        head, _, rest = head.partition(b"\r\n\r\n")
        try:
            ours = self._opened(head)
        except Refused as e:
            body = f"{e}\n".encode()
            told = f"HTTP/1.1 {e.status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            theirs.sendall(told.encode() + body)
            return None
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(ours.close)
            theirs.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
            theirs.settimeout(None)
            ours.sendall(rest)
            on_failure.pop_all()
        return ours

    def _opened(self, head: bytes) -> socket.socket:
        """Open the connection that the head of a request asks for."""
        if len(head) == MAX_HEAD_BYTES:
            raise Refused("431 Request Header Fields Too Large", f"at most {MAX_HEAD_BYTES} bytes")
        method, _, target = head.split(b"\r\n", 1)[0].decode("latin-1").partition(" ")
        host, _, port = target.partition(" ")[0].rpartition(":")
        if method != "CONNECT":
            raise Refused("405 Method Not Allowed", "this proxy only opens tunnels (CONNECT), for HTTPS")
        if not port.isascii() or not port.isdigit() or not self.allows(host, int(port)):
            self.num_refused += 1
            raise Refused("403 Forbidden", f"allowed are {', '.join(sorted(self.allowed))}")
        try:
            return socket.create_connection((host, int(port)), CONNECT_S)
        except OSError as e:
            raise Refused("502 Bad Gateway", f"{host}:{port} cannot be reached: {e}") from e
