"""Sandboxes by the verbs of ROCK's rocklet, over `rolljax.sandbox.SandboxGroup`.

    POST /create_session, /close_session  {sandbox_id, session}
    POST /run_in_session                  {sandbox_id, session, command, timeout} -> {output, exit_code, failure_reason}
    POST /execute                         {sandbox_id, command, timeout}          -> {stdout, stderr, exit_code}
    POST /read_file                       {sandbox_id, path}                      -> {content}
    POST /write_file                      {sandbox_id, path, content}             -> {success, message}
    POST /is_alive, /close                {sandbox_id}

A `sandbox_id` is the client's choice; its sandbox is made when it is first named.
"""

from __future__ import annotations

import asyncio
import base64
import threading
from collections.abc import Awaitable, Callable
from typing import Any

from rolljax.errors import ConfigError

Body = dict[str, Any]
MAX_TIMEOUT_S = 1200.0


class Shells:
    """Sandboxes by the names that clients give them."""

    def __init__(self, size: int) -> None:
        from rolljax.sandbox import SandboxGroup

        self._group = SandboxGroup(0)
        self._group.start()
        self._size = size
        self._lock = threading.Lock()
        self._ids: dict[str, str] = {}

    def verbs(self) -> dict[str, Callable[[Body], Awaitable[Body]]]:
        """Return the handler of each path."""
        calls = {
            "/create_session": self._create_session,
            "/close_session": self._close_session,
            "/run_in_session": self._run_in_session,
            "/execute": self._execute,
            "/read_file": self._read_file,
            "/write_file": self._write_file,
            "/is_alive": self._is_alive,
            "/close": self._close,
        }
        return {path: _in_thread(call) for path, call in calls.items()}

    def stop(self) -> None:
        """End all sandboxes."""
        self._group.stop()

    def _create_session(self, body: Body) -> Body:
        self._group.create_session(self._box(body), _session(body))
        return {"output": "", "session_type": "bash"}

    def _close_session(self, body: Body) -> Body:
        self._group.close_session(self._box(body), _session(body))
        return {"session_type": "bash"}

    def _run_in_session(self, body: Body) -> Body:
        box, command = self._box(body), _text(body, "command")
        result = self._group.run_in_session(box, command, _session(body), timeout_s=_timeout(body))
        return {"session_type": "bash", "expect_string": "", **result}

    def _execute(self, body: Body) -> Body:
        command = body.get("command")
        if not isinstance(command, str) and not (
            isinstance(command, list) and all(isinstance(c, str) for c in command)
        ):
            raise ConfigError("is missing, or neither a text nor a list of texts", setting="command")
        return dict(self._group.execute(self._box(body), command, _timeout(body)))

    def _read_file(self, body: Body) -> Body:
        told = self._group.read_file(self._box(body), _text(body, "path"))
        return {"content": base64.b64decode(told["content"]).decode("utf-8", "replace")}

    def _write_file(self, body: Body) -> Body:
        content = base64.b64encode(_text(body, "content").encode("utf-8", "replace")).decode()
        self._group.upload(self._box(body), _text(body, "path"), content)
        return {"success": True, "message": ""}

    def _is_alive(self, body: Body) -> Body:
        name = _text(body, "sandbox_id")
        return dict(self._group.is_alive(self._ids[name])) if name in self._ids else {"is_alive": False}

    def _close(self, body: Body) -> Body:
        with self._lock:
            box = self._ids.pop(_text(body, "sandbox_id"), None)
        if box is not None:
            self._group.remove(box)
        return {}

    def _box(self, body: Body) -> str:
        """Return the sandbox that a request names, making it at first use."""
        name = _text(body, "sandbox_id")
        with self._lock:
            if name not in self._ids:
                if len(self._ids) >= self._size:
                    raise ConfigError(f"would be more than {self._size} sandboxes", setting="sandbox_id")
                self._ids[name] = self._group.add()
            return self._ids[name]


def _text(body: Body, key: str) -> str:
    value = body.get(key)
    if not isinstance(value, str):
        raise ConfigError("is missing, or no text", setting=key)
    return value


def _session(body: Body) -> str:
    return _text(body, "session") if "session" in body else "default"


def _timeout(body: Body) -> float:
    value = body.get("timeout")
    if value is None:
        return MAX_TIMEOUT_S
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= MAX_TIMEOUT_S:
        raise ConfigError(f"must be a number up to {MAX_TIMEOUT_S:g}", setting="timeout")
    return float(value)


def _in_thread(call: Callable[[Body], Body]) -> Callable[[Body], Awaitable[Body]]:
    async def verb(body: Body) -> Body:
        return await asyncio.to_thread(call, body)

    return verb
