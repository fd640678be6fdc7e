"""Qwen3 with a mixture of experts in every layer (arXiv:2505.09388)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Self

import jax
from flax import nnx

from rolljax.model import moe
from rolljax.model.decoder import DecoderConfig
from rolljax.model.folder import MOST_LAYERS, Folder, Tensor, attention_tensors, transposed, written_plain
from rolljax.model.layers import ExpertRouting, Layers, PreNormLayers


@dataclasses.dataclass(frozen=True)
class Qwen3MoeConfig(DecoderConfig):
    """Shape of a Qwen3 with experts. `ffn_size` is that of dense layers, which there are none of."""

    num_experts: int = 8
    """Number of experts in each layer."""
    experts_per_token: int = 2
    """Number of experts that each token is routed to."""
    expert_ffn_size: int = 64
    """Width of an expert's feed-forward part."""
    normalise: bool = True
    """The weights of a token's experts sum to 1."""
    router_aux_coef: float = 0.001
    """Coefficient of the load-balancing loss in the total loss."""

    architecture = "Qwen3MoeForCausalLM"
    model_type = "qwen3_moe"

    @property
    def routing(self) -> moe.Routing:
        return moe.Routing(self.num_experts, self.experts_per_token, self.normalise, self.router_aux_coef)

    @property
    def active_ffn_size(self) -> int:
        return self.experts_per_token * self.expert_ffn_size

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.routing  # which checks itself

    def layers(self, rngs: nnx.Rngs) -> Layers:
        return Qwen3MoeLayers(self, rngs=rngs)

    @classmethod
    def from_folder(cls, raw: Folder) -> Self:
        raw.refuse(
            attention_bias=raw.get("attention_bias", False),
            mlp_only_layers=bool(raw.get("mlp_only_layers", [])),
            decoder_sparse_step=raw.get("decoder_sparse_step", 1) != 1,
        )
        return cls(
            **raw.plain(),
            num_experts=raw.count(
                "num_local_experts" if raw.get("num_experts", None) is None else "num_experts", most=MOST_LAYERS
            ),
            experts_per_token=raw.count("num_experts_per_tok"),
            expert_ffn_size=raw.count("moe_intermediate_size"),
            normalise=raw.flag("norm_topk_prob", False),
            router_aux_coef=raw.number("router_aux_loss_coef", 0.001, positive=False),
        )

    def to_folder(self) -> Mapping[str, Any]:
        return written_plain(self) | {
            "attention_bias": False,
            "num_experts": self.num_experts,
            "num_experts_per_tok": self.experts_per_token,
            "moe_intermediate_size": self.expert_ffn_size,
            "norm_topk_prob": self.normalise,
            "router_aux_loss_coef": self.router_aux_coef,
            "mlp_only_layers": [],
            "decoder_sparse_step": 1,
        }

    def layer_tensors(self) -> Iterator[Tensor]:
        yield from attention_tensors(self, head_norms=True)
        yield Tensor("ffn_norm", "post_attention_layernorm.weight")
        yield transposed("router", "mlp.gate")
        for name in ("gate", "up", "down"):
            for e in range(self.num_experts):
                yield transposed(name, f"mlp.experts.{e}.{name}_proj", expert=e)


class Qwen3MoeLayers(PreNormLayers):
    """Layers of a Qwen3 with experts, stacked."""

    indexed = ("gate", "up", "down")

    def declare(self, rngs: nnx.Rngs) -> None:
        self.declare_attention(rngs, head_norms=True)
        moe.declare(self, rngs, self.cfg.num_experts, self.cfg.expert_ffn_size)

    def feed(
        self, h_BTD: jax.Array, index: jax.Array | int, expert_ids_BTk: jax.Array | None
    ) -> tuple[jax.Array, ExpertRouting | None]:
        mixture, weights = self.cfg.routing.choose(self.project(h_BTD, "router"), expert_ids_BTk)
        experts = moe.ExpertWeights(self.gate[...], self.up[...], self.down[...])
        if experts.gate.ndim > 3:
            experts = experts._replace(layer=index)
        return moe.mixed(h_BTD, mixture.expert_ids_BTk, weights, experts), mixture
