"""What processes are there and what they use up, as /proc says."""

import os
import resource
import signal

PAGE = resource.getpagesize()
SOCKET_BYTES, FILE_BYTES, MAPPING_BYTES = 256 << 10, 4 << 10, 256
"""What the kernel may hold for a socket, for a descriptor, and for a mapping, a file lock or a watched descriptor."""


def kill(pid: int) -> None:
    """Kill a process, if it is still there."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def real_uid(pid: int) -> int:
    """Of a process, -1 when it is gone; the owner of its directory would say root for one that hides itself."""
    try:
        with open(f"/proc/{pid}/status", "rb") as f:
            return int(f.read().split(b"\nUid:", 1)[1].split(None, 1)[0])
    except (OSError, IndexError, ValueError):
        return -1


def process_table() -> dict[int, tuple[int, int, int]]:
    """Process -> parent, session, resident bytes."""
    table = {}
    for pid in pids():
        try:
            with open(f"/proc/{pid}/stat", "rb") as f:
                fields = f.read().rpartition(b")")[2].split()
        except OSError:
            continue
        table[pid] = (int(fields[1]), int(fields[3]), int(fields[21]) * PAGE)
    return table


def tree_of(root: int, table: dict[int, tuple[int, int, int]]) -> list[int]:
    """`root` and its descendants. Orphans inside a process name space hang under its process 1, so none is missed."""
    children: dict[int, list[int]] = {}
    for pid, (parent, _, _) in table.items():
        children.setdefault(parent, []).append(pid)
    todo, found = [root] if root in table else [], []
    while todo:
        found.append(todo.pop())
        todo += children.get(found[-1], [])
    return found


def pss_bytes(tree: list[int], table: dict[int, tuple[int, int, int]]) -> int:
    """Proportional set size in bytes: shared pages count once; resident size where that cannot be read."""
    total = 0
    for pid in tree:
        try:
            with open(f"/proc/{pid}/smaps_rollup", "rb") as f:
                total += int(f.read().split(b"\nPss:", 1)[1].split(None, 1)[0]) * 1024
        except (OSError, IndexError, ValueError):
            total += table[pid][2] if os.path.exists(f"/proc/{pid}") else 0
    return total


def page_table_bytes(tree: list[int]) -> int:
    """Bytes of the page tables of processes: memory that is in no resident size."""
    total = 0
    for pid in tree:
        try:
            with open(f"/proc/{pid}/status", "rb") as f:
                total += int(f.read().split(b"\nVmPTE:", 1)[1].split(None, 1)[0]) * 1024
        except (OSError, IndexError, ValueError):
            continue
    return total


def socket_bytes(tree: list[int]) -> int:
    """Bytes that the sockets of a sandbox may hold, also those that are closed and not yet read, and those nobody
    accepted. `tree`: with bubblewrap's own process first, which may be in another network."""
    try:
        with open(f"/proc/{tree[1]}/net/sockstat", "rb") as f:
            return int(f.readline().split()[2]) * SOCKET_BYTES
    except (OSError, IndexError, ValueError):
        return 0


def file_bytes(tree: list[int]) -> int:
    """Bytes that open files (pipes, event counters, and so on) may hold. Their number: Linux 6.2 and later."""
    total = 0
    for pid in tree:
        try:
            total += os.stat(f"/proc/{pid}/fd").st_size * FILE_BYTES
        except OSError:
            continue
    return total


def mapping_bytes(tree: list[int], most: int) -> int:
    """Bytes that the kernel may hold for mappings, file locks, watched descriptors; counts no further than `most`."""
    total = 0
    for pid in tree:
        try:
            paths = [f"/proc/{pid}/maps", *(f"/proc/{pid}/fdinfo/{fd}" for fd in os.listdir(f"/proc/{pid}/fdinfo"))]
        except OSError:
            continue
        for path in paths:
            try:
                with open(path, "rb", 1 << 16) as f:
                    while total <= most and (part := f.read(1 << 16)):
                        total += part.count(b"\n") * MAPPING_BYTES
            except OSError:
                continue
    return total


def kernel_bytes() -> int:
    """Memory of the whole machine that the kernel holds and cannot give back."""
    with open("/proc/meminfo", "rb") as f:
        return int(f.read().split(b"\nSUnreclaim:", 1)[1].split(None, 1)[0]) * 1024


def oom_kills() -> int:
    """How many processes of the machine were killed for its want of memory, ever."""
    with open("/proc/vmstat", "rb") as f:
        return int((f.read().split(b"\noom_kill ", 1) + [b"0"])[1].split(None, 1)[0])
