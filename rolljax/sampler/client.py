"""The sampler as its users see it (`SamplerClient`), and the sampler of this process (`Sampler`).

`await sampler.generate(...)` works from any event loop; one thread runs the scheduler.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import copy
import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, TypeVar

import jax
import numpy as np

from rolljax.concurrency.waits import Inbox
from rolljax.errors import HangError, RolljaxError, SamplerError, boundary
from rolljax.model.decoder import Params
from rolljax.model.vocabulary import Vocabulary
from rolljax.sampler.arrays import ADDRESS_LEN, MAX_STOP_IDS, Scores
from rolljax.sampler.engine import Engine, EngineWorker
from rolljax.sampler.prompt_queue import Request, SamplerLoad, SamplerStats
from rolljax.sampler.sampling import MAX_TOP_LOGPROBS
from rolljax.sampler.scheduler import Scheduler
from rolljax.sampler.settings import MIN_CHUNK
from rolljax.sampler.weights import DirectSink, Snapshot, WeightSink
from rolljax.types import Completion, DrainedSampler, FinishReason, Sampled, SamplerGap, SamplingParams

T = TypeVar("T")
LoopCall = tuple[asyncio.AbstractEventLoop, Callable[[], None]]
"""A call to be made in an event loop."""
LINGER_S = 0.002
"""An idle scheduler waits this long for the next request before it starts with those it has."""
HOLD_S = 5.0
"""Longest that requests are held back to begin together."""


@dataclasses.dataclass(frozen=True, eq=False)
class Pending:
    """A request under way. `abort` ends it (from any thread); its completion then holds the tokens sampled so far."""

    completion: asyncio.Future[Completion]
    abort: Callable[[], None]


@dataclasses.dataclass(frozen=True)
class SamplerLimits:
    """Sizes that the users of a sampler must know."""

    max_context: int
    """Maximum number of tokens of a prompt and its answer."""
    slots: int
    """Maximum number of sequences that are sampled at the same time."""
    vocab_size: int
    """Number of token ids of prompts, those of latent prefixes included (`model.prefixes`)."""
    takes_stop_texts: bool = True
    """Whether requests may have stop texts, for which the sampler needs a vocabulary."""


def check_request(
    limits: SamplerLimits, prompt_ids: np.ndarray, params: SamplingParams, address: tuple[int, ...]
) -> None:
    """Check a request against the limits of its sampler.

    Raises:
      SamplerError: the prompt leaves no room in the context, or the request is malformed.
    """
    limit, vocab = limits.max_context, limits.vocab_size
    problem = None
    if not 0 < len(prompt_ids) < limit:
        problem = f"a prompt of {len(prompt_ids)} tokens does not fit a context of {limit}"
    elif prompt_ids.min() < 0 or prompt_ids.max() >= vocab:
        problem = f"prompt ids must lie between 0 and {vocab - 1}"
    elif len(params.stop_ids) > MAX_STOP_IDS:
        problem = f"at most {MAX_STOP_IDS} stop ids"
    elif len(address) > ADDRESS_LEN:
        problem = f"an address has at most {ADDRESS_LEN} integers"
    elif params.max_tokens < 1:
        problem = f"max_tokens must be at least 1, not {params.max_tokens}"
    elif not (params.temperature >= 0 and 0 < params.top_p <= 1 and 0 <= params.min_p <= 1 and params.top_k >= 0):
        problem = f"temperature and top_k from 0, top_p in (0, 1], min_p in [0, 1], not {params}"
    elif not 0 <= params.top_logprobs <= min(MAX_TOP_LOGPROBS, vocab):
        problem = f"at most {MAX_TOP_LOGPROBS} top_logprobs"
    elif params.stop and not limits.takes_stop_texts:
        problem = "stop texts need a sampler with a vocabulary"
    if problem:
        raise SamplerError(problem)


class SamplerClient(Protocol):
    """A sampler, wherever its engine runs."""

    @property
    def limits(self) -> SamplerLimits:
        """Sizes of the engine."""
        ...

    @property
    def version(self) -> int:
        """Policy version of the weights in use."""
        ...

    @property
    def asleep(self) -> bool:
        """Return whether it has no weights and no KV pages (see `sleep`)."""
        ...

    @property
    def stats(self) -> SamplerStats:
        """A copy of the totals since the start."""
        ...

    @property
    def error(self) -> SamplerError | None:
        """The error that stopped the sampler, if it has stopped."""
        ...

    def load(self) -> SamplerLoad:
        """Return the current load."""
        ...

    def faults(self) -> list[str]:
        """Return a clause for each part of the sampler that is missing, hangs or is slow."""
        return []

    def drain_far(self, gaps: Mapping[str, SamplerGap]) -> list[DrainedSampler]:
        """Give no more requests to the samplers that are further from the trainer than the others; return these.

        Args:
          gaps: by `Completion.sampler`, of a step.
        """
        return []

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
        """Start to sample a continuation of `prompt_ids [P]`; call it from the event loop that waits for the result.

        Args:
          address: up to 5 integers; equal addresses give equal noise, independent of other requests.
          priority: lower is served first; equal ones in the order of their arrival.
          on_tokens: called on the event loop with all new tokens, in order, before the completion is there.
          resume: tokens that an aborted request of the same prompt had sampled; sampling resumes after them.
          min_version: policy version with which the request's group began; no older weights sample it.

        Raises:
          SamplerError: the prompt leaves no room in the context, the request is malformed, or the sampler has stopped.
        """
        ...

    async def generate(
        self,
        prompt_ids: np.ndarray,
        params: SamplingParams,
        address: tuple[int, ...],
        *,
        priority: int = 0,
        on_tokens: Callable[[Sampled], None] | None = None,
        resume: Sampled | None = None,
        min_version: int = 0,
    ) -> Completion:
        """Sample a continuation of `prompt_ids [P]`; cancelling the wait aborts the request. See `submit`."""
        pending = self.submit(
            prompt_ids,
            params,
            address,
            priority=priority,
            on_tokens=on_tokens,
            resume=resume,
            min_version=min_version,
        )
        try:
            return await pending.completion
        except asyncio.CancelledError:
            pending.abort()
            raise

    async def score(self, prompt_ids: np.ndarray) -> np.ndarray:
        """Return the model's log-prob of every token of `prompt_ids [P]` given the earlier ones; the first is NaN."""
        ...

    async def warm_up(self, done: Callable[[int, int], None]) -> None:
        """Compile the programs for requests of any length and settings (except `score`), one after the other.

        done: called before each program and at the end with the number of compiled programs and their total.
        """
        ...

    def hold(self) -> Callable[[], None]:
        """Hold back the requests that are submitted from now on, so that they start together.

        They start when the caller calls the returned function, at most `HOLD_S` later. Requests that run already
        continue meanwhile. Call it in an event loop.
        """
        ...

    def prepare(self, snapshot: Snapshot) -> None:
        """Bring the weights of a snapshot to the sampler's devices. Decoding continues."""
        ...

    def swap(self, version: int) -> None:
        """Swap the weights for those of version `version`, between two dispatches, after `prepare` of their snapshot.

        Running requests continue; their next tokens have the new version. A sampler that is asleep wakes up. If the
        weights cannot be taken, the sampler stops.

        Raises:
          SamplerError: the sampler has stopped, or does so now. HangError: no dispatch has ended in ten minutes.
        """
        ...

    def sleep(self) -> None:
        """Free the memory of the weights and the KV pages, between two dispatches; return when it is free.

        The sampler is asleep until the next `swap`: requests that run or arrive wait for it, and can be aborted.

        Raises:
          SamplerError: the sampler has stopped, or does so now. HangError: no dispatch has ended in ten minutes.
        """
        ...

    def close(self) -> None:
        """Stop the thread; requests that are still running fail."""
        ...


