"""Workers that score answers: a fixed number, or serverless ones that scale from zero (RollArt, arXiv 2512.22560)."""

from __future__ import annotations

import dataclasses
import heapq
from typing import Annotated, Literal

from rolljax.errors import Checked, Range
from rolljax.trainer.paper import Reproduction

REPRODUCTION = Reproduction(
    paper="2512.22560",
    name="RollArt",
    claim="trajectories that do not wait for each other, parts on the hardware that suits them",
    there="1.35 to 2.05 times as fast",
    here="1.65 times as fast where latencies spread by 10 s (simulated)",
    state="partly",
    seeds=1,
    why="simulated; no cluster of several kinds of hardware was used",
)


@dataclasses.dataclass(frozen=True)
class RewardTimings(Checked):
    """Workers for `EnvTimings.score_s`; each scores one answer at a time, and waiting answers form one queue."""

    kind: Literal["unlimited", "dedicated", "serverless"] = "unlimited"
    """`unlimited`: no answer waits. `dedicated`: `workers` are there all the time. `serverless`: a worker starts when
    an answer finds none idle, up to `workers`."""
    workers: Annotated[int, Range(low=1)] = 64
    """Most workers."""
    start_s: Annotated[float, Range(low=0)] = 2.0
    """Seconds until a serverless worker has started."""
    keep_s: Annotated[float, Range(low=0)] = 10.0
    """Seconds without work after which a serverless worker ends."""


class RewardWorkers:
    """Scores answers in the order in which they arrive, and counts the workers' time."""

    def __init__(self, timings: RewardTimings) -> None:
        self._timings = timings
        fixed = timings.workers if timings.kind == "dedicated" else 0
        self._free_s = [0.0] * fixed  # when each worker will have done all that it has been given
        self.busy_s = 0.0
        """Seconds of scoring."""
        self._alive_s = 0.0

    def score(self, now_s: float, seconds: float) -> float:
        """Return when an answer that arrives now is scored. Answers must arrive in the order of time."""
        t = self._timings
        self.busy_s += seconds
        if t.kind == "unlimited":
            self._alive_s += seconds
            return now_s + seconds
        if t.kind == "serverless":
            self._end_idle(now_s)
            if len(self._free_s) < t.workers and (not self._free_s or self._free_s[0] > now_s):
                heapq.heappush(self._free_s, now_s + t.start_s)
                self._alive_s += t.start_s
        free_s = heapq.heappop(self._free_s)
        end_s = max(now_s, free_s) + seconds
        self._alive_s += end_s - free_s
        heapq.heappush(self._free_s, end_s)
        return end_s

    def _end_idle(self, now_s: float) -> None:
        while self._free_s and self._free_s[0] + self._timings.keep_s < now_s:
            heapq.heappop(self._free_s)
            self._alive_s += self._timings.keep_s

    def alive_s(self, now_s: float) -> float:
        """Return the seconds for which workers have been there until now, summed over workers; call it once."""
        if self._timings.kind == "dedicated":
            return len(self._free_s) * now_s
        self._end_idle(now_s)
        return self._alive_s + sum(max(0.0, now_s - free_s) for free_s in self._free_s)
