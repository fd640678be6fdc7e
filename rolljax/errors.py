"""Errors with an owner, and the exit code each owner ends a process with.

Every error rolljax raises on purpose is a `RolljaxError`. Its class names the room that owns it. Its text states what
is wrong, the value that caused it, where the value came from, and the remedy. Leaves also inherit the standard class a
caller would expect (`ValueError`, `RuntimeError`), so plain `except ValueError` keeps working.
"""

from __future__ import annotations

import contextlib
import functools
import traceback
import typing
from collections.abc import Iterator
from typing import Any, NamedTuple


class RolljaxError(Exception):
    """Base of all deliberate errors. `owner` is the room, `exit_code` that of a command which the error ends."""

    owner = "rolljax"
    exit_code = 1

    def _render_traceback_(self) -> list[str]:
        """Return the text that a notebook (IPython) shows: the line that called rolljax, and the message."""
        calls, where = traceback.extract_tb(self.__traceback__), []
        for (frame, _), call in zip(traceback.walk_tb(self.__traceback__), calls, strict=True):
            if str(frame.f_globals.get("__name__", "")).startswith("rolljax."):
                break
            where = [f"line {call.lineno}: {call.line}"]
        return [*where, f"{type(self).__name__}: {self}"]


class ConfigError(RolljaxError, ValueError):
    """A setting has a value that cannot be used.

    Args:
      message: what is wrong, one sentence.
      setting: the setting that is wrong: `Class.field`, or a file, flag or binding as the user typed it.
      value: the offending value, shown with `repr`; omit it if there is none.
      remedy: how to fix it: the nearest valid name, the allowed range, the setting to change.
      where: `file:line`, or the flag the value came from. `config.load` fills it in from `setting`.
    """

    owner = "config"
    exit_code = 2
    _missing = Ellipsis  # pickles to itself, which a bare object() does not

    def __init__(
        self,
        message: str,
        *,
        setting: str = "",
        value: object = _missing,
        remedy: str = "",
        where: str = "",
    ) -> None:
        self.message, self.setting, self.value, self.remedy, self.where = message, setting, value, remedy, where
        super().__init__(message)

    def located_at(self, where: str) -> ConfigError:
        """Fill in `where` unless this error has one, and return the error."""
        self.where = self.where or where
        return self

    def __str__(self) -> str:
        head = " ".join(p for p in (f"{self.where}:" if self.where else "", self.setting, self.message) if p)
        lines = [head]
        if self.value is not ConfigError._missing:
            lines.append(f"  value: {self.value!r}")
        if self.remedy:
            lines.append(f"  fix:   {self.remedy}")
        return "\n".join(lines)


class Range(NamedTuple):
    """The range of a setting that is a number: `lr: Annotated[float, Range(above=0)]`. None is within every range."""

    low: float | None = None
    high: float | None = None
    above: float | None = None
    """The lower end, excluded; `low` is included."""
    below: float | None = None
    """The upper end, excluded; `high` is included."""
    remedy: str = ""
    """Remedy of the error; empty: the default of the setting."""

    def check(self, settings: object, *names: str) -> None:
        """Check that fields of a settings object are within the range.

        Raises:
          ConfigError: one is not; it names the class, the field and the value.
        """
        low, high, above, below, remedy = self
        ends = [f"at least {low:g}" if low is not None else f"more than {above:g}" if above is not None else ""]
        ends += [f"at most {high:g}" if high is not None else f"less than {below:g}" if below is not None else ""]
        text = {"at least 0": "must not be negative", "more than 0": "must be positive"}
        what = " and ".join(end for end in ends if end)
        for name in names:
            value = getattr(settings, name)
            if value is None:
                continue
            fits = (low is None or value >= low) and (above is None or value > above)
            if not (fits and (high is None or value <= high) and (below is None or value < below)):
                setting, default = f"{type(settings).__name__}.{name}", getattr(type(settings), name, None)
                fix = remedy or (f"the default is {default:g}" if isinstance(default, int | float) else "")
                raise ConfigError(text.get(what, f"must be {what}"), setting=setting, value=value, remedy=fix)


