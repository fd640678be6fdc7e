"""Several processes, one program: `jax.distributed`, as the environment describes it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from rolljax.errors import ConfigError

if TYPE_CHECKING:
    pass


def is_asked_for() -> bool:
    """Return whether the environment names other processes: by `JAX_COORDINATOR_ADDRESS`, or as a TPU pod."""
    hosts = os.environ.get("TPU_PROCESS_ADDRESSES") or os.environ.get("TPU_WORKER_HOSTNAMES") or ""
    return bool(
        os.environ.get("JAX_COORDINATOR_ADDRESS") or os.environ.get("MEGASCALE_COORDINATOR_ADDRESS") or "," in hosts
    )


def start() -> int:
    """Join the processes that the environment asks for, before anything else touches a device.

    Reads `JAX_COORDINATOR_ADDRESS` (host:port of process 0), `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID`; TPU pods and the
    cluster managers that JAX knows need none of them.

    Returns:
      How many processes there are.

    Raises:
      ConfigError: they cannot be joined.
    """
    if not is_asked_for():
        return 1
    import jax

    try:
        if not jax.distributed.is_initialized():
            number, own = (_number(name) for name in ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID"))
            jax.distributed.initialize(num_processes=number, process_id=own)
    except (RuntimeError, ValueError) as e:
        raise ConfigError(
            f"leads to no other process: {str(e).strip().splitlines()[0]}",
            setting="JAX_COORDINATOR_ADDRESS",
            value=os.environ.get("JAX_COORDINATOR_ADDRESS"),
            remedy="set it, JAX_NUM_PROCESSES and JAX_PROCESS_ID in every process, or none of them",
        ) from e
    return jax.process_count()


def _number(name: str) -> int | None:
    value = os.environ.get(name)
    if value is None:
        return None
    if not value.isdigit():
        raise ConfigError("is no number", setting=name, value=value)
    return int(value)


def require_one(processes: int) -> None:
    """Raise `ConfigError` if there are more."""
    if processes > 1:
        raise ConfigError(
            f"joins {processes} processes, but this works in one",
            setting="JAX_COORDINATOR_ADDRESS",
            value=os.environ.get("JAX_COORDINATOR_ADDRESS"),
            remedy="leave it out here; several processes are for training (docs/scaling.md)",
        )
