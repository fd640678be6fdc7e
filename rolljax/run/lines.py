"""A console whose reader may go."""

from __future__ import annotations

from rich.console import Console


class Lines(Console):
    """A console that falls silent when nobody reads its pipe any more (rich's own would end the process)."""

    def on_broken_pipe(self) -> None:
        """Say nothing from here on."""
        self.quiet = True
