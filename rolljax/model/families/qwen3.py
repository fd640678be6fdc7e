"""Qwen3, dense: grouped queries, RMS norm on queries and keys, SwiGLU (arXiv:2505.09388)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Self

from flax import nnx

from rolljax.model.decoder import DecoderConfig
from rolljax.model.folder import Folder, Tensor, attention_tensors, ffn_tensors, written_plain
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
        raw.refuse(attention_bias=raw.get("attention_bias", False))
        return cls(**raw.plain())

    def to_folder(self) -> Mapping[str, Any]:
        return written_plain(self) | {"attention_bias": False}

    def layer_tensors(self) -> Iterator[Tensor]:
        yield from attention_tensors(self, head_norms=True)
        yield from ffn_tensors()


class Qwen3Layers(PreNormLayers):
    """Qwen3's layers, stacked: attention with norms on the heads of queries and keys."""

    def declare(self, rngs: nnx.Rngs) -> None:
        self.declare_attention(rngs, head_norms=True)
        self.declare_ffn(rngs)
