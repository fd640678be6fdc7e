"""Rollouts on replicas that also serve users, by ROSE's rules (arXiv 2605.06534): the rules as functions, and a
replica's serving on the virtual clock."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, TypeVar

import numpy as np

from rolljax.errors import Checked, Range
from rolljax.trainer.paper import Reproduction

if TYPE_CHECKING:
    from rolljax.simulation.fleet import Fleet
    from rolljax.simulation.replica import Replica
    from rolljax.simulation.timings import EngineTimings

REPRODUCTION = Reproduction(
    paper="2605.06534",
    name="ROSE",
    claim="rollouts on the GPUs of users",
    there="1.20 to 3.31 times, no violation",
    here="its rules, in simulations",
    state="not shown",
    why="simulated only, and without a figure",
)


T = TypeVar("T")


# ---- rules


def slack_s(now_s: float, since_s: float, budget_s: float, predicted_s: float) -> float:
    """Return the seconds that are left until the deadline of a served token, once it has been computed.

    Args:
      since_s: arrival of a request that waits for its first token, or time of the last token of one that decodes.
      budget_s: bound on that wait (time to first token, time per output token). predicted_s: of the computation.
    """
    return since_s + budget_s - now_s - predicted_s


def admits(slacks_s: Iterable[float]) -> bool:
    """Return whether an iteration of the engine may take rollout tokens: no served token would be late."""
    return min(slacks_s, default=math.inf) > 0


def emergency(budget: int, running: Sequence[tuple[T, int]]) -> tuple[int, list[T]]:
    """Halve the pages of rollouts in a burst of serving.

    Args:
      budget: pages that rollouts may have. running: rollouts in the order of their starts, and the pages of each.

    Returns:
      The new budget, which stays until the next training step, and the rollouts to abort, the youngest first.
    """
    budget, used, victims = budget // 2, sum(pages for _, pages in running), []
    for rollout, pages in reversed(running):
        if used <= budget:
            break
        victims.append(rollout)
        used -= pages
    return budget, victims


class LinearPredictor:
    """Seconds as a linear function of numbers, fitted to the last observations, plus a margin that 95 % of them keep.

    Args:
      window: observations that count. every: observations after which it is fitted again.
    """

    def __init__(self, window: int = 256, every: int = 16) -> None:
        self._seen: deque[tuple[float, ...]] = deque(maxlen=window)
        self._every, self._num_seen = every, 0
        self._weights = np.zeros(0)
        self.margin_s = 0.0

    def observe(self, seconds: float, *numbers: float) -> None:
        """Add an observation."""
        self._seen.append((seconds, 1.0, *numbers))
        self._num_seen += 1
        if self._num_seen <= self._every or self._num_seen % self._every == 0:
            rows = np.array(self._seen)
            self._weights = np.linalg.lstsq(rows[:, 1:], rows[:, 0], rcond=None)[0]
            self.margin_s = max(0.0, float(np.quantile(rows[:, 0] - rows[:, 1:] @ self._weights, 0.95)))

    def __call__(self, *numbers: float) -> float:
        """Return the predicted seconds, with the margin; 0 before the first observation."""
        return float(self._weights @ (1.0, *numbers)) + self.margin_s if len(self._weights) else 0.0


# ---- serving on the virtual clock


@dataclasses.dataclass(frozen=True)
class ServingTimings(Checked):
    """Requests of users to the sampler's replicas, which come before rollouts. Each replica gets its own."""

    requests_s: Annotated[float, Range(above=0)] = 1.0
    """Requests per second to each replica outside of bursts."""
    burst: Annotated[float, Range(low=1)] = 5.0
    """Factor on the rate in bursts."""
    burst_every_s: Annotated[float, Range(above=0)] = 120.0
    """Seconds from the beginning of a burst to that of the next."""
    burst_s: Annotated[float, Range(low=0)] = 20.0
    """Seconds of a burst."""
    seconds: Annotated[float, Range(above=0)] = 3600.0
    """Seconds after which no more requests come."""
    prompt_tok: Annotated[int, Range(low=1)] = 1000
    """Tokens of a request's prompt."""
    answer_tok: Annotated[int, Range(low=1)] = 100
    """Tokens of a request's answer."""
    headroom_frac: Annotated[float, Range(low=0, below=1)] = 0.2
    """Share of a replica's room for context (`EngineTimings.kv_tok`) that stays free. Where users need it, rollouts
    lose half of theirs until the next version."""
    chunk_tok: Annotated[int, Range(low=1)] = 2048
    """Most prompt tokens of users in an iteration of the engine."""
    ttft_s: Annotated[float, Range(above=0)] = 0.45
    """Bound on the time to a request's first token."""
    tpot_s: Annotated[float, Range(above=0)] = 1.0
    """Bound on the time from a token to the next."""
    reserve_frac: Annotated[float, Range(low=0, below=1)] = 0.8
    """Share of the bounds that rollouts leave free, for requests that are yet to come."""
    rollouts: bool = True
    """Rollouts run in what the bounds leave; False: only while no user is served, for comparison."""


@dataclasses.dataclass(eq=False)
class ServedRequest:
    """A user's request."""

    arrival_s: float
    prefill_tok: int
    """Prompt tokens that are still to be computed."""
    left_tok: int
    """Answer tokens that are still to be sampled."""
    context_tok: int
    """Tokens of prompt and answer."""
    first_s: float = math.nan
    """Time of the first token."""
    last_s: float = 0.0
    """Time of the last token so far."""


