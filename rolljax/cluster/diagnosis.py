"""Find the peer, or the link between two peers, that hangs or is slow, from records of operations: no clock, no IO.

The four kinds of fault and the delay matrix are those of C4 (arXiv 2406.04594). C4 watches collectives between equal
ranks; here one controller asks samplers and a store. There are two sorts of records:

- *work* (no sender): a peer was asked for something, or began it, and answered, or arrived at a barrier. All peers that
  do the same work have the same sequence number (`swap` of version 12). A peer's own seconds are compared, from its
  start to its arrival, so that a peer that only waits for a slow one is not blamed.
- *messages* (with a sender): bytes on their way from a sender to a peer (`tokens`, `push`). Medians over a window make
  a matrix of senders and receivers. A row that stands out is a slow sender, a column a slow receiver, a single cell a
  slow link.

Only differences between times of one record, or of records by one clock, are used. Long answers are no fault: seconds
are divided by the usual seconds of the operation for that size.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np

from rolljax.errors import Checked, Range
from rolljax.trainer.paper import Reproduction

FaultKind = Literal["communication hang", "non-communication hang", "communication slow", "non-communication slow"]

REPRODUCTION = Reproduction(
    paper="2406.04594",
    name="C4",
    claim="who hangs or is slow is named",
    there="downtime from 31.19 % to 1.16 %",
    here="at least 98 % of injected faults located within two windows",
    state="partly",
    why="injected delays in tests; no cluster's downtime was measured",
)


class OperationRecord(NamedTuple):
    """One operation of one peer; times in seconds of any clock, the same for all records of an operation."""

    operation: str
    """Name of the operation: `swap`, `tokens`, `push`."""
    peer: str
    """The peer that works, or receives."""
    sequence: int
    """Number of the operation: the same for all peers that do one piece of work together."""
    enter_s: float
    """When the peer was asked or began; of a message: when it was sent."""
    exit_s: float | None = None
    """When the peer answered or arrived; of a message: when it was received. None: not yet."""
    size: int = 0
    """Bytes or tokens of the operation; 0: its time does not depend on any."""
    sender: str = ""
    """Sender of a message; empty for work."""
    execution: int = 10**9
    """How often the peer has done this operation before: the first times, programs are compiled."""
    subject: str = ""
    """What it is about, for texts: `version 12`."""


@dataclasses.dataclass(frozen=True)
class DiagnosisRules(Checked):
    """When a difference is a fault."""

    window: Annotated[int, Range(low=4)] = 50
    """Operations in a window. Windows overlap by half."""
    factor: Annotated[float, Range(above=1)] = 2.0
    """A peer or link is slow if it takes more than this many times as long as the median of the others."""
    least_s: Annotated[float, Range(low=0)] = 0.01
    """Seconds in addition to what an operation usually takes below which nothing is slow."""
    majority: Annotated[float, Range(above=0.5, high=1)] = 0.6
    """Share of a window in which a peer must be slow, and share of a sender's or receiver's links that must be."""
    confirm: Annotated[int, Range(low=1)] = 3
    """Consecutive windows in which a peer or link must be slow."""
    hang_s: Annotated[float, Range(above=0)] = 60.0
    """Seconds after which an operation hangs, at least."""
    hang_factor: Annotated[float, Range(above=1)] = 10.0
    """An operation hangs only if it takes this many times its median."""
    warm_up: Annotated[int, Range(low=0)] = 3
    """First executions of each operation by each peer that do not count."""

    @property
    def kept(self) -> int:
        """Finished operations of a peer or link that the rules look at."""
        return self.window + (self.confirm - 1) * self._hop

    @property
    def _hop(self) -> int:
        return self.window // 2

    def windows(self, records: Sequence[Any]) -> list[Sequence[Any]]:
        """Return the windows to confirm in, the newest first; none if there are too few records."""
        ends = [len(records) - i * self._hop for i in range(self.confirm)]
        return [records[end - self.window : end] for end in ends] if len(records) >= self.kept else []


RULES = DiagnosisRules()
"""The rules of a run."""


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """A fault, and who has it."""

    kind: FaultKind
    culprit: str
    """The peer, or `sender -> receiver` for a link."""
    operation: str
    text: str
    """What is wrong, without the culprit."""

    def __str__(self) -> str:
        return f"{self.culprit}: {self.text}"


def diagnose(records: Iterable[OperationRecord], now_s: float, rules: DiagnosisRules = RULES) -> list[Diagnosis]:
    """Return the faults that the records show: hangs, and slow peers and links if nothing hangs.

    Args:
      records: of each peer and link in the order of their ends, the newest last. now_s: on the clock of the records.
    """
    operations: dict[tuple[str, bool], list[OperationRecord]] = defaultdict(list)
    for record in records:
        if record.execution >= rules.warm_up:
            operations[record.operation, bool(record.sender)].append(record)
    everything = [r for found in operations.values() for r in found]
    hangs = [d for found in operations.values() for d in _hangs(found, everything, now_s, rules)]
    if hangs:
        return hangs
    done = {key: [r for r in found if r.exit_s is not None] for key, found in operations.items()}
    slow = [(_slow_messages if message else _slow_work)(name, found, rules) for (name, message), found in done.items()]
    return [d for found in slow for d in found]


# ---- hangs


def _hangs(
    records: Sequence[OperationRecord], everything: Sequence[OperationRecord], now_s: float, rules: DiagnosisRules
) -> list[Diagnosis]:
    done = [_seconds(r) for r in records if r.exit_s is not None]
    usual_s = float(np.median(done)) if done else 0.0
    limit_s = max(rules.hang_s, rules.hang_factor * usual_s)
    pending: dict[tuple[str, str], OperationRecord] = {}
    for r in sorted(records, key=lambda r: r.enter_s):
        if r.exit_s is None and now_s - r.enter_s > limit_s:
            pending.setdefault((r.sender, r.peer), r)
    links = sorted({(r.sender, r.peer) for r in records})
    found = []
    for culprit, hanging in located_links(links, set(pending), majority=1.0):
        oldest = min((pending[link] for link in hanging), key=lambda r: r.enter_s)
        verb = "answered" if not oldest.sender else "received" if culprit == oldest.peer else "delivered"
        text = f"has not {verb} `{oldest.operation}` "
        text += f"of {oldest.subject}" if oldest.subject else f"number {oldest.sequence}"
        text += f" for {now_s - oldest.enter_s:.0f} s" + (f"; the others took {usual_s:.2g} s" if done else "")
        works = not oldest.sender and not _is_silent(oldest.peer, everything, now_s - limit_s / 2)
        kind: FaultKind = "non-communication hang" if works else "communication hang"
        found.append(Diagnosis(kind, culprit, oldest.operation, text))
    return found


def _is_silent(peer: str, records: Iterable[OperationRecord], since_s: float) -> bool:
    """Return whether a peer that has sent messages has sent none lately."""
    ends = [r.exit_s for r in records if r.sender == peer and r.exit_s is not None]
    return bool(ends) and max(ends) < since_s


# ---- slow peers and links


def waits(arrivals: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds that each peer waits for the last one to arrive."""
    last = max(arrivals.values())
    return {peer: last - arrival for peer, arrival in arrivals.items()}


