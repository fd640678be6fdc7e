"""Files of a folder over HTTP, to read only: for hosts of a trainer that have no store in common with the samplers."""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

from rolljax import reading

MAX_CONNECTIONS = 256
IDLE_S = 60.0
"""Seconds after which a connection without a request, or that takes no bytes, is closed."""


class FileServer:
    """Serves a folder in threads of its own, until `close`.

    The first part of the path of each URL is a key; without it there is nothing. Links that lead out of the folder are
    not followed.

    Args:
      folder: the folder. host: name or address of this machine for others; the server listens on all its addresses.
      port: 0: any that is free.

    Attributes:
      folder, url: the folder, and its URL.
    """

    def __init__(self, folder: str | Path, host: str = "127.0.0.1", port: int = 0) -> None:
        self.folder = Path(folder)
        self._server = _Server(self.folder, port)
        self.url = f"http://{host}:{self._server.server_address[1]}/{self._server.key}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.05,), name="file server", daemon=True
        )
        self._thread.start()

    def __enter__(self) -> FileServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all connections; the port is free."""
        self._server.shutdown()
        self._server.server_close()
        self._server.end_connections()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    request_queue_size = 128

    def __init__(self, folder: Path, port: int) -> None:
        self.folder, self.key = folder, secrets.token_urlsafe(32)
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        super().__init__(("", port), _Handler)

    def verify_request(self, request: object, client_address: object) -> bool:
        with self._lock:
            return len(self._open) < MAX_CONNECTIONS

    def process_request(self, request: socket.socket, client_address: object) -> None:  # type: ignore[override]
        with self._lock:
            self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: socket.socket) -> None:  # type: ignore[override]
        with self._lock:
            self._open.discard(request)
        super().shutdown_request(request)

    def end_connections(self) -> None:
        with self._lock:
            for request in self._open:
                request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing: the client has gone, or waits no more."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    timeout = IDLE_S

    def do_GET(self) -> None:
        """Send a file."""
        path = self._path()
        try:
            file = reading.open_file(path) if path else None
        except OSError:  # it is missing, a folder, not for this user
            file = None
        if not file:
            self.send_response(HTTPStatus.NOT_FOUND)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        with file:
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Length", str(os.fstat(file.fileno()).st_size))
            self.end_headers()
            self.connection.sendfile(file)

    def _path(self) -> Path | None:
        """Return the file that is asked for, if it is in the folder and the key is right."""
        key, *names = urlsplit(self.path).path.removeprefix("/").split("/")
        parts = [unquote(name) for name in names]
        if not hmac.compare_digest(key.encode(), self.server.key.encode()):
            return None
        if any(part in ("", ".", "..") or "/" in part or "\0" in part for part in parts):
            return None
        path = Path(os.path.realpath(self.server.folder.joinpath(*parts)))
        return path if path.is_relative_to(os.path.realpath(self.server.folder)) else None

    def version_string(self) -> str:
        return "rolljax"

    def log_message(self, *_: object) -> None:
        """Say nothing."""
