"""The scheduler: sequences in, tokens out, slots kept full. Host logic of one thread; no clock decides a token.

    add -> prompt queue -> prefill (in chunks) -> ready -> slot -> decode ... -> deliver
              ^                                              |
              +------------- preempted: out of pages, new weights

`PromptQueue` decides which prompts are prefilled when; this module manages the slots. A sequence takes pages as it
grows. When no page is left, the youngest sequence gives up its pages and waits; it resumes later from its tokens. The
tokens of a sequence do not depend on any of this.
"""

from __future__ import annotations

import collections
import functools
import itertools
import time
from collections.abc import Callable, Iterable, Sequence

import jax
import numpy as np

from rolljax.errors import SamplerError
from rolljax.model.vocabulary import TextStream, Vocabulary
from rolljax.sampler.arrays import Inserts, PrefillChunks, ResultTokens
from rolljax.sampler.drafts import CONTEXT, DraftIndex, Drafts, context
from rolljax.sampler.engine import EngineWorker
from rolljax.sampler.pages import TOKEN_BYTES
from rolljax.sampler.prompt_queue import (
    Capacity,
    FreshTokens,
    PromptQueue,
    QueuedPrompt,
    Request,
    SamplerLoad,
    SamplerStats,
)
from rolljax.sampler.rows import BLOCK, arrange
from rolljax.types import FinishReason

INDEX_EVERY = 64
"""New tokens of a running request that enter the index of drafts together."""
MOST_FRESH = 32
"""Dispatches whose results a running request may keep in memory, before it copies its own tokens."""
FirstTokens = list[tuple[list[Request], ResultTokens]]
"""First tokens sampled by inserts: requests, and the device's results of all slots."""


class Pace:
    """Measures what a step that checks guesses costs. It decides whether to guess, and so no token."""

    def __init__(self) -> None:
        self._seconds: dict[bool, float] = {}
        """Recent seconds of a decode step, and of a step that checks guesses."""
        self._seen: set[tuple[object, ...]] = set()
        """Programs that have run: the first time may compile."""

    def add(self, program: tuple[object, ...], step_s: float) -> None:
        """Note the seconds of a step. program: whether it checks guesses, and what else distinguishes programs."""
        if program not in self._seen:
            self._seen.add(program)
            return
        checks = bool(program[0])
        before = self._seconds.get(checks, step_s)
        self._seconds[checks] = before + 0.2 * (step_s - before)
        if not checks and True in self._seconds:  # it is tried again in the end: fewer rows may have made it cheaper
            self._seconds[True] *= 0.995

    def cost(self) -> float:
        """Return the number of decode steps that take the time of a step that checks guesses; 2 as long as it is
        unknown."""
        return self._seconds[True] / self._seconds[False] if len(self._seconds) == 2 else 2.0


