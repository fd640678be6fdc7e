"""The samplers of a run in other processes, as one sampler: it places requests, and resumes those of lost samplers."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from rolljax.cluster.diagnosis import DiagnosisRules, diagnose, others_median
from rolljax.cluster.launchers import Launched
from rolljax.cluster.messages import SamplerJob, software
from rolljax.cluster.operation_log import OperationLog
from rolljax.cluster.placement import Remote
from rolljax.cluster.remote import LostSampler, RemoteSampler
from rolljax.cluster.router import RoutedRequest, Router, Where
from rolljax.cluster.stats import StatsSum
from rolljax.cluster.wire import Channel, Frame, Port, Pulse
from rolljax.errors import InfraError, SamplerError, boundary
from rolljax.sampler.client import (
    HOLD_S,
    LoopCall,
    Pending,
    SamplerClient,
    SamplerLimits,
    check_request,
    deliver,
    no_tokens,
    settle,
)
from rolljax.sampler.prompt_queue import SamplerLoad, SamplerStats
from rolljax.sampler.weights import Snapshot
from rolljax.types import Completion, DrainedSampler, Sampled, SamplerGap, SamplingParams

RARE = DiagnosisRules(window=10)
"""Rules for operations of which there is one in a step."""
CHECK_S = 0.2
"""Seconds between looks for samplers that have to be started again."""
FAR = 2.0
"""A sampler is drained only if its log-probs are this many times as far from the trainer's as those of the others."""
LEAST_TOK = 64
"""Tokens of a sampler in a step below which its distance says nothing."""
END_S = 10.0
"""Longest time for samplers to learn that the run is over."""


@dataclasses.dataclass(eq=False)
class _Connected:
    """A connected sampler."""

    channel: Channel
    name: str = ""
    process: str = ""
    """Random name of its process."""
    state: str = "joining"
    joined_s: float = dataclasses.field(default_factory=time.monotonic)
    sampler: RemoteSampler | None = None
    dismissed: bool = False
    """The group has ended it, because it was drained."""
    swaps: dict[int, int] = dataclasses.field(default_factory=dict)
    """Tickets of the operation log for announced weights that it has not taken yet, by version."""


@dataclasses.dataclass(eq=False)
class _Request:
    """A request of a user, through all samplers that work on it."""

    routed: RoutedRequest
    prompt_ids: np.ndarray
    params: SamplingParams
    address: tuple[int, ...]
    on_tokens: Callable[[Sampled], None] | None
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Completion]
    resume: Sampled | None
    """The tokens that lost samplers had sampled."""
    where: str | None = None
    """Name of the sampler that it was placed on; None: it waits."""
    at: Pending | None = None
    """The request at that sampler, once it was submitted there."""
    aborted: bool = False

    def ended_early(self) -> Completion:
        """Return the result of a request that was aborted while no sampler had it."""
        return Completion(self.resume or no_tokens(self.params.top_logprobs), "abort")


