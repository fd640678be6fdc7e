"""The device programs under `JetStreamEngine`, made of those of `Engine`.

A prefix is the result of the engine's prefill of one prompt, in a separate pool, so that it does not touch the decode
state, which `generate` donates, and can be sent to another engine. Every slot has a fixed run of pages; `insert` copies
the prefix into them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from rolljax.model.decoder import Params
from rolljax.sampler.arrays import ADDRESS_LEN, MAX_STOP_IDS, DecodeState, Inserts, PrefillChunks, SamplingDistribution
from rolljax.sampler.engine import Engine
from rolljax.sampler.sampling import draw, fold_address

Prefix = Mapping[str, Any]
"""cache: pages of every layer `[L, W, ...]`. logits `[V]` after the last token. length: tokens in the cache.
address `[N, ADDRESS_LEN]`: of the noise of each sample."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ServedState:
    """The engine's decode state, and the last sampled token of each slot with its log-prob, `[S]` each."""

    core: DecodeState
    token: jax.Array
    logp: jax.Array
    valid: jax.Array
    """Whether `token` holds: 0 once the slot has stopped."""
    length: jax.Array
    """Tokens shown so far."""


class Programs:
    """Jitted prefill, first tokens, insert and decode step.

    Args:
      distribution: temperature, top_k, top_p and min_p of all requests. stop_ids: tokens that end an answer.
      first_from_prefill: whether the caller has seen a slot's first token when it is inserted.
    """

    def __init__(
        self,
        engine: Engine,
        distribution: tuple[float, int, float, float],
        stop_ids: Sequence[int],
        first_from_prefill: bool,
    ) -> None:
        self.engine, self.distribution, self.first_from_prefill = engine, distribution, first_from_prefill
        self.stop_ids = stop_ids
        _, top_k, top_p, min_p = distribution
        self.truncate = top_k > 0 or top_p < 1 or min_p > 0
        rows: Any = NamedSharding(engine.mesh, PartitionSpec(engine.batch_axes))
        shardings = ServedState(engine.state_shardings(), rows, rows, rows, rows)
        self.empty = jax.jit(self._empty, out_shardings=shardings)
        self.prefill = jax.jit(self._prefill, static_argnames="pages")
        self.first = jax.jit(self._first)
        self.insert = jax.jit(self._insert, donate_argnums=1, out_shardings=shardings)
        self.step = jax.jit(
            self._step, donate_argnums=1, static_argnames="width", out_shardings=(shardings, None, None)
        )
        self._copy_pages = engine._jit(self._copy_pages_local, donate=(), num_row_args=2)

    def _empty(self) -> ServedState:
        none, real = jnp.zeros(self.engine.cfg.slots, jnp.int32), jnp.zeros(self.engine.cfg.slots)
        return ServedState(self.engine.init_decode_state(), none, real, none, none)

    def _prefill(
        self,
        params: Params,
        old: jax.Array | None,
        tokens_T: jax.Array,
        start: jax.Array,
        count: jax.Array,
        *,
        pages: int,
    ) -> tuple[jax.Array, jax.Array]:
        """Prefill one chunk of one prompt into a pool of `pages` pages `[L, pages, ...]`, after the contents of
        `old`."""
        cfg = dataclasses.replace(
            self.engine.cfg, slots=1, max_context=pages * self.engine.cfg.page_size, pages=pages + 1
        )
        path: Any = dataclasses.replace(self.engine.path, num_pages=pages + 1)  # type: ignore[type-var]
        alone = Engine(self.engine.model, cfg, self.engine.mesh, (), path)
        state = alone.init_decode_state()
        pool = state.pool.reshape(-1, pages + 1, *state.pool.shape[1:])
        if old is not None:
            old = old[:, :pages]
            pool = pool.at[:, : old.shape[1]].set(old)
        chunk = PrefillChunks(
            tokens=tokens_T[None],
            start=start[None],
            count=count[None],
            table=jnp.arange(pages)[None],
            copy_from=jnp.array([-1]),
            copy_to=jnp.array([-1]),
            adapter=jnp.array([-1]),
        )
        state = dataclasses.replace(state, pool=pool.reshape(state.pool.shape))
        state, logits = alone.prefill(params, state, chunk, read=0 if old is None else pages)
        return state.pool.reshape(pool.shape)[:, :pages], logits[0]

    def _first(self, logits_V: jax.Array, length: jax.Array, address_NA: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Sample the first token of each sample, as `insert` will sample it again: `data [N, 3]` and log-probs."""
        rows = len(address_NA)
        logits, position = jnp.broadcast_to(logits_V, (rows, len(logits_V))), jnp.full(rows, length)
        new = draw(logits, self._distribution(rows), fold_address(address_NA), position, self.truncate, False)
        one = jnp.ones(rows, jnp.int32)
        return jnp.stack([new.token, one, one], axis=1), new.sampler_logp[:, None]

    def _copy_pages_local(self, cache: jax.Array, pool: jax.Array, is_slot_S: jax.Array) -> jax.Array:
        """Copy a prefix's pages to those of the slot that is marked, if it is one of this shard's."""
        L, W = cache.shape[:2]
        pages = jnp.argmax(is_slot_S) * self.engine.cfg.pages_per_sequence + jnp.arange(W)
        rows = (jnp.arange(L) * self.engine.pages_per_shard)[:, None] + pages
        return pool.at[jnp.where(jnp.any(is_slot_S), rows, len(pool))].set(cache, mode="drop")

    def _insert(self, prefix: Prefix, state: ServedState, slot: jax.Array, sample: jax.Array) -> ServedState:
        """Sample `sample` of the prefix goes into a slot."""
        cfg, S = self.engine.cfg, self.engine.cfg.slots
        is_slot = jnp.arange(S) == slot
        stop = [*self.stop_ids, *[-1] * MAX_STOP_IDS][:MAX_STOP_IDS]
        new = Inserts(
            row=jnp.where(is_slot, 0, -1),
            copy_from=jnp.full(S, -1),
            copy_to=jnp.full(S, -1),
            length=jnp.full(S, prefix["length"]),
            max_tokens=jnp.full(S, cfg.max_context - prefix["length"]),
            distribution=self._distribution(S),
            address=jnp.broadcast_to(prefix["address"][sample], (S, ADDRESS_LEN)),
            stop=jnp.broadcast_to(jnp.array(stop, jnp.int32), (S, MAX_STOP_IDS)),
            adapter=jnp.full(S, -1),
        )
        core = dataclasses.replace(state.core, pool=self._copy_pages(prefix["cache"], state.core.pool, is_slot))
        logits = jnp.broadcast_to(prefix["logits"], (self.engine.num_shards, len(prefix["logits"])))
        core, first = self.engine.insert(core, logits, new, truncate=self.truncate)
        return ServedState(
            core=core,
            token=jnp.where(is_slot, first.tokens[:, 0], state.token),
            logp=jnp.where(is_slot, first.sampler_logp[:, 0], state.logp),
            valid=jnp.where(is_slot, 1, state.valid),
            length=jnp.where(is_slot, int(self.first_from_prefill), state.length),
        )

    def _step(
        self, params: Params, state: ServedState, active_S: np.ndarray, *, width: int
    ) -> tuple[ServedState, jax.Array, jax.Array]:
        """Run one decode step; return `data [S, 3]` (token, validity, length) and log-probs `[S, 1]`."""
        cfg = self.engine.cfg
        local_S = jnp.arange(cfg.slots) % (cfg.slots // self.engine.num_shards)
        table: Any = local_S[:, None] * cfg.pages_per_sequence + jnp.arange(width)
        slots: Any = jnp.where(active_S, local_S, -1)
        core, new = self.engine.generate(params, state.core, table, slots, truncate=self.truncate)
        now = ServedState(core, new.tokens[:, 0], new.sampler_logp[:, 0], new.valid, state.length + 1)
        shown = self._shown(state, now)
        token = jnp.where(shown.valid > 0, shown.token, min(self.stop_ids, default=0))
        return now, jnp.stack([token, shown.valid, now.length], axis=1), shown.logp[:, None]

    def _shown(self, before: ServedState, after: ServedState) -> ServedState:
        """Return the state whose tokens a decode step returns: JetStream 0.2.2 has not seen the tokens sampled before
        the step."""
        return after if self.first_from_prefill else before

    def _distribution(self, rows: int) -> SamplingDistribution:
        temperature, top_k, top_p, min_p = self.distribution
        full = lambda x, dtype: jnp.full(rows, x, dtype)  # noqa: E731
        return SamplingDistribution(
            full(temperature, jnp.float32), full(top_k, jnp.int32), full(top_p, jnp.float32), full(min_p, jnp.float32)
        )
