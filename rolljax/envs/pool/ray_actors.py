"""The link to workers that are Ray actors, on this and other hosts.

An actor holds the same `WorkerEpisodes` as a worker process and gets the same requests, one Ray call each; Ray carries
them out in their order. How an actor died is not known as well as for a process: whatever it was counts as
infrastructure, and its task is to blame when it was alone with its actor.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import pickle
import queue
from collections.abc import Mapping, Sequence
from typing import Any

from rolljax.concurrency.waits import Inbox
from rolljax.envs.base import EnvSpec
from rolljax.envs.pool import wire
from rolljax.envs.pool.episode_runner import describe
from rolljax.envs.pool.link import LinkEvents
from rolljax.envs.pool.processes import spec_bytes, worker_environ
from rolljax.envs.pool.ray_cluster import CLUSTER
from rolljax.envs.pool.settings import PoolConfig
from rolljax.sandbox import SandboxConfig, configure, settings

PASSED = ("JAX_PLATFORMS", "PYTHONHASHSEED", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class Actor:
    """The class of Ray's actors."""

    def __init__(self, spec: bytes, max_bytes: int, sandboxes: SandboxConfig) -> None:
        configure(sandboxes)
        self._episodes = wire.WorkerEpisodes(pickle.loads(spec), max_bytes)

    def ready(self) -> bytes:
        return wire.HELLO

    def answer(self, request: wire.Request) -> bytes:
        return self._episodes.answer(request)


@dataclasses.dataclass(eq=False)
class _Pending:
    """A Ray call on its way: `payload` or `error` when it came back."""

    generation: int
    payload: bytes | None = None
    error: str = ""


@dataclasses.dataclass(eq=False)
class _ActorPeer:
    """An actor, and the CPUs that it holds."""

    actor: Any
    cpus: float
    pending: collections.deque[_Pending] = dataclasses.field(default_factory=collections.deque)
    ready: bool = False


class RayLink:
    """Actors spread over a cluster: the one this process is connected to, `PoolConfig.ray_address`, or a new one. Other
    pools of this process may use it too; each has its share of the CPUs."""

    def __init__(self, cfg: PoolConfig, spec: EnvSpec) -> None:
        self._cfg, self._spec = cfg, spec_bytes(spec)
        environ = worker_environ(os.environ, cfg.pass_env)
        passed = {name: environ[name] for name in (*PASSED, *_passed(cfg, environ))}
        self._options = {"scheduling_strategy": "SPREAD", "max_restarts": 0, "runtime_env": {"env_vars": passed}}
        self._share = CLUSTER.join(cfg)
        import ray

        self._ray = ray
        self._peers: dict[int, _ActorPeer] = {}
        self._news: Inbox[_Pending | None] = Inbox("the dispatcher of the environments")

    @property
    def num_workers(self) -> int:
        return self._share.workers

    def is_oversized(self, generation: int) -> bool:
        return self._peers[generation].cpus > self._share.cpus

    def start(self, generation: int) -> None:
        cpus = self._share.cpus
        cls = self._ray.remote(Actor).options(num_cpus=cpus, **self._options)
        actor = cls.remote(self._spec, self._cfg.max_observation_bytes, settings())
        peer = self._peers[generation] = _ActorPeer(actor, cpus)
        self._await(generation, peer, peer.actor.ready.remote())

    def send(self, generation: int, requests: Sequence[wire.Request]) -> None:
        peer = self._peers.get(generation)
        for request in requests if peer is not None else ():
            assert peer is not None
            self._await(generation, peer, peer.actor.answer.remote(request))

    def kill(self, generation: int) -> None:
        peer = self._peers.pop(generation, None)
        if peer is not None:
            self._ray.kill(peer.actor)

    def wake(self) -> None:
        self._news.put(None)

    def poll(self, timeout_s: float, events: LinkEvents) -> None:
        with contextlib.suppress(queue.Empty):
            self._tell(self._news.take(timeout_s), events)
            while self._news:
                self._tell(self._news.take(), events)

    def close(self) -> None:
        for generation in list(self._peers):
            self.kill(generation)
        CLUSTER.leave(self._share)

    def _await(self, generation: int, peer: _ActorPeer, ref: Any) -> None:
        pending = _Pending(generation)
        peer.pending.append(pending)

        def back(future: Any) -> None:
            error = future.exception()
            if error is None:
                pending.payload = future.result()
            else:
                pending.error = describe(error)
            self._news.put(pending)

        ref.future().add_done_callback(back)

    def _tell(self, news: _Pending | None, events: LinkEvents) -> None:
        """Forward the results, in the order of the requests."""
        if news is None or (peer := self._peers.get(news.generation)) is None:
            return
        while peer.pending and (peer.pending[0].payload is not None or peer.pending[0].error):
            first = peer.pending.popleft()
            if first.payload is None:
                events.ended(news.generation, f"its actor failed: {first.error}", "unknown")
                return
            if peer.ready:
                events.replied(news.generation, first.payload)
            else:
                peer.ready = True
                events.ready(news.generation)


def _passed(cfg: PoolConfig, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the existing variables that the user passes to actors."""
    return tuple(name for name in cfg.pass_env if name in environ)
