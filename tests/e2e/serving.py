"""A server in this process, and hand-made connections to it."""

import contextlib
import json
import socket
import threading
import time

import httpx2
import openai

from rolljax import serve
from rolljax.serving.server import Service

KEY = "sesame"


class Running:
    """A server in a thread of its own."""

    def __init__(self, sampler, served, limits, keep_alive_s=5):
        self.service = Service(sampler, served, limits)
        self.server = self.service.make_server(keep_alive_s=keep_alive_s, closing_s=5)
        listener = serve.listen("127.0.0.1", 0)
        self.address = listener.getsockname()
        self.url = f"http://127.0.0.1:{self.address[1]}"
        self._thread = threading.Thread(target=self.server.run, kwargs={"sockets": [listener]})
        self._thread.start()
        while not self.server.started:
            time.sleep(0.005)

    def client(self, kind=openai.OpenAI):
        return kind(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0, timeout=60)

    def post(self, path, body, **headers):
        content = body if isinstance(body, (bytes, str)) else json.dumps(body)
        kind = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
        return httpx2.post(self.url + path, content=content, headers=kind | headers, timeout=60)

    def close(self):
        self.server.should_exit = True
        self._thread.join()
        self.service.close()


def until(condition, seconds=60):
    """Wait for an event that must come soon."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not happen"
        time.sleep(0.005)


def connect(running, data=b""):
    """Open a connection and send `data`."""
    connection = socket.create_connection(running.address, timeout=60)
    with contextlib.suppress(OSError):  # closed while we send: what was answered can be read still
        connection.sendall(data)
    return connection


def head(*lines, method="POST", path="/v1/completions", body=None):
    """Return a request with the right headers, further ones, and a body with a correct length header."""
    fields = ["Host: x", f"Authorization: Bearer {KEY}", "Content-Type: application/json", *lines]
    if body is not None:
        fields.append(f"Content-Length: {len(body)}")
    return "\r\n".join([f"{method} {path} HTTP/1.1", *fields, "", ""]).encode("latin-1") + (body or b"")


def received(connection, until):
    """Read up to and including some bytes."""
    connection.settimeout(60)
    data = b""
    while until not in data:
        more = connection.recv(65536)
        assert more, data
        data += more
    connection.close()
    return data


def everything(connection):
    """Read until the other side closes."""
    data = b""
    with connection, contextlib.suppress(ConnectionError):
        while more := connection.recv(65536):
            data += more
    return data


def status(data):
    """Return the status of the first answer; 0 if there is none."""
    return int(data.split(b" ", 2)[1]) if data.startswith(b"HTTP/1.") else 0
