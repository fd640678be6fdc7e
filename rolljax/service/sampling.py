"""Samples for sampling sessions: each session's weights in a slot of the one sampler, requests of all side by side."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import hashlib
from collections.abc import AsyncIterator

import jax
import numpy as np
from tinker import types

from rolljax.errors import RolljaxError
from rolljax.model.decoder import Params
from rolljax.model.lora import LoraSlots, SlottedAdapters
from rolljax.sampler.arrays import MAX_STOP_IDS
from rolljax.sampler.client import Sampler
from rolljax.sampler.sampling import MAX_TOP_LOGPROBS
from rolljax.service.store import CheckpointInfo, SamplerRecord, ServiceStore
from rolljax.service.wire import Limits, RequestError, prompt_tokens, sample_result
from rolljax.types import Completion, SamplingParams

MAX_SAMPLES = 1024
"""Most samples of one request."""
KEPT_RESULTS, KEPT_BYTES = 4096, 256 * 2**20
"""Results that are kept for clients that ask again: most of them, and most of their bytes."""
STREAM = 1
"""First integer of the address of a sample's randomness, before the seed."""


class AdapterPlaces:
    """Which weights are in which slot of the sampler. Of one event loop."""

    def __init__(self, sampler: Sampler, slots: LoraSlots, store: ServiceStore) -> None:
        self._sampler, self._slots, self._store = sampler, slots, store
        self._place: collections.OrderedDict[tuple[str, float], int] = collections.OrderedDict()
        """Slots by address and time of the checkpoint, least recently used first."""
        self._users: collections.Counter[int] = collections.Counter()
        self._changed = asyncio.Condition()
        put = lambda adapters, scales, slot, part, scale: (slots.put(adapters, slot, part), scales.at[slot].set(scale))  # noqa: E731
        self._put = jax.jit(put, donate_argnums=(0, 1))

    @contextlib.asynccontextmanager
    async def slot(self, path: str) -> AsyncIterator[int]:
        """Hold a slot with the weights of an address; -1, the base model, for none.

        Raises:
          RequestError: there is no such checkpoint.
        """
        if not path:
            yield -1
            return
        slot = await self._enter(path)
        try:
            yield slot
        finally:
            self._users[slot] -= 1
            async with self._changed:
                self._changed.notify_all()

    async def _enter(self, path: str) -> int:
        info = await asyncio.to_thread(self._store.find, path)
        if info is None:
            raise RequestError(f"model_path: there is no checkpoint {path}: it was removed, or has expired", 404)
        key = (info.path, info.created_s)
        async with self._changed:
            while key not in self._place and (slot := self._free_slot()) is None:
                await self._changed.wait()
            if key not in self._place:
                assert slot is not None
                for other in [k for k, held in self._place.items() if held == slot]:
                    del self._place[other]
                await self._load(slot, info)
                self._place[key] = slot
            self._place.move_to_end(key)
            slot = self._place[key]
            self._users[slot] += 1
            return slot

    def _free_slot(self) -> int | None:
        """Return an empty slot, or else the one whose weights have not been used for longest; None: all are in use."""
        empty = set(range(self._slots.num)) - set(self._place.values())
        idle = [slot for slot in self._place.values() if not self._users[slot]]
        return min(empty) if empty else next(iter(idle), None)

    async def _load(self, slot: int, info: CheckpointInfo) -> None:
        state = await asyncio.to_thread(self._store.read_checkpoint, info)
        adapters = self._slots.padded(state.adapters)

        def changed(params: Params) -> Params:
            assert isinstance(params, SlottedAdapters)
            wide, scales = self._put(params.adapters, params.scales, slot, adapters, np.float32(state.scale))
            return dataclasses.replace(params, adapters=wide, scales=scales)

        await self._sampler.set_adapter(slot, changed)


