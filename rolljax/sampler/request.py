"""What the scheduler works with: requests, the prompts they wait for, and totals for those who look on."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable

import numpy as np

from rolljax.model.vocabulary import TextStream
from rolljax.sampler.pages import Node
from rolljax.types import FinishReason, Sampled, SamplingParams


@dataclasses.dataclass(eq=False)
class Request:
    """A sequence to sample, and where it stands.

    deliver: called once at the end. on_tokens: called with every new part. fail: called instead of `deliver` when the
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
    prompt: QueuedPrompt | None = None
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
    def queue_key(self) -> tuple[int, int]:
        """What requests are served by: the lowest first."""
        return (self.priority, self.order)

    @property
    def length(self) -> int:
        """Tokens of the prompt and sampled so far."""
        return len(self.prompt_ids) + self.num_sampled

    def stream(self) -> np.ndarray:
        """The prompt and everything sampled so far."""
        return np.concatenate([self.prompt_ids, *(p.tokens for p in self.parts)]).astype(np.int32, copy=False)


@dataclasses.dataclass(eq=False)
class QueuedPrompt:
    """A distinct stream that waits to be continued, by all of `members` (none: it only goes into the cache)."""

    tokens: np.ndarray
    data: bytes
    queue_key: tuple[int, int]
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
    """Of the logits after its last token (`EngineWorker.prefill`), once it is prefilled."""
    row: int = -1
    """Of the prefill, within the batch shard."""

    @property
    def locked(self) -> list[Node]:
        """Nodes of the page cache that it holds."""
        return self.nodes if self.tail is None else [*self.nodes, self.tail]


@dataclasses.dataclass
class SamplerStats:
    """Totals since the start; differences of two of them describe a step.

    prefill_tok: prompt tokens that were computed. reused_tok: prompt tokens in the cache, or computed for a sibling.
    slot_steps: rows times decode steps of all dispatches; busy_slot_steps: the ones that sampled a token.
    aborted_tok: tokens sampled by aborted requests. held_s: seconds that requests had slots, summed over slots.
    """

    requests: int = 0
    finished: int = 0
    aborted: int = 0
    aborted_tok: int = 0
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
    held_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class SamplerLoad:
    """The current load. used_pages: held by a request; shared_pages: by several; cached_pages: kept for reuse."""

    waiting: int
    running: int
    slots: int
    pages: int
    used_pages: int
    cached_pages: int
    shared_pages: int
