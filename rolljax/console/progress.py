"""Progress output of a run: a live panel on a terminal, a line for every step elsewhere."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any, Self, cast

from rich.console import Console as RichConsole

from rolljax.console.terminal import Unfailing, duration, sparkline

LINE_EVERY_S = 5.0


class TolerantConsole(RichConsole):
    """A console that drops output which it cannot write (rich's own console would end the process)."""

    @property
    def file(self) -> IO[str]:
        """The output file: the given one, or the current standard error."""
        return cast("IO[str]", Unfailing(super().file))

    @file.setter
    def file(self, new: IO[str]) -> None:
        self._file = new


class ProgressBar:
    """Progress of one piece of work, on stderr: a bar on a terminal, lines elsewhere. Use as a context manager.

    Args:
      title: of the bar, until another text is shown. total: of the work, until another is shown.
      at_once: whether the first line comes at once, or after `LINE_EVERY_S`.
      in_bytes: the work is counted in bytes. shown: False shows no bar.
    """

    def __init__(
        self, title: str = "", total: int = 0, *, at_once: bool = False, in_bytes: bool = False, shown: bool = True
    ) -> None:
        self._title, self._total, self._in_bytes = title, total, in_bytes
        self._last_line_s = float("-inf") if at_once else time.monotonic()
        self._console = TolerantConsole(stderr=True, highlight=False)
        self._has_bar = shown and self._console.is_terminal
        self._bar: Any = None

    def __enter__(self) -> Self:
        if self._has_bar:
            from rich import progress

            amount = (progress.DownloadColumn(), progress.TransferSpeedColumn())
            columns = (
                progress.BarColumn(20),
                *(amount if self._in_bytes else (progress.MofNCompleteColumn(),)),
                progress.TimeRemainingColumn(),
                progress.TextColumn("{task.description}", markup=False),
            )
            self._bar = progress.Progress(*columns, console=self._console, transient=True)
            self._bar.start()
            self._bar.add_task(self._title, total=self._total)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, num: int) -> None:
        """Advance the bar."""
        if self._bar is not None:
            self._bar.advance(0, num)

    def show(self, done: int, total: int, text: str, line: str, *, now: bool = False) -> None:
        """Show that `done` of `total` are done: a bar with `text` on a terminal, otherwise `line`, at intervals and
        `now`."""
        if self._bar is not None:
            self._bar.update(0, completed=done, total=total, description=text)
        elif now or time.monotonic() - self._last_line_s > LINE_EVERY_S:
            self._last_line_s = time.monotonic()
            self.say(line)

    def say(self, text: str) -> None:
        """Print a permanent line."""
        self._console.print(text, markup=False, soft_wrap=True)


if TYPE_CHECKING:
    from rich.console import RenderableType

PARTS = {"update": "trainer", "eval": "evaluation", "save": "disk", "publish": "weights"}
"""Parts of a step -> the cause of waiting. A rollout's causes are found from its own parts (`waits`)."""
OF_SAMPLER = ("time/prefill_s", "time/decode_s", "time/schedule_s")
OWNERS = ("infra", "env", "agent", "limit")
"""Owners of faults that end an episode early; episodes of an owner in `LOST` take no part in credit."""
LOST = OWNERS[:2]
HISTORY = 48
"""Steps in the panel's curve of rewards."""
SHOWN_FRAC = 0.05
"""Share of a step from which on the panel names who waits."""


def waits(row: Mapping[str, float]) -> dict[str, float]:
    """Return the fraction of a step spent waiting for each component, largest first: sampler, env, host, trainer,
    evaluation, weights, disk.

    The rollout counts as the sampler's if the sampler was busy for half of it or more. Otherwise it counts as `env` if
    its slowest episode spent half of the rest or more in calls of its environment (or in an agent program), else as
    `host`: queues, worker processes, tokenizing, rewards.
    """
    rollout = row.get("time/rollout_s", 0.0)
    busy = sum(row.get(name, 0.0) for name in OF_SAMPLER)
    if "tput/sample_tok_s" in row and ("time/decode_s" not in row or busy >= rollout / 2):
        word = "sampler"
    else:
        word = "env" if row.get("time/env_s", 0.0) >= max(rollout - busy, 1e-9) / 2 else "host"
    found = {word: rollout}
    found |= {word: row.get(f"time/{part}_s", 0.0) for part, word in PARTS.items()}
    whole = max(row.get("time/step_s", 0.0), 1e-9)
    return {word: s / whole for word, s in sorted(found.items(), key=lambda item: -item[1])}


