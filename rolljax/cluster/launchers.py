"""Starts samplers, and starts those again that end."""

from __future__ import annotations

import dataclasses
import math
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from rolljax.cluster.placement import Join, Launcher, Processes, Ray
from rolljax.concurrency import distributed
from rolljax.concurrency.child import Child

KEY = "ROLLJAX_SAMPLER_KEY"
"""Environment variable with the key of the controller, in hexadecimal."""
MAX_PAUSE_S = 30.0
"""Longest pause before a sampler that fails again and again is started again."""
LOCAL = "127.0.0.1"
HUNG_S = 30.0
"""Seconds after its loss in which a sampler that runs has to be ready again; then it is killed."""
ENDING_S = 20.0
"""Longest time for samplers to end by themselves when the run is over."""


@dataclasses.dataclass(frozen=True)
class LaunchOrder:
    """What a launcher needs to know."""

    address: tuple[str, int]
    """Address of the controller."""
    key: bytes
    names: Sequence[str]
    """Names of the samplers to start."""
    folder: Path
    """Folder for the logs of the samplers."""
    rejoin_s: float

    def log(self, name: str) -> Path:
        """Return the file with the output of a sampler."""
        return self.folder / f"{name}.log"


class Launched(Protocol):
    """The samplers of a launcher."""

    def check(self) -> None:
        """Start samplers that are not there. Called again and again."""

    def ready(self, name: str) -> None:
        """Note that a sampler is ready."""

    def lost(self, name: str, joined_s: float) -> None:
        """Note that the connection to a sampler has ended, which joined at `joined_s` of `time.monotonic()`. A sampler
        that does not return is killed and started again."""

    def state(self, name: str) -> str:
        """Describe a sampler that has not joined."""
        ...

    def failure(self) -> str:
        """Return why no more samplers can come; empty if they can."""
        ...

    def close(self) -> None:
        """Wait until the samplers have ended, after the end of the run; kill samplers that do not end."""


def launch(launcher: Launcher, order: LaunchOrder, say: Callable[[str], None]) -> Launched:
    """Start the samplers.

    Args:
      say: shows a permanent line.
    """
    if isinstance(launcher, Join):
        return _Joining(order, say)
    if isinstance(launcher, Ray):
        from rolljax.cluster.ray_launcher import RaySamplers

        return RaySamplers(launcher, order, say)
    return LocalProcesses(launcher, order, say)


def listening(launcher: Launcher) -> tuple[str, int]:
    """Return the host and the port on which the controller listens. Host empty: all of this machine; port 0: any."""
    return (LOCAL, 0) if isinstance(launcher, Processes) else (launcher.host, launcher.port)


def command(order: LaunchOrder, name: str) -> list[str]:
    """Return the command that starts a sampler, without its key."""
    host, port = order.address
    program = [sys.executable, "-m", "rolljax.sampler_host"]
    return [*program, "--join", f"{host}:{port}", "--name", name, "--rejoin_s", f"{order.rejoin_s:g}"]


class Restarts:
    """Says when samplers that have ended are started again: at once, and then after longer and longer pauses.

    Args:
      max_failures: number of ends in a row, before the sampler was ready, after which none is started again.
      say: shows a permanent line.
    """

    def __init__(self, order: LaunchOrder, max_failures: int, say: Callable[[str], None]) -> None:
        self._order, self._max_failures, self._say = order, max_failures, say
        self._failures = dict.fromkeys(order.names, 0)
        self._next_s = dict.fromkeys(order.names, 0.0)
        self._lost_s: dict[str, float] = {}
        self._ended_s: dict[str, float] = {}

    def ready(self, name: str) -> None:
        """Note that a sampler is ready."""
        self._failures[name] = 0
        self._lost_s.pop(name, None)

    def lost(self, name: str, joined_s: float) -> None:
        """Note that the connection to a sampler has ended, unless that is of one before the one that runs."""
        if joined_s > self._ended_s.get(name, -math.inf):
            self._lost_s[name] = time.monotonic()

    def is_hung(self, name: str) -> bool:
        """Return whether a sampler that runs has been lost for so long that it is to be killed."""
        return time.monotonic() > self._lost_s.get(name, math.inf) + HUNG_S

    def failed(self, name: str, how: str) -> None:
        """Note that a sampler has ended, and say so."""
        self._failures[name] += 1
        self._lost_s.pop(name, None)
        pause_s = min(MAX_PAUSE_S, 2.0 ** (self._failures[name] - 1) - 1)
        self._ended_s[name] = time.monotonic()
        self._next_s[name] = self._ended_s[name] + pause_s
        self._say(f"{name} {how}; it is started again" + f" in {pause_s:.0f} s" * (pause_s > 0))

    def is_due(self, name: str) -> bool:
        """Return whether a sampler that does not run is to be started now."""
        return time.monotonic() >= self._next_s[name] and not self.failure()

    def failure(self) -> str:
        """Return why no sampler is started again; empty if they are."""
        worst = max(self._failures, key=lambda name: self._failures[name])
        if self._failures[worst] < self._max_failures:
            return ""
        log = self._order.log(worst)
        return f"{worst} has ended {self._failures[worst]} times before it was ready; see {log}"


