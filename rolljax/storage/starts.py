"""The starts of a run, `starts.jsonl`: a line for each process that has led the run, in order; no line is ever removed.

The number of a start is the run's epoch. Samplers and stores of weights refuse a process of an earlier epoch: it has
been replaced, even if it still runs.
"""

from __future__ import annotations

import dataclasses
import datetime
from pathlib import Path
from typing import Any

from rolljax.fields import Fields
from rolljax.storage import journal
from rolljax.storage.layout import STARTS


@dataclasses.dataclass(frozen=True)
class RunStart:
    """One start of a run."""

    epoch: int
    """Number of the start, from 1."""
    time: str
    """ISO 8601, with the time zone."""
    fresh: bool = False
    """The run in the folder was deleted first (`--fresh`)."""
    after: str = ""
    """How the process before ended, if `train --restarts` started this one."""


def count(run: Path) -> int:
    """Return the number of starts of a run. Raises as `restarts` does."""
    return journal.read_bytes(run / STARTS).count(b"\n")


def add(run: Path, *, fresh: bool, after: str) -> int:
    """Add a start, and return its epoch. The folder is locked by this process.

    A start whose line is torn did not happen. A damaged line counts, so that the epoch grows all the same.

    Raises:
      StorageError: it cannot be written. CheckpointError: the file cannot be read.
    """
    path = run / STARTS
    found = journal.parse(journal.read_bytes(path), _start)
    epoch = 1 + max([start.epoch for start in found.values] + [len(found.values) + found.damaged])
    now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    journal.append(path, dataclasses.asdict(RunStart(epoch, now, fresh, after)))
    return epoch


def restarts(run: Path) -> list[RunStart]:
    """Return the restarts of the run that is in a folder, without those of a run that was deleted (`--fresh`).

    Raises:
      CheckpointError: the file cannot be read.
    """
    starts = journal.read_lines(run / STARTS, _start)
    first = max((i for i, start in enumerate(starts) if start.fresh), default=0)
    return [start for start in starts[first:] if start.after]


def _start(record: Any) -> RunStart:
    of = Fields(record)
    return RunStart(of.whole("epoch", low=1), of.text("time"), of.flag("fresh"), of.text("after"))
