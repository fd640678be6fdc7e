"""A sampler in another process, as its group sees it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rolljax.cluster.messages import Packed, WireRequest, joined, pack_requests, packed_parts
from rolljax.cluster.wire import Channel, Frame
from rolljax.errors import SamplerError
from rolljax.sampler.client import LoopCall, Pending, deliver, no_tokens, settle
from rolljax.sampler.prompt_queue import SamplerLoad, SamplerStats
from rolljax.types import Completion, Sampled, SamplingParams


class LostSampler(SamplerError):
    """The connection to a sampler has ended; its requests can be resumed at another one.

    sampled: the tokens of the request that had arrived; None: none.
    """

    def __init__(self, message: str, sampled: Sampled | None = None) -> None:
        super().__init__(message)
        self.sampled = sampled


@dataclasses.dataclass(eq=False)
class _Open:
    """A request under way."""

    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Completion]
    resume: Sampled | None
    top: int
    on_tokens: Callable[[Sampled], None] | None
    parts: list[Packed] = dataclasses.field(default_factory=list)
    """The tokens that have arrived; they stay in their frames until all are needed."""

    def so_far(self) -> Sampled | None:
        """Return all tokens; None: there are none."""
        found = joined(self.parts) if self.parts else None
        return Sampled.concatenate([self.resume, found]) if self.resume and found else found or self.resume


class RemoteSampler:
    """A ready sampler behind a channel. Requests submitted in one turn of the event loop travel in one frame and start
    together.

    Args:
      channel: the owner gives its frames to `take`, and its end to `lose`. ready: the frame with which it became ready.
      label: its name on completions.
    """

    def __init__(self, channel: Channel, ready: Frame, label: str) -> None:
        self.name, self.label, self._channel = channel.name, label, channel
        self._stats: Sequence[Any] = ready.fields["stats"]
        self._load: Sequence[Any] = ready.fields["load"]
        self._lock = threading.Lock()
        self._open: dict[int, _Open] = {}
        self._calls: dict[int, concurrent.futures.Future[Any]] = {}
        self._progress: dict[int, Callable[[int, int], None]] = {}
        self._numbers = itertools.count()
        self._outgoing: list[WireRequest] = []
        self._flush_is_due = False
        self._error: LostSampler | None = None

    @property
    def stats(self) -> SamplerStats:
        """Totals of the sampler since its start."""
        return SamplerStats(*self._stats)

    def load(self) -> SamplerLoad:
        """Return the load of the sampler, as it was in its last frame."""
        return SamplerLoad(*self._load)

    def submit(
        self,
        prompt_ids: np.ndarray,
        params: SamplingParams,
        address: tuple[int, ...],
        priority: int,
        on_tokens: Callable[[Sampled], None] | None,
        resume: Sampled | None,
    ) -> Pending:
        """Start to sample, by a request that was checked; see `SamplerClient.submit`.

        Raises:
          LostSampler: the sampler is lost.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Completion] = loop.create_future()
        with self._lock:
            if self._error:
                raise self._error
            number = next(self._numbers)
            self._open[number] = _Open(loop, future, resume, params.top_logprobs, on_tokens)
            self._outgoing.append(WireRequest(number, prompt_ids, params, address, priority, resume))
            if not self._flush_is_due:
                self._flush_is_due = True
                loop.call_soon(self._flush)
        return Pending(future, lambda: self._abort(number))

    async def score(self, prompt_ids: np.ndarray) -> np.ndarray:
        """Return the log-probs of a prompt; see `SamplerClient.score`."""
        return await asyncio.wrap_future(self._call("score", {}, [np.asarray(prompt_ids, np.int32)]))

    async def warm_up(self, done: Callable[[int, int], None]) -> None:
        """Compile the programs for any request; see `SamplerClient.warm_up`."""
        loop = asyncio.get_running_loop()

        def progress(compiled: int, total: int) -> None:
            loop.call_soon_threadsafe(done, compiled, total)

        await asyncio.wrap_future(self._call("warm_up", {}, progress=progress))

    # ---- frames

    def take(self, frame: Frame) -> None:
        """Handle a frame of the sampler."""
        fields = frame.fields
        if frame.kind == "tokens":
            self._take_tokens(fields, frame.arrays)
        elif frame.kind == "progress":
            if progress := self._progress.get(fields["number"]):
                progress(fields["done"], fields["total"])
        elif frame.kind in ("score", "warm_up", "failed"):
            self._answered(frame)
        if "stats" in fields:
            self._stats, self._load = fields["stats"], fields["load"]

    def lose(self, reason: str) -> None:
        """Fail everything under way: the sampler is lost, for this reason."""
        error = LostSampler(f"{self.name} is lost: {reason}")
        with self._lock:
            self._error = error
            ended, self._open = list(self._open.values()), {}
            calls, self._calls, self._outgoing = list(self._calls.values()), {}, []
        for call in calls:
            settle(call, error)
        lost = [(r, LostSampler(str(error), r.so_far())) for r in ended]
        deliver([(r.loop, lambda r=r, e=e: settle(r.future, e)) for r, e in lost])  # type: ignore[misc]

    def _take_tokens(self, fields: Mapping[str, Any], arrays: Any) -> None:
        """Hand out the tokens of a frame, and end the requests that have ended."""
        calls: list[LoopCall] = []
        with self._lock:
            for number, part in zip(fields["numbers"], packed_parts(fields["sizes"], arrays), strict=True):
                if request := self._open.get(number):
                    request.parts.append(part)
                    if request.on_tokens:
                        calls.append((request.loop, lambda r=request, part=part: r.on_tokens(joined([part]))))  # type: ignore
            for number, reason, queue_s, sample_s, cached_tok in fields["ended"]:
                if request := self._open.pop(number, None):
                    sampled = request.so_far() or no_tokens(request.top)
                    by = "" if request.resume else self.label
                    completion = Completion(sampled, reason, queue_s, sample_s, cached_tok, by)
                    calls.append((request.loop, lambda r=request, c=completion: settle(r.future, c)))  # type: ignore
            for number, text in fields["failed"]:
                if request := self._open.pop(number, None):
                    error = SamplerError(f"{self.name}: {text}")
                    calls.append((request.loop, lambda r=request, e=error: settle(r.future, e)))  # type: ignore
        deliver(calls)

    def _answered(self, frame: Frame) -> None:
        with self._lock:
            future = self._calls.pop(frame.fields["number"], None)
            self._progress.pop(frame.fields["number"], None)
        result: object = frame.arrays[0].copy() if frame.arrays else None
        if frame.kind == "failed":
            result = SamplerError(f"{self.name}: {frame.fields['text']}")
        if future is not None:
            settle(future, result)

    # ---- what is sent

    def _call(
        self, kind: str, fields: dict[str, Any], arrays: Any = (), progress: Callable[[int, int], None] | None = None
    ) -> concurrent.futures.Future[Any]:
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        with self._lock:
            if self._error:
                raise self._error
            number = next(self._numbers)
            self._calls[number] = future
            if progress:
                self._progress[number] = progress
        self._channel.send(kind, {**fields, "number": number}, arrays)
        return future

    def _flush(self) -> None:
        with self._lock:
            self._flush_is_due = False
            requests, self._outgoing = self._outgoing, []
        if requests:
            self._channel.send("submit", *pack_requests(requests))

    def _abort(self, number: int) -> None:
        with self._lock:
            if number not in self._open:
                return
        self._flush()  # a request that has not left yet would come after its own end
        self._channel.send("abort", {"numbers": [number]})
