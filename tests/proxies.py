"""A TCP proxy that swallows bytes: the peers' connections stay open, and nothing arrives any more."""

import contextlib
import socket
import threading

UP, DOWN = "from the one that connects", "to the one that connects"


class Proxy:
    """Forwards connections to a port of this machine. `port`: where it listens."""

    def __init__(self, target):
        self.target, self.swallows_all = target, False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._swallowed: set[str] = set()
        self._connections = []
        threading.Thread(target=self._accept, daemon=True).start()

    def swallow(self, *ways, later=False):
        """Swallow the bytes that go these ways over the present connections; `later`: over new connections too."""
        self.swallows_all |= later
        for swallowed, _ in self._connections:
            swallowed.update(ways)

    def close(self):
        self._listener.close()
        for _, ends in self._connections:
            for end in ends:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def _accept(self):
        with contextlib.suppress(OSError):  # closed
            while True:
                near, _ = self._listener.accept()
                swallowed = {UP, DOWN} if self.swallows_all else set()
                try:
                    far = socket.create_connection(("127.0.0.1", self.target))
                except OSError:
                    near.close()
                    continue
                self._connections.append((swallowed, (near, far)))
                for way, source, into in ((UP, near, far), (DOWN, far, near)):
                    threading.Thread(target=self._forward, args=(way, source, into, swallowed), daemon=True).start()

    def _forward(self, way, source, into, swallowed):
        """Forward one way, with its end unless that is swallowed too."""
        with contextlib.suppress(OSError):
            while data := source.recv(2**16):
                if way not in swallowed:
                    into.sendall(data)
        if way not in swallowed:
            with contextlib.suppress(OSError):
                into.shutdown(socket.SHUT_WR)


def through_proxies(monkeypatch):
    """Let samplers that a run starts connect through a proxy each; return these by name, as they come."""
    from rolljax.cluster import launchers

    proxies, command = {}, launchers.command

    def proxied(order, name):
        if name not in proxies:
            proxies[name] = Proxy(order.address[1])
        host, port = order.address
        words = command(order, name)
        words[words.index(f"{host}:{port}")] = f"{host}:{proxies[name].port}"
        return words

    monkeypatch.setattr(launchers, "command", proxied)
    return proxies
