"""Atomic writes: each file and each folder is complete or absent, even if the process is killed or the machine fails.

Data is written under a temporary name, synced, and renamed. `sweep` deletes the temporary files of a killed writer. All
writes and deletions of a run go through this module, and appended lines through `journal`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rolljax import reading
from rolljax.errors import StorageError

_SPACE = "free some, or keep less (Recipe.keep_checkpoints, Recipe.keep_rollouts, Recipe.rollouts_every)"
_RIGHTS = "make it writable, or name another folder"
REMEDIES = {
    errno.ENOSPC: _SPACE,
    errno.EDQUOT: _SPACE,
    errno.EROFS: _RIGHTS,
    errno.EACCES: _RIGHTS,
    errno.EPERM: _RIGHTS,
    errno.ENOTDIR: _RIGHTS,
    errno.EISDIR: _RIGHTS,
    errno.EEXIST: _RIGHTS,
    errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
    errno.EIO: "check the disk",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
}
"""Remedies, by the error of the operating system."""
_OTHER = "move away whatever has this name (a dangling link, a pipe)"


def reach(point: str, path: Path) -> None:
    """Do nothing. It is called before and after every change of the disk, so that tests can end a run there.

    Args:
      point: before, written (under the temporary name), aside (the old one is renamed), after.
    """


@contextlib.contextmanager
def storing(path: Path) -> Iterator[None]:
    """Turn an error of the disk, in work that writes to `path`, into a `StorageError` with a remedy.

    Libraries raise their own exceptions for such errors; these are recognised by their text.
    """
    try:
        yield
    except StorageError:
        raise
    except Exception as e:  # border: a library may wrap an error of the disk in any exception
        number = _number(e)
        if number is not None:
            said = os.strerror(number)
        elif isinstance(e, OSError):
            said = reading.reason(e)
        else:
            raise
        raise StorageError(
            f"{path} cannot be written: {said}\n"
            f"  fix:   {REMEDIES.get(number or 0, _OTHER)}; the same command then continues from the last checkpoint"
        ) from e


def _number(error: BaseException | None) -> int | None:
    """Return the number of the disk error that caused an exception, if there is one."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in REMEDIES:
            return error.errno
        for number in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EIO):
            if os.strerror(number) in str(error):
                return number
        error = error.__cause__ or error.__context__
    return None


def beside(path: Path) -> Path:
    """Return the temporary path for writing `path` before the rename."""
    return path.with_name(f".{path.name}.tmp")


def write(path: Path, data: bytes | str) -> None:
    """Write a file; at any time there is the old one or the new one.

    Raises:
      StorageError: it cannot be written; the old one is still there.
    """
    temporary = beside(path)
    with storing(path):
        reach("before", path)
        with open(temporary, "wb") as f:
            f.write(data.encode() if isinstance(data, str) else data)
            f.flush()
            os.fsync(f.fileno())
        reach("written", path)
        os.replace(temporary, path)
        _sync_folder(path.parent)
    reach("after", path)


@contextlib.contextmanager
def folder(path: Path) -> Iterator[Path]:
    """Yield a folder to fill. It is renamed to `path`, and replaces a folder of that name, when the block ends without
    an error.

    Raises:
      StorageError: it cannot be written.
    """
    temporary = beside(path)
    with storing(path):
        reach("before", path)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        try:
            yield temporary
            reach("written", path)
            sync_tree(temporary)
        except Exception:  # border: any error of the code that fills the folder
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        if path.exists():
            remove(path)
        os.rename(temporary, path)
        _sync_folder(path.parent)
    reach("after", path)


def remove(path: Path) -> None:
    """Remove a file or folder. A folder disappears at once, never in parts.

    Raises:
      StorageError: it cannot be removed.
    """
    with storing(path):
        reach("before", path)
        if path.is_dir() and not path.is_symlink():
            aside = path.with_name(f".{path.name}.old.tmp")
            shutil.rmtree(aside, ignore_errors=True)
            os.rename(path, aside)
            reach("aside", path)
            shutil.rmtree(aside)
        else:
            path.unlink(missing_ok=True)
        _sync_folder(path.parent)
    reach("after", path)


def is_temporary(path: Path) -> bool:
    """Return whether the path is a temporary one, which only a killed writer leaves."""
    return path.name.startswith(".") and path.name.endswith(".tmp")


def sweep(path: Path) -> None:
    """Remove the temporary files and folders that killed writers left in `path` and in its subfolders. Links are not
    followed."""
    with storing(path):
        for entry in path.iterdir():
            is_folder = entry.is_dir() and not entry.is_symlink()
            if not is_temporary(entry):
                if is_folder:
                    sweep(entry)
            elif is_folder:
                shutil.rmtree(entry)
            else:
                entry.unlink()


def sync_tree(path: Path) -> None:
    """Sync every file below a folder to disk."""
    for parent, _, files in os.walk(path):
        for name in files:
            _sync(Path(parent, name), os.O_RDONLY)
        _sync_folder(Path(parent))


def _sync_folder(path: Path) -> None:
    _sync(path, os.O_RDONLY | os.O_DIRECTORY)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclasses.dataclass
class Written:
    """Length and SHA-256 of the bytes that a run has written to a growing file."""

    size: int = 0
    sha256: Any = dataclasses.field(default_factory=hashlib.sha256)

    def add(self, data: bytes) -> None:
        """Add the appended bytes."""
        self.size += len(data)
        self.sha256.update(data)

    def to_json(self) -> dict[str, Any]:
        """Return the record for a checkpoint."""
        return {"bytes": self.size, "sha256": self.sha256.hexdigest()}
