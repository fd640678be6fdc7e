"""Inputs and outputs of the engine's programs: registered pytrees of device or host arrays.

Shape letters besides the model's: S slots, R prefill rows, T prompt tokens of a chunk, W pages per row, K decode steps.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

MAX_STOP_IDS = 4
ADDRESS_LEN = 5
"""Integers in the address of a request's randomness: run seed, stream, draw, sibling, turn."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplingDistribution:
    """The distribution from which each row is sampled, `[S]` each: the fields of `rolljax.types.SamplingParams` of
    these names."""

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array

    @staticmethod
    def empty(rows: int) -> SamplingDistribution:
        """Return host arrays that leave the model's own distribution unchanged."""
        one, none = np.ones(rows, np.float32), np.zeros(rows, np.int32)
        return SamplingDistribution(one, none, one.copy(), np.zeros(rows, np.float32))  # type: ignore[arg-type]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """The engine's state between dispatches. On a mesh every array is split over its first axis."""

    pool: jax.Array
    """KV pages of all layers; its layout is the path's."""
    token: jax.Array
    """`[S]` last sampled token, not yet in the cache."""
    position: jax.Array
    """`[S]` position of `token` in its sequence."""
    remaining: jax.Array
    """`[S]` tokens the slot may still sample; 0: the slot is idle or done."""
    distribution: SamplingDistribution
    key: jax.Array
    """`[S, 2]` uint32: the request's address, hashed."""
    stop: jax.Array
    """`[S, MAX_STOP_IDS]`, padded with -1."""
    adapter: jax.Array
    """`[S]` slot of the adapter, where the weights have several (`model.lora.SlottedAdapters`)."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Inserts:
    """The prefilled prompt for each slot, and its sampling parameters; one entry per slot."""

    row: jax.Array
    """`[S]` row of the prefill's logits, counted within the slot's batch shard; -1: the slot is left alone."""
    copy_from: jax.Array
    """`[S]` partly filled last page of the prompt, to be copied; -1: none."""
    copy_to: jax.Array
    """`[S]` the slot's own page that `copy_from` is copied to; -1: none."""
    length: jax.Array
    """`[S]` tokens that are in the cache."""
    max_tokens: jax.Array
    """`[S]` most tokens to sample."""
    distribution: SamplingDistribution
    address: jax.Array
    """`[S, ADDRESS_LEN]` int32."""
    stop: jax.Array
    """`[S, MAX_STOP_IDS]` ids that end an answer, padded with -1."""
    adapter: jax.Array
    """`[S]` slot of the adapter; -1: none."""

    @staticmethod
    def empty(slots: int) -> Inserts:
        """Return host arrays that insert nothing."""
        none = lambda *shape: np.full((slots, *shape), -1, np.int32)  # noqa: E731
        return Inserts(
            row=none(),  # type: ignore[arg-type]
            copy_from=none(),  # type: ignore[arg-type]
            copy_to=none(),  # type: ignore[arg-type]
            length=none(),  # type: ignore[arg-type]
            max_tokens=none(),  # type: ignore[arg-type]
            distribution=SamplingDistribution.empty(slots),
            address=np.zeros((slots, ADDRESS_LEN), np.int32),  # type: ignore[arg-type]
            stop=none(MAX_STOP_IDS),  # type: ignore[arg-type]
            adapter=none(),  # type: ignore[arg-type]
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PrefillChunks:
    """PrefillChunks of prompts to prefill; arrays `[R]`, `count` is 0 for rows without one."""

    tokens: jax.Array
    """`[R, T]`."""
    start: jax.Array
    """`[R]` tokens of the prompt that are in the cache already."""
    count: jax.Array
    """`[R]` new tokens; 0: the row has no chunk."""
    table: jax.Array
    """`[R, W]` page ids."""
    copy_from: jax.Array
    """`[R]` a page to copy before anything is written; -1: none."""
    copy_to: jax.Array
    """`[R]` the page that `copy_from` is copied to; -1: none."""
    adapter: jax.Array
    """`[R]` slot of the adapter; -1: none."""

    @staticmethod
    def empty(rows: int, size: int, width: int) -> PrefillChunks:
        """Return host arrays of rows without a chunk, for chunks of `size` tokens and tables of `width` pages."""
        return PrefillChunks(
            tokens=np.zeros((rows, size), np.int32),  # type: ignore[arg-type]
            start=np.zeros(rows, np.int32),  # type: ignore[arg-type]
            count=np.zeros(rows, np.int32),  # type: ignore[arg-type]
            table=np.full((rows, width), -1, np.int32),  # type: ignore[arg-type]
            copy_from=np.full(rows, -1, np.int32),  # type: ignore[arg-type]
            copy_to=np.full(rows, -1, np.int32),  # type: ignore[arg-type]
            adapter=np.full(rows, -1, np.int32),  # type: ignore[arg-type]
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ResultTokens:
    """Sampled tokens of one dispatch, `[S, K]`, with their log-probs, alternatives and experts; see
    `rolljax.types.Sampled`."""

    tokens: jax.Array
    sampler_logp: jax.Array
    model_logp: jax.Array
    top_ids: jax.Array
    """`[S, K, n]` most likely tokens; n is 0 unless they were requested."""
    top_sampler_logp: jax.Array
    """`[S, K, n]` log-probs of `top_ids` under the sampling distribution."""
    top_model_logp: jax.Array
    """`[S, K, n]` log-probs of `top_ids` under the model's own distribution."""
    experts: jax.Array
    """`[S, K, L, k]` experts that each token took; L and k are 0 unless they are recorded."""
    valid: jax.Array
    """`[S]` how many of the K steps sampled a token; they come first."""
    done: jax.Array
    """`[S]` whether the slot has nothing left to sample."""

    @staticmethod
    def empty(experts: jax.Array, top: int, done: jax.Array) -> ResultTokens:
        """Return a result without tokens. experts: `[S, K, L, k]`; top: likely tokens per step; done: `[S]`."""
        slots, steps = experts.shape[:2]
        ids, logp = jnp.zeros((slots, steps), jnp.int32), jnp.zeros((slots, steps))
        top_ids, top_logp = jnp.zeros((slots, steps, top), jnp.int32), jnp.zeros((slots, steps, top))
        return ResultTokens(ids, logp, logp, top_ids, top_logp, top_logp, experts, jnp.zeros(slots, jnp.int32), done)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scores:
    """The model's log-probs of given tokens, each given the earlier ones. The first column means nothing."""

    logp: jax.Array
    """`[B, T]`."""
    top_ids: jax.Array
    """`[B, T, n]` the likeliest tokens in its place."""
    top_logp: jax.Array
    """`[B, T, n]` their log-probs."""
