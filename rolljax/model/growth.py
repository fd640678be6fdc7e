"""Bounds how much longer the steps of a tokenizer can make a text.

A `tokenizer.json` may stack steps that each replace a letter by two: thirty of them make a gibibyte of every letter,
inside of a library that ends the process when memory is short. So the steps are checked before any text is tokenised.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rolljax.errors import CheckpointError

MAX_GROWTH = 1024
"""Most bytes that a tokenizer may make of one byte."""
MAX_STEPS = 64
"""Most steps of one kind."""
_INNER = ("normalizers", "pretokenizers", "decoders")
_FACTORS = {"ByteLevel": 2.0, "BertNormalizer": 3.0, "Metaspace": 3.0}


def check_growth(tokenizer: Mapping[str, Any], path: Path) -> None:
    """Check the steps of a `tokenizer.json` before and after its model.

    Args:
      tokenizer: the file as JSON.

    Raises:
      CheckpointError: a text could grow more than `MAX_GROWTH` times, or there are more than `MAX_STEPS` steps.
    """
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        growth, num = 1.0, 0
        for step in _steps(tokenizer.get(part)):
            growth, num = growth * _factor(step), num + 1
            if num > MAX_STEPS:
                raise CheckpointError(f"{path}: its {part} has more than {MAX_STEPS} steps; no text is given to it")
            if growth > MAX_GROWTH:
                raise CheckpointError(
                    f"{path}: its {part} can make a text more than {MAX_GROWTH} times as long (step {num}: "
                    f"{str(step.get('type'))[:40]}); no text is given to it"
                )


def _steps(found: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the steps of a part in their order, including the steps of nested sequences."""
    waiting = [found]
    while waiting:
        step = waiting.pop()
        if isinstance(step, list):
            waiting += reversed(step)
        elif isinstance(step, dict):
            inner = [step[name] for name in _INNER if isinstance(step.get(name), list)]
            if inner:
                waiting += inner
            else:
                yield step


def _factor(step: Mapping[str, Any]) -> float:
    """Return the most bytes that a step makes of one byte."""
    kind, content, pattern = step.get("type"), step.get("content"), step.get("pattern")
    if kind == "Replace" and isinstance(content, str):
        literal = pattern.get("String") if isinstance(pattern, dict) else None
        if isinstance(literal, str) and literal:
            return max(1.0, len(content.encode()) / len(literal.encode()))
        return 1.0 + len(content.encode())  # it may match anywhere
    if kind == "Prepend" and isinstance(step.get("prepend"), str):
        return 1.0 + len(step["prepend"].encode())
    if kind == "Precompiled" and isinstance(step.get("precompiled_charsmap"), str):
        return _longest_text(step["precompiled_charsmap"])
    return _FACTORS.get(str(kind), 1.0)


def _longest_text(charsmap: str) -> float:
    """Return the bytes of the longest text in SentencePiece's table of characters (an index, then the texts)."""
    try:
        table = base64.b64decode(charsmap)
    except (binascii.Error, ValueError):
        return 1.0  # the library refuses it
    index = int.from_bytes(table[:4], "little")
    return float(max(map(len, table[4 + index :].split(b"\0")), default=1) or 1)
