"""Shared helpers of the adapters: optional libraries, borrowed global randomness."""

from __future__ import annotations

import contextlib
import importlib
import random
import sys
import threading
from collections.abc import Iterator
from typing import Any

from rolljax.errors import needed

MAX_ACTION_CHARS = 8192
"""Maximum length of a move in an adapted game; a longer text is not a move."""

_GLOBAL = threading.Lock()


def library(name: str, install: str) -> Any:
    """Import the module `name`; if it is missing, raise an error that names the package to install."""
    with needed(name, "environment", install=install):
        return importlib.import_module(name)


class BorrowedRandom:
    """Lends the process's global `random` generator (and NumPy's, if NumPy is loaded) to one episode.

    Inside `with`, the global generators have this episode's own state; afterwards the previous state is restored. So
    concurrent episodes do not influence each other, and other code of the process does not influence them. Only one
    episode at a time is inside; the others wait.
    """

    def __init__(self, seed: int) -> None:
        self._python: Any = random.Random(seed).getstate()
        self._numpy: Any = None
        self._seed = seed

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """Give the global generators this episode's state; on exit save it and restore the previous state."""
        with _GLOBAL:
            numpy_random = sys.modules["numpy"].random if "numpy" in sys.modules else None
            python, numpy = random.getstate(), numpy_random and numpy_random.get_state()
            random.setstate(self._python)
            if numpy_random:
                if self._numpy is None:
                    numpy_random.seed(self._seed % 2**32)
                else:
                    numpy_random.set_state(self._numpy)
            try:
                yield
            finally:
                self._python = random.getstate()
                random.setstate(python)
                if numpy_random:
                    self._numpy = numpy_random.get_state()
                    numpy_random.set_state(numpy)
