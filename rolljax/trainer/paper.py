"""A paper's statement about a setting, kept at the class that implements the setting."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Stated:
    """One setting as its paper (or its authors' code) states it.

    value: the paper's. where: the place, such as "arXiv 2503.14476, section 3.1" or "github.com/owner/name, path".
    why: why the class's default is another one; empty where they are equal. Where the default differs, it must be said.
    """

    value: object
    where: str
    why: str = ""
