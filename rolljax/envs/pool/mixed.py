"""The host pool of a mixture: one pool for each domain, used like a single pool."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Mapping

from rolljax.concurrency.waits import Sleeper
from rolljax.envs.base import EnvSpec
from rolljax.envs.mixture import Mixture
from rolljax.envs.pool.pool import EnvPool, Episode, PoolStats
from rolljax.envs.pool.settings import PoolConfig
from rolljax.errors import InfraError
from rolljax.types import Task


class MixedPool:
    """A pool for the episodes of a mixture. Episodes of a domain run in the place that its environment declares, or
    that `cfg` sets; each domain has its own limits and fault counts.

    cfg, spec: as of `EnvPool`.
    """

    def __init__(self, cfg: PoolConfig, spec: Mixture) -> None:
        self.cfg, self.spec = cfg, spec
        self._pools: dict[str, EnvPool] = {}
        with contextlib.ExitStack() as unless_made:
            unless_made.callback(self.close)
            for name, env in spec.specs.items():
                self._pools[name] = EnvPool(cfg, env)
            unless_made.pop_all()

    async def open(self, task: Task) -> Episode:
        """Open an episode of the task's domain; raises like `EnvPool.open`."""
        inner = self.spec.inner(task)
        try:
            episode = await self._pools[task.env].open(inner)
        except InfraError as e:
            if e.stage == "pool":
                raise InfraError(f"domain {task.env}: {e}", stage="pool") from e
            raise
        episode.domain = task.env
        return episode

    @property
    def broken(self) -> str:
        """The reason why a domain's pool opens no more episodes; empty while all do."""
        return next((f"domain {name}: {pool.broken}" for name, pool in self._pools.items() if pool.broken), "")

    @property
    def opens_at_once(self) -> bool:
        """Return whether opening an episode takes microseconds in every domain."""
        return all(pool.opens_at_once for pool in self._pools.values())

    @property
    def inboxes(self) -> tuple[Sleeper, ...]:
        """The inboxes on which threads of these pools wait without a deadline."""
        return tuple(inbox for pool in self._pools.values() for inbox in pool.inboxes)

    @property
    def stats(self) -> PoolStats:
        """The sums over all domains."""
        every = [pool.stats for pool in self._pools.values()]
        total: dict[str, object] = {}
        for field in dataclasses.fields(PoolStats):
            values = [getattr(stats, field.name) for stats in every]
            if isinstance(values[0], Mapping):
                total[field.name] = dict(sum(map(collections.Counter, values), collections.Counter()))
            else:
                total[field.name] = sum(values)
        return PoolStats(**total)  # type: ignore[arg-type]

    def close(self) -> None:
        """Close every domain's pool."""
        for pool in self._pools.values():
            pool.close()


Pool = EnvPool | MixedPool
"""A pool for the episodes of one environment, or of a mixture."""


def open_pool(cfg: PoolConfig, spec: EnvSpec) -> Pool:
    """Open the pool for the episodes of an environment."""
    return MixedPool(cfg, spec) if isinstance(spec, Mixture) else EnvPool(cfg, spec)
