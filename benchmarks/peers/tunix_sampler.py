"""Tunix's own sampler through its `VanillaRollout`: what `rollout_engine="vanilla"` runs in its GRPO trainer.

    /tmp/peers/tunix/bin/python benchmarks/peers/tunix_sampler.py --workload fixed

How it was made fair: one static batch of all 64 sequences, every sample with its own copy of the prompt (Tunix's GRPO
trainer repeats prompts before it calls the rollout); prompts unpadded and a KV cache of exactly prompt + new tokens
(Tunix's command line adds 256 slots); top_p 1 without top_k, for which Tunix skips its sort; log-probabilities are
returned, as rolljax does (`--no-logprobs`: without); a tokenizer that costs nothing. In `conversation` every turn has
a rollout of its own, so that no turn computes on padding or on a cache larger than it needs: better than what one
`RolloutConfig` for all turns would give. `lognormal` runs under the cap of 512 tokens and ends with the last sequence.
Tunix leaves the stop token out of what it returns; it is put back (and so checked) here.
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tunix.models.qwen3 import model as qwen3
from tunix.rl.rollout import base_rollout, vanilla_rollout

sys.path.insert(0, str(Path(__file__).parents[1]))
import workloads  # noqa: E402


class Ids:
    """A tokenizer whose text is the list of ids. Padding is no token of the model: nothing is masked by accident."""

    def __init__(self, vocab, stop):
        self._pad, self._stop = vocab, stop

    def encode(self, ids):
        return ids

    def decode(self, ids):
        return ids

    def bos_id(self):
        return None

    def eos_id(self):
        return self._stop

    def pad_id(self):
        return self._pad


def build(s, params):
    """Return Tunix's Qwen3 with our weights."""
    config = qwen3.ModelConfig(
        num_layers=s.layers, vocab_size=s.vocab, embed_dim=s.dim, hidden_dim=s.ffn, num_heads=s.heads,
        head_dim=s.head_dim, num_kv_heads=s.kv_heads, rope_theta=s.rope_theta, norm_eps=s.eps, use_tied_embedding=False,
    )  # fmt: skip
    model = qwen3.Qwen3(config, rngs=nnx.Rngs(0))
    values = {
        "embedder.input_embedding": params["embed"],
        "final_norm.w": params["norm"],
        "lm_head.w": params["head"].T,
    }
    theirs = {
        "attn_norm": "input_layernorm.w", "q": "attn.q_proj.w", "k": "attn.k_proj.w", "v": "attn.v_proj.w",
        "o": "attn.o_proj.w", "q_norm": "attn.q_norm.w", "k_norm": "attn.k_norm.w",
        "ffn_norm": "post_attention_layernorm.w", "gate": "mlp.gate_proj.kernel", "up": "mlp.up_proj.kernel",
        "down": "mlp.down_proj.kernel",
    }  # fmt: skip
    values |= {f"layers.{i}.{name}": params["layers"][n][i] for n, name in theirs.items() for i in range(s.layers)}
    state = nnx.state(model, nnx.Param)
    for path, leaf in nnx.to_flat_state(state):
        value = jnp.asarray(values.pop(".".join(map(str, path))))
        assert value.shape == leaf.get_value().shape, (path, value.shape)
        leaf.set_value(value)
    assert not values, list(values)
    nnx.update(model, state)
    return model


def main():
    p = workloads.parser(__doc__)
    p.add_argument("--no-logprobs", action="store_true")
    args = p.parse_args()
    shape, w, neutral = workloads.setup(args)
    model = build(shape, neutral)
    rollouts, seen = {}, {}

    def logits(tokens):
        mask = jnp.tril(jnp.ones((1, tokens.shape[1], tokens.shape[1]), bool))
        return model(jnp.asarray(tokens), jnp.arange(tokens.shape[1])[None], None, mask)[0]

    def one_turn(streams, seed):
        length = streams.shape[1]
        if length not in rollouts:
            cache = base_rollout.CacheConfig(length + w.max_new, shape.layers, shape.kv_heads, shape.head_dim)
            rollouts[length] = vanilla_rollout.VanillaRollout(model, Ids(shape.vocab, w.stop), cache)
        out = rollouts[length].generate(
            streams.tolist(),
            base_rollout.RolloutConfig(
                max_tokens_to_generate=w.max_new,
                max_prompt_length=length,
                temperature=1.0,
                top_p=1.0,
                top_k=None,
                seed=jax.random.PRNGKey(seed),
                eos_tokens=[w.stop],
                return_logprobs=not args.no_logprobs,
            ),
        )
        if not args.no_logprobs:
            seen.update(prompt=streams[0], tokens=out.tokens[0], logps=np.array(out.logprobs[0]))
        return [np.append(t, w.stop) if len(t) < w.max_new else t for t in out.tokens]

    workloads.measure(
        "Tunix", args, shape, w,
        rollout=lambda seed: workloads.replay(w, lambda streams, turn: one_turn(streams, seed * w.turns + turn)),
        prefill_tokens=workloads.replayed_tokens(w),
        packages=("google-tunix", "jax", "jaxlib", "flax", "transformers"),
        logits_off=workloads.check_logits(logits, neutral, shape, w),
        logps_off=None if args.no_logprobs else lambda: workloads.check_logps(neutral, shape, **seen),
    )  # fmt: skip


if __name__ == "__main__":
    main()
