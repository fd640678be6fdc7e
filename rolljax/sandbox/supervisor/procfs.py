"""Reads processes and their resources from /proc."""

import math
import os
import resource
import signal
from collections.abc import Iterator
from typing import NamedTuple

PAGE = resource.getpagesize()
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
SOCKET_BYTES, FILE_BYTES, MAPPING_BYTES = 256 << 10, 8 << 10, 256
"""Most bytes that the kernel holds for a socket, a descriptor, and a mapping, a file lock or a watched descriptor."""
COPY_BYTES, TEXT_BYTES = 64, 8 << 20
"""Additional bytes that the kernel may hold: for a mapping, per process that inherited it by fork; for an open file of
/proc, its text."""
OPEN_ENTRIES, ENTRY_PAGES = 20, 8
"""Entries that opening a file counts as; pages of a proportional set size that count as one entry. Both follow from the
time that the kernel takes."""


def kill(pid: int) -> None:
    """Kill a process, if it is still there."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def real_uid(pid: int) -> int:
    """Return the real user id of a process, -1 if it is gone. The owner of its directory would be root if it hides
    itself."""
    try:
        with open(f"/proc/{pid}/status", "rb") as f:
            return int(f.read().split(b"\nUid:", 1)[1].split(None, 1)[0])
    except (OSError, IndexError, ValueError):
        return -1


def process_table() -> dict[int, tuple[int, int]]:
    """Return parent and session of every process, by process id."""
    table = {}
    for pid in pids():
        try:
            with open(f"/proc/{pid}/stat", "rb") as f:
                fields = f.read().rpartition(b")")[2].split()
        except OSError:
            continue
        table[pid] = (int(fields[1]), int(fields[3]))
    return table


def tree_of(root: int, table: dict[int, tuple[int, int]]) -> list[int]:
    """Return `root` and its descendants that are not orphans."""
    children: dict[int, list[int]] = {}
    for pid, (parent, _) in table.items():
        children.setdefault(parent, []).append(pid)
    todo, found = [root] if root in table else [], []
    while todo:
        found.append(todo.pop())
        todo += children.get(found[-1], [])
    return found


class TooMuchToRead(Exception):
    """All entries that may be read (`ProcFolder.left`) were read, and there are more."""


class ProcFolder:
    """A mounted /proc, held by a descriptor: the host's, or a sandbox's, which shows only processes of the sandbox, by
    their ids inside.

    Every method raises `TooMuchToRead` when no entries are left.
    """

    left = math.inf
    """Number of entries that may still be read: lines of files and names in folders; an opened file counts as
    `OPEN_ENTRIES`. A sandbox decides how many entries the kernel lists, so the reader limits their number to bound the
    time."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def close(self) -> None:
        os.close(self._fd)

    def spend(self, entries: int) -> None:
        """Subtract entries from `left`."""
        self.left -= entries
        if self.left < 0:
            raise TooMuchToRead

    def numbers(self, path: str = ".") -> list[int]:
        """Return the entries of a folder that are numbers: processes, threads, descriptors; none if the folder is
        gone."""
        self.spend(OPEN_ENTRIES)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._fd)
        except OSError:
            return []
        try:
            names = os.listdir(fd)
        except OSError:
            return []
        finally:
            os.close(fd)
        self.spend(len(names))
        return [int(name) for name in names if name.isdigit()]

    def parts(self, path: str) -> Iterator[bytes]:
        """Yield the text of a file in pieces; it ends early if the process exits."""
        self.spend(OPEN_ENTRIES)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._fd)
        except OSError:
            return
        try:
            while part := os.read(fd, 1 << 16):
                self.spend(part.count(b"\n"))
                yield part
        except OSError:
            return
        finally:
            os.close(fd)

    def read(self, path: str) -> bytes:
        """Return the text of a file, empty if it cannot be read."""
        return b"".join(self.parts(path))

    def kib(self, path: str, name: bytes) -> int | None:
        """Return the value of a line `name: N kB` of a file, in bytes; None without one."""
        try:
            return int(self.read(path).split(b"\n" + name + b":", 1)[1].split(None, 1)[0]) * 1024
        except (IndexError, ValueError):
            return None

    def link(self, path: str) -> str:
        """Return the target of a link, empty if it cannot be read."""
        self.spend(OPEN_ENTRIES)
        try:
            return os.readlink(path, dir_fd=self._fd)
        except OSError:
            return ""

    def num_files(self, path: str) -> int:
        """Return the number of open files of a process. Linux 6.2 and later."""
        try:
            return os.stat(f"{path}/fd", dir_fd=self._fd).st_size
        except OSError:
            return 0


