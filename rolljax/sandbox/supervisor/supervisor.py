"""Starts, watches and kills sandboxes for a host, over a socket.

The process is single-threaded, so it may fork; it is the child subreaper of all it starts, so nothing is left to
process 1; it reaps only what it started, because those are its only children. When the socket closes (the host is gone,
however it died) it kills everything and ends; when the supervisor itself is killed, bubblewrap's `--die-with-parent`
ends the sandboxes.

Messages are JSON datagrams. In: `hello` (settings), `spawn` (with descriptors attached), `kill`, `stat`. Out: an answer
per `hello` and `stat`, `slot` when a sandbox is started, and `exit` when nothing of it is left.
"""

import array
import contextlib
import ctypes
import fcntl
import json
import os
import resource
import select
import signal
import socket
import sys
import time
from typing import Any, NoReturn

from rolljax.sandbox.supervisor import cgroup, namespaces, procfs
from rolljax.sandbox.supervisor.namespaces import in_child, private_net
from rolljax.sandbox.supervisor.procfs import kill
from rolljax.sandbox.supervisor.protocol import MAX_MESSAGE, STATUS_FD
from rolljax.sandbox.supervisor.slots import SandboxSlots
from rolljax.sandbox.supervisor.watch import SandboxWatch

PR_SET_CHILD_SUBREAPER = 36
MAX_FDS = 253
HIGH_FD = 400
WATCH_S, WATCH_CLOSELY_S = 0.25, 0.1
SIGKILL = int(signal.SIGKILL)
SUPERVISOR_NICE = -10
SUSPICIOUS_BYTES = 128 << 20
"""Growth of the kernel's memory in bytes from which on slow counts are made: mappings, locks, texts of /proc."""


class SupervisedSandbox:
    """One sandbox: `pid` is bubblewrap's outer process, `inner` process 1 of its name space."""

    def __init__(self, order: dict[str, Any], pid: int, status_fd: int, slot: tuple[int, int]) -> None:
        self.id, self.pid, self.leader, self.status_fd = order["id"], pid, pid, status_fd
        self.number, self.generation = slot
        self.ends = time.monotonic() + order["wall_s"]
        self.memory, self.cpu_s = order["memory_bytes"], order["total_cpu_s"]
        self.watch: SandboxWatch | None = None
        self.oom_kills = procfs.oom_kills()
        self.cgroup = ""
        self.inner = 0
        self.text = b""
        self.code: int | None = None
        self.status = 0
        self.dying = False
        self.error = ""
        self.killed_by = ""

    def read_status(self) -> None:
        """Read bubblewrap's status output so far."""
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


