"""What papers state about settings, and how far their claims are shown here; each kept at the code it is about."""

from __future__ import annotations

import dataclasses
from typing import Literal


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


@dataclasses.dataclass(frozen=True)
class Reproduction:
    """How far a paper's main claim is shown here. A module has at most one, `REPRODUCTION`; `docs/make_papers_page.py`
    finds it there."""

    paper: str
    """Number at arXiv, or empty."""
    name: str
    claim: str
    """What the paper shows, in a few words."""
    there: str
    """The paper's figure of it."""
    here: str
    """Ours, of the same effect on a smaller problem; empty: none."""
    state: Literal["shown", "partly", "not shown"]
    """Shown: the effect is here, on at least three seeds and in a figure. Partly: a part of it; `why` says which."""
    seeds: int = 0
    """Number of seeds behind `here`; 0: none are drawn."""
    config: str = ""
    """Name of the config that runs it; empty: none."""
    figure: str = ""
    """Path of the picture from the root of the repository; empty: none."""
    why: str = ""
    """What is not shown, and why. Empty only if `state` is `shown`."""
