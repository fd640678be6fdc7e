"""Several processes, one program: `jax.distributed`, as the environment describes it."""

from __future__ import annotations

import os
import socket

from rolljax.errors import ConfigError

SILENCE = "ROLLJAX_SILENCE_S"
"""Environment variable: seconds of silence of a process after which JAX ends the others."""
JAX_SILENCE_S = 100
"""JAX's own number of these seconds, used if the variable is not set."""
VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID", SILENCE)
"""Environment variables that a process started by one of several processes must not inherit."""
SAMPLER_SILENCE_S = 20
"""The same of a sampler's processes. A lost sampler costs little, because others continue its requests."""


def is_asked_for() -> bool:
    """Return whether the environment names other processes: by `JAX_COORDINATOR_ADDRESS`, or as a TPU pod."""
    hosts = os.environ.get("TPU_PROCESS_ADDRESSES") or os.environ.get("TPU_WORKER_HOSTNAMES") or ""
    return bool(
        os.environ.get("JAX_COORDINATOR_ADDRESS") or os.environ.get("MEGASCALE_COORDINATOR_ADDRESS") or "," in hosts
    )


def start() -> int:
    """Join the processes that the environment asks for, before anything else touches a device.

    Reads `JAX_COORDINATOR_ADDRESS` (host:port of process 0), `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID`, which TPU pods
    and the cluster managers that JAX knows do not need, and `SILENCE`.

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
            number, own, silence_s = (_number(name) for name in VARIABLES[1:])
            jax.distributed.initialize(
                num_processes=number, process_id=own, heartbeat_timeout_seconds=silence_s or JAX_SILENCE_S
            )
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


def variables(coordinator: str, processes: int, process: int) -> dict[str, str]:
    """Return the `VARIABLES` of one of several processes of a sampler, for `start`; none of a single process.

    Args:
      coordinator: host and free port of process 0.
    """
    values = (coordinator, str(processes), str(process), str(SAMPLER_SILENCE_S))
    return dict(zip(VARIABLES, values, strict=True)) if processes > 1 else {}


def reserve_port() -> tuple[socket.socket, int]:
    """Reserve a free port of this machine for a server that another process starts.

    Returns:
      A socket and its port. While the socket is open, a program that asks for any free port does not get this one. A
      server that sets `SO_REUSEADDR`, as most do, can listen on it.
    """
    reservation = socket.socket()
    reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reservation.bind(("", 0))
    return reservation, int(reservation.getsockname()[1])


def require_one(processes: int) -> None:
    """Raise `ConfigError` if there are more."""
    if processes > 1:
        raise ConfigError(
            f"joins {processes} processes, but this works in one",
            setting="JAX_COORDINATOR_ADDRESS",
            value=os.environ.get("JAX_COORDINATOR_ADDRESS"),
            remedy="leave it out here; several processes are for training and sampling (docs/scaling.md)",
        )
