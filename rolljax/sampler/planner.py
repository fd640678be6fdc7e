"""How many devices a sampler's weights are split over, from how often it runs out of pages (RollPacker, arXiv
2509.21009)."""

from __future__ import annotations

import dataclasses

from rolljax.errors import check_range


@dataclasses.dataclass
class TensorPlanner:
    """A degree of tensor parallelism, revised after every round of rollouts: twice as many devices when preemptions
    grow, half when there were none for a while. Short and long rounds have a planner each.

    tensor: devices now. most: devices of one host. growth: of preemptions from round to round, beyond which they are
    too many. quiet_rounds: rounds without any, after which fewer devices will do.
    """

    tensor: int
    most: int
    growth: float = 1.05
    quiet_rounds: int = 4
    _before: int | None = None
    _quiet: int = 0

    def __post_init__(self) -> None:
        check_range(self, "tensor", low=1, high=self.most)
        check_range(self, "growth", "quiet_rounds", low=1)

    def after_round(self, preemptions: int) -> int:
        """The devices of the next round, after one with so many preemptions."""
        self._quiet = 0 if preemptions else self._quiet + 1
        if self._before is not None and preemptions > self.growth * self._before:
            self.tensor = min(2 * self.tensor, self.most)
        elif self._quiet == self.quiet_rounds:
            self.tensor, self._quiet = max(self.tensor // 2, 1), 0
        self._before = preemptions
        return self.tensor