class LocalProcesses:
    """Samplers that are processes of this machine.

    A sampler outlives a controller that is killed, so that it can go on with the next one (`Remote.rejoin_s`). Their
    process ids are in the folder, so that the next controller does not start them twice.
    """

    def __init__(self, settings: Processes, order: LaunchOrder, say: Callable[[str], None]) -> None:
        self._order, self._restarts = order, Restarts(order, settings.max_failures, say)
        self._processes = settings.processes
        self._children: dict[str, list[Child]] = {}
        """The processes of each sampler that runs. One that ends is the end of the others."""
        self._reservations: dict[str, socket.socket] = {}
        """Keep the port of each sampler's coordinator."""
        self._left = {name: self._left_behind(name) for name in order.names}
        self.check()

    def check(self) -> None:
        for name in self._order.names:
            children = self._children.get(name)
            if children is None:
                if not self._lives(name) and self._restarts.is_due(name):
                    self._start(name)
            elif first := _first_ended(children):
                self._restarts.failed(name, first.state())
                self._reservations.pop(name).close()
                for child in self._children.pop(name):
                    child.stop()
            elif self._restarts.is_hung(name):
                for child in children:
                    child.kill()

    def ready(self, name: str) -> None:
        self._restarts.ready(name)

    def lost(self, name: str, joined_s: float) -> None:
        self._restarts.lost(name, joined_s)

    def state(self, name: str) -> str:
        children = self._children.get(name)
        if children is not None:
            return (_first_ended(children) or children[0]).state("has not joined yet")
        return "runs since an earlier start" if self._lives(name) else "waits to be started again"

    def failure(self) -> str:
        return self._restarts.failure()

    def close(self) -> None:
        end_s = time.monotonic() + ENDING_S
        for name, children in self._children.items():
            for child in children:
                child.stop(max(0.0, end_s - time.monotonic()))
            self._pid_file(name).unlink(missing_ok=True)
            self._reservations.pop(name).close()
        while any(map(self._lives, self._order.names)) and time.monotonic() < end_s:
            time.sleep(0.05)

    def _start(self, name: str) -> None:
        env = {name: value for name, value in os.environ.items() if name not in distributed.VARIABLES}
        env[KEY] = self._order.key.hex()
        self._reservations[name], port = distributed.reserve_port()
        self._children[name] = [
            Child(
                command(self._order, name),
                env | distributed.variables(f"{LOCAL}:{port}", self._processes, i),
                log=self._order.log(name),
                survives_s=float("inf"),
            )
            for i in range(self._processes)
        ]
        lines = [f"{child.pid} {_start_time(child.pid)}\n" for child in self._children[name]]
        self._pid_file(name).write_text("".join(lines))

    def _pid_file(self, name: str) -> Path:
        return self._order.folder / f"{name}.pid"

    def _left_behind(self, name: str) -> list[tuple[int, str]]:
        """Return the processes that an earlier controller started, each with its start time."""
        try:
            lines = [line.split() for line in self._pid_file(name).read_text().splitlines()]
            return [(int(pid), started) for pid, started in lines]
        except (OSError, ValueError):
            return []

    def _lives(self, name: str) -> bool:
        return any(_start_time(pid) == started for pid, started in self._left[name])


def _first_ended(children: Sequence[Child]) -> Child | None:
    """Return the process whose end was that of the others: the one that was killed, if any; None: all run."""
    ended = [child for child in children if child.code is not None]
    return min(ended, key=lambda child: child.code or 0, default=None)


class _Joining:
    """Samplers that others start."""

    def __init__(self, order: LaunchOrder, say: Callable[[str], None]) -> None:
        host, port = order.address
        say(f"waiting for samplers: python -m rolljax.sampler_host --join {host}:{port} --key_file {order.folder}/key")

    def check(self) -> None:
        pass

    def ready(self, name: str) -> None:
        pass

    def lost(self, name: str, joined_s: float) -> None:
        pass

    def state(self, name: str) -> str:
        return "has not joined yet"

    def failure(self) -> str:
        return ""

    def close(self) -> None:
        pass


def _start_time(pid: int) -> str:
    """Return the start time of a process, which no other process with its number has; empty: it does not run."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
