"""Assign a domain to each group of the steps to come: exact shares of whole groups.

With shares `p` a step of `B` groups should train `B x p[d]` of domain `d`, which is rarely a whole number. Each domain
gets its whole part, and the groups that are left go to the domains that are due: the difference between a domain's
groups and its share is carried over. The first step is divided by largest remainders; later ones by the earliest
deadline, the rule of Tijdeman (The chairman assignment problem, Discrete Mathematics 32, 1980) for one group a step.
After any number of steps with the same shares every domain's total is within one group of its exact share, and every
step's number is within one of `B x p[d]`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rolljax.errors import ConfigError

Shares = Mapping[str, float]
"""Shares by domain, adding up to 1."""
NEAR = 1e-9
"""Tolerance for rounding errors of shares and of the remainders carried to the next step."""


def normalised(weights: Mapping[str, float]) -> dict[str, float]:
    """Scale weights to shares that add up to 1.

    Raises:
      ConfigError: a weight is negative or no finite number, or all are 0.
    """
    whole = math.fsum(weights.values())
    if not all(math.isfinite(w) and w >= 0 for w in weights.values()) or not whole > 0:
        raise ConfigError("are no weights of domains", setting="shares", value=dict(weights), remedy="0 or more each")
    return {name: weight / whole for name, weight in weights.items()}


def apportion(groups: int, shares: Shares, carried: dict[str, float]) -> dict[str, int]:
    """Return a whole number of groups for each domain; they add up to `groups`.

    Args:
      carried: by domain, the groups still owed to it (negative: it got too many); updated in place.
    """
    exact = {name: groups * share for name, share in shares.items()}
    found = {name: math.floor(x + NEAR) for name, x in exact.items()}
    part = {name: max(exact[name] - found[name], 0.0) for name in exact}
    soon = 1 / (2 * max(len(exact), 2) - 2)

    def turn(name: str) -> tuple[bool, float]:
        owed = carried.get(name, 0.0) + part[name]
        if owed < soon - NEAR:
            return True, -owed
        return False, (1 - soon - carried.get(name, 0.0)) / part[name]

    order = sorted((name for name in exact if part[name] > NEAR), key=turn)
    for name in order[: groups - sum(found.values())]:
        found[name] += 1
    for name, number in found.items():
        carried[name] = carried.get(name, 0.0) + exact[name] - number
    assert sum(found.values()) == groups, f"{found} for {groups} groups"
    return found


def spread(numbers: Mapping[str, int]) -> tuple[str, ...]:
    """Return the order of domains in a step, so that every prefix holds them as nearly in proportion as possible."""
    total, given = sum(numbers.values()), dict.fromkeys(numbers, 0)
    places = []
    for k in range(1, total + 1):
        name = max(numbers, key=lambda d: k * numbers[d] / total - given[d])
        given[name] += 1
        places.append(name)
    return tuple(places)


class StepPlan:
    """The domain at every place of the steps of a phase. A step is planned at its first use, with the shares of that
    moment; the plan of a step never changes.

    Args:
      prompts_per_step: places of a step. shares: function from a step's index in the phase to its shares; None: there
        is one domain, without a name.
    """

    def __init__(self, prompts_per_step: int, shares: Callable[[int], Shares] | None = None) -> None:
        self._prompts, self._shares = prompts_per_step, shares
        self._planned: dict[int, tuple[str, ...]] = {}
        self._shares_of: dict[int, Shares] = {}
        self._carried: dict[str, float] = {}
        self._next = 0

    @property
    def is_mixed(self) -> bool:
        """Return whether there are domains."""
        return self._shares is not None

    def places(self, step: int) -> tuple[str, ...]:
        """Return the domains of the groups of `step`, which must not be over."""
        if self._shares is None:
            return ("",) * self._prompts
        while self._next <= step:
            shares = self._shares_of[self._next] = dict(self._shares(self._next))
            self._planned[self._next] = spread(apportion(self._prompts, shares, self._carried))
            self._next += 1
        return self._planned[step]

    def first(self, step: int, number: int) -> Iterator[str]:
        """Yield the first `number` places from the start of `step` on."""
        if self._shares is None:
            return itertools.repeat("", number)
        return itertools.islice((d for s in itertools.count(step) for d in self.places(s)), number)

    def shares(self, step: int) -> Shares:
        """Return the shares for which `step`, the last trained one or a later one, was planned."""
        return self._shares_of[step]

    def forget(self, step: int) -> None:
        """Drop the plans of steps before `step`."""
        self._shares_of = {s: shares for s, shares in self._shares_of.items() if s >= step - 1}
        self._planned = {s: places for s, places in self._planned.items() if s >= step}

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as a JSON value."""
        planned = {str(step): list(places) for step, places in self._planned.items()}
        shares = {str(step): dict(of) for step, of in self._shares_of.items()}
        return {"next": self._next, "carried": dict(self._carried), "planned": planned, "shares": shares}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._next, self._carried = state["next"], dict(state["carried"])
        self._planned = {int(step): tuple(places) for step, places in state["planned"].items()}
        self._shares_of = {int(step): shares for step, shares in state["shares"].items()}
