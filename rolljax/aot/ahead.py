"""Programs that are compiled side by side, before their first call."""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Callable, Sequence
from typing import Any


class CompileAhead:
    """Compiles programs in threads, from now on. The first call of each then finds it compiled.

    JAX shares what `lower(...).compile()` made with later calls whose arguments have the same shapes, dtypes and
    shardings. Of other arguments the call compiles a program of its own.

    Args:
      lower: a function for each program, which traces it and returns what has a `compile` (`jax.stages.Lowered`).
    """

    def __init__(self, lower: Sequence[Callable[[], Any]]) -> None:
        threads = max(1, min(len(lower), os.cpu_count() or 1))
        pool = concurrent.futures.ThreadPoolExecutor(threads, "rolljax-compile")
        self._futures = [pool.submit(lambda one: one().compile(), one) for one in lower]
        pool.shutdown(wait=False)

    def wait(self) -> None:
        """Wait until all are compiled. Of a program that cannot be, the first call says why."""
        concurrent.futures.wait(self._futures)
        self._futures = []
