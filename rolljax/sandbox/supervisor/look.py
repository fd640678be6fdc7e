"""Measures the resources of all processes of a sandbox at once, even if they replace each other quickly."""

from collections.abc import Callable, Collection
from typing import NamedTuple

from rolljax.sandbox.supervisor import procfs
from rolljax.sandbox.supervisor.procfs import ProcFolder

ROUNDS = 3
"""Number of times that a look lists processes to find unseen ones."""


class Used(NamedTuple):
    """Bytes and clock ticks that one process holds or used."""

    path: str
    state: str
    parent: int
    size: int
    """Bytes of the process's address space."""
    resident: int
    kernel: int
    """Bytes that the kernel holds for the process."""
    guessed: int
    """Upper bound of the further bytes that the kernel may hold for the process."""
    ticks: int
    """Processor time of the process itself, in clock ticks."""
    waited_ticks: int
    """Processor time of the children that the process waited for, in clock ticks."""


class Look(NamedTuple):
    """The resources of all processes of a sandbox, by process id."""

    processes: dict[int, Used]
    whole: bool
    """Whether no process can be missing: the same processes existed before and after reading, and each of them was
    read."""

    @property
    def resident(self) -> int:
        return sum(used.resident for used in self.processes.values())

    @property
    def kernel(self) -> int:
        return sum(used.kernel for used in self.processes.values())

    @property
    def guessed(self) -> int:
        return sum(used.guessed for used in self.processes.values())


def look(proc: ProcFolder, pids: Callable[[], Collection[int]], guess: int = 0) -> Look:
    """Read the resources of every process of a sandbox.

    Args:
      pids: returns the current process ids.
      guess: also estimate kernel memory that is slow to count and only known approximately, up to this many bytes.
    """
    found: dict[int, Used] = {}
    for _ in range(ROUNDS):
        before = set(pids())
        for pid in list(found.keys() - before):
            del found[pid]
        for pid in before - found.keys():
            left = guess - sum(used.guessed for used in found.values()) if guess else 0
            if used := used_by(proc, pid, len(before), left):
                found[pid] = used
        if found.keys() == before == set(pids()):
            return Look(found, True)
    return Look(found, False)


def used_by(proc: ProcFolder, pid: int, family: int, guess: int) -> Used | None:
    """Return the resources that one process uses; None if it is gone.

    A process whose first thread has ended still runs in the others and is read through one of them: under its own
    number it would seem to hold nothing. family: number of the sandbox's processes.
    """
    path = str(pid)
    stat = procfs.stat_of(proc, path)
    if stat and stat.state == "Z" and stat.threads > 1:
        threads = (
            (f"{pid}/task/{tid}", procfs.stat_of(proc, f"{pid}/task/{tid}")) for tid in proc.numbers(f"{pid}/task")
        )
        path, living = next(((path, thread) for path, thread in threads if thread and thread.size), (path, None))
        stat = living and stat._replace(state=living.state, size=living.size, resident=living.resident)
    if not stat:
        return None
    kernel = procfs.page_table_bytes(proc, path) + procfs.file_bytes(proc, path)
    guessed = procfs.mapping_bytes(proc, path, family, guess) if guess > 0 else 0
    return Used(path, stat.state, stat.parent, stat.size, stat.resident, kernel, guessed, stat.ticks, stat.waited_ticks)


def proportional(proc: ProcFolder, seen: Look) -> tuple[int, bool]:
    """Return the proportional set size in bytes of all processes together, and whether all could be read.

    Pages that several processes share count once. A child that borrows the memory of a parent that waits for it
    (`vfork`) adds nothing.
    """
    total, whole, lent = 0, True, set()
    for pid in sorted(seen.processes):
        used = seen.processes[pid]
        parent = seen.processes.get(used.parent)
        borrows = parent and parent.state == "D" and (parent.size, parent.resident) == (used.size, used.resident)
        if borrows and used.parent not in lent:
            lent.add(used.parent)
            continue
        bytes_ = procfs.pss_bytes(proc, used.path, used.resident)
        if bytes_ is None:
            gone = used.resident and not procfs.stat_of(proc, used.path)
            whole = whole and not gone
        total += used.resident if bytes_ is None else bytes_
    return total, whole
