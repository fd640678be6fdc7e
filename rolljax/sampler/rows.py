"""The rows of a decode dispatch: which slot is in which row, and which pages each row reads.

Requests that begin with the same pages, as the siblings of a group do, can read them once for all (cascade attention,
see `kv`). They are then rows of one block. The choice depends on the running requests alone, and changes no token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from rolljax.sampler.engine import Engine
from rolljax.sampler.prompt_queue import Request

BLOCK = 8
"""Rows of a block. With more, a group of 8 would leave rows empty; with fewer, its prompt would be read twice."""
LEAST_SAVED = 0.25
"""Least part of the keys that a dispatch reads which must be saved: blocks that are not full cost something."""


@dataclasses.dataclass(frozen=True)
class DecodeRows:
    """The rows of all batch shards, one shard after the other."""

    slot: np.ndarray
    """`[S]` slot of each row; -1: none."""
    table: np.ndarray
    """`[S, W]` pages of each row, without shared ones; -1: none."""
    shared: np.ndarray | None = None
    """`[S / BLOCK, W]` pages that all rows of a block begin with; None: no row has any."""


def arrange(
    running: Mapping[int, Request],
    busy: Sequence[Sequence[int]],
    table: np.ndarray,
    engine: Engine,
    num_rows: int,
    *,
    cascade: bool,
) -> DecodeRows:
    """Assign rows to the running requests.

    Args:
      running: by slot. busy: their slots on each batch shard. table: `[slots, W]`, pages of each slot.
      num_rows: of each batch shard. cascade: whether blocks may be made.
    """
    longest = max(r.in_cache for r in running.values()) + engine.cfg.most_per_dispatch
    if cascade and (found := _blocks(running, busy, table, engine, num_rows, longest)):
        return found
    slots = np.full((len(busy), num_rows), -1, np.int32)
    for own, those in zip(slots, busy, strict=True):
        own[: len(those)] = those
    return DecodeRows(slots.ravel(), table[slots.ravel(), : engine.width(longest)])


def _blocks(
    running: Mapping[int, Request],
    busy: Sequence[Sequence[int]],
    table: np.ndarray,
    engine: Engine,
    num_rows: int,
    longest: int,
) -> DecodeRows | None:
    """Return rows in blocks; None if too little would be saved. longest: tokens of a row after the dispatch."""
    cfg, size = engine.cfg, engine.cfg.page_size
    depth = -(-cfg.cascade_tok // size)
    if not engine.cascades or num_rows % BLOCK or all(len(r.nodes) < depth for r in running.values()):
        return None
    held = {slot: len(request.nodes) for slot, request in running.items()}  # full pages, never written again
    slots = np.full((len(busy), num_rows // BLOCK, BLOCK), -1, np.int32)
    pages = np.zeros(slots.shape[:2], np.int32)
    for shard, own in enumerate(busy):
        groups: dict[int, list[int]] = {}
        for slot in own:  # whoever shares this page shares all before it
            groups.setdefault(int(table[slot, depth - 1]) if held[slot] >= depth else -1, []).append(slot)
        blocks = [(key, those[i : i + BLOCK]) for key, those in groups.items() for i in range(0, len(those), BLOCK)]
        if len(blocks) > num_rows // BLOCK:
            return None
        for block, (key, those) in enumerate(blocks):
            slots[shard, block, : len(those)] = those
            if key >= 0:
                differ = (table[those] != table[those[0]]).any(axis=0)
                alike = int(differ.argmax()) if differ.any() else len(differ)
                pages[shard, block] = min(alike, *(held[slot] for slot in those))
    slot_S, skipped = slots.ravel(), np.repeat(pages.ravel(), BLOCK)
    lengths = np.array([running[s].in_cache if s >= 0 else 0 for s in slot_S.tolist()])
    longest_own = int((lengths - skipped * size).max()) + cfg.most_per_dispatch
    most_shared = int(pages.max()) * size
    if longest_own + most_shared / BLOCK > (1 - LEAST_SAVED) * longest:
        return None
    width = engine.shared_width(most_shared)
    shared = np.where(np.arange(width) < pages.reshape(-1, 1), table[slots[:, :, 0].ravel(), :width], -1)
    padded = np.pad(table[slot_S], ((0, 0), (0, table.shape[1])), constant_values=-1)
    columns = skipped[:, None] + np.arange(engine.width(longest_own))
    return DecodeRows(slot_S, np.take_along_axis(padded, columns, axis=1), shared)