class Scheduler:
    """Continuous batching over an engine. Not thread-safe: only one thread may use it.

    Args:
      worker: with its weights set. version: their policy version.
      vocabulary: maps tokens to text; needed for stop texts.
    """

    def __init__(self, worker: EngineWorker, version: int, vocabulary: Vocabulary | None = None) -> None:
        self.worker, self.engine, self.cfg, self.version = worker, worker.engine, worker.engine.cfg, version
        self.stats = SamplerStats()
        self._vocabulary = vocabulary
        worker.init()
        self._capacity = Capacity(self.engine)
        self._queue = PromptQueue(worker, self._capacity, self.stats)
        self._running: dict[int, Request] = {}
        self._table = np.full((self.cfg.slots, self.cfg.pages_per_sequence), -1, np.int32)
        self._drafts = DraftIndex(self.cfg.speculate) if self.cfg.speculate else None
        self._pace = Pace()
        self._first_tokens: FirstTokens = []
        """First tokens that were sampled and not delivered yet."""
        self.compiles_when_needed = True
        """Whether programs that are not compiled yet may be used."""
        self.asleep = False
        """Whether weights and pages are freed; then requests wait."""
        self._salts: dict[int, int] = {}
        """`Request.salt` of the adapter in each slot."""
        self._order = 0
        self._held_until_s = time.perf_counter()  # `stats.held_s` is up to date up to here

    # ---- what the owner calls

    @property
    def busy(self) -> bool:
        """Return whether `step` has something to do."""
        return not self.asleep and bool(self._running or self._queue.prompts)

    def load(self) -> SamplerLoad:
        """Return a snapshot of the load. Thread-safe."""
        caches = self._capacity.caches
        return SamplerLoad(
            waiting=sum(len(p.members) for p in list(self._queue.prompts.values())),
            running=len(self._running),
            slots=self.cfg.slots,
            pages=sum(c.num_pages for c in caches),
            used_pages=sum(c.num_used for c in caches),
            cached_pages=sum(c.num_cached for c in caches),
            shared_pages=sum(c.num_shared for c in caches),
        )

    def add(self, request: Request) -> None:
        """Add a request; `request.parts` may hold tokens that it sampled before."""
        request.order = self._order
        self._order += 1
        self.stats.requests += 1
        self.stats.prompt_tok += len(request.prompt_ids)
        request.num_sampled = sum(len(p) for p in request.parts)
        request.salt = self._salts.get(request.adapter, 0)
        whole = min(len(request.prompt_ids) + request.params.max_tokens, self.cfg.max_context)
        request.most_cached = whole - 1
        reason = self._reason(request)
        if reason:
            self._deliver(request, reason)
        else:
            self._queue.wait(request)

    def abort(self, request: Request) -> None:
        """End a request with the tokens sampled so far; do nothing if it has already ended."""
        if request.prompt is not None:
            self._queue.leave(request)
        elif request.slot >= 0 and self._running.get(request.slot) is request:
            self._hand_out(self._take_first_tokens())
            if self._running.get(request.slot) is not request:
                return
            self._leave_slot(request)
        else:
            return
        self.stats.aborted += 1
        self.stats.aborted_tok += request.num_sampled
        self._deliver(request, "abort")

    def publish(self, set_weights: Callable[[], None], version: int) -> None:
        """Swap the weights, and wake up. Running requests continue; their next tokens have the new version.

        Args:
          set_weights: gives the worker the new weights, in place of those in use.
        """
        self._hand_out(self._take_first_tokens())
        set_weights()
        self.version = version
        if self.asleep:
            self.worker.init()
            self.asleep = False
            return
        if not self.cfg.reuse_stale:
            self._empty_caches()
        if self.cfg.on_publish == "recompute":
            self._recompute()

    def set_adapter(self, slot: int, set_weights: Callable[[], None]) -> None:
        """Put an adapter into a slot of the weights (`model.lora.SlottedAdapters`). No open request may use the slot.

        Args:
          set_weights: gives the worker the weights with that adapter.
        """
        set_weights()
        step = self.engine.model.num_ids
        salt = max(self._salts.values(), default=0) + step
        if salt + step > np.iinfo(np.int32).max:  # begin again; what older adapters left must not be found
            self._empty_caches()
            salt = next(s for s in range(step, salt, step) if s not in self._salts.values())
        self._salts[slot] = salt

    def sleep(self) -> None:
        """Free the memory of the weights and the KV pages until the next `publish`.

        All requests wait; running requests resume from their tokens afterwards.
        """
        if self.asleep:
            return
        self._hand_out(self._take_first_tokens())
        self._empty_caches()
        self._recompute()
        self.worker.sleep()
        self.asleep = True

    def _empty_caches(self) -> None:
        """Forget all cached keys and values except those of running requests."""
        for prompt in list(self._queue.started.values()):
            self._queue.release(prompt)
        for cache in self._capacity.caches:
            cache.clear()

    def step(self) -> None:
        """Admit the requests that fit, decode one dispatch, and deliver its results."""
        start = time.perf_counter()
        before = self.stats.prefill_s + self.stats.generate_s
        self._admit()
        if self._queue.prompts and not self._running:
            self._unblock()
        self._grow()
        first_tokens = self._take_first_tokens()
        out = self._dispatch() if self._running else None
        self._hand_out(first_tokens, out)
        self._count_held()
        spent = self.stats.prefill_s + self.stats.generate_s - before
        self.stats.host_s += time.perf_counter() - start - spent

    def open_requests(self) -> list[Request]:
        """Return all waiting and running requests."""
        return [*self._running.values(), *(r for p in self._queue.prompts.values() for r in p.members)]

    def warm_up(self, longest_prompt: int, multi_turn: bool) -> None:
        """Compile the programs for prompts up to this length, with or without turns that extend them.

        Other programs (longer prompts, truncated distributions, likely tokens for a single request, preemption) are
        compiled when first needed.
        """
        drawn = self.cfg.draw_variant(False, self.cfg.record_alternatives > 0)
        for program in self.programs(longest_prompt, multi_turn, (drawn,)):
            program()

    def programs(
        self, longest_prompt: int, multi_turn: bool, variants: Sequence[tuple[bool, bool]]
    ) -> Sequence[Callable[[], None]]:
        """Return calls that each compile one program by running it without effect. Call them in this order while
        nothing else runs.

        Args:
          variants: of sampling: whether to truncate, and whether to report likely tokens (see `sampling.draw`).
        """
        engine, cfg = self.engine, self.cfg
        sizes = cfg.chunk_sizes[: cfg.chunk_sizes.index(cfg.chunk_size(longest_prompt)) + 1]
        reads = (0, *engine.widths) if multi_turn else (0,)
        calls = [functools.partial(self._try_prefill, size, read) for size in sizes for read in reads]
        calls += [functools.partial(self._try_insert, sizes[0], *variant) for variant in variants]
        shared = engine.shared_widths if longest_prompt >= cfg.cascade_tok else ()
        every = itertools.product(engine.widths, engine.row_counts, (0, *shared))
        decodes = [(width, rows, pages) for width, rows, pages in every if not pages or rows % BLOCK == 0]
        calls += [functools.partial(self._try_generate, *shape, *v) for v in variants for shape in decodes]
        tables = [(width, rows) for width in engine.widths for rows in (engine.verify_rows if self._drafts else ())]
        return calls + [functools.partial(self._try_verify, *table, *v) for v in variants for table in tables]

    def _try_prefill(self, chunk_size: int, read: int) -> None:
        ticket = self.worker.prefill(self._no_chunks(chunk_size), read=read)
        self.worker.wait()
        self.worker.release([ticket])

    def _try_insert(self, chunk_size: int, truncate: bool, top: bool) -> None:
        ticket = self.worker.prefill(self._no_chunks(chunk_size), read=0)
        self.worker.insert(ticket, Inserts.empty(self.cfg.slots), truncate=truncate, top=top)
        self.worker.wait()
        self.worker.release([ticket])

    def _try_generate(self, width: int, rows: int, shared: int, truncate: bool, top: bool) -> None:
        idle = np.full(rows * self.engine.num_shards, -1, np.int32)
        blocks = np.full((len(idle) // BLOCK, shared), -1, np.int32) if shared else None
        self.worker.generate(self._table[idle, :width], idle, blocks, truncate=truncate, top=top)
        self.worker.wait()

    def _try_verify(self, width: int, rows: int, truncate: bool, top: bool) -> None:
        idle = np.full(rows * self.engine.num_shards, -1, np.int32)
        guesses = np.zeros((len(idle), self.cfg.speculate), np.int32), np.zeros(len(idle), np.int32)
        self.worker.verify(self._table[idle, :width], idle, *guesses, truncate=truncate, top=top)
        self.worker.wait()

    def _no_chunks(self, chunk_size: int) -> PrefillChunks:
        n = self.engine.num_shards
        return PrefillChunks.empty(self.cfg.prefill_rows(chunk_size, n) * n, chunk_size, self.cfg.pages_per_sequence)

    # ---- slots

    def _admit(self) -> None:
        """Fill slots; while something is decoding, with at most one prefill in between."""
        decoding = bool(self._running)
        self._insert_ready()
        while self._queue.prefill_some():
            self._insert_ready()
            if decoding:
                break

    def _insert_ready(self) -> None:
        """Put sequences whose prompts are prefilled into free slots and draw their first tokens."""
        by_ticket: dict[int, tuple[Inserts, list[Request]]] = {}
        for prompt in self._queue.ready:
            assert prompt.ticket is not None
            while prompt.members and self._capacity.free_slots[prompt.shard]:
                pages = self._pages_to_begin(prompt.members[0], prompt)
                if pages is None:
                    break
                request = prompt.members.popleft()
                if prompt.ticket not in by_ticket:
                    by_ticket[prompt.ticket] = Inserts.empty(self.cfg.slots), []
                inserts, requests = by_ticket[prompt.ticket]
                self._enter_slot(request, prompt, pages)
                self._fill_insert(inserts, request, prompt)
                requests.append(request)
        for ticket, (inserts, requests) in by_ticket.items():
            truncate, top = self._variant(requests)
            first = self.worker.insert(ticket, inserts, truncate=truncate, top=top)
            self._first_tokens.append((requests, first))
        for prompt in [p for p in self._queue.ready if not p.members]:  # only now: inserts copy from their last pages
            self._queue.forget(prompt)

    def _pages_to_begin(self, request: Request, prompt: QueuedPrompt) -> list[int] | None:
        """Return the pages for a request's first dispatch, without the full pages of its prompt; None if there are too
        few."""
        last = min(request.length + self.cfg.most_per_dispatch, request.most_cached)
        needed = max(-(-last // self.cfg.page_size) - len(prompt.nodes), int(prompt.tail is not None))
        return self._capacity.take_pages(prompt.shard, needed)

    def _enter_slot(self, request: Request, prompt: QueuedPrompt, pages: list[int]) -> None:
        """Give a request a slot and pages of its own, in which it continues from the prompt's pages."""
        self._count_held()
        slot = self._capacity.free_slots[prompt.shard].pop()
        cache = self._capacity.caches[prompt.shard]
        cache.lock(prompt.nodes)
        request.prompt, request.slot, request.shard, request.epoch = None, slot, prompt.shard, cache.epoch
        request.nodes, request.pages = list(prompt.nodes), pages
        request.in_cache = len(prompt.tokens)
        self.stats.reused_tok += prompt.reused
        if not request.started_s:
            request.cached_tok = prompt.reused
        if self._drafts:
            known, new = np.split(prompt.tokens, [prompt.reused])
            self._drafts.add(np.concatenate([context(known), new]))
        prompt.reused = len(prompt.tokens)
        self._running[slot] = request
        self._table[slot] = -1
        self._table[slot, : len(request.nodes) + len(pages)] = [*(n.page for n in request.nodes), *pages]

    def _fill_insert(self, inserts: Inserts, request: Request, prompt: QueuedPrompt) -> None:
        slot, params, distribution = request.slot, request.params, inserts.distribution
        inserts.row[slot] = prompt.row
        if prompt.tail is not None:
            inserts.copy_from[slot], inserts.copy_to[slot] = prompt.tail.page, request.pages[0]
        inserts.length[slot] = len(prompt.tokens)
        inserts.max_tokens[slot] = request.most_cached + 1 - request.length
        distribution.temperature[slot], distribution.top_k[slot] = params.temperature, params.top_k
        distribution.top_p[slot], distribution.min_p[slot] = params.top_p, params.min_p
        inserts.address[slot, : len(request.address)] = request.address
        inserts.stop[slot, : len(params.stop_ids)] = params.stop_ids
        inserts.adapter[slot] = request.adapter

    def _grow(self) -> None:
        """Give running requests pages for the next dispatch; without free pages oldest first, and evict the
        youngest."""
        size, most = self.cfg.page_size, self.cfg.most_per_dispatch
        wanted: dict[int, list[tuple[Request, int]]] = collections.defaultdict(list)
        for request in self._running.values():
            last = min(request.in_cache + most, request.most_cached)
            needed = -(-last // size) - len(request.nodes) - len(request.pages)
            if needed > 0:
                wanted[request.shard].append((request, needed))
        for shard, those in wanted.items():
            cache = self._capacity.caches[shard]
            pages = cache.take(sum(needed for _, needed in those))
            for request, needed in sorted(those, key=lambda x: x[0].queue_key) if pages is None else those:
                own = pages and [pages.pop() for _ in range(needed)]
                while not own and self._running.get(request.slot) is request:
                    own = cache.take(needed)
                    if own is None:
                        self._reclaim(shard)
                if own:
                    held = len(request.nodes) + len(request.pages)
                    self._table[request.slot, held : held + needed] = own
                    request.pages += own

    def _reclaim(self, shard: int) -> None:
        """Make room on a shard: release the pages of a waiting prompt, else those of the youngest sequence."""
        started = [p for p in self._queue.started.values() if p.shard == shard]
        if started:
            self._queue.release(max(started, key=lambda p: p.queue_key))
            return
        self._hand_out(self._take_first_tokens())
        running = [r for r in self._running.values() if r.shard == shard]
        if running:
            self._preempt(max(running, key=lambda r: r.queue_key))

    def _preempt(self, request: Request, base: bytes | None = None) -> None:
        self.stats.preemptions += 1
        self._leave_slot(request)
        self._queue.wait(request, base)

    def _recompute(self) -> None:
        """Move all running requests back to the queue; prompts shared by several requests are prefilled first."""
        running = sorted(self._running.values(), key=lambda r: r.queue_key)
        counts = collections.Counter(r.cache_key(r.prompt_ids) for r in running)
        for request in running:
            data = request.cache_key(request.prompt_ids)
            shared = counts[data] > 1
            if shared:
                self._queue.wait_without_member(request)
            self._leave_slot(request)
            self._queue.wait(request, data if shared else None)

    def _unblock(self) -> None:
        """Release started prompts if nothing runs and nothing could be admitted: they hold the pages that others wait
        for."""
        first = min(self._queue.prompts.values(), key=lambda p: p.queue_key)
        for prompt in list(self._queue.started.values()):
            if prompt is not first:
                self._queue.release(prompt)
        self._admit()
        if self._queue.prompts and not self._running:
            raise SamplerError("requests are waiting but none can be admitted: this is a bug")

    # ---- decode

    def _dispatch(self) -> ResultTokens:
        start = time.perf_counter()
        n, each = self.engine.num_shards, self._capacity.slots_per_shard
        busy = [[slot for slot in self._running if slot // each == shard] for shard in range(n)]
        most_running = max(map(len, busy))
        drafts = self._draft(most_running)
        row_counts = self.engine.verify_rows if drafts else self.engine.row_counts
        num_rows = next(r for r in row_counts if r >= most_running)
        cascade = not drafts and (self.compiles_when_needed or bool(self.engine.shared_widths))
        rows = arrange(self._running, busy, self._table, self.engine, num_rows, cascade=cascade)
        for row, slot in enumerate(rows.slot.tolist()):
            if slot >= 0:
                self._running[slot].row = row
        truncate, top = self._variant(self._running.values())
        local = np.where(rows.slot >= 0, rows.slot % each, -1).astype(np.int32)
        own = [r.row for r in self._running.values()]
        if drafts:
            tokens, count = np.zeros((len(local), self.cfg.speculate), np.int32), np.zeros(len(local), np.int32)
            tokens[own], count[own] = drafts.tokens, drafts.count
            started = self.worker.verify(rows.table, local, tokens, count, truncate=truncate, top=top)
        else:
            started = self.worker.generate(rows.table, local, rows.shared, truncate=truncate, top=top)
        prefilling = time.perf_counter()
        self.worker.wait_prefills()  # only now: the device goes on to the decode steps by itself
        decoding = time.perf_counter()
        out = jax.device_get(started)
        valid, most = np.asarray(out.valid), 1 if drafts else self.cfg.steps_per_dispatch
        steps, generate_s = min(int(valid.max()), most), time.perf_counter() - decoding + prefilling - start
        if self._drafts:
            self._pace.add((bool(drafts), *rows.table.shape, truncate, top), generate_s / max(steps, 1))
        self.stats.dispatches += 1
        self.stats.steps += steps
        self.stats.cascades += rows.shared is not None
        self.stats.slot_steps += len(local) * most
        self.stats.busy_slot_steps += int(np.minimum(valid, most).sum())
        if self._drafts and drafts:
            self.stats.drafted_tok += int(drafts.count.sum())
            self.stats.accepted_tok += self._drafts.learn(drafts, valid[own])
        self.stats.prefill_s += decoding - prefilling
        self.stats.generate_s += generate_s
        return out

    def _draft(self, most_running: int) -> Drafts | None:
        """Return guesses for all running requests; None if decode steps without guesses are better.

        most_running: running requests of the batch shard with the most.
        """
        if not self._drafts or most_running > self.engine.verify_rows[-1]:
            return None
        running = self._running.values()
        tails = [context(np.zeros(0, np.int32)) if r.recent is None else r.recent[-CONTEXT:] for r in running]
        room = [0 if r.recent is None else r.most_cached - r.in_cache - 1 for r in running]
        return self._drafts.propose(np.stack(tails), np.array(room), self._pace.cost())

    def _variant(self, requests: Iterable[Request]) -> tuple[bool, bool]:
        """Return the sampling program that serves all of these requests (`SamplerConfig.draw_variant`)."""
        params = [r.params for r in requests]
        return self.cfg.draw_variant(any(p.truncates for p in params), any(p.top_logprobs for p in params))

    def _take_first_tokens(self) -> FirstTokens:
        first_tokens, self._first_tokens = self._first_tokens, []
        return first_tokens

    def _hand_out(self, first_tokens: FirstTokens, out: ResultTokens | None = None) -> None:
        """Hand out new tokens: first tokens, then those of a dispatch."""
        ended: dict[Request, FinishReason] = {}
        for requests, tokens in first_tokens:
            first = jax.device_get(tokens)
            self._collect([(r, r.slot) for r in requests], first, ended, decoded=False)
        if out is not None:
            running = [r for r in self._running.values() if r not in ended] if ended else self._running.values()
            self._collect([(r, r.row) for r in running], out, ended, decoded=True)
        for request, reason in ended.items():
            self._leave_slot(request)
            self._deliver(request, reason)

    def _collect(
        self,
        rows: Sequence[tuple[Request, int]],
        out: ResultTokens,
        ended: dict[Request, FinishReason],
        *,
        decoded: bool,
    ) -> None:
        """Give requests the tokens in these rows of a dispatch's results; note the ones that have ended.

        decoded: whether decode steps sampled them; each of these steps puts a token into the cache.
        """
        counts, done = np.asarray(out.valid).tolist(), np.asarray(out.done).tolist()
        for request, row in rows:
            n = counts[row]
            if not n:
                continue
            if not request.started_s:
                request.started_s = time.perf_counter()
            request.fresh.append(FreshTokens(out, row, n, self.version))
            request.num_sampled += n
            if decoded:
                request.in_cache += n
            self.stats.sampled_tok += n
            reads = bool(request.params.stop or request.on_tokens or self._drafts)
            if not (reads or done[row] or len(request.fresh) == MOST_FRESH):
                continue
            request.gather()
            if reason := (self._read(request) if reads else self._reason(request)):
                ended[request] = reason

    def _read(self, request: Request) -> FinishReason | None:
        """Show the newest part of a request to all who read it as it comes; return why the request has ended."""
        part = request.parts[-1]
        kept = self._until_stop_text(request, part.tokens)
        if kept is not None:
            request.num_sampled -= len(part) - kept
            self.stats.sampled_tok -= len(part) - kept
            part = request.parts[-1] = part[:kept]
        if self._drafts:
            before = context(request.stream()[: -len(part)]) if request.recent is None else request.recent
            request.recent = np.concatenate([before, part.tokens])
            if len(request.recent) >= CONTEXT + INDEX_EVERY:
                self._drafts.add(request.recent)
                request.recent = request.recent[-CONTEXT:]
        if request.on_tokens:
            request.on_tokens(part)
        return "stop" if kept is not None else self._reason(request)

    def _reason(self, request: Request) -> FinishReason | None:
        """Return the reason why a request has ended; None if it runs."""
        if request.parts and len(request.parts[-1]) and request.parts[-1].tokens[-1] in request.params.stop_ids:
            return "stop"
        if request.num_sampled >= request.params.max_tokens:
            return "length"
        return "context" if request.length >= self.cfg.max_context else None

    def _until_stop_text(self, request: Request, new: np.ndarray) -> int | None:
        """Return the number of new tokens that belong to the answer if one of its stop texts is complete, else None."""
        if not request.params.stop:
            return None
        if request.text is None:
            assert self._vocabulary is not None
            request.text = TextStream(self._vocabulary.decoder(request.prompt_ids), request.params.stop)
            for part in request.parts[:-1]:
                request.text.add(part.tokens, last=False)
        for n, token in enumerate(new.tolist(), 1):
            request.text.add([token], last=False)
            if request.text.stopped:
                return n
        return None

    def _leave_slot(self, request: Request) -> None:
        """Free the slot. The contents of its pages stay in the cache."""
        self._count_held()
        cache = self._capacity.caches[request.shard]
        del self._running[request.slot]
        self._capacity.free_slots[request.shard].append(request.slot)
        if self._drafts and request.recent is not None:
            self._drafts.add(request.recent)
            request.recent = None
        size, nodes, pages = self.cfg.page_size, request.nodes, request.pages
        if request.epoch == cache.epoch:
            known = min(request.in_cache, request.length - 1)
            data = request.cache_key(request.stream()[:known])[len(nodes) * size * TOKEN_BYTES :]
            used = -(-len(data) // (TOKEN_BYTES * size))
            cache.release(pages[used:])
            nodes = [*nodes, *cache.keep(nodes, data, pages[:used])]
        else:
            cache.release(pages)
        cache.unlock(nodes)
        request.slot, request.nodes, request.pages = -1, [], []

    def _count_held(self) -> None:
        """Count the time since this was called last for every slot that is taken; before that changes."""
        now = time.perf_counter()
        self.stats.held_s += len(self._running) * (now - self._held_until_s)
        self._held_until_s = now

    def _deliver(self, request: Request, reason: FinishReason) -> None:
        request.gather()
        self.stats.finished += 1
        request.deliver(request, reason)