@functools.cache
def _ranges(cls: type) -> dict[str, Range]:
    """Return the ranges that the annotations of a dataclass declare, by field."""
    found = {}
    for base in reversed(cls.__mro__):
        for name, annotation in base.__dict__.get("__annotations__", {}).items():
            if "Range(" in str(annotation):
                alone = type("_", (), {"__annotations__": {name: annotation}, "__module__": base.__module__})
                hint = typing.get_type_hints(alone, include_extras=True)[name]
                found[name] = next(part for part in hint.__metadata__ if isinstance(part, Range))
    return found


def check_fields(settings: object) -> None:
    """Check each field of a dataclass that declares a `Range`.

    Raises:
      ConfigError: see `Range.check`.
    """
    cls: Any = type(settings)
    for name, allowed in _ranges(cls).items():
        allowed.check(settings, name)


class Checked:
    """Base of dataclasses whose fields are checked when one is made. One with more to check calls `check_fields`."""

    def __post_init__(self) -> None:
        check_fields(self)


@contextlib.contextmanager
def needed(module: str, setting: str, *, install: str = "", otherwise: str = "") -> Iterator[None]:
    """Wrap the import of an optional package in the function or module that needs it.

    Args:
      module: the package's name in Python. setting: the part of rolljax that needs the package: `Class.field`, or a few
        words. install: the requirement for pip, for example an extra of rolljax; empty: `module`. otherwise: an
        alternative to installing it, for the remedy.

    Raises:
      ConfigError: the package is missing; the error's remedy is the command that installs it. ModuleNotFoundError:
        another package is missing.
    """
    try:
        yield
    except ModuleNotFoundError as e:
        if (e.name or "").partition(".")[0] != module.partition(".")[0]:
            raise
        remedy = f"pip install '{install or module}'" + (f", or {otherwise}" if otherwise else "")
        raise ConfigError(f"needs the package {module}", setting=setting, remedy=remedy) from e


class DataError(RolljaxError, ValueError):
    """Tasks cannot be made, read or split."""

    owner = "data"
    exit_code = 3


class EnvError(RolljaxError, RuntimeError):
    """An environment failed or ran past its deadline.

    stage: the call that failed (reset, step, reference_answer, close, ...).
    """

    owner = "env"
    exit_code = 3

    def __init__(self, message: str, *, stage: str = "") -> None:
        self.stage = stage
        super().__init__(message)


class InfraError(EnvError):
    """The machine, a worker, a sandbox or a server failed: not the environment's rules and not the policy's doing. The
    same episode may be tried again from its start."""

    owner = "infra"


class NeighbourError(InfraError):
    """An episode shared its worker with one that hung or crashed. It restarts, without counting as a retry, because the
    machine is not at fault."""


class SamplerError(RolljaxError, RuntimeError):
    """The sampler refused a request or came to a stop."""

    owner = "sampler"
    exit_code = 4


class TrainerError(RolljaxError, RuntimeError):
    """An update must not be published or saved (a loss or gradient is not finite)."""

    owner = "trainer"
    exit_code = 5


class CheckpointError(RolljaxError, RuntimeError):
    """A checkpoint or model folder is missing, incomplete or of another shape."""

    owner = "checkpoint"
    exit_code = 6


class OutOfMemory(RolljaxError, RuntimeError):
    """A device or the host ran out of memory during a run. Files already committed to the run folder remain."""

    owner = "memory"
    exit_code = 8


class StorageError(RolljaxError, RuntimeError):
    """The run folder cannot be written: the disk is full, the folder is read-only, or access is denied. Files already
    committed to it remain."""

    owner = "storage"
    exit_code = 74


class HangError(RolljaxError, TimeoutError):
    """A named wait ran past its deadline."""

    owner = "hang"
    exit_code = 7


EXIT_PREEMPTED = 75
"""Exit code of a run that saved and stopped on request; the same command continues it."""

EXIT_INTERRUPTED = 130
"""Exit code after a second Ctrl-C, which does not wait for a save."""


@contextlib.contextmanager
def boundary(error: type[RolljaxError], doing: str) -> Iterator[None]:
    """Turn a foreign exception into `error` with a description of the operation. Ours pass through unchanged."""
    try:
        yield
    except RolljaxError:
        raise
    except Exception as e:  # border: foreign exceptions get an owner
        raise error(f"{doing}: {type(e).__name__}: {e}") from e
