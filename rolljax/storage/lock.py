"""Folders that are written by one process alone, and hold nothing of others: of runs, evaluations, pipelines."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

from rolljax import reading
from rolljax.errors import ConfigError
from rolljax.storage import durable
from rolljax.storage.layout import LOCK, STARTS


def check_ours(folder: Path, marker: str, what: str, setting: str) -> None:
    """Raise unless a folder is absent, empty, or one of ours.

    Args:
      marker: a file that only such folders contain. what: name of this kind of folder, with an article. setting: the
        setting that names the folder.

    Raises:
      ConfigError: the folder holds something else. StorageError: the folder cannot be read.
    """
    with durable.storing(folder):
        if not folder.exists() or (folder / marker).is_file():
            return
        is_ours = folder.is_dir() and all(e.name in (LOCK, STARTS) or durable.is_temporary(e) for e in folder.iterdir())
    if not is_ours:
        raise ConfigError(
            f"is not empty and not {what}", setting=setting, value=str(folder), remedy="name another folder"
        )


@contextlib.contextmanager
def locked(folder: Path, marker: str, what: str, setting: str) -> Iterator[None]:
    """Lock a folder, made if necessary, against other processes of this machine inside this context.

    Args:
      marker, what, setting: see `check_ours`.

    Raises:
      ConfigError: another process has the lock, or the folder holds something else. StorageError: it cannot be made.
    """
    check_ours(folder, marker, what, setting)
    with contextlib.ExitStack() as stack:
        with durable.storing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        with durable.storing(folder / LOCK):
            file = stack.enter_context(reading.open_file(folder / LOCK, reading.APPEND))
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                "is being written by another process",
                setting=setting,
                value=str(folder),
                remedy="wait for it to end, or name another folder",
            ) from None
        yield
