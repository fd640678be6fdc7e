"""Calls to models, servers and waiting functions, with deadlines, retries and a journal.

An answer is requested under a key, a hash of everything it depends on. Concurrent calls with the same key share one
request. The answer is kept in a journal, so that work that is resumed pays for nothing twice and gets the same
answers. A kept answer is parsed as strictly as a new one. While the service is down, calls wait at a circuit breaker;
if that takes too long they fail, as an infrastructure fault.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import random
from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any, TypeVar

from rolljax.errors import Checked, EnvError, InfraError, Range, RolljaxError, StorageError
from rolljax.judging.prompts import digest
from rolljax.judging.verdict import Unreadable
from rolljax.storage.journal import Journal

T = TypeVar("T")
STAGE = "judge"
"""The stage that faults of calls name."""
MAX_BACKOFF_S = 60.0


@dataclasses.dataclass(frozen=True)
class CallLimits(Checked):
    """Limits on the calls to a service."""

    deadline_s: Annotated[float, Range(above=0)] = 120.0
    """Longest time in seconds that a call may take."""
    retries: Annotated[int, Range(low=0)] = 2
    """Maximum number of times that a failed call is repeated."""
    backoff_s: Annotated[float, Range(low=0)] = 1.0
    """Approximate seconds before the first retry; doubled for each further one."""
    concurrency: Annotated[int, Range(low=1)] = 64
    """Maximum number of simultaneous calls."""
    max_calls: Annotated[int, Range(low=0)] = 0
    """Limit for the whole run, resumed ones included; 0: no limit. Calls beyond it give no verdict."""
    down_after: Annotated[int, Range(low=1)] = 8
    """Consecutive failures of any calls after which the service counts as down. Then a single call probes the service
    from time to time and all others wait. Failures during that time do not use up retries."""
    probe_s: Annotated[float, Range(above=0)] = 5.0
    """Seconds between probes."""
    outage_s: Annotated[float, Range(above=0)] = 300.0
    """Longest time that a call waits for a service that is down."""


class Breaker:
    """A circuit breaker: lets all calls through, or, while the service is down, one probe at a time."""

    def __init__(self, limits: CallLimits) -> None:
        self._limits = limits
        self._failures = 0
        self._probing = False
        self._up = asyncio.Event()
        self._up.set()

    @property
    def is_down(self) -> bool:
        """Return whether all calls are blocked now."""
        return not self._up.is_set()

    async def admit(self, until_s: float) -> bool:
        """Wait until a call may be made; return whether it is a probe.

        Args:
          until_s: on the event loop's clock.

        Raises:
          InfraError: that took too long.
        """
        clock = asyncio.get_running_loop().time
        while self.is_down:
            left_s = until_s - clock()
            if left_s <= 0:
                raise InfraError(f"it was down for {self._limits.outage_s:g} s and longer", stage=STAGE)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._up.wait(), min(self._limits.probe_s, left_s))
            if self.is_down and not self._probing:
                self._probing = True
                return True
        return False

    def note(self, *, failed: bool | None, was_probe: bool) -> None:
        """Record the end of a call. failed: the service did not answer; None: unknown, the call was cancelled."""
        if was_probe:
            self._probing = False
        if failed is None:
            return
        self._failures = self._failures + 1 if failed else 0
        if not failed:
            self._up.set()
        elif self._failures >= self._limits.down_after:
            self._up.clear()


class _NotNow(Exception):
    """A call that was not made."""


class Calls:
    """The calls of one user to one service. They live on one event loop.

    Args:
      name: of the user, for messages. identity: describes the service and how it is asked; part of every key.
      journal: earlier answers, which are not requested again.
      keep_all: finish calls that no one waits for any more, because they are paid for, and raise `StorageError` if the
        disk does not take an answer. Otherwise such calls are cancelled, and such answers are counted as `unsaved`.
    """

    def __init__(
        self, name: str, identity: str, limits: CallLimits, journal: Journal, *, keep_all: bool = False
    ) -> None:
        self._name, self._identity, self._limits = name, identity, limits
        self._journal, self._keep_all = journal, keep_all
        self._made = len(journal) + journal.damaged
        self._gate, self._breaker = asyncio.Semaphore(limits.concurrency), Breaker(limits)
        self._counts: collections.Counter[str] = collections.Counter()
        self._under_way: dict[str, asyncio.Task[Any]] = {}
        self._waiting: collections.Counter[str] = collections.Counter()

    def counts(self) -> Mapping[str, int]:
        """Return the number of `calls`, `cached`, `retries`, and of every kind of fault.

        The faults: timeout, garbage, cut (a limit ended the answer), failed (no answer came), down (the call waited for
        an answer that never came), budget, unsaved (the verdict could not be written to disk), damaged (a stored
        verdict differs from the one written; it is requested again).
        """
        return self._counts + collections.Counter(damaged=self._journal.damaged)

    async def answer(self, what: str, ask: Callable[[int], Awaitable[Any]], read: Callable[[Any], T]) -> T:
        """Return the answer to a request, from the journal or a call in progress if the same request was made before.

        Args:
          what: everything that the answer depends on, in addition to the identity. ask: requests an answer and returns
            it as JSON to keep; receives the number of the attempt. read: parses the answer, or raises `Unreadable`.

        Raises:
          InfraError: there is no answer. EnvError: the service or its code is broken; `ask` or `read` raised it.
        """
        key = digest(f"{self._identity}\0{what}")
        if (kept := self._journal.get(key)) is not None:
            try:
                found = read(kept)
            except (Unreadable, RolljaxError):
                self._journal.discard(key)
            else:
                self._counts["cached"] += 1
                return found
        if key not in self._under_way:
            task = asyncio.ensure_future(self._call(key, ask, read))
            self._under_way[key] = task
            task.add_done_callback(lambda done: self._forget(key, done))
        task = self._under_way[key]
        self._waiting[key] += 1
        try:
            return read(await asyncio.shield(task))
        finally:  # no caller waits any more
            self._waiting[key] -= 1
            if not self._waiting[key]:
                del self._waiting[key]
                if not self._keep_all:
                    task.cancel()

    def _forget(self, key: str, done: asyncio.Task[Any]) -> None:
        del self._under_way[key]
        if not done.cancelled():
            done.exception()  # the waiting callers have the exception

    async def _call(self, key: str, ask: Callable[[int], Awaitable[Any]], read: Callable[[Any], object]) -> Any:
        limits = self._limits
        if limits.max_calls and self._made >= limits.max_calls:
            self._counts["budget"] += 1
            raise InfraError(f"{self._name}: all {limits.max_calls} calls of max_calls are made", stage=STAGE)
        self._made += 1
        self._counts["calls"] += 1
        attempt, until_s = 0, None
        while True:
            if self._breaker.is_down and until_s is None:
                until_s = asyncio.get_running_loop().time() + limits.outage_s
            try:
                is_probe = await self._breaker.admit(until_s or 0.0)
            except InfraError as e:
                self._counts["down"] += 1
                raise InfraError(f"{self._name}: {e}", stage=STAGE) from e
            try:
                said = await self._once(ask, read, attempt, is_probe)
                break
            except _NotNow:
                continue
            except InfraError as e:
                error = e
            if not self._breaker.is_down:
                if attempt == limits.retries:
                    raise error
                backoff_s = limits.backoff_s * 2**attempt * random.uniform(0.5, 1.5)
                attempt += 1
                self._counts["retries"] += 1
                await asyncio.sleep(min(backoff_s, MAX_BACKOFF_S))
        self._store(lambda: self._journal.put(key, said))
        return said

    def _store(self, write: Callable[[], None]) -> None:
        try:
            write()
        except StorageError:
            if self._keep_all:
                raise
            self._counts["unsaved"] += 1

    async def _once(
        self, ask: Callable[[int], Awaitable[Any]], read: Callable[[Any], object], attempt: int, is_probe: bool
    ) -> Any:
        """Make one call and return an answer that holds a verdict.

        Raises:
          InfraError: it gave no verdict. EnvError: the service or its code is broken. _NotNow: the call was not made,
            because the service was found to be down while the call waited for its turn.
        """
        failed: bool | None = None
        try:
            async with self._gate:
                if self._breaker.is_down and not is_probe:
                    raise _NotNow
                failed = True
                async with asyncio.timeout(self._limits.deadline_s):
                    said = await ask(attempt)
            failed = False
            read(said)
            return said
        except (_NotNow, asyncio.CancelledError):
            failed = None
            raise
        except TimeoutError as e:
            self._counts["timeout"] += 1
            raise InfraError(f"{self._name}: no verdict in {self._limits.deadline_s:g} s", stage=STAGE) from e
        except Unreadable as e:
            failed = False
            self._counts[e.kind] += 1
            raise InfraError(f"{self._name}: no verdict: {e}", stage=STAGE) from e
        except InfraError as e:
            self._counts["failed"] += 1
            raise InfraError(f"{self._name}: {e}", stage=STAGE) from e
        except RolljaxError:
            failed = False
            raise
        except Exception as e:  # border: `ask` may run the user's code
            failed = False
            raise EnvError(f"{self._name}: {type(e).__name__}: {e}", stage=STAGE) from e
        finally:
            self._breaker.note(failed=failed, was_probe=is_probe)

    async def close(self) -> None:
        """Cancel all calls under way, or finish them if all answers are to be kept; then close the journal."""
        if not self._keep_all:
            for task in list(self._under_way.values()):
                task.cancel()
        await asyncio.gather(*self._under_way.values(), return_exceptions=True)
        self._store(self._journal.close)
