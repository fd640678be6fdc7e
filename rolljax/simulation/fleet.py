"""The replicas of a simulated sampler, and what happens to them: they fetch weights, are lost, come back, and join."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable

import numpy as np

from rolljax.cluster.affinity import Affinity, AffinityConfig
from rolljax.cluster.router import RoutedRequest, Router
from rolljax.simulation.replica import Replica, SimulatedAnswer
from rolljax.simulation.timings import ClusterTimings, Distribution, EngineTimings

SLOW, LOSSES, FETCHES = 10, 11, 12
"""Purpose of a random number; part of its address."""
COMPUTE, BANDWIDTH = "compute", "bandwidth"


class Fleet:
    """Replicas and their router.

    Args:
      slots: of a replica. finished: called with each answer that has all of its tokens. returned: called with the
        requests of a lost replica, which have to be placed again. changed: called when waiting requests may be placed.
    """

    def __init__(
        self,
        engine: EngineTimings,
        cluster: ClusterTimings,
        slots: int,
        steps_per_dispatch: int,
        seed: int,
        *,
        finished: Callable[[SimulatedAnswer], None],
        returned: Callable[[list[RoutedRequest]], None],
        changed: Callable[[], None],
    ) -> None:
        number, others = engine.replicas, engine.replicas - cluster.bandwidth_replicas
        self.version, self.losses = 0, 0
        self._cluster, self._slots, self._per_dispatch, self._seed = cluster, slots, steps_per_dispatch, seed
        self._returned, self._changed = returned, changed
        self._losses_rng = self._rng(LOSSES)
        self._lent: list[Replica] = []
        self._idle: list[Replica] = []  # whose time to be lost came while there was nothing to do
        affinity = Affinity(AffinityConfig(COMPUTE, BANDWIDTH, cluster.affinity_ratio))
        self.router = Router(
            siblings_together=cluster.siblings_together,
            affinity=affinity if cluster.affinity and 0 < others < number else None,
        )
        slow = set(self._rng(SLOW).permutation(number)[: round(cluster.slow_frac * number)].tolist())
        self.replicas: list[Replica] = []
        for index in range(number):
            prefill = decode = cluster.slow_factor if index in slow else 1.0
            if index >= others:
                prefill, decode = prefill / cluster.bandwidth_prefill_speed, decode / cluster.bandwidth_decode_speed
            self.replicas.append(Replica(index, slots, slower(engine, prefill, decode), finished))
        joining = dict(zip(self.replicas[::-1], cluster.join_s, strict=False))
        for replica in self.replicas:
            if replica not in joining:
                self._join(replica)
        self.router.push(0)
        for replica in self.replicas:
            if replica in joining:
                asyncio.get_running_loop().call_later(joining[replica], self._join_ready, replica)
            else:
                self._ready(replica)

    def _rng(self, *address: int) -> np.random.Generator:
        return np.random.default_rng((self._seed % 2**31, *address))

    @staticmethod
    def name(replica: Replica) -> str:
        """Return the name of a replica in the router."""
        return f"{replica.index:06d}"

    # ---- weights

    def publish(self, version: int, *, pause_s: float, recompute: bool) -> None:
        """Let all replicas continue with new weights, each after it has fetched them and paused."""
        self.version = version
        self.router.push(version)
        fetch_s, rng = self._cluster.fetch_s, self._rng(FETCHES, version)
        for replica in self.replicas:
            if fetch_s == Distribution():
                self._swap(replica, version, pause_s, recompute)
            else:
                call_later = asyncio.get_running_loop().call_later
                call_later(fetch_s.draw(rng), self._swap, replica, version, pause_s, recompute)

    def _swap(self, replica: Replica, version: int, pause_s: float, recompute: bool) -> None:
        member = self.router.members.get(self.name(replica))
        if member is None or member.where != "ready" or member.version >= version:
            return
        replica.take_weights(version, recompute=recompute)
        replica.pause(pause_s)
        member.cap = self._slots
        self.router.swapped(member.name, version)
        self._changed()

    # ---- membership

    def _join(self, replica: Replica) -> None:
        first_of_other_kind = len(self.replicas) - self._cluster.bandwidth_replicas
        kind = BANDWIDTH if replica.index >= first_of_other_kind else COMPUTE
        self.router.join(self.name(replica), self._slots, kind)

    def _join_ready(self, replica: Replica) -> None:
        self._join(replica)
        self._ready(replica)

    def _ready(self, replica: Replica) -> None:
        replica.start(self.version)
        self.router.ready(self.name(replica), self.version)
        self._await_loss(replica)
        self._changed()

    def _await_loss(self, replica: Replica) -> None:
        if self._cluster.mtbf_s:
            seconds = self._losses_rng.exponential(self._cluster.mtbf_s)
            asyncio.get_running_loop().call_later(seconds, self._lose, replica)

    def _lose(self, replica: Replica) -> None:
        if not self.router.busy:  # else an idle simulation would have events for ever
            self._idle.append(replica)
            return
        self.losses += 1
        replica.lose(self._per_dispatch)
        returned = self.router.lost(self.name(replica))
        self._join(replica)
        asyncio.get_running_loop().call_later(self._cluster.rejoin_s, self._ready, replica)
        self._returned(returned)

    def lend(self, number: int) -> None:
        """Take the last `number` replicas away; their answers continue at the others, with all of their tokens."""
        self._lent = self.replicas[len(self.replicas) - number :]
        for replica in self._lent:
            replica.lose(1)
            returned = self.router.lost(self.name(replica))
            self._join(replica)
            self._returned(returned)

    def cut(self, replica: Replica, answers: list[SimulatedAnswer]) -> None:
        """Let some answers of a replica continue elsewhere; until the next version it has no more than the others."""
        member = self.router.members[self.name(replica)]
        replica.evict(answers, self._per_dispatch)
        requests = [answer.request for answer in answers if answer.request]
        for request in requests:
            self.router.done(request.number)
        member.cap = max(1, len(member.requests))
        self._returned(requests)

    def is_cut(self, replica: Replica) -> bool:
        """Return whether a replica has a lower cap until the next version."""
        return self.router.members[self.name(replica)].cap < self._slots

    def take_back(self) -> None:
        """Let the lent replicas decode again, from the next version on."""
        lent, self._lent = self._lent, []
        for replica in lent:
            self._ready(replica)

    def wake(self) -> None:
        """Note that there is something to do again."""
        idle, self._idle = self._idle, []
        for replica in idle:
            self._await_loss(replica)


def slower(engine: EngineTimings, prefill: float, decode: float) -> EngineTimings:
    """Return the timings with `prefill` times the seconds of prefill and `decode` times those of decode steps."""
    return dataclasses.replace(
        engine,
        step_s=engine.step_s * decode,
        sequence_s=engine.sequence_s * decode,
        context_s=engine.context_s * decode,
        prefill_s=engine.prefill_s * prefill,
        prefill_call_s=engine.prefill_call_s * prefill,
    )