class Supervisor:
    """The sandboxes of one host."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.sandboxes: dict[int, SupervisedSandbox] = {}
        self.nice = os.getpriority(os.PRIO_PROCESS, 0)
        self.wake, signal_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(signal_fd, warn_on_full_buffer=False)
        for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(ignored, signal.SIG_IGN)

    def hello(self, order: dict[str, Any]) -> None:
        """Set up the supervisor: the folder for locks and mounts, and the abilities of this machine."""
        try:
            os.setpriority(os.PRIO_PROCESS, 0, SUPERVISOR_NICE)  # it checks in time, however busy sandboxes are
        except PermissionError:
            pass
        self.folder, self.base = order["folder"], os.path.join(order["folder"], "mnt")
        self.isolate, self.as_root = order["isolate"], order["as_root"]
        self.cgroup = order["cgroup"]
        self.mounts = self.as_root and self.try_mounts()
        self.nets = self.as_root and in_child(private_net)
        self.ptys = self.isolate and not self.as_root and self.try_ptys()
        self.kernel_floor = self.kernel_least = procfs.kernel_bytes()
        self.slots = SandboxSlots(self.folder, order["first_uid"], self.as_root)
        ptys = os.path.join(self.base, namespaces.PTS) if self.mounts else self.base if self.ptys else ""
        self.say(id=order["id"], mounts=self.mounts, nets=self.nets, ptys=ptys, swept=self.slots.sweep())

    def run(self) -> None:
        poll = select.poll()
        poll.register(self.sock, select.POLLIN)
        poll.register(self.wake, select.POLLIN)
        watch_at = time.monotonic()
        while True:
            now = time.monotonic()
            wait_s = min(
                [box.ends - now for box in self.sandboxes.values()] + ([watch_at - now] if self.sandboxes else [3600.0])
            )
            events = dict(poll.poll(max(0.0, wait_s) * 1000 + 1))
            if self.wake in events:
                os.read(self.wake, 4096)
            self.reap()
            if self.sock.fileno() in events and not self.take_message():
                return
            now = time.monotonic()
            for sandbox in self.sandboxes.values():
                if now >= sandbox.ends:
                    sandbox.kill("wall")
                    sandbox.ends = now + 3600.0
            if self.sandboxes and now >= watch_at:
                watch_at = now + self.watch()

    def take_message(self) -> bool:
        """Handle one message of the host; return False if the host is gone."""
        space = socket.CMSG_LEN(MAX_FDS * 4)  # recv_fds cannot ask for close-on-exec
        data, extra, _, _ = self.sock.recvmsg(MAX_MESSAGE, space, socket.MSG_CMSG_CLOEXEC)
        fds = [fd for _, _, part in extra for fd in array.array("i", part)]
        if not data:
            return False
        order = json.loads(data)
        if order["op"] == "spawn":
            self.spawn(order, fds)
        elif order["op"] == "hello":
            self.hello(order)
        elif order["op"] == "kill" and order["sandbox"] in self.sandboxes:
            self.sandboxes[order["sandbox"]].kill(order["why"])
        elif order["op"] == "stat":
            sandbox = self.sandboxes.get(order["sandbox"])
            self.say(id=order["id"], **(self.usage(sandbox) if sandbox else {}))
        return True

    def say(self, **message: Any) -> None:
        try:
            self.sock.send(json.dumps(message).encode())
        except OSError:
            pass

    def spawn(self, order: dict[str, Any], fds: list[int]) -> None:
        if not self.sandboxes:
            self.kernel_floor = self.kernel_least = procfs.kernel_bytes()
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
        sandbox = SupervisedSandbox(order, pid, status_r, slot)
        if self.cgroup:
            sandbox.cgroup = cgroup.path_of(self.cgroup, os.getpid(), slot[0])
        self.sandboxes[sandbox.id] = sandbox
        self.say(id=sandbox.id, event="slot", slot=slot[0], generation=slot[1], pid=pid)

    def become(self, order: dict[str, Any], fds: list[int], status_w: int, slot: int) -> NoReturn:
        """Arrange descriptors in the forked child, take on identity and limits, and execute the program. Never
        returns."""
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, HIGH_FD) for fd in [status_w, *fds[:3], status_w, *fds[3:]]]
        try:
            os.setsid()
            os.setpriority(os.PRIO_PROCESS, 0, self.nice)
            signal.set_wakeup_fd(-1)
            for name in ("SIGPIPE", "SIGXFSZ", "SIGINT", "SIGTERM", "SIGHUP", "SIGCHLD"):
                signal.signal(getattr(signal, name), signal.SIG_DFL)
            namespaces.write("/proc/self/oom_score_adj", "1000")  # sandboxes are killed first when memory runs out
            if self.cgroup:
                group = cgroup.path_of(self.cgroup, os.getppid(), slot)
                cgroup.enter(group, order["memory_bytes"], order["nproc"])
            if self.nets:
                private_net()
            uid = self.slots.first_uid + slot
            if order["tree"] and self.mounts:
                namespaces.mount_tree(self.base, order["tree"], uid)
            if self.ptys:
                namespaces.mount_users_ptys(self.base)
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
        finally:  # the host gets the error, and the child ends: it never returns into the supervisor's code
            error = sys.exc_info()[1]
            os.write(high[0], json.dumps({"error": f"{type(error).__name__}: {error}"}).encode() + b"\n")
            os._exit(126)

    def try_mounts(self) -> bool:
        """Return whether a child may make a private mount name space with a file system in it."""
        os.makedirs(self.base, mode=0o711, exist_ok=True)
        os.chmod(self.folder, 0o711)
        lower = os.path.join(self.folder, "probe")
        os.makedirs(lower, exist_ok=True)
        tree = {"bytes": 1 << 20, "inodes": 100, "dirs": [], "overlays": [[lower, "probe"]]}
        return in_child(lambda: namespaces.mount_tree(self.base, tree, 0))

    def try_ptys(self) -> bool:
        """Return whether a process of an ordinary user can mount a private devpts (pseudo-terminals) in a user
        namespace."""
        os.makedirs(self.base, mode=0o711, exist_ok=True)
        return in_child(lambda: namespaces.mount_users_ptys(self.base))

    def reap(self) -> None:
        """Reap dead processes. A sandbox is over when both its outer process and process 1 inside are gone: the
        kernel ends process 1 last, after everything in its name space."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            for sandbox in list(self.sandboxes.values()):
                if sandbox.pid == pid:
                    self.outer_died(sandbox, status)
                elif sandbox.dying and sandbox.inner == pid:
                    self.finish(sandbox)

    def outer_died(self, sandbox: SupervisedSandbox, status: int) -> None:
        sandbox.read_status()
        sandbox.pid, sandbox.dying = 0, True
        if sandbox.code is None:
            sandbox.status = os.waitstatus_to_exitcode(status)
        if not self.isolate:
            for pid in self.session(sandbox.leader):
                kill(pid)
        elif sandbox.inner:
            try:  # if it still is there it is our child by now, alive or not
                if os.waitpid(sandbox.inner, os.WNOHANG)[0] == 0:
                    kill(sandbox.inner)
                    return
            except ChildProcessError:
                pass
        else:
            self.slots.sweep(sandbox.number)
        self.finish(sandbox)

    def finish(self, sandbox: SupervisedSandbox) -> None:
        if sandbox.status_fd >= 0:
            os.close(sandbox.status_fd)
        if sandbox.watch:
            sandbox.watch.close()
        if sandbox.cgroup and cgroup.leave(sandbox.cgroup):
            sandbox.killed_by = sandbox.killed_by or "memory"
        code = sandbox.status if sandbox.code is None else sandbox.code
        if not sandbox.killed_by and abs(code) in (SIGKILL, 128 + SIGKILL):
            if procfs.oom_kills() > sandbox.oom_kills:
                sandbox.killed_by = "machine"
            elif self.isolate and sandbox.inner and sandbox.code is None:  # code inside cannot reach the outer process
                sandbox.killed_by = "outside"
        started = bool(sandbox.code is not None or sandbox.killed_by) if self.isolate else not sandbox.error
        self.slots.free.append(sandbox.number)
        del self.sandboxes[sandbox.id]
        self.say(
            id=sandbox.id,
            event="exit",
            code=code if code >= 0 else 128 - code,
            started=started,
            killed_by=sandbox.killed_by,
            error=sandbox.error,
        )

    def session(self, pid: int) -> list[int]:
        """Return the processes of the session that `pid` leads, and their descendants."""
        table = procfs.process_table()
        found = {p for p, (_, session) in table.items() if session == pid}
        return [p for root in found for p in procfs.tree_of(root, table)]

    def watch(self) -> float:
        """Kill sandboxes over their memory or processor time; returns seconds until the next look."""
        kernel = procfs.kernel_bytes()
        self.kernel_least = min(kernel, self.kernel_least)
        suspicious = kernel > self.kernel_floor + SUSPICIOUS_BYTES
        grown = kernel - self.kernel_least if suspicious else 0
        close = False
        for sandbox in list(self.sandboxes.values()):
            if not sandbox.pid or sandbox.killed_by:
                continue
            if sandbox.cgroup:
                over = "cpu" if cgroup.cpu_s(sandbox.cgroup) > sandbox.cpu_s else ""
            elif watch := self.watch_of(sandbox):
                over = watch.over(grown)
                close |= watch.close_to_limit
            else:
                continue
            if over:
                sandbox.kill(over)
        self.kernel_floor = kernel if suspicious else min(kernel, self.kernel_floor)
        return WATCH_CLOSELY_S if close or suspicious else WATCH_S

    def watch_of(self, sandbox: SupervisedSandbox) -> SandboxWatch | None:
        """Return the counter of a sandbox, made on first use; None before bubblewrap has set it up."""
        if self.isolate and not sandbox.inner:
            sandbox.read_status()
        if not sandbox.watch and (sandbox.inner or not self.isolate):
            with contextlib.suppress(OSError):
                inner = sandbox.inner if self.isolate else 0
                sandbox.watch = SandboxWatch(inner, sandbox.pid, sandbox.memory, sandbox.cpu_s)
        return sandbox.watch

    def usage(self, sandbox: SupervisedSandbox) -> dict[str, int]:
        watch = self.watch_of(sandbox)
        return {**(watch.used() if watch else {}), "slot": sandbox.number, "generation": sandbox.generation}

    def close(self) -> None:
        """Kill all sandboxes and wait until they are gone."""
        deadline = time.monotonic() + 10
        while self.sandboxes and time.monotonic() < deadline:
            for sandbox in self.sandboxes.values():
                sandbox.kill("host")
            time.sleep(0.002)
            self.reap()


def main() -> None:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    os.set_inheritable(int(sys.argv[1]), False)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # some descriptors for each sandbox
    supervisor = Supervisor(socket.socket(fileno=int(sys.argv[1])))
    try:
        supervisor.run()
    finally:
        supervisor.close()


if __name__ == "__main__":
    main()
