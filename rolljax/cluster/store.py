"""A folder in any key-value store that TensorStore knows: a path, `file://`, `gs://`, `s3://`, `memory://`, or `http://`
to read from. Every wait has a deadline."""

from __future__ import annotations

import functools
import shutil
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import tensorstore as ts

T = TypeVar("T")
_RETRIES = {"max_retries": 3, "initial_delay": "100ms", "max_delay": "1s"}
_LOCAL = ("btrfs", "ext2", "ext3", "ext4", "overlay", "tmpfs", "xfs", "zfs")
"""Kinds of file systems that are of one machine."""
_DAMAGE = ("FAILED_PRECONDITION", "DATA_LOSS", "INVALID_ARGUMENT", "OUT_OF_RANGE")


class StoreAway(Exception):
    """The store does not answer, or answers that it cannot now."""


class MissingObject(Exception):
    """The store answers, but not with the object."""


class DamagedObject(Exception):
    """An object of the store is shorter or longer than it should be."""


class Store:
    """A folder of a key-value store.

    Args:
      url: a URL, or the path of a folder.

    Attributes:
      is_memory: whether what is written stays in the memory of this process.
    """

    def __init__(self, url: str) -> None:
        import tensorstore as ts

        self.url = url
        path = f"file://{Path(url).absolute()}" if "://" not in url else url
        self._spec: dict[str, Any] = ts.KvStore.Spec(path.rstrip("/") + "/").to_json()
        self.is_memory = self._spec["driver"] == "memory"
        self._folder = Path(self._spec["path"]) if self._spec["driver"] == "file" else None
        if self._folder:
            # not flushed: a failure of the machine may lose or damage snapshots, which checksums show; a later start of
            # the trainer writes its weights again, from its checkpoint
            self._spec["file_io_sync"] = False
            if _is_on_this_machine(self._folder):
                self._spec["file_io_mode"] = {"mode": "memmap"}  # a copy less
        self._keys = ts.KvStore.open(self._spec, context=_context()).result()

    def read(self, key: str) -> ts.Future[ts.KvStore.ReadResult]:
        """Begin to read an object; `value` waits for it."""
        return self._keys.read(key)

    def write(self, key: str, data: bytes) -> ts.Future[Any]:
        """Begin to write an object. It appears whole."""
        return self._keys.write(key, data)

    def remove(self, prefix: str, timeout_s: float) -> None:
        """Remove all objects whose keys begin with `prefix`, a folder."""
        import tensorstore as ts

        if self._folder:
            shutil.rmtree(self._folder / prefix, ignore_errors=True)
        else:
            wait(self._keys.delete_range(ts.KvStore.KeyRange(prefix, prefix[:-1] + "0")), timeout_s)

    def folders(self, timeout_s: float) -> set[str]:
        """Return the names of the folders in it."""
        return {key.decode().partition("/")[0] for key in wait(self._keys.list(), timeout_s) if b"/" in key}

    def array(
        self, key: str, shape: tuple[int, ...], chunk: tuple[int, ...], itemsize: int, *, create: bool = False
    ) -> ts.Future[ts.TensorStore]:
        """Open an array of bit patterns, without compression (zarr 3).

        Args:
          create: write its description; others need none.
        """
        import tensorstore as ts

        spec = {
            "driver": "zarr3",
            "kvstore": self._spec | {"path": f"{self._spec['path']}{key}/"},
            "metadata": {
                "shape": shape,
                "data_type": f"uint{8 * itemsize}",
                "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
                "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
                "fill_value": 0,
            },
            "store_data_equal_to_fill_value": True,
            "fill_missing_data_reads": False,  # else a lost chunk would be zeros
        }
        how: dict[str, Any] = {"create": True} if create else {"assume_metadata": True}
        return ts.open(spec, open=True, context=_context(), **how)


def wait(future: ts.Future[T], timeout_s: float) -> T:
    """Return the result of a request.

    Raises:
      StoreAway: the store does not answer within `timeout_s`, or has an error of its own. MissingObject: the object is
        missing. DamagedObject: it is too short or too long.
    """
    try:
        return future.result(timeout=max(timeout_s, 0.0))
    except TimeoutError:
        raise StoreAway("it does not answer") from None
    except (ValueError, OSError, NotImplementedError) as e:  # TensorStore's own
        text = str(e).partition(" [tensorstore_spec=")[0]
        kind = text.partition(":")[0]
        if kind == "NOT_FOUND":
            raise MissingObject(text) from e
        if kind in _DAMAGE:
            raise DamagedObject(text) from e
        raise StoreAway(text) from e


def value(found: ts.Future[ts.KvStore.ReadResult], key: str, timeout_s: float) -> bytes:
    """Return the bytes of an object. Raises what `wait` raises."""
    result = wait(found, timeout_s)
    if result.state != "value":
        raise MissingObject(f"{key} is missing")
    return result.value


def _is_on_this_machine(folder: Path) -> bool:
    """Return whether a folder is in a file system of this machine. There a file that was removed can be read by whoever
    has it open; on a server's it cannot, and a process that has it in its memory is killed."""
    kinds = {}
    with suppress(OSError):
        for line in Path("/proc/self/mounts").read_text().splitlines():
            _, place, kind, *_ = line.split(" ")
            kinds[Path(place.encode().decode("unicode_escape"))] = kind
    return next((kinds[at] for at in (folder, *folder.parents) if at in kinds), "") in _LOCAL


@functools.cache
def _context() -> ts.Context:
    """Return the one context of this process, so that all share its `memory://` and its threads."""
    import tensorstore as ts

    return ts.Context({"http_request_retries": _RETRIES})
