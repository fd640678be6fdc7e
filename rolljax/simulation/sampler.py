"""A sampler that computes nothing and only takes time: waiting answers, and the replica that decodes each."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from rolljax.cluster.router import RoutedRequest
from rolljax.errors import ConfigError
from rolljax.sampler.prompt_queue import SamplerStats
from rolljax.simulation.fleet import Fleet
from rolljax.simulation.replica import FIRST_TURN, GONE, Replica, SimulatedAnswer
from rolljax.simulation.timings import ClusterTimings, Timings
from rolljax.types import DrainedSampler, SamplerGap

SIBLINGS = 2**20
"""More siblings than a group has: an answer's priority is that of its group, then that of its sibling."""


class SimulatedSampler:
    """Answers of given lengths, decoded by the replicas of `timings`.

    Args:
      slots: of all replicas together. group_size: answers of a prompt, for `scheduling = 'group'`. seed: of what
        happens to the replicas.
    """

    def __init__(self, timings: Timings, slots: int, group_size: int, steps_per_dispatch: int, seed: int) -> None:
        engine, cluster = timings.engine, timings.cluster
        if slots % engine.replicas or (engine.scheduling == "group" and slots // engine.replicas < group_size):
            raise ConfigError(
                f"does not divide over {engine.replicas} replicas, or a group has no room in one",
                setting="SamplerConfig.slots",
                value=slots,
                remedy="choose a multiple of EngineTimings.replicas",
            )
        joining = len(cluster.join_s)
        if cluster.bandwidth_replicas > engine.replicas or joining >= engine.replicas:
            raise ConfigError(
                f"has {joining} that join and {cluster.bandwidth_replicas} of one kind: more than there are",
                setting="EngineTimings.replicas",
                value=engine.replicas,
                remedy="ClusterTimings.join_s and bandwidth_replicas are for some of the replicas",
            )
        if engine.scheduling == "group" and cluster != ClusterTimings():
            raise ConfigError("has no losses, speeds or kinds", setting="EngineTimings.scheduling", value="group")
        self.slots = slots
        self.ended: list[SimulatedAnswer] = []
        """All decoded answers, in the order of their ends, with aborted ones; one that was on a lost replica is there
        once for each of its replicas."""
        self.rerouted = 0
        """Answers that continued elsewhere after their replica was lost."""
        self._per_dispatch = steps_per_dispatch
        self._engine, self._group_size, self._each = engine, group_size, slots // engine.replicas
        self._answers: dict[int, SimulatedAnswer] = {}  # by the number of their request
        self._new: list[RoutedRequest] = []  # requests of the current instant
        self._asked, self._num_waiting, self._episodes = 0, 0, 0
        self._waiting: list[tuple[int, int, SimulatedAnswer]] = []  # for `scheduling = 'group'`
        self._homes: dict[tuple[int, int], Replica] = {}
        self._left: Counter[tuple[int, int]] = Counter()  # answers that a group on its own replica still has to get
        self._counts: Counter[str] = Counter()
        self._placing = False
        self.fleet = Fleet(
            engine,
            cluster,
            self._each,
            steps_per_dispatch,
            seed,
            finished=self._finished,
            returned=self._return,
            changed=self._place_soon,
        )

    @property
    def version(self) -> int:
        """Newest published version."""
        return self.fleet.version

    @property
    def is_full(self) -> bool:
        """Whether answers wait for a slot."""
        return self._num_waiting > 0

    @property
    def slots_each(self) -> int:
        """Slots of a replica."""
        return self._each

    @property
    def replicas(self) -> list[Replica]:
        """All replicas, including lost ones."""
        return self.fleet.replicas

    @property
    def stats(self) -> SamplerStats:
        """Totals since the start, in the form of a real sampler's."""
        steps = sum(r.steps for r in self.replicas)
        return SamplerStats(
            **self._counts,
            dispatches=round(steps / self._per_dispatch),
            steps=round(steps),
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

    async def generate(self, answer: SimulatedAnswer, *, sibling: int = 0, min_version: int = 0, tag: str = "") -> None:
        """Decode an answer; cancelling the wait gives it up.

        Args:
          min_version: of the weights that it needs. tag: its domain.
        """
        self._asked += 1
        self._num_waiting += 1
        self._counts["requests"] += 1
        answer.request = RoutedRequest(
            self._asked,
            answer.group,
            (*answer.group, sibling),
            min_version,
            tag,
            answer.priority,
        )
        self._answers[self._asked] = answer
        self._new.append(answer.request)
        self.fleet.wake()
        self._place_soon()
        try:
            await answer.done
        except asyncio.CancelledError:
            self._give_up(answer)
            raise

    def publish(self, version: int, *, pause_s: float, recompute: bool) -> None:
        """Let all replicas continue with new weights, after a pause."""
        self.fleet.publish(version, pause_s=pause_s, recompute=recompute)

    def has_cache(self, home: int, since_s: float) -> bool:
        """Return whether a replica still has what it computed at a time."""
        return self.replicas[home].up_since_s <= since_s

    def drain_far(self, gaps: Mapping[str, SamplerGap]) -> list[DrainedSampler]:
        return []

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
        together = self._engine.scheduling == "batch"
        if together and (any(len(r) for r in self.replicas) or self._num_waiting < self._episodes):
            return
        new, self._new = sorted(self._new, key=lambda r: (r.priority, r.number)), []
        if self._engine.scheduling == "group":
            self._place_groups(new)
            return
        for request in new:
            if request.number in self._answers and (name := self.fleet.router.place(request)):
                self._begin(request.number, self.replicas[int(name)])
        for name, request in self.fleet.router.take():
            self._begin(request.number, self.replicas[int(name)])

    def _begin(self, number: int, replica: Replica) -> None:
        answer = self._answers[number]
        replica.begin(answer)
        self._counts["prefill_tok"] += answer.computed_tok
        self._counts["reused_tok"] += answer.prompt_tok - answer.computed_tok
        self._num_waiting -= 1

    def _place_groups(self, new: list[RoutedRequest]) -> None:
        """Place answers at the replica of their group; groups wait for a replica with room for all of their answers."""
        for request in new:
            if answer := self._answers.get(request.number):
                heapq.heappush(self._waiting, (request.priority, request.number, answer))
        while self._waiting:
            _, number, answer = self._waiting[0]
            if not answer.is_over:
                if (replica := self._home(answer.group)) is None or not replica.free_slots:
                    return  # nor is there room for the groups after it
                self._begin(number, replica)
            heapq.heappop(self._waiting)

    def _home(self, group: tuple[int, int]) -> Replica | None:
        if group not in self._homes:
            groups = Counter(r.index for r in self._homes.values())
            best = min(self.replicas, key=lambda r: (groups[r.index], r.index))
            if (groups[best.index] + 1) * self._group_size > self._each:
                return None
            self._homes[group] = best
            self._left[group] = self._group_size
        return self._homes[group]

    # ---- the end

    def _finished(self, answer: SimulatedAnswer) -> None:
        self._counts["finished"] += 1
        self._end(answer)
        answer.done.set_result(None)

    def _give_up(self, answer: SimulatedAnswer) -> None:
        self._counts["aborted"] += 1
        if answer.replica < 0:
            self._num_waiting -= 1
            self._forget(answer)
        elif answer.ended_s < 0:
            self.replicas[answer.replica].give_up(answer)
            self._counts["aborted_tok"] += len(answer.versions)
            self._end(answer)
        self._place_soon()

    def _end(self, answer: SimulatedAnswer) -> None:
        self.ended.append(answer)
        self._counts["sampled_tok"] += len(answer.versions)
        self._forget(answer)
        self._left[answer.group] -= 1
        if self._left[answer.group] == 0:
            del self._homes[answer.group]
        self._place_soon()

    def _forget(self, answer: SimulatedAnswer) -> None:
        assert answer.request is not None
        del self._answers[answer.request.number]
        self.fleet.router.done(answer.request.number, answer.computed_tok, len(answer.versions))

    def _return(self, requests: list[RoutedRequest]) -> None:
        """Let answers of a lost replica continue elsewhere from the tokens that had arrived."""
        for request in requests:
            answer = self._answers[request.number]
            self.ended.append(dataclasses.replace(answer))
            arrived = len(answer.versions)
            self._counts["sampled_tok"] += arrived
            answer.kept.append(answer.versions)
            answer.kept_tok, answer.prompt_tok = answer.kept_tok + arrived, answer.prompt_tok + arrived
            answer.answer_tok -= arrived
            answer.num_steps -= arrived
            answer.home = FIRST_TURN if answer.home == FIRST_TURN else GONE
            answer.replica, answer.ended_s, answer.versions = -1, -1.0, answer.versions[:0]
            self.rerouted += 1
            self._num_waiting += 1
        self._new += requests
        self._place_soon()
