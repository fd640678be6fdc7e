"""Restarts of a run: `python -m rolljax.train ... --restarts N`.

A parent process runs the same command without `--restarts` as its child, and again after an end from which the run can
continue. The parent holds nothing of the run: no device, no lock, no settings. A child ends when its parent does.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rolljax.concurrency import child, signals
from rolljax.errors import EXIT_PREEMPTED, HangError, InfraError, SamplerError
from rolljax.storage import journal, starts
from rolljax.storage.layout import METRICS

PROGRAM = (sys.executable, "-m", "rolljax.train")
AFTER_SIGNALS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT)
"""Signals after which a run is restarted. The kernel sends the first one when memory runs out."""
AFTER_CODES = (InfraError.exit_code, SamplerError.exit_code, HangError.exit_code)
"""Exit codes after which a run is restarted."""
AFTER = "ROLLJAX_RESTARTED_AFTER"
"""The variable that tells a restarted process how the one before ended."""
PAUSE_S, MAX_PAUSE_S = 1.0, 60.0
"""Seconds before the first restart; each further pause is twice as long, up to the second number."""
_LOOK_S = 0.05


def supervise(arguments: Sequence[str], run_dir: Path, restarts: int, program: Sequence[str] = PROGRAM) -> int:
    """Run a training command, and up to `restarts` times again; return the exit code of its last process.

    It is run again after `AFTER_SIGNALS` and `AFTER_CODES`, unless it has made no step since the restart before.
    SIGTERM and Ctrl-C are passed on, and nothing is restarted after them.

    Args:
      arguments: of the command. run_dir: its run folder. program: the program to run with these arguments.
    """
    arguments, earlier = without("--restarts", arguments, has_value=True), starts.count(run_dir)
    stops, steps, after = _Stops(), set[int](), ""
    with signals.handled(stops.pass_on, *signals.STOP):
        for number in range(1, restarts + 2):
            code = stops.run([*program, *arguments], after)
            if stops.arrived or not (-code in AFTER_SIGNALS or code in AFTER_CODES):
                break
            before, steps = steps, recorded_steps(run_dir)
            after = f"{child.how_it_ended(code)} after step {len(steps)}"
            if number > restarts:
                say(f"the run {after}; --restarts allows no more restarts")
                break
            if number > 1 and not steps - before:
                say(f"the run {after}, and has made no step since its restart; it is not restarted again")
                break
            if starts.count(run_dir) > earlier:  # the run that was there before is deleted
                arguments = without("--fresh", arguments)
            pause = pause_s(number)
            say(f"{time.strftime('%X')}: the run {after}; restart {number} of {restarts} in {pause:g} s")
            if stops.arrives_within(pause):
                say("stopped; the same command continues from the last checkpoint")
                return EXIT_PREEMPTED
    if stops.arrived and -code in signals.STOP:  # it did not handle signals yet: there was nothing to save
        return EXIT_PREEMPTED
    return code if code >= 0 else 128 - code  # as shells do


class _Stops:
    """The signals to stop that this process gets; they are passed on to the child that runs."""

    def __init__(self) -> None:
        self.arrived = False
        self._process: subprocess.Popen[bytes] | None = None

    def pass_on(self, number: int) -> None:
        """Handle a signal."""
        self.arrived = True
        if self._process is not None:
            self._process.send_signal(number)

    def run(self, command: Sequence[str], after: str) -> int:
        """Run a command to its end; return its exit code, negative for a signal. after: see `AFTER`."""
        with child.attached(command, os.environ | ({AFTER: after} if after else {})) as self._process:
            if self.arrived:  # before there was a child
                self._process.send_signal(signal.SIGTERM)
            code = self._process.wait()
        self._process = None
        return code

    def arrives_within(self, seconds: float) -> bool:
        """Wait so long, or until a signal arrives; return whether one has."""
        end = time.monotonic() + seconds
        while not self.arrived and time.monotonic() < end:
            time.sleep(_LOOK_S)
        return self.arrived


def pause_s(number: int) -> float:
    """Return the seconds before restart `number`, counted from 1."""
    return min(PAUSE_S * 2.0 ** min(number - 1, 30), MAX_PAUSE_S)


def recorded_steps(run_dir: Path) -> set[int]:
    """Return a hash of the row of each step on record. A step that is made again has another row: its seconds differ.

    Raises:
      CheckpointError: the rows cannot be read.
    """
    return {
        hash(line) for line in journal.read_bytes(run_dir / METRICS).splitlines(keepends=True) if line[-1:] == b"\n"
    }


def without(flag: str, arguments: Sequence[str], *, has_value: bool = False) -> list[str]:
    """Return the arguments of a command line without a flag, in whatever form argparse takes it."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument(flag, action="store" if has_value else "store_true")
    return parser.parse_known_args(arguments)[1]


def say(text: str) -> None:
    """Print a notice."""
    show_cursor = "\x1b[?25h" if sys.stderr.isatty() else ""  # which a run that was killed may have hidden
    print(f"{show_cursor}{text}", file=sys.stderr, flush=True)
