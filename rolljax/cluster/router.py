"""Which sampler gets a request: membership, and placement by prefix, load and policy version.

A `Router` is pure: it has no clock, no thread and no IO, and decides from its calls alone. The sampler group of a run
and the simulator (`rolljax.simulation`) call the same one.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections import OrderedDict
from collections.abc import Iterable
from typing import Literal, TypeAlias

from rolljax.cluster.affinity import Affinity

Where: TypeAlias = Literal["joining", "compiling", "ready", "draining", "lost"]

PREFIXES = 2**17
"""Number of groups and of episodes whose last sampler a router remembers."""
MAX_OVERTAKEN = 64
"""Number of later requests that may be placed before the oldest waiting one because they suit the free sampler; twice
the number of samplers, if that is more."""


@dataclasses.dataclass(frozen=True, slots=True)
class RoutedRequest:
    """A request to be placed."""

    number: int
    """Unique number. Of two requests of one priority, the lower number is older."""
    group: tuple[int, ...]
    """Stream and prompt index: equal for siblings."""
    episode: tuple[int, ...]
    """Stream, prompt index and sibling: equal for the turns of an episode."""
    min_version: int
    """Policy version at the start of its group: no older sampler may serve it."""
    tag: str = ""
    """Domain, for the affinity to a kind of sampler."""
    priority: int = 0
    """The lowest is placed first."""


_Queued: TypeAlias = tuple[int, int, RoutedRequest]
_Queue: TypeAlias = list[_Queued]


@dataclasses.dataclass
class RoutedCounts:
    """What a sampler was given, over all its lives."""

    placed: int = 0
    """Requests that were placed here."""
    kept: int = 0
    """Those of them whose prefix was here."""


@dataclasses.dataclass(eq=False)
class Member:
    """A sampler as its router sees it. Only the router changes it."""

    name: str
    slots: int
    kind: str
    cap: int
    """Most requests that it has at a time, except those of held frames."""
    starts: int
    """It gets requests from this pushed version on."""
    where: Where = "joining"
    version: int = -1
    """Newest policy version that it decodes with."""
    routable: bool = False
    """It gets new requests: it is ready, and the version that it waits for has been pushed."""
    late: bool = False
    """It had not even taken the version before when the newest was pushed, and has not yet taken the newest."""
    requests: dict[int, RoutedRequest] = dataclasses.field(default_factory=dict)
    """Its requests by number, with those in `held`."""
    held: list[RoutedRequest] = dataclasses.field(default_factory=list)
    """Its part of held frames that waits for `held_version`."""
    held_version: int = -1
    counts: RoutedCounts = dataclasses.field(default_factory=RoutedCounts)
    change: int = 0
    """Number of its last change; tells which of the router's entries about it is the newest."""

    def may_take(self, request: RoutedRequest) -> bool:
        """Return whether it is routable, new enough and below its cap."""
        return self.routable and self.version >= request.min_version and len(self.requests) < self.cap


class WaitingRequests:
    """Requests that wait, sorted so that the oldest of each sort is found first."""

    def __init__(self) -> None:
        self.requests: dict[int, RoutedRequest] = {}
        self.all: dict[tuple[int, str | None], _Queue] = {}
        """All of them, by version and kind of sampler that suits; None: that which has the prefix."""
        self.at: dict[str, _Queue] = {}
        """Those whose prefix a sampler has, by its name."""

    def add(self, request: RoutedRequest, kind: str, holder: str) -> None:
        """Add a request. holder: the sampler that has its prefix, or empty."""
        self.requests[request.number] = request
        entry = (*_age(request), request)
        heapq.heappush(self.all.setdefault((request.min_version, None if holder else kind), []), entry)
        if holder:
            heapq.heappush(self.at.setdefault(holder, []), entry)

    def first(self, queue: _Queue) -> _Queued | None:
        """Return the oldest of a queue that still waits."""
        while queue and self.requests.get(queue[0][1]) is not queue[0][2]:
            heapq.heappop(queue)
        return queue[0] if queue else None

    def clean(self) -> None:
        """Drop empty queues."""
        self.all = {key: queue for key, queue in self.all.items() if queue}
        self.at = {key: queue for key, queue in self.at.items() if queue}


