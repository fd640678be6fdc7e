"""The scheduler and its client: requests in, completions out, slots kept full.

One thread owns the engine. It takes requests from an inbox, prefills every distinct prompt once, puts requests into
free slots, runs a dispatch of decode steps, and hands finished completions back to the event loop of their caller.
New weights are swapped in between two dispatches. What a request yields does not depend on any of this.

    inbox -> waiting (by prompt) -> prefix (prefilled prompt) -> slot -> Completion
                                       ^                          |
                                       +---- session's pages <----+   (the next turn prefills only what is new)
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import jax
import numpy as np

from rolljax.errors import SamplerError
from rolljax.model.decoder import Params
from rolljax.sampler.engine import ADDRESS_LEN, MAX_STOP_IDS, DecodeState, Engine, Inserts, warm_up
from rolljax.types import Completion, FinishReason, SamplingParams

LINGER_S = 0.002
"""An idle scheduler waits this long for the next request before it starts with those it has."""


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
    """One prompt to continue; `address` are the integers its randomness is folded from."""

    prompt_ids: np.ndarray
    params: SamplingParams
    address: tuple[int, ...]
    session: Hashable | None
    submitted_s: float
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Completion]


@dataclasses.dataclass(eq=False)
class Prefix:
    """A prefilled prompt: its pages, and its row in the logits of the prefill that made it."""

    shard: int
    pages: list[int]
    length: int
    cached: int
    """Leading tokens whose keys and values were there before."""
    row: int = -1
    logits: Any = None


@dataclasses.dataclass(eq=False)
class Session:
    """What an episode's last turn left in the cache: the tokens whose keys and values are in `pages`."""

    shard: int
    pages: list[int]
    tokens: np.ndarray

    def extended_by(self, prompt_ids: np.ndarray) -> bool:
        n = len(self.tokens)
        return n < len(prompt_ids) and np.array_equal(self.tokens, prompt_ids[:n])


@dataclasses.dataclass(eq=False)
class Running:
    """A request in a slot."""

    request: Request
    shard: int
    pages: list[int]
    max_tokens: int
    started_s: float
    tokens: list[np.ndarray] = dataclasses.field(default_factory=list)
    logp: list[np.ndarray] = dataclasses.field(default_factory=list)
    versions: list[np.ndarray] = dataclasses.field(default_factory=list)

    def add(self, tokens: np.ndarray, logp: np.ndarray, version: int) -> None:
        self.tokens.append(tokens)
        self.logp.append(logp)
        self.versions.append(np.full(len(tokens), version, np.int32))


