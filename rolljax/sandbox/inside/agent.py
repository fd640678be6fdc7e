"""Serves a live sandbox from inside: shells that keep their state, programs, files, a socket. Channel: the socket on
descriptor 0, or the one at the path of the first argument. Further arguments: bash for a system without one.

One request, one answer, in order. A shell is an interactive bash without a terminal: SIGINT breaks a running command,
even a loop of the shell itself, and keeps its variables, functions and directory. Commands come over its standard input
as one quoted word, exit codes go over a pipe of their own, so that no output can be mistaken for either.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import signal
import stat
import sys
import time
from collections.abc import Iterator
from typing import Any

from wire import CHUNK, HeadTail, Lost, receive, send  # type: ignore[import-not-found]

SHELL_OPTIONS = ["--norc", "--noprofile", "--noediting", "-i"]
STATUS_FD = 9
GRACE_S = 0.5
START_S = 20.0
DRAIN_MAX = 64
PR_SET_DUMPABLE = 4
MAX_COMMAND = 1 << 20
SETUP = "set +H +o history +m; PS1= PS2= PS4='+ ' PROMPT_COMMAND=; unset HISTFILE"
ESCAPES = {c: f"\\x{c:02x}" for c in [*range(1, 32), 127]} | {10: "\\n", 9: "\\t", 39: "\\'", 92: "\\\\"}

Order = dict[str, Any]
Reply = tuple[dict[str, Any], bytes]
"""A message to the host: a JSON object and the bytes that belong to it."""


def parents() -> dict[int, int]:
    """Return the parent of every process, by process id."""
    table = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as f:
                    table[int(name)] = int(f.read().rpartition(b")")[2].split()[1])
            except OSError:
                pass
    return table


def descendants(root: int) -> set[int]:
    table, found, grew = parents(), {root}, True
    while grew:
        new = {pid for pid, parent in table.items() if parent in found} - found
        found |= new
        grew = bool(new)
    return found - {root}


def signal_all(processes: set[int], number: int) -> None:
    for pid in processes:
        try:
            os.kill(pid, number)
        except OSError:
            pass


def own_bash() -> list[str]:
    """Return the command of bash: the system's own, else that of the arguments."""
    for path in ("/bin/bash", "/usr/bin/bash", "/usr/local/bin/bash"):
        if os.access(path, os.X_OK):
            return [path]
    return sys.argv[2:]


def spawn(argv: list[str], fds: dict[int, int], cwd: str, variables: dict[str, str] | None = None) -> int:
    """Start a program in its own process group; return its process id. fds: descriptor in the program -> descriptor
    here. variables: in addition to the environment."""
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setpgid(0, 0)
        for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        high = {target: fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 20) for target, fd in fds.items()}
        for target, fd in high.items():
            os.dup2(fd, target)
        os.chdir(cwd)
        os.environ.update(variables or {})
        os.execvp(argv[0], argv)
    except (OSError, ValueError, TypeError) as e:  # no such program, or a name that can be none
        os.write(2, f"{argv[0]}: {getattr(e, 'strerror', e)}\n".encode(errors="replace"))
    finally:
        os._exit(127)


