"""Qwen2 and Qwen2.5: biases on queries, keys and values, no norms of heads (arXiv:2407.10671)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Self

from flax import nnx

from rolljax.model.decoder import DecoderConfig
from rolljax.model.folder import Folder, Tensor, attention_tensors, ffn_tensors, written_plain
from rolljax.model.layers import Layers, PreNormLayers


@dataclasses.dataclass(frozen=True)
class Qwen2Config(DecoderConfig):
    """Shape of a Qwen2."""

    architecture = "Qwen2ForCausalLM"
    model_type = "qwen2"

    def layers(self, rngs: nnx.Rngs) -> Layers:
        return Qwen2Layers(self, rngs=rngs)

    @classmethod
    def from_folder(cls, raw: Folder) -> Self:
        return cls(**raw.plain())

    def to_folder(self) -> Mapping[str, Any]:
        return written_plain(self)

    def layer_tensors(self) -> Iterator[Tensor]:
        yield from attention_tensors(self, bias=True)
        yield from ffn_tensors()


class Qwen2Layers(PreNormLayers):
    """Qwen2's layers, stacked: attention with biases on queries, keys and values."""

    def declare(self, rngs: nnx.Rngs) -> None:
        self.declare_attention(rngs, bias=True)
        self.declare_ffn(rngs)
