"""The keeper: a small process beside the host that starts, watches and kills sandboxes.

Run as a script with a socket to the host (`keeper.py FD`), standard library only. It is single-threaded, so it may
fork; it is the child subreaper of all it starts, so nothing is left to process 1; it reaps only what it started,
because those are its only children. When the socket closes (the host is gone, however it died) it kills everything and
ends; when the keeper itself is killed, bubblewrap's `--die-with-parent` ends the sandboxes.

Messages are JSON datagrams. In: `hello` (settings), `spawn` (with descriptors attached), `kill`, `stat`. Out: an answer
per `hello` and `stat`, `slot` when a sandbox is started, and `exit` when nothing of it is left.
"""

import array
import ctypes
import fcntl
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from typing import Any

CLONE_NEWNET = 0x40000000
CLONE_NEWNS, MS_REC, MS_PRIVATE, MS_NOSUID, MS_NODEV = 0x20000, 0x4000, 1 << 18, 2, 4
PR_SET_CHILD_SUBREAPER = 36
MAX_MESSAGE, MAX_FDS = 256 << 10, 253
STATUS_FD = 3
"""Where bubblewrap writes its status inside the forked child; data descriptors follow from here on."""
HIGH_FD = 400
WATCH_S, WATCH_CLOSELY_S = 0.25, 0.1
MAX_SLOT = 65_536
PAGE = resource.getpagesize()
SIGKILL = int(signal.SIGKILL)
KEEPER_NICE = -10
SIOCSIFFLAGS, IFF_UP = 0x8914, 1
NET_LIMITS = {"ipv4/tcp_rmem": "4096 65536 131072", "ipv4/tcp_wmem": "4096 65536 131072"}
"""Least, first and largest buffer of a TCP socket in a sandbox."""
SOCKET_BYTES, FILE_BYTES, RECORD_BYTES = 256 << 10, 4 << 10, 256
"""What the kernel may hold for a socket, for a descriptor, and for a mapping, a file lock or a watched descriptor."""
SUSPICIOUS_BYTES = 128 << 20
"""Growth of the kernel's memory after which mappings and locks are counted: that is too slow to do always."""

libc = ctypes.CDLL(None, use_errno=True)


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    if libc.mount(source.encode(), target.encode(), kind.encode() or None, flags, options.encode() or None):
        raise OSError(ctypes.get_errno(), f"mount {kind} on {target}: {os.strerror(ctypes.get_errno())}")


class Slots:
    """Numbers that stand for user ids. A number is ours while we hold the lock of its file, and the kernel lets the
    lock go when we die: what still runs under the user id of a lock that we got is a dead host's leftover."""

    def __init__(self, folder: str, first_uid: int, own_uids: bool) -> None:
        self.folder, self.first_uid, self.own_uids = folder, first_uid, own_uids
        self.locks: dict[int, int] = {}
        self.free: list[int] = []
        self.generation: dict[int, int] = {}

    def lock(self, number: int) -> bool:
        path = os.path.join(self.folder, f"slot-{number}")
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            return False
        self.locks[number] = fd
        return True

    def take(self) -> tuple[int, int]:
        """A free number and how often it was given out before."""
        if not self.free:
            number = next(n for n in range(MAX_SLOT) if n not in self.locks and self.lock(n))
            self.sweep(number)
            self.free.append(number)
        number = self.free.pop()
        self.generation[number] = self.generation.get(number, 0) + 1
        return number, self.generation[number]

    def sweep(self, only: int = -1) -> int:
        """Kill what dead hosts left under slot user ids; returns how many processes."""
        killed = 0
        for pid in pids() if self.own_uids else []:
            number = real_uid(pid) - self.first_uid
            if not 0 <= number < MAX_SLOT or (only >= 0 and number != only):
                continue
            mine = number in self.locks
            if only < 0 and (mine or not self.lock(number)):
                continue
            kill(pid)
            killed += 1
            if only < 0:
                os.close(self.locks.pop(number))
        return killed