def drain(fd: int, kept: HeadTail | Shell, most: int = 1) -> bool:
    """Append the available bytes of a descriptor to `kept`, in at most `most` reads; return False when the descriptor
    is closed."""
    for _ in range(most):
        try:
            part = os.read(fd, CHUNK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if not part:
            return False
        kept.add(part)
    return True


def exit_code(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


class Shell:
    """A bash shell. `code` is None until it ended."""

    def __init__(self, cwd: str) -> None:
        self.number = 0
        self.start(cwd)

    def start(self, cwd: str) -> None:
        commands_r, self.commands = os.pipe2(os.O_CLOEXEC)
        self.output, output_w = os.pipe2(os.O_CLOEXEC)
        self.status, status_w = os.pipe2(os.O_CLOEXEC)
        self.pid = spawn(
            [*own_bash(), *SHELL_OPTIONS], {0: commands_r, 1: output_w, 2: output_w, STATUS_FD: status_w}, cwd
        )
        for fd in (commands_r, output_w, status_w):
            os.close(fd)
        for fd in (self.output, self.status):
            os.set_blocking(fd, False)
        self.cwd, self.said = cwd, b""
        self.code: int | None = None
        self.write(SETUP + "; " + self.report("0"))
        self.wait(time.monotonic() + START_S, HeadTail(0))  # its output at the start belongs to no command

    def report(self, code: str) -> str:
        """Return a command that reports number, exit code and directory on the status pipe."""
        self.number += 1
        return f"builtin printf '%s %s %s\\0' {self.number} {code} \"$PWD\" >&{STATUS_FD}\n"

    def write(self, line: str) -> None:
        data = memoryview(line.encode("utf-8", "replace"))
        try:
            while data:
                data = data[os.write(self.commands, data) :]
        except OSError:
            pass

    def run(self, command: str, timeout_s: float, limit: int) -> Reply:
        kept = HeadTail(limit)
        before = descendants(self.pid)
        word = "$'" + command.translate(ESCAPES) + "'"
        self.write(f"builtin eval {word} </dev/null {STATUS_FD}>&-; " + self.report('"$?"'))
        code = self.wait(time.monotonic() + timeout_s, kept)
        timed_out = code is None and self.code is None
        if timed_out:
            code = self.interrupt(before, kept)
        restarted = code is None
        if restarted:
            self.close(before if timed_out else None)
            code = self.code
            self.start(self.cwd if os.path.isdir(self.cwd) else "/")
        return {"code": code, "timed_out": timed_out, "restarted": restarted, "cut": kept.truncated}, kept.value()

    def interrupt(self, before: set[int], kept: HeadTail) -> int | None:
        """End the running command but keep the shell: first interrupt, then kill its processes. None when the shell
        does not come back."""
        signal_all({self.pid} | (descendants(self.pid) - before), signal.SIGINT)
        self.write(self.report("130"))
        code = self.wait(time.monotonic() + GRACE_S, kept)
        signal_all(descendants(self.pid) - before, signal.SIGKILL)
        return self.wait(time.monotonic() + GRACE_S, kept) if code is None else code

    def wait(self, deadline: float, kept: HeadTail) -> int | None:
        """Collect output until the last requested report comes; return its exit code. None at the deadline, and when
        the shell ended (`self.code` is set then)."""
        poll = select.poll()
        poll.register(self.output, select.POLLIN)
        poll.register(self.status, select.POLLIN)
        open_fds = {self.output, self.status}
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            for fd, _ in poll.poll(left * 1000 if len(open_fds) == 2 else min(left, 0.02) * 1000):
                into = kept if fd == self.output else self
                if not drain(fd, into):
                    poll.unregister(fd)
                    open_fds.discard(fd)
            while b"\0" in self.said:
                line, _, self.said = self.said.partition(b"\0")
                number, code, cwd = line.split(b" ", 2)
                if int(number) == self.number:
                    self.cwd = os.fsdecode(cwd)
                    drain(self.output, kept, DRAIN_MAX)
                    return int(code)
            if len(open_fds) < 2 and self.ended():
                drain(self.output, kept, DRAIN_MAX)
                return None

    def add(self, part: bytes) -> None:
        """Append status text; NUL ends a record."""
        self.said = (self.said + part)[-CHUNK:]

    def ended(self) -> bool:
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = exit_code(status) if pid else None
        return self.code is not None

    def close(self, before: set[int] | None = None) -> None:
        """End the shell and its child processes that are not in `before`."""
        if not self.ended():
            signal_all({self.pid} | (descendants(self.pid) - (before or set())), signal.SIGKILL)
            self.code = exit_code(os.waitpid(self.pid, 0)[1])
        for fd in (self.commands, self.output, self.status):
            os.close(fd)


class Agent:
    """Answers the host's requests."""

    def __init__(self, channel: int) -> None:
        self.channel, self.work = channel, os.getcwd()
        self.shells: dict[str, Shell] = {}
        self.program: RunningProgram | None = None
        self.listener: Any = None

    def serve(self) -> None:
        while True:
            order, blob = receive(self.channel)
            operation = getattr(self, "do_" + str(order.get("op")))
            try:
                answer, data = operation(order, blob)
            except (OSError, ValueError) as e:  # of the requested path or program
                answer, data = {"error": str(getattr(e, "strerror", None) or e)}, b""
            send(self.channel, answer, data)
            if self.listener is not None:
                self.hand_over(self.listener)

    def do_hello(self, order: Order, blob: bytes) -> Reply:
        return {"ready": True, "work": self.work}, b""

    def do_open_shell(self, order: Order, blob: bytes) -> Reply:
        if order["shell"] in self.shells:
            return {"error": "there is a shell of that name"}, b""
        self.shells[order["shell"]] = Shell(self.work)
        return {}, b""

    def do_close_shell(self, order: Order, blob: bytes) -> Reply:
        if order["shell"] not in self.shells:
            return {"error": "there is no shell of that name"}, b""
        self.shells.pop(order["shell"]).close()
        return {}, b""

    def do_run(self, order: Order, blob: bytes) -> Reply:
        if order["shell"] not in self.shells:
            return {"error": "there is no shell of that name"}, b""
        if b"\0" in blob or len(blob) > MAX_COMMAND:
            return {"code": 2, "timed_out": False, "restarted": False, "cut": False}, b"bash: not a command\n"
        command = blob.decode("utf-8", "replace")
        return self.shells[order["shell"]].run(command, order["timeout_s"], order["limit"])

    def do_execute(self, order: Order, blob: bytes) -> Reply:
        """Run a program separately from the shells; `blob` is its standard input."""
        program = RunningProgram(order["argv"], blob, order["limit"], self.work)
        timed_out = not program.wait(time.monotonic() + order["timeout_s"])
        return program.result(timed_out)

    def do_start(self, order: Order, blob: bytes) -> Reply:
        """Start a program in the background; `blob` is its standard input. There is one at a time."""
        if self.program is not None:
            return {"error": "another program is running"}, b""
        folder = os.path.join(self.work, order["folder"])
        self.program = RunningProgram(order["argv"], blob, order["limit"], folder, order["variables"])
        return {}, b""

    def do_wait(self, order: Order, blob: bytes) -> Reply:
        """Wait for the program in the background, and kill it afterwards if the host asks for its end."""
        if self.program is None:
            return {"error": "no program was started"}, b""
        if not self.program.wait(time.monotonic() + order["timeout_s"]) and not order["stop"]:
            return {"running": True}, b""
        program, self.program = self.program, None
        return program.result(timed_out=program.status is None)

    def do_listen(self, order: Order, blob: bytes) -> Reply:
        """Listen on the sandbox's own loopback. The socket follows the answer, and is closed here."""
        import socket  # the start of other sandboxes does not wait for it

        self.listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        return {"port": self.listener.getsockname()[1]}, b""

    def hand_over(self, listener: Any) -> None:
        """Send a socket to the host, with one byte."""
        import socket

        with listener, socket.socket(fileno=os.dup(self.channel)) as channel:
            socket.send_fds(channel, [b"s"], [listener.fileno()])
        self.listener = None

    def do_put(self, order: Order, blob: bytes) -> Reply:
        path = os.path.join(self.work, order["path"])
        os.makedirs(os.path.dirname(path), exist_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK | os.O_CLOEXEC, order["mode"])
        with os.fdopen(fd, "wb") as f:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                return {"error": "is not a regular file"}, b""
            f.write(blob)
            os.fchmod(fd, order["mode"])
        return {}, b""

    def do_list(self, order: Order, blob: bytes) -> Reply:
        """List kind (f, d, or another), mode and path of some paths, and of everything below them if `below`."""
        entries: list[bytes] = []
        left = order["limit"]
        for root in order["paths"]:
            for kind, mode, path in entries_at(os.path.join(self.work, root), order["below"]):
                entries.append(f"{kind} {mode:o} ".encode() + os.fsencode(path) + b"\0")
                left -= len(entries[-1])
                if left < 0:
                    return {"cut": True}, b"".join(entries[:-1])
        return {"cut": False}, b"".join(entries)

    def do_count(self, order: Order, blob: bytes) -> Reply:
        """Count the processes of the sandbox."""
        return {"processes": len(parents())}, b""

    def do_get(self, order: Order, blob: bytes) -> Reply:
        path = os.path.join(self.work, order["path"])
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        with os.fdopen(fd, "rb") as f:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                return {"error": "is not a regular file"}, b""
            if found.st_size > order["limit"]:
                return {"error": f"has {found.st_size} bytes, more than {order['limit']}"}, b""
            return {}, f.read(order["limit"])


def entries_at(root: str, below: bool) -> Iterator[tuple[str, int, str]]:
    """Yield kind, mode and path of a file or folder, and of everything `below` a folder. Links are not followed, other
    file systems not entered."""
    todo, device = [root], None
    while todo:
        path = todo.pop()
        try:
            found = os.lstat(path)
            device = found.st_dev if device is None else device
            kind = "d" if stat.S_ISDIR(found.st_mode) else "f" if stat.S_ISREG(found.st_mode) else "o"
            yield kind, stat.S_IMODE(found.st_mode), path
            if below and kind == "d" and found.st_dev == device:
                todo += [os.path.join(path, name) for name in os.listdir(path)]
        except OSError:  # gone, or not readable
            continue


class RunningProgram:
    """A program separate from the shells, fed with `data` and read while the host waits for it. status: how it ended;
    None until then."""

    def __init__(
        self, argv: list[str], data: bytes, limit: int, cwd: str, variables: dict[str, str] | None = None
    ) -> None:
        (in_r, self.stdin), (out_r, out_w), (err_r, err_w) = (os.pipe2(os.O_CLOEXEC) for _ in range(3))
        self.pid = spawn(argv, {0: in_r, 1: out_w, 2: err_w}, cwd, variables)
        for fd in (in_r, out_w, err_w):
            os.close(fd)
        self.kept = {out_r: HeadTail(limit), err_r: HeadTail(limit)}
        self.left, self.open = memoryview(data), {self.stdin, out_r, err_r}
        self.status: int | None = None
        self.poll = select.poll()
        for fd in self.open:
            os.set_blocking(fd, False)
            self.poll.register(fd, select.POLLOUT if fd == self.stdin else select.POLLIN)

    def wait(self, deadline: float) -> bool:
        """Return True when the program has ended, without its background processes; False at the deadline."""
        while self.status is None:
            for fd, _ in self.poll.poll(20 if len(self.open) < 3 else 5):
                done = not self.feed() if fd == self.stdin else not drain(fd, self.kept[fd])
                if done:
                    self.poll.unregister(fd)
                    self.open.discard(fd)
                    os.close(fd)
            found, code = os.waitpid(self.pid, os.WNOHANG)
            if found:
                self.status = code
            elif time.monotonic() > deadline:
                return False
        return True

    def feed(self) -> bool:
        """Write to standard input; return whether there is more."""
        try:
            self.left = self.left[os.write(self.stdin, self.left[:CHUNK]) :]
        except BlockingIOError:
            pass
        except OSError:
            self.left = self.left[:0]
        return bool(self.left)

    def result(self, timed_out: bool) -> Reply:
        """Kill the program if it still runs, and return its output."""
        if self.status is None:
            signal_all({self.pid} | descendants(self.pid), signal.SIGKILL)
            self.status = os.waitpid(self.pid, 0)[1]
        for fd in self.open:
            if fd != self.stdin:
                drain(fd, self.kept[fd], DRAIN_MAX)
            os.close(fd)
        out, err = (k.value() for k in self.kept.values())
        cut = any(k.truncated for k in self.kept.values())
        return {"code": exit_code(self.status), "timed_out": timed_out, "cut": cut, "stdout_n": len(out)}, out + err


def bury_orphans() -> None:
    """Continue in a child process. This process, the first of a container, waits for every process that ends, and ends
    with the child."""
    agent = os.fork()
    while agent:
        if os.wait()[0] == agent:
            os._exit(0)


def opened_channel() -> int:
    """Return the descriptor of the socket to the host."""
    if len(sys.argv) < 2:
        channel = fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, 10)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        return channel
    import socket

    with socket.socket(socket.AF_UNIX) as connected:
        connected.connect(sys.argv[1])
        return fcntl.fcntl(connected, fcntl.F_DUPFD_CLOEXEC, 10)


def main() -> None:
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # its memory and descriptors are not the commands' to open
    if os.getpid() == 1:
        bury_orphans()
    channel = opened_channel()
    try:
        Agent(channel).serve()
    except Lost:
        sys.exit(0)


if __name__ == "__main__":
    main()