def slow_peers(seconds: Mapping[str, float], factor: float) -> set[str]:
    """Return the peers that took more than `factor` times the median of the others for one piece of work."""
    values = np.array(list(seconds.values()))
    if len(values) < 2:
        return set()
    return set(itertools.compress(seconds, values > factor * others_median(values)))


def _slow_work(name: str, records: Sequence[OperationRecord], rules: DiagnosisRules) -> list[Diagnosis]:
    pieces: dict[int, dict[str, OperationRecord]] = defaultdict(dict)
    for r in records:
        pieces[r.sequence][r.peer] = r
    shared = [piece for _, piece in sorted(pieces.items()) if len(piece) > 1]
    windows = rules.windows(shared)
    if not windows:
        return []
    usual = UsualSeconds(records)
    found: set[str] | None = None
    for window in windows:
        slow, took_part = Counter[str](), Counter[str]()
        for piece in window:
            for peer in piece:
                took_part[peer] += 1
            for peer in slow_peers({p: _seconds(r) / usual(r.size) for p, r in piece.items()}, rules.factor):
                slow[peer] += _seconds(piece[peer]) - usual(piece[peer].size) >= rules.least_s
        # a peer that took part in few pieces of the window is not judged by it
        enough = {p for p, n in slow.items() if n >= rules.majority * max(took_part[p], rules.window / 2)}
        found = enough if found is None else found & enough
    diagnoses = []
    for peer in sorted(found or ()):
        lost = [_wait_for(piece, peer) for piece in windows[0] if peer in piece]
        own = float(np.median([_seconds(piece[peer]) for piece in windows[0] if peer in piece]))
        text = f"takes {own:.2g} s for `{name}`; the others wait {np.median(lost):.2g} s for it"
        diagnoses.append(Diagnosis("non-communication slow", peer, name, text))
    return diagnoses


def _wait_for(piece: Mapping[str, OperationRecord], peer: str) -> float:
    """Return the median seconds that the others of a piece of work had arrived before a peer did."""
    waited = waits({p: r.exit_s or 0.0 for p, r in piece.items()})
    return max(0.0, float(np.median([s for p, s in waited.items() if p != peer])) - waited[peer])


