"""Progress output that never ends the work it tells of: a progress bar on a terminal, occasional lines otherwise."""

from __future__ import annotations

import time
from typing import IO, Any, Self, cast

from rich.console import Console

from rolljax.run.terminal import Unfailing

LINE_EVERY_S = 5.0


class TolerantConsole(Console):
    """A console that drops what it cannot write (rich's own would end the process)."""

    @property
    def file(self) -> IO[str]:
        """Where it writes: standard error as it is now, unless a file was given."""
        return cast("IO[str]", Unfailing(super().file))

    @file.setter
    def file(self, new: IO[str]) -> None:
        self._file = new


class ProgressLines:
    """Progress output on stderr. Use as a context manager; subclasses say what makes progress.

    Args:
      title: of the bar, until something is shown. at_once: whether the first line comes at once, or after
        `LINE_EVERY_S`.
    """

    def __init__(self, title: str = "", *, at_once: bool = False) -> None:
        self._title = title
        self._last_line_s = float("-inf") if at_once else time.monotonic()
        self._console = TolerantConsole(stderr=True, highlight=False)
        self._bar: Any = None

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (BarColumn(20), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
            self._bar = Progress(*columns, console=self._console, transient=True)
            self._bar.start()
            self._bar.add_task(self._title)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _show(self, done: int, total: int, text: str, line: str, *, at_end: bool = False) -> None:
        """Show that `done` of `total` are done: a bar with `text` on a terminal, otherwise `line`, at intervals and
        `at_end`."""
        if self._bar is not None:
            self._bar.update(0, completed=done, total=total, description=text)
        elif at_end or time.monotonic() - self._last_line_s > LINE_EVERY_S:
            self._last_line_s = time.monotonic()
            self.say(line)

    def say(self, text: str) -> None:
        """A line that stays."""
        self._console.print(text, markup=False, soft_wrap=True)