def bottleneck(row: Mapping[str, float]) -> str:
    """Return the component that the step waited for longest, and its fraction."""
    word, share = next(iter(waits(row).items()))
    return f"{word} {share:.0%}"


def judged_by(row: Mapping[str, float]) -> tuple[str, str]:
    """Return a name and the metric by which a step is judged: the loss in a supervised phase, where the reward is that
    of the reference answers."""
    return ("reward", "reward/mean") if "tput/sample_tok_s" in row else ("loss", "loss/total")


def headline(row: Mapping[str, float], before: Mapping[str, float] | None = None) -> str:
    """Return the number by which a step is judged, and its change since the previous step."""
    name, key = judged_by(row)
    value = row.get(key, 0.0)
    change = f" ({value - before[key]:+.3f})" if before and key in before else ""
    return f"{name} {value:.3f}{change}"


def step_line(phase: str, row: Mapping[str, float], num_steps: int, before: Mapping[str, float] | None = None) -> str:
    """Return one line for one step: its result, its sizes, and its waits.

    Args:
      before: the row of the previous step, of the same phase.
    """
    parts = [f"{phase} {int(row.get('phase_step', 0))}/{num_steps}", headline(row, before)]
    if "heldout/reward_mean" in row:
        parts.append(f"heldout {row['heldout/reward_mean']:.3f}")
    parts.append(f"len {row.get('rollout/len_tok', 0.0):.1f}")
    if "mismatch/k3_nat" in row:
        parts.append(f"entropy {row.get('policy/entropy_nat', 0.0):.2f}")
        parts.append(f"mismatch {row.get('mismatch/abs_max_nat', 0.0):.1e}")
    if "tput/sample_tok_s" in row:
        parts.append(f"{row['tput/sample_tok_s']:,.0f} tok/s")
    parts.append(f"{row.get('time/step_s', 0.0):.2f}s waits: {bottleneck(row)}")
    if failed := row.get("rollout/fail_frac", 0.0):
        parts.append(f"failed {failed:.0%} ({faults(row, LOST)})")
    return "  ".join(parts)


def faults(row: Mapping[str, float], owners: Sequence[str] = OWNERS) -> str:
    """Return the number of failed trajectories of a step by fault owner; empty if there are none."""
    found = {owner: int(row.get(f"faults/{owner}_n", 0)) for owner in owners}
    return ", ".join(f"{owner} {n}" for owner, n in found.items() if n)


