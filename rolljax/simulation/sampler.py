"""A sampler that computes nothing and only takes time: waiting answers, and the replica that decodes each."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
from collections import Counter
from collections.abc import Callable, Iterator

from rolljax.errors import ConfigError
from rolljax.sampler.prompt_queue import SamplerStats
from rolljax.simulation.replica import Replica, SimulatedAnswer
from rolljax.simulation.timings import EngineTimings


class SimulatedSampler:
    """Answers of given lengths, decoded by the replicas of `timings`.

    Args:
      slots: of all replicas together. group_size: answers of a prompt, for `scheduling = 'group'`.
    """

    def __init__(self, timings: EngineTimings, slots: int, group_size: int, steps_per_dispatch: int) -> None:
        if slots % timings.replicas or (timings.scheduling == "group" and slots // timings.replicas < group_size):
            raise ConfigError(
                f"does not divide over {timings.replicas} replicas, or a group has no room in one",
                setting="SamplerConfig.slots",
                value=slots,
                remedy="choose a multiple of EngineTimings.replicas",
            )
        self.slots, self.version = slots, 0
        self.ended: list[SimulatedAnswer] = []
        """All decoded answers, in the order of their ends, including aborted ones."""
        self._per_dispatch = steps_per_dispatch
        self._timings, self._group_size, self._each = timings, group_size, slots // timings.replicas
        self.replicas = [Replica(i, self._each, timings, self._finished) for i in range(timings.replicas)]
        self._waiting: list[tuple[tuple[int, ...], int, SimulatedAnswer]] = []
        self._asked, self._num_waiting, self._episodes = 0, 0, 0
        self._homes: dict[tuple[int, int], Replica] = {}
        self._left: Counter[tuple[int, int]] = Counter()  # answers that a group on its own replica still has to get
        self._counts: Counter[str] = Counter()
        self._placing = False

    @property
    def stats(self) -> SamplerStats:
        """Totals since the start, in the form of a real sampler's."""
        steps = sum(r.steps for r in self.replicas)
        return SamplerStats(
            **self._counts,
            dispatches=round(steps / self._per_dispatch),
            slot_steps=round(steps * self._each),
            busy_slot_steps=self._counts["sampled_tok"],
            generate_s=sum(r.running_s for r in self.replicas),
            held_s=sum(r.held_s() for r in self.replicas),
        )

    @contextlib.contextmanager
    def episode(self) -> Iterator[None]:
        """Count an episode as running inside this context; it requests one answer after the other."""
        self._episodes += 1
        try:
            yield
        finally:
            self._episodes -= 1
            self._place_soon()

    async def generate(self, answer: SimulatedAnswer) -> None:
        """Decode an answer; cancelling the wait gives it up."""
        self._asked += 1
        self._num_waiting += 1
        self._counts["requests"] += 1
        heapq.heappush(self._waiting, (answer.priority, self._asked, answer))
        self._place_soon()
        try:
            await answer.done
        except asyncio.CancelledError:
            self._give_up(answer)
            raise

    def publish(self, version: int, *, pause_s: float, recompute: bool) -> None:
        """Let all replicas continue with new weights, after a pause."""
        self.version = version
        for replica in self.replicas:
            replica.take_weights(version, recompute=recompute)
            replica.pause(pause_s)

    def hold(self) -> Callable[[], None]:
        """Do nothing: requests of one moment start together anyway."""
        return lambda: None

    def pause(self, seconds: float) -> None:
        """Decode nothing for this long."""
        for replica in self.replicas:
            replica.pause(seconds)

    # ---- placing

    def _place_soon(self) -> None:
        """Place waiting answers after all events of the current instant have been handled."""
        if not self._placing:
            self._placing = True
            asyncio.get_running_loop().call_soon(self._place)

    def _place(self) -> None:
        self._placing = False
        together = self._timings.scheduling == "batch"
        if together and (any(len(r) for r in self.replicas) or self._num_waiting < self._episodes):
            return
        free = sum(len(r.free_slots) for r in self.replicas)
        while self._waiting and free:
            answer = self._waiting[0][2]
            if not answer.is_over:
                if (replica := self._replica(answer)) is None:
                    return  # nor is there room for the groups after it
                self._begin(answer, replica)
                free -= 1
            heapq.heappop(self._waiting)

    def _begin(self, answer: SimulatedAnswer, replica: Replica) -> None:
        computed = replica.begin(answer)
        self._counts["prefill_tok"] += computed
        self._counts["reused_tok"] += answer.prompt_tok - computed
        self._num_waiting -= 1

    def _replica(self, answer: SimulatedAnswer) -> Replica | None:
        """Return the replica for an answer: the one it ran on before, else the one with the most free slots."""
        if self._timings.scheduling == "group":
            return self._group_replica(answer)
        if answer.home >= 0 and self.replicas[answer.home].free_slots:
            return self.replicas[answer.home]
        return max(self.replicas, key=lambda r: (len(r.free_slots), -r.index))

    def _group_replica(self, answer: SimulatedAnswer) -> Replica | None:
        if answer.group not in self._homes:
            groups = Counter(r.index for r in self._homes.values())
            best = min(self.replicas, key=lambda r: (groups[r.index], r.index))
            if (groups[best.index] + 1) * self._group_size > self._each:
                return None
            self._homes[answer.group] = best
            self._left[answer.group] = self._group_size
        return self._homes[answer.group]

    # ---- the end

    def _finished(self, answer: SimulatedAnswer) -> None:
        self._counts["finished"] += 1
        self._end(answer)
        answer.done.set_result(None)

    def _give_up(self, answer: SimulatedAnswer) -> None:
        self._counts["aborted"] += 1
        if answer.replica < 0:
            self._num_waiting -= 1
        elif answer.ended_s < 0:
            self.replicas[answer.replica].give_up(answer)
            self._counts["aborted_tok"] += len(answer.versions)
            self._end(answer)
        self._place_soon()

    def _end(self, answer: SimulatedAnswer) -> None:
        self.ended.append(answer)
        self._counts["sampled_tok"] += len(answer.versions)
        self._left[answer.group] -= 1
        if self._left[answer.group] == 0:
            del self._homes[answer.group]
        self._place_soon()
