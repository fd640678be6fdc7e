"""Qwen3, dense: grouped queries, RMS norm on queries and keys, SwiGLU (arXiv:2505.09388)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Self

from flax import nnx

from rolljax.model.decoder import DecoderConfig
from rolljax.model.folder import Folder, Tensor, attention_tensors, ffn_tensors, written_shape
from rolljax.model.layers import Layers, PreNormLayers


@dataclasses.dataclass(frozen=True)
class Qwen3Config(DecoderConfig):
    """Shape of a dense Qwen3."""

    architecture = "Qwen3ForCausalLM"
    model_type = "qwen3"

    def layers(self, rngs: nnx.Rngs) -> Layers:
        return Qwen3Layers(self, rngs=rngs)

    @classmethod
    def from_folder(cls, raw: Folder) -> Self:
        rope_ = raw.rope()
        raw.refuse(
            rope_parameters=rope_["rope_type"] != "default",
            attention_bias=raw.get("attention_bias", False),
            use_sliding_window=raw.get("use_sliding_window", False),
            hidden_act=raw.get("hidden_act", "silu") != "silu",
        )
        tied = raw.get("tie_word_embeddings", False)
        return cls(**raw.shape(), rope_theta=float(rope_["rope_theta"]), tie_embeddings=tied)

    def to_folder(self) -> Mapping[str, Any]:
        return written_shape(self) | {
            "rope_theta": self.rope_theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "hidden_act": "silu",
            "attention_bias": False,
            "use_sliding_window": False,
        }

    def layer_tensors(self) -> Iterator[Tensor]:
        yield from attention_tensors(self, head_norms=True)
        yield from ffn_tensors()


class Qwen3Layers(PreNormLayers):
    def declare(self, rngs: nnx.Rngs) -> None:
        self.declare_attention(rngs, head_norms=True)
        self.declare_ffn(rngs)
