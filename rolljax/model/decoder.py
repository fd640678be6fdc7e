"""The decoder: one Flax NNX function for sampling and for training (Qwen3 architecture).

Parameters of all layers are stacked on a leading axis and run under `lax.scan`, so compile time does not grow with
depth. The module never sees a mask: `attend` (see `attention.py`) decides who sees whom, and may carry a KV cache
through the layers. Qwen3: https://arxiv.org/abs/2505.09388 (grouped queries, RMS norm on queries and keys, SwiGLU).

Shape letters: B rows, T tokens, D hidden, H query heads, K key/value heads, C head size, F feed-forward, L layers,
V vocabulary.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from rolljax.errors import ConfigError
from rolljax.model.attention import Attend

Dtype = Literal["float32", "bfloat16"]
Remat = Literal["none", "full", "dots"]
Params = Any
"""Nested dict of arrays: the pure form of a module's parameters. What optimizers, checkpoints and meshes handle."""


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Shape of a Qwen3 decoder. Sizes follow `transformers`' meaning; the default is a model for two CPU cores."""

    vocab_size: int = 264
    num_layers: int = 2
    hidden_size: int = 64
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    ffn_size: int = 192
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6
    tie_embeddings: bool = True
    max_position: int = 4096
    init_std: float = 0.02
    """Of random weights. About `hidden_size ** -0.5` makes small models learn fastest."""

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"does not divide num_heads={self.num_heads}",
                setting="DecoderConfig.num_kv_heads",
                value=self.num_kv_heads,
                remedy="every key/value head serves an equal number of query heads",
            )
        if self.head_dim % 2:
            raise ConfigError("must be even (rotary embedding)", setting="DecoderConfig.head_dim", value=self.head_dim)


def param(key: jax.Array, shape: tuple[int, ...], axes: tuple[str, ...], std: float | None) -> nnx.Param:
    """A float32 parameter with its logical axis names (`trainer.mesh` maps them to the mesh); ones if std is None."""
    value = jnp.ones(shape) if std is None else std * jax.random.truncated_normal(key, -3, 3, shape)
    return nnx.Param(value, axes=axes)


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm over the last axis, computed in float32."""
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return normed.astype(x.dtype) * scale.astype(x.dtype)


def rope(x_BTHC: jax.Array, positions_BT: jax.Array, theta: float) -> jax.Array:
    """Rotary position embedding, halves convention (as in `transformers`)."""
    half = x_BTHC.shape[-1] // 2
    inverse = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions_BT[..., None].astype(jnp.float32) * inverse
    sin, cos = jnp.sin(angle)[:, :, None, :], jnp.cos(angle)[:, :, None, :]
    a, b = jnp.split(x_BTHC.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BTHC.dtype)


class Layers(nnx.Module):
    """All decoder layers, stacked: every parameter has a leading L. `layer` runs one slice of them."""

    def __init__(self, cfg: DecoderConfig, *, rngs: nnx.Rngs) -> None:
        L, D, H, K, C, F = (
            cfg.num_layers,
            cfg.hidden_size,
            cfg.num_heads,
            cfg.num_kv_heads,
            cfg.head_dim,
            cfg.ffn_size,
        )
        std, out_std = cfg.init_std, cfg.init_std / (2 * L) ** 0.5
        self.cfg = cfg

        def p(shape: tuple[int, ...], axes: tuple[str, ...], scale: float | None) -> nnx.Param:
            return param(rngs.params(), (L, *shape), ("layers", *axes), scale)

        self.attn_norm = p((D,), ("embed",), None)
        self.q = p((D, H, C), ("embed", "heads", "head_dim"), std)
        self.k = p((D, K, C), ("embed", "kv_heads", "head_dim"), std)
        self.v = p((D, K, C), ("embed", "kv_heads", "head_dim"), std)
        self.o = p((H, C, D), ("heads", "head_dim", "embed"), out_std)
        self.q_norm = p((C,), ("head_dim",), None)
        self.k_norm = p((C,), ("head_dim",), None)
        self.ffn_norm = p((D,), ("embed",), None)
        self.gate = p((D, F), ("embed", "ffn"), std)
        self.up = p((D, F), ("embed", "ffn"), std)
        self.down = p((F, D), ("ffn", "embed"), out_std)

    def layer(
        self, x_BTD: jax.Array, positions_BT: jax.Array, attend: Attend, cache: Any, index: jax.Array | int
    ) -> tuple[jax.Array, Any]:
        """One layer; `self` holds that layer's slice of the parameters (no leading L)."""
        cfg, dtype = self.cfg, x_BTD.dtype
        B, T, D = x_BTD.shape
        C = cfg.head_dim
        matrix = lambda p, *shape: p[...].astype(dtype).reshape(shape)  # noqa: E731
        h = rms_norm(x_BTD, self.attn_norm[...], cfg.rms_norm_eps)
        # without the barrier TPU compilers split the heads in the weights, and copy all layers' weights to do so
        q = jax.lax.optimization_barrier(h @ matrix(self.q, D, -1)).reshape(B, T, -1, C)
        k = (h @ matrix(self.k, D, -1)).reshape(B, T, -1, C)
        v = (h @ matrix(self.v, D, -1)).reshape(B, T, -1, C)
        q = rope(rms_norm(q, self.q_norm[...], cfg.rms_norm_eps), positions_BT, cfg.rope_theta)
        k = rope(rms_norm(k, self.k_norm[...], cfg.rms_norm_eps), positions_BT, cfg.rope_theta)
        mixed, cache = attend(q, k, v, cache, index)
        x_BTD = x_BTD + mixed.reshape(B, T, -1) @ matrix(self.o, -1, D)
        h = rms_norm(x_BTD, self.ffn_norm[...], cfg.rms_norm_eps)
        h = jax.nn.silu(h @ self.gate[...].astype(dtype)) * (h @ self.up[...].astype(dtype))
        return x_BTD + h @ self.down[...].astype(dtype), cache