class CoServing:
    """The serving of one replica, whose rollouts stand still while users are served: two programs take turns on its
    devices.

    Before each iteration for users the rollouts get a decode step if `admits` says that no user notices.
    """

    def __init__(
        self, replica: Replica, fleet: Fleet, engine: EngineTimings, serving: ServingTimings, seed: int
    ) -> None:
        self.replica, self._fleet, self._engine, self._serving = replica, fleet, engine, serving
        self._arrivals = deque(arrivals(serving, np.random.default_rng((seed, replica.index))))
        self._waiting: deque[ServedRequest] = deque()
        self._decoding: list[ServedRequest] = []
        self._seconds = LinearPredictor()
        self.done: list[ServedRequest] = []
        """Answered requests."""
        self.cuts: list[float] = []
        """Times at which rollouts lost half of their memory."""
        self.turns, self.refused = 0, 0
        """Decode steps that rollouts got while users were served, and decode steps that were refused."""

    async def run(self) -> None:
        """Serve all requests."""
        loop = asyncio.get_running_loop()
        while self._arrivals or self._waiting or self._decoding:
            if not self._waiting and not self._decoding:
                await asyncio.sleep(max(0.0, self._arrivals[0] - loop.time()))
            self._arrive(loop.time())
            self._make_room()
            rollout_s, rollouts = self._rollout_turn(loop.time())
            if rollout_s:
                await asyncio.sleep(rollout_s)
                self._arrive(loop.time())
            prefilled, seconds = self._take_prompts()
            self.replica.pause(seconds)
            await asyncio.sleep(seconds)
            self._seconds.observe(rollout_s + seconds, prefilled, rollouts)
            self._sample(loop.time())

    def _arrive(self, now_s: float) -> None:
        while self._arrivals and self._arrivals[0] <= now_s:
            at_s = self._arrivals.popleft()
            prompt_tok, answer_tok = self._serving.prompt_tok, self._serving.answer_tok
            self._waiting.append(ServedRequest(at_s, prompt_tok, answer_tok, prompt_tok + answer_tok))

    def _make_room(self) -> None:
        """Abort rollouts of this replica if users need their memory."""
        room = self._engine.kv_tok * (1 - self._serving.headroom_frac)
        if not room or self._fleet.is_cut(self.replica):
            return
        rollouts = [(answer, answer.prompt_tok + tok) for answer, tok in self.replica.running()]
        users_tok = sum(r.context_tok for r in [*self._waiting, *self._decoding])
        rollouts_tok = sum(tok for _, tok in rollouts)
        if rollouts and users_tok + rollouts_tok > room:
            _, victims = emergency(rollouts_tok, rollouts)
            self._fleet.cut(self.replica, victims)
            self.cuts.append(asyncio.get_running_loop().time())

    def _rollout_turn(self, now_s: float) -> tuple[float, int]:
        """Return the seconds of a decode step of the rollouts, and their number; zeros if they get none."""
        number, engine, serving = len(self.replica), self._engine, self._serving
        if not number:
            return 0.0, 0
        slacks, ahead, bound = [], 0, 1 - serving.reserve_frac
        for request in self._waiting:
            ahead += request.prefill_tok
            slacks.append(slack_s(now_s, request.arrival_s, bound * serving.ttft_s, self._seconds(ahead, number)))
        computed = min(ahead, serving.chunk_tok)
        slacks += [
            slack_s(now_s, r.last_s, bound * serving.tpot_s, self._seconds(computed, number)) for r in self._decoding
        ]
        if not serving.rollouts or not admits(slacks):
            self.refused += 1
            return 0.0, 0
        self.turns += 1
        return engine.step_s + engine.sequence_s * number, number

    def _take_prompts(self) -> tuple[int, float]:
        """Take prompt tokens for an iteration; return their number, and the seconds of the iteration."""
        room, engine = self._serving.chunk_tok, self._engine
        for request in self._waiting:
            taken = min(room, request.prefill_tok)
            request.prefill_tok -= taken
            room -= taken
        taken = self._serving.chunk_tok - room
        return taken, engine.step_s + engine.sequence_s * len(self._decoding) + engine.prefill_s * taken

    def _sample(self, now_s: float) -> None:
        while self._waiting and not self._waiting[0].prefill_tok:
            request = self._waiting.popleft()
            request.first_s = now_s
            self._decoding.append(request)
        for request in self._decoding:
            request.left_tok -= 1
            request.last_s = now_s
        self.done += [r for r in self._decoding if not r.left_tok]
        self._decoding = [r for r in self._decoding if r.left_tok]


def arrivals(serving: ServingTimings, rng: np.random.Generator) -> list[float]:
    """Return the times of requests: a Poisson process whose rate rises in bursts, first in the middle of a period."""
    found: list[float] = []
    now_s = 0.0
    while True:
        now_s += rng.exponential(1 / (serving.requests_s * serving.burst))
        if now_s >= serving.seconds:
            return found
        phase = (now_s - serving.burst_every_s / 2) % serving.burst_every_s
        if phase < serving.burst_s or rng.random() < 1 / serving.burst:
            found.append(now_s)