class Samples:
    """The requests for samples, and their results. A request of a known id is not sampled again."""

    def __init__(
        self, sampler: Sampler, places: AdapterPlaces, limits: Limits, stop_ids: tuple[int, ...], max_open: int
    ) -> None:
        self._sampler, self._places, self._limits, self._stop_ids = sampler, places, limits, stop_ids
        self._max_open = max_open
        self._tasks: collections.OrderedDict[str, asyncio.Task[bytes]] = collections.OrderedDict()
        self._num_open = self._num_bytes = 0

    def submit(self, record: SamplerRecord, request: types.SampleRequest) -> str:
        """Start a request; return its id.

        Raises:
          RequestError: the request is malformed, or too many are open (429).
        """
        if request.seq_id is None or request.seq_id < 0:
            raise RequestError("seq_id: is missing")
        name = f"{record.id}:{request.seq_id}"
        if name in self._tasks:
            return name
        if self._num_open >= self._max_open:
            raise RequestError(f"{self._max_open} requests for samples are open: try again when some have ended", 429)
        prompt, params = self._read(request)
        task = asyncio.ensure_future(self._sample(record, request, name, prompt, params))
        task.add_done_callback(self._keep)
        self._tasks[name] = task
        self._num_open += 1
        return name

    def find(self, name: str) -> asyncio.Task[bytes] | None:
        """Return the request of an id, under way or done; None: it is not known (any more)."""
        return self._tasks.get(name)

    def cancel(self, name: str) -> None:
        """End a request whose client has given up; a result that is there stays."""
        task = self._tasks.get(name)
        if task is not None and not task.done():
            del self._tasks[name]
            task.cancel()

    async def close(self) -> None:
        """End all requests."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _keep(self, done: asyncio.Task[bytes]) -> None:
        """Count a request that has ended, and forget the oldest results while there are too many."""
        self._num_open -= 1
        if not done.cancelled() and done.exception() is None:
            self._num_bytes += len(done.result())
        while len(self._tasks) > KEPT_RESULTS or self._num_bytes > KEPT_BYTES:
            name = next((name for name, task in self._tasks.items() if task.done() and task is not done), None)
            if name is None:
                return
            task = self._tasks.pop(name)
            if not task.cancelled() and task.exception() is None:
                self._num_bytes -= len(task.result())

    def _read(self, request: types.SampleRequest) -> tuple[np.ndarray, SamplingParams]:
        given = request.sampling_params
        prompt = prompt_tokens(request.prompt, self._limits.max_context - 1, self._limits)
        for name, value, most in (
            ("num_samples", request.num_samples, MAX_SAMPLES),
            ("topk_sample_logprobs", request.topk_sample_logprobs, min(MAX_TOP_LOGPROBS, self._limits.vocab_size)),
            ("topk_prompt_logprobs", request.topk_prompt_logprobs, min(MAX_TOP_LOGPROBS, self._limits.vocab_size)),
        ):
            if not (name == "num_samples") <= value <= most:
                raise RequestError(f"{name}: must be at most {most}, got {value}")
        for name in ("target_prompt_logprobs", "prompt_alt_tokens_k", "record_stability_info"):
            if getattr(request, name):
                raise RequestError(f"{name}: is not offered")
        room = self._limits.max_context - len(prompt)
        if given.max_tokens is not None and given.max_tokens < 1:
            raise RequestError(f"sampling_params.max_tokens: must be at least 1, got {given.max_tokens}")
        if not (given.temperature >= 0 and 0 < given.top_p <= 1 and given.top_k >= -1):
            raise RequestError("sampling_params: temperature from 0, top_p in (0, 1], top_k from 1 (-1: all)")
        stop_ids, stop = self._stops(given.stop)
        return prompt, SamplingParams(
            temperature=given.temperature,
            max_tokens=min(given.max_tokens or room, room),
            stop_ids=stop_ids,
            stop=stop,
            top_k=max(given.top_k, 0),
            top_p=given.top_p,
            top_logprobs=request.topk_sample_logprobs,
        )

    def _stops(self, given: object) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Return ids and texts that end an answer."""
        if given is None:
            return self._stop_ids, ()
        stops = [given] if isinstance(given, str) else list(given)  # type: ignore[call-overload]
        if len(stops) > MAX_STOP_IDS:
            raise RequestError(f"sampling_params.stop: at most {MAX_STOP_IDS}, got {len(stops)}")
        ids = tuple(stop for stop in stops if isinstance(stop, int))
        texts = tuple(stop for stop in stops if isinstance(stop, str))
        if not all(0 <= i < self._limits.vocab_size for i in ids) or not all(texts):
            raise RequestError("sampling_params.stop: ids must be the model's, and texts not empty")
        return ids, texts

    async def _sample(
        self,
        record: SamplerRecord,
        request: types.SampleRequest,
        name: str,
        prompt: np.ndarray,
        params: SamplingParams,
    ) -> bytes:
        seed = request.sampling_params.seed
        digest = hashlib.sha256((name if seed is None else f"seed {seed}").encode()).digest()
        high, low = (int.from_bytes(digest[i : i + 4], "little") >> 1 for i in (0, 4))
        async with self._places.slot(record.path) as slot:
            pending = [
                self._sampler.submit(prompt, params, (STREAM, high, low, i), adapter=slot)
                for i in range(request.num_samples)
            ]
            try:
                scored = await self._scored(request, prompt, slot)
                completions: list[Completion] = [await one.completion for one in pending]
            except (asyncio.CancelledError, RolljaxError):
                for one in pending:
                    one.abort()
                raise
        return sample_result(completions, request.topk_sample_logprobs, *scored)

    async def _scored(
        self, request: types.SampleRequest, prompt: np.ndarray, slot: int
    ) -> tuple[np.ndarray | None, tuple[np.ndarray, np.ndarray] | None]:
        top, last = request.topk_prompt_logprobs, request.prompt_logprobs_last_n
        if not request.prompt_logprobs and not top:
            return None, None
        if last is not None and not 1 <= last < len(prompt):
            raise RequestError(f"prompt_logprobs_last_n: must be 1 to {len(prompt) - 1}, got {last}")
        found = await self._sampler.score_top(prompt, adapter=slot, top=top)
        logp, top_logp = np.array(found.logp), np.array(found.top_logp)
        if last is not None:
            logp[:-last], top_logp[:-last] = np.nan, np.nan
        return (logp if request.prompt_logprobs else None), ((np.asarray(found.top_ids), top_logp) if top else None)
