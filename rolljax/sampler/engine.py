"""The engine: three jitted programs over one decode state. It samples; it decides nothing.

    prefill   prompts -> their KV in pages, next-token logits
    insert    prefilled prompts -> slots, first tokens
    generate  a few decode steps of all slots, with stop detection on the device

The KV pool is one flat array `[layers * pages, page, 2 * kv_heads, head_dim]` carried through the layer scan, so that
nothing of it is ever copied (keys and values interleaved per head, as ragged paged attention kernels want them).
Prompts of one group share their full pages; only the last, partly filled page is copied per slot.

What is sampled is a function of the request alone: noise comes from the address of the request and the position of the
token, never from slot, batch or time. On a mesh the slots and the pages are split over the batch axes and each part
runs the same program on its own pages (`shard_map`); parameters are whole per part, or split over `tensor`.

Shape letters beside the model's: S slots, R prefill rows, W pages per sequence, N pages, K decode steps.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rolljax.errors import ConfigError
from rolljax.model.attention import Attend, attention
from rolljax.model.decoder import Model, Params

MAX_STOP_IDS = 4
ADDRESS_LEN = 6
"""Integers in the address of a request's randomness: run seed, stream, step, group, sibling, turn."""


@dataclasses.dataclass(frozen=True)
class SamplerConfig:
    """Sizes of the sampler.

    slots: sequences that decode at the same time. max_context: most tokens of a prompt and its answer together.
    page_size: tokens per KV page. prefill_rows: prompts per prefill program. steps_per_dispatch: decode steps between
    two looks of the host. pages: KV pages (default: enough for every slot at full length).
    """

    slots: int = 64
    max_context: int = 512
    page_size: int = 16
    prefill_rows: int = 8
    steps_per_dispatch: int = 8
    pages: int | None = None

    def __post_init__(self) -> None:
        for name in ("slots", "max_context", "page_size", "prefill_rows", "steps_per_dispatch"):
            if getattr(self, name) < 1:
                raise ConfigError("must be at least 1", setting=f"SamplerConfig.{name}", value=getattr(self, name))
        if self.pages is not None and self.pages <= self.pages_per_sequence:
            raise ConfigError(
                "is less than one sequence needs",
                setting="SamplerConfig.pages",
                value=self.pages,
                remedy=f"{self.max_context} tokens need {self.pages_per_sequence + 1} pages of {self.page_size}",
            )

    @property
    def pages_per_sequence(self) -> int:
        return -(-self.max_context // self.page_size)

    @property
    def num_pages(self) -> int:
        return self.pages or (self.slots + self.prefill_rows) * self.pages_per_sequence

    def check_shards(self, num_shards: int) -> None:
        """Raise `ConfigError` unless slots, prefill rows and pages can be split over so many batch shards."""
        for name in ("slots", "prefill_rows"):
            if getattr(self, name) % num_shards:
                raise ConfigError(
                    f"does not divide over {num_shards} batch shards of the mesh",
                    setting=f"SamplerConfig.{name}",
                    value=getattr(self, name),
                    remedy=f"choose a multiple of {num_shards}",
                )
        each = self.num_pages // num_shards
        if each <= self.pages_per_sequence:
            raise ConfigError(
                f"over {num_shards} batch shards leave {each} each, less than one sequence needs",
                setting="SamplerConfig.pages",
                value=self.num_pages,
                remedy=f"at least {(self.pages_per_sequence + 1) * num_shards}",
            )

    @property
    def prefill_buckets(self) -> tuple[int, ...]:
        """Padded prompt lengths that a program exists for: doubling from 32 up to `max_context`."""
        sizes, size = [], 32
        while size < self.max_context:
            sizes.append(size)
            size *= 2
        return (*sizes, self.max_context)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """Everything the engine keeps between dispatches. Every array is split over its first axis on a mesh."""

    pool: jax.Array
    """`[layers * N, page, 2 * kv_heads, head_dim]`."""
    table: jax.Array
    """`[S, W]` page ids of each slot, in order."""
    token: jax.Array
    """`[S]` last sampled token, not yet in the cache."""
    position: jax.Array
    """`[S]` position of `token` in its sequence."""
    remaining: jax.Array
    """`[S]` tokens the slot may still sample; 0: the slot is idle or done."""
    temperature: jax.Array
    key: jax.Array
    """`[S, 2]` uint32: the request's address, folded."""
    stop: jax.Array
    """`[S, MAX_STOP_IDS]`, padded with -1."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Inserts:
    """What goes into which slot; arrays `[S]`, `row` is -1 for slots that are left alone."""

    row: jax.Array
    """Row of the prefill's logits (local to the slot's shard)."""
    table: jax.Array
    copy_from: jax.Array
    """Partly filled page of the prompt, and the slot's own page it is copied to; -1: none."""
    copy_to: jax.Array
    length: jax.Array
    """Prompt tokens."""
    max_tokens: jax.Array
    temperature: jax.Array
    address: jax.Array
    """`[S, ADDRESS_LEN]` int32."""
    stop: jax.Array

    @staticmethod
    def empty(slots: int, width: int) -> Inserts:
        """Host arrays that insert nothing."""
        none = lambda *shape: np.full((slots, *shape), -1, np.int32)  # noqa: E731
        return Inserts(
            row=none(),  # type: ignore[arg-type]
            table=none(width),  # type: ignore[arg-type]
            copy_from=none(),  # type: ignore[arg-type]
            copy_to=none(),  # type: ignore[arg-type]
            length=none(),  # type: ignore[arg-type]
            max_tokens=none(),  # type: ignore[arg-type]
            temperature=np.ones(slots, np.float32),  # type: ignore[arg-type]
            address=np.zeros((slots, ADDRESS_LEN), np.int32),  # type: ignore[arg-type]
            stop=none(MAX_STOP_IDS),  # type: ignore[arg-type]
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ResultTokens:
    """Sampled tokens of one dispatch: `[S, K]` each; `valid` counts the leading entries that hold, `[S]`."""

    tokens: jax.Array
    logp: jax.Array
    valid: jax.Array
    done: jax.Array


def paged(table_BW: jax.Array, positions_BT: jax.Array, page_size: int, num_pages: int) -> Attend:
    """Attention over KV pages: writes the new keys and values, then attends to everything up to each position.

    Tokens at position -1 are padding: nothing is written for them and what they attend to does not matter.
    """
    B, W = table_BW.shape
    valid_BT = positions_BT >= 0
    page_BT = jnp.take_along_axis(table_BW, jnp.maximum(positions_BT, 0) // page_size, axis=1)
    offset_BT = positions_BT % page_size
    mask_BTS = jnp.arange(W * page_size)[None, None] <= positions_BT[:, :, None]

    def attend(q, k, v, pool, layer):
        first = layer * num_pages
        K, C = k.shape[2:]
        kv = jnp.stack([k, v], axis=3).reshape(*k.shape[:2], 2 * K, C).astype(pool.dtype)
        write = jnp.where(valid_BT, page_BT + first, pool.shape[0])
        pool = pool.at[write, offset_BT].set(kv, mode="drop")
        context = pool[jnp.maximum(table_BW, 0) + first].reshape(B, W * page_size, K, 2, C).astype(q.dtype)
        return attention(q, context[:, :, :, 0], context[:, :, :, 1], mask_BTS), pool

    return attend


def sample(
    logits_SV: jax.Array, temperature_S: jax.Array, key_S2: jax.Array, position_S: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Draw the token at `position` of each sequence (Gumbel noise addressed by key and position).

    Returns tokens `[S]` and their log-probs under the sampled law `softmax(logits / temperature)`.
    Temperature 0 takes the largest logit, with the log-prob of temperature 1.
    """
    greedy = temperature_S == 0
    scaled = logits_SV / jnp.where(greedy, 1.0, temperature_S)[:, None]
    noise = jax.vmap(lambda k, p: jax.random.gumbel(jax.random.fold_in(_key(k), p), scaled.shape[1:]))(
        key_S2, position_S
    )
    token = jnp.argmax(scaled + jnp.where(greedy[:, None], 0.0, noise), axis=-1).astype(jnp.int32)
    logp = jnp.take_along_axis(jax.nn.log_softmax(scaled), token[:, None], axis=1)[:, 0]
    return token, logp


def fold_address(address_A: jax.Array) -> jax.Array:
    """The raw threefry key `[2]` of an address: its integers folded in one after the other."""
    key = jax.random.key(0, impl="threefry2x32")
    for i in range(ADDRESS_LEN):
        key = jax.random.fold_in(key, address_A[i])
    return jax.random.key_data(key)


def _key(raw: jax.Array) -> jax.Array:
    return jax.random.wrap_key_data(raw, impl="threefry2x32")


def _stopped(token_S: jax.Array, stop_SE: jax.Array) -> jax.Array:
    return jnp.any(token_S[:, None] == stop_SE, axis=1)


class Engine:
    """The programs for one model, one configuration, one mesh.

    Args:
      batch_axes: mesh axes the slots are split over; `slots`, `prefill_rows` and pages are per engine, not per shard.
    """

    def __init__(self, model: Model, cfg: SamplerConfig, mesh: Mesh, batch_axes: tuple[str, ...]) -> None:
        self.model, self.cfg, self.mesh, self.batch_axes = model, cfg, mesh, batch_axes
        cfg.check_shards(self.num_shards)
        self._prefill = self._jit(self._prefill_local, donate=(1,), num_row_args=4)
        self._insert = self._jit(self._insert_local, donate=(0,), num_row_args=3, params=False)
        self._generate = self._jit(self._generate_local, donate=(1,), num_row_args=1)

    @property
    def num_shards(self) -> int:
        return int(np.prod([self.mesh.shape[a] for a in self.batch_axes]))

    @property
    def pages_per_shard(self) -> int:
        return self.cfg.num_pages // self.num_shards

    # ---- the three programs, as their callers see them

    def init_decode_state(self) -> DecodeState:
        """An empty state: no slot is active."""
        cfg, m = self.cfg, self.model.cfg
        S, W, n = cfg.slots, cfg.pages_per_sequence, self.num_shards
        pool = (n * m.num_layers * self.pages_per_shard, cfg.page_size, 2 * m.num_kv_heads, m.head_dim)

        def make() -> DecodeState:
            return DecodeState(
                pool=jnp.zeros(pool, self.model.dtype),
                table=jnp.full((S, W), -1, jnp.int32),
                token=jnp.zeros(S, jnp.int32),
                position=jnp.zeros(S, jnp.int32),
                remaining=jnp.zeros(S, jnp.int32),
                temperature=jnp.ones(S),
                key=jnp.zeros((S, 2), jnp.uint32),
                stop=jnp.full((S, MAX_STOP_IDS), -1, jnp.int32),
            )

        sharding = NamedSharding(self.mesh, PartitionSpec(self.batch_axes))
        return jax.jit(make, out_shardings=sharding)()

    def prefill(
        self, params: Params, state: DecodeState, tokens_RT: np.ndarray, positions_RT: np.ndarray, table_RW: np.ndarray
    ) -> tuple[DecodeState, jax.Array]:
        """Write the KV of R prompts (position -1: padding) into their pages; returns logits `[R, V]` after the last."""
        return self._prefill(params, state, tokens_RT, positions_RT, table_RW)

    def insert(
        self, state: DecodeState, logits_RV: jax.Array, inserts: Inserts
    ) -> tuple[DecodeState, jax.Array, jax.Array, jax.Array]:
        """Fill slots and draw their first tokens: state, token `[S]`, logp `[S]`, done `[S]`."""
        return self._insert(state, logits_RV, inserts)

    def generate(self, params: Params, state: DecodeState) -> tuple[DecodeState, ResultTokens]:
        """Up to `steps_per_dispatch` decode steps of all active slots; ends early when none is left."""
        return self._generate(params, state)

    # ---- what runs on each shard

    def _prefill_local(self, params, state, tokens_RT, positions_RT, table_RW):
        decoder = self.model.bind(params)
        attend = paged(table_RW, positions_RT, self.cfg.page_size, self.pages_per_shard)
        hidden_RTD, pool = decoder(tokens_RT, jnp.maximum(positions_RT, 0), attend, state.pool)
        last_R = jnp.argmax(positions_RT, axis=1)
        hidden_RD = jnp.take_along_axis(hidden_RTD, last_R[:, None, None], axis=1)[:, 0]
        return dataclasses.replace(state, pool=pool), decoder.logits(hidden_RD)

    def _insert_local(self, state: DecodeState, logits_RV: jax.Array, new: Inserts):
        here_S = new.row >= 0
        key_S2 = jax.vmap(fold_address)(new.address)
        token, logp = sample(logits_RV[jnp.maximum(new.row, 0)], new.temperature, key_S2, new.length)
        remaining = jnp.where(_stopped(token, new.stop), 0, new.max_tokens - 1)
        layers = jnp.arange(self.model.cfg.num_layers)[:, None] * self.pages_per_shard
        source = jnp.maximum(new.copy_from, 0) + layers
        target = jnp.where(new.copy_to >= 0, new.copy_to + layers, state.pool.shape[0])
        fresh = dataclasses.replace(
            state,
            table=new.table,
            token=token,
            position=new.length,
            remaining=remaining,
            temperature=new.temperature,
            key=key_S2,
            stop=new.stop,
        )
        pick = lambda a, b: jnp.where(here_S.reshape(-1, *[1] * (a.ndim - 1)), a, b)  # noqa: E731
        fields = {
            f.name: pick(getattr(fresh, f.name), getattr(state, f.name))
            for f in dataclasses.fields(state)
            if f.name != "pool"
        }
        pool = state.pool.at[target].set(state.pool[source], mode="drop")
        return DecodeState(pool=pool, **fields), token, logp, remaining == 0

    def _generate_local(self, params, state: DecodeState):
        decoder = self.model.bind(params)
        S, K = state.token.shape[0], self.cfg.steps_per_dispatch

        def more(carry):
            i, state, _ = carry
            return (i < K) & jnp.any(state.remaining > 0)

        def step(carry):
            i, state, out = carry
            active = state.remaining > 0
            positions = jnp.where(active, state.position, -1)[:, None]
            attend = paged(state.table, positions, self.cfg.page_size, self.pages_per_shard)
            hidden, pool = decoder(state.token[:, None], jnp.maximum(positions, 0), attend, state.pool)
            token, logp = sample(decoder.logits(hidden[:, 0]), state.temperature, state.key, state.position + 1)
            remaining = jnp.where(active & ~_stopped(token, state.stop), state.remaining - 1, 0)
            out = ResultTokens(
                tokens=out.tokens.at[:, i].set(token),
                logp=out.logp.at[:, i].set(logp),
                valid=out.valid + active,
                done=remaining == 0,
            )
            state = dataclasses.replace(
                state,
                pool=pool,
                token=jnp.where(active, token, state.token),
                position=state.position + active,
                remaining=remaining,
            )
            return i + 1, state, out

        out = ResultTokens(
            tokens=jnp.zeros((S, K), jnp.int32),
            logp=jnp.zeros((S, K)),
            valid=jnp.zeros(S, jnp.int32),
            done=state.remaining == 0,
        )
        _, state, out = jax.lax.while_loop(more, step, (jnp.int32(0), state, out))
        return state, out

    def _jit(self, fn: Any, *, donate: tuple[int, ...], num_row_args: int, params: bool = True) -> Any:
        """Jit `fn`, run per batch shard. Its arguments are (params,) and `num_row_args` trees split over axis 0."""
        rows, whole = PartitionSpec(self.batch_axes), PartitionSpec()
        if self.num_shards > 1:
            specs = (whole,) * params + (rows,) * num_row_args
            fn = jax.shard_map(
                fn, mesh=self.mesh, in_specs=specs, out_specs=rows, axis_names=set(self.batch_axes), check_vma=False
            )
        return jax.jit(fn, donate_argnums=donate)


def warm_up(engine: Engine, params: Params, state: DecodeState) -> DecodeState:
    """Compile every program the engine will ever run, on an idle state (buckets of `prefill_buckets`)."""
    cfg = engine.cfg
    R, W = cfg.prefill_rows, cfg.pages_per_sequence
    table = np.full((R, W), -1, np.int32)
    for T in cfg.prefill_buckets:
        state, logits = engine.prefill(params, state, np.zeros((R, T), np.int32), np.full((R, T), -1, np.int32), table)
    state, *_ = engine.insert(state, logits, Inserts.empty(cfg.slots, W))
    state, _ = engine.generate(params, state)
    return state
