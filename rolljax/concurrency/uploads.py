"""Slow writes while the caller works: each upload runs in a thread of its own, and the next one waits for it."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable

from rolljax.errors import HangError


class Uploads:
    """Runs one upload at a time. Its methods are for one thread at a time. The end of the process waits for no upload.

    Args:
      name: of the uploads, for errors. deadline_s: longest time that one may take.
    """

    def __init__(self, name: str, deadline_s: float) -> None:
        self._name, self._deadline_s = name, deadline_s
        self._last: concurrent.futures.Future[None] | None = None

    def start(self, upload: Callable[[], None]) -> None:
        """Wait for the upload before, then start this one and return.

        Raises:
          HangError: the one before has not ended in time. Also the exception of the one before. In both cases this one
            is not started.
        """
        self.wait()
        self._last = concurrent.futures.Future()
        threading.Thread(target=_run, args=(upload, self._last), name="rolljax-upload", daemon=True).start()

    def wait(self) -> None:
        """Wait for the upload under way, if there is one. Raises as `start` does; an upload's exception once."""
        last = self._last
        if last is None:
            return
        if not concurrent.futures.wait([last], self._deadline_s).done:
            raise HangError(f"waited {self._deadline_s:g} s for {self._name}")
        self._last = None
        last.result()


def _run(upload: Callable[[], None], done: concurrent.futures.Future[None]) -> None:
    try:
        upload()
    except BaseException as e:  # border: the thread that waits raises it
        done.set_exception(e)
    else:
        done.set_result(None)
