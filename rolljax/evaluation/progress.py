"""Progress of an evaluation on the terminal."""

from __future__ import annotations

from rolljax.console.progress import ProgressLines
from rolljax.evaluation.run import Standing


class EvaluationProgress(ProgressLines):
    """Shows the progress of an evaluation. Use as a context manager.

    Args:
      title: of the model.
    """

    def __init__(self, title: str) -> None:
        super().__init__(title, at_once=True)

    def show(self, standing: Standing) -> None:
        """Show the progress."""
        over, total, text = standing.answers + standing.failed, standing.total, describe(standing)
        line = f"{self._title}: {over} of {total} attempts, {text}"
        self._show(over, total, f"{self._title}: {text}", line, at_end=over == total)


def describe(standing: Standing) -> str:
    """Return a short summary of the answers so far."""
    if not standing.answers and not standing.failed:
        return "compiling, or waiting for the first"
    solved = f"{standing.right / standing.answers:.1%} solved" if standing.answers else "no answer"
    solved = f"{standing.answers} judged" if not standing.scored and standing.answers else solved
    return solved + (f", {standing.failed} failed" if standing.failed else "")
