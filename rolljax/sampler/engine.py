"""The engine: a few jitted programs over one decode state. It samples; it decides nothing.

    prefill   a piece of some prompts -> their keys and values in pages, logits after the last token
    insert    prefilled prompts -> slots, first tokens
    generate  a few decode steps of all slots, with stop detection on the device
    score     whole sequences -> the log-prob of every token, nothing kept

Which pages a row uses is decided by the caller, who hands in page tables; how pages look and how attention reads them
is a `kv.Path`. What is sampled is a function of the request alone (see `sampling`). On a mesh the slots and the pages
are split over the batch axes and each part runs the same program on its own pages (`shard_map`); parameters are whole
per part, or split over `tensor`.

Shape letters beside the model's: S slots, R prefill rows, W pages per row, N pages, K decode steps.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rolljax.model.attention import packed
from rolljax.model.decoder import Model, Params
from rolljax.model.layers import Mixture
from rolljax.sampler.kernels import paths_for
from rolljax.sampler.kv import Path
from rolljax.sampler.sampling import ADDRESS_LEN, MAX_TOP_LOGPROBS, Law, draw, fold_address
from rolljax.sampler.settings import MIN_PIECE, MIN_ROWS, SamplerConfig

EXPERT_AXIS = "expert"
"""The mesh axis over which experts are split."""
MAX_STOP_IDS = 4
MAX_UNROLLED_LAYERS = 8
"""On CPU the layers of models up to this depth are written out in the decode program."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """Everything the engine keeps between dispatches. Every array is split over its first axis on a mesh."""

    pool: jax.Array
    """KV pages of all layers; its layout is the path's."""
    token: jax.Array
    """`[S]` last sampled token, not yet in the cache."""
    position: jax.Array
    """`[S]` position of `token` in its sequence."""
    remaining: jax.Array
    """`[S]` tokens the slot may still sample; 0: the slot is idle or done."""
    law: Law
    key: jax.Array
    """`[S, 2]` uint32: the request's address, hashed."""
    stop: jax.Array
    """`[S, MAX_STOP_IDS]`, padded with -1."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Inserts:
    """What goes into which slot; arrays `[S]`, `row` is -1 for slots that are left alone."""

    row: jax.Array
    """Row of the prefill's logits (local to the slot's shard)."""
    copy_from: jax.Array
    """Partly filled page of the prompt, and the slot's own page it is copied to; -1: none."""
    copy_to: jax.Array
    length: jax.Array
    """Tokens that are in the cache."""
    max_tokens: jax.Array
    law: Law
    address: jax.Array
    """`[S, ADDRESS_LEN]` int32."""
    stop: jax.Array

    @staticmethod
    def empty(slots: int) -> Inserts:
        """Host arrays that insert nothing."""
        none = lambda *shape: np.full((slots, *shape), -1, np.int32)  # noqa: E731
        return Inserts(
            row=none(),  # type: ignore[arg-type]
            copy_from=none(),  # type: ignore[arg-type]
            copy_to=none(),  # type: ignore[arg-type]
            length=none(),  # type: ignore[arg-type]
            max_tokens=none(),  # type: ignore[arg-type]
            law=Law.empty(slots),
            address=np.zeros((slots, ADDRESS_LEN), np.int32),  # type: ignore[arg-type]
            stop=none(MAX_STOP_IDS),  # type: ignore[arg-type]
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pieces:
    """Pieces of prompts to prefill; arrays `[R]`, `count` is 0 for rows without one."""

    tokens: jax.Array
    """`[R, T]`."""
    start: jax.Array
    """Tokens of the prompt that are in the cache already."""
    count: jax.Array
    """New tokens."""
    table: jax.Array
    """`[R, W]` page ids."""
    copy_from: jax.Array
    """A page to copy before anything is written, and its target; -1: none."""
    copy_to: jax.Array

    @staticmethod
    def empty(rows: int, piece: int, width: int) -> Pieces:
        """Host arrays without a piece."""
        return Pieces(
            tokens=np.zeros((rows, piece), np.int32),  # type: ignore[arg-type]
            start=np.zeros(rows, np.int32),  # type: ignore[arg-type]
            count=np.zeros(rows, np.int32),  # type: ignore[arg-type]
            table=np.full((rows, width), -1, np.int32),  # type: ignore[arg-type]
            copy_from=np.full(rows, -1, np.int32),  # type: ignore[arg-type]
            copy_to=np.full(rows, -1, np.int32),  # type: ignore[arg-type]
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ResultTokens:
    """Sampled tokens of one dispatch: `[S, K]` each; `valid` counts the leading entries that hold, `[S]`."""

    tokens: jax.Array
    sampler_logp: jax.Array
    model_logp: jax.Array
    top_ids: jax.Array
    """`[S, K, n]`; n is 0 unless asked for. Likewise the two below."""
    top_sampler_logp: jax.Array
    top_model_logp: jax.Array
    experts: jax.Array
    """`[S, K, L, k]`, as in `types.Sampled`; L and k are 0 unless they are recorded."""
    valid: jax.Array
    done: jax.Array

    @staticmethod
    def empty(experts: jax.Array, top: int, done: jax.Array) -> ResultTokens:
        slots, steps = experts.shape[:2]
        ids, logp = jnp.zeros((slots, steps), jnp.int32), jnp.zeros((slots, steps))
        top_ids, top_logp = jnp.zeros((slots, steps, top), jnp.int32), jnp.zeros((slots, steps, top))
        return ResultTokens(ids, logp, logp, top_ids, top_logp, top_logp, experts, jnp.zeros(slots, jnp.int32), done)


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
        cfg.check_experts(model.cfg)
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
                rows=max(cfg.slots // self.num_shards, cfg.rows(MIN_PIECE, self.num_shards)),
                width=cfg.pages_per_sequence,
                unroll=self.unroll,
            )
        whole = NamedSharding(mesh, PartitionSpec()) if mesh.is_multi_process else None  # what one host is to read
        self._prefill = self._jit(self._prefill_local, donate=(1,), num_row_args=2, static=1)
        self._insert = self._jit(
            self._insert_local, donate=(0,), num_row_args=3, params=False, static=2, out=(None, whole)
        )
        self._generate = self._jit(self._generate_local, donate=(1,), num_row_args=3, static=2, out=(None, whole))
        self._score = self._jit(self._score_all, donate=(), num_row_args=1, whole=True, out=whole)

    @property
    def num_shards(self) -> int:
        return int(np.prod([self.mesh.shape[a] for a in self.batch_axes]))

    @property
    def pages_per_shard(self) -> int:
        return self.cfg.num_pages // self.num_shards

    @property
    def row_counts(self) -> tuple[int, ...]:
        """Rows per batch shard that a decode program exists for: all slots, and for the long tail a part of them."""
        slots = self.cfg.slots // self.num_shards
        if not self.decode_path.sized:
            return (slots,)
        parts = (slots // 16, slots // 4) if self.cfg.programs == "many" else (slots // 4,)
        return tuple(n for n in parts if n >= MIN_ROWS) + (slots,)

    @property
    def widths(self) -> tuple[int, ...]:
        """Pages of context that programs exist for."""
        return self.cfg.widths if self.path.sized else (self.cfg.pages_per_sequence,)

    def width(self, tokens: int) -> int:
        """Pages of context to hand to a program for so many tokens; 0 for none."""
        most = min(tokens, self.cfg.max_context)
        return next(w for w in self.widths if w * self.cfg.page_size >= most) if tokens else 0

    # ---- the programs, as their callers see them

    def init_decode_state(self) -> DecodeState:
        """An empty state: no slot is active."""
        return jax.jit(self._empty_state, out_shardings=self.state_shardings())()

    def state_shardings(self) -> DecodeState:
        """How a decode state lies on the mesh: rows over the batch axes, heads of the pool over `tensor`."""
        rows = NamedSharding(self.mesh, PartitionSpec(self.batch_axes))
        pool = PartitionSpec(self.batch_axes, *[None] * (self.path.head_axis - 1), "tensor")
        shardings = jax.tree.map(lambda _: rows, jax.eval_shape(self._empty_state))
        if "tensor" in self.mesh.shape:
            shardings = dataclasses.replace(shardings, pool=NamedSharding(self.mesh, pool))
        return shardings

    def prefill(
        self, params: Params, state: DecodeState, pieces: Pieces, *, read: int
    ) -> tuple[DecodeState, jax.Array]:
        """Write the keys and values of the pieces to their pages; returns logits `[rows, V]` after each piece.

        There are as many rows, for each batch shard, as the prefill of the shortest pieces has.

        Args:
          read: `width` of the most tokens that any piece has before it in the cache.
        """
        return self._prefill(params, state, pieces, read)

    def insert(
        self, state: DecodeState, logits_RV: jax.Array, inserts: Inserts, *, truncate: bool = False, top: bool = False
    ) -> tuple[DecodeState, ResultTokens]:
        """Fill slots and draw their first tokens (one step)."""
        return self._insert(state, logits_RV, inserts, truncate, top)

    def generate(
        self,
        params: Params,
        state: DecodeState,
        table_SW: np.ndarray,
        slot_S: np.ndarray,
        *,
        truncate: bool = False,
        top: bool = False,
    ) -> tuple[DecodeState, ResultTokens]:
        """Up to `steps_per_dispatch` decode steps of some slots, one to a row; ends early when none is left.

        Args:
          table_SW: pages of each row, enough for all steps. slot_S: the slot of each row, counted within its batch
            shard; -1: none. Both may have fewer rows than there are slots.
          truncate, top: see `sampling.draw`; True where any row needs it.
        """
        return self._generate(params, state, table_SW, slot_S, truncate, top)

    def score(self, params: Params, tokens_BT: np.ndarray) -> jax.Array:
        """Model log-prob of every token given those before it, `[B, T]`; the first column is 0."""
        return self._score(params, tokens_BT)

    # ---- what runs on each shard

    def _empty_state(self) -> DecodeState:
        S = self.cfg.slots
        return DecodeState(
            pool=jnp.zeros(self.path.pool_shape(self.num_shards * self.pages_per_shard), self.model.dtype),
            token=jnp.zeros(S, jnp.int32),
            position=jnp.zeros(S, jnp.int32),
            remaining=jnp.zeros(S, jnp.int32),
            law=jax.tree.map(jnp.asarray, Law.empty(S)),
            key=jnp.zeros((S, 2), jnp.uint32),
            stop=jnp.full((S, MAX_STOP_IDS), -1, jnp.int32),
        )

    def _prefill_local(self, params, state: DecodeState, pieces: Pieces, read: int):
        decoder, path = self.model.bind(params), self.path
        T = pieces.tokens.shape[1]
        pool = path.copy_pages(state.pool, pieces.copy_from, pieces.copy_to)
        reading, cache = path.open(pool, pieces.table, pieces.start, T, read)
        positions = pieces.start[:, None] + jnp.arange(T)
        attend = path.attend(reading, 0, pieces.count)
        hidden_RTD, cache, _ = decoder(pieces.tokens, positions, attend, cache, in_place=True)
        pool = path.close(pool, reading, cache, pieces.count)
        last_R = jnp.maximum(pieces.count - 1, 0)
        hidden_RD = jnp.take_along_axis(hidden_RTD, last_R[:, None, None], axis=1)[:, 0]
        logits_RV = decoder.logits(hidden_RD)
        most = self.cfg.rows(MIN_PIECE, self.num_shards)  # every prefill feeds the same `insert` program
        return dataclasses.replace(state, pool=pool), jnp.pad(logits_RV, ((0, most - len(logits_RV)), (0, 0)))

    def _insert_local(self, state: DecodeState, logits_RV: jax.Array, new: Inserts, truncate: bool, top: bool):
        here_S = new.row >= 0
        key_S2 = fold_address(new.address)
        first = draw(logits_RV[jnp.maximum(new.row, 0)], new.law, key_S2, new.length, truncate, top)
        remaining = jnp.where(_stopped(first.token, new.stop), 0, new.max_tokens - 1)
        fresh = DecodeState(
            pool=self.path.copy_pages(state.pool, new.copy_from, new.copy_to),
            token=first.token,
            position=new.length,
            remaining=remaining,
            law=new.law,
            key=key_S2,
            stop=new.stop,
        )
        pick = lambda a, b: jnp.where(here_S.reshape(-1, *[1] * (a.ndim - 1)), a, b)  # noqa: E731
        merged = jax.tree.map(pick, dataclasses.replace(fresh, pool=here_S), dataclasses.replace(state, pool=here_S))
        result = jax.tree.map(lambda x: x[:, None], first)
        return dataclasses.replace(merged, pool=fresh.pool), ResultTokens(
            tokens=result.token,
            **{f: getattr(result, f) for f in _SHARED},
            experts=self._no_experts(len(here_S), 1),
            valid=here_S.astype(jnp.int32),
            done=merged.remaining == 0,
        )

    def _generate_local(self, params, whole: DecodeState, table_SW, slot_S, truncate: bool, top: bool):
        decoder, path = self.model.bind(params), self.decode_path
        S, K = len(slot_S), self.cfg.steps_per_dispatch
        state = dataclasses.replace(whole, pool=whole.token)  # the pool is not carried through the steps
        state = jax.tree.map(lambda x: x[jnp.maximum(slot_S, 0)], state)
        state = dataclasses.replace(state, remaining=jnp.where(slot_S >= 0, state.remaining, 0))
        start_S = state.position
        reading, cache = path.open(whole.pool, table_SW, start_S, K, table_SW.shape[1])

        def more(carry):
            i, state, _, _ = carry
            some = jnp.any(state.remaining > 0)
            if self.experts_split:  # a step is taken by all shards that share experts, or by none
                some = jax.lax.pmax(some.astype(jnp.int32), EXPERT_AXIS) > 0
            return (i < K) & some

        def step(carry):
            i, state, cache, out = carry
            active = state.remaining > 0
            attend = path.attend(reading, i, active.astype(jnp.int32))
            hidden, cache, mixtures = decoder(
                state.token[:, None], state.position[:, None], attend, cache, unroll=self.unroll, in_place=True
            )
            new = draw(decoder.logits(hidden[:, 0]), state.law, state.key, state.position + 1, truncate, top)
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
        to_S = jnp.where(slot_S >= 0, slot_S, len(whole.token))
        back = lambda name: getattr(whole, name).at[to_S].set(getattr(state, name), mode="drop")  # noqa: E731
        pool = path.close(whole.pool, reading, cache, state.position - start_S)
        moved = {name: back(name) for name in ("token", "position", "remaining")}
        return dataclasses.replace(whole, pool=pool, **moved), out

    def _no_experts(self, slots: int, steps: int) -> jax.Array:
        """None known, in the shape of `ResultTokens.experts`."""
        routing = self.model.cfg.routing
        if routing is None or not self.cfg.record_experts:
            return jnp.zeros((slots, steps, 0, 0), jnp.int8)
        return jnp.full((slots, steps, self.model.cfg.num_layers, routing.per_token), -1, routing.dtype)

    def _with_experts(self, experts: jax.Array, step: jax.Array, mixtures: Mixture | None) -> jax.Array:
        """What the tokens of this step took, if that is recorded."""
        if mixtures is None or not self.cfg.record_experts:
            return experts
        return experts.at[:, step].set(mixtures.expert_ids_BTk[:, :, 0].swapaxes(0, 1).astype(experts.dtype))

    def _score_all(self, params, tokens_BT):
        decoder = self.model.bind(params)
        B, T = tokens_BT.shape
        same = jnp.ones((B, T), jnp.int32)
        positions = jnp.broadcast_to(jnp.arange(T), (B, T))
        hidden = decoder(tokens_BT, positions, packed(same, same, positions)).hidden
        logp = jax.nn.log_softmax(decoder.logits(hidden[:, :-1]))
        return jnp.pad(jnp.take_along_axis(logp, tokens_BT[:, 1:, None], axis=2)[..., 0], ((0, 0), (1, 0)))

    @property
    def experts_split(self) -> bool:
        """Whether shards have a part of the experts each, and compute each other's tokens (`model.moe`)."""
        return bool(self.model.cfg.routing) and EXPERT_AXIS in self.batch_axes and self.mesh.shape[EXPERT_AXIS] > 1

    def _param_specs(self) -> Any:
        """What every shard has of the parameters: all of them, or of experts its part."""
        if not self.experts_split:
            return PartitionSpec()
        one = lambda names: PartitionSpec(*(EXPERT_AXIS if n == "experts" else None for n in names))  # noqa: E731
        return jax.tree.map(one, self.model.axes(), is_leaf=lambda x: isinstance(x, tuple))

    def _jit(
        self,
        fn: Any,
        *,
        donate: tuple[int, ...],
        num_row_args: int,
        params: bool = True,
        static: int = 0,
        whole: bool = False,
        out: Any = None,
    ) -> Any:
        """Jit `fn`, run per batch shard. Its arguments: (params,), `num_row_args` trees split over axis 0, statics.

        whole: nothing is split, every shard computes the same. out: shardings of the results (None: as they come).
        """
        everywhere = PartitionSpec()
        rows = everywhere if whole else PartitionSpec(self.batch_axes)
        # experts want to know which mesh axes are left to split them over
        plain = self.num_shards == 1 and (self.mesh.size == 1 or not self.model.cfg.routing)
        num_args = params + num_row_args

        def run(*args):
            traced, statics = args[:num_args], args[num_args:]
            if plain:
                return fn(*traced, *statics)
            specs = (self._param_specs(),) * params + (rows,) * num_row_args
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
"""Fields that a draw and a dispatch's result have in common."""


def _stopped(token_S: jax.Array, stop_SE: jax.Array) -> jax.Array:
    return jnp.any(token_S[:, None] == stop_SE, axis=1)
