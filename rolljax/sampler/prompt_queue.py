"""Requests, the queue of waiting prompts, and the choice of the next prefill. Host logic of one thread.

    wait -> queue -> started: it has pages -> prefilled chunk by chunk -> ready for slots

Equal streams that wait together are one `QueuedPrompt`: prefilled once, its pages shared, its logits drawn from by all
of its members.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from rolljax.model.vocabulary import TextStream
from rolljax.sampler.arrays import PrefillChunks, ResultTokens
from rolljax.sampler.engine import Engine, EngineWorker
from rolljax.sampler.pages import TOKEN_BYTES, Node, PageCache
from rolljax.types import FinishReason, Sampled, SamplingParams


class FreshTokens(NamedTuple):
    """The first `num` tokens in a row of a dispatch's results, which are on the host."""

    out: ResultTokens
    row: int
    num: int
    version: int


@dataclasses.dataclass(eq=False)
class Request:
    """A sequence to sample, and its progress."""

    prompt_ids: np.ndarray
    params: SamplingParams
    address: tuple[int, ...]
    priority: int
    deliver: Callable[[Request, FinishReason], None]
    """Called once at the end."""
    on_tokens: Callable[[Sampled], None] | None = None
    """Called with every new part."""
    fail: Callable[[Exception], None] = lambda error: None
    """Called instead of `deliver` when the scheduler stops. All run in the scheduler's thread."""
    adapter: int = -1
    """Slot of its adapter (`Scheduler.set_adapter`); -1: none."""
    salt: int = 0
    """Added to its tokens where they name keys and values: policies share none."""
    parts: list[Sampled] = dataclasses.field(default_factory=list)
    """What it has sampled, without `fresh`."""
    fresh: list[FreshTokens] = dataclasses.field(default_factory=list)
    """What it has sampled since, where dispatches left it (`gather`)."""
    order: int = -1
    submitted_s: float = 0.0
    started_s: float = 0.0
    cached_tok: int = 0
    num_sampled: int = 0
    text: TextStream | None = None
    """Its text up to a stop text, if it has stop texts."""
    prompt: QueuedPrompt | None = None
    """The queued prompt, while the request waits."""
    slot: int = -1
    shard: int = -1
    row: int = -1
    """Its row in the current dispatch."""
    in_cache: int = 0
    """Leading tokens of its stream whose keys and values are in its pages."""
    most_cached: int = 0
    """The same if it runs to its end: all tokens but the last."""
    recent: np.ndarray | None = None
    """Its last tokens, from `drafts.CONTEXT` before the first that is not in the index of drafts. None: the token that
    it sampled last is not known here yet."""
    epoch: int = -1
    """The epoch of the page cache when it got its slot."""
    nodes: list[Node] = dataclasses.field(default_factory=list)
    pages: list[int] = dataclasses.field(default_factory=list)

    @property
    def queue_key(self) -> tuple[int, int]:
        """The priority of the request: the lowest is served first."""
        return (self.priority, self.order)

    @property
    def length(self) -> int:
        """Tokens of the prompt and sampled so far."""
        return len(self.prompt_ids) + self.num_sampled

    def gather(self) -> None:
        """Turn `fresh` into a part."""
        if self.fresh:
            self.parts.append(gathered(self.fresh, self.params.top_logprobs))
            self.fresh = []

    def stream(self) -> np.ndarray:
        """Return the prompt and all tokens sampled so far."""
        self.gather()
        return np.concatenate([self.prompt_ids, *(p.tokens for p in self.parts)]).astype(np.int32, copy=False)

    def cache_key(self, tokens: np.ndarray) -> bytes:
        """Return the name of the keys and values of its policy for these tokens, `TOKEN_BYTES` for each."""
        return (tokens + np.int32(self.salt)).tobytes()


def gathered(fresh: Sequence[FreshTokens], top: int) -> Sampled:
    """Return the tokens of one request from several dispatches. top: likely tokens that it asked for."""

    def joined(name: str) -> np.ndarray:
        return np.concatenate([getattr(out, name)[row, :num] for out, row, num, _ in fresh])

    tokens = joined("tokens")
    ids, sampler_logp, model_logp = (
        joined(name)[:, :top] if top else np.zeros((len(tokens), 0), dtype) for name, dtype in _LIKELY
    )
    versions = [f.version for f in fresh]
    if versions[0] == versions[-1]:
        version = np.full(len(tokens), versions[0], np.int32)
    else:
        version = np.repeat(np.array(versions, np.int32), [f.num for f in fresh])
    logps = joined("sampler_logp"), joined("model_logp")
    return Sampled(tokens, *logps, version, ids, sampler_logp, model_logp, joined("experts"))


