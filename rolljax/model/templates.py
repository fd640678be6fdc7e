"""Chat templates that came with a folder, rendered within limits of time, memory and output.

A template is a program: it can loop for days, and a single expression (`'a' * 10**10`) can take all memory before any
check runs. Therefore it is rendered in a separate process, which is killed when it takes too long.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import sys
import threading
from collections.abc import Mapping
from typing import Any

from rolljax.concurrency.child import Child, ChildError
from rolljax.errors import ConfigError, boundary
from rolljax.model import template_worker as worker

DEADLINE_S = 10.0
"""Seconds that one rendering may take; an ordinary one takes a fraction of a millisecond."""
START_S = 120.0
"""Seconds that the rendering process may take to begin."""
READY = {"template": "", "variables": {"messages": []}}
"""The request that a new process answers once it runs."""


def render(
    template: str,
    variables: Mapping[str, Any],
    *,
    day: str | None = None,
    trusted: bool = False,
    deadline_s: float = DEADLINE_S,
) -> str:
    """Render `template` with `variables` (`messages`, `tools` and others, all JSON values).

    Args:
      day: the date that the template sees, in ISO 8601; None: today.
      trusted: the template is our own; render it in this process.

    Raises:
      ConfigError: the template fails, or exceeds its limits.
    """
    if trusted:
        with boundary(ConfigError, "the chat template failed"):
            return worker.render(template, variables, day)
    try:
        return _renderer().ask({"template": template, "variables": variables, "day": day}, deadline_s)
    except ChildError as e:
        raise ConfigError(f"the chat template failed: the process that rendered it {e}") from e


class _Renderer:
    """The process that renders, one request at a time; started at its first use, and again after it was killed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: Child | None = None

    def ask(self, request: Mapping[str, Any], deadline_s: float) -> str:
        """Return the text of a request.

        Raises:
          ChildError: the process ended or did not answer in time. ConfigError: the template fails.
        """
        with self._lock, contextlib.ExitStack() as unless_answered:
            unless_answered.callback(self.close)  # also if interrupted: no request must get the next answer
            answer = self._running().ask(request, deadline_s)
            unless_answered.pop_all()
        if "error" in answer:
            raise ConfigError(f"the chat template failed: {answer['error']}")
        return answer["text"]

    def _running(self) -> Child:
        if self._child is None or not self._child.alive:
            self.close()
            command = [sys.executable, "-I", "-S", worker.__file__, json.dumps([p for p in sys.path if p])]
            self._child = Child(command, max_bytes=worker.MEMORY_BYTES)
            self._child.ask(READY, START_S)
        return self._child

    def close(self) -> None:
        """End the process."""
        child, self._child = self._child, None
        if child is not None:
            child.stop()


@functools.cache
def _renderer() -> _Renderer:
    found = _Renderer()
    atexit.register(found.close)
    return found
