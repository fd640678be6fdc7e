"""The shares of this process's pools in the CPUs of a Ray cluster.

A pool with a number of workers of its own (`PoolConfig.workers`) has what these ask for. The others divide what is left
evenly, and again whenever a pool joins or leaves: no actor of one pool waits for CPUs that idle actors of another hold.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence

from rolljax.concurrency.ray_connection import CONNECTION
from rolljax.envs.pool.settings import PoolConfig
from rolljax.errors import ConfigError

LEAST_CPUS = 0.1
"""Lower bound for `PoolConfig.ray_cpus_per_worker` when the number of actors is computed."""


@dataclasses.dataclass(eq=False)
class Share:
    """The current share of a pool in the cluster: number of actors, and CPUs for each."""

    cfg: PoolConfig
    workers: int = 1
    cpus: float = 0.0


def divide(processors: float, shares: Sequence[Share]) -> None:
    """Set every pool's share of a cluster's CPUs.

    Raises:
      ConfigError: pools with an explicit `workers` leave no CPU for the other pools.
    """
    asked = sum(share.cfg.workers * share.cfg.ray_cpus_per_worker for share in shares)
    others = sum(share.cfg.workers == 0 for share in shares)
    if others and processors <= asked:
        raise ConfigError(
            f"leaves nothing of the cluster's {processors:g} CPUs to {others} other pools on Ray",
            setting="PoolConfig.workers",
            value=[share.cfg.workers for share in shares if share.cfg.workers],
            remedy="fewer workers, a lower PoolConfig.ray_cpus_per_worker, or a number of workers for every pool",
        )
    for share in shares:
        wanted = share.cfg.ray_cpus_per_worker
        if share.cfg.workers:
            share.workers, share.cpus = share.cfg.workers, wanted
        else:
            each = (processors - asked) / others
            share.workers = max(1, int(each / max(wanted, LEAST_CPUS)))
            share.cpus = wanted if wanted <= each else 0.0  # a part of it might fit on no host


class RayCluster:
    """The cluster that the pools of this process share. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._shares: list[Share] = []

    def join(self, cfg: PoolConfig) -> Share:
        """Connect unless a connection exists, and return a share, which changes when other pools join or leave.

        Raises:
          ConfigError: no CPU is left, or see `RayConnection.join`. InfraError: no cluster is there.
        """
        CONNECTION.join(cfg.ray_address, "PoolConfig.ray_address", "PoolConfig.where = 'ray'", "set it to 'process'")
        share = Share(cfg)
        with self._lock:
            try:
                divide(_processors(), [*self._shares, share])
            except ConfigError:
                CONNECTION.leave()
                raise
            self._shares.append(share)
        return share

    def leave(self, share: Share) -> None:
        """Give up a pool's share, and its use of the connection."""
        import ray

        with self._lock:
            self._shares.remove(share)
            if self._shares and ray.is_initialized():
                divide(_processors(), self._shares)
        CONNECTION.leave()


def _processors() -> float:
    import ray

    return float(ray.cluster_resources().get("CPU", 1.0))


CLUSTER = RayCluster()
"""The cluster of this process's pools."""
