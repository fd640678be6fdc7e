"""A control group (version 2) for one sandbox, below a group that was delegated to the host."""

import contextlib
import os

from rolljax.sandbox.supervisor.namespaces import write


def path_of(delegated: str, supervisor_pid: int, slot: int) -> str:
    """Return the folder of a slot's group."""
    return os.path.join(delegated, f"rolljax-{supervisor_pid}-{slot}")


def enter(group: str, memory_bytes: int, nproc: int) -> None:
    """Make the group, limit it and move this process in."""
    os.makedirs(group, exist_ok=True)
    limits = {"memory.max": memory_bytes, "memory.oom.group": 1, "pids.max": nproc}
    if os.path.exists(os.path.join(group, "memory.swap.max")):
        limits["memory.swap.max"] = 0
    for name, value in {**limits, "cgroup.procs": os.getpid()}.items():
        write(os.path.join(group, name), str(value))


def cpu_s(group: str) -> float:
    """Return processor seconds of all processes that are or were in the group."""
    try:
        with open(os.path.join(group, "cpu.stat")) as f:
            return int(dict(line.split() for line in f)["usage_usec"]) / 1e6
    except (OSError, KeyError):
        return 0.0


def leave(group: str) -> bool:
    """Remove the group, which is empty by now; return whether its memory had run out."""
    try:
        with open(os.path.join(group, "memory.events")) as f:
            events = dict(line.split() for line in f)
    except OSError:
        return False
    with contextlib.suppress(OSError):
        os.rmdir(group)
    return int(events.get("oom_kill", 0)) > 0