def _slow_messages(name: str, records: Sequence[OperationRecord], rules: DiagnosisRules) -> list[Diagnosis]:
    usual = UsualSeconds(records)
    links: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for r in records:
        links[r.sender, r.peer].append((_seconds(r), usual(r.size)))
    windows = {link: rules.windows(found) for link, found in links.items()}
    names = sorted(link for link, found in windows.items() if found)
    if len(names) < 2:
        return []
    found: set[str] | None = None
    for i in range(rules.confirm):
        seconds = np.array([windows[link][i] for link in names])  # [links, window, (own, usual)]
        delays, excess = (
            np.median(seconds[..., 0] / seconds[..., 1], 1),
            np.median(seconds[..., 0] - seconds[..., 1], 1),
        )
        is_slow = (delays > rules.factor * others_median(delays)) & (excess >= rules.least_s)
        slow = set(itertools.compress(names, is_slow))
        culprits = {culprit for culprit, _ in located_links(names, slow, rules.majority)}
        found = culprits if found is None else found & culprits
    text = f"`{name}` takes more than {rules.factor:g} times what it takes elsewhere"
    return [Diagnosis("communication slow", culprit, name, text) for culprit in sorted(found or ())]


def located(delays: np.ndarray, rules: DiagnosisRules = RULES) -> list[tuple[int | None, int | None]]:
    """Return who is slow by a delay matrix.

    Args:
      delays: seconds of a message of sender `i` to receiver `j`, `[S, R]`; NaN: no such messages.

    Returns:
      `(i, None)` for a slow sender, `(None, j)` for a slow receiver, `(i, j)` for a slow link.
    """
    known = ~np.isnan(delays)
    slow = np.zeros_like(known)
    slow[known] = delays[known] > rules.factor * others_median(delays[known])
    return _located(slow, known, rules.majority)


def _located(slow: np.ndarray, known: np.ndarray, majority: float) -> list[tuple[int | None, int | None]]:
    def stand_out(axis: int) -> np.ndarray:
        number = slow.sum(axis)
        found: np.ndarray = (number >= 2) & (number >= majority * known.sum(axis))
        return found

    senders, receivers = stand_out(1), stand_out(0)
    found: list[tuple[int | None, int | None]] = [(int(i), None) for i in np.flatnonzero(senders)]
    found += [(None, int(j)) for j in np.flatnonzero(receivers)]
    for i, j in np.argwhere(slow & ~senders[:, None] & ~receivers[None]).tolist():
        # who has only this link is named itself: nothing tells the two apart
        found.append((None, j) if known[:, j].sum() == 1 else (i, None) if known[i].sum() == 1 else (i, j))
    return found


def located_links(
    names: Sequence[tuple[str, str]], slow: set[tuple[str, str]], majority: float
) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return the culprits among links (sender, receiver), each with its slow links. Work, which has no sender, is its
    peer's."""
    senders, receivers = sorted({s for s, _ in names if s}), sorted({r for s, r in names if s})
    found: list[tuple[str, list[tuple[str, str]]]] = [(r, [(s, r)]) for s, r in sorted(slow) if not s]
    known = np.zeros((len(senders), len(receivers)), bool)
    flagged = np.zeros_like(known)
    for s, r in names:
        if s:
            place = senders.index(s), receivers.index(r)
            known[place], flagged[place] = True, (s, r) in slow
    for i, j in _located(flagged, known, majority):
        sender, receiver = None if i is None else senders[i], None if j is None else receivers[j]
        links = [(s, r) for s, r in sorted(slow) if (sender in (None, s)) and (receiver in (None, r)) and s]
        found.append((f"{sender} -> {receiver}" if sender and receiver else sender or receiver or "", links))
    return found


# ---- statistics


def _seconds(record: OperationRecord) -> float:
    return (record.exit_s or 0.0) - record.enter_s


def others_median(values: np.ndarray) -> np.ndarray:
    """Return for each of at least two values the median of all others; float `[N]`."""
    order = np.argsort(values, kind="stable")
    ranked, others = values[order], len(values) - 1
    place = np.arange(len(values))

    def without(index: int) -> np.ndarray:
        found: np.ndarray = ranked[index + (place <= index)]
        return found

    result = np.empty(len(values))
    result[order] = (without((others - 1) // 2) + without(others // 2)) / 2
    return result


class UsualSeconds:
    """What an operation usually takes for a size: a line through the medians of small and large ones (Tukey's resistant
    line), so that single outliers do not move it. Its ends are never negative."""

    def __init__(self, records: Sequence[OperationRecord]) -> None:
        sizes, seconds = np.array([r.size for r in records], float), np.array([_seconds(r) for r in records])
        self._base, self._slope = float(np.median(seconds)), 0.0
        small, large = np.quantile(sizes, (1 / 3, 2 / 3))
        low, high = sizes <= small, sizes >= large
        if large > small:
            rise = np.median(seconds[high]) - np.median(seconds[low])
            slope = float(rise / (np.median(sizes[high]) - np.median(sizes[low])))
            base = float(np.median(seconds - slope * sizes))
            if base < 0:
                base, slope = 0.0, float(np.median(seconds[sizes > 0] / sizes[sizes > 0]))
            if slope > 0:
                self._base, self._slope = base, slope

    def __call__(self, size: int) -> float:
        return max(self._base + self._slope * size, 1e-9)
