"""Shortest plans: A* over states that are given by a function."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

from rolljax.errors import EnvError

N = TypeVar("N", bound=Hashable)


def plan(
    start: N,
    moves: Callable[[N], Iterable[tuple[str, N]]],
    done: Callable[[N], bool],
    estimate: Callable[[N], float] = lambda state: 0,
    limit: int = 300_000,
) -> list[tuple[N, str]] | None:
    """Return the states, and the move in each, along a shortest path to a state that is `done`; None if there is no
    path.

    Args:
      estimate: lower bound of the remaining moves; infinity for a dead end.
      limit: number of states to visit.

    Raises:
      EnvError: `limit` states were not enough.
    """
    came: dict[N, tuple[N, str] | None] = {start: None}
    cost = {start: 0}
    order = itertools.count()
    todo = [(estimate(start), next(order), start)]
    closed: set[N] = set()
    while todo:
        _, _, state = heapq.heappop(todo)
        if state in closed:
            continue
        closed.add(state)
        if done(state):
            return _way(came, state)
        if len(closed) > limit:
            raise EnvError(f"no plan within {limit} states")
        for name, after in moves(state):
            if cost[state] + 1 < cost.get(after, float("inf")):
                rest = estimate(after)
                if rest == float("inf"):
                    continue
                cost[after], came[after] = cost[state] + 1, (state, name)
                heapq.heappush(todo, (cost[after] + rest, next(order), after))
    return None


def _way(came: dict[N, tuple[N, str] | None], state: N) -> list[tuple[N, str]]:
    steps = []
    while (before := came[state]) is not None:
        steps.append(before)
        state = before[0]
    return steps[::-1]
