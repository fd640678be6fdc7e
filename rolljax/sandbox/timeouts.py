"""How long a program may run: longer than what is known to be right, and not much (RollPacker, arXiv 2509.21009)."""

from __future__ import annotations

import dataclasses

from rolljax.errors import check_range


@dataclasses.dataclass
class AdaptiveTimeout:
    """Time-outs by problem: `factor` times the longest run of a correct program so far, within `low_s` and `high_s`;
    `high_s` as long as none was correct. What a program gets then depends on those before it, so that an environment
    that promises equal episodes for equal actions cannot use it.
    """

    factor: float = 1.5
    low_s: float = 2.0
    high_s: float = 30.0
    longest_s: dict[str, float] = dataclasses.field(default_factory=dict)
    """The longest run of a correct program, by problem."""

    def __post_init__(self) -> None:
        check_range(self, "factor", low=1)
        check_range(self, "low_s", above=0)
        check_range(self, "high_s", low=self.low_s)

    def limit_s(self, problem: str) -> float:
        """Longest that a program for `problem` may run now, seconds."""
        if problem not in self.longest_s:
            return self.high_s
        return min(max(self.low_s, self.factor * self.longest_s[problem]), self.high_s)

    def correct(self, problem: str, seconds: float) -> None:
        """A program for `problem` was correct, and took so long."""
        self.longest_s[problem] = max(seconds, self.longest_s.get(problem, 0.0))
