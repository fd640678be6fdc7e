"""The engine: a few jitted programs over one decode state. It samples; it decides nothing.

    prefill   a chunk of some prompts -> their keys and values in pages, logits after the last token
    insert    prefilled prompts -> slots, first tokens
    generate  a few decode steps of all slots, with stop detection on the device
    verify    one step that checks guesses: as many tokens of each slot as were guessed right, and one more
    score     sequences -> the log-prob of every token, nothing kept

Which pages a row uses is decided by the caller, who hands in page tables; how pages look and how attention reads them
is a `kv.Path`. What is sampled is a function of the request alone (see `sampling`). On a mesh the slots and the pages
are split over the batch axes and each part runs the same program on its own pages (`shard_map`); every part has all
parameters, or they are split over `tensor`.

`EngineWorker` is an engine with the weights, the decode state and the logits that it works on. These lie on the devices
and stay there: the worker is called with host data alone, and a prefill's logits are named by a ticket. On a mesh of
several processes each process has a worker and repeats the calls of the first one in their order (`LOCKSTEP_CALLS`).

Shape letters besides the model's: S slots, R prefill rows, W pages per row, N pages, K decode steps.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rolljax.errors import ConfigError
from rolljax.model.attention import packed
from rolljax.model.decoder import Decoder, Model, Params
from rolljax.model.layers import ExpertRouting
from rolljax.model.lora import SlottedAdapters
from rolljax.sampler.arrays import (
    MAX_STOP_IDS,
    DecodeState,
    Inserts,
    PrefillChunks,
    ResultTokens,
    SamplingDistribution,
    Scores,
)
from rolljax.sampler.kernels import paths_for
from rolljax.sampler.kv import PageTable, Path
from rolljax.sampler.sampling import MAX_TOP_LOGPROBS, draw, fold_address
from rolljax.sampler.settings import MIN_CHUNK, MIN_ROWS, SamplerConfig

Carry = tuple[jax.Array, DecodeState, Any, ResultTokens]
"""State of the decode loop: completed steps, the rows' state, the path's cache, the sampled tokens."""
EXPERT_AXIS = "expert"
"""The mesh axis over which experts are split."""
MAX_UNROLLED_LAYERS = 8
"""Largest depth of models whose layers have a KV cache each in the decode program on CPU; deeper ones share one."""
LOCKSTEP_CALLS = ("init", "prefill", "insert", "release", "generate", "verify", "score", "sleep")
"""Methods that all processes of a mesh must call in one order. Arguments and tickets are the same on all of them."""


class Engine:
    """The programs for one model, one configuration, one mesh.

    Args:
      batch_axes: mesh axes the slots are split over; `slots` and pages of `cfg` are of the whole engine.
      path: how keys and values are kept (default: what suits the mesh's devices).
    """

    def __init__(
        self, model: Model, cfg: SamplerConfig, mesh: Mesh, batch_axes: tuple[str, ...], path: Path | None = None
    ) -> None:
        self.model, self.cfg, self.mesh, self.batch_axes = model, cfg, mesh, batch_axes
        cfg.check_shards(self.num_shards)
        cfg.check_model(model.cfg)
        if model.int8_sampler != (cfg.quantization == "int8"):
            raise ConfigError(
                f"needs a model with int8_sampler={not model.int8_sampler}",
                setting="SamplerConfig.quantization",
                value=cfg.quantization,
            )
        platform = mesh.devices.flat[0].platform
        self.unroll = platform == "cpu" and model.cfg.num_layers <= MAX_UNROLLED_LAYERS
        if path is not None:
            self.path = self.decode_path = path
        else:
            self.path, self.decode_path = paths_for(
                platform,
                cfg.attention,
                model,
                mesh,
                page_size=cfg.page_size,
                num_pages=self.pages_per_shard,
                rows=max(cfg.slots // self.num_shards, cfg.prefill_rows(MIN_CHUNK, self.num_shards)),
                width=cfg.pages_per_sequence,
                unroll=self.unroll,
                fp8=cfg.kv_dtype == "fp8",
            )
        replicated = NamedSharding(mesh, PartitionSpec()) if mesh.is_multi_process else None  # what one host is to read
        self._init = jax.jit(self._empty_state, out_shardings=self.state_shardings())
        self._prefill = self._jit(self._prefill_local, donate=(1,), num_row_args=2, static=1)
        self._insert = self._jit(
            self._insert_local, donate=(0,), num_row_args=3, params=False, static=2, out=(None, replicated)
        )
        self._generate = self._jit(self._generate_local, donate=(1,), num_row_args=4, static=2, out=(None, replicated))
        self._verify = self._jit(self._verify_local, donate=(1,), num_row_args=5, static=2, out=(None, replicated))
        self._score = self._jit(self._score_all, donate=(), num_row_args=1, static=1, split=False, out=replicated)

    @property
    def num_shards(self) -> int:
        """Batch shards of the mesh, each with its own slots and pages."""
        return int(np.prod([self.mesh.shape[a] for a in self.batch_axes]))

    @property
    def pages_per_shard(self) -> int:
        """KV pages of one batch shard."""
        return self.cfg.num_pages // self.num_shards

    @property
    def cascades(self) -> bool:
        """Return whether `generate` can read pages once that several rows share."""
        return self.decode_path.cascades and self.cfg.cascade_tok > 0

    @property
    def row_counts(self) -> tuple[int, ...]:
        """Rows per batch shard that a decode program exists for: all slots, and for the long tail a part of them."""
        slots = self.cfg.slots // self.num_shards
        if not self.decode_path.sized:
            return (slots,)
        return (*self._parts(slots), slots)

    @property
    def verify_rows(self) -> tuple[int, ...]:
        """Rows per batch shard that a program to check guesses exists for."""
        slots, each = self.cfg.slots // self.num_shards, self.cfg.speculate + 1
        most = min(slots, self.cfg.speculate_tok // each)
        return (*(n for n in self._parts(slots) if n < most), most)

    def _parts(self, slots: int) -> tuple[int, ...]:
        """Return the parts of a batch shard's slots that programs of fewer rows exist for."""
        parts = (slots // 16, slots // 4) if self.cfg.programs == "many" else (slots // 4,)
        return tuple(n for n in parts if n >= MIN_ROWS)

    @property
    def widths(self) -> tuple[int, ...]:
        """Pages of context that programs exist for."""
        return self.cfg.widths if self.path.sized else (self.cfg.pages_per_sequence,)

    def width(self, tokens: int) -> int:
        """Return the pages of context that a program needs for this many tokens; 0 for none."""
        most = min(tokens, self.cfg.max_context)
        return next(w for w in self.widths if w * self.cfg.page_size >= most) if tokens else 0

    def shared_width(self, tokens: int) -> int:
        """Return the pages of shared context that a program needs for this many tokens."""
        return self.width(tokens) if self.decode_path.sized else self.cfg.pages_per_sequence

    @property
    def shared_widths(self) -> tuple[int, ...]:
        """Pages of shared context for which programs are compiled in advance; none where programs of many sizes are
        worth having, which would be too many."""
        return (self.shared_width(0),) if self.cascades and not self.decode_path.sized else ()

    # ---- the programs, as their callers see them

    def init_decode_state(self) -> DecodeState:
        """Return an empty state: no slot is active."""
        return self._init()

    def state_shardings(self) -> DecodeState:
        """Return the shardings of a decode state: rows over the batch axes, heads of the pool over `tensor`."""
        rows = NamedSharding(self.mesh, PartitionSpec(self.batch_axes))
        pool = PartitionSpec(self.batch_axes, *[None] * (self.path.head_axis - 1), "tensor")
        shardings = jax.tree.map(lambda _: rows, jax.eval_shape(self._empty_state))
        if "tensor" in self.mesh.shape:
            shardings = dataclasses.replace(shardings, pool=NamedSharding(self.mesh, pool))
        return shardings

    def prefill(
        self, params: Params, state: DecodeState, chunks: PrefillChunks, *, read: int
    ) -> tuple[DecodeState, jax.Array]:
        """Write the keys and values of the chunks to their pages; returns logits `[rows, V]` after each chunk.

        There are as many rows, for each batch shard, as the prefill of the shortest chunks has.

        Args:
          state: donated.
          read: `width` of the most tokens that any chunk has before it in the cache.
        """
        return self._prefill(params, state, chunks, read)

    def insert(
        self, state: DecodeState, logits_RV: jax.Array, inserts: Inserts, *, truncate: bool = False, top: bool = False
    ) -> tuple[DecodeState, ResultTokens]:
        """Fill slots and draw their first tokens (one step).

        Args:
          state: donated. logits_RV: the result of `prefill`; it can be sampled from again.
          truncate, top: see `sampling.draw`; True where any request needs it.
        """
        return self._insert(state, logits_RV, inserts, truncate, top)

    def generate(
        self,
        params: Params,
        state: DecodeState,
        table_SW: np.ndarray,
        slot_S: np.ndarray,
        shared_NW: np.ndarray | None = None,
        *,
        truncate: bool = False,
        top: bool = False,
    ) -> tuple[DecodeState, ResultTokens]:
        """Run up to `steps_per_dispatch` decode steps for some slots, one per row; stop early when every row is done.

        Args:
          state: donated.
          table_SW: pages of each row, enough for all steps. slot_S: the slot of each row, counted within its batch
            shard; -1: none. Both may have fewer rows than there are slots.
          shared_NW: pages that come before those of the table, for each of N blocks of rows (see `kv`).
          truncate, top: see `sampling.draw`; True where any row needs it.
        """
        return self._generate(params, state, table_SW, slot_S, shared_NW, truncate, top)

    def verify(
        self,
        params: Params,
        state: DecodeState,
        table_SW: np.ndarray,
        slot_S: np.ndarray,
        draft_SK: np.ndarray,
        count_S: np.ndarray,
        *,
        truncate: bool = False,
        top: bool = False,
    ) -> tuple[DecodeState, ResultTokens]:
        """Sample the next token of some slots, and the one after each guess that was sampled, in one step.

        The noise of a token depends on its request and position alone, so these are the tokens of `generate`.

        Args:
          state: donated. table_SW, slot_S, truncate, top: as for `generate`.
          draft_SK: guesses of the next tokens. count_S: how many of each row's hold.
        """
        return self._verify(params, state, table_SW, slot_S, draft_SK, count_S, truncate, top)

    def score(self, params: Params, tokens_BT: np.ndarray, adapter_B: np.ndarray, *, top: int = 0) -> Scores:
        """Return the model's log-prob of every token given the earlier ones, and of the `top` likeliest tokens."""
        return self._score(params, (tokens_BT, adapter_B), top)

    # ---- what runs on each shard

    def _empty_state(self) -> DecodeState:
        S = self.cfg.slots
        return DecodeState(
            pool=jnp.zeros(self.path.pool_shape(self.num_shards * self.pages_per_shard), self.path.pool_dtype),
            token=jnp.zeros(S, jnp.int32),
            position=jnp.zeros(S, jnp.int32),
            remaining=jnp.zeros(S, jnp.int32),
            distribution=jax.tree.map(jnp.asarray, SamplingDistribution.empty(S)),
            key=jnp.zeros((S, 2), jnp.uint32),
            stop=jnp.full((S, MAX_STOP_IDS), -1, jnp.int32),
            adapter=jnp.full(S, -1, jnp.int32),
        )

    def _bind(self, params: Params, adapter_B: jax.Array) -> Decoder:
        """Return the decoder for rows that use these adapters, where the weights have several."""
        return self.model.bind(params.of_rows(adapter_B) if isinstance(params, SlottedAdapters) else params)

    def _prefill_local(
        self, params: Params, state: DecodeState, chunks: PrefillChunks, read: int
    ) -> tuple[DecodeState, jax.Array]:
        decoder, path = self._bind(params, chunks.adapter), self.path
        T = chunks.tokens.shape[1]
        pool = path.copy_pages(state.pool, chunks.copy_from, chunks.copy_to)
        reading, cache = path.open(pool, PageTable(chunks.table, chunks.start), T, read)
        positions = chunks.start[:, None] + jnp.arange(T)
        attend = path.attend(reading, 0, chunks.count)
        hidden_RTD, cache, _ = decoder(chunks.tokens, positions, attend, cache, in_place=True)
        pool = path.close(pool, reading, cache, chunks.count)
        last_R = jnp.maximum(chunks.count - 1, 0)
        hidden_RD = jnp.take_along_axis(hidden_RTD, last_R[:, None, None], axis=1)[:, 0]
        logits_RV = decoder.logits(hidden_RD)
        most = self.cfg.prefill_rows(MIN_CHUNK, self.num_shards)  # every prefill feeds the same `insert` program
        return dataclasses.replace(state, pool=pool), jnp.pad(logits_RV, ((0, most - len(logits_RV)), (0, 0)))

    def _insert_local(
        self, state: DecodeState, logits_RV: jax.Array, new: Inserts, truncate: bool, top: bool
    ) -> tuple[DecodeState, ResultTokens]:
        is_new_S = new.row >= 0
        key_S2 = fold_address(new.address)
        first = draw(logits_RV[jnp.maximum(new.row, 0)], new.distribution, key_S2, new.length, truncate, top)
        remaining = jnp.where(_stopped(first.token, new.stop), 0, new.max_tokens - 1)
        fresh = DecodeState(
            pool=self.path.copy_pages(state.pool, new.copy_from, new.copy_to),
            token=first.token,
            position=new.length,
            remaining=remaining,
            distribution=new.distribution,
            key=key_S2,
            stop=new.stop,
            adapter=new.adapter,
        )
        pick = lambda a, b: jnp.where(is_new_S.reshape(-1, *[1] * (a.ndim - 1)), a, b)  # noqa: E731
        merged = jax.tree.map(
            pick, dataclasses.replace(fresh, pool=is_new_S), dataclasses.replace(state, pool=is_new_S)
        )
        result = jax.tree.map(lambda x: x[:, None], first)
        return dataclasses.replace(merged, pool=fresh.pool), ResultTokens(
            tokens=result.token,
            **{f: getattr(result, f) for f in _SHARED},
            experts=self._no_experts(len(is_new_S), 1),
            valid=is_new_S.astype(jnp.int32),
            done=merged.remaining == 0,
        )

    def _generate_local(
        self,
        params: Params,
        all_slots: DecodeState,
        table_SW: jax.Array,
        slot_S: jax.Array,
        shared_NW: jax.Array | None,
        truncate: bool,
        top: bool,
    ) -> tuple[DecodeState, ResultTokens]:
        path = self.decode_path
        S, K = len(slot_S), self.cfg.steps_per_dispatch
        state = _rows_of(all_slots, slot_S)
        decoder = self._bind(params, state.adapter)
        start_S = state.position
        pages = PageTable(table_SW, start_S, shared_NW)
        reading, cache = path.open(all_slots.pool, pages, K, table_SW.shape[1])

        def more(carry: Carry) -> jax.Array:
            i, state, _, _ = carry
            some = jnp.any(state.remaining > 0)
            if self.experts_split:  # a step is taken by all shards that share experts, or by none
                some = jax.lax.pmax(some.astype(jnp.int32), EXPERT_AXIS) > 0
            return (i < K) & some

        def step(carry: Carry) -> Carry:
            i, state, cache, out = carry
            active = state.remaining > 0
            attend = path.attend(reading, i, active.astype(jnp.int32))
            hidden, cache, mixtures = decoder(
                state.token[:, None], state.position[:, None], attend, cache, unroll=self.unroll, in_place=True
            )
            new = draw(decoder.logits(hidden[:, 0]), state.distribution, state.key, state.position + 1, truncate, top)
            remaining = jnp.where(active & ~_stopped(new.token, state.stop), state.remaining - 1, 0)
            out = ResultTokens(
                tokens=out.tokens.at[:, i].set(new.token),
                **{f: getattr(out, f).at[:, i].set(getattr(new, f)) for f in _SHARED},
                experts=self._with_experts(out.experts, i, mixtures),
                valid=out.valid + active,
                done=remaining == 0,
            )
            state = dataclasses.replace(
                state,
                token=jnp.where(active, new.token, state.token),
                position=state.position + active,
                remaining=remaining,
            )
            return i + 1, state, cache, out

        n = min(MAX_TOP_LOGPROBS, self.model.cfg.vocab_size) if top else 0
        out = ResultTokens.empty(self._no_experts(S, K), n, state.remaining == 0)
        _, state, cache, out = jax.lax.while_loop(more, step, (jnp.int32(0), state, cache, out))
        pool = path.close(all_slots.pool, reading, cache, state.position - start_S)
        return _put_back(all_slots, slot_S, state, pool), out

    def _verify_local(
        self,
        params: Params,
        all_slots: DecodeState,
        table_SW: jax.Array,
        slot_S: jax.Array,
        draft_SK: jax.Array,
        count_S: jax.Array,
        truncate: bool,
        top: bool,
    ) -> tuple[DecodeState, ResultTokens]:
        path, (S, K) = self.path, draft_SK.shape
        T = K + 1
        state = _rows_of(all_slots, slot_S)
        decoder = self._bind(params, state.adapter)
        active = state.remaining > 0
        pages = PageTable(table_SW, state.position)
        reading, cache = path.open(all_slots.pool, pages, T, table_SW.shape[1])
        attend = path.attend(reading, 0, jnp.where(active, count_S + 1, 0))
        tokens_ST = jnp.concatenate([state.token[:, None], draft_SK], axis=1)
        position_ST = state.position[:, None] + jnp.arange(T)
        hidden, cache, mixtures = decoder(tokens_ST, position_ST, attend, cache, in_place=True)
        each = lambda x: jnp.repeat(x, T, axis=0)  # noqa: E731
        distribution, key = jax.tree.map(each, state.distribution), each(state.key)
        logits = decoder.logits(hidden).reshape(S * T, -1)
        new = draw(logits, distribution, key, position_ST.reshape(-1) + 1, truncate, top)
        new = jax.tree.map(lambda x: x.reshape(S, T, *x.shape[1:]), new)
        right_SK = (new.token[:, :-1] == draft_SK) & (jnp.arange(K) < count_S[:, None])
        stopped_ST = jax.vmap(_stopped, (1, None), 1)(new.token, state.stop)
        goes_on_SK = right_SK & ~stopped_ST[:, :-1]
        valid_S = jnp.minimum(1 + jnp.sum(jnp.cumprod(goes_on_SK, axis=1), axis=1), state.remaining)
        last_S1 = jnp.maximum(valid_S - 1, 0)[:, None]
        last = lambda x: jnp.take_along_axis(x, last_S1, axis=1)[:, 0]  # noqa: E731
        remaining = jnp.where(last(stopped_ST), 0, state.remaining - valid_S)
        experts = self._no_experts(S, T)
        if mixtures is not None and self.cfg.record_experts:
            experts = mixtures.expert_ids_BTk.transpose(1, 2, 0, 3).astype(experts.dtype)
        out = ResultTokens(
            tokens=new.token,
            **{f: getattr(new, f) for f in _SHARED},
            experts=experts,
            valid=valid_S,
            done=remaining == 0,
        )
        state = dataclasses.replace(
            state,
            token=jnp.where(active, last(new.token), state.token),
            position=state.position + valid_S,
            remaining=remaining,
        )
        pool = path.close(all_slots.pool, reading, cache, valid_S)
        return _put_back(all_slots, slot_S, state, pool), out

    def _no_experts(self, slots: int, steps: int) -> jax.Array:
        """Return unknown experts in the shape of `ResultTokens.experts`."""
        routing = self.model.cfg.routing
        if routing is None or not self.cfg.record_experts:
            return jnp.zeros((slots, steps, 0, 0), jnp.int8)
        return jnp.full((slots, steps, self.model.cfg.num_layers, routing.per_token), -1, routing.dtype)

    def _with_experts(self, experts: jax.Array, step: jax.Array, mixtures: ExpertRouting | None) -> jax.Array:
        """Record the experts of this step's tokens, if the settings ask for it."""
        if mixtures is None or not self.cfg.record_experts:
            return experts
        return experts.at[:, step].set(mixtures.expert_ids_BTk[:, :, 0].swapaxes(0, 1).astype(experts.dtype))

    def _score_all(self, params: Params, prompts: tuple[jax.Array, jax.Array], top: int) -> Scores:
        tokens_BT, adapter_B = prompts
        decoder = self._bind(params, adapter_B)
        B, T = tokens_BT.shape
        same = jnp.ones((B, T), jnp.int32)
        positions = jnp.broadcast_to(jnp.arange(T), (B, T))
        hidden = decoder(tokens_BT, positions, packed(same, same, positions)).hidden
        logp = jax.nn.log_softmax(decoder.logits(hidden[:, :-1]))
        own = jnp.take_along_axis(logp, tokens_BT[:, 1:, None], axis=2)[..., 0]
        best, ids = jax.lax.top_k(logp, top)
        after = lambda x: jnp.pad(x, ((0, 0), (1, 0), *[(0, 0)] * (x.ndim - 2)))  # noqa: E731
        return Scores(after(own), after(ids), after(best))

    @property
    def experts_split(self) -> bool:
        """Return whether shards have a part of the experts each, and compute each other's tokens (`model.moe`)."""
        return bool(self.model.cfg.routing) and EXPERT_AXIS in self.batch_axes and self.mesh.shape[EXPERT_AXIS] > 1

    def _param_specs(self, params: Params) -> Any:
        """Return the partition of these parameters over shards: replicated, except for experts."""
        if not self.experts_split:
            return PartitionSpec()
        axes = self.model.apart_axes() if isinstance(params["layers"], list) else self.model.axes()
        one = lambda names: PartitionSpec(*(EXPERT_AXIS if n == "experts" else None for n in names))  # noqa: E731
        return jax.tree.map(one, axes, is_leaf=lambda x: isinstance(x, tuple))

    def _jit(
        self,
        fn: Callable[..., Any],
        *,
        donate: tuple[int, ...],
        num_row_args: int,
        params: bool = True,
        static: int = 0,
        split: bool = True,
        out: Any = None,
    ) -> Any:
        """Jit `fn`, run per batch shard. Its arguments: (params,), `num_row_args` trees split over axis 0, statics.

        split: False: nothing is split, every shard computes the same. out: shardings of the results (None: as they
        come).
        """
        rows = PartitionSpec(self.batch_axes) if split else PartitionSpec()
        # experts want to know which mesh axes are left to split them over
        plain = self.num_shards == 1 and (self.mesh.size == 1 or not self.model.cfg.routing)
        num_args = params + num_row_args

        def run(*args: Any) -> Any:
            traced, statics = args[:num_args], args[num_args:]
            if plain:
                return fn(*traced, *statics)
            param_specs = (self._param_specs(traced[0]),) if params else ()
            specs = param_specs + (rows,) * num_row_args
            return jax.shard_map(
                lambda *a: fn(*a, *statics),
                mesh=self.mesh,
                in_specs=specs,
                out_specs=rows,
                axis_names=set(self.batch_axes),
                check_vma=False,
            )(*traced)

        statics = tuple(range(num_args, num_args + static))
        return jax.jit(run, donate_argnums=donate, static_argnums=statics, out_shardings=out)


_SHARED = ("sampler_logp", "model_logp", "top_ids", "top_sampler_logp", "top_model_logp")
"""Fields that the result of a draw and the result of a dispatch have in common."""


def _stopped(token_S: jax.Array, stop_SE: jax.Array) -> jax.Array:
    return jnp.any(token_S[:, None] == stop_SE, axis=1)


def _rows_of(all_slots: DecodeState, slot_S: jax.Array) -> DecodeState:
    """Return the state of some slots, one per row; -1: an idle row. Its pool is left out, which no step carries."""
    state = dataclasses.replace(all_slots, pool=all_slots.token)
    state = jax.tree.map(lambda x: x[jnp.maximum(slot_S, 0)], state)
    return dataclasses.replace(state, remaining=jnp.where(slot_S >= 0, state.remaining, 0))


def _put_back(all_slots: DecodeState, slot_S: jax.Array, rows: DecodeState, pool: jax.Array) -> DecodeState:
    """Return the state of all slots after a program that moved these rows and changed the pool."""
    to_S = jnp.where(slot_S >= 0, slot_S, len(all_slots.token))
    back = lambda name: getattr(all_slots, name).at[to_S].set(getattr(rows, name), mode="drop")  # noqa: E731
    moved = {name: back(name) for name in ("token", "position", "remaining")}
    return dataclasses.replace(all_slots, pool=pool, **moved)


def trim_heap() -> None:
    """Return freed memory to the operating system. glibc keeps arrays of less than 32 MiB, as the weights of a layer
    are, and the update that follows needs their memory. Other C libraries have no such function."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


class EngineWorker:
    """The engine of one process, with its part of weights, decode state and logits.

    Methods return device arrays without waiting for them. Call `set_params` and `init` first.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._params: Params | None = None
        self._state: DecodeState | None = None
        self._logits: dict[int, jax.Array] = {}
        self._prefilling: jax.Array | None = None  # of the last prefill, until it has been waited for
        self._num_tickets = 0

    @property
    def params(self) -> Params:
        """The weights in use; None before the first are set, and from `sleep` until the next are set."""
        return self._params

    def set_params(self, params: Params) -> None:
        """Use other weights from the next program on: as the engine wants them (see `trainer.publish`)."""
        self._params = params

    def init(self) -> None:
        """Make an empty decode state: no slot is active."""
        self._state = self.engine.init_decode_state()

    def sleep(self) -> None:
        """Free the memory of the weights and the decode state. To wake up, call `set_params` and `init`."""
        self.wait()
        self._params = self._state = self._prefilling = None
        if self.engine.mesh.devices.flat[0].platform == "cpu":
            trim_heap()

    def prefill(self, chunks: PrefillChunks, *, read: int) -> int:
        """Write chunks of prompts into the cache (see `Engine.prefill`).

        Returns:
          The ticket of the logits after each chunk. They are kept until `release`.
        """
        self._state, logits = self.engine.prefill(self._params, self._started(), chunks, read=read)
        ticket = self._num_tickets
        self._num_tickets += 1
        self._logits[ticket] = self._prefilling = logits
        return ticket

    def insert(self, ticket: int, inserts: Inserts, *, truncate: bool = False, top: bool = False) -> ResultTokens:
        """Fill slots from the logits of a prefill and draw their first tokens (see `Engine.insert`)."""
        logits = self._logits[ticket]
        self._state, result = self.engine.insert(self._started(), logits, inserts, truncate=truncate, top=top)
        return result

    def release(self, tickets: Iterable[int]) -> None:
        """Drop the logits of these prefills, which are not inserted any more."""
        for ticket in tickets:
            del self._logits[ticket]

    def generate(
        self,
        table_SW: np.ndarray,
        slot_S: np.ndarray,
        shared_NW: np.ndarray | None = None,
        *,
        truncate: bool = False,
        top: bool = False,
    ) -> ResultTokens:
        """Run up to `steps_per_dispatch` decode steps of some slots (see `Engine.generate`)."""
        self._state, result = self.engine.generate(
            self._params, self._started(), table_SW, slot_S, shared_NW, truncate=truncate, top=top
        )
        return result

    def verify(
        self,
        table_SW: np.ndarray,
        slot_S: np.ndarray,
        draft_SK: np.ndarray,
        count_S: np.ndarray,
        *,
        truncate: bool = False,
        top: bool = False,
    ) -> ResultTokens:
        """Run one step of some slots that checks guesses (see `Engine.verify`)."""
        self._state, result = self.engine.verify(
            self._params, self._started(), table_SW, slot_S, draft_SK, count_S, truncate=truncate, top=top
        )
        return result

    def score(self, tokens_BT: np.ndarray, adapter_B: np.ndarray, *, top: int = 0) -> Scores:
        """Return the log-probs of tokens that were not sampled (see `Engine.score`)."""
        return self.engine.score(self._params, tokens_BT, adapter_B, top=top)

    def wait_prefills(self) -> None:
        """Wait until every prefill that was started is done."""
        jax.block_until_ready(self._prefilling)
        self._prefilling = None

    def wait(self) -> None:
        """Wait until every program that was started on the decode state is done."""
        jax.block_until_ready(self._started())

    def _started(self) -> DecodeState:
        assert self._state is not None, "init was not called"
        return self._state
