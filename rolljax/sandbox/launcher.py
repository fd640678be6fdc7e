"""The host's side of the supervisor: start it, request sandboxes, receive their ends."""

from __future__ import annotations

import errno
import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rolljax.errors import ConfigError, InfraError
from rolljax.sandbox import supervisor
from rolljax.sandbox.command_line import SandboxCommand
from rolljax.sandbox.profile import Profile, SandboxConfig
from rolljax.sandbox.supervisor.protocol import MAX_MESSAGE

ANSWER_S = 30.0


class SandboxHandle:
    """The host's handle of a sandbox. exit: how the sandbox ended (code, started, killed_by, error), set when all its
    processes are gone.
    """

    def __init__(self, launcher: Launcher, number: int, on_exit: Callable[[], None]) -> None:
        self.id = number
        self._on_exit = on_exit
        self.slot, self.generation, self.pid = -1, 0, 0
        self.exit: dict[str, Any] = {}
        self._launcher = launcher
        self._over = threading.Event()

    @property
    def over(self) -> bool:
        return self._over.is_set()

    def kill(self, why: str = "host") -> None:
        """Request the end of the sandbox; return at once."""
        if not self.over:
            self._launcher.tell(op="kill", sandbox=self.id, why=why)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the end of the sandbox; return whether it ended within the time."""
        return self._over.wait(timeout_s)

    def finished(self, message: dict[str, Any]) -> None:
        """Record the end: all processes of the sandbox are gone."""
        self.exit = message
        self._on_exit()
        self._over.set()


class Launcher:
    """A running supervisor. Thread-safe."""

    def __init__(self, config: SandboxConfig) -> None:
        self.config, self.as_root = config, os.geteuid() == 0 and config.backend == "bwrap"
        self.dead = False
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._handles: dict[int, SandboxHandle] = {}
        self._answers: dict[int, dict[str, Any] | threading.Event] = {}
        self.folder = _folder()
        self.cgroup = delegated_group(config.cgroup) if config.backend == "bwrap" else ""
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            self._socket.setsockopt(socket.SOL_SOCKET, option, MAX_MESSAGE)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-B", os.path.dirname(supervisor.__file__), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={},
                cwd="/",
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        threading.Thread(target=self._receive, name="rolljax-sandbox-supervisor", daemon=True).start()
        said = self.ask(
            op="hello",
            folder=self.folder,
            isolate=config.backend == "bwrap",
            as_root=self.as_root,
            first_uid=config.first_uid,
            cgroup=self.cgroup,
        )
        self.base = os.path.join(self.folder, "mnt") if said["mounts"] else ""
        self.own_net = bool(said["nets"])
        self.ptys = str(said["ptys"])
        self.swept = int(said["swept"])

    def spawn(
        self,
        command: SandboxCommand,
        stdio: Sequence[int],
        profile: Profile,
        wall_s: float,
        on_exit: Callable[[], None],
    ) -> SandboxHandle:
        """Start a sandbox on three descriptors, which stay the caller's; `on_exit` is called at its end."""
        handle = SandboxHandle(self, next(self._numbers), on_exit)
        order = {
            "op": "spawn",
            "id": handle.id,
            "argv": command.argv,
            "env": command.env,
            "rlimits": command.rlimits,
            "tree": command.tree,
            "chdir": command.chdir,
            "wall_s": wall_s,
            "memory_bytes": profile.memory_bytes,
            "total_cpu_s": profile.total_cpu_s,
            "nproc": profile.nproc,
        }
        data = [_in_memory(content) for content in command.data]
        self._handles[handle.id] = handle
        try:
            self.tell([*stdio, *data], **order)
        except InfraError:
            self._handles.pop(handle.id, None)
            raise
        finally:
            for fd in data:
                os.close(fd)
        return handle

    def tell(self, fds: Sequence[int] = (), **message: Any) -> None:
        """Send a message, and copies of descriptors with it."""
        text = json.dumps(message).encode()
        try:
            with self._lock:
                socket.send_fds(self._socket, [text], list(fds))
        except OSError as e:
            if e.errno == errno.EMSGSIZE:
                raise ConfigError("is too long a command line for a sandbox", setting="argv", value=len(text)) from e
            raise InfraError(f"the sandbox supervisor is gone: {e}") from e

    def ask(self, **message: Any) -> dict[str, Any]:
        """Send a message to the supervisor, and return its answer."""
        number, arrived = next(self._numbers), threading.Event()
        self._answers[number] = arrived
        self.tell(**message, id=number)
        arrived.wait(ANSWER_S)
        answer = self._answers.pop(number)
        if isinstance(answer, threading.Event):
            raise InfraError("the sandbox supervisor does not answer")
        return answer

    def close(self) -> None:
        """End the supervisor and with it every sandbox."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        try:
            self.process.wait(ANSWER_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _receive(self) -> None:
        while True:
            try:
                data = self._socket.recv(MAX_MESSAGE)
            except OSError:
                data = b""
            if not data:
                break
            message = json.loads(data)
            if "event" not in message:
                arrived = self._answers[message["id"]]
                self._answers[message["id"]] = message
                if isinstance(arrived, threading.Event):
                    arrived.set()
            elif message["event"] == "slot":
                handle = self._handles[message["id"]]
                handle.slot, handle.generation, handle.pid = message["slot"], message["generation"], message["pid"]
            else:
                self._handles.pop(message["id"]).finished(message)
        self.dead = True
        for handle in list(self._handles.values()):
            handle.finished(
                {"code": 137, "started": False, "killed_by": "host", "error": "the sandbox supervisor died"}
            )
        for number, arrived in list(self._answers.items()):
            if isinstance(arrived, threading.Event):
                self._answers[number] = {"error": "dead"}
                arrived.set()
        self._socket.close()


def delegated_group(asked: str) -> str:
    """Return a delegated version 2 control group that can limit memory and processes; empty when there is none.

    Raises:
      ConfigError: `asked` names one that cannot.
    """
    if asked:
        if not _can_limit(asked):
            raise ConfigError(
                "is not a delegated control group with memory and pids switched on for its children",
                setting="SandboxConfig.cgroup",
                value=asked,
                remedy="write '+memory +pids' to its cgroup.subtree_control, or leave the setting empty",
            )
        return asked
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        own = next(line[3:] for line in lines if line.startswith("0::"))
        group = "/sys/fs/cgroup" + own
        marks = [os.getxattr(group, name) for name in ("user.delegate", "trusted.delegate") if name in _marks(group)]
    except (OSError, StopIteration):
        return ""
    return group if b"1" in marks and _can_limit(group) else ""


def _marks(group: str) -> list[str]:
    return os.listxattr(group)


def _can_limit(group: str) -> bool:
    try:
        on = Path(group, "cgroup.subtree_control").read_text().split()
    except OSError:
        return False
    return {"memory", "pids"} <= set(on) and os.access(group, os.W_OK)


def _folder() -> str:
    """Return the folder of slot locks and of the mount point: one per user, shared by all hosts of this machine."""
    if os.geteuid() == 0:
        folder = "/run/rolljax-sandbox"
    else:
        folder = os.path.join(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir(), f"rolljax-{os.geteuid()}")
    os.makedirs(folder, mode=0o711, exist_ok=True)
    if os.lstat(folder).st_uid != os.geteuid() or os.path.islink(folder):
        raise ConfigError("is owned by another user", setting="sandbox folder", value=folder, remedy="remove it")
    return folder


def _in_memory(content: bytes) -> int:
    """Return a descriptor from which `content` can be read."""
    fd = os.memfd_create("rolljax", os.MFD_CLOEXEC)
    os.write(fd, content)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd
