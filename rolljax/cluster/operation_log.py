"""Collect records of operations from several threads, in bounded memory, for `diagnosis.diagnose`."""

from __future__ import annotations

import itertools
import threading
from collections import Counter, deque

from rolljax.cluster.diagnosis import RULES, DiagnosisRules, OperationRecord

Link = tuple[str, str, str]


class OperationLog:
    """Operations under way, and the last ones of each peer and link. Any thread may call any method.

    Times are arguments: use one clock for all operations of a name.

    Args:
      rules: they say how many finished operations to keep. most_pending: operations under way of a peer or link that
        are kept; the oldest ones, since those hang.
    """

    def __init__(self, rules: DiagnosisRules = RULES, most_pending: int = 64) -> None:
        self.rules, self._most_pending = rules, most_pending
        self._lock, self._tickets = threading.Lock(), itertools.count()
        self._pending: dict[int, OperationRecord] = {}
        self._num_pending: Counter[Link] = Counter()
        self._finished: dict[Link, deque[OperationRecord]] = {}
        self._executions: Counter[Link] = Counter()

    def enter(
        self,
        operation: str,
        peer: str,
        now_s: float,
        *,
        sequence: int,
        size: int = 0,
        sender: str = "",
        subject: str = "",
    ) -> int:
        """Record that an operation begins (the fields of `OperationRecord`).

        Returns:
          A ticket for `exit`.
        """
        link = operation, sender, peer
        with self._lock:
            ticket, execution = next(self._tickets), self._executions[link]
            self._executions[link] += 1
            if self._num_pending[link] < self._most_pending:
                self._num_pending[link] += 1
                self._pending[ticket] = OperationRecord(
                    operation, peer, sequence, now_s, None, size, sender, execution, subject
                )
        return ticket

    def exit(self, ticket: int, now_s: float, *, size: int | None = None) -> None:
        """Record that an operation is over; `size` if it was not known before. Tickets of operations that are no longer
        kept do nothing."""
        with self._lock:
            record = self._pending.pop(ticket, None)
            if record is None:
                return
            link = record.operation, record.sender, record.peer
            self._num_pending[link] -= 1
            over = record._replace(exit_s=now_s, size=record.size if size is None else size)
            self._finished.setdefault(link, deque(maxlen=self.rules.kept)).append(over)

    def forget(self, peer: str) -> None:
        """Drop all operations of a peer that has left; if it comes back, it warms up again."""
        with self._lock:
            self._pending = {t: r for t, r in self._pending.items() if peer not in (r.peer, r.sender)}
            for kept in (self._num_pending, self._finished, self._executions):
                for link in [link for link in kept if peer in link[1:]]:
                    del kept[link]

    def records(self) -> list[OperationRecord]:
        """Return all records, each peer's and link's in the order of their ends, then those under way."""
        with self._lock:
            return [*itertools.chain.from_iterable(self._finished.values()), *self._pending.values()]
