"""Settings of the host pool."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

from rolljax.errors import ConfigError, Range, check_fields
from rolljax.sandbox import SandboxConfig

Where = Literal["auto", "thread", "process", "ray"]


@dataclasses.dataclass(frozen=True)
class PoolConfig:
    """Settings of a pool: where episodes run, how many at a time, how long a call may take, and how many failures are
    accepted."""

    where: Where = "auto"
    """Place where episodes run. `auto`: as the environment declares (`EnvSpec.runs`). `thread`: in this process; a hang
    then costs a thread for good, and a crash ends the run. `process`: in worker processes. `ray`: in Ray actors, on
    this and other hosts."""
    workers: Annotated[int, Range(low=0)] = 0
    """Threads for environments that compute in this process; worker processes; Ray actors. 0: 2 threads, two processes
    for each processor (8 to 64), or as many actors as the pool's share of the cluster has processors for."""
    io_threads: Annotated[int, Range(low=1)] = 1024
    """Maximum number of threads for environments that wait for something outside (`runs = "thread"`). Further threads
    are started when calls occupy all existing ones."""
    episodes_per_worker: Annotated[int, Range(low=1)] = 64
    """Maximum number of open episodes per worker process or actor; further episodes wait until one is closed. Episodes
    share their worker's fate: a hang or crash of one costs the rest a restart."""
    max_crashes: Annotated[int, Range(low=0)] = 3
    """Number of crashes of a task's worker after which the task is set aside: its further episodes fail at once, with a
    fault of the environment. From its first crash on, its episodes run alone in a worker. 0: never set aside."""
    worker_lifetime: Annotated[int, Range(low=1)] = 1000
    """Episodes after which a worker process or actor is replaced, which frees memory that they leaked."""
    start_s: Annotated[float, Range(above=0, high=10000000.0, remedy="in seconds")] = 120.0
    """Longest time in seconds that the start of a worker may take; time in a queue does not count."""
    reset_s: Annotated[float, Range(above=0, high=10000000.0, remedy="in seconds")] = 60.0
    """Longest time in seconds that one `reset` call may take; time in a queue does not count."""
    step_s: Annotated[float, Range(above=0, high=10000000.0, remedy="in seconds")] = 30.0
    """Longest time in seconds that one `step` call may take, also applied to `reference_answer` and `rejected`; time in
    a queue does not count."""
    close_s: Annotated[float, Range(above=0, high=10000000.0, remedy="in seconds")] = 10.0
    """Longest time in seconds that one `close` call may take; time in a queue does not count."""
    episode_s: Annotated[float, Range(above=0, high=10000000.0, remedy="in seconds")] = 3600.0
    """Longest time in seconds that an episode may stay open, from the start of its reset to its close, the policy's
    time included."""
    max_observation_bytes: Annotated[int, Range(low=256)] = 262_144
    """Maximum size in bytes (as UTF-8) of an observation after one step; the middle of a longer one is cut out."""
    memory_gib: float = 0.0
    """Limit on the address space of a worker process, in GiB; 0: no limit."""
    max_fault_frac: Annotated[float, Range(low=0, high=1)] = 0.5
    """Largest share of the last `fault_window` episodes that may be lost to the infrastructure; above it, no more
    episodes are opened. Episodes lost because of a neighbour in their worker do not count. 1: no limit."""
    fault_window: Annotated[int, Range(low=1)] = 64
    """Newest episodes that `max_fault_frac` is a share of."""
    pass_env: tuple[str, ...] = ()
    """Environment variables that workers get although their names look like secrets."""
    sandboxes: SandboxConfig | None = None
    """Settings of the sandboxes that episodes use. Each process that runs episodes has them; they stay until another
    pool sets its own. None: as they are (`rolljax.sandbox.configure`)."""
    ray_address: str = ""
    """Address of a running Ray cluster; empty: the cluster that this process is connected to, otherwise a new one on
    this host."""
    ray_cpus_per_worker: Annotated[float, Range(low=0)] = 1.0
    """Number of CPUs that an actor requests from Ray."""

    def __post_init__(self) -> None:
        if self.where not in (choices := ("auto", "thread", "process", "ray")):
            raise ConfigError(f"is none of {', '.join(choices)}", setting="PoolConfig.where", value=self.where)
        check_fields(self)
        if self.memory_gib < 0 or 0 < self.memory_gib < 0.25:
            raise ConfigError(
                "is too little for a Python process",
                setting="PoolConfig.memory_gib",
                value=self.memory_gib,
                remedy="0 for no limit, or at least 0.25",
            )