class Router:
    """Placement of requests on samplers that join, take new weights, drain, and get lost.

    A request goes only to a sampler that is ready and has at least the version that the request's group started with;
    else it waits. After any call but `place`, `take` returns the waiting ones that can be placed now.

    Args:
      cap: most requests of a sampler, as a multiple of its slots.
      siblings_together: the sampler that had a group's last request has the prefix of its others; else only the turns
        of an episode have a common prefix.
      affinity: chooses kinds of samplers; None: any suits.
    """

    def __init__(self, cap: float = 1.0, *, siblings_together: bool = True, affinity: Affinity | None = None) -> None:
        self.version = -1
        """Newest pushed version; -1: none yet."""
        self.members: dict[str, Member] = {}
        """All samplers by name, also lost ones."""
        self.affinity = affinity
        self._cap, self._siblings_together = cap, siblings_together
        self._new: dict[str, Member] = {}  # ready, but not routable yet
        self._due: list[Member] = []  # whose held requests can go
        self._at: dict[int, Member] = {}  # of placed requests, by number
        self._waiting = WaitingRequests()
        self._wanted: dict[str, Member] = {}  # which may be able to take requests that wait for them
        self._below_cap: dict[tuple[int, str], list[tuple[float, str, int, Member]]] = {}  # heaps by version and kind
        self._episodes: OrderedDict[tuple[int, ...], Member] = OrderedDict()
        self._groups: OrderedDict[tuple[int, ...], Member] = OrderedDict()
        self._oldest, self._overtaken = -1, 0
        self._changes = 0
        self._is_stuck = False  # no waiting request can be placed: nothing has become free since that was found

    # ---- membership

    def join(self, name: str, slots: int, kind: str = "") -> None:
        """Add a sampler, which is starting. It gets requests from the next pushed version on.

        Raises:
          ValueError: there is one of this name, which is not lost.
        """
        known = self.members.get(name)
        if known and known.where != "lost":
            raise ValueError(f"sampler {name} has joined already and is {known.where}")
        counts = known.counts if known else RoutedCounts()
        cap = max(1, round(slots * self._cap))
        self.members[name] = Member(name, slots, kind, cap, self.version + 1, counts=counts)

    def compiling(self, name: str) -> None:
        """Note that a sampler compiles."""
        self.members[name].where = "compiling"

    def ready(self, name: str, version: int) -> None:
        """Note that a sampler can decode with a version. It gets requests once a version has been pushed after it
        joined; at once while no other one has the newest version.

        Raises:
          ValueError: it is ready already (`swapped` takes new weights), or drained or lost and has to join again.
        """
        member = self.members[name]
        if member.where in ("ready", "draining", "lost"):
            raise ValueError(f"sampler {name} is {member.where}")
        member.where, member.version = "ready", version
        self._new[name] = member
        self._admit()

    def push(self, version: int) -> None:
        """Note that a new version was published. Samplers have it when `swapped` says so."""
        for member in self.members.values():
            if member.where == "ready" and member.version < self.version:
                member.late = True
                self._requeue_held(member)
        self.version = version
        lowest = min((m.version for m in self.members.values() if m.routable), default=version)
        self._below_cap = {key: heap for key, heap in self._below_cap.items() if key[0] >= lowest}
        self._waiting.clean()
        self._admit()

    def swapped(self, name: str, version: int) -> None:
        """Note that a sampler decodes with a version from now on."""
        member = self.members[name]
        member.version = version
        member.late = member.late and version < self.version
        if member.held and version >= member.held_version:
            self._due.append(member)
        self._changed(member)
        self._admit()

    def drain(self, name: str) -> None:
        """Give a sampler nothing new; it keeps what it decodes until it may leave (`leavers`). What joins in its place
        gets requests from the next pushed version on (ROSE, arXiv 2605.06534: what comes back at once oscillates)."""
        member = self.members[name]
        self._requeue_held(member)
        member.starts = self.version + 1
        self._stop(member, "draining")

    def leavers(self) -> list[str]:
        """Return the drained samplers that may leave: they have no requests, or a version was pushed since."""
        draining = (m for m in self.members.values() if m.where == "draining")
        return sorted(m.name for m in draining if not m.requests or m.starts <= self.version)

    def lost(self, name: str) -> list[RoutedRequest]:
        """Note that a sampler is lost or left; returns the requests that it had, oldest first, to be placed again."""
        member = self.members[name]
        returned = sorted(member.requests.values(), key=_age)
        for request in returned:
            del self._at[request.number]
        member.requests, member.held, member.held_version = {}, [], -1
        self._stop(member, "lost")
        return returned

    @property
    def waiting(self) -> int:
        """Number of requests that wait for a sampler."""
        return len(self._waiting.requests)

    @property
    def busy(self) -> bool:
        """Whether any request is placed or waits."""
        return bool(self._at or self._waiting.requests)

    def _admit(self) -> None:
        """Make new samplers routable whose version has come, or all, while no other one has the newest version."""
        for member in [*self._new.values()]:
            if member.starts <= self.version or not any(
                m.routable and m.version >= self.version for m in self.members.values()
            ):
                del self._new[member.name]
                member.routable = True
                self._changed(member)

    def _stop(self, member: Member, where: Where) -> None:
        member.where, member.routable, member.late = where, False, False
        self._new.pop(member.name, None)
        self._wanted.pop(member.name, None)
        for *_, request in self._waiting.at.pop(member.name, ()):
            if self._waiting.requests.get(request.number) is request:
                self._waiting.add(request, self._kind(request), "")
        self._changed(member)
        self._admit()

    # ---- requests

    def place(self, request: RoutedRequest) -> str | None:
        """Return the sampler for a request; None: none may take it now, or older ones come first, and it waits.

        The sampler is the one that had its episode last, else its group, if that is below its cap; else the one with
        the fewest requests for its slots, of the kind that suits if such a one is below its cap.

        Raises:
          ValueError: a request with this number is placed or waits.
        """
        if request.number in self._at or request.number in self._waiting.requests:
            raise ValueError(f"request {request.number} is placed or waits already")
        member = None if self._waiting.requests and self._next() else self._choose(request)
        if member is None:
            self._wait(request)
            return None
        self._assign(member, request)
        return member.name

    def place_held(self, requests: Iterable[RoutedRequest]) -> dict[str, list[RoutedRequest]]:
        """Place the requests of a held frame by their keys and the membership alone, so that a repeated run places them
        as before: groups in order are dealt over the routable samplers in order, in proportion to their slots. A
        sampler gets groups that follow each other, from another place on in each version, so that none has its part in
        the same update of every step.

        Samplers that still take the newest weights count, unless they are late. A sampler's part goes as a whole: while
        it needs a newer version than the sampler has, it waits, and `take` returns it after `swapped`. If there is no
        routable sampler, all requests wait for any.

        Returns:
          The requests that can go now, by sampler.
        """
        groups: dict[tuple[int, ...], list[RoutedRequest]] = {}
        for request in sorted(requests, key=lambda r: (r.group, r.episode, r.number)):
            groups.setdefault(request.group, []).append(request)
        members = sorted((m for m in self.members.values() if m.routable and not m.late), key=lambda m: m.name)
        if members:
            first = self.version % len(members)
            members = members[first:] + members[:first]
        else:
            self._is_stuck = False
            for request in (r for group in groups.values() for r in group):
                self._wait(request)
            return {}
        total, slots = sum(map(len, groups.values())), sum(m.slots for m in members)
        parts: dict[str, list[RoutedRequest]] = {m.name: [] for m in members}
        dealt, at, end = 0, 0, members[0].slots
        for group in groups.values():
            while (dealt + len(group) / 2) * slots > end * total:  # the middle of the group is behind this one's share
                at += 1
                end += members[at].slots
            parts[members[at].name] += group
            dealt += len(group)
        for member in members:
            for request in parts[member.name]:
                self._assign(member, request)
            needed = max((r.min_version for r in parts[member.name]), default=-1)
            if needed > member.version:
                member.held += parts.pop(member.name)
                member.held_version = max(needed, member.held_version)
        return {name: part for name, part in parts.items() if part}

    def done(self, number: int, prefill_tok: int | None = None, decode_tok: int | None = None) -> None:
        """Note that a request has ended or was aborted, wherever it is. Unknown numbers are ignored.

        Args:
          prefill_tok, decode_tok: tokens that were computed of its prompt, and decoded; measured for the affinity.
        """
        self._waiting.requests.pop(number, None)
        member = self._at.pop(number, None)
        if member is None:
            return
        request = member.requests.pop(number)
        if member.held:
            member.held = [r for r in member.held if r.number != number]
        if self.affinity and prefill_tok is not None and decode_tok is not None:
            self.affinity.observe(request.tag, request.episode, prefill_tok, decode_tok)
        self._changed(member)

    def take(self) -> list[tuple[str, RoutedRequest]]:
        """Return waiting requests that can be placed now, with their samplers: the oldest first, but up to
        `MAX_OVERTAKEN` others before one whose prefix is elsewhere, or which suits another kind of sampler."""
        taken: list[tuple[str, RoutedRequest]] = []
        for member in self._due:
            if member.version >= member.held_version:
                taken += [(member.name, request) for request in member.held]
                member.held, member.held_version = [], -1
        self._due = []
        while self._waiting.requests and (found := self._next()):
            request, member, oldest = found
            if request.number != oldest:
                self._overtaken = self._overtaken + 1 if self._oldest == oldest else 1
                self._oldest = oldest
            del self._waiting.requests[request.number]
            self._assign(member, request)
            taken.append((member.name, request))
        return taken

    def _wait(self, request: RoutedRequest) -> None:
        holder = self._episodes.get(request.episode)
        if holder and holder.routable:
            self._waiting.add(request, "", holder.name)
            self._wanted[holder.name] = holder
        else:
            self._waiting.add(request, self._kind(request), "")

    def _requeue_held(self, member: Member) -> None:
        """Let requests that wait for a sampler's next version wait for any sampler."""
        for request in member.held:
            del self._at[request.number], member.requests[request.number]
            self._wait(request)
        member.held, member.held_version = [], -1
        self._changed(member)

    def _kind(self, request: RoutedRequest) -> str:
        return self.affinity.kind(request.tag) if self.affinity else ""

    def _next(self) -> tuple[RoutedRequest, Member, int] | None:
        """Return the request that is placed next, the sampler for it, and the number of the oldest request that could
        be placed; None: none can."""
        if self._is_stuck:
            return None
        oldest: tuple[_Queued, Member] | None = None
        for queue in self._waiting.all.values():
            first = self._waiting.first(queue)
            if first and (oldest is None or first < oldest[0]) and (member := self._choose(first[2])):
                oldest = first, member
        if oldest is None:
            self._is_stuck = True
            return None
        (_, number, request), member = oldest
        is_overdue = self._oldest == number and self._overtaken >= max(MAX_OVERTAKEN, 2 * len(self.members))
        if not is_overdue and not self._suits(request, member) and (better := self._suiting()):
            (_, _, request), member = better
        return request, member, number

    def _suits(self, request: RoutedRequest, member: Member) -> bool:
        """Return whether a request's prefix is at the sampler, or at none and the sampler is of its kind."""
        holder = self._episodes.get(request.episode)
        if holder and holder.routable:
            return holder is member
        return self._kind(request) in ("", member.kind)

    def _suiting(self) -> tuple[_Queued, Member] | None:
        """Return the oldest request for which there is a sampler that suits, and that sampler."""
        best: tuple[_Queued, Member] | None = None
        for holder in [*self._wanted.values()]:
            first = self._waiting.first(self._waiting.at.get(holder.name, []))
            if first is None or not holder.may_take(first[2]):
                del self._wanted[holder.name]
            elif best is None or first < best[0]:
                best = first, holder
        for (_, kind), queue in self._waiting.all.items():
            first = None if kind is None else self._waiting.first(queue)
            if first and (best is None or first < best[0]):
                member = self._choose(first[2])
                if member and self._suits(first[2], member):
                    best = first, member
        return best

    def _choose(self, request: RoutedRequest) -> Member | None:
        holder = self._episodes.get(request.episode)
        if holder and holder.may_take(request):
            return holder
        kind = self._kind(request) if self.affinity else ""
        holder = self._groups.get(request.group) if self._siblings_together else None
        if holder and holder.may_take(request) and (not kind or holder.kind == kind):
            return holder
        suiting = self._least_loaded(request.min_version, kind) if kind else None
        return suiting or self._least_loaded(request.min_version)

    def _least_loaded(self, min_version: int, kind: str | None = None) -> Member | None:
        best = None
        for (version, of_kind), heap in self._below_cap.items():
            if version >= min_version and (kind is None or of_kind == kind):
                while heap and heap[0][2] != heap[0][3].change:
                    heapq.heappop(heap)
                if heap and (best is None or heap[0] < best):
                    best = heap[0]
        return best[3] if best else None

    def _assign(self, member: Member, request: RoutedRequest) -> None:
        is_episodes = _remember(self._episodes, request.episode, member)
        is_groups = _remember(self._groups, request.group, member)
        member.counts.placed += 1
        member.counts.kept += is_episodes or is_groups
        member.requests[request.number] = request
        self._at[request.number] = member
        self._sort_in(member)

    def _changed(self, member: Member) -> None:
        """Note that a sampler may have become able to take requests."""
        self._is_stuck = False
        if member.name in self._waiting.at:
            self._wanted[member.name] = member
        self._sort_in(member)

    def _sort_in(self, member: Member) -> None:
        """Put a sampler at its new place among those below their cap."""
        self._changes += 1
        member.change = self._changes
        if not member.routable or len(member.requests) >= member.cap:
            return
        heap = self._below_cap.setdefault((member.version, member.kind), [])
        heapq.heappush(heap, (len(member.requests) / member.slots, member.name, member.change, member))
        if len(heap) > 4 * len(self.members) + 64:
            heap[:] = [entry for entry in heap if entry[2] == entry[3].change]
            heapq.heapify(heap)


def _age(request: RoutedRequest) -> tuple[int, int]:
    """Return the request's place among waiting ones: the lowest is the oldest."""
    return request.priority, request.number


def _remember(holders: OrderedDict[tuple[int, ...], Member], key: tuple[int, ...], member: Member) -> bool:
    """Note the last sampler of a prefix; returns whether it was that before."""
    if holders.get(key) is member:
        return True
    holders[key] = member
    if len(holders) > PREFIXES:
        holders.popitem(last=False)
    return False