class Cell:
    """One sandbox: `pid` is bubblewrap's outer process, `inner` process 1 of its name space."""

    def __init__(self, order: dict[str, Any], pid: int, status_fd: int, slot: tuple[int, int]) -> None:
        self.id, self.pid, self.leader, self.status_fd = order["id"], pid, pid, status_fd
        self.number, self.generation = slot
        self.ends = time.monotonic() + order["wall_s"]
        self.memory = order["memory_bytes"]
        self.oom_kills = oom_kills()
        self.cgroup = ""
        self.inner = 0
        self.text = b""
        self.code: int | None = None
        self.status = 0
        self.dying = False
        self.error = ""
        self.killed_by = ""

    def read_status(self) -> None:
        """Take in what bubblewrap said so far."""
        while self.status_fd >= 0:
            try:
                part = os.read(self.status_fd, 65536)
            except BlockingIOError:
                break
            if not part:
                os.close(self.status_fd)
                self.status_fd = -1
            self.text += part
        *lines, self.text = self.text.split(b"\n")
        for line in lines:
            try:
                said = json.loads(line)
            except ValueError:
                continue
            self.inner = said.get("child-pid", self.inner)
            self.code = said.get("exit-code", self.code)
            self.error = said.get("error", self.error)

    def kill(self, why: str) -> None:
        self.killed_by = self.killed_by or why
        if self.pid:
            kill(self.pid)


