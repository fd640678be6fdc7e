"""A console whose reader may go, and on it how far something is: a bar on a terminal, else a line now and then."""

from __future__ import annotations

import time
from typing import Any, Self

from rich.console import Console

LINE_EVERY_S = 5.0


class Lines(Console):
    """A console that falls silent when nobody reads its pipe any more (rich's own would end the process)."""

    def on_broken_pipe(self) -> None:
        """Say nothing from here on."""
        self.quiet = True


class ProgressLines:
    """How far something is, for a person, on stderr. Use as a context manager; subclasses say what it is.

    Args:
      title: of the bar, until something is shown. at_once: whether the first line comes at once, or after
        `LINE_EVERY_S`.
    """

    def __init__(self, title: str = "", *, at_once: bool = False) -> None:
        self._title = title
        self._last_line_s = float("-inf") if at_once else time.monotonic()
        self._console = Lines(stderr=True, highlight=False)
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
        """Show that `done` of `total` are done: `text` beside the bar, or where there is none `line`; that comes in any
        case `at_end`."""
        if self._bar is not None:
            self._bar.update(0, completed=done, total=total, description=text)
        elif at_end or time.monotonic() - self._last_line_s > LINE_EVERY_S:
            self._last_line_s = time.monotonic()
            self.say(line)

    def say(self, text: str) -> None:
        """A line that stays."""
        self._console.print(text, markup=False, soft_wrap=True)
