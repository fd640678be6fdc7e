"""The scheduler: sequences in, tokens out, slots kept full. Host logic of one thread; no clocks decide, no asyncio.

    add -> queue of prompts -> prefill (in pieces) -> ready -> slot -> decode ... -> deliver
              ^                                                 |
              +------------- preempted: out of pages, new weights

Equal streams that wait together are one `Prompt`: prefilled once, its pages shared, its logits drawn from by everyone.
A sequence takes pages as it grows. When there are none left the youngest gives its own back and waits; it goes on later
from its tokens. What a sequence yields does not depend on any of this.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from rolljax.errors import SamplerError
from rolljax.model.decoder import Params
from rolljax.model.vocabulary import TextStream, Vocabulary
from rolljax.sampler.engine import DecodeState, Engine, Inserts, Pieces, ResultTokens
from rolljax.sampler.pages import Node, PageCache
from rolljax.types import FinishReason, Sampled, SamplingParams

SCAN = 64
"""Prompts in the queue that are looked at for one prefill, beyond those it takes."""


@dataclasses.dataclass(eq=False)
class Request:
    """A sequence to sample, and where it stands.

    deliver: called once at the end. on_tokens: called with every new piece. fail: called instead of `deliver` when the
    scheduler stops. All run in the scheduler's thread.
    """

    prompt_ids: np.ndarray
    params: SamplingParams
    address: tuple[int, ...]
    priority: int
    deliver: Callable[[Request, FinishReason], None]
    on_tokens: Callable[[Sampled], None] | None = None
    fail: Callable[[Exception], None] = lambda error: None
    parts: list[Sampled] = dataclasses.field(default_factory=list)
    order: int = -1
    submitted_s: float = 0.0
    started_s: float = 0.0
    cached_tok: int = 0
    num_sampled: int = 0
    text: TextStream | None = None
    """Its text up to a stop text, once that is looked for."""
    prompt: Prompt | None = None
    """While it waits."""
    slot: int = -1
    shard: int = -1
    row: int = -1
    """In the dispatch under way."""
    in_cache: int = 0
    """Leading tokens of its stream whose keys and values are in its pages."""
    epoch: int = -1
    """Of the page cache, when it got its slot."""
    nodes: list[Node] = dataclasses.field(default_factory=list)
    pages: list[int] = dataclasses.field(default_factory=list)

    @property
    def rank(self) -> tuple[int, int]:
        return (self.priority, self.order)

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + self.num_sampled

    def stream(self) -> np.ndarray:
        """The prompt and everything sampled so far."""
        return np.concatenate([self.prompt_ids, *(p.tokens for p in self.parts)]).astype(np.int32, copy=False)


@dataclasses.dataclass(eq=False)
class Prompt:
    """A distinct stream that waits to be continued, by all of `members` (none: it only goes into the cache)."""

    tokens: np.ndarray
    data: bytes
    rank: tuple[int, int]
    members: collections.deque[Request] = dataclasses.field(default_factory=collections.deque)
    base: bytes | None = None
    """An earlier part of the stream that others share: better prefilled before."""
    shard: int = -1
    nodes: list[Node] = dataclasses.field(default_factory=list)
    tail: Node | None = None
    """Locked node of the last, partly filled page: the one it starts from, later its own."""
    pages: list[int] = dataclasses.field(default_factory=list)
    reused: int = 0
    """Leading tokens that its next member gets without computing them."""
    done: int = 0
    """Leading tokens that are in the cache now."""
    logits: Any = None
    row: int = -1

    @property
    def locked(self) -> list[Node]:
        return self.nodes if self.tail is None else [*self.nodes, self.tail]


@dataclasses.dataclass
class SamplerStats:
    """Totals since the start; differences of two of them describe a step.

    prefill_tok: prompt tokens that were computed. reused_tok: that were in the cache, or computed for a sibling.
    slot_steps: rows times decode steps of all dispatches; busy_slot_steps: those that sampled a token.
    """

    requests: int = 0
    finished: int = 0
    aborted: int = 0
    preemptions: int = 0
    sampled_tok: int = 0
    prompt_tok: int = 0
    prefill_tok: int = 0
    reused_tok: int = 0
    prefills: int = 0
    dispatches: int = 0
    slot_steps: int = 0
    busy_slot_steps: int = 0
    prefill_s: float = 0.0
    generate_s: float = 0.0
    host_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class SamplerLoad:
    """What is going on now. used_pages: held by someone; shared_pages: by several; cached_pages: kept for reuse."""

    waiting: int
    running: int
    slots: int
    pages: int
    used_pages: int
    cached_pages: int
    shared_pages: int


class Scheduler:
    """Continuous batching over an `Engine`. Not thread-safe: one thread owns it.

    Args:
      params: parameters as the engine wants them (see `trainer.publish`). version: their policy version.
      vocabulary: what tokens spell; needed for stop texts.
    """

    def __init__(
        self,
        engine: Engine,
        params: Params,
        version: int,
        vocabulary: Vocabulary | None = None,
    ) -> None:
        self.engine, self.cfg, self.params, self.version = engine, engine.cfg, params, version
        self.stats = SamplerStats()
        self._vocabulary = vocabulary
        self._state: DecodeState = engine.init_decode_state()
        n, cfg = engine.num_shards, engine.cfg
        each = cfg.slots // n
        self._caches = [
            PageCache(engine.pages_per_shard, cfg.page_size, cfg.prefix_match, cfg.prefill_chunk) for _ in range(n)
        ]
        self._free_slots = [list(range((s + 1) * each - 1, s * each - 1, -1)) for s in range(n)]
        self._running: dict[int, Request] = {}
        self._table = np.full((cfg.slots, cfg.pages_per_sequence), -1, np.int32)
        self._prompts: dict[bytes, Prompt] = {}
        self._queue: list[tuple[tuple[int, int], Prompt]] = []
        """Prompts that are not prefilled yet, by rank."""
        self._started: dict[bytes, Prompt] = {}
        """Prompts that hold pages."""
        self._ready: list[Prompt] = []
        self._fresh: list[tuple[list[Request], ResultTokens]] = []
        """First tokens that were drawn and not looked at yet."""
        self._order = 0

    # ---- what the owner calls

    @property
    def busy(self) -> bool:
        return bool(self._running or self._prompts)

    def load(self) -> SamplerLoad:
        """A snapshot; safe from other threads."""
        caches = self._caches
        return SamplerLoad(
            waiting=sum(len(p.members) for p in list(self._prompts.values())),
            running=len(self._running),
            slots=self.cfg.slots,
            pages=sum(c.num_pages for c in caches),
            used_pages=sum(c.num_used for c in caches),
            cached_pages=sum(c.num_cached for c in caches),
            shared_pages=sum(c.num_shared for c in caches),
        )

    def add(self, request: Request) -> None:
        """Take in a request; `request.parts` may hold what it sampled before."""
        request.order = self._order
        self._order += 1
        self.stats.requests += 1
        self.stats.prompt_tok += len(request.prompt_ids)
        request.num_sampled = sum(len(p) for p in request.parts)
        reason = self._reason(request)
        if reason:
            self._deliver(request, reason)
        else:
            self._wait(request)

    def abort(self, request: Request) -> None:
        """End a request with what it has sampled so far; nothing if it has ended already."""
        prompt = request.prompt
        if prompt is not None:
            prompt.members.remove(request)
            request.prompt = None
            if not prompt.members:
                self._forget(prompt)
        elif request.slot >= 0 and self._running.get(request.slot) is request:
            self._look_at(self._take_fresh())
            if self._running.get(request.slot) is not request:
                return
            self._leave_slot(request)
        else:
            return
        self.stats.aborted += 1
        self._deliver(request, "abort")

    def publish(self, make: Callable[[Params], Params], version: int) -> None:
        """Swap the weights. Running requests go on; their next tokens carry the new version.

        make: the new weights, of those in use, which it may give up for them.
        """
        self._look_at(self._take_fresh())
        self.params, self.version = make(self.params), version
        if not self.cfg.reuse_stale:
            for prompt in list(self._started.values()):
                self._unstart(prompt)
            for cache in self._caches:
                cache.clear()
        if self.cfg.on_publish == "recompute":
            self._recompute()

    def step(self) -> None:
        """Admit what fits, decode one dispatch, hand out what came of it."""
        start = time.perf_counter()
        before = self.stats.prefill_s + self.stats.generate_s
        self._admit()
        if self._prompts and not self._running:
            self._unblock()
        self._grow()
        fresh = self._take_fresh()
        out = self._dispatch() if self._running else None
        self._look_at(fresh, out)
        spent = self.stats.prefill_s + self.stats.generate_s - before
        self.stats.host_s += time.perf_counter() - start - spent

    def open_requests(self) -> list[Request]:
        """Everything that is waiting or running."""
        return [*self._running.values(), *(r for p in self._prompts.values() for r in p.members)]

    def warm_up(self, longest_prompt: int, multi_turn: bool) -> None:
        """Compile what prompts up to that length need, with turns that extend them or without.

        What else comes (longer prompts, truncated laws, likely tokens, preemption) is compiled when it comes.
        """
        for program in self.programs(longest_prompt, multi_turn):
            program()

    def programs(
        self, longest_prompt: int, multi_turn: bool, laws: Sequence[tuple[bool, bool]] = ((False, False),)
    ) -> Sequence[Callable[[], None]]:
        """Calls that compile one program each, by running it to no effect; in this order, and while nothing else runs.

        Args:
          laws: whether to truncate and whether to report likely tokens, for each kind of law (see `sampling.draw`).
        """
        engine, cfg = self.engine, self.cfg
        pieces = cfg.pieces[: cfg.pieces.index(cfg.piece(longest_prompt)) + 1]
        reads = (0, *engine.widths) if multi_turn else (0,)
        calls = [functools.partial(self._try_prefill, piece, read) for piece in pieces for read in reads]
        calls += [functools.partial(self._try_insert, pieces[0], *law) for law in laws]
        sizes = [(width, rows) for width in engine.widths for rows in engine.row_counts]
        return calls + [functools.partial(self._try_generate, *size, *law) for law in laws for size in sizes]

    def _try_prefill(self, piece: int, read: int) -> None:
        rows = self.cfg.rows(piece, self.engine.num_shards) * self.engine.num_shards
        pieces = Pieces.empty(rows, piece, self.cfg.pages_per_sequence)
        self._state, _ = jax.block_until_ready(self.engine.prefill(self.params, self._state, pieces, read=read))

    def _try_insert(self, piece: int, truncate: bool, top: bool) -> None:
        rows = self.cfg.rows(piece, self.engine.num_shards) * self.engine.num_shards
        pieces = Pieces.empty(rows, piece, self.cfg.pages_per_sequence)
        self._state, logits = self.engine.prefill(self.params, self._state, pieces, read=0)
        nothing = Inserts.empty(self.cfg.slots)
        done = self.engine.insert(self._state, logits, nothing, truncate=truncate, top=top)
        self._state, _ = jax.block_until_ready(done)

    def _try_generate(self, width: int, rows: int, truncate: bool, top: bool) -> None:
        idle = np.full(rows * self.engine.num_shards, -1, np.int32)
        table = self._table[idle, :width]
        done = self.engine.generate(self.params, self._state, table, idle, truncate=truncate, top=top)
        self._state, _ = jax.block_until_ready(done)

    # ---- waiting

    def _wait(self, request: Request, base: bytes | None = None) -> None:
        stream = request.stream()
        data = stream.tobytes()
        prompt = self._prompts.get(data)
        if prompt is None:
            prompt = self._prompts[data] = Prompt(stream, data, request.rank, base=base)
            bisect.insort(self._queue, (prompt.rank, prompt), key=_rank)
        elif request.rank < prompt.rank and prompt.shard < 0:
            self._queue.remove((prompt.rank, prompt))
            prompt.rank = request.rank
            bisect.insort(self._queue, (prompt.rank, prompt), key=_rank)
        prompt.members.append(request)
        request.prompt = prompt

    def _forget(self, prompt: Prompt) -> None:
        """Nobody waits for a prompt any more."""
        if prompt.shard >= 0:
            self._unstart(prompt, requeue=False)
        else:
            self._queue.remove((prompt.rank, prompt))
        del self._prompts[prompt.data]

    def _unstart(self, prompt: Prompt, requeue: bool = True) -> None:
        """Take everything from a prompt that was started; what was computed stays in the cache."""
        cache = self._caches[prompt.shard]
        cache.unlock(prompt.locked)
        cache.release(prompt.pages)
        if prompt.logits is None:
            self._queue.remove((prompt.rank, prompt))
        else:
            self._ready.remove(prompt)
        del self._started[prompt.data]
        prompt.shard, prompt.nodes, prompt.tail, prompt.pages = -1, [], None, []
        prompt.reused = prompt.done = 0
        prompt.logits = None
        if requeue:
            bisect.insort(self._queue, (prompt.rank, prompt), key=_rank)

    # ---- prefill

    def _admit(self) -> None:
        """Fill slots; while something is decoding, with at most one prefill in between."""
        decoding = bool(self._running)
        self._insert_ready()
        while self._prefill_some():
            self._insert_ready()
            if decoding:
                break

    def _prefill_some(self) -> bool:
        """One prefill of the next pieces of waiting prompts that fit into one program; False: nothing to do."""
        cfg, n = self.cfg, self.engine.num_shards
        room = [len(f) for f in self._free_slots]
        for prompt in self._started.values():
            room[prompt.shard] -= len(prompt.members)
        batch: list[Prompt] = []
        shape, filled, skipped = None, [0] * n, 0
        for _, prompt in self._queue:
            if skipped >= SCAN:
                break
            skipped += 1
            base = self._prompts.get(prompt.base) if prompt.base else None
            if base is not None and base.logits is None:
                continue
            if prompt.shard < 0:
                started = self._start(prompt, room)
                if started is None:
                    continue
                if not started:
                    break
            wanted = (cfg.piece(self._next_piece(prompt)), self.engine.width(prompt.done))
            shape = shape or wanted
            if wanted == shape and filled[prompt.shard] < cfg.rows(wanted[0], n):
                prompt.row = filled[prompt.shard]
                filled[prompt.shard] += 1
                batch.append(prompt)
                skipped -= 1
                if sum(filled) == cfg.rows(wanted[0], n) * n:
                    break
        if shape is None:
            return False
        self._prefill(batch, *shape)
        return True

    def _next_piece(self, prompt: Prompt) -> int:
        """New tokens of a prompt in its next piece: at most up to the next multiple of `prefill_chunk`."""
        chunk = self.cfg.prefill_chunk
        return min(len(prompt.tokens) - prompt.done, chunk - prompt.done % chunk)

    def _start(self, prompt: Prompt, room: list[int]) -> bool | None:
        """Give a prompt its pages, those in the cache first. None: not on its shard now; False: no pages anywhere."""
        size = self.cfg.page_size
        found = [cache.find(prompt.data, len(prompt.tokens) - 1) for cache in self._caches]
        longest = max(f.length for f in found)
        open_shards = [s for s, r in enumerate(room) if r > 0 or not prompt.members]
        if longest and self.cfg.prefix_match == "turns":
            open_shards = [s for s in open_shards if found[s].length == longest]
        if not open_shards:
            return None if longest and any(r > 0 for r in room) else False
        for shard in sorted(open_shards, key=lambda s: (-found[s].length, -room[s])):
            cache, at = self._caches[shard], found[shard]
            whole = at.length // size
            locked = at.nodes if at.tail is None else [*at.nodes, at.tail]
            cache.lock(locked)
            pages = self._take(shard, -(-len(prompt.tokens) // size) - whole)
            if pages is None:
                cache.unlock(locked)
                continue
            prompt.shard, prompt.nodes, prompt.tail, prompt.pages = shard, at.nodes, at.tail, pages
            prompt.reused = prompt.done = at.length
            self._started[prompt.data] = prompt
            room[shard] -= len(prompt.members)
            return True
        return False

    def _take(self, shard: int, num_pages: int) -> list[int] | None:
        """Pages for something new, if one for each running sequence is left."""
        cache = self._caches[shard]
        running = self.cfg.slots // len(self._caches) - len(self._free_slots[shard])
        return cache.take(num_pages) if cache.num_available >= num_pages + running else None

    def _prefill(self, batch: list[Prompt], piece: int, read: int) -> None:
        start = time.perf_counter()
        cfg, n = self.cfg, self.engine.num_shards
        rows = cfg.rows(piece, n)
        pieces = Pieces.empty(rows * n, piece, cfg.pages_per_sequence)
        for prompt in batch:
            row = prompt.shard * rows + prompt.row
            count = self._next_piece(prompt)
            pieces.tokens[row, :count] = prompt.tokens[prompt.done : prompt.done + count]
            pieces.start[row], pieces.count[row] = prompt.done, count
            pages = [*(node.page for node in prompt.nodes), *prompt.pages]
            pieces.table[row, : len(pages)] = pages
            if prompt.tail is not None:
                pieces.copy_from[row], pieces.copy_to[row] = prompt.tail.page, prompt.pages[0]
            self.stats.prefill_tok += count
        self._state, logits = self.engine.prefill(self.params, self._state, pieces, read=read)
        for prompt in batch:
            if prompt.tail is not None:
                self._caches[prompt.shard].unlock([prompt.tail])
                prompt.tail = None
            prompt.done += int(pieces.count[prompt.shard * rows + prompt.row])
            if prompt.done == len(prompt.tokens):
                self._prefilled(prompt, logits)
        self.stats.prefills += 1
        self.stats.prefill_s += time.perf_counter() - start

    def _prefilled(self, prompt: Prompt, logits: jax.Array) -> None:
        """All of a prompt is in the cache: from here its pages are shared."""
        size, cache = self.cfg.page_size, self._caches[prompt.shard]
        new = cache.keep(prompt.nodes, _after(prompt.data, len(prompt.nodes) * size), prompt.pages)
        prompt.nodes, prompt.pages = [*prompt.nodes, *new], []
        if len(prompt.tokens) % size:
            prompt.tail = prompt.nodes.pop()
        self._queue.remove((prompt.rank, prompt))
        prompt.logits = logits
        self._ready.append(prompt)
        if not prompt.members:
            self._forget(prompt)

    # ---- slots

    def _insert_ready(self) -> None:
        """Put sequences whose prompts are prefilled into free slots and draw their first tokens."""
        by_logits: dict[int, tuple[jax.Array, Inserts, list[Request]]] = {}
        for prompt in list(self._ready):
            while prompt.members and self._free_slots[prompt.shard]:
                request = prompt.members[0]
                whole = len(prompt.nodes)
                last = min(request.length + self.cfg.steps_per_dispatch, self._most_cached(request))
                needed = max(-(-last // self.cfg.page_size) - whole, int(prompt.tail is not None))
                pages = self._take(prompt.shard, needed)
                if pages is None:
                    break
                prompt.members.popleft()
                _, inserts, requests = by_logits.setdefault(
                    id(prompt.logits), (prompt.logits, Inserts.empty(self.cfg.slots), [])
                )
                self._place(request, prompt, pages, inserts)
                requests.append(request)
        for logits, inserts, requests in by_logits.values():
            truncate, top = self._law(requests)
            self._state, first = self.engine.insert(self._state, logits, inserts, truncate=truncate, top=top)
            self._fresh.append((requests, first))
        for prompt in [p for p in self._ready if not p.members]:  # only now: the inserts copy from their last pages
            self._forget(prompt)

    def _place(self, request: Request, prompt: Prompt, pages: list[int], inserts: Inserts) -> None:
        slot = self._free_slots[prompt.shard].pop()
        cache = self._caches[prompt.shard]
        cache.lock(prompt.nodes)
        request.prompt, request.slot, request.shard, request.epoch = None, slot, prompt.shard, cache.epoch
        request.nodes, request.pages = list(prompt.nodes), pages
        request.in_cache = len(prompt.tokens)
        self.stats.reused_tok += prompt.reused
        if not request.started_s:
            request.cached_tok = prompt.reused
        prompt.reused = len(prompt.tokens)
        self._running[slot] = request
        self._table[slot] = -1
        self._table[slot, : len(request.nodes) + len(pages)] = [*(n.page for n in request.nodes), *pages]
        params = request.params
        inserts.row[slot] = prompt.row
        if prompt.tail is not None:
            inserts.copy_from[slot], inserts.copy_to[slot] = prompt.tail.page, pages[0]
        inserts.length[slot] = len(prompt.tokens)
        inserts.max_tokens[slot] = self._most_cached(request) + 1 - request.length
        inserts.law.temperature[slot] = params.temperature
        inserts.law.top_k[slot], inserts.law.top_p[slot], inserts.law.min_p[slot] = (
            params.top_k,
            params.top_p,
            params.min_p,
        )
        inserts.address[slot, : len(request.address)] = request.address
        inserts.stop[slot, : len(params.stop_ids)] = params.stop_ids

    def _most_cached(self, request: Request) -> int:
        """Tokens of a sequence that enter the cache if it runs to its end: all but the last."""
        return min(len(request.prompt_ids) + request.params.max_tokens, self.cfg.max_context) - 1

    def _grow(self) -> None:
        """Pages for the next dispatch, for the oldest first; whoever is youngest gives way."""
        size = self.cfg.page_size
        for request in sorted(self._running.values(), key=lambda r: r.rank):
            cache = self._caches[request.shard]
            while self._running.get(request.slot) is request:
                last = min(request.in_cache + self.cfg.steps_per_dispatch, self._most_cached(request))
                held = len(request.nodes) + len(request.pages)
                pages = cache.take(max(-(-last // size) - held, 0))
                if pages is not None:
                    self._table[request.slot, held : held + len(pages)] = pages
                    request.pages += pages
                    break
                self._reclaim(request.shard)

    def _reclaim(self, shard: int) -> None:
        """Make room on a shard: a prompt that waits lets go of its pages, else the youngest sequence does."""
        started = [p for p in self._started.values() if p.shard == shard]
        if started:
            self._unstart(max(started, key=lambda p: p.rank))
            return
        self._look_at(self._take_fresh())
        running = [r for r in self._running.values() if r.shard == shard]
        if running:
            self._preempt(max(running, key=lambda r: r.rank))

    def _preempt(self, request: Request, base: bytes | None = None) -> None:
        self.stats.preemptions += 1
        self._leave_slot(request)
        self._wait(request, base)

    def _recompute(self) -> None:
        """Everything that runs goes back to the queue; prompts that several share are prefilled first."""
        running = sorted(self._running.values(), key=lambda r: r.rank)
        counts = collections.Counter(r.prompt_ids.tobytes() for r in running)
        for request in running:
            data = request.prompt_ids.tobytes()
            shared = counts[data] > 1
            if shared and data not in self._prompts:
                prompt = self._prompts[data] = Prompt(request.prompt_ids, data, request.rank)
                bisect.insort(self._queue, (prompt.rank, prompt), key=_rank)
            self._leave_slot(request)
            self._wait(request, data if shared else None)

    def _unblock(self) -> None:
        """Nothing runs and nothing could be admitted: prompts hold the pages that others wait for."""
        first = min(self._prompts.values(), key=lambda p: p.rank)
        for prompt in list(self._started.values()):
            if prompt is not first:
                self._unstart(prompt)
        self._admit()
        if self._prompts and not self._running:
            raise SamplerError("requests are waiting but none can be admitted: this is a bug")

    # ---- decode

    def _dispatch(self) -> ResultTokens:
        start = time.perf_counter()
        n, each = self.engine.num_shards, self.cfg.slots // self.engine.num_shards
        busy = [[slot for slot in self._running if slot // each == shard] for shard in range(n)]
        rows = next(r for r in self.engine.row_counts if r >= max(map(len, busy)))
        slots = np.full(rows * n, -1, np.int32)
        for shard, mine in enumerate(busy):
            slots[shard * rows : shard * rows + len(mine)] = mine
        for row, slot in enumerate(slots.tolist()):
            if slot >= 0:
                self._running[slot].row = row
        longest = max(r.in_cache for r in self._running.values()) + self.cfg.steps_per_dispatch
        truncate, top = self._law(self._running.values())
        table = self._table[slots, : self.engine.width(longest)]
        local = np.where(slots >= 0, slots % each, -1).astype(np.int32)
        self._state, out = self.engine.generate(self.params, self._state, table, local, truncate=truncate, top=top)
        out = jax.device_get(out)
        self.stats.dispatches += 1
        self.stats.slot_steps += rows * n * self.cfg.steps_per_dispatch
        self.stats.busy_slot_steps += int(out.valid.sum())
        self.stats.generate_s += time.perf_counter() - start
        return out

    def _law(self, requests: Iterable[Request]) -> tuple[bool, bool]:
        """The kind of law that all of these can be drawn by."""
        params = [r.params for r in requests]
        return self.cfg.law(any(p.truncates for p in params), any(p.top_logprobs for p in params))

    def _take_fresh(self) -> list[tuple[list[Request], ResultTokens]]:
        fresh, self._fresh = self._fresh, []
        return fresh

    def _look_at(self, fresh: list[tuple[list[Request], ResultTokens]], out: ResultTokens | None = None) -> None:
        """Hand out new tokens: first tokens, then those of a dispatch."""
        ended: dict[Request, FinishReason] = {}
        for requests, tokens in fresh:
            first = jax.device_get(tokens)
            for request in requests:
                self._collect(request, first, request.slot, ended)
        if out is not None:
            for request in self._running.values():
                if request not in ended:
                    request.in_cache += int(out.valid[request.row])
                    self._collect(request, out, request.row, ended)
        for request, reason in ended.items():
            self._leave_slot(request)
            self._deliver(request, reason)

    def _collect(self, request: Request, out: ResultTokens, row: int, ended: dict[Request, FinishReason]) -> None:
        n = int(out.valid[row])
        if not n:
            return
        asked = request.params.top_logprobs
        new = lambda x: np.asarray(x[row, :n])  # noqa: E731
        part = Sampled(
            new(out.tokens),
            new(out.sampler_logp),
            new(out.model_logp),
            np.full(n, self.version, np.int32),
            new(out.top_ids)[:, :asked],
            new(out.top_sampler_logp)[:, :asked],
            new(out.top_model_logp)[:, :asked],
            new(out.experts),
        )
        kept = self._until_stop_text(request, part.tokens)
        if kept is not None:
            part = part[:kept]
        if not request.started_s:
            request.started_s = time.perf_counter()
        request.parts.append(part)
        request.num_sampled += len(part)
        self.stats.sampled_tok += len(part)
        if request.on_tokens:
            request.on_tokens(part)
        reason = "stop" if kept is not None else self._reason(request)
        if reason:
            ended[request] = reason

    def _reason(self, request: Request) -> FinishReason | None:
        """Why a request has ended, if it has."""
        if request.parts and len(request.parts[-1]) and request.parts[-1].tokens[-1] in request.params.stop_ids:
            return "stop"
        if request.num_sampled >= request.params.max_tokens:
            return "length"
        return "context" if request.length >= self.cfg.max_context else None

    def _until_stop_text(self, request: Request, new: np.ndarray) -> int | None:
        """How many of the new tokens belong to the answer if one of its stop texts is complete, else None."""
        if not request.params.stop:
            return None
        if request.text is None:
            assert self._vocabulary is not None
            request.text = TextStream(self._vocabulary.decoder(request.prompt_ids), request.params.stop)
            for part in request.parts:
                request.text.add(part.tokens, last=False)
        for n, token in enumerate(new.tolist(), 1):
            request.text.add([token], last=False)
            if request.text.stopped:
                return n
        return None

    def _leave_slot(self, request: Request) -> None:
        """Free the slot; what its pages hold stays in the cache."""
        cache = self._caches[request.shard]
        del self._running[request.slot]
        self._free_slots[request.shard].append(request.slot)
        size, nodes, pages = self.cfg.page_size, request.nodes, request.pages
        if request.epoch == cache.epoch:
            known = min(request.in_cache, request.length - 1)
            data = _after(request.stream()[:known].tobytes(), len(nodes) * size)
            used = -(-len(data) // (4 * size))
            cache.release(pages[used:])
            nodes = [*nodes, *cache.keep(nodes, data, pages[:used])]
        else:
            cache.release(pages)
        cache.unlock(nodes)
        request.slot, request.nodes, request.pages = -1, [], []

    def _deliver(self, request: Request, reason: FinishReason) -> None:
        self.stats.finished += 1
        request.deliver(request, reason)


def _rank(entry: tuple[tuple[int, int], Prompt]) -> tuple[int, int]:
    return entry[0]


def _after(data: bytes, tokens: int) -> bytes:
    return data[tokens * 4 :]
