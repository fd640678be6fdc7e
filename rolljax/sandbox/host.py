"""A process's sandboxes: slots, one-shot programs, streams, and the shared host that is the default."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import os
import selectors
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, TYPE_CHECKING, Literal

from rolljax.errors import ConfigError, InfraError
from rolljax.sandbox import command_line
from rolljax.sandbox.inside.wire import CHUNK, HeadTail
from rolljax.sandbox.launcher import Launcher, SandboxHandle
from rolljax.sandbox.profile import CODE, MCP, Profile, SandboxConfig
from rolljax.sandbox.provider import (
    CONTAINERS,
    END_S,
    NOT_ITS_FAULT,
    START_S,
    AgentChannel,
    Handle,
    Result,
    SandboxProvider,
    shared,
)

if TYPE_CHECKING:
    from rolljax.sandbox.session import Sandbox

AGENT_FILES = ("agent.py", "wire.py")
"""Programs of `inside` that serve a live sandbox."""
SIGKILL_CODE, SIGXCPU_CODE = 128 + 9, 128 + 24


class ProgramStream:
    """A program in a sandbox whose standard input and output are raw pipes of this process."""

    def __init__(self, handle: SandboxHandle, stdin: int, stdout: int, stderr: int) -> None:
        self._handle, self._stderr = handle, stderr
        self.stdin: IO[bytes] = io.FileIO(stdin, "w")
        self.stdout: IO[bytes] = io.FileIO(stdout, "r")
        self._said = HeadTail(1 << 16)
        self._closed = False
        self._reader = threading.Thread(target=self._drain, name="rolljax-sandbox-stderr", daemon=True)
        self._reader.start()

    def _drain(self) -> None:
        while part := os.read(self._stderr, CHUNK):
            self._said.add(part)
        os.close(self._stderr)

    def stderr(self) -> bytes:
        """Return the program's standard error; the middle of a long one is cut out."""
        return self._said.value()

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Return the program's exit code; None while it runs.

        Raises:
          InfraError: it could not be started.
        """
        if not self._handle.wait(timeout_s):
            return None
        self._reader.join(END_S)
        return ended_with(self._handle, self.stderr())

    @property
    def killed_by(self) -> str:
        return str(self._handle.exit.get("killed_by", ""))

    def kill(self) -> None:
        self._handle.kill()

    def close(self) -> None:
        """Kill the program if it still runs, and free everything."""
        if self._closed:
            return
        self._closed = True
        self.stdin.close()
        self._handle.kill()
        self._handle.wait(END_S)
        self._reader.join(END_S)
        self.stdout.close()

    def __enter__(self) -> ProgramStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SandboxHost(SandboxProvider):
    """Makes sandboxes of this machine's own system, with bubblewrap. Thread-safe; methods block, so call them from
    worker threads.

    Raises:
      ConfigError: this machine cannot isolate, with the cure.
    """

    def __init__(self, config: SandboxConfig | None = None, *, checked: bool = False) -> None:
        """Create the host. checked: the caller knows that the machine can isolate, or is about to find out."""
        super().__init__(config or SandboxConfig())
        self._launcher: Launcher | None = None
        if self.config.backend == "bwrap" and not checked:
            check_machine()

    def _run(self, argv: Sequence[str], stdin: bytes, files: Mapping[str, bytes], profile: Profile) -> Result:
        start = time.monotonic()
        (in_r, in_w), (out_r, out_w), (err_r, err_w) = os.pipe(), os.pipe(), os.pipe()
        ours, theirs = [in_w, out_r, err_r], [in_r, out_w, err_w]
        try:
            try:
                handle = self.start(argv, theirs, files, {}, profile, profile.wall_s)
            finally:
                for fd in theirs:
                    os.close(fd)
            try:
                out, err, flooded = _exchange(handle, ours, stdin, profile)
            finally:
                handle.kill()
                ended = handle.wait(END_S)
        finally:
            for fd in ours:
                if fd >= 0:
                    os.close(fd)
        if not ended:
            raise InfraError("a sandbox did not end in time")
        code, killed_by = ended_with(handle, err.value()), str(handle.exit["killed_by"])
        if flooded:
            killed_by = "output"
        elif code == SIGXCPU_CODE and not killed_by:
            killed_by = "cpu"
        ms = (time.monotonic() - start) * 1e3
        cut = out.truncated or err.truncated
        return Result(code, out.value(), err.value(), killed_by == "wall", killed_by, ms, cut)

    def popen(
        self, argv: Sequence[str], *, files: Mapping[str, bytes] | None = None, profile: Profile = MCP
    ) -> ProgramStream:
        """Start a program whose standard input and output are pipes for the caller."""
        (in_r, in_w), (out_r, out_w), (err_r, err_w) = os.pipe(), os.pipe(), os.pipe()
        with contextlib.ExitStack() as on_failure:
            for fd in (in_w, out_r, err_r):
                on_failure.callback(os.close, fd)
            try:
                handle = self.start(argv, [in_r, out_w, err_w], files or {}, {}, profile, profile.wall_s)
            finally:
                for fd in (in_r, out_w, err_w):
                    os.close(fd)
            on_failure.pop_all()
        return ProgramStream(handle, in_w, out_r, err_r)

    def start(
        self,
        argv: Sequence[str],
        stdio: Sequence[int],
        files: Mapping[str, bytes],
        private: Mapping[str, bytes],
        profile: Profile,
        wall_s: float,
    ) -> SandboxHandle:
        """Take a slot and start a sandbox on three descriptors. The slot is free again when the sandbox is gone, soon
        after `wall_s` at the latest. `private`: read-only files in `command_line.INSIDE`.

        Raises:
          InfraError: no slot was free for `slot_wait_s`, or the supervisor is gone.
        """
        if not argv:
            raise ConfigError("is empty", setting="argv")
        if profile.image:
            raise ConfigError(
                "is an image, and bubblewrap shows this machine's own system",
                setting="Profile.image",
                value=profile.image,
                remedy=CONTAINERS,
            )
        free, folder = self.take_slot(), ""
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(lambda: _end(folder, free))
            launcher = self._running()
            if self.config.backend == "none":
                folder = tempfile.mkdtemp(prefix="rolljax-")
                for name, content in private.items():
                    with open(os.path.join(folder, name), "wb") as f:
                        f.write(content)
                argv = [arg.replace(command_line.INSIDE, folder) for arg in argv]
                command = command_line.trusted(argv, files, folder, profile)
            else:
                command = command_line.isolated(
                    argv, files, private, profile, launcher.base, launcher.ptys, launcher.as_root, launcher.own_net
                )
            handle = launcher.spawn(command, stdio, profile, wall_s, functools.partial(_end, folder, free))
            on_failure.pop_all()
        return handle

    def start_agent(self, profile: Profile) -> AgentChannel:
        ours, theirs = socket.socketpair()
        errors_r, errors_w = os.pipe()
        argv = [*command_line.isolated_python(), f"{command_line.INSIDE}/agent.py"]
        private = {name: command_line.inside(name) for name in AGENT_FILES}
        with contextlib.ExitStack() as on_failure, theirs, open(os.devnull, "rb+") as null:
            on_failure.callback(ours.close)
            errors = on_failure.enter_context(io.FileIO(errors_r))
            try:
                stdio = [theirs.fileno(), null.fileno(), errors_w]
                handle = self.start(argv, stdio, {}, private, profile, profile.session_s)
            finally:
                os.close(errors_w)
            on_failure.pop_all()
        return AgentChannel(handle, ours, errors)

    def usage(self, box: Sandbox) -> dict[str, int]:
        """Return processes, pss_bytes, slot and generation of a live sandbox."""
        assert isinstance(box.handle, SandboxHandle)
        said = self._running().ask(op="stat", sandbox=box.handle.id)
        return {k: v for k, v in said.items() if k != "id"}

    def modes(self) -> dict[str, object]:
        """Return how sandboxes of this host are limited, for the record."""
        launcher = self._running()
        return {
            "backend": self.config.backend,
            "own_uid": launcher.as_root,
            "file_limits": "bytes and inodes" if launcher.base else "bytes",
            "memory": f"control group {launcher.cgroup}" if launcher.cgroup else "watchdog",
            "own_net": launcher.own_net,
            "ptys": bool(launcher.ptys),
            "swept": launcher.swept,
        }

    def close(self) -> None:
        """Kill every sandbox of this host."""
        super().close()
        with self._lock:
            launcher, self._launcher = self._launcher, None
        if launcher is not None and os.getpid() == self._pid:
            launcher.close()

    def _running(self) -> Launcher:
        """Return the supervisor; start it when first needed and again after it died."""
        with self._lock:
            if self._closed or os.getpid() != self._pid:
                raise InfraError("this sandbox host is closed, or belongs to another process")
            if self._launcher is not None and self._launcher.dead:
                self._launcher.close()
                self._launcher = None
            if self._launcher is None:
                self._launcher = Launcher(self.config)
            return self._launcher


def _end(folder: str, free: Callable[[], None]) -> None:
    """Free the slot of a sandbox that is gone. `folder` is its own with the `none` backend."""
    if folder:
        shutil.rmtree(folder, ignore_errors=True)
    free()


def _exchange(handle: SandboxHandle, fds: list[int], stdin: bytes, profile: Profile) -> tuple[HeadTail, HeadTail, bool]:
    """Write standard input and read both outputs until they are closed; closed descriptors become -1 in `fds`. Returns
    standard output, standard error, and whether their total size passed `Profile.flood_bytes`, for which the program is
    killed."""
    outputs = {1: HeadTail(profile.output_bytes), 2: HeadTail(profile.output_bytes)}
    left = memoryview(stdin)
    flooded = False
    deadline = time.monotonic() + profile.wall_s + START_S
    with selectors.DefaultSelector() as selector:
        for i, fd in enumerate(fds):
            os.set_blocking(fd, False)
            selector.register(fd, selectors.EVENT_READ if i else selectors.EVENT_WRITE, i)

        def done(i: int) -> None:
            selector.unregister(fds[i])
            os.close(fds[i])
            fds[i] = -1

        while fds[1] >= 0 or fds[2] >= 0:
            for key, _ in selector.select(1.0):
                i = key.data
                try:
                    if i == 0:
                        left = left[os.write(fds[0], left[:CHUNK]) :] if left else left
                        if not left:
                            done(0)
                        continue
                    part = os.read(fds[i], CHUNK)
                except BlockingIOError:
                    continue
                except OSError:
                    part = b""
                if not part:
                    done(i)
                    continue
                outputs[i].add(part)
            if not flooded and outputs[1].total + outputs[2].total > profile.flood_bytes:
                flooded = True
                handle.kill("output")
            if time.monotonic() > deadline:
                handle.kill()
                break
        # closed outputs do not end a program
        handle.wait(max(0.0, deadline - time.monotonic()))
    return outputs[1], outputs[2], flooded


def ended_with(handle: Handle, said: bytes) -> int:
    """Return the exit code of a finished sandbox; 127 when its program was not found.

    Raises:
      InfraError: the sandbox ended before its program began, or was killed, but not because of the code in it.
    """
    if reason := NOT_ITS_FAULT.get(handle.exit["killed_by"]):
        raise InfraError(reason)
    if handle.exit["started"]:
        return int(handle.exit["code"])
    if said.startswith(b"bwrap: execvp "):
        return 127
    reason = handle.exit["error"] or said[-500:].decode(errors="replace").strip() or "no reason given"
    raise InfraError(f"a sandbox did not start: {reason}")


INSTALL = "apt-get install bubblewrap (or your distribution's package of that name)"


def check_machine() -> None:
    """Check that this machine can isolate.

    Raises:
      ConfigError: sandboxes cannot be made here.
    """
    reason = available()
    if reason:
        raise ConfigError(
            f"cannot isolate on this machine: {reason}",
            setting="SandboxConfig.backend",
            value="bwrap",
            remedy="python -m rolljax.sandbox says what is missing; for code that you trust, backend='none'",
        )


_works = threading.Event()


def available() -> str:
    """Return why untrusted code cannot be isolated here, as one sentence; empty if it can. Tried once; a failure, which
    may be temporary, is tried again."""
    if _works.is_set():
        return ""
    if sys.platform != "linux":
        return "sandboxes need Linux"
    if not command_line.bwrap():
        return f"bubblewrap is not installed: {INSTALL}"
    try:
        with SandboxHost(checked=True) as host:
            result = host.run(["/bin/sh", "-c", "echo $((6*7))"])
    except (InfraError, ConfigError) as e:
        return str(e).replace("\n", "; ")
    if result.stdout != b"42\n":
        return f"a test program failed: {result.stderr[-300:]!r}"
    _works.set()
    return ""


_settings = SandboxConfig()


def settings() -> SandboxConfig:
    """Return the settings of this process's shared hosts."""
    return _settings


def configure(config: SandboxConfig) -> None:
    """Set the settings of this process's shared hosts. Workers of environments that it starts later have them too."""
    global _settings
    _settings = config


def shared_host(backend: Literal["bwrap", "none"] | None = None) -> SandboxHost:
    """Return this process's host with the settings of `configure`, or with another backend; made on first use and
    closed when the process exits."""
    return shared(SandboxHost, dataclasses.replace(_settings, backend=backend) if backend else _settings)


def run(
    argv: Sequence[str],
    *,
    stdin: bytes = b"",
    files: Mapping[str, bytes] | None = None,
    profile: Profile = CODE,
    host: SandboxHost | None = None,
) -> Result:
    """Call `SandboxHost.run` on the shared host, or on `host`."""
    return (host or shared_host()).run(argv, stdin=stdin, files=files, profile=profile)


def popen(
    argv: Sequence[str],
    *,
    files: Mapping[str, bytes] | None = None,
    profile: Profile = MCP,
    host: SandboxHost | None = None,
) -> ProgramStream:
    """Call `SandboxHost.popen` on the shared host, or on `host`."""
    return (host or shared_host()).popen(argv, files=files, profile=profile)
