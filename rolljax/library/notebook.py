"""A run's progress in a notebook: one output that is redrawn, instead of lines that scroll."""

from __future__ import annotations

import collections
import html
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rolljax.console.progress import Console, step_line
from rolljax.storage.curves import png

if TYPE_CHECKING:
    from matplotlib.figure import Figure

REDRAW_S = 0.5
"""Shortest time between two drawings."""
NUM_LINES = 8
"""Lines that are shown below the curve."""
WIDTH, HEIGHT, PAD = 560, 120, 6
"""Size of the curve, in pixels."""
NUM_POINTS = 280
"""Most points of the curve."""


def is_notebook() -> bool:
    """Return whether this process runs the cells of a notebook (an IPython kernel)."""
    if "IPython" not in sys.modules:
        return False
    from IPython import get_ipython

    return hasattr(get_ipython(), "kernel")


def console_of(progress: bool) -> RefreshedConsole:
    """Return where a run shows its progress: the cell's output in a notebook, else stderr; nowhere without
    `progress`."""
    if not progress:
        return SilentConsole()
    return NotebookConsole() if is_notebook() else RefreshedConsole()


class RefreshedConsole(Console):
    """A console that is called again and again from the thread that waits for the run."""

    def refresh(self, *, at_end: bool = False) -> None:
        """Show the changes."""


class SilentConsole(RefreshedConsole):
    """Console that shows nothing."""

    def say(self, text: str) -> None:
        pass

    def warn(self, text: str) -> None:
        pass

    def start_phase(self, name: str, steps: int, done: int) -> None:
        pass

    def step(self, row: Mapping[str, float], samples: Sequence[str] = ()) -> None:
        pass

    def waiting(self, text: str) -> None:
        pass


class NotebookConsole(RefreshedConsole):
    """Shows the phase, a progress bar, the reward curve, the metrics of the newest step, and the last lines. The
    threads of a run update its contents; `refresh` draws them, in the thread of the cell."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._lines: collections.deque[str] = collections.deque(maxlen=NUM_LINES)
        self._notices: collections.deque[str] = collections.deque(maxlen=NUM_LINES)
        self._rewards: list[tuple[float, float]] = []
        self._heldout: list[tuple[float, float]] = []
        self._name, self._num_steps, self._done, self._doing, self._line = "", 0, 0, "starting", ""
        self._handle: Any = None
        self._is_dirty, self._drawn_s = True, 0.0

    def refresh(self, *, at_end: bool = False) -> None:
        from IPython.display import display

        if not self._is_dirty or (not at_end and time.monotonic() - self._drawn_s < REDRAW_S):
            return
        self._is_dirty, self._drawn_s = False, time.monotonic()
        if self._handle is None:
            self._handle = display(self, display_id=True)
        else:
            self._handle.update(self)

    def say(self, text: str) -> None:
        with self._changing():
            self._lines.append(text)

    def warn(self, text: str) -> None:
        with self._changing():
            self._notices.append(text)

    def start_phase(self, name: str, steps: int, done: int) -> None:
        with self._changing():
            self._name, self._num_steps, self._done, self._doing, self._line = name, steps, done, "compiling", ""

    def step(self, row: Mapping[str, float], samples: Sequence[str] = ()) -> None:
        with self._changing():
            self._done, self._doing = int(row["phase_step"]), ""
            self._line = step_line(self._name, row, self._num_steps)
            if "tput/sample_tok_s" in row:  # in a supervised phase the reward is that of the reference answers
                self._rewards.append((row["step"], row["reward/mean"]))
            if "heldout/reward_mean" in row:
                self._heldout.append((row["step"], row["heldout/reward_mean"]))

    def wait(self, what: str) -> None:
        with self._changing():
            self._doing = what

    def waiting(self, text: str) -> None:
        self.wait(text)

    def end_phase(self) -> None:
        with self._changing():
            self._doing = ""

    def _changing(self) -> threading.Lock:
        self._is_dirty = True
        return self._lock

    def __repr__(self) -> str:
        with self._lock:
            return "\n".join([self._line or f"{self._name}: {self._doing}", *self._notices, *self._lines])

    def _repr_html_(self) -> str:
        with self._lock:
            share = self._done / self._num_steps if self._num_steps else 0.0
            doing = f" · {self._doing}" if self._doing else ""
            said = [f"<b>{html.escape(text)}</b>" for text in self._notices] + [*map(html.escape, self._lines)]
            head = html.escape(f"{self._name} {self._done}/{self._num_steps}{doing}" if self._name else self._doing)
            curve = curve_svg(self._rewards, self._heldout)
            line = html.escape(self._line)
        bar = f"<progress value='{share:.4f}' max='1' style='width:{WIDTH // 2}px'></progress>"
        numbers = f"<pre style='margin:0;white-space:pre-wrap'>{line}</pre>" if line else ""
        lines = "\n".join(said)
        return f"<div>{bar} {head}</div>{curve}{numbers}<pre style='margin:0;white-space:pre-wrap'>{lines}</pre>"


def curve_svg(rewards: Sequence[tuple[float, float]], heldout: Sequence[tuple[float, float]]) -> str:
    """Draw rewards over steps as a line and held-out ones as dots, both (step, reward); empty with fewer than two
    steps. The curve has the colour of the surrounding text, so that it suits light and dark pages."""
    if len(rewards) < 2:
        return ""
    every = [*rewards, *heldout]
    left, right = min(x for x, _ in every), max(x for x, _ in every)
    low, high = min(0.0, *(y for _, y in every)), max(1.0, *(y for _, y in every))

    def place(point: tuple[float, float]) -> tuple[float, float]:
        x = PAD + (point[0] - left) / max(right - left, 1) * (WIDTH - 2 * PAD)
        return round(x, 1), round(HEIGHT - PAD - (point[1] - low) / (high - low) * (HEIGHT - 2 * PAD), 1)

    stride = -(-len(rewards) // NUM_POINTS)
    line = " ".join(f"{x},{y}" for x, y in map(place, rewards[::stride]))
    dots = "".join(f"<circle cx='{x}' cy='{y}' r='3' fill='currentColor'/>" for x, y in map(place, heldout))
    frame = f"<line x1='{PAD}' x2='{WIDTH - PAD}' y1='{{0}}' y2='{{0}}' stroke='currentColor' opacity='0.2'/>"
    ends = "".join(frame.format(y) for y in (PAD, HEIGHT - PAD))
    return (
        f"<svg width='{WIDTH}' height='{HEIGHT}' role='img' aria-label='reward over steps'>{ends}"
        f"<polyline points='{line}' fill='none' stroke='currentColor' stroke-width='1.5'/>{dots}"
        f"<text x='{PAD}' y='{PAD + 11}' font-size='10' fill='currentColor'>reward, {low:g} to {high:g}; "
        "dots: held out</text></svg>"
    )


def shown_figure(drawn: Figure) -> Figure:
    """Make a notebook show a figure that is the value of a cell, with or without matplotlib's own support."""
    drawn._repr_png_ = lambda: png(drawn)  # type: ignore[attr-defined]
    return drawn