class Decoder(nnx.Module):
    """Token ids in, hidden states out; `logits` turns hidden states into next-token logits."""

    def __init__(self, cfg: DecoderConfig, dtype: Dtype, remat: Remat, *, rngs: nnx.Rngs) -> None:
        self.cfg, self.dtype, self.remat = cfg, dtype, remat
        shape = (cfg.vocab_size, cfg.hidden_size)
        self.embed = param(rngs.params(), shape, ("vocab", "embed"), cfg.init_std)
        self.layers = Layers(cfg, rngs=rngs)
        self.norm = param(rngs.params(), (cfg.hidden_size,), ("embed",), None)
        if not cfg.tie_embeddings:
            self.head = param(rngs.params(), shape, ("vocab", "embed"), cfg.init_std)

    def __call__(
        self, tokens_BT: jax.Array, positions_BT: jax.Array, attend: Attend, cache: Any = None, *, unroll: bool = False
    ) -> tuple[jax.Array, Any]:
        """Final hidden states `[B, T, D]` (after the last norm) and the cache after the last layer.

        unroll: write the layers out instead of scanning over them; `attend` then gets a plain int as its layer.
        """
        cfg = self.cfg
        graph, stacked = nnx.split(self.layers)
        x = self.embed[...].astype(self.dtype)[tokens_BT]
        if unroll:
            for i in range(cfg.num_layers):
                layer = nnx.merge(graph, jax.tree.map(lambda a, i=i: a[i], stacked))
                x, cache = layer.layer(x, positions_BT, attend, cache, i)
            return rms_norm(x, self.norm[...], cfg.rms_norm_eps), cache

        def body(carry, xs):
            x, cache = carry
            params, index = xs
            return nnx.merge(graph, params).layer(x, positions_BT, attend, cache, index), None

        if self.remat == "full":
            body = jax.checkpoint(body, prevent_cse=False)
        elif self.remat == "dots":
            body = jax.checkpoint(
                body, prevent_cse=False, policy=jax.checkpoint_policies.checkpoint_dots_with_no_batch_dims
            )
        (x, cache), _ = jax.lax.scan(body, (x, cache), (stacked, jnp.arange(cfg.num_layers)))
        return rms_norm(x, self.norm[...], cfg.rms_norm_eps), cache

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Next-token logits `[..., V]` in float32 of hidden states `[..., D]`."""
        head = self.head_matrix
        return jnp.einsum("...d,vd->...v", hidden, head.astype(hidden.dtype), preferred_element_type=jnp.float32)

    @property
    def head_matrix(self) -> jax.Array:
        """What maps hidden states to logits, `[V, D]`: the embedding itself where they are tied."""
        return (self.embed if self.cfg.tie_embeddings else self.head)[...]


@dataclasses.dataclass(frozen=True)
class Model:
    """A decoder as pure functions over a parameter dict.

    dtype: compute type; parameters are kept in float32 and cast where they are used.
    remat: what the backward pass recomputes: nothing, everything inside a layer, or all but the matmul outputs.
    """

    cfg: DecoderConfig
    dtype: Dtype = "float32"
    remat: Remat = "none"

    def init(self, seed: int) -> Params:
        """Random parameters, a nested dict of float32 arrays."""
        return nnx.to_pure_dict(nnx.state(self._module(seed), nnx.Param))

    def abstract(self) -> Params:
        """Shapes and dtypes of the parameters, nothing allocated."""
        return jax.eval_shape(lambda: self.init(0))

    def axes(self) -> Params:
        """Logical axis names of every parameter, same tree."""
        state = nnx.state(nnx.eval_shape(lambda: self._module(0)), nnx.Param)
        names = jax.tree.map(
            lambda v: v.replace(v.get_metadata()["axes"]), state, is_leaf=lambda v: isinstance(v, nnx.Variable)
        )
        return nnx.to_pure_dict(names)

    def bind(self, params: Params) -> Decoder:
        """The module with these parameters; use it inside a jitted function."""
        graph, state = nnx.split(nnx.eval_shape(lambda: self._module(0)))
        nnx.replace_by_pure_dict(state, params)
        return nnx.merge(graph, state)

    def num_params(self) -> int:
        return sum(x.size for x in jax.tree.leaves(self.abstract()))

    def _module(self, seed: int) -> Decoder:
        return Decoder(self.cfg, self.dtype, self.remat, rngs=nnx.Rngs(seed))