class SamplerGroup(SamplerClient):
    """Routes requests to samplers that join, get lost, and join again.

    A request that no sampler may take now waits. The tokens of a request do not depend on the samplers that work on it:
    when one is lost, another continues from the tokens that had arrived.

    Args:
      job: for the samplers that join. limits: of each of them. port: where they join; it is given `welcome`.
      say: shows a permanent line.
    """

    def __init__(
        self, settings: Remote, job: SamplerJob, limits: SamplerLimits, say: Callable[[str], None] = lambda _: None
    ) -> None:
        self._settings, self._job, self._limits, self._say = settings, job, limits, say
        self._router = Router()
        self._lock = threading.RLock()
        self._members: dict[str, _Connected] = {}
        self._requests: dict[int, _Request] = {}
        self._numbers = itertools.count()
        self._held: list[_Request] | None = None
        self._snapshot: Snapshot | None = None
        self._drains: Counter[str] = Counter()
        self._leaving: set[str] = set()  # drained, to be told to end when they have no requests
        self._stats = StatsSum()
        self._operations = OperationLog(RARE)
        self._error: SamplerError | None = None
        self._launched: Launched | None = None
        self._port: Port | None = None
        self._supervisor: threading.Thread | None = None
        self._over = threading.Event()
        self._pulse = Pulse(settings.heartbeat_s, settings.lost_s)
        self.on_damage: Callable[[int], None] = lambda version: None
        """Called, in a thread of its own, with the version of a snapshot that a sampler has found damaged."""

    # ---- samplers

    def open(self, port: Port, launched: Launched) -> None:
        """Start to look after the samplers of a launcher, which join at `port`."""
        self._port, self._launched = port, launched
        self._supervisor = threading.Thread(target=self._keep, name="rolljax-samplers", daemon=True)
        self._supervisor.start()

    def welcome(self, connection: socket.socket) -> None:
        """Take in a peer that has the key."""
        channel = Channel(connection, "a sampler", lambda f: self._take(member, f), lambda r: self._lost(member, r))
        member = _Connected(channel)
        self._pulse.watch(channel)
        channel.start()

    def wait_ready(self, timeout_s: float, check: Callable[[], None] = lambda: None) -> None:
        """Wait until all samplers of the settings are ready, or after `timeout_s` the least number of them.

        Args:
          check: called again and again; raises to end the wait.

        Raises:
          InfraError: too few are ready; the error says what the others do.
        """
        end_s = time.monotonic() + timeout_s
        while (ready := self._num_ready()) < self._settings.samplers:
            check()
            too_late = time.monotonic() > end_s
            if too_late and ready >= self._settings.min_samplers:
                return
            failure = self._launched.failure() if self._launched else ""
            if too_late or failure:
                raise InfraError(
                    f"{ready} of {self._settings.samplers} samplers are ready: {failure or self.describe()}",
                    stage="start",
                )
            time.sleep(0.02)

    def describe(self) -> str:
        """Return a clause for each sampler."""
        with self._lock:
            known = {name: m.state for name, m in self._members.items()}
        for i in range(self._settings.samplers):
            name = sampler_name(i)
            if name not in known and self._launched:
                known[name] = self._launched.state(name)
        return "; ".join(f"{name}: {state}" for name, state in sorted(known.items()))

    def _num_ready(self) -> int:
        return len(self._samplers("ready"))

    def _keep(self) -> None:
        """Let the launcher start samplers that have ended, until the run is over."""
        while not self._over.wait(CHECK_S):
            assert self._launched is not None
            try:
                with boundary(InfraError, "the launcher of samplers"):
                    self._launched.check()
            except InfraError as e:
                self._say(f"warning: {e}")

    def _take(self, member: _Connected, frame: Frame) -> None:
        """Handle a frame of a sampler, in its channel's thread."""
        if frame.kind == "hello":
            self._shake_hands(member, frame)
        elif not member.name:
            raise SamplerError(f"a peer began with `{frame.kind}`, not with `hello`")
        elif frame.kind in ("state", "ready", "swapped"):
            with self._lock:
                if self._members.get(member.name) is member:  # it was not lost meanwhile
                    {"state": self._build, "ready": self._begin, "swapped": self._swapped}[frame.kind](member, frame)
            self._go_on()
        elif frame.kind == "unfit":
            self._unfit(member, int(frame.fields["version"]), str(frame.fields["text"]))
        elif frame.kind == "stopped":
            member.state = f"stopped: {frame.fields['text']}"
        elif member.sampler is not None:
            member.sampler.take(frame)

    def _shake_hands(self, member: _Connected, frame: Frame) -> None:
        fields, channel, reason = frame.fields, member.channel, ""
        name, process = str(fields["name"]), str(fields["process"])
        with self._lock:
            before = self._members.get(name)
        if before and before.process == process:  # it has noticed first that the connection has failed
            before.channel.end("it has connected again")
        wrong = [(key, value) for key, value in software().items() if fields.get(key) != value]
        with self._lock:
            if wrong:
                theirs = ", ".join(f"{key} {fields.get(key)} (the controller's: {ours})" for key, ours in wrong)
                reason = f"{name} on {fields.get('host')} has {theirs}"
                self._say(f"warning: refused sampler {name} on {fields.get('host')}: {theirs}")
            elif name in self._members:
                reason = f"there is a sampler of the name {name}: give another --name"
            if reason:
                channel.send("refuse", {"reason": reason})
                channel.finish()
                return
            member.name, member.process, channel.name = name, process, name
            self._members[name] = member
            self._router.join(name, self._limits.slots, str(fields["kind"]))
            channel.send("job", dataclasses.asdict(self._job))
            if self._snapshot:
                _send_weights(channel, self._snapshot)

    def _build(self, member: _Connected, frame: Frame) -> None:
        member.state = str(frame.fields["text"])
        self._router.compiling(member.name)

    def _begin(self, member: _Connected, frame: Frame) -> None:
        drains = self._drains[member.name]
        label = f"{member.name}.{drains + 1}" if drains else member.name  # groups of the one before may come later
        member.sampler, member.state = RemoteSampler(member.channel, frame, label), "ready"
        self._stats.put(member.name, member.sampler.stats)
        self._router.ready(member.name, int(frame.fields["version"]))
        if self._launched:
            self._launched.ready(member.name)

    def _swapped(self, member: _Connected, frame: Frame) -> None:
        version = int(frame.fields["version"])
        self._router.swapped(member.name, version)
        for older in [v for v in member.swaps if v <= version]:
            self._operations.exit(member.swaps.pop(older), time.monotonic())

    def _unfit(self, member: _Connected, version: int, why: str) -> None:
        """Note that a sampler cannot take weights: it keeps its old weights, and gets no new groups."""
        self._say(f"warning: {member.name} does not take the weights of version {version}: {why}")
        threading.Thread(target=self.on_damage, args=(version,), name="rolljax-repair", daemon=True).start()

    def _lost(self, member: _Connected, reason: str) -> None:
        """Fail the requests of a sampler, which are placed again as they fail."""
        if not member.name:
            return
        with self._lock:
            if self._members.get(member.name) is not member:
                return
            del self._members[member.name]
            self._leaving.discard(member.name)
            returned = self._router.lost(member.name)
            self._operations.forget(member.name)
            if member.sampler:
                self._stats.put(member.name, member.sampler.stats)
                self._stats.retire(member.name)
            if self._launched:
                self._launched.lost(member.name, member.joined_s)
            over = self._over.is_set()
        if not over and not member.dismissed:
            why = member.state if member.state.startswith("stopped") else reason
            self._say(f"{member.name} is lost: {why}; its requests continue elsewhere")
        if member.sampler:
            member.sampler.lose(reason)
        for routed in returned:
            self._leave(routed.number, member.name)
        self._go_on()

    def _leave(self, number: int, name: str) -> None:
        """Place a request again that was placed on a sampler, but not submitted there."""
        with self._lock:
            request = self._requests.get(number)

        def leave() -> None:
            if request and request.where in (None, name) and request.at is None and not request.future.done():
                self._place_again(request)

        if request:
            deliver([(request.loop, leave)])

    def drain_far(self, gaps: Mapping[str, SamplerGap]) -> list[DrainedSampler]:
        """Drain samplers above `Remote.max_gap_nat` that are also `FAR` times as far as the median of the others, since
        old samples are far from the trainer wherever they come from. The nearest one always stays."""
        found = []
        with self._lock:
            routable = [m for m in self._members.values() if m.sampler and self._router.members[m.name].routable]
            known = [(m, gap) for m in routable if m.sampler and (gap := gaps.get(m.sampler.label))]
            known = [(m, gap) for m, gap in known if gap.tokens >= LEAST_TOK]
            if len(known) < 2:
                return []
            others_nat = others_median(np.array([gap.mean_nat for _, gap in known])).tolist()
            for (member, gap), other_nat in zip(known, others_nat, strict=True):
                if gap.mean_nat > max(self._settings.max_gap_nat, FAR * other_nat):
                    found.append(DrainedSampler(member.name, gap.mean_nat, other_nat, gap.tokens))
                    self._drain(member, found[-1])
        self._go_on()
        return found

    def _drain(self, member: _Connected, why: DrainedSampler) -> None:
        name, limit = member.name, self._settings.max_gap_nat
        member.state = (
            f"drained: its log-probs are {why.gap_nat:.2g} nats a token from the trainer's, those of the others "
            f"{why.others_gap_nat:.2g} (Remote.max_gap_nat = {limit:g})"
        )
        self._drains[name] += 1
        self._router.drain(name)
        if self._drains[name] == 1:
            self._leaving.add(name)
        end = "it is to start again" if name in self._leaving else "it was drained before: it gets no more requests"
        self._say(f"warning: {name} is {member.state}; {end}")

    # ---- weights

    def prepare(self, snapshot: Snapshot) -> None:
        """Tell all samplers where new weights are; each fetches them and swaps them in by itself."""
        with self._lock:
            self._snapshot, version = snapshot, snapshot.version
            for name, member in self._members.items():
                if member.sampler and version not in member.swaps:
                    member.swaps[version] = self._operations.enter(
                        "swap", name, time.monotonic(), sequence=version, subject=f"version {version}"
                    )
            channels = [m.channel for m in self._members.values()]
        for channel in channels:
            _send_weights(channel, snapshot)

    def swap(self, version: int) -> None:
        """Let groups that start from now on wait for weights of `version`, which are under way. This does not wait for
        any sampler."""
        with self._lock:
            self._router.push(version)
        self._go_on()

    def sleep(self) -> None:
        """Do nothing: the samplers have devices of their own."""

    # ---- what users see

    @property
    def limits(self) -> SamplerLimits:
        return self._limits

    @property
    def version(self) -> int:
        return self._router.version

    @property
    def asleep(self) -> bool:
        return False

    @property
    def stats(self) -> SamplerStats:
        with self._lock:
            for sampler in self._samplers():
                self._stats.put(sampler.name, sampler.stats)
            return self._stats.total()

    @property
    def error(self) -> SamplerError | None:
        return self._error

    def load(self) -> SamplerLoad:
        loads = [s.load() for s in self._samplers()]
        names = [field.name for field in dataclasses.fields(SamplerLoad)]
        found = SamplerLoad(**{name: sum(getattr(load, name) for load in loads) for name in names})
        return dataclasses.replace(found, waiting=found.waiting + self._router.waiting)

    def faults(self) -> list[str]:
        """Return the samplers that hang or are slow by the rules of C4 (`diagnosis`), and those not ready."""
        found = [str(fault) for fault in diagnose(self._operations.records(), time.monotonic(), RARE)]
        return found + ([self.describe()] if self._num_ready() < self._settings.samplers else [])

    def submit(
        self,
        prompt_ids: np.ndarray,
        params: SamplingParams,
        address: tuple[int, ...],
        *,
        priority: int = 0,
        on_tokens: Callable[[Sampled], None] | None = None,
        resume: Sampled | None = None,
        min_version: int = 0,
    ) -> Pending:
        check_request(self._limits, prompt_ids, params, address)
        if self._error:
            raise self._error
        loop, number, address = asyncio.get_running_loop(), next(self._numbers), tuple(address)
        routed = RoutedRequest(number, address[:3], address[:4], min_version, priority=priority)
        future: asyncio.Future[Completion] = loop.create_future()
        request = _Request(
            routed, np.asarray(prompt_ids, np.int32), params, address, on_tokens, loop, future, resume or None
        )
        with self._lock:
            self._requests[number] = request
            if self._held is not None:
                self._held.append(request)
                return Pending(future, lambda: self._abort(request))
            name = request.where = self._router.place(routed)
        if name is not None:
            self._start(request, name)
        return Pending(future, lambda: self._abort(request))

    def hold(self) -> Callable[[], None]:
        with self._lock:
            held = self._held = [] if self._held is None else self._held

        def release() -> None:
            timer.cancel()
            with self._lock:
                if self._held is not held:
                    return
                self._held = None
                placed = self._router.place_held(r.routed for r in held if not r.aborted)
            self._start_all((name, routed) for name, own in placed.items() for routed in own)

        timer = asyncio.get_running_loop().call_later(HOLD_S, release)
        return release

    async def score(self, prompt_ids: np.ndarray) -> np.ndarray:
        check_request(self._limits, prompt_ids, SamplingParams(), ())
        samplers = self._samplers("ready")
        if not samplers:
            raise LostSampler(f"no sampler is ready: {self.describe()}")
        return await min(samplers, key=lambda s: s.load().running).score(prompt_ids)

    async def warm_up(self, done: Callable[[int, int], None]) -> None:
        for sampler in self._samplers():
            await sampler.warm_up(done)

    def close(self) -> None:
        """Tell the samplers that the run is over, and wait for their end."""
        self._over.set()
        with self._lock:
            self._error = SamplerError("the samplers were closed")
            members = list(self._members.values())
        for member in members:
            member.channel.send("end")
        if self._launched and self._supervisor:
            self._supervisor.join()
            self._launched.close()
        end_s = time.monotonic() + END_S
        while any(m.channel.is_open for m in members) and time.monotonic() < end_s:
            time.sleep(0.01)
        for member in members:
            member.channel.end("the run is over")
        self._pulse.close()
        if self._port:
            self._port.close()

    # ---- placing

    def _start(self, request: _Request, name: str) -> None:
        """Submit a request to a sampler; on the request's event loop."""
        with self._lock:
            member = self._members.get(name)
            sampler = member.sampler if member else None
        if request.aborted or request.where != name:
            return
        try:
            if sampler is None:
                raise LostSampler(f"{name} is lost")
            request.at = sampler.submit(
                request.prompt_ids,
                request.params,
                request.address,
                request.routed.priority,
                request.on_tokens,
                request.resume,
            )
        except LostSampler:
            self._place_again(request)
            return
        request.at.completion.add_done_callback(lambda future: self._ended(request, future))

    def _ended(self, request: _Request, future: asyncio.Future[Completion]) -> None:
        request.at = None
        error = None if future.cancelled() else future.exception()
        if isinstance(error, LostSampler):
            request.resume = error.sampled
            if not request.aborted:
                self._place_again(request)
                return
            result: object = request.ended_early()
        else:
            result = error or future.result()
        self._finish(request, result)

    def _finish(self, request: _Request, result: object) -> None:
        with self._lock:
            self._requests.pop(request.routed.number, None)
            self._router.done(request.routed.number)
        settle(request.future, result)
        self._go_on()

    def _place_again(self, request: _Request) -> None:
        if self._error:
            self._finish(request, self._error)
            return
        with self._lock:
            self._router.done(request.routed.number)  # where it was placed is lost
            name = request.where = self._router.place(request.routed)
        if name is not None:
            self._start(request, name)

    def _abort(self, request: _Request) -> None:
        """End a request, from any thread."""

        def abort() -> None:
            request.aborted = True
            if request.at is not None:
                request.at.abort()
            elif not request.future.done():
                self._finish(request, request.ended_early())

        deliver([(request.loop, abort)])

    def _go_on(self) -> None:
        """Start waiting requests that can be placed now, on their event loops."""
        with self._lock:
            taken = self._router.take()
            for name in self._leaving.intersection(self._router.leavers() if self._leaving else ()):
                self._leaving.discard(name)
                member = self._members[name]
                member.dismissed = True
                member.channel.send("refuse", {"reason": f"it is {member.state}"})
                member.channel.finish()
        self._start_all(taken)

    def _start_all(self, placed: Iterable[tuple[str, RoutedRequest]]) -> None:
        """Submit requests that were placed; those of one sampler together."""
        calls: list[LoopCall] = []
        with self._lock:
            for name, routed in placed:
                if request := self._requests.get(routed.number):
                    request.where = name
                    calls.append((request.loop, functools.partial(self._start, request, name)))
        deliver(calls)

    def _samplers(self, where: Where | None = None) -> list[RemoteSampler]:
        """Return the samplers that have become ready, or those of them that are in a state now."""
        with self._lock:
            members = [m for m in self._members.values() if where in (None, self._router.members[m.name].where)]
            return [m.sampler for m in members if m.sampler]


def sampler_name(index: int) -> str:
    """Return the name of a sampler that the run starts."""
    return f"sampler-{index}"


def _send_weights(channel: Channel, snapshot: Snapshot) -> None:
    channel.send("weights", {"location": snapshot.location, "epoch": snapshot.epoch, "version": snapshot.version})
