"""How far an evaluation is, for a person: a bar on a terminal, else a line now and then; on stderr."""

from __future__ import annotations

import time
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from rolljax.evaluation.run import Standing
from rolljax.run.lines import Lines

LINE_EVERY_S = 5.0


class Progress:
    """Shows how far an evaluation is. Use as a context manager.

    Args:
      title: of the model.
    """

    def __init__(self, title: str) -> None:
        self._title, self._last_line_s = title, 0.0
        self._console = Lines(stderr=True, highlight=False)
        self._bar: Any = None

    def __enter__(self) -> Progress:
        if self._console.is_terminal:
            columns = (BarColumn(20), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
            self._bar = Bar(*columns, console=self._console, transient=True)
            self._bar.start()
            self._bar.add_task(self._title)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, standing: Standing) -> None:
        """Show how far it is."""
        over, text = standing.answers + standing.failed, describe(standing)
        if self._bar is not None:
            self._bar.update(0, completed=over, total=standing.total, description=f"{self._title}: {text}")
        elif time.monotonic() - self._last_line_s > LINE_EVERY_S or over == standing.total:
            self._last_line_s = time.monotonic()
            self.say(f"{self._title}: {over} of {standing.total} attempts, {text}")

    def say(self, text: str) -> None:
        """A line that stays."""
        self._console.print(text, markup=False, soft_wrap=True)


def describe(standing: Standing) -> str:
    """What the answers are like so far."""
    if not standing.answers and not standing.failed:
        return "compiling, or waiting for the first"
    solved = f"{standing.right / standing.answers:.1%} solved" if standing.answers else "no answer"
    solved = f"{standing.answers} judged" if not standing.scored and standing.answers else solved
    return solved + (f", {standing.failed} failed" if standing.failed else "")
