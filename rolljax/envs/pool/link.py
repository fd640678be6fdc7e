"""The interface between the dispatcher and its workers, the same for all kinds (processes, Ray actors)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from rolljax.envs.pool import wire

Cause = Literal["crash", "hang", "unknown", "machine"]
"""The cause of a worker's end: a crash of its code; a call past its limit; unknown; the machine, unrelated to any
episode."""


class LinkEvents(Protocol):
    """Receives the events of a link's workers."""

    def ready(self, generation: int) -> None:
        """Record that the worker accepts requests."""

    def replied(self, generation: int, payload: bytes) -> None:
        """Handle a line from the worker."""

    def ended(self, generation: int, why: str, cause: Cause, output: str = "") -> None:
        """Record that the worker is gone."""


class WorkerLink(Protocol):
    """Starts, feeds and kills workers, each named by a generation. All but `wake` is for the dispatcher's thread."""

    @property
    def num_workers(self) -> int:
        """Maximum number of workers at present; it can change over time."""

    def is_oversized(self, generation: int) -> bool:
        """Return whether a worker holds more resources than one started now would."""

    def start(self, generation: int) -> None:
        """Begin to start a worker; `LinkEvents.ready` or `ended` follows."""

    def send(self, generation: int, requests: Sequence[wire.Request]) -> None:
        """Pass requests on to a worker, in their order."""

    def kill(self, generation: int) -> None:
        """End a worker now; no event follows."""

    def poll(self, timeout_s: float, events: LinkEvents) -> None:
        """Wait until something happens or `wake` is called, and report it to `events`."""

    def wake(self) -> None:
        """End the wait of `poll`. Thread-safe."""

    def close(self) -> None:
        """Kill all workers and free everything, in bounded time."""
