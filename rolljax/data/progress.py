"""How far a pipeline is, for a person: a bar on a terminal, else a line now and then; on stderr."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from rolljax.run.lines import Lines

if TYPE_CHECKING:
    from rolljax.data.base import Ledger

LINE_EVERY_S = 5.0


class Progress:
    """Shows how far a pipeline is. Use as a context manager. stages: how many it has."""

    def __init__(self, stages: int) -> None:
        self._stages, self._last_line_s = stages, time.monotonic()
        self._console = Lines(stderr=True, highlight=False)
        self._bar: Any = None

    def __enter__(self) -> Progress:
        if self._console.is_terminal:
            columns = (BarColumn(20), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
            self._bar = Bar(*columns, console=self._console, transient=True)
            self._bar.start()
            self._bar.add_task("")
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, label: str, done: int, total: int, ledger: Ledger) -> None:
        """How far a stage is."""
        text = f"{label}, {sum(ledger.dropped.values())} dropped"
        if self._bar is not None:
            self._bar.update(0, completed=done, total=total, description=text)
        elif time.monotonic() - self._last_line_s > LINE_EVERY_S:
            self._last_line_s = time.monotonic()
            self.say(f"{text}: {done} of {total} records")

    def over(self, label: str, ledger: Mapping[str, Any]) -> None:
        """A stage is over."""
        dropped = ", ".join(f"{why} {n}" for why, n in ledger["dropped"].items())
        asked = f"; {n} answers" if (n := ledger["asked"].get("asked")) else ""
        self.say(f"{label}: {ledger['num_in']} -> {ledger['num_out']}{f' ({dropped})' if dropped else ''}{asked}")

    def say(self, text: str) -> None:
        """A line that stays."""
        self._console.print(text, markup=False, soft_wrap=True)
