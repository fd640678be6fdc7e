"""Llama 3: no biases, no norms of heads, rotary frequencies stretched for long contexts (arXiv:2407.21783)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import nnx

from rolljax.errors import CheckpointError
from rolljax.model.decoder import DecoderConfig
from rolljax.model.folder import Folder, Tensor, attention_tensors, ffn_tensors, written_shape
from rolljax.model.layers import Layers, PreNormLayers


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's stretch of rotary embeddings beyond the `original_max_position` tokens of pre-training.

    Waves shorter than `original / high_freq_factor` stay, those longer than `original / low_freq_factor` are made
    `factor` times as long, and those between in between.
    """

    factor: float = 8.0
    """Factor by which long wavelengths are stretched."""
    low_freq_factor: float = 1.0
    """Factor for the upper bound of the wavelengths that are partly stretched, `original_max_position /
    low_freq_factor`; longer ones are stretched in full."""
    high_freq_factor: float = 4.0
    """Factor for the lower bound of the wavelengths that are partly stretched, `original_max_position /
    high_freq_factor`; shorter ones are not stretched."""
    original_max_position: int = 8192
    """Tokens of context of pre-training."""

    def stretch(self, frequencies: jax.Array) -> jax.Array:
        """Lower the angular frequencies of long wavelengths by `factor`; blend between `low_freq_factor` and
        `high_freq_factor`."""
        waves = self.original_max_position * frequencies / (2 * math.pi)  # in the original context
        keep = (waves - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        keep = jnp.clip(keep, 0, 1)
        return keep * frequencies + (1 - keep) * frequencies / self.factor


@dataclasses.dataclass(frozen=True)
class Llama3Config(DecoderConfig):
    """Shape of a Llama 3."""

    rope_scaling: RopeScaling | None = None
    """Stretch of rotary embeddings for long contexts (`RopeScaling`); None: there is none."""

    architecture = "LlamaForCausalLM"
    model_type = "llama"

    def layers(self, rngs: nnx.Rngs) -> Layers:
        return Llama3Layers(self, rngs=rngs)

    @classmethod
    def from_folder(cls, raw: Folder) -> Self:
        rotary = raw.rope()
        raw.refuse(
            rope_parameters=rotary.get("rope_type") not in ("default", "llama3"),
            attention_bias=raw.get("attention_bias", False),
            mlp_bias=raw.get("mlp_bias", False),
            hidden_act=raw.get("hidden_act", "silu") != "silu",
        )
        scaling = None
        if rotary.get("rope_type") == "llama3":
            factor, low, high = (rotary.number(n) for n in ("factor", "low_freq_factor", "high_freq_factor"))
            if high <= low:
                raise CheckpointError(f"{rotary.path}: high_freq_factor = {high} is not above low_freq_factor = {low}")
            scaling = RopeScaling(factor, low, high, rotary.count("original_max_position_embeddings"))
        return cls(
            **raw.shape(),
            rope_theta=rotary.number("rope_theta"),
            tie_embeddings=raw.flag("tie_word_embeddings", False),
            rope_scaling=scaling,
        )

    def to_folder(self) -> Mapping[str, Any]:
        rotary: dict[str, Any] = {"rope_type": "default"}
        if s := self.rope_scaling:
            rotary = {
                "rope_type": "llama3",
                "factor": s.factor,
                "low_freq_factor": s.low_freq_factor,
                "high_freq_factor": s.high_freq_factor,
                "original_max_position_embeddings": s.original_max_position,
            }
        return written_shape(self) | {
            "rope_theta": self.rope_theta,
            "rope_parameters": {**rotary, "rope_theta": self.rope_theta},
            "rope_scaling": rotary if self.rope_scaling else None,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
        }

    def layer_tensors(self) -> Iterator[Tensor]:
        yield from attention_tensors(self)
        yield from ffn_tensors()


class Llama3Layers(PreNormLayers):
    """Llama 3's layers, stacked."""

    def declare(self, rngs: nnx.Rngs) -> None:
        self.declare_attention(rngs)
        self.declare_ffn(rngs)

    @property
    def frequencies(self) -> jax.Array:
        scaling = self.cfg.rope_scaling
        return scaling.stretch(super().frequencies) if scaling else super().frequencies
