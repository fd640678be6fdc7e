"""A paper's statement about a setting, kept at the class that implements the setting."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Stated:
    """One setting as its paper (or its authors' code) states it."""

    value: object
    """Value of the setting in the paper."""
    where: str
    """The place, such as "arXiv 2503.14476, section 3.1" or "github.com/owner/name, path"."""
    why: str = ""
    """Reason why the class's default differs from the paper; empty if they are equal. Required if the default
    differs."""
