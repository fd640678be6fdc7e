"""An engine on a mesh of several processes: one of them decides, and the others repeat its calls in their order.

Weights, decode state and logits lie on the mesh, so that every process has its part of them and none is sent: only what
the scheduler made on the host travels, page tables and tokens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from rolljax.sampler.worker import LOCKSTEP_CALLS, EngineWorker

Broadcast = Callable[[str, Any], contextlib.AbstractContextManager[None]]


class LockstepEngine:
    """The worker of the process that decides: every call of `LOCKSTEP_CALLS` is told to the others, then done here.

    Args:
      broadcast: around every call; tells the others "engine" and (method, arguments, keyword arguments), which they
        call on a worker of their own (`cluster.lockstep.Leader.turn`).
    """

    def __init__(self, worker: EngineWorker, broadcast: Broadcast) -> None:
        self._worker, self._broadcast = worker, broadcast

    def __getattr__(self, name: str) -> Any:
        local = getattr(self._worker, name)
        if name not in LOCKSTEP_CALLS:
            return local

        def call(*args: Any, **kwargs: Any) -> Any:
            with self._broadcast("engine", (name, args, kwargs)):
                return local(*args, **kwargs)

        return call