class Keeper:
    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.cells: dict[int, Cell] = {}
        self.nice = os.getpriority(os.PRIO_PROCESS, 0)
        self.wake, signal_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(signal_fd, warn_on_full_buffer=False)
        for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(ignored, signal.SIG_IGN)

    def hello(self, order: dict[str, Any]) -> None:
        """Settings of the whole keeper: the folder for locks and mounts, and what this machine lets it do."""
        try:
            os.setpriority(os.PRIO_PROCESS, 0, KEEPER_NICE)  # it looks in time, however busy sandboxes are
        except PermissionError:
            pass
        self.folder = order["folder"]
        self.isolate, self.as_root = order["isolate"], order["as_root"]
        self.cgroup = order["cgroup"]
        self.mounts = self.as_root and self.try_mounts()
        self.nets = self.as_root and in_child(private_net)
        self.kernel_floor = kernel_bytes()
        self.slots = Slots(self.folder, order["first_uid"], self.as_root)
        self.say(id=order["id"], mounts=self.mounts, nets=self.nets, swept=self.slots.sweep())

    def run(self) -> None:
        poll = select.poll()
        poll.register(self.sock, select.POLLIN)
        poll.register(self.wake, select.POLLIN)
        watch_at = time.monotonic()
        while True:
            now = time.monotonic()
            wait_s = min([c.ends - now for c in self.cells.values()] + ([watch_at - now] if self.cells else [3600.0]))
            events = dict(poll.poll(max(0.0, wait_s) * 1000 + 1))
            if self.wake in events:
                os.read(self.wake, 4096)
            self.reap()
            if self.sock.fileno() in events and not self.take_message():
                return
            now = time.monotonic()
            for cell in self.cells.values():
                if now >= cell.ends:
                    cell.kill("wall")
                    cell.ends = now + 3600.0
            if self.cells and now >= watch_at:
                watch_at = now + self.watch_memory()

    def take_message(self) -> bool:
        """Handle one message; False when the host is gone."""
        room = socket.CMSG_LEN(MAX_FDS * 4)  # recv_fds cannot ask for close-on-exec
        data, extra, _, _ = self.sock.recvmsg(MAX_MESSAGE, room, socket.MSG_CMSG_CLOEXEC)
        fds = [fd for _, _, part in extra for fd in array.array("i", part)]
        if not data:
            return False
        order = json.loads(data)
        if order["op"] == "spawn":
            self.spawn(order, fds)
        elif order["op"] == "hello":
            self.hello(order)
        elif order["op"] == "kill" and order["cell"] in self.cells:
            self.cells[order["cell"]].kill(order["why"])
        elif order["op"] == "stat":
            cell = self.cells.get(order["cell"])
            self.say(id=order["id"], **(self.usage(cell) if cell else {}))
        return True

    def say(self, **message: Any) -> None:
        try:
            self.sock.send(json.dumps(message).encode())
        except OSError:
            pass

    def spawn(self, order: dict[str, Any], fds: list[int]) -> None:
        slot = self.slots.take()
        status_r, status_w = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(status_r, False)
        try:
            pid = os.fork()
        except OSError as e:
            pid = -1
            self.slots.free.append(slot[0])
            self.say(id=order["id"], event="exit", code=1, started=False, killed_by="", error=f"fork: {e}")
        if pid == 0:
            self.become(order, fds, status_w, slot[0])
        for fd in [status_w, *fds]:
            os.close(fd)
        if pid < 0:
            os.close(status_r)
            return
        cell = Cell(order, pid, status_r, slot)
        if self.cgroup:
            cell.cgroup = self.group_of(os.getpid(), slot[0])
        self.cells[cell.id] = cell
        self.say(id=cell.id, event="slot", slot=slot[0], generation=slot[1], pid=pid)

    def become(self, order: dict[str, Any], fds: list[int], status_w: int, slot: int) -> None:
        """In the forked child: arrange descriptors, take on identity and limits, become the program. Never returns."""
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, HIGH_FD) for fd in [status_w, *fds[:3], status_w, *fds[3:]]]
        try:
            os.setsid()
            os.setpriority(os.PRIO_PROCESS, 0, self.nice)
            signal.set_wakeup_fd(-1)
            for name in ("SIGPIPE", "SIGXFSZ", "SIGINT", "SIGTERM", "SIGHUP", "SIGCHLD"):
                signal.signal(getattr(signal, name), signal.SIG_DFL)
            write("/proc/self/oom_score_adj", "1000")  # whoever ends the machine's memory goes first
            if self.cgroup:
                self.enter_group(slot, order)
            if self.nets:
                private_net()
            uid = self.slots.first_uid + slot
            if order["tree"] and self.mounts:
                self.mount_tree(order["tree"], uid)
            for target, fd in enumerate(high[1:]):
                os.dup2(fd, target, inheritable=self.isolate or target < STATUS_FD)
            os.closerange(len(high) - 1, HIGH_FD)
            for name, pair in order["rlimits"].items():
                resource.setrlimit(getattr(resource, name), tuple(pair))
            if self.as_root:
                os.setgroups([])
                os.setresgid(uid, uid, uid)
                os.setresuid(uid, uid, uid)
            if order["chdir"]:
                os.chdir(order["chdir"])
            os.execve(order["argv"][0], order["argv"], order["env"])
        except BaseException as e:
            os.write(high[0], json.dumps({"error": f"{type(e).__name__}: {e}"}).encode() + b"\n")
        finally:
            os._exit(126)

    def mount_tree(self, tree: dict[str, Any], uid: int) -> None:
        """A file system of a fixed size and number of files, seen by this child alone, with its directories in it."""
        base = os.path.join(self.folder, "mnt")
        if libc.unshare(CLONE_NEWNS):
            raise OSError(ctypes.get_errno(), "unshare: " + os.strerror(ctypes.get_errno()))
        mount("none", "/", "", MS_REC | MS_PRIVATE)
        options = f"size={tree['bytes']},nr_inodes={tree['inodes']},mode=0711"
        mount("tmpfs", base, "tmpfs", MS_NOSUID | MS_NODEV, options)
        for name, mode in tree["dirs"]:
            path = os.path.join(base, name)
            os.mkdir(path)
            os.chmod(path, mode)
            os.chown(path, uid, uid)
        for lower, name in tree["overlays"]:
            parts = {part: os.path.join(base, f"{name}-{part}") for part in ("upper", "work", "merged")}
            for path in parts.values():
                os.mkdir(path, 0o755)
            os.chown(parts["upper"], uid, uid)
            for entry in os.scandir(lower):
                if entry.is_dir(follow_symlinks=False):
                    os.mkdir(os.path.join(parts["upper"], entry.name), 0o755)
                    os.chown(os.path.join(parts["upper"], entry.name), uid, uid)
            where = f"lowerdir={lower},upperdir={parts['upper']},workdir={parts['work']}"
            mount("overlay", parts["merged"], "overlay", MS_NOSUID | MS_NODEV, where)

    def try_mounts(self) -> bool:
        """Whether a child may make a private mount name space with a file system in it."""
        os.makedirs(os.path.join(self.folder, "mnt"), mode=0o711, exist_ok=True)
        os.chmod(self.folder, 0o711)
        lower = os.path.join(self.folder, "probe")
        os.makedirs(lower, exist_ok=True)
        tree = {"bytes": 1 << 20, "inodes": 100, "dirs": [], "overlays": [[lower, "probe"]]}
        return in_child(lambda: self.mount_tree(tree, 0))

    def reap(self) -> None:
        """Collect whatever died. A sandbox is over when both its outer process and process 1 inside are gone: the
        kernel lets process 1 go last, after everything in its name space."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            for cell in list(self.cells.values()):
                if cell.pid == pid:
                    self.outer_died(cell, status)
                elif cell.dying and cell.inner == pid:
                    self.finish(cell)

    def outer_died(self, cell: Cell, status: int) -> None:
        cell.read_status()
        cell.pid, cell.dying = 0, True
        if cell.code is None:
            cell.status = os.waitstatus_to_exitcode(status)
        if not self.isolate:
            for pid in self.session(cell.leader):
                kill(pid)
        elif cell.inner:
            try:  # if it still is there it is our child by now, alive or not
                if os.waitpid(cell.inner, os.WNOHANG)[0] == 0:
                    kill(cell.inner)
                    return
            except ChildProcessError:
                pass
        else:
            self.slots.sweep(cell.number)
        self.finish(cell)

    def finish(self, cell: Cell) -> None:
        if cell.status_fd >= 0:
            os.close(cell.status_fd)
        if cell.cgroup:
            self.leave_group(cell)
        started = bool(cell.code is not None or cell.killed_by) if self.isolate else not cell.error
        code = cell.status if cell.code is None else cell.code
        if not cell.killed_by and abs(code) in (SIGKILL, 128 + SIGKILL) and oom_kills() > cell.oom_kills:
            cell.killed_by = "machine"
        self.slots.free.append(cell.number)
        del self.cells[cell.id]
        self.say(
            id=cell.id,
            event="exit",
            code=code if code >= 0 else 128 - code,
            started=started,
            killed_by=cell.killed_by,
            error=cell.error,
        )

    def session(self, pid: int) -> list[int]:
        """Processes of the session that `pid` leads, and their descendants."""
        table = process_table()
        found = {p for p, row in table.items() if row[1] == pid}
        return [p for root in found for p in tree_of(root, table)]

    def watch_memory(self) -> float:
        """Kill sandboxes over their memory; returns seconds until the next look."""
        watched = [c for c in self.cells.values() if not c.cgroup and c.pid and not c.killed_by]
        table = process_table() if watched else {}
        kernel = kernel_bytes()
        suspicious = kernel > self.kernel_floor + SUSPICIOUS_BYTES
        close = False
        for cell in watched:
            tree = tree_of(cell.pid, table)
            held = page_tables(tree) + files(tree) + sockets(tree) + (records(tree, cell.memory) if suspicious else 0)
            resident = sum(table[pid][2] for pid in tree)
            close |= 2 * (resident + held) > cell.memory
            if resident + held > cell.memory and pss(tree, table) + held > cell.memory:
                cell.kill("memory")
        self.kernel_floor = kernel if suspicious else min(kernel, self.kernel_floor)
        return WATCH_CLOSELY_S if close or suspicious else WATCH_S

    def usage(self, cell: Cell) -> dict[str, int]:
        table = process_table()
        tree = tree_of(cell.pid, table)
        kernel = page_tables(tree) + files(tree) + sockets(tree)
        used = {"pss_bytes": pss(tree, table), "kernel_bytes": kernel, "processes": len(tree)}
        return {**used, "slot": cell.number, "generation": cell.generation}

    def group_of(self, keeper: int, slot: int) -> str:
        return os.path.join(self.cgroup, f"rolljax-{keeper}-{slot}")

    def enter_group(self, slot: int, order: dict[str, Any]) -> None:
        """In the child: make this slot's control group, limit it and move in."""
        group = self.group_of(os.getppid(), slot)
        os.makedirs(group, exist_ok=True)
        limits = {"memory.max": order["memory_bytes"], "memory.oom.group": 1, "pids.max": order["nproc"]}
        if os.path.exists(os.path.join(group, "memory.swap.max")):
            limits["memory.swap.max"] = 0
        for name, value in {**limits, "cgroup.procs": os.getpid()}.items():
            write(os.path.join(group, name), str(value))

    def leave_group(self, cell: Cell) -> None:
        try:
            with open(os.path.join(cell.cgroup, "memory.events")) as f:
                events = dict(line.split() for line in f)
            if int(events.get("oom_kill", 0)):
                cell.killed_by = cell.killed_by or "memory"
            os.rmdir(cell.cgroup)
        except OSError:
            pass

    def close(self) -> None:
        """Kill all sandboxes and wait until nothing is left of them."""
        deadline = time.monotonic() + 10
        while self.cells and time.monotonic() < deadline:
            for cell in self.cells.values():
                cell.kill("host")
            time.sleep(0.002)
            self.reap()