class Sampler(SamplerClient):
    """Continuous batching over an `Engine`, in a separate thread.

    Args:
      params: parameters as the engine wants them (see `trainer.publish`); None: `worker` has them.
      version: their policy version.
      vocabulary: maps tokens to text; needed for stop texts.
      longest_prompt, multi_turn: the requests for which programs are compiled in advance (`longest_prompt` None: all;
        0: none). Other programs are compiled when first needed.
      worker: of the engine, where several processes share its calls (default: one of its own).
      sink: takes new weights for the worker (default: `DirectSink`).
    """

    def __init__(
        self,
        engine: Engine,
        params: Params | None,
        version: int,
        *,
        vocabulary: Vocabulary | None = None,
        longest_prompt: int | None = None,
        multi_turn: bool = True,
        worker: EngineWorker | None = None,
        sink: WeightSink | None = None,
    ) -> None:
        self.engine, cfg = engine, engine.cfg
        self._limits = SamplerLimits(cfg.max_context, cfg.slots, engine.model.num_ids, vocabulary is not None)
        self._worker = worker or EngineWorker(engine)
        if params is not None:
            self._worker.set_params(params)
        self._sink = sink or DirectSink(self._worker)
        self._scheduler = Scheduler(self._worker, version, vocabulary)
        if longest_prompt != 0:
            self._scheduler.warm_up(longest_prompt or cfg.max_context, multi_turn)
        self.inbox: Inbox[Callable[[], None] | None] = Inbox("the sampler's thread")
        self._outbox: list[LoopCall] = []
        self._closing = threading.Lock()
        self._error: SamplerError | None = None
        self._until_awake: list[Callable[[], None]] = []
        """Calls of `_ask` that came while the sampler was asleep."""
        self._held: list[Callable[[], None]] | None = None
        """Messages to the thread that are held back (`hold`); None: none is."""
        self._thread = threading.Thread(target=self._run, name="rolljax-sampler", daemon=True)
        self._thread.start()

    @property
    def limits(self) -> SamplerLimits:
        return self._limits

    @property
    def version(self) -> int:
        return self._scheduler.version

    @property
    def asleep(self) -> bool:
        return self._scheduler.asleep

    @property
    def stats(self) -> SamplerStats:
        return copy.copy(self._scheduler.stats)

    @property
    def error(self) -> SamplerError | None:
        return self._error

    def load(self) -> SamplerLoad:
        return self._scheduler.load()

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
        adapter: int = -1,
    ) -> Pending:
        """Start to sample; see `SamplerClient.submit`. adapter: the slot of an adapter (`set_adapter`); -1: none."""
        check_request(self._limits, prompt_ids, params, address)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Completion] = loop.create_future()

        def deliver(request: Request, reason: FinishReason) -> None:
            now = time.perf_counter()
            started = request.started_s or now
            completion = Completion(
                Sampled.concatenate(request.parts) if request.parts else no_tokens(params.top_logprobs),
                reason,
                queue_s=started - request.submitted_s,
                sample_s=now - started,
                cached_tok=request.cached_tok,
            )
            self._post(loop, lambda: settle(future, completion))

        request = Request(
            np.asarray(prompt_ids, np.int32),
            params,
            tuple(address),
            priority,
            deliver,
            on_tokens and (lambda part: self._post(loop, lambda: on_tokens(part))),
            parts=[resume] if resume else [],
            submitted_s=time.perf_counter(),
            fail=lambda error: self._post(loop, lambda: settle(future, error)),
            adapter=adapter,
        )
        self._send(lambda: self._scheduler.add(request))
        return Pending(future, lambda: self._abort(request))

    def hold(self) -> Callable[[], None]:
        with self._closing:
            held = self._held = [] if self._held is None else self._held

        def release() -> None:
            timer.cancel()
            with self._closing:
                if self._held is held:
                    self._held = None
                    self.inbox.put(lambda: run_all(held))

        timer = asyncio.get_running_loop().call_later(HOLD_S, release)
        return release

    async def score(self, prompt_ids: np.ndarray) -> np.ndarray:
        return (await self.score_top(prompt_ids)).logp  # type: ignore[return-value]

    async def score_top(self, prompt_ids: np.ndarray, *, adapter: int = -1, top: int = 0) -> Scores:
        """Return the log-probs of every token of `prompt_ids [P]` given the earlier ones, and of the `top` likeliest
        tokens in its place: host arrays `[P]` and `[P, top]`; those of the first token are NaN.

        adapter: the slot of an adapter (`set_adapter`); -1: none.
        """
        check_request(self._limits, prompt_ids, SamplingParams(), ())
        size = MIN_CHUNK
        while size < len(prompt_ids):
            size *= 2
        tokens = np.zeros((1, size), np.int32)
        tokens[0, : len(prompt_ids)] = prompt_ids
        call = lambda: jax.device_get(self._worker.score(tokens, np.array([adapter], np.int32), top=top))  # noqa: E731
        found = jax.tree.map(lambda x: np.array(x[0, : len(prompt_ids)]), await self._ask(call))
        found.logp[0], found.top_logp[0] = np.nan, np.nan
        return found

    async def set_adapter(self, slot: int, params: Callable[[Params], Params]) -> None:
        """Put an adapter into a slot, between two dispatches; requests of other slots continue.

        Args:
          params: returns the weights in use with that adapter (`model.lora.SlottedAdapters`); it may donate those it
            gets. No open request may use the slot.
        """
        change = lambda: self._worker.set_params(params(self._worker.params))  # noqa: E731
        await self._ask(lambda: self._scheduler.set_adapter(slot, change))

    async def warm_up(self, done: Callable[[int, int], None]) -> None:
        cfg = self.engine.cfg
        programs = self._scheduler.programs(cfg.max_context, multi_turn=True, variants=cfg.draw_variants)
        for i, program in enumerate(programs):
            done(i, len(programs))
            await self._ask(program)
        self._scheduler.compiles_when_needed = False
        done(len(programs), len(programs))

    def prepare(self, snapshot: Snapshot) -> None:
        self._sink.prepare(snapshot)

    def swap(self, version: int, timeout_s: float = 600.0) -> None:
        def change() -> None:
            self._scheduler.publish(lambda: self._sink.swap(version), version)
            waiting, self._until_awake = self._until_awake, []
            for call in waiting:
                call()

        self._change(change, f"weights of version {version}", "taken", timeout_s)

    def sleep(self, timeout_s: float = 600.0) -> None:
        self._change(self._scheduler.sleep, "weights and KV pages", "freed", timeout_s)

    def close(self) -> None:
        self.inbox.put(None)
        self._thread.join(timeout=60)

    # ---- between the threads

    def _abort(self, request: Request) -> None:
        with contextlib.suppress(SamplerError):  # a sampler that has stopped has ended the request already
            self._send(lambda: self._scheduler.abort(request))

    def _change(self, change: Callable[[], None], what: str, done_to_it: str, timeout_s: float) -> None:
        """Run `change` in the scheduler's thread, between two dispatches, and wait until it is done. If it fails, so
        does the sampler."""
        done: concurrent.futures.Future[None] = concurrent.futures.Future()

        def run() -> None:
            if self._error:
                done.set_exception(self._error)
                return
            try:
                with boundary(SamplerError, f"{what} could not be {done_to_it}"):
                    change()
            except RolljaxError as e:
                done.set_exception(e)
                raise  # the weights in use may be gone: the thread ends with it
            done.set_result(None)

        self._send(run)
        try:
            done.result(timeout_s)
        except concurrent.futures.TimeoutError:
            raise self._error or HangError(f"{what} were not {done_to_it} within {timeout_s:.0f} s") from None

    async def _ask(self, call: Callable[[], T]) -> T:
        """Run `call` in the scheduler's thread, between two dispatches; while the sampler is asleep, it waits."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def run() -> None:
            result: object
            if self._scheduler.asleep and not self._error:
                self._until_awake.append(run)
                return
            try:
                with boundary(SamplerError, "a call between two dispatches"):
                    result = self._error or call()
            except RolljaxError as e:  # it fails this call alone
                result = e
            self._post(loop, lambda: settle(future, result))

        self._send(run)
        return await future

    def _send(self, item: Callable[[], None]) -> None:
        with self._closing:  # the thread handles all calls put in before it ends
            if self._error:
                raise SamplerError(f"the sampler has stopped: {self._error}")
            if self._held is None:
                self.inbox.put(item)
            else:
                self._held.append(item)

    def _post(self, loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
        """Schedule `call` on a loop from the scheduler's thread, together with the loop's other calls of this step."""
        self._outbox.append((loop, call))

    def _flush(self) -> None:
        outbox, self._outbox = self._outbox, []
        deliver(outbox)

    def _run(self) -> None:
        error = SamplerError("the sampler was closed")
        try:
            while self._take_in():
                if self._scheduler.busy:
                    self._scheduler.step()
                self._flush()
        except Exception as e:  # border: the thread ends, and everything that waits learns why
            error = SamplerError(f"the sampler stopped: {type(e).__name__}: {e}")
            error.__cause__ = e
        with self._closing:
            self._error = error
            held, self._held = self._held or [], None
        run_all(held)
        while self.inbox:
            if item := self.inbox.take():
                item()
        for call in self._until_awake:
            call()
        for request in self._scheduler.open_requests():
            request.fail(error)
        self._flush()

    def _take_in(self) -> bool:
        """Run the calls in the inbox, waiting while there is nothing to do; return False when the sampler is closed."""
        idle, wait_s = not self._scheduler.busy, None
        while idle or self.inbox:
            try:
                item = self.inbox.take(wait_s)
            except queue.Empty:
                break
            if item is None:
                return False
            item()
            if idle:
                self._flush()
                wait_s = LINGER_S if self._scheduler.busy else None
        return True


def run_all(calls: list[Callable[[], None]]) -> None:
    """Make all calls, in order."""
    for call in calls:
        call()


def deliver(calls: Iterable[LoopCall]) -> None:
    """Make calls in their event loops, from any thread: those of each loop together and in order. A closed loop is left
    out."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Callable[[], None]]] = {}
    for loop, call in calls:
        by_loop.setdefault(loop, []).append(call)
    for loop, own in by_loop.items():
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(run_all, own)


def settle(future: asyncio.Future[Any] | concurrent.futures.Future[Any], result: object) -> None:
    """Set the result or error of a future, unless it has one."""
    if future.done():
        return
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)


def no_tokens(top: int) -> Sampled:
    """Return an answer of no tokens, with `top` likely tokens each."""
    none = np.zeros(0, np.float32)
    ids, logp = np.zeros((0, top), np.int32), np.zeros((0, top), np.float32)
    return Sampled(none.astype(np.int32), none, none, none.astype(np.int32), ids, logp, logp, ids[..., None])
