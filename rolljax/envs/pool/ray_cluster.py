"""The connection of this process to a Ray cluster. It has one owner, however many pools use it, and each pool has its
share of the cluster's CPUs.

The first pool connects, and the last one that leaves disconnects; a connection that the program made itself is used and
left alone. A pool with a number of workers of its own (`PoolConfig.workers`) has what these ask for. The others divide
what is left evenly, and again whenever a pool joins or leaves: no actor of one pool waits for CPUs that idle actors of
another hold.
"""

from __future__ import annotations

import dataclasses
import logging
import signal
import threading
from collections.abc import Sequence

from rolljax.concurrency import signals
from rolljax.envs.pool.settings import PoolConfig
from rolljax.errors import ConfigError, needed

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
        self._connected_to: str | None = None  # None: not connected, or connected by the user's program

    def join(self, cfg: PoolConfig) -> Share:
        """Connect unless a connection exists, and return a share, which changes when other pools join or leave.

        Raises:
          ConfigError: Ray is not installed, another pool has connected to another cluster, or no CPU is left.
        """
        with needed("ray", "PoolConfig.where = 'ray'", install="rolljax[ray]", otherwise="set it to 'process'"):
            import ray
        with self._lock:
            if self._connected_to is not None and cfg.ray_address not in ("", self._connected_to):
                raise ConfigError(
                    f"is not the cluster that another pool uses ({self._connected_to or 'a new one on this host'})",
                    setting="PoolConfig.ray_address",
                    value=cfg.ray_address,
                    remedy="one process uses one cluster: give all pools the same address",
                )
            if not ray.is_initialized():
                with signals.restored(signal.SIGTERM):  # Ray's handler exits at once; a run must save first
                    ray.init(address=cfg.ray_address or None, log_to_driver=False, logging_level=logging.WARNING)
                self._connected_to = cfg.ray_address
            share = Share(cfg)
            try:
                divide(ray.cluster_resources().get("CPU", 1.0), [*self._shares, share])
            except ConfigError:
                self._disconnect_unless_used()
                raise
            self._shares.append(share)
            return share

    def leave(self, share: Share) -> None:
        """Give up a pool's share. The last pool to leave disconnects from the cluster if a pool had connected."""
        import ray

        with self._lock:
            self._shares.remove(share)
            if self._shares and ray.is_initialized():
                divide(ray.cluster_resources().get("CPU", 1.0), self._shares)
            self._disconnect_unless_used()

    def _disconnect_unless_used(self) -> None:
        if not self._shares and self._connected_to is not None:
            import ray

            ray.shutdown()
            self._connected_to = None


CLUSTER = RayCluster()
"""The cluster connection of this process."""
