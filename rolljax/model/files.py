"""Files of a model folder, which anybody may have written: read strictly, and never outside of the folder."""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

from rolljax import reading
from rolljax.errors import CheckpointError

MAX_JSON_BYTES = 256 * 2**20
"""Most bytes of a file of JSON; the index of a model of 10^6 tensors has a third of that."""
_HALVES = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")
"""Encodings of halves of surrogate pairs, also inside whole pairs."""
HEAD_BYTES = 1 << 20
"""Bytes of every file of weights that enter `folder_digest`."""


def inside(folder: Path, name: str) -> Path:
    """Return the path of the file `name` in a folder.

    Links may lead to other files of the folder, and from a snapshot of the Hugging Face cache to its blobs.

    Raises:
      CheckpointError: `name` is no plain file name, or the file is a link that leads elsewhere.
    """
    path = folder / name
    if Path(name).name != name or name in ("", "..") or "\0" in name or "\\" in name:
        raise CheckpointError(f"{folder}: {name!r} is not the name of a file in this folder")
    homes = [folder.resolve()]
    if homes[0].parent.name == "snapshots":
        homes.append(homes[0].parent.parent / "blobs")
    try:
        target = path.resolve()
    except (OSError, RuntimeError) as e:  # links in a circle
        raise CheckpointError(f"{path} cannot be followed: {e}") from e
    if path.is_symlink() and not any(target.is_relative_to(home) for home in homes):
        raise CheckpointError(f"{path} is a link that leads out of its folder, to {target}: copy the file instead")
    return path


def copied(folder: Path, name: str, to: Path) -> bool:
    """Copy a file of a folder, byte for byte, into another one; whether there is such a file."""
    path = inside(folder, name)
    if not path.is_file():
        return False
    shutil.copyfile(path, to / name)
    return True


def read_json(path: Path, what: str) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
      CheckpointError: `path` is not `what`: no JSON object, nested too deeply, a duplicate key, a number that is not
        finite.
    """
    try:
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise CheckpointError(f"{path} is not {what}: {size:,} bytes are more than {MAX_JSON_BYTES:,}")
        return parse_json(path.read_bytes())
    except (OSError, ValueError) as e:
        raise CheckpointError(f"{path} is not {what}: {e}") from e


def parse_json(text: bytes) -> dict[str, Any]:
    """Parse a JSON object with finite numbers, valid Unicode and no duplicate keys. Raise `ValueError` for anything
    else."""
    try:
        found = json.loads(text, object_pairs_hook=_once, parse_float=_finite, parse_constant=_finite)
    except RecursionError:
        raise ValueError("JSON is nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError("not a JSON object")
    if _HALVES.search(text):
        try:
            json.dumps(found, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("contains half of a surrogate pair, which is no character") from None
    return found


_once = reading.unique_keys(lambda key: ValueError(f"the key {key!r} is given twice"))


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a finite number")
    return value


def folder_digest(folder: Path) -> str:
    """Return a hexadecimal digest of a model folder's config and of the first bytes of its weights. It tells models
    apart."""
    found = hashlib.sha256()
    for path in sorted([*folder.glob("config.json"), *folder.glob("*.safetensors")]):
        with open(path, "rb") as f:
            found.update(f"{path.name} {path.stat().st_size}\n".encode() + f.read(HEAD_BYTES))
    return found.hexdigest()[:32]
