"""A live sandbox: shells with state, programs and files, through the agent that runs inside."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import io
import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from rolljax.errors import ConfigError, EnvError, InfraError
from rolljax.sandbox.host import ended_with, shared_host
from rolljax.sandbox.inside import wire
from rolljax.sandbox.profile import TERMINAL, Profile
from rolljax.sandbox.provider import END_S, NOT_ITS_FAULT, START_S, Result, SandboxGone, SandboxProvider

ANSWER_S = 20.0
"""Seconds that an answer may take in addition to the time limit of the request."""
MAX_HEADER = 1 << 16
MAX_LIST_BYTES = 16 << 20
_LOST = {**NOT_ITS_FAULT, "host": "a live sandbox was lost with its supervisor"}


@dataclasses.dataclass(frozen=True)
class CommandResult:
    """The result of a shell command."""

    returncode: int
    output: str
    """Both streams as a terminal shows them; `truncated`: cut in the middle."""
    timed_out: bool = False
    """Whether the command ran out of time and was interrupted (130) or killed."""
    restarted: bool = False
    """Whether the command's shell is gone and a new one has started in the same directory."""
    killed_by: str = ""
    """Reason why the whole sandbox is gone, else empty: memory, cpu, wall, or agent (it killed its own sandbox)."""
    truncated: bool = False
    ms: float = 0.0


