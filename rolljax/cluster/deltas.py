"""Changes between two arrays of bit patterns: where they are, as distances from one to the next, and the new values.

    head | long distances, uint32 | values | distances, uint8: number of equal entries before a change; 255: a long one

An update at a usual learning rate changes few weights in bfloat16 (ROSE: more than 95 % stay as they are). Each change
costs three bytes.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rolljax.fields import Damaged

Bits = NDArray[np.unsignedinteger[Any]]
MAX_ENTRIES = 2**31
_HEAD = struct.Struct("<4sIQQQ")  # magic, bytes of an entry, entries, changes, long distances
_MAGIC = b"RJD1"
_LONG = 255


def bits_dtype(itemsize: int) -> np.dtype[Any]:
    """Return the dtype of bit patterns of `itemsize` bytes."""
    return np.dtype(f"u{itemsize}")


def encode(old: Bits, new: Bits) -> bytes | None:
    """Return what changed, or None if that is more than half as long as the array itself.

    Args:
      old, new: arrays of one shape and one unsigned dtype, contiguous.
    """
    mask = old.reshape(-1) != new.reshape(-1)
    count = int(np.count_nonzero(mask))
    if 2 * count * (1 + new.itemsize) > new.nbytes or new.size > MAX_ENTRIES:
        return None
    positions = np.flatnonzero(mask)
    gaps = np.diff(positions, prepend=-1) - 1
    long = gaps[gaps >= _LONG].astype("<u4")
    code = [
        _HEAD.pack(_MAGIC, new.itemsize, new.size, count, len(long)),
        long.tobytes(),
        new.reshape(-1)[positions].tobytes(),
        np.minimum(gaps, _LONG).astype(np.uint8).tobytes(),
    ]
    found = b"".join(code)
    return found if 2 * len(found) <= new.nbytes else None


def expected_bytes(entries: int, itemsize: int, changed_frac: float) -> float:
    """Return about how many bytes `encode` returns for an array of which a fraction of all entries has changed, evenly;
    the array's own bytes if these are more than half of it."""
    changes, long = changed_frac * entries, (1 - changed_frac) ** _LONG
    found = _HEAD.size + changes * (1 + itemsize + 4 * long)
    return float(found if 2 * found <= entries * itemsize else entries * itemsize)


def changes(delta: bytes, entries: int, dtype: Any) -> tuple[NDArray[np.int64], Bits]:
    """Return the places that changed, in ascending order, and their new values.

    Args:
      entries: number of entries of the array. dtype: its dtype.

    Raises:
      Damaged: it is not what `encode` returned for such an array.
    """
    dtype = np.dtype(dtype)
    if len(delta) < _HEAD.size:
        raise Damaged(f"a delta of {len(delta)} bytes has no head")
    magic, itemsize, size, count, longs = _HEAD.unpack_from(delta)
    fits = (itemsize, size) == (dtype.itemsize, entries) and size <= MAX_ENTRIES and 2 * len(delta) <= size * itemsize
    if magic != _MAGIC or not fits:
        raise Damaged(f"this is no delta of {entries} entries of {dtype.itemsize} bytes")
    length = _HEAD.size + 4 * longs + (itemsize + 1) * count
    if len(delta) != length:
        raise Damaged(f"a delta has {len(delta)} bytes, not {length}")
    values_at = _HEAD.size + 4 * longs
    long = np.frombuffer(delta, "<u4", longs, _HEAD.size)
    values = np.frombuffer(delta, dtype, count, values_at)
    short = np.frombuffer(delta, np.uint8, count, values_at + itemsize * count)
    gaps = short.astype(np.int64)
    is_long = short == _LONG
    if np.count_nonzero(is_long) != longs:
        raise Damaged(f"a delta has {longs} long distances, and names {np.count_nonzero(is_long)}")
    gaps[is_long] = long
    gaps += 1
    positions = np.cumsum(gaps, out=gaps)
    positions -= 1
    if count > entries or (count and positions[-1] >= entries):
        raise Damaged(f"a delta changes entry {positions[-1]} of {entries}")
    return positions, values


def decode_into(old: Bits, delta: bytes) -> None:
    """Change `old`, which is contiguous, into the array that was encoded.

    Raises:
      Damaged: see `changes`; `old` is as it was.
    """
    positions, values = changes(delta, old.size, old.dtype)
    old.reshape(-1)[positions] = values