_LIKELY = (("top_ids", np.int32), ("top_sampler_logp", np.float32), ("top_model_logp", np.float32))


@dataclasses.dataclass(eq=False)
class QueuedPrompt:
    """A distinct stream that waits to be continued, by all of `members` (none: it only goes into the cache)."""

    tokens: np.ndarray
    data: bytes
    """`Request.cache_key` of the tokens."""
    queue_key: tuple[int, int]
    adapter: int = -1
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
    ticket: int | None = None
    """The ticket of the logits after its last token (`EngineWorker.prefill`), once it is prefilled."""
    row: int = -1
    """Its row in the prefill, within the batch shard."""

    @property
    def locked(self) -> list[Node]:
        """Nodes of the page cache that it holds."""
        return self.nodes if self.tail is None else [*self.nodes, self.tail]


@dataclasses.dataclass
class SamplerStats:
    """Totals since the start; differences of two of them describe a step."""

    requests: int = 0
    finished: int = 0
    aborted: int = 0
    aborted_tok: int = 0
    """Tokens sampled by aborted requests."""
    preemptions: int = 0
    sampled_tok: int = 0
    prompt_tok: int = 0
    prefill_tok: int = 0
    """Prompt tokens that were computed."""
    reused_tok: int = 0
    """Prompt tokens in the cache, or computed for a sibling."""
    prefills: int = 0
    dispatches: int = 0
    steps: int = 0
    """Decode steps, each one pass through the model."""
    slot_steps: int = 0
    """Rows times decode steps of all dispatches;."""
    busy_slot_steps: int = 0
    """The ones that sampled a token."""
    cascades: int = 0
    """Dispatches that read shared beginnings once (`SamplerConfig.cascade_tok`)."""
    drafted_tok: int = 0
    """Tokens that were guessed."""
    accepted_tok: int = 0
    """Guessed tokens that were sampled."""
    prefill_s: float = 0.0
    generate_s: float = 0.0
    host_s: float = 0.0
    held_s: float = 0.0
    """Seconds that requests had slots, summed over slots."""


@dataclasses.dataclass(frozen=True)
class SamplerLoad:
    """The current load."""

    waiting: int
    running: int
    slots: int
    pages: int
    used_pages: int
    """Held by a request;."""
    cached_pages: int
    """Kept for reuse."""
    shared_pages: int
    """Number of KV pages held by several requests."""


SCAN = 64
"""Number of queued prompts that may be passed over in the choice of one prefill."""


class Capacity:
    """The free slots and the KV pages of every batch shard."""

    def __init__(self, engine: Engine) -> None:
        cfg, n = engine.cfg, engine.num_shards
        self.slots_per_shard = each = cfg.slots // n
        self.caches = [
            PageCache(engine.pages_per_shard, cfg.page_size, cfg.prefix_match, cfg.prefill_chunk) for _ in range(n)
        ]
        self.free_slots = [list(range((s + 1) * each - 1, s * each - 1, -1)) for s in range(n)]

    def take_pages(self, shard: int, num_pages: int) -> list[int] | None:
        """Return pages for a new sequence, if at least one page per running sequence stays available; else None."""
        cache = self.caches[shard]
        running = self.slots_per_shard - len(self.free_slots[shard])
        return cache.take(num_pages) if cache.num_available >= num_pages + running else None


