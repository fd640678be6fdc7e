"""Gemma 3, text: five layers that look back a window, then one that looks back to the beginning (arXiv:2503.19786).

Norms around attention and feed-forward, their scales stored less 1; norms on queries and keys; GELU; embeddings scaled
by `hidden_size ** 0.5`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from rolljax.errors import CheckpointError
from rolljax.model.attention import Attend, Window
from rolljax.model.decoder import DecoderConfig
from rolljax.model.folder import Folder, Multimodal, Tensor, attention_tensors, ffn_tensors, written_shape
from rolljax.model.layers import ExpertRouting, Layers, rope, rope_frequencies


def offset_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Apply the root-mean-square norm times `1 + scale`, all in float32."""
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (normed * (1 + scale.astype(jnp.float32))).astype(x.dtype)


@dataclasses.dataclass(frozen=True)
class Gemma3Config(DecoderConfig):
    """Shape of a Gemma 3."""

    rope_theta: float = 1_000_000.0
    """Base of the rotary embedding in global layers."""
    rope_factor: float = 1.0
    """Factor by which the positions in global layers are divided."""
    rope_local_theta: float = 10_000.0
    """Base of the rotary embedding in local layers."""
    sliding_window: int = 512
    """Number of tokens to which a local layer attends."""
    global_every: int = 6
    """Distance between global layers: a layer is global if its number divided by this has the remainder 0."""
    query_scalar: float | None = None
    """Queries are scaled by the inverse square root of this number (None: `head_dim`)."""
    logit_softcap: float | None = None
    """Logits z become `cap * tanh(z / cap)`."""

    architecture = "Gemma3ForCausalLM"
    model_type = "gemma3_text"
    norm_std = 0.0
    multimodal = Multimodal(
        "Gemma3ForConditionalGeneration",
        "language_model.",
        "model.language_model",
        ("vision_tower.", "multi_modal_projector."),
        {  # Google's folders leave out the defaults of `transformers`
            "vocab_size": 262_208,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 131_072,
        },
    )

    @property
    def window(self) -> int | None:
        return self.sliding_window

    @property
    def final_softcap(self) -> float | None:
        return self.logit_softcap

    @property
    def is_local(self) -> np.ndarray:
        """Return whether each layer is local, `[L]`."""
        return (np.arange(self.num_layers) + 1) % self.global_every != 0

    def layers(self, rngs: nnx.Rngs) -> Layers:
        return Gemma3Layers(self, rngs=rngs)

    def embedded(self, x_BTD: jax.Array) -> jax.Array:
        return x_BTD * jnp.asarray(self.hidden_size**0.5, x_BTD.dtype)

    def final_norm(self, x_BTD: jax.Array, scale: jax.Array) -> jax.Array:
        return offset_norm(x_BTD, scale, self.rms_norm_eps)

    @classmethod
    def from_folder(cls, raw: Folder) -> Self:
        near, far = cls._rope(raw)
        every = raw.count("sliding_window_pattern", raw.get("_sliding_window_pattern", 6))
        kinds = raw.get("layer_types", None)
        if kinds is not None and not isinstance(kinds, list):
            raise CheckpointError(f"{raw.path}: layer_types is not a list")
        if kinds is not None:
            every = kinds.index("full_attention") + 1 if "full_attention" in kinds else len(kinds) + 1
        expected = ["full_attention" if (i + 1) % every == 0 else "sliding_attention" for i in range(len(kinds or []))]
        raw.refuse(
            rope_parameters=far.get("rope_type", "default") not in ("default", "linear")
            or near.get("rope_type", "default") != "default",
            layer_types=kinds is not None and list(kinds) != expected,
            attention_bias=raw.get("attention_bias", False),
            attn_logit_softcapping=raw.get("attn_logit_softcapping", None) is not None,
            use_bidirectional_attention=raw.get("use_bidirectional_attention", False),
            hidden_activation=raw.get("hidden_activation", "gelu_pytorch_tanh") != "gelu_pytorch_tanh",
        )
        softcap = raw.get("final_logit_softcapping", None)
        return cls(
            **raw.shape(),
            rope_theta=far.number("rope_theta"),
            rope_factor=far.number("factor", 1.0),
            rope_local_theta=near.number("rope_theta"),
            tie_embeddings=raw.flag("tie_word_embeddings", True),
            sliding_window=raw.count("sliding_window"),
            global_every=every,
            query_scalar=raw.number("query_pre_attn_scalar", 256),
            logit_softcap=None if softcap is None else raw.number("final_logit_softcapping"),
        )

    @staticmethod
    def _rope(raw: Folder) -> tuple[Folder, Folder]:
        """Return the rotary settings of local and of global layers."""
        rotary = raw.table("rope_parameters", {})
        near = rotary.table("sliding_attention", {})
        far = rotary.table("full_attention", {})
        if not far.fields:
            far = raw.table("rope_scaling", {})
        by_layer = ((near, raw.get("rope_local_base_freq", 10_000.0)), (far, raw.get("rope_theta", 1_000_000.0)))
        local, everywhere = (Folder(table.path, {"rope_theta": theta, **table.fields}) for table, theta in by_layer)
        return local, everywhere

    def to_folder(self) -> Mapping[str, Any]:
        far = {"rope_type": "default"} if self.rope_factor == 1 else {"rope_type": "linear", "factor": self.rope_factor}
        scalar = self.query_scalar or self.head_dim
        return written_shape(self) | {
            "rope_theta": self.rope_theta,
            "rope_local_base_freq": self.rope_local_theta,
            "rope_scaling": None if self.rope_factor == 1 else far,
            "rope_parameters": {
                "full_attention": {**far, "rope_theta": self.rope_theta},
                "sliding_attention": {"rope_type": "default", "rope_theta": self.rope_local_theta},
            },
            "layer_types": ["sliding_attention" if local else "full_attention" for local in self.is_local],
            "sliding_window": self.sliding_window,
            "sliding_window_pattern": self.global_every,
            "query_pre_attn_scalar": int(scalar) if scalar == int(scalar) else scalar,
            "final_logit_softcapping": self.logit_softcap,
            "attn_logit_softcapping": None,
            "hidden_activation": "gelu_pytorch_tanh",
            "attention_bias": False,
        }

    def layer_tensors(self) -> Iterator[Tensor]:
        yield from attention_tensors(self, head_norms=True)
        yield from ffn_tensors("pre_feedforward_layernorm")
        yield Tensor("attn_out_norm", "post_attention_layernorm.weight")
        yield Tensor("ffn_out_norm", "post_feedforward_layernorm.weight")


