"""Settings of sandboxes: limits of the code inside (`Profile`), and how this machine makes them (`SandboxConfig`)."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

from rolljax.errors import Checked, ConfigError, Range, check_fields

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


@dataclasses.dataclass(frozen=True)
class Profile(Checked):
    """Limits of one sandbox. Past any of them the sandbox (or the process, for per-process limits) is killed."""

    name: str
    memory_bytes: Annotated[int, Range(above=0)] = 1 * GIB
    """Memory limit of the whole sandbox, in bytes. A delegated control group enforces it if there is one; otherwise a
    watchdog measures, every quarter second, the proportional set size of all processes plus the kernel's memory for
    them (page tables, sockets, descriptors)."""
    address_bytes: Annotated[int, Range(above=0)] = 2 * GIB
    """Address space of one process, in bytes."""
    cpu_s: Annotated[int, Range(low=0.001)] = 15
    """Processor time of one process, in seconds."""
    total_cpu_s: Annotated[float, Range(low=0.001)] = 60.0
    """Processor time of all processes together, in seconds."""
    wall_s: Annotated[float, Range(low=0.001)] = 15.0
    """Maximum lifetime in seconds of a one-shot sandbox."""
    session_s: Annotated[float, Range(low=0.001)] = 3600.0
    """Maximum lifetime in seconds of a live sandbox."""
    nproc: Annotated[int, Range(low=8, remedy="fewer are too few to start a sandbox")] = 64
    """Maximum number of processes and threads."""
    nofile: Annotated[int, Range(above=0)] = 256
    """Maximum number of open files of one process."""
    tmpfs_bytes: Annotated[int, Range(above=0)] = 64 * MIB
    """Size of all written files together, in bytes."""
    inodes: Annotated[int, Range(above=0)] = 20_000
    """Number of inodes of all written files together."""
    output_bytes: Annotated[int, Range(above=0)] = 128 * KIB
    """Bytes that are kept of each output stream, half from its start and half from its end."""
    flood_bytes: Annotated[int, Range(above=0)] = 64 * MIB
    """Bytes of output after which a one-shot sandbox is killed."""
    writable_root: bool = False
    """Whether `/`, `/etc`, `/opt`, `/usr/local` and so on can be written; the changes exist only inside the sandbox."""
    readable: tuple[str, ...] = ()
    """Folders of this machine that programs inside may read, at the same paths."""
    image: str = ""
    """Image of the system inside, for `containers.ContainerHost`. Empty: this machine's own system, for bubblewrap."""


SCORE = Profile(
    "score",
    memory_bytes=512 * MIB,
    address_bytes=1 * GIB,
    cpu_s=5,
    total_cpu_s=20.0,
    wall_s=10.0,
    nproc=32,
    nofile=64,
    tmpfs_bytes=16 * MIB,
)
"""A grader's profile: Python for seconds, nothing kept."""
CODE = Profile("code")
"""Programs of a policy: Python, a compiler, a shell."""
TERMINAL = Profile(
    "terminal",
    memory_bytes=2 * GIB,
    address_bytes=32 * GIB,
    cpu_s=600,
    total_cpu_s=3600.0,
    wall_s=600.0,
    nproc=256,
    nofile=1024,
    tmpfs_bytes=512 * MIB,
    inodes=100_000,
    writable_root=True,
)
"""A separate machine for minutes: live shells and a writable root directory."""
MCP = Profile("mcp", address_bytes=32 * GIB, cpu_s=600, total_cpu_s=3600.0, wall_s=3600.0, nproc=128, nofile=1024)
"""A tool server that speaks over its standard input and output."""
PROFILES = {p.name: p for p in (SCORE, CODE, TERMINAL, MCP)}


@dataclasses.dataclass(frozen=True)
class SandboxConfig:
    """Settings of sandboxes."""

    backend: Literal["bwrap", "none"] = "bwrap"
    """`bwrap` isolates with bubblewrap; `none` does not isolate at all and is for trusted code only."""
    slots: Annotated[int, Range(low=1, high=4096)] = 1024
    """Maximum number of sandboxes at the same time."""
    programs: Annotated[int, Range(low=1, high=4096)] = 64
    """Maximum number of one-shot programs and gradings at the same time. Live sandboxes mostly wait for the policy;
    programs compute, and more at a time only bring each of them nearer to its time limit."""
    slot_wait_s: float = 60.0
    """Longest time in seconds to wait for a free slot, and for the end of another program."""
    warm: int = 0
    """Number of idle live sandboxes that are kept started, of the profile that was opened last."""
    first_uid: Annotated[int, Range(low=1000, remedy="lower ones are users of the system")] = 300_000
    """First user id of sandboxes: a host that runs as root gives slot n the user id `first_uid + n`."""
    cgroup: str = ""
    """A delegated control group (v2) to make one group per sandbox in; empty: the process's own, if it is marked as
    delegated."""

    def __post_init__(self) -> None:
        if self.backend not in ("bwrap", "none"):
            raise ConfigError(
                "is not a sandbox backend",
                setting="SandboxConfig.backend",
                value=self.backend,
                remedy="bwrap, or none for code that you trust",
            )
        check_fields(self)
        Range(low=0, below=self.slots, remedy="fewer than SandboxConfig.slots").check(self, "warm")