def kill(pid: int) -> None:
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
    for pid, row in table.items():
        children.setdefault(row[0], []).append(pid)
    todo, found = [root] if root in table else [], []
    while todo:
        found.append(todo.pop())
        todo += children.get(found[-1], [])
    return found


def pss(tree: list[int], table: dict[int, tuple[int, int, int]]) -> int:
    """Proportional set size in bytes: shared pages count once; resident size where that cannot be read."""
    total = 0
    for pid in tree:
        try:
            with open(f"/proc/{pid}/smaps_rollup", "rb") as f:
                total += int(f.read().split(b"\nPss:", 1)[1].split(None, 1)[0]) * 1024
        except (OSError, IndexError, ValueError):
            total += table[pid][2] if os.path.exists(f"/proc/{pid}") else 0
    return total


def page_tables(tree: list[int]) -> int:
    """Bytes of the page tables of processes: memory that is in no resident size."""
    total = 0
    for pid in tree:
        try:
            with open(f"/proc/{pid}/status", "rb") as f:
                total += int(f.read().split(b"\nVmPTE:", 1)[1].split(None, 1)[0]) * 1024
        except (OSError, IndexError, ValueError):
            continue
    return total


def sockets(tree: list[int]) -> int:
    """Bytes that the sockets of a sandbox may hold, also those that are closed and not yet read, and those nobody
    accepted. `tree`: with bubblewrap's own process first, which may be in another network."""
    try:
        with open(f"/proc/{tree[1]}/net/sockstat", "rb") as f:
            return int(f.readline().split()[2]) * SOCKET_BYTES
    except (OSError, IndexError, ValueError):
        return 0


