"""Which kind of sampler suits a domain: decided by its measured ratio of prefill to decode (RollArt)."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Annotated

from rolljax.errors import Checked, Range


@dataclasses.dataclass(frozen=True)
class AffinityConfig(Checked):
    """Two kinds of samplers and the ratio that divides the domains between them (RollArt, arXiv 2512.22560, R1)."""

    prefill_kind: str = "compute"
    """`kind` of the samplers that get domains with much prefill: chips with much arithmetic."""
    decode_kind: str = "bandwidth"
    """`kind` of the samplers that get domains with much decoding: chips with much memory bandwidth."""
    ratio: Annotated[float, Range(above=0)] = 8.0
    """Prefill tokens for each decoded one above which a domain has much prefill."""
    hysteresis: Annotated[float, Range(low=0, high=1)] = 0.2
    """A domain loses the prefill kind below `(1 - hysteresis) * ratio` only."""
    window: Annotated[int, Range(low=1)] = 64
    """Number of trajectories that the ratio of a domain is measured over. There is no preference before."""


class _Window:
    """The last trajectories of a domain, and their sums."""

    def __init__(self) -> None:
        self.trajectories: dict[Hashable, tuple[int, int]] = {}
        self.prefill_tok = self.decode_tok = 0
        self.kind = ""

    def add(self, trajectory: Hashable, prefill_tok: int, decode_tok: int, size: int) -> None:
        prefill, decode = self.trajectories.pop(trajectory, (0, 0))
        self.trajectories[trajectory] = prefill + prefill_tok, decode + decode_tok
        self.prefill_tok += prefill_tok
        self.decode_tok += decode_tok
        if len(self.trajectories) > size:
            prefill, decode = self.trajectories.pop(next(iter(self.trajectories)))
            self.prefill_tok -= prefill
            self.decode_tok -= decode


class Affinity:
    """Measures the domains' ratios of prefill to decode, and chooses a kind of sampler for each."""

    def __init__(self, config: AffinityConfig) -> None:
        self.config = config
        self._windows: dict[str, _Window] = {}

    def observe(self, tag: str, trajectory: Hashable, prefill_tok: int, decode_tok: int) -> None:
        """Add a request of a trajectory: the computed prompt tokens, and the decoded tokens."""
        config, window = self.config, self._windows.setdefault(tag, _Window())
        window.add(trajectory, prefill_tok, decode_tok, config.window)
        if len(window.trajectories) < config.window:
            return
        keeps = window.kind == config.prefill_kind
        bound = config.ratio * (1 - config.hysteresis if keeps else 1)
        is_prefill = window.prefill_tok >= bound * window.decode_tok
        window.kind = config.prefill_kind if is_prefill else config.decode_kind

    def kind(self, tag: str) -> str:
        """Return the kind that suits a domain; empty while it is not known."""
        window = self._windows.get(tag)
        return window.kind if window else ""
