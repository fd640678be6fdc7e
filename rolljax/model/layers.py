"""Shared parts of the families' layers: parameters, norms, rotary embedding, projections, the gated feed-forward.

Parameters of all layers are stacked: each has a leading L, and a family's `layer` sees one slice.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from rolljax.model.attention import Attend
from rolljax.model.axes import COMPUTED_RULES, GATHERED, PARAM_RULES, constrain, is_gathered

LINEAR = {"q": 1, "k": 1, "v": 1, "o": 2, "gate": 1, "up": 1, "down": 1}
"""The linear maps of layers, where they are not experts', and how many axes of each are inputs."""


def param(key: jax.Array, shape: tuple[int, ...], axes: tuple[str, ...], std: float | None) -> nnx.Param:
    """Create a float32 parameter with its logical axis names (`model.axes`): truncated normal of `std`, or ones if
    `std` is None."""
    value = jnp.ones(shape) if std is None else std * jax.random.truncated_normal(key, -3, 3, shape)
    return nnx.Param(value, axes=axes)


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Apply the root-mean-square norm over the last axis, computed in float32."""
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return normed.astype(x.dtype) * jnp.expand_dims(scale.astype(x.dtype), range(x.ndim - scale.ndim))


def rope_frequencies(head_dim: int, theta: float) -> jax.Array:
    """Return the radians per position of each pair of a head's numbers, `[C / 2]`."""
    half = head_dim // 2
    return theta ** (-jnp.arange(half, dtype=jnp.float32) / half)


def rope(x_BTHC: jax.Array, positions_BT: jax.Array, frequencies: jax.Array) -> jax.Array:
    """Apply rotary position embedding in the halves convention (as in `transformers`)."""
    angle = positions_BT[..., None].astype(jnp.float32) * frequencies[None, None]
    sin, cos = jnp.sin(angle)[:, :, None, :], jnp.cos(angle)[:, :, None, :]
    a, b = jnp.split(x_BTHC.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BTHC.dtype)


def matmul(x: jax.Array, w: jax.Array, names: tuple[str, str]) -> jax.Array:
    """Multiply `x [..., in]` by `w`, flattened to `[in, out]` and cast to x's dtype.

    `names` are the logical names of the two flat axes. On a mesh `w` is gathered from its shards, once forward and once
    backward. The gradient of `w` is summed over devices in float32: in bfloat16 every addition of a ring reduction
    would round.

    Without a gather, the backward pass keeps the original `w`: in a scan over layers that is the parameter itself,
    where a flat or cast one would be a copy.
    """
    return _matmul(x, w, (names, w.shape, w.dtype))


Weight = tuple[tuple[str, str], tuple[int, ...], Any]
"""Names of a weight's flat axes, its shape and its dtype."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _matmul(x: jax.Array, w: jax.Array, kind: Weight) -> jax.Array:
    return _matmul_forward(x, w, kind)[0]


def _computed(x: jax.Array, w: jax.Array, kind: Weight) -> jax.Array:
    """Return `w` flattened, cast to the dtype of `x` and gathered."""
    return constrain(w.reshape(x.shape[-1], -1).astype(x.dtype), *kind[0], rules=COMPUTED_RULES)


def _matmul_forward(x: jax.Array, w: jax.Array, kind: Weight) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    gathered = checkpoint_name(_computed(x, w, kind), GATHERED)
    return x @ gathered, (x, gathered if is_gathered() else w)


def _matmul_backward(kind: Weight, saved: tuple[jax.Array, jax.Array], grad: jax.Array) -> tuple[jax.Array, jax.Array]:
    (names, shape, dtype), (x, kept) = kind, saved
    tokens = tuple(range(x.ndim - 1))
    of_w = jax.lax.dot_general(x, grad, ((tokens, tokens), ((), ())), preferred_element_type=dtype)
    w = kept if is_gathered() else _computed(x, kept, kind)
    return grad @ w.T, constrain(of_w, *names, rules=PARAM_RULES).reshape(shape)


_matmul.defvjp(_matmul_forward, _matmul_backward)


class ExpertRouting(NamedTuple):
    """The routing of a layer of experts."""

    expert_ids_BTk: jax.Array
    """Experts of each token, int32."""
    probs_BTE: jax.Array
    """The router's probabilities, float32."""