class Pages:
    """Reference-counted KV pages of one shard."""

    def __init__(self, num_pages: int) -> None:
        self._free = list(range(num_pages - 1, -1, -1))
        self._uses = [0] * num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, n: int) -> list[int]:
        pages = [self._free.pop() for _ in range(n)]
        self.share(pages)
        return pages

    def share(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._uses[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._uses[page] -= 1
            if self._uses[page] == 0:
                self._free.append(page)


@dataclasses.dataclass
class SamplerStats:
    """Totals since the start; differences of two of them describe a step.

    prompt_tok: prompts of all requests. prefill_tok: what of them was computed. reused_tok: what came from sessions.
    """

    requests: int = 0
    sampled_tok: int = 0
    prompt_tok: int = 0
    prefill_tok: int = 0
    reused_tok: int = 0
    dispatches: int = 0


class Sampler:
    """Continuous batching over an `Engine`, in a thread of its own.

    Args:
      params: parameters as the engine wants them (see `trainer.publish`). version: their policy version.
    """

    def __init__(self, engine: Engine, params: Params, version: int) -> None:
        self.engine, self.version = engine, version
        self.stats = SamplerStats()
        self._params = params
        self._state: DecodeState = warm_up(engine, params, engine.init_decode_state())
        n = engine.num_shards
        self._slots_per_shard = engine.cfg.slots // n
        self._pages = [Pages(engine.pages_per_shard) for _ in range(n)]
        self._free_slots = [
            list(range((s + 1) * self._slots_per_shard - 1, s * self._slots_per_shard - 1, -1)) for s in range(n)
        ]
        self._waiting: collections.OrderedDict[bytes, collections.deque[Request]] = collections.OrderedDict()
        self._prefixes: dict[bytes, Prefix] = {}
        self._sessions: collections.OrderedDict[Hashable, Session] = collections.OrderedDict()
        self._running: dict[int, Running] = {}
        self._inbox: queue.SimpleQueue[Request | Callable[[], None] | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="rolljax-sampler", daemon=True)
        self._thread.start()

    # ---- the client's side

    async def generate(
        self,
        prompt_ids: np.ndarray,
        params: SamplingParams,
        address: tuple[int, ...],
        session: Hashable | None = None,
    ) -> Completion:
        """Sample a continuation of `prompt_ids [P]`.

        Args:
          address: up to 6 integers; equal addresses give equal noise, whatever else is running.
          session: name of an episode whose next prompt will extend this one. Its pages are kept while there is room for
            them, and dropped when the weights change; that saves work and changes nothing else.

        Raises:
          SamplerError: the prompt leaves no room in the context, the request is malformed, or the sampler has stopped.
        """
        limit = self.engine.cfg.max_context
        if not 0 < len(prompt_ids) < limit:
            raise SamplerError(f"a prompt of {len(prompt_ids)} tokens does not fit a context of {limit}")
        if len(params.stop_ids) > MAX_STOP_IDS or len(address) > ADDRESS_LEN or params.max_tokens < 1:
            raise SamplerError(f"at most {MAX_STOP_IDS} stop ids, {ADDRESS_LEN} address integers, and max_tokens >= 1")
        if self._error:
            raise SamplerError(f"the sampler has stopped: {self._error}")
        loop = asyncio.get_running_loop()
        request = Request(
            np.asarray(prompt_ids, np.int32), params, address, session, time.perf_counter(), loop, loop.create_future()
        )
        self._inbox.put(request)
        return await request.future

    def publish(self, params: Params, version: int, timeout_s: float = 600.0) -> None:
        """Swap the weights between two dispatches. Running requests go on; their next tokens carry the new version."""
        done: concurrent.futures.Future[None] = concurrent.futures.Future()

        def swap() -> None:
            self._params, self.version = params, version
            for key in list(self._prefixes):  # prompts prefilled under the old weights
                self._drop_prefix(key)
            for session in list(self._sessions):
                self._drop_session(session)
            done.set_result(None)

        self._inbox.put(swap)
        try:
            done.result(timeout_s)
        except concurrent.futures.TimeoutError:
            raise SamplerError(f"weights of version {version} were not taken within {timeout_s:.0f} s") from self._error

    def close(self) -> None:
        """Stop the thread; requests that are still running fail."""
        self._inbox.put(None)
        self._thread.join(timeout=60)

    # ---- the scheduler's side

    def _run(self) -> None:
        try:
            while self._take_in():
                self._admit()
                if self._waiting and not self._running:
                    self._unblock()
                if self._running:
                    self._dispatch()
            self._fail(SamplerError("the sampler was closed"))
        except Exception as e:  # border of the thread: everything that waits learns why
            self._error = e
            self._fail(SamplerError(f"the sampler stopped: {type(e).__name__}: {e}"))

    def _take_in(self) -> bool:
        """Move the inbox into `waiting`; blocks while there is nothing to do. False: time to close."""
        idle = not self._running
        wait: float | None = None if idle and not self._waiting else LINGER_S
        while True:
            try:
                item = self._inbox.get(timeout=wait) if idle else self._inbox.get_nowait()
            except queue.Empty:
                return True
            if item is None:
                return False
            if isinstance(item, Request):
                self._waiting.setdefault(item.prompt_ids.tobytes(), collections.deque()).append(item)
                self.stats.requests += 1
                wait = LINGER_S
            else:
                item()
                if not self._waiting and idle:
                    wait = None

    def _admit(self) -> None:
        while self._prefill_some() | self._insert_some():
            pass

    def _unblock(self) -> None:
        """Nothing runs and nothing could be admitted: pages are held by prompts that wait for more of them."""
        for name in list(self._sessions):
            self._drop_session(name)
        for key in list(self._prefixes)[1:]:
            self._drop_prefix(key)
        self._admit()
        if self._waiting and not self._running:
            raise SamplerError("requests are waiting but none can be admitted: this is a bug")

    def _prefill_some(self) -> bool:
        """Prefill waiting prompts that no prefix exists for, as many as rows, pages and slots allow."""
        cfg = self.engine.cfg
        rows_per_shard = cfg.prefill_rows // self.engine.num_shards
        room = [len(f) for f in self._free_slots]
        for key, prefix in self._prefixes.items():
            room[prefix.shard] -= len(self._waiting[key])
        chosen: list[tuple[bytes, Prefix]] = []
        filled = [0] * self.engine.num_shards
        for key, requests in self._waiting.items():
            if key in self._prefixes:
                continue
            open_shards = [s for s, r in enumerate(room) if r > 0 and filled[s] < rows_per_shard]
            started = self._start_prefix(requests[0], open_shards, room)
            if started is None and requests[0].session in self._sessions:
                continue  # it waits for its own shard; others need not
            if started is None:
                break
            shard = started.shard
            started.row = filled[shard]
            chosen.append((key, started))
            filled[shard] += 1
            room[shard] -= len(requests)
        if not chosen:
            return False
        T = next(b for b in cfg.prefill_buckets if b >= max(p.length - p.cached for _, p in chosen))
        tokens = np.zeros((cfg.prefill_rows, T), np.int32)
        positions = np.full((cfg.prefill_rows, T), -1, np.int32)
        table = np.full((cfg.prefill_rows, cfg.pages_per_sequence), -1, np.int32)
        for key, prefix in chosen:
            row = prefix.shard * rows_per_shard + prefix.row
            new = prefix.length - prefix.cached
            tokens[row, :new] = self._waiting[key][0].prompt_ids[prefix.cached :]
            positions[row, :new] = np.arange(prefix.cached, prefix.length)
            table[row, : len(prefix.pages)] = prefix.pages
            self.stats.prefill_tok += new
            self.stats.reused_tok += prefix.cached
        self._state, logits = self.engine.prefill(self._params, self._state, tokens, positions, table)
        for key, prefix in chosen:
            prefix.logits = logits
            self._prefixes[key] = prefix
        return True

    def _start_prefix(self, request: Request, open_shards: list[int], room: list[int]) -> Prefix | None:
        """Pages for a prompt that is about to be prefilled, those of its session first; None: not now."""
        length = len(request.prompt_ids)
        pages_needed = -(-length // self.engine.cfg.page_size)
        session = self._sessions.get(request.session)
        if session is not None and not session.extended_by(request.prompt_ids):
            self._drop_session(request.session)
            session = None
        if session is not None:
            del self._sessions[request.session]  # out of reach of eviction while room is made
        held, cached = (session.pages, len(session.tokens)) if session else ([], 0)
        shards = [s for s in open_shards if session is None or s == session.shard]
        extra = pages_needed - len(held)
        for shard in sorted(shards, key=lambda s: -room[s]):
            if self._make_room(shard, extra + self._own_pages(request)):
                return Prefix(shard, [*held, *self._pages[shard].take(extra)], length, cached)
        if session is not None:
            self._sessions[request.session] = session
        return None

    def _make_room(self, shard: int, num_pages: int) -> bool:
        """Whether so many pages of a shard are free, after dropping the oldest sessions if need be."""
        for name in [n for n, s in self._sessions.items() if s.shard == shard]:
            if self._pages[shard].num_free >= num_pages:
                break
            self._drop_session(name)
        return self._pages[shard].num_free >= num_pages

    def _insert_some(self) -> bool:
        """Put waiting requests of prefilled prompts into free slots and draw their first tokens."""
        cfg = self.engine.cfg
        by_logits: dict[int, tuple[jax.Array, Inserts, list[int]]] = {}
        for key, prefix in list(self._prefixes.items()):
            requests = self._waiting[key]
            while requests and self._free_slots[prefix.shard]:
                if not self._make_room(prefix.shard, self._own_pages(requests[0])):
                    break
                slot = self._free_slots[prefix.shard].pop()
                _, inserts, slots = by_logits.setdefault(
                    id(prefix.logits), (prefix.logits, Inserts.empty(cfg.slots, cfg.pages_per_sequence), [])
                )
                self._place(requests.popleft(), prefix, slot, inserts)
                slots.append(slot)
            if not requests:
                del self._waiting[key]
                self._drop_prefix(key)
        for logits, inserts, slots in by_logits.values():
            self._state, token, logp, done = self.engine.insert(self._state, logits, inserts)
            token_S, logp_S, done_S = jax.device_get((token, logp, done))
            for slot in slots:
                self._running[slot].add(token_S[slot : slot + 1], logp_S[slot : slot + 1], self.version)
            self._finish(slot for slot in slots if done_S[slot])
        return bool(by_logits)

    def _place(self, request: Request, prefix: Prefix, slot: int, inserts: Inserts) -> None:
        cfg, pages = self.engine.cfg, self._pages[prefix.shard]
        whole = prefix.length // cfg.page_size  # pages that are full of prompt and stay shared
        own = pages.take(self._own_pages(request))
        shared = prefix.pages[:whole]
        pages.share(shared)
        self.stats.prompt_tok += prefix.length
        max_tokens = min(request.params.max_tokens, cfg.max_context - prefix.length)
        self._running[slot] = Running(request, prefix.shard, [*shared, *own], max_tokens, time.perf_counter())
        inserts.row[slot] = prefix.row
        inserts.table[slot, : whole + len(own)] = [*shared, *own]
        if prefix.length % cfg.page_size:
            inserts.copy_from[slot], inserts.copy_to[slot] = prefix.pages[whole], own[0]
        inserts.length[slot] = prefix.length
        inserts.max_tokens[slot] = max_tokens
        inserts.temperature[slot] = request.params.temperature
        inserts.address[slot, : len(request.address)] = request.address
        inserts.stop[slot, : len(request.params.stop_ids)] = request.params.stop_ids

    def _own_pages(self, request: Request) -> int:
        """Pages a request needs beside the full pages of its prompt."""
        cfg = self.engine.cfg
        total = min(len(request.prompt_ids) + request.params.max_tokens, cfg.max_context)
        return -(-total // cfg.page_size) - len(request.prompt_ids) // cfg.page_size

    def _drop_session(self, name: Hashable) -> None:
        session = self._sessions.pop(name)
        self._pages[session.shard].release(session.pages)

    def _drop_prefix(self, key: bytes) -> None:
        prefix = self._prefixes.pop(key)
        self._pages[prefix.shard].release(prefix.pages)

    def _dispatch(self) -> None:
        """One round of decode steps, then hand out what has finished."""
        self._state, out = self.engine.generate(self._params, self._state)
        out = jax.device_get(out)
        self.stats.dispatches += 1
        for slot, running in self._running.items():
            n = int(out.valid[slot])
            running.add(out.tokens[slot, :n], out.logp[slot, :n], self.version)
        self._finish(slot for slot in list(self._running) if out.done[slot])

    def _finish(self, slots: Iterable[int]) -> None:
        now = time.perf_counter()
        ready: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Completion], Completion]]] = {}
        for slot in slots:
            running = self._running.pop(slot)
            self._free_slots[running.shard].append(slot)
            request = running.request
            tokens = np.concatenate(running.tokens)
            self._keep_or_release(running, tokens)
            self.stats.sampled_tok += len(tokens)
            reason: FinishReason = "stop"
            if tokens[-1] not in request.params.stop_ids:
                reason = "length" if running.max_tokens == request.params.max_tokens else "context"
            completion = Completion(
                tokens,
                np.concatenate(running.logp),
                np.concatenate(running.versions),
                reason,
                queue_s=running.started_s - request.submitted_s,
                sample_s=now - running.started_s,
            )
            ready.setdefault(request.loop, []).append((request.future, completion))
        for loop, results in ready.items():
            loop.call_soon_threadsafe(_deliver, results)

    def _keep_or_release(self, running: Running, tokens: np.ndarray) -> None:
        """Pages of a finished request: kept for its session's next turn, if all of them were made by these weights."""
        session = running.request.session
        if session in self._sessions:
            self._drop_session(session)
        if session is None or any((v != self.version).any() for v in running.versions):
            self._pages[running.shard].release(running.pages)
            return
        cached = np.concatenate([running.request.prompt_ids, tokens[:-1]])  # the last token never was an input
        used = -(-len(cached) // self.engine.cfg.page_size)
        self._pages[running.shard].release(running.pages[used:])
        self._sessions[session] = Session(running.shard, running.pages[:used], cached)

    def _fail(self, error: SamplerError) -> None:
        requests = [r.request for r in self._running.values()]
        requests += [r for q in self._waiting.values() for r in q]
        while not self._inbox.empty():
            item = self._inbox.get_nowait()
            if isinstance(item, Request):
                requests.append(item)
        for request in requests:
            if not request.loop.is_closed():
                request.loop.call_soon_threadsafe(_deliver_error, request.future, error)


def _deliver(results: list[tuple[asyncio.Future[Completion], Completion]]) -> None:
    for future, completion in results:
        if not future.done():
            future.set_result(completion)


def _deliver_error(future: asyncio.Future[Completion], error: SamplerError) -> None:
    if not future.done():
        future.set_exception(error)