class Console:
    """Progress of one run, on stderr; never on stdout, which belongs to results.

    Args:
      quiet: only notices are shown. color: False for none, also on a terminal that has them.
    """

    def __init__(self, *, quiet: bool = False, color: bool = True) -> None:
        self._rich = TolerantConsole(stderr=True, highlight=False, no_color=None if color else True)
        self._quiet = quiet
        self._live: Any = None
        self._steps, self._phase, self._doing = 0, "", ""
        self._before: Mapping[str, float] | None = None
        self._samples: Sequence[str] = ()
        self._curve: collections.deque[float] = collections.deque(maxlen=HISTORY)
        self._first: tuple[float, float] | None = None
        self._lock = threading.Lock()

    @property
    def is_terminal(self) -> bool:
        return self._rich.is_terminal

    def say(self, text: str) -> None:
        """Print a permanent line."""
        if not self._quiet:
            self._rich.print(text, markup=False, emoji=False, soft_wrap=True)

    def warn(self, text: str) -> None:
        """Print a permanent, highlighted line."""
        self._rich.print(f"notice: {text}", markup=False, emoji=False, soft_wrap=True, style="bold yellow")

    def start_phase(self, name: str, steps: int, done: int) -> None:
        """Start a phase of `steps` steps, `done` of them already complete."""
        self.end_phase()
        self._phase, self._steps, self._first, self._before = name, steps, None, None
        self._samples, self._doing = (), "compiling"
        self._curve.clear()
        if self.is_terminal and not self._quiet:
            from rich.live import Live

            self._live = Live(get_renderable=self._panel, console=self._rich, refresh_per_second=4, transient=True)
            self._live.start()
        else:
            self.say(f"{name}: {steps} steps" + (f", continuing after {done}" if done else "") + " (compiling)")

    def answers(self, samples: Sequence[str]) -> None:
        """Show the best and the worst answer of the newest step, a line each, safe to print."""
        self._samples = samples

    def step(self, row: Mapping[str, float]) -> None:
        """Show a completed step."""
        line = step_line(self._phase, row, self._steps, self._before)
        eta = self._eta(row)
        with self._lock:
            self._before, self._doing = row, eta
            self._curve.append(row.get(judged_by(row)[1], 0.0))
        if self._live is None:
            self.say(f"{line}  {eta}")

    def _eta(self, row: Mapping[str, float]) -> str:
        """Time to the end of the phase, at the pace since its first step here; that one compiled, so it is a bound."""
        now, step = time.monotonic(), row["phase_step"]
        left = self._steps - step
        if self._first is None:
            self._first = (now, step)
            return f"ETA below {duration(left * row['time/step_s'])}"
        start_s, first = self._first
        return f"ETA {duration(left * (now - start_s) / max(step - first, 1))}"

    def wait(self, what: str) -> None:
        """Show the start of a long operation."""
        self._doing = what

    def waiting(self, text: str) -> None:
        """Show that nothing has moved for a while (`watchdog.Watchdog`). Thread-safe."""
        if self._live is not None:
            self._doing = text
        else:
            self.say(text)

    def end_phase(self) -> None:
        """Remove the live panel; its last text stays as a line."""
        if self._live is not None:
            self._live.stop()
            self._live = None
            if self._before is not None:
                self.say(step_line(self._phase, self._before, self._steps))

    def _panel(self) -> RenderableType:
        from rich.panel import Panel
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        with self._lock:
            row, samples, curve, doing = self._before, self._samples, list(self._curve), self._doing
        done = int(row["phase_step"]) if row else 0
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column(overflow="fold")
        grid.add_row(f"step {done}/{self._steps}", ProgressBar(total=self._steps, completed=done, width=HISTORY))
        grid.add_row("", Text(doing))
        for name, text in panel_rows(row, curve, samples) if row else ():
            grid.add_row(name, Text(text, overflow="fold"))
        return Panel(grid, title=Text(self._phase), title_align="left", expand=False)


def panel_rows(row: Mapping[str, float], curve: Sequence[float], samples: Sequence[str]) -> list[tuple[str, str]]:
    """Return the panel's rows for the newest step, a name and a text each.

    Args:
      curve: rewards (losses) of the steps up to it. samples: its best and its worst answer, a line each.
    """
    name, value = headline(row).split(" ", 1)
    shares = [f"{word} {share:.0%}" for word, share in waits(row).items() if share >= SHOWN_FRAC]
    speed = [f"{row['time/step_s']:.2f} s a step", f"{row['tput/train_tok_s']:,.0f} trained"]
    if "tput/sample_tok_s" in row:
        speed.insert(1, f"{row['tput/sample_tok_s']:,.0f} sampled")
    rows = [
        (name, f"{sparkline(curve, HISTORY)} {value}"),
        ("tokens/s", ", ".join(speed[1:]) + f"; {speed[0]}"),
        ("waits for", ", ".join(shares)),
        ("faults", faults(row) or "none"),
    ]
    return [*rows, *(("answer", line.strip()) for line in samples)]
