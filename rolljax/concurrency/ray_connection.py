"""The connection of this process to a Ray cluster. It has one owner, however many parts of the program use it.

The first user connects, and the last one that leaves disconnects; a connection that the program made itself is used and
left alone. Workers of environments and rewards (`envs.pool.ray_cluster`) and samplers (`cluster.ray_launcher`) use it.
"""

from __future__ import annotations

import logging
import signal
import threading

from rolljax.concurrency import signals
from rolljax.errors import ConfigError, InfraError, boundary, needed


class RayConnection:
    """Counts the users of the connection. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._connected_to: str | None = None  # None: not connected, or connected by the user's program

    def join(self, address: str, setting: str, feature: str, otherwise: str) -> None:
        """Connect unless a connection exists; each user calls `leave` once.

        Args:
          address: of a running cluster; empty: any, and a new one on this host if there is no connection.
          setting: name of the setting with the address. feature, otherwise: see `needed`.

        Raises:
          ConfigError: Ray is not installed, or another user has connected to another cluster.
          InfraError: there is no cluster at the address.
        """
        with needed("ray", feature, install="rolljax[ray]", otherwise=otherwise):
            import ray
        with self._lock:
            if self._connected_to is not None and address not in ("", self._connected_to):
                raise ConfigError(
                    f"is not the cluster that this process uses ({self._connected_to or 'a new one on this host'})",
                    setting=setting,
                    value=address,
                    remedy="one process uses one cluster: give the same address everywhere",
                )
            if not ray.is_initialized():
                with (
                    signals.restored(signal.SIGTERM),  # Ray's handler exits at once; a run must save first
                    boundary(InfraError, f"no connection to Ray at {address or 'this host'} ({setting})"),
                ):
                    ray.init(address=address or None, log_to_driver=False, logging_level=logging.WARNING)
                self._connected_to = address
            self._users += 1

    def leave(self) -> None:
        """End the use of the connection. The last user disconnects, if one had connected."""
        import ray

        with self._lock:
            self._users -= 1
            if self._users == 0 and self._connected_to is not None:
                ray.shutdown()
                self._connected_to = None


CONNECTION = RayConnection()
"""The Ray connection of this process."""