class Layers(nnx.Module):
    """All layers of a decoder, stacked. A family's subclass declares its parameters and computes `layer`."""

    indexed: ClassVar[tuple[str, ...]] = ()
    """Names of parameters that `layer` also takes of all layers at once."""

    def __init__(self, cfg: Any, *, rngs: nnx.Rngs) -> None:
        self.cfg = cfg
        self.declare(rngs)

    @abc.abstractmethod
    def declare(self, rngs: nnx.Rngs) -> None:
        """Make the parameters, with `stacked`."""

    @abc.abstractmethod
    def layer(
        self,
        x_BTD: jax.Array,
        positions_BT: jax.Array,
        attend: Attend,
        cache: Any,
        index: jax.Array | int,
        expert_ids_BTk: jax.Array | None,
    ) -> tuple[jax.Array, Any, ExpertRouting | None]:
        """Compute one layer. `self` holds that layer's slice of the parameters (no leading L; but see `indexed`).

        expert_ids_BTk: experts to use instead of the router's choice; -1 keeps the router's choice (None: everywhere).
        """

    # ---- parameters -------------------------------------------------------------------------------------------------

    def stacked(self, rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str, ...], std: float | None) -> nnx.Param:
        """Create a parameter for every layer, stacked on a leading axis."""
        return param(rngs.params(), (self.cfg.num_layers, *shape), ("layers", *axes), std)

    def declare_attention(self, rngs: nnx.Rngs, *, bias: bool = False, head_norms: bool = False) -> None:
        """Create the projections to and from heads and the norm before them; with `bias` the biases of queries, keys
        and values, with `head_norms` the norms of queries and keys."""
        cfg, p = self.cfg, self.stacked
        D, H, K, C = cfg.hidden_size, cfg.num_heads, cfg.num_kv_heads, cfg.head_dim
        self.attn_norm = p(rngs, (D,), ("norm",), cfg.norm_std)
        self.q = p(rngs, (D, H, C), ("embed", "heads", "head_dim"), cfg.init_std)
        self.k = p(rngs, (D, K, C), ("embed", "kv_heads", "head_dim"), cfg.init_std)
        self.v = p(rngs, (D, K, C), ("embed", "kv_heads", "head_dim"), cfg.init_std)
        self.o = p(rngs, (H, C, D), ("heads", "head_dim", "embed"), self.out_std)
        if bias:
            self.q_bias = p(rngs, (H, C), ("heads", "head_dim"), 0.0)
            self.k_bias = p(rngs, (K, C), ("kv_heads", "head_dim"), 0.0)
            self.v_bias = p(rngs, (K, C), ("kv_heads", "head_dim"), 0.0)
        if head_norms:
            self.q_norm = p(rngs, (C,), ("head_dim",), cfg.norm_std)
            self.k_norm = p(rngs, (C,), ("head_dim",), cfg.norm_std)

    def declare_ffn(self, rngs: nnx.Rngs) -> None:
        """Create the gated feed-forward and the norm before it."""
        D, F, p = self.cfg.hidden_size, self.cfg.ffn_size, self.stacked
        self.ffn_norm = p(rngs, (D,), ("norm",), self.cfg.norm_std)
        self.gate = p(rngs, (D, F), ("embed", "ffn"), self.cfg.init_std)
        self.up = p(rngs, (D, F), ("embed", "ffn"), self.cfg.init_std)
        self.down = p(rngs, (F, D), ("ffn", "embed"), self.out_std)

    @property
    def out_std(self) -> float:
        """Standard deviation of projections back to the hidden state: the sum over layers keeps its size."""
        return self.cfg.init_std / (2 * self.cfg.num_layers) ** 0.5

    # ---- computation ------------------------------------------------------------------------------------------------

    def extend(self, parts: Mapping[str, jax.Array], factor: float) -> None:
        """Set arrays in addition to the parameters, by the names that `project` knows. factor: scale of adapters."""
        self.factor = factor
        for name, value in parts.items():
            setattr(self, name, nnx.Param(value))

    def project(self, x: jax.Array, name: str) -> jax.Array:
        """Apply the linear map `name` to `x [..., in]`; return `[..., out]`, flat.

        The product of an int8 map is multiplied by its `{name}_scale [out]`. Adapters `{name}_a [in, r]`, `{name}_b [r,
        out]` add their output (`model.lora`); `adapter_columns [B, 1, r]` weighs their columns in each row of x.
        """
        p, ins = getattr(self, name), LINEAR.get(name, 1)
        w, axes = p[...], p.get_metadata()["axes"][1:]
        if hasattr(self, f"{name}_scale"):
            scale = getattr(self, f"{name}_scale")[...]
            w = constrain(w.reshape(x.shape[-1], -1), axes[0], axes[ins], rules=COMPUTED_RULES)
            out = ((x @ w.astype(x.dtype)) * scale).astype(x.dtype)
        else:
            out = matmul(x, w, (axes[0], axes[ins]))
        if hasattr(self, f"{name}_a"):
            a, b = (getattr(self, f"{name}_{part}")[...] for part in "ab")
            low = matmul(x, a, (axes[0], "rank"))
            if hasattr(self, "adapter_columns"):
                low *= self.adapter_columns[...].astype(low.dtype)
            out += matmul(low, b, ("rank", axes[ins])) * self.factor
        return out

    def heads(self, h_BTD: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return queries, keys and values `[B, T, heads, C]` of normed hidden states, with their biases if there are
        any."""
        B, T, _ = h_BTD.shape
        # without the barrier TPU compilers split the heads in the weights, and copy all layers' weights to do so
        flat = [jax.lax.optimization_barrier(self.project(h_BTD, "q")), *(self.project(h_BTD, n) for n in ("k", "v"))]
        q, k, v = (x.reshape(B, T, -1, self.cfg.head_dim) for x in flat)
        if hasattr(self, "q_bias"):
            q, k, v = (
                x + bias[...].astype(x.dtype) for x, bias in ((q, self.q_bias), (k, self.k_bias), (v, self.v_bias))
            )
        q = constrain(q, "batch", "length", "heads", "head_dim")
        k, v = (constrain(x, "batch", "length", "kv_heads", "head_dim") for x in (k, v))
        return q, k, v

    def mixed_out(self, mixed_BTHC: jax.Array) -> jax.Array:
        """Project the output of attention back to `[B, T, D]`."""
        B, T, H, C = mixed_BTHC.shape
        out = self.project(mixed_BTHC.reshape(B, T, H * C), "o")
        return constrain(out, "batch", "length", "hidden")

    def gated(self, h_BTD: jax.Array, activation: Callable[[jax.Array], jax.Array] = jax.nn.silu) -> jax.Array:
        """Apply the gated feed-forward."""
        h = activation(self.project(h_BTD, "gate")) * self.project(h_BTD, "up")
        return constrain(self.project(constrain(h, "batch", "length", "ffn"), "down"), "batch", "length", "hidden")


class PreNormLayers(Layers):
    """Layers of most families: norm, attention, sum; norm, feed-forward, sum. Heads are normed if that is declared."""

    @property
    def frequencies(self) -> jax.Array:
        """Radians per position of the rotary embedding, `[C / 2]`."""
        return rope_frequencies(self.cfg.head_dim, self.cfg.rope_theta)

    def feed(
        self, h_BTD: jax.Array, index: jax.Array | int, expert_ids_BTk: jax.Array | None
    ) -> tuple[jax.Array, ExpertRouting | None]:
        """Apply the feed-forward to normed hidden states."""
        del index, expert_ids_BTk
        return self.gated(h_BTD), None

    def layer(
        self,
        x_BTD: jax.Array,
        positions_BT: jax.Array,
        attend: Attend,
        cache: Any,
        index: jax.Array | int,
        expert_ids_BTk: jax.Array | None,
    ) -> tuple[jax.Array, Any, ExpertRouting | None]:
        norm = functools.partial(rms_norm, eps=self.cfg.rms_norm_eps)
        q, k, v = self.heads(norm(x_BTD, self.attn_norm[...]))
        if hasattr(self, "q_norm"):
            q, k = norm(q, self.q_norm[...]), norm(k, self.k_norm[...])
        q, k = (rope(x, positions_BT, self.frequencies) for x in (q, k))
        mixed, cache = attend(q, k, v, cache, index)
        x_BTD = x_BTD + self.mixed_out(mixed)
        out, mixture = self.feed(norm(x_BTD, self.ffn_norm[...]), index, expert_ids_BTk)
        return x_BTD + out, cache, mixture
