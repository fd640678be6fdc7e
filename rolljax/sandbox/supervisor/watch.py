"""Decide whether a sandbox is over its memory or its processor time, where there is no control group."""

import os
from collections.abc import Collection

from rolljax.sandbox.supervisor import procfs
from rolljax.sandbox.supervisor.freeze import Frozen
from rolljax.sandbox.supervisor.look import Look, look, proportional
from rolljax.sandbox.supervisor.procfs import ProcFolder, TooMuchToRead

FROZEN_LOOKS, HIDDEN = 6, 3
"""Number of looks at stopped processes; and number of times in a row that none of these looks may see all processes,
after which the processes count as hiding."""
MOST_ENTRIES, PER_BYTES = 2_000_000, 2 << 30
"""Most entries of /proc that one call reads, for each `PER_BYTES` of a sandbox's memory limit. Reading them takes a few
seconds."""


class SandboxWatch:
    """Measures the resources of one sandbox's processes.

    A look that may have missed a process, because others came or went meanwhile, is taken again with all processes
    stopped. Processes that cannot even be counted then (they wake themselves up and hand over to each other) count as
    over their memory. So do processes that hold too much to read: a look ends after a number of entries of /proc,
    which depends on no clock and on no load. Without isolation nothing is stopped, and what was seen counts.

    Args:
      inner: process 1 of the sandbox as the host numbers it; 0 without isolation.
      root: without isolation, the process that all others descend from.
    """

    def __init__(self, inner: int, root: int, memory_bytes: int, cpu_s: float) -> None:
        self.inner, self.root, self.memory, self.cpu_s = inner, root, memory_bytes, cpu_s
        self.entries = MOST_ENTRIES * max(1.0, memory_bytes / PER_BYTES)
        self.proc = ProcFolder(folder_of(inner) if inner else "/proc")
        self.before = Look({}, True)
        self.ticks = 0
        self.hidden = 0
        self.stopped: set[int] | None = None
        """Processes that were stopped already before a look stopped all others; set until a later look finds no further
        process stopped, because until then some may still wait to continue."""
        self.close_to_limit = False

    def close(self) -> None:
        self.proc.close()

    def over(self, grown: int) -> str:
        """Return the exceeded limit: memory, cpu, or empty.

        grown: growth of the kernel's memory, if it is worth checking; estimates may not attribute more than that to a
        sandbox.
        """
        self.proc.left = self.entries
        try:
            held = self.counted(min(grown, self.memory + 1))
        except TooMuchToRead:
            held = -1
        self.hidden = self.hidden + 1 if held < 0 else 0
        self.close_to_limit = self.hidden > 0 or 2 * held > self.memory
        if held > self.memory or self.hidden == HIDDEN:
            return "memory"
        return "cpu" if self.ticks > self.cpu_s * procfs.TICKS_PER_S else ""

    def counted(self, guess: int) -> int:
        """Return the bytes of memory after one or several looks, -1 if a process may be missing; add processor time."""
        seen = look(self.proc, self.pids, guess)
        held = self.held(seen)
        if held >= 0 and self.stopped is not None and stopped(seen) <= self.stopped:
            self.stopped = None
        if held < 0 or self.stopped is not None:
            seen, held = self.frozen(seen, guess)
        self.add_ticks(seen)
        return held

    def used(self) -> dict[str, int]:
        """Return pss_bytes, kernel_bytes and processes; nothing if that would take too long."""
        self.proc.left = self.entries
        try:
            seen = look(self.proc, self.pids)
            pss, _ = proportional(self.proc, seen)
        except TooMuchToRead:
            return {}
        return {"pss_bytes": pss, "kernel_bytes": seen.kernel + self.sockets(), "processes": len(seen.processes)}

    def pids(self) -> Collection[int]:
        return self.proc.numbers() if self.inner else procfs.tree_of(self.root, procfs.process_table())

    def sockets(self) -> int:
        return procfs.socket_bytes(self.proc) if self.inner else 0

    def held(self, seen: Look) -> int:
        """Return the bytes of memory, -1 if a process may be missing."""
        whole = seen.whole or not self.inner
        kernel = seen.kernel + self.sockets() + seen.guessed
        if not whole:
            return -1
        if kernel > self.memory or seen.resident + kernel <= self.memory:
            return seen.resident + kernel
        pss, whole = proportional(self.proc, seen)
        return pss + kernel if whole or not self.inner else -1

    def frozen(self, before: Look, guess: int) -> tuple[Look, int]:
        """Stop the processes and look at them; return the look and their bytes, -1 if they hide. They continue if the
        bytes are within the limit, or if the look ends early."""
        if self.stopped is None:
            self.stopped = stopped(before)
        freezer, seen, held = Frozen(self.inner), before, -1
        try:
            for _ in range(FROZEN_LOOKS):
                freezer.stop()
                seen = look(self.proc, lambda: set(self.pids()) - {freezer.pid}, guess)
                held = self.held(seen)
                if held >= 0:
                    break
            return seen, held
        finally:
            if held <= self.memory:
                freezer.resume(seen.processes.keys() - self.stopped, self.stopped)
            freezer.close()

    def add_ticks(self, seen: Look) -> None:
        """Add the processor time since the previous look: the time of living processes, plus the time that parents
        report for ended children, minus the part already counted while those children lived."""
        old = self.before.processes
        own = sum(used.ticks - (old[pid].ticks if pid in old else 0) for pid, used in seen.processes.items())
        waited = sum(
            used.waited_ticks - (old[pid].waited_ticks if pid in old else 0) for pid, used in seen.processes.items()
        )
        ended = sum(used.ticks + used.waited_ticks for pid, used in old.items() if pid not in seen.processes)
        self.ticks += max(0, own) + max(0, waited - ended)
        self.before = seen


def stopped(seen: Look) -> set[int]:
    """Return the processes that were stopped during the look."""
    return {pid for pid, used in seen.processes.items() if used.state == "T"}


def folder_of(inner: int) -> str:
    """Return the /proc of a sandbox, seen from outside.

    Raises:
      OSError: bubblewrap has not mounted it yet.
    """
    folder = f"/proc/{inner}/root/proc"
    if os.stat(folder).st_dev == os.stat("/proc").st_dev:
        raise FileNotFoundError(folder)
    return folder
