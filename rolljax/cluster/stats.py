"""The counters of a group of samplers, some of which are lost or replaced."""

from __future__ import annotations

import copy

from rolljax.sampler.prompt_queue import SamplerStats


class StatsSum:
    """Adds up the counters of samplers that come and go. No total ever becomes smaller."""

    def __init__(self) -> None:
        self._total = SamplerStats()
        self._last: dict[str, SamplerStats] = {}

    def put(self, name: str, stats: SamplerStats) -> None:
        """Note the counters of a sampler as they are now.

        The first reading of a sampler is its start: what it did earlier, for another group or controller, does not
        count. A reading below the one before is of a sampler that has started again: all of the reading counts.
        """
        now, before = vars(stats), vars(self._last.get(name, stats))
        if any(now[field] < value for field, value in before.items()):
            before = vars(SamplerStats())
        for field, value in now.items():
            vars(self._total)[field] += value - before[field]
        self._last[name] = copy.copy(stats)

    def retire(self, name: str) -> None:
        """Forget a sampler that is lost or has left. Its work stays in the total; it may return, from zero."""
        self._last.pop(name, None)

    def total(self) -> SamplerStats:
        """Return what all samplers, including lost ones, have done since they joined."""
        return copy.copy(self._total)
