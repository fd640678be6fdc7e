"""Progress of a pipeline on the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rolljax.console.progress import ProgressLines

if TYPE_CHECKING:
    from rolljax.data.base import Ledger


class PipelineProgress(ProgressLines):
    """Shows the progress of a pipeline. Use as a context manager."""

    def show(self, label: str, done: int, total: int, ledger: Ledger) -> None:
        """Show the progress of a stage."""
        text = f"{label}, {sum(ledger.dropped.values())} dropped"
        self._show(done, total, text, f"{text}: {done} of {total} records")

    def over(self, label: str, ledger: Mapping[str, Any]) -> None:
        """Show that a stage is finished."""
        dropped = ", ".join(f"{why} {n}" for why, n in ledger["dropped"].items())
        asked = f"; {n} answers" if (n := ledger["asked"].get("asked")) else ""
        self.say(f"{label}: {ledger['num_in']} -> {ledger['num_out']}{f' ({dropped})' if dropped else ''}{asked}")
