"""The interface of trackers: programs outside of the run folder that receive a run's rows, texts and figures."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import tempfile
from collections.abc import Iterator, Mapping
from importlib import util
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

from rolljax.errors import ConfigError

Outcome = Literal["done", "stopped", "failed"]
"""The end of a run: all its phases are done; it was stopped or its process is gone, and it may resume; an error."""
Row = Mapping[str, Any]
"""A row of metrics.jsonl: numbers by name, and `phase`, a string."""
PLACE = ("step", "phase")
"""Entries of a row that are not metrics."""
EVERY_ROW = "time/step_s"
"""A metric that every row has."""


class Tracker(Protocol):
    """One run in a tracker. It lives in a process of its own, which calls one method at a time.

    Its exceptions are counted and reported once; the run continues (`feed.Feed`).
    """

    def last_step(self) -> int:
        """Return the newest step whose row it keeps, 0 if there is none: rows up to it are not sent again."""

    def log(self, step: int, row: Row) -> None:
        """Receive the row of a step, as in metrics.jsonl; steps only grow."""

    def text(self, step: int, name: str, text: str) -> None:
        """Receive a text of a step, such as a good and a bad answer. It may hold anything a model can write."""

    def figure(self, step: int, name: str, png: bytes) -> None:
        """Receive a picture of a step."""

    def close(self, outcome: Outcome) -> None:
        """Save everything received, and end."""


@dataclasses.dataclass(frozen=True)
class RunInfo:
    """The run that a tracker is opened for."""

    name: str
    """Name of the run folder."""
    id: str
    """16 hex digits, the same whenever this run resumes."""
    run_dir: Path
    """The run folder."""
    folder: Path
    """One in it for the tracker's own state."""
    settings: Mapping[str, Any]
    """Every setting of the run by its path, defaults included."""
    done: int = 0
    """Steps that are done. Rows of later ones that a tracker holds are of a process that was killed, and come again."""


@dataclasses.dataclass(frozen=True)
class TrackerConfig(abc.ABC):
    """Settings of a tracker. A subclass is a frozen dataclass in a module that can be imported."""

    package: ClassVar[str] = ""
    """The module that `open` imports; a run with a tracker whose package is not installed does not start."""
    extra: ClassVar[str] = ""
    """The extra of rolljax that brings it."""

    @abc.abstractmethod
    def open(self, run: RunInfo) -> Tracker:
        """Start a run in the tracker, or resume the one with the same `run.id`."""

    def check(self) -> None:
        """Check everything that can be checked without opening anything.

        Raises:
          ConfigError: the package is not installed.
        """
        if self.package and util.find_spec(self.package) is None:
            remedy = f"pip install '{f'rolljax[{self.extra}]' if self.extra else self.package}', or leave it out"
            raise ConfigError(
                f"needs the package {self.package}, which is not installed",
                setting="Recipe.trackers",
                value=type(self).__name__,
                remedy=remedy,
            )


def numbers(row: Row) -> dict[str, float]:
    """Return the entries of a row that are numbers, without the step itself."""
    return {name: value for name, value in row.items() if name not in PLACE and isinstance(value, (int, float))}


def flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with values that every tracker accepts: numbers, flags, strings, and the rest as text."""
    return {name: v if isinstance(v, (bool, int, float, str)) else repr(v) for name, v in settings.items()}


@contextlib.contextmanager
def png_file(png: bytes, name: str = "figure.png") -> Iterator[str]:
    """Write a picture to a temporary file inside this context; yield its path."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, name)
        path.write_bytes(png)
        yield str(path)
