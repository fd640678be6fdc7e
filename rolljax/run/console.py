"""What a run shows while it goes on: a live line on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

LINE_EVERY_S = 5.0


def step_line(phase: str, row: Mapping[str, float], num_steps: int) -> str:
    """One line for one step: what was reached, how, and what it waited for."""
    step = int(row["phase_step"])
    parts = [f"{phase} {step}/{num_steps}"]
    sampled = "tput/sample_tok_s" in row  # in a supervised phase the reward is that of the gold answers
    parts.append(f"reward {row['reward/mean']:.3f}" if sampled else f"loss {row.get('loss/total', 0):.3f}")
    if "heldout/reward_mean" in row:
        parts.append(f"heldout {row['heldout/reward_mean']:.3f}")
    parts.append(f"len {row['rollout/len_tok']:.1f}")
    if "mismatch/k3_nat" in row:
        parts.append(f"entropy {row['policy/entropy_nat']:.2f}")
        parts.append(f"mismatch {row['mismatch/abs_max_nat']:.1e}")
    if sampled:
        parts.append(f"{row['tput/sample_tok_s']:,.0f} tok/s")
    parts.append(f"{row['time/step_s']:.2f}s waits: {bottleneck(row)}")
    if failed := row["rollout/fail_frac"]:
        parts.append(f"failed {failed:.0%}")
    return "  ".join(parts)


def bottleneck(row: Mapping[str, float]) -> str:
    """The part of the step that took longest, and its share."""
    names = {"rollout": "sampler", "update": "trainer", "eval": "evaluation", "save": "disk", "publish": "weights"}
    part = max(names, key=lambda n: row.get(f"time/{n}_s", 0.0))
    return f"{names[part]} {row.get(f'time/{part}_s', 0.0) / max(row['time/step_s'], 1e-9):.0%}"


class Console:
    """Progress of one run, on stderr; never on stdout, which belongs to results."""

    def __init__(self) -> None:
        from rich.console import Console as Rich

        self._rich = Rich(stderr=True, highlight=False)
        self._live: Any = None
        self._bar: Any = None
        self._steps = 0
        self._phase = ""
        self._last_line_s = 0.0
        self._first: tuple[float, float] | None = None

    @property
    def is_terminal(self) -> bool:
        return self._rich.is_terminal

    def say(self, text: str) -> None:
        """A line that stays."""
        self._rich.print(text, markup=False, soft_wrap=True)

    def warn(self, text: str) -> None:
        """A line that stays and is to be seen."""
        self._rich.print(f"notice: {text}", markup=False, soft_wrap=True, style="bold yellow")

    def start_phase(self, name: str, steps: int, done: int) -> None:
        """A phase of `steps` steps begins, `done` of them already behind it."""
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self.end_phase()
        self._phase, self._steps, self._first = name, steps, None
        if self.is_terminal:
            columns = (BarColumn(20), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
            self._live = Progress(*columns, console=self._rich)
            self._live.start()
            self._bar = self._live.add_task(f"{name}: compiling", total=steps, completed=done)
        else:
            self.say(f"{name}: {steps} steps" + (f", continuing after {done}" if done else "") + " (compiling)")

    def step(self, row: Mapping[str, float]) -> None:
        """A step is done."""
        line = step_line(self._phase, row, self._steps)
        if self._live is not None:
            self._live.update(self._bar, completed=row["phase_step"], description=line)
        elif time.monotonic() - self._last_line_s > LINE_EVERY_S or row["phase_step"] == self._steps:
            self._last_line_s = time.monotonic()
            self.say(f"{line}  {self._eta(row)}")

    def _eta(self, row: Mapping[str, float]) -> str:
        """Time to the end of the phase, at the pace since its first step here; that one compiled, so it is a bound."""
        now, step = time.monotonic(), row["phase_step"]
        left = self._steps - step
        if self._first is None:
            self._first = (now, step)
            return f"ETA below {left * row['time/step_s']:.0f}s"
        start_s, first = self._first
        return f"ETA {left * (now - start_s) / max(step - first, 1):.0f}s"

    def wait(self, what: str) -> None:
        """Something that takes a while begins."""
        if self._live is not None:
            self._live.update(self._bar, description=f"{self._phase}: {what}")

    def waiting(self, text: str) -> None:
        """Nothing has moved for a while (`watchdog.Watchdog`); called from another thread."""
        if (live := self._live) is not None:
            live.update(self._bar, description=f"{self._phase}: {text}")
        else:
            self.say(text)

    def end_phase(self) -> None:
        """Take the live line away."""
        if self._live is not None:
            self._live.stop()
            self._live = None
