"""One small `transformers` model per family: the oracle of every test that goes over all families.

A new family is one entry of `FAMILIES`, under the name of its file.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from jax.sharding import SingleDeviceSharding
from transformers import AutoModelForCausalLM

from rolljax.model import hf
from rolljax.model.attention import packed
from rolljax.model.decoder import Model

VOCAB = 277  # a multiple of nothing


@dataclasses.dataclass(frozen=True)
class Family:
    """config: a class of `transformers`. settings: beside those of `SHAPE`. norms: range of what is added to norms, so
    that each of their numbers counts."""

    config: str
    settings: dict
    norms: tuple[float, float] = (-0.5, 0.5)

    def make(self, **changes):
        torch.manual_seed(0)
        config = getattr(transformers, self.config)(**(SHAPE | self.settings | changes))
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():  # norms that are all alike and biases of 0 would hide a mistake
            for name, p in model.named_parameters():
                if "norm" in name or name.endswith("bias"):
                    p.add_(torch.empty_like(p).uniform_(*self.norms))
        return model


SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "intermediate_size": 80,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50_000.0},
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}

FAMILIES = {
    "qwen2": Family("Qwen2Config", {"tie_word_embeddings": False, "head_dim": 8}),
    "qwen3": Family("Qwen3Config", {"tie_word_embeddings": True}),
    "qwen3_moe": Family(
        "Qwen3MoeConfig",
        {
            "tie_word_embeddings": False,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
        },
    ),
    "llama3": Family(
        "LlamaConfig",
        {
            "tie_word_embeddings": False,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {  # one pair of a head stays, one is between, four are stretched
                "rope_type": "llama3",
                "rope_theta": 50_000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "gemma3": Family(
        "Gemma3TextConfig",
        {
            "tie_word_embeddings": True,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "sliding_window": 8,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 100_000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5_000.0},
            },
            "query_pre_attn_scalar": 20,
            "final_logit_softcapping": 4.0,
        },
        norms=(0.5, 2.5),  # or the scaled embedding says it all, and every token is followed by itself
    ),
}


def make_folder(folder, name="qwen3", *, dtype=torch.float32, shard_size="5GB", **changes):
    """Write a folder of random weights; returns the model of `transformers` that reads it, in float32."""
    FAMILIES[name].make(**changes).to(dtype).save_pretrained(folder, max_shard_size=shard_size)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def load(folder, dtype="float32"):
    """Load our model of a folder, and its parameters on the first device."""
    model = Model(hf.read_config(folder), dtype)
    here = SingleDeviceSharding(jax.devices()[0])
    return model, hf.load(folder, model, jax.tree.map(lambda _: here, model.abstract()))


def our_logits(model, params, tokens, positions, segments, branches=None):
    """Compute logits `[B, T, V]` of packed rows."""
    branches = np.zeros_like(segments) if branches is None else branches

    @jax.jit
    def run(params, tokens, positions, segments, branches):
        decoder = model.bind(params)
        return decoder.logits(decoder(tokens, positions, packed(segments, branches, positions)).hidden)

    return np.asarray(run(params, *map(jnp.array, (tokens, positions, segments, branches))))


def their_logits(reference, tokens):
    """Compute logits `[T, V]` of one sequence."""
    with torch.no_grad():
        return reference(torch.tensor(tokens[None])).logits[0].float().numpy()
