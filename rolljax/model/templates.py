"""Chat templates that came with a folder, rendered within limits of time, memory and output.

A template is a program: it can loop for days, and a single expression (`'a' * 10**10`) can take all memory before any
check runs. Therefore it is rendered in a separate process, which is killed when it takes too long.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import IO, Any

from rolljax.errors import ConfigError, boundary
from rolljax.model import template_worker as worker

DEADLINE_S = 10.0
"""Seconds that one rendering may take; an ordinary one takes a fraction of a millisecond."""
START_S = 120.0
"""Seconds that the rendering process may take to begin."""


def render(
    template: str,
    variables: Mapping[str, Any],
    *,
    day: str | None = None,
    trusted: bool = False,
    deadline_s: float = DEADLINE_S,
) -> str:
    """The text that `template` makes of `messages`, `tools` and further variables, all as JSON has them.

    Args:
      day: that it is for the template, as ISO 8601 writes it; None: today.
      trusted: the template is our own; it is rendered right here.

    Raises:
      ConfigError: the template fails, or goes beyond its limits.
    """
    if trusted:
        with boundary(ConfigError, "the chat template failed"):
            return worker.render(template, variables, day)
    request = json.dumps({"template": template, "variables": variables, "day": day}).encode()
    answer = _renderer().ask(request, deadline_s)
    if "error" in answer:
        raise ConfigError(f"the chat template failed: {answer['error']}")
    return answer["text"]


class _Renderer:
    """The process that renders, one request at a time; started at its first use, and again after it was killed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0
        """Process id: a fork begins its own."""

    def ask(self, request: bytes, deadline_s: float) -> dict[str, str]:
        with self._lock, contextlib.ExitStack() as unless_answered:
            unless_answered.callback(self.close)  # interrupted, too: what comes next belongs to nobody
            try:
                process = self._running()
                end = time.monotonic() + deadline_s
                _write(process.stdin, worker.framed(request), end)
                answer = json.loads(_read(process.stdout, end))
            except TimeoutError:
                return {"error": f"it was not done after {deadline_s:g} s"}
            except EOFError:
                return {"error": "it broke the process that rendered it"}
            unless_answered.pop_all()
            return answer

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._owner == os.getpid() and self._process.poll() is None:
            return self._process
        command = [sys.executable, "-I", "-S", worker.__file__, json.dumps([p for p in sys.path if p])]
        self._process = process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, process_group=0
        )
        self._owner = os.getpid()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
        _read(process.stdout, time.monotonic() + START_S)
        return process

    def close(self) -> None:
        """End the process, if it is this one's."""
        process, self._process = self._process, None
        if process is None or self._owner != os.getpid():
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()


@functools.cache
def _renderer() -> _Renderer:
    found = _Renderer()
    atexit.register(found.close)
    return found


def _write(pipe: IO[bytes] | None, content: bytes, end: float) -> None:
    assert pipe is not None
    left = memoryview(content)
    while left:
        _wait(pipe.fileno(), select.POLLOUT, end)
        try:
            left = left[os.write(pipe.fileno(), left) :]
        except BlockingIOError:
            continue
        except BrokenPipeError:
            raise EOFError from None


def _read(pipe: IO[bytes] | None, end: float) -> bytes:
    assert pipe is not None
    found, wanted = bytearray(), worker.LENGTH_BYTES
    while len(found) < wanted:
        _wait(pipe.fileno(), select.POLLIN, end)
        part = os.read(pipe.fileno(), max(wanted - len(found), 2**16))
        if not part:
            raise EOFError
        found += part
        if len(found) >= worker.LENGTH_BYTES:
            wanted = worker.LENGTH_BYTES + int.from_bytes(found[: worker.LENGTH_BYTES], "little")
    return bytes(found[worker.LENGTH_BYTES :])


def _wait(fd: int, event: int, end: float) -> None:
    """Until the pipe is ready. Raises `TimeoutError` at `end`."""
    poll = select.poll()
    poll.register(fd, event)
    if not poll.poll(max(end - time.monotonic(), 0) * 1000):
        raise TimeoutError