class Gemma3Layers(Layers):
    """Gemma 3's layers, stacked: norms around attention and feed-forward, windows in all but some."""

    def declare(self, rngs: nnx.Rngs) -> None:
        self.declare_attention(rngs, head_norms=True)
        self.declare_ffn(rngs)
        D = self.cfg.hidden_size
        self.attn_out_norm = self.stacked(rngs, (D,), ("norm",), 0.0)
        self.ffn_out_norm = self.stacked(rngs, (D,), ("norm",), 0.0)

    def layer(
        self,
        x_BTD: jax.Array,
        positions_BT: jax.Array,
        attend: Attend,
        cache: Any,
        index: jax.Array | int,
        expert_ids_BTk: jax.Array | None,
    ) -> tuple[jax.Array, Any, ExpertRouting | None]:
        cfg = self.cfg
        norm = functools.partial(offset_norm, eps=cfg.rms_norm_eps)
        local = jnp.asarray(cfg.is_local)[index]
        frequencies = jnp.where(
            local,
            rope_frequencies(cfg.head_dim, cfg.rope_local_theta),
            rope_frequencies(cfg.head_dim, cfg.rope_theta) / cfg.rope_factor,
        )
        q, k, v = self.heads(norm(x_BTD, self.attn_norm[...]))
        q = rope(norm(q, self.q_norm[...]), positions_BT, frequencies)
        k = rope(norm(k, self.k_norm[...]), positions_BT, frequencies)
        if cfg.query_scalar not in (None, cfg.head_dim):  # attention itself scales by the size of heads
            q = q * jnp.asarray((cfg.head_dim / cfg.query_scalar) ** 0.5, q.dtype)
        mixed, cache = attend(q, k, v, cache, index, Window(cfg.sliding_window, local))
        x_BTD = x_BTD + norm(self.mixed_out(mixed), self.attn_out_norm[...])
        h = self.gated(norm(x_BTD, self.ffn_norm[...]), functools.partial(jax.nn.gelu, approximate=True))
        return x_BTD + norm(h, self.ffn_out_norm[...]), cache, None