class PromptQueue:
    """The prompts that requests wait for, from `wait` until the last member of each has a slot.

    Attributes:
      prompts: all prompts, by `QueuedPrompt.data`. started: the prompts that hold pages.
      ready: the prefilled prompts, in the order in which they were prefilled.
    """

    def __init__(self, worker: EngineWorker, capacity: Capacity, stats: SamplerStats) -> None:
        self._worker, self._engine, self._capacity, self._stats = worker, worker.engine, capacity, stats
        self._cfg = worker.engine.cfg
        self.prompts: dict[bytes, QueuedPrompt] = {}
        self.started: dict[bytes, QueuedPrompt] = {}
        self.ready: list[QueuedPrompt] = []
        self._queue: list[tuple[tuple[int, int], QueuedPrompt]] = []
        """Prompts that are not prefilled yet, by their `queue_key`."""
        self._holders: collections.Counter[int] = collections.Counter()
        """Number of prompts that still need the logits of each ticket."""

    # ---- who waits

    def wait(self, request: Request, base: bytes | None = None) -> None:
        """Queue a request until its stream is prefilled; `base`: see `QueuedPrompt`."""
        stream = request.stream()
        data = request.cache_key(stream)
        prompt = self.prompts.get(data)
        if prompt is None:
            prompt = self._enqueue(QueuedPrompt(stream, data, request.queue_key, request.adapter, base=base))
        elif request.queue_key < prompt.queue_key and prompt.shard < 0:
            self._queue.remove((prompt.queue_key, prompt))
            prompt.queue_key = request.queue_key
            bisect.insort(self._queue, (prompt.queue_key, prompt), key=_queue_key)
        prompt.members.append(request)
        request.prompt = prompt

    def wait_without_member(self, request: Request) -> None:
        """Queue a request's prompt to be prefilled for the cache alone, unless it is queued already."""
        data = request.cache_key(request.prompt_ids)
        if data not in self.prompts:
            self._enqueue(QueuedPrompt(request.prompt_ids, data, request.queue_key, request.adapter))

    def leave(self, request: Request) -> None:
        """Remove a waiting request from the queue."""
        prompt = request.prompt
        assert prompt is not None
        prompt.members.remove(request)
        request.prompt = None
        if not prompt.members:
            self.forget(prompt)

    def forget(self, prompt: QueuedPrompt) -> None:
        """Remove a prompt that no request waits for any more."""
        if prompt.shard >= 0:
            self.release(prompt, requeue=False)
        else:
            self._queue.remove((prompt.queue_key, prompt))
        del self.prompts[prompt.data]

    def release(self, prompt: QueuedPrompt, requeue: bool = True) -> None:
        """Release the pages and logits of a started prompt. Computed keys and values stay in the cache."""
        cache = self._capacity.caches[prompt.shard]
        cache.unlock(prompt.locked)
        cache.release(prompt.pages)
        if prompt.ticket is None:
            self._queue.remove((prompt.queue_key, prompt))
        else:
            self.ready.remove(prompt)
            self._release_ticket(prompt.ticket)
        del self.started[prompt.data]
        prompt.shard, prompt.nodes, prompt.tail, prompt.pages = -1, [], None, []
        prompt.reused = prompt.done = 0
        prompt.ticket = None
        if requeue:
            bisect.insort(self._queue, (prompt.queue_key, prompt), key=_queue_key)

    def _enqueue(self, prompt: QueuedPrompt) -> QueuedPrompt:
        self.prompts[prompt.data] = prompt
        bisect.insort(self._queue, (prompt.queue_key, prompt), key=_queue_key)
        return prompt

    # ---- planning

    def prefill_some(self) -> bool:
        """Prefill the next chunks of waiting prompts that fit into one program; return False if there is nothing to
        do."""
        cfg, n = self._cfg, self._engine.num_shards
        room = [len(f) for f in self._capacity.free_slots]
        for prompt in self.started.values():
            room[prompt.shard] -= len(prompt.members)
        batch: list[QueuedPrompt] = []
        shape, filled, skipped = None, [0] * n, 0
        for _, prompt in self._queue:
            if skipped >= SCAN:
                break
            skipped += 1
            base = self.prompts.get(prompt.base) if prompt.base else None
            if base is not None and base.ticket is None:
                continue
            if prompt.shard < 0:
                started = self._start(prompt, room)
                if started is None:
                    continue
                if not started:
                    break
            wanted = (cfg.chunk_size(self._next_chunk_tok(prompt)), self._engine.width(prompt.done))
            shape = shape or wanted
            if wanted == shape and filled[prompt.shard] < cfg.prefill_rows(wanted[0], n):
                prompt.row = filled[prompt.shard]
                filled[prompt.shard] += 1
                batch.append(prompt)
                skipped -= 1
                if sum(filled) == cfg.prefill_rows(wanted[0], n) * n:
                    break
        if shape is None:
            return False
        self._prefill(batch, *shape)
        return True

    def _next_chunk_tok(self, prompt: QueuedPrompt) -> int:
        """Return the number of new tokens in a prompt's next chunk: at most up to the next multiple of
        `prefill_chunk`."""
        chunk = self._cfg.prefill_chunk
        return min(len(prompt.tokens) - prompt.done, chunk - prompt.done % chunk)

    def _start(self, prompt: QueuedPrompt, room: list[int]) -> bool | None:
        """Give a prompt its pages, those in the cache first. None: not on its shard now; False: no pages anywhere.

        room: of each batch shard, slots that no started prompt's members wait for.
        """
        size, caches = self._cfg.page_size, self._capacity.caches
        found = [cache.find(prompt.data, len(prompt.tokens) - 1) for cache in caches]
        longest = max(f.length for f in found)
        open_shards = [s for s, r in enumerate(room) if r > 0 or not prompt.members]
        if longest and self._cfg.prefix_match == "turns":
            open_shards = [s for s in open_shards if found[s].length == longest]
        if not open_shards:
            return None if longest and any(r > 0 for r in room) else False
        for shard in sorted(open_shards, key=lambda s: (-found[s].length, -room[s])):
            cache, cached = caches[shard], found[shard]
            full_pages = cached.length // size
            locked = cached.nodes if cached.tail is None else [*cached.nodes, cached.tail]
            cache.lock(locked)
            pages = self._capacity.take_pages(shard, -(-len(prompt.tokens) // size) - full_pages)
            if pages is None:
                cache.unlock(locked)
                continue
            prompt.shard, prompt.nodes, prompt.tail, prompt.pages = shard, cached.nodes, cached.tail, pages
            prompt.reused = prompt.done = cached.length
            self.started[prompt.data] = prompt
            room[shard] -= len(prompt.members)
            return True
        return False

    # ---- prefill

    def _prefill(self, batch: list[QueuedPrompt], chunk_size: int, read: int) -> None:
        start = time.perf_counter()
        rows = self._cfg.prefill_rows(chunk_size, self._engine.num_shards)
        chunks = self._chunks(batch, chunk_size, rows)
        ticket = self._worker.prefill(chunks, read=read)
        self._holders[ticket] = 1  # until every prompt of the batch has its own
        for prompt in batch:
            if prompt.tail is not None:
                self._capacity.caches[prompt.shard].unlock([prompt.tail])
                prompt.tail = None
            prompt.done += int(chunks.count[prompt.shard * rows + prompt.row])
            if prompt.done == len(prompt.tokens):
                self._finish(prompt, ticket)
        self._release_ticket(ticket)
        self._stats.prefills += 1
        self._stats.prefill_s += time.perf_counter() - start

    def _chunks(self, batch: list[QueuedPrompt], chunk_size: int, rows: int) -> PrefillChunks:
        """Return the next chunks of some prompts; rows: of each batch shard."""
        chunks = PrefillChunks.empty(rows * self._engine.num_shards, chunk_size, self._cfg.pages_per_sequence)
        for prompt in batch:
            row = prompt.shard * rows + prompt.row
            count = self._next_chunk_tok(prompt)
            chunks.tokens[row, :count] = prompt.tokens[prompt.done : prompt.done + count]
            chunks.start[row], chunks.count[row], chunks.adapter[row] = prompt.done, count, prompt.adapter
            pages = [*(node.page for node in prompt.nodes), *prompt.pages]
            chunks.table[row, : len(pages)] = pages
            if prompt.tail is not None:
                chunks.copy_from[row], chunks.copy_to[row] = prompt.tail.page, prompt.pages[0]
            self._stats.prefill_tok += count
        return chunks

    def _finish(self, prompt: QueuedPrompt, ticket: int) -> None:
        """Put a fully prefilled prompt into the cache: from here its pages are shared."""
        size, cache = self._cfg.page_size, self._capacity.caches[prompt.shard]
        new = cache.keep(prompt.nodes, prompt.data[len(prompt.nodes) * size * TOKEN_BYTES :], prompt.pages)
        prompt.nodes, prompt.pages = [*prompt.nodes, *new], []
        if len(prompt.tokens) % size:
            prompt.tail = prompt.nodes.pop()
        self._queue.remove((prompt.queue_key, prompt))
        prompt.ticket = ticket
        self._holders[ticket] += 1
        self.ready.append(prompt)
        if not prompt.members:
            self.forget(prompt)

    def _release_ticket(self, ticket: int) -> None:
        self._holders[ticket] -= 1
        if not self._holders[ticket]:
            del self._holders[ticket]
            self._worker.release([ticket])


def _queue_key(entry: tuple[tuple[int, int], QueuedPrompt]) -> tuple[int, int]:
    return entry[0]