def files(tree: list[int]) -> int:
    """Bytes that open files (pipes, event counters, and so on) may hold. Their number: Linux 6.2 and later."""
    total = 0
    for pid in tree:
        try:
            total += os.stat(f"/proc/{pid}/fd").st_size * FILE_BYTES
        except OSError:
            continue
    return total


def records(tree: list[int], most: int) -> int:
    """Bytes of the kernel's records of mappings, file locks and watched descriptors; counts no further than `most`."""
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
                        total += part.count(b"\n") * RECORD_BYTES
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


def write(path: str, text: str) -> None:
    with open(path, "w") as f:
        f.write(text)


def private_net() -> None:
    """Move into a network of one's own, with nothing in it but a loopback and with small buffers."""
    if libc.unshare(CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "unshare: " + os.strerror(ctypes.get_errno()))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sH22x", b"lo", IFF_UP))
    for name, value in NET_LIMITS.items():
        write(f"/proc/sys/net/{name}", value)


def in_child(call: Callable[[], None]) -> bool:
    """Whether a child process can do something."""
    pid = os.fork()
    if pid == 0:
        try:
            call()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(pid, 0)[1] == 0


def main() -> None:
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    os.set_inheritable(int(sys.argv[1]), False)
    keeper = Keeper(socket.socket(fileno=int(sys.argv[1])))
    try:
        keeper.run()
    finally:
        keeper.close()


if __name__ == "__main__":
    main()
