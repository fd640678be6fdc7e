"""Find damage in the records of a run when the run continues.

A checkpoint has the length and the SHA-256 of `metrics.jsonl`, of `consumed.jsonl` and of every file of held-out
answers, as they were when it was saved; `consumed.jsonl` has the SHA-256 of every file of rollouts. No step depends on
these files, so the run continues without them.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rolljax import reading
from rolljax.storage import journal
from rolljax.storage.layout import CONSUMED, METRICS
from rolljax.storage.run_reader import row

LOGS = (METRICS, CONSUMED)
CHECKED_BYTES = 16 << 30
"""Bytes of files of rollouts that are compared with their SHA-256, the newest first: some 10 s of reading."""
_NAMED = 4
"""Files that one message names."""
_READERS = 8


def of_log(path: Path, data: bytes, step: int, recorded: Mapping[str, Any]) -> str:
    """Describe the damage of a log of steps in a sentence; empty if it is undamaged.

    Args:
      data: the file's content. step: the last finished step. recorded: `durable.Written.to_json` of each log, by name;
        missing in checkpoints of earlier versions of rolljax.
    """
    if not step:  # the checkpoint was saved before the first row
        return ""
    steps = {found["step"] for found in journal.parse(data, row).values}
    missing = sorted({*range(1, step + 1)} - steps)
    if not data and not path.exists():
        is_expected = path.name in recorded or path.name == METRICS  # which every rolljax has written
        return f"{path} is missing: the rows of {step} step(s) are lost" if is_expected else ""
    if path.name in recorded:
        other = next((name for name in LOGS if name != path.name and _holds(data, recorded.get(name))), "")
        if other:
            return f"{path} is damaged: it holds what {other} held when the checkpoint was saved"
    if missing:
        return f"{path} is damaged: it lacks {len(missing)} row(s), the first of step {missing[0]}"
    if path.name in recorded and not _holds(data, recorded[path.name]):
        return f"{path} is damaged: its rows are not as they were when the checkpoint was saved, by their SHA-256"
    return ""


def _holds(data: bytes, recorded: object) -> bool:
    """Return whether a file begins with its recorded bytes."""
    if not isinstance(recorded, Mapping) or not recorded.get("bytes"):
        return False
    begin = data[: recorded["bytes"]]
    return len(begin) == recorded["bytes"] and hashlib.sha256(begin).hexdigest() == recorded.get("sha256")


def of_files(folder: Path, wanted: Mapping[str, str]) -> list[str]:
    """Describe the damaged files of a folder, a sentence for each.

    Args:
      wanted: SHA-256 by name, the newest first.
    """
    there = [name for name in wanted if os.path.lexists(folder / name)]
    found = dict(zip(there, _digests([folder / name for name in there]), strict=True))
    names = {sha256: name for name, sha256 in wanted.items()}
    said = []
    for name, sha256 in wanted.items():
        now = found.get(name, "is missing")
        if now in ("", sha256):
            continue
        if now in names:
            said.append(f"{name} holds what {names[now]} held")
        else:
            said.append(f"{name} {now}" if " " in now else f"{name} is not as it was written, by its SHA-256")
    return said


def _digests(paths: Iterable[Path]) -> list[str]:
    """Return the SHA-256 of each file, or why it cannot be read; empty for those beyond `CHECKED_BYTES`."""
    left, chosen = CHECKED_BYTES, []
    for path in paths:
        left -= path.stat().st_size if path.is_file() else 0
        chosen.append(path if left >= 0 else None)

    def one(path: Path | None) -> str:
        if path is None:
            return ""
        try:
            return reading.digest(path)
        except OSError as e:
            return f"cannot be read: {reading.reason(e)}"

    with concurrent.futures.ThreadPoolExecutor(_READERS) as pool:
        return [*pool.map(one, chosen)]


def told(folder: Path, said: list[str]) -> str:
    """Return one sentence about the files of a folder; empty if nothing is wrong."""
    more = f", and {len(said) - _NAMED} more" if len(said) > _NAMED else ""
    return f"{folder} is damaged: {'; '.join(said[:_NAMED])}{more}" if said else ""
