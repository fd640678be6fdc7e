"""What the makers of sandboxes have in common: slots, results, and the channel to a live sandbox's agent."""

from __future__ import annotations

import abc
import atexit
import contextlib
import dataclasses
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any, Protocol, Self, TypeVar, cast

from rolljax.errors import ConfigError, EnvError, InfraError
from rolljax.sandbox.profile import CODE, Profile, SandboxConfig

if TYPE_CHECKING:
    from rolljax.sandbox.session import Sandbox

START_S, END_S = 60.0, 30.0
"""Longest start and longest teardown; if they take longer, the machine counts as broken."""
CONTAINERS = "open it with host=container_host('docker') or 'podman'"
"""The remedy where an image is needed."""


class SandboxGone(EnvError):
    """A sandbox ended because of the code in it. killed_by: memory, cpu, wall (its lifetime was over), or agent."""

    def __init__(self, killed_by: str) -> None:
        self.killed_by = killed_by
        super().__init__(f"the sandbox is gone (killed by {killed_by})")

    def __reduce__(self) -> tuple[type[SandboxGone], tuple[str]]:
        return SandboxGone, (self.killed_by,)


NOT_ITS_FAULT = {
    "machine": "the machine ran out of memory and killed a sandbox: give it fewer or smaller ones",
    "outside": "a sandbox was killed from outside",
}
"""What to say of a sandbox that was killed, but not because of the code in it."""


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of a program."""

    returncode: int
    """Exit code as a shell reports it (128 + signal)."""
    stdout: bytes
    stderr: bytes
    timed_out: bool = False
    killed_by: str = ""
    """The limit for which the program was killed: wall, cpu, memory or output; empty if none."""
    ms: float = 0.0
    truncated: bool = False
    """Whether the middle of an output was cut out."""

    @property
    def text(self) -> str:
        return self.stdout.decode(errors="replace")


class Handle(Protocol):
    """A running sandbox. exit: how it ended (code, started, killed_by, error), set when all its processes are gone."""

    exit: dict[str, Any]

    @property
    def over(self) -> bool: ...

    def kill(self, why: str = "host") -> None:
        """Request the end of the sandbox; return at once."""

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the end of the sandbox; return whether it ended within the time."""


@dataclasses.dataclass(frozen=True)
class AgentChannel:
    """A live sandbox, the socket to the agent in it, and the agent's standard error."""

    handle: Handle
    socket: socket.socket
    errors: IO[bytes]


class SandboxProvider(abc.ABC):
    """Makes sandboxes for this process, a limited number at a time."""

    def __init__(self, config: SandboxConfig) -> None:
        self.config = config
        self.before_close: list[Callable[[], None]] = []
        self.num_started = 0
        self.num_alive = 0
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._slots = threading.BoundedSemaphore(config.slots)
        self._programs = threading.BoundedSemaphore(config.programs)
        self._closed = False

    @abc.abstractmethod
    def start_agent(self, profile: Profile) -> AgentChannel:
        """Take a slot and start a live sandbox, which ends soon after `Profile.session_s` at the latest.

        Raises:
          ConfigError: this provider cannot make such a sandbox. InfraError: no slot was free, or the start failed.
        """

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        files: Mapping[str, bytes] | None = None,
        profile: Profile = CODE,
    ) -> Result:
        """Run one program in a new sandbox until it ends."""
        with self.program():
            return self._run(argv, stdin, files or {}, profile)

    @abc.abstractmethod
    def _run(self, argv: Sequence[str], stdin: bytes, files: Mapping[str, bytes], profile: Profile) -> Result:
        """Do `run`, as one of the programs that compute."""

    @abc.abstractmethod
    def usage(self, box: Sandbox) -> dict[str, int]:
        """Return what is known of a live sandbox's use of the machine: its processes, and more."""

    @contextlib.contextmanager
    def program(self) -> Iterator[None]:
        """Be one of the `SandboxConfig.programs` that compute at the same time.

        Raises:
          InfraError: none of them ended for `slot_wait_s`.
        """
        most, wait_s = self.config.programs, self.config.slot_wait_s
        if not self._programs.acquire(timeout=wait_s):
            raise InfraError(f"{most} programs were running for {wait_s:g} s, as many as SandboxConfig.programs allows")
        try:
            yield
        finally:
            self._programs.release()

    def changes(self, box: Sandbox) -> list[tuple[str, str]]:
        """Do `Sandbox.changes`."""
        raise ConfigError("has no image to compare with", setting="sandbox", remedy=CONTAINERS)

    def commit(self, box: Sandbox, image: str) -> str:
        """Do `Sandbox.commit`."""
        raise ConfigError("cannot become an image", setting="sandbox", remedy=CONTAINERS)

    def take_slot(self) -> Callable[[], None]:
        """Take one of `SandboxConfig.slots`; return the call that frees it, of which only the first has an effect.

        Raises:
          InfraError: none was free for `slot_wait_s`.
        """
        if not self._slots.acquire(timeout=self.config.slot_wait_s):
            raise InfraError(f"all {self.config.slots} sandbox slots were busy for {self.config.slot_wait_s:g} s")
        freed = threading.Lock()
        with self._lock:
            self.num_started += 1
            self.num_alive += 1

        def free() -> None:
            if not freed.acquire(blocking=False):
                return
            with self._lock:
                self.num_alive -= 1
            self._slots.release()

        return free

    def close(self) -> None:
        """End every sandbox."""
        if os.getpid() == self._pid:
            for end in self.before_close:
                end()
        with self._lock:
            self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


Provider = TypeVar("Provider", bound=SandboxProvider)
_shared: dict[tuple[object, ...], SandboxProvider] = {}
_shared_lock = threading.Lock()


def shared(make: Callable[..., Provider], *settings: object) -> Provider:
    """Return this process's provider `make(*settings)`; made on first use and closed when the process exits."""
    key = os.getpid(), make, *settings
    with _shared_lock:
        if key not in _shared:
            _shared[key] = make(*settings)
            atexit.register(_shared[key].close)
        return cast("Provider", _shared[key])