class Stat(NamedTuple):
    """The line of a process in /proc."""

    state: str
    parent: int
    ticks: int
    """Processor time of the process, in units of `TICKS_PER_S`."""
    waited_ticks: int
    """Processor time of the children that the process waited for, in units of `TICKS_PER_S`."""
    threads: int
    size: int
    resident: int


def stat_of(proc: ProcFolder, path: str) -> Stat | None:
    """Return the state of a process or thread; None if it is gone."""
    fields = proc.read(f"{path}/stat").rpartition(b")")[2].split()
    if len(fields) < 22:
        return None
    parent, own, system, waited, waited_system = (int(fields[i]) for i in (1, 11, 12, 13, 14))
    threads, size, resident = (int(fields[i]) for i in (17, 20, 21))
    return Stat(fields[0].decode(), parent, own + system, waited + waited_system, threads, size, resident * PAGE)


def page_table_bytes(proc: ProcFolder, path: str) -> int:
    """Return the bytes of the page tables of a process, which no resident size includes."""
    return proc.kib(f"{path}/status", b"VmPTE") or 0


def pss_bytes(proc: ProcFolder, path: str, resident: int) -> int | None:
    """Return the proportional set size of a process: pages that n processes share count as an nth. None if it cannot be
    read. resident: bytes that the kernel walks through for it."""
    proc.spend(resident // PAGE // ENTRY_PAGES)
    return proc.kib(f"{path}/smaps_rollup", b"Pss")


def socket_bytes(proc: ProcFolder) -> int:
    """Return the bytes that the sockets of a sandbox may hold, including sockets that are closed with unread data or
    not yet accepted."""
    try:
        return int(proc.read("1/net/sockstat").split(b"\n", 1)[0].split()[2]) * SOCKET_BYTES
    except (IndexError, ValueError):
        return 0


def file_bytes(proc: ProcFolder, path: str) -> int:
    """Return the most bytes that the open files (pipes, event counters, and so on) of a process may hold."""
    return proc.num_files(path) * FILE_BYTES


def mapping_bytes(proc: ProcFolder, path: str, family: int, most: int) -> int:
    """Return the most bytes that the kernel may hold for mappings, file locks, watched descriptors and texts of /proc;
    count no further than `most`. family: number of processes that mappings may have come through."""
    total = 0
    fds = proc.numbers(f"{path}/fd")
    for name in ["maps", *(f"fdinfo/{fd}" for fd in fds)]:
        each = MAPPING_BYTES + (COPY_BYTES * family if name == "maps" else 0)
        for part in proc.parts(f"{path}/{name}"):
            total += part.count(b"\n") * each
            if total > most:
                return most
    texts = sum(proc.link(f"{path}/fd/{fd}").startswith("/proc/") for fd in fds)
    return min(total + texts * TEXT_BYTES, most)


def kernel_bytes() -> int:
    """Return the memory of the whole machine that the kernel holds and cannot free."""
    with open("/proc/meminfo", "rb") as f:
        text = f.read()
    return (
        sum(int(text.split(b"\n" + name, 1)[1].split(None, 1)[0]) for name in (b"SUnreclaim:", b"VmallocUsed:")) * 1024
    )


def oom_kills() -> int:
    """Return how many processes of the machine were ever killed for lack of memory."""
    with open("/proc/vmstat", "rb") as f:
        return int((f.read().split(b"\noom_kill ", 1) + [b"0"])[1].split(None, 1)[0])