class Sandbox:
    """A live sandbox. Thread-safe: requests are answered one after the other. Make it with `Sandbox.open`."""

    def __init__(self, host: SandboxProvider, profile: Profile) -> None:
        self._host, self.profile = host, profile
        self._lock = threading.Lock()
        self._closed = False
        self._killed_by = ""
        self._started = self._background_s = time.monotonic()
        channel = host.start_agent(profile)
        # socket and file close themselves when the sandbox is forgotten unclosed
        self.handle, self._socket, self._errors = channel.handle, channel.socket, channel.errors
        self._socket.setblocking(False)

    @staticmethod
    def open(
        profile: Profile = TERMINAL, *, files: Mapping[str, bytes] | None = None, host: SandboxProvider | None = None
    ) -> Sandbox:
        """Start a sandbox with one shell, `main`, in the directory of `files`.

        Raises:
          ConfigError: this machine cannot isolate, or a file cannot be placed.
          InfraError: the start failed; try again.
        """
        host = host or shared_host()
        box = _take_warm(host, profile) or Sandbox.fresh(host, profile)
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(box.close)
            for path, data in (files or {}).items():
                box.put(path, data, 0o755 if data[:2] == b"#!" else 0o644)
            on_failure.pop_all()
        return box

    @staticmethod
    def fresh(host: SandboxProvider, profile: Profile) -> Sandbox:
        """Return a started sandbox that answers."""
        box = Sandbox(host, profile)
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(box.close)
            try:
                box._ask({"op": "hello"}, limit_s=START_S)
                box.open_shell("main")
            except SandboxGone as e:
                said = box._said()
                box.close()
                ended_with(box.handle, said)
                raise InfraError(f"a live sandbox did not start: {said.decode(errors='replace').strip() or e}") from e
            on_failure.pop_all()
        return box

    def _said(self) -> bytes:
        """Return the agent's last words."""
        if isinstance(self._errors, io.FileIO):
            os.set_blocking(self._errors.fileno(), False)
        return self._errors.read(4096) or b""

    def run(self, cmd: str, timeout_s: float = 30.0, shell: str = "main") -> CommandResult:
        """Run a command line in a shell. The shell keeps its state (directory, variables, functions)."""
        start = time.monotonic()
        limit = self.profile.output_bytes
        order = {"op": "run", "shell": shell, "timeout_s": timeout_s, "limit": limit}
        try:
            answer, blob = self._ask(order, cmd.encode("utf-8", "replace"), 2 * limit, timeout_s + ANSWER_S)
        except SandboxGone as e:
            if not self._fresh_loss:
                raise
            self._fresh_loss = False
            return CommandResult(137, "", killed_by=e.killed_by, ms=(time.monotonic() - start) * 1e3)
        _refuse(answer, f"shell {shell!r}")
        return CommandResult(
            _int(answer, "code"),
            blob.decode(errors="replace"),
            timed_out=answer.get("timed_out") is True,
            restarted=answer.get("restarted") is True,
            truncated=answer.get("cut") is True,
            ms=(time.monotonic() - start) * 1e3,
        )

    def execute(self, argv: Sequence[str], stdin: bytes = b"", timeout_s: float = 30.0) -> Result:
        """Run a program separately from the shells."""
        start = time.monotonic()
        order = {"op": "execute", "argv": [*argv], "timeout_s": timeout_s, "limit": self.profile.output_bytes}
        result = self._result_of(order, stdin, argv[0], timeout_s, start)
        assert result is not None
        return result

    def start(
        self, argv: Sequence[str], stdin: bytes = b"", *, folder: str = "", variables: Mapping[str, str] | None = None
    ) -> None:
        """Start a program in the background, separately from the shells; there is one at a time.

        Args:
          folder: where it starts; empty: where the sandbox's files are. variables: added to its environment.

        Raises:
          EnvError: another one is running.
        """
        order = {"op": "start", "argv": [*argv], "limit": self.profile.output_bytes}
        order |= {"folder": folder, "variables": dict(variables or {})}
        self._background_s = time.monotonic()
        _refuse(self._ask(order, stdin)[0], argv[0])

    def wait(self, timeout_s: float, *, stop: bool = False) -> Result | None:
        """Return the result of the program in the background; None if it still runs after `timeout_s`. Its output is
        read only during this call, so call it until the program has ended.

        Args:
          stop: kill the program after `timeout_s`, and return what it has printed (`timed_out`).
        """
        order = {"op": "wait", "timeout_s": timeout_s, "stop": stop}
        return self._result_of(order, b"", "the program", timeout_s, self._background_s)

    def listen(self) -> socket.socket:
        """Return a socket that listens on the sandbox's own loopback. The sandbox has a network of its own, so that
        only its programs can connect to it.

        Raises:
          SandboxGone: the sandbox sent something else.
        """
        with self._lock:
            answer, _ = self._ask_alone({"op": "listen"})
            _refuse(answer, "a socket")
            return self._received_socket()

    def put(self, path: str, data: bytes, mode: int = 0o644) -> None:
        """Write a file; folders on the way are made.

        Raises:
          EnvError: it cannot be written there.
        """
        answer, _ = self._ask({"op": "put", "path": path, "mode": mode}, data)
        _refuse(answer, path)

    def get(self, path: str, max_bytes: int = 1 << 20) -> bytes:
        """Read a regular file; links are not followed.

        Raises:
          EnvError: there is none, or it is larger than `max_bytes`.
        """
        answer, blob = self._ask({"op": "get", "path": path, "limit": max_bytes}, max_blob=max_bytes)
        _refuse(answer, path)
        return blob

    def list_files(self, paths: Sequence[str], *, below: bool = True) -> list[tuple[str, int, str]]:
        """List kind (f: regular file, d: folder, o: other), mode and path of `paths`, and of all that is `below` them,
        by path. Links are not followed. A list of more than 16 MiB is cut.
        """
        order = {"op": "list", "paths": [*paths], "below": below, "limit": MAX_LIST_BYTES}
        answer, blob = self._ask(order, max_blob=MAX_LIST_BYTES)
        _refuse(answer, "a list")
        found = {}
        for entry in blob.decode(errors="replace").split("\0"):
            kind, _, rest = entry.partition(" ")
            mode, _, path = rest.partition(" ")
            if path.startswith("/") and ".." not in path.split("/") and len(mode) <= 4 and set(mode) <= set("01234567"):
                found[path] = kind, int(mode or "644", 8) & 0o777, path
        return [found[path] for path in sorted(found)]

    def changes(self) -> list[tuple[str, str]]:
        """List the paths that are not as in the sandbox's image, each with A (added), C (changed) or D (deleted). The
        engine compares, so no code inside can hide a change.

        Raises:
          ConfigError: the sandbox is made from no image.
        """
        self._ask({"op": "hello"})  # a sandbox that is gone is not the engine's failure
        return self._host.changes(self)

    def commit(self, image: str) -> str:
        """Save the sandbox's files as an image, from which others can start (`Profile.image`); return its name.

        Raises:
          ConfigError: the sandbox is made from no image.
        """
        self._ask({"op": "hello"})
        return self._host.commit(self, image)

    def num_processes(self) -> int:
        """Count the processes in the sandbox, as its agent sees them."""
        return _int(self._ask({"op": "count"})[0], "processes")

    def open_shell(self, name: str) -> None:
        """Start another shell."""
        _refuse(self._ask({"op": "open_shell", "shell": name})[0], f"shell {name!r}")

    def close_shell(self, name: str) -> None:
        """End a shell and its child processes."""
        _refuse(self._ask({"op": "close_shell", "shell": name})[0], f"shell {name!r}")

    @property
    def alive(self) -> bool:
        return not (self._closed or self._killed_by) and not self.handle.over

    @property
    def age_s(self) -> float:
        return time.monotonic() - self._started

    def stats(self) -> dict[str, Any]:
        """Return alive, age_s, and what the provider knows: processes; with bubblewrap pss_bytes, slot, generation."""
        used = self._host.usage(self) if self.alive else {}
        return {**used, "alive": self.alive, "age_s": self.age_s}

    def close(self) -> None:
        """Kill everything in the sandbox. Returns when the sandbox is gone, or after half a minute."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._socket.close()
        self.handle.kill()
        self.handle.wait(END_S)
        self._errors.close()

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    _fresh_loss = False
    """Set when a request found the sandbox gone and reported it."""

    def _ask(
        self, order: Mapping[str, Any], blob: bytes = b"", max_blob: int = 1 << 16, limit_s: float = START_S
    ) -> tuple[dict[str, Any], bytes]:
        """Send a request and return its answer. Any error of the channel is the end of the sandbox."""
        with self._lock:
            return self._ask_alone(order, blob, max_blob, limit_s)

    def _ask_alone(
        self, order: Mapping[str, Any], blob: bytes = b"", max_blob: int = 1 << 16, limit_s: float = START_S
    ) -> tuple[dict[str, Any], bytes]:
        """Do what `_ask` does for a caller that holds the lock."""
        if self._closed:
            raise EnvError("the sandbox is closed")
        if reason := _LOST.get(self._killed_by):
            raise InfraError(reason)
        if self._killed_by:
            raise SandboxGone(self._killed_by)
        if self.handle.over:
            raise self._lost()
        deadline = time.monotonic() + limit_s
        try:
            wire.send(self._socket.fileno(), order, blob, deadline)
            return wire.receive(self._socket.fileno(), max_blob, MAX_HEADER, deadline)
        except wire.Lost as e:
            raise self._lost() from e

    def _received_socket(self) -> socket.socket:
        """Return the listening socket that follows an answer."""
        found: list[int] = []
        try:
            wire.wait(self._socket.fileno(), select.POLLIN, time.monotonic() + START_S)
            _, found, _, _ = socket.recv_fds(self._socket, 1, 1)
            sent = socket.socket(fileno=found[0])
            found.clear()
            if sent.family != socket.AF_INET or not sent.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                sent.close()
                raise wire.Lost("no listening socket")
        except (wire.Lost, OSError, IndexError) as e:  # the code inside has taken over the channel
            raise self._lost() from e
        finally:
            for fd in found:  # no socket
                os.close(fd)
        return sent

    def _result_of(
        self, order: Mapping[str, Any], stdin: bytes, name: str, timeout_s: float, start_s: float
    ) -> Result | None:
        """Return the result of a program; None while it runs."""
        try:
            answer, blob = self._ask(order, stdin, 4 * self.profile.output_bytes, timeout_s + ANSWER_S)
        except SandboxGone as e:
            if not self._fresh_loss:
                raise
            self._fresh_loss = False
            return Result(137, b"", b"", killed_by=e.killed_by, ms=(time.monotonic() - start_s) * 1e3)
        _refuse(answer, name)
        if answer.get("running") is True:
            return None
        cut, timed_out = _int(answer, "stdout_n"), answer.get("timed_out") is True
        ms = (time.monotonic() - start_s) * 1e3
        killed_by = "wall" if timed_out else ""
        return Result(_int(answer, "code"), blob[:cut], blob[cut:], timed_out, killed_by, ms, answer.get("cut") is True)

    def _lost(self) -> SandboxGone:
        self.handle.wait(1.0)
        self.handle.kill("agent")
        self.handle.wait(END_S)
        self._killed_by = self.handle.exit.get("killed_by") or "agent"
        if reason := _LOST.get(self._killed_by):
            raise InfraError(reason)
        ended_with(self.handle, b"")
        self._fresh_loss = True
        return SandboxGone(self._killed_by)


def collect(box: Sandbox, paths: Sequence[str], max_bytes: int = 1 << 20) -> dict[str, bytes]:
    """Return the contents of those `paths` that are regular files of at most `max_bytes`; other paths are left out."""
    found = {}
    for path in paths:
        with contextlib.suppress(EnvError):
            if box.alive:
                found[path] = box.get(path, max_bytes)
    return found


def _refuse(answer: Mapping[str, Any], what: str) -> None:
    if "error" in answer:
        raise EnvError(f"{what}: {str(answer['error'])[:200]}")


def _int(answer: Mapping[str, Any], key: str) -> int:
    value = answer.get(key)
    if type(value) is not int:
        raise EnvError(f"the sandbox's agent does not give {key!r}")
    return value


class _Idle:
    """Started sandboxes of one profile that wait for an owner."""

    def __init__(self, host: SandboxProvider, profile: Profile) -> None:
        self.host, self.profile = host, profile
        self._boxes: collections.deque[Sandbox] = collections.deque()
        self._lock = threading.Lock()
        self._filling = False

    def take(self) -> Sandbox | None:
        """Return an idle sandbox, None if there is none; new idle ones are started in the background."""
        with self._lock:
            if not self._filling:
                self._filling = True
                threading.Thread(target=self._fill, name="rolljax-sandbox-warm", daemon=True).start()
        while self._boxes:
            with contextlib.suppress(IndexError):
                box = self._boxes.popleft()
                if box.alive and box.age_s < self.profile.session_s / 2:
                    return box
                box.close()
        return None

    def _fill(self) -> None:
        with contextlib.suppress(EnvError, ConfigError):  # the next caller gets the error itself
            while len(self._boxes) < self.host.config.warm:
                self._boxes.append(Sandbox.fresh(self.host, self.profile))
        with self._lock:
            self._filling = False

    def close(self) -> None:
        while self._boxes:
            self._boxes.popleft().close()


_idle: weakref.WeakKeyDictionary[SandboxProvider, _Idle] = weakref.WeakKeyDictionary()
_idle_lock = threading.Lock()


def _take_warm(host: SandboxProvider, profile: Profile) -> Sandbox | None:
    """Return an idle sandbox of `profile`, None if there is none; idle ones of another profile are ended."""
    if not host.config.warm:
        return None
    with _idle_lock:
        found = _idle.get(host)
        if found is None or found.profile != profile:
            if found is not None:
                found.close()
            found = _idle[host] = _Idle(host, profile)
            host.before_close.append(found.close)
    return found.take()
