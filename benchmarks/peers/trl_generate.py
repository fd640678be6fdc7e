"""A rollout of TRL's GRPOTrainer: its own `_generate_single_turn`, which its tool loop calls for further turns too.

    /tmp/peers/trl/bin/python benchmarks/peers/trl_generate.py --workload fixed [--threads 1] [--continuous-batching]

How it was made fair: the trainer is built as for a GRPO step of 64 samples (float32, no gradient checkpointing; top_p 1
and top_k 0, for which no filter runs), and only the method that generates is timed: token ids in, token ids out. Every
sample has its own copy of the prompt, as the trainer's sampler repeats prompts. No log-probabilities are returned,
because the trainer asks for none here: a little less work than the others do. Without flags it is the trainer's
default: `model.generate` on one static batch with a cache that grows. Flags, to report the best of them: `--threads`
of torch, `--attn`, `--cache static`, and `--continuous-batching`: transformers' paged engine as the trainer calls it,
which shares pages of common prefixes. That one gets pages for this workload only (its default takes half of the memory
and spends seconds on it) and a small batch, which was fastest on a CPU; `--cb FIELD=N` overrides.
"""

import os
import sys
import tempfile
from pathlib import Path

for name, value in {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TRL_EXPERIMENTAL_SILENCE": "1"}.items():
    os.environ.setdefault(name, value)

import numpy as np  # noqa: E402
import tokenizers  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from datasets import Dataset  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

sys.path.insert(0, str(Path(__file__).parents[1]))
import workloads  # noqa: E402


def tokenizer(vocab, stop):
    """Return a tokenizer of words that are ids. Padding is the model's last id: rows that are done must still embed
    it."""
    words = {f"<{i}>": i for i in range(vocab + 1)}
    model = tokenizers.models.WordLevel(words, unk_token=f"<{vocab - 1}>")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(model),
        pad_token=f"<{vocab - 1}>",
        eos_token=f"<{stop}>",
        padding_side="left",
    )


def build(s, params, attn):
    """Return transformers' Qwen3 with our weights."""
    config = transformers.Qwen3Config(
        vocab_size=s.vocab, hidden_size=s.dim, intermediate_size=s.ffn, num_hidden_layers=s.layers,
        num_attention_heads=s.heads, num_key_value_heads=s.kv_heads, head_dim=s.head_dim, rms_norm_eps=s.eps,
        rope_parameters={"rope_type": "default", "rope_theta": s.rope_theta}, tie_word_embeddings=False,
        max_position_embeddings=2048, attn_implementation=attn,
    )  # fmt: skip
    model = transformers.Qwen3ForCausalLM(config).to(torch.float32)
    out_in = lambda w: w.reshape(s.dim, -1).T  # noqa: E731
    in_out = lambda w: w.reshape(-1, s.dim).T  # noqa: E731
    same = lambda w: w  # noqa: E731
    theirs = {
        "attn_norm": ("input_layernorm", same), "q": ("self_attn.q_proj", out_in), "k": ("self_attn.k_proj", out_in),
        "v": ("self_attn.v_proj", out_in), "o": ("self_attn.o_proj", in_out), "q_norm": ("self_attn.q_norm", same),
        "k_norm": ("self_attn.k_norm", same), "ffn_norm": ("post_attention_layernorm", same),
        "gate": ("mlp.gate_proj", out_in), "up": ("mlp.up_proj", out_in), "down": ("mlp.down_proj", in_out),
    }  # fmt: skip
    state = {"model.embed_tokens": params["embed"], "model.norm": params["norm"], "lm_head": params["head"]}
    state |= {
        f"model.layers.{i}.{name}": change(params["layers"][n][i])
        for n, (name, change) in theirs.items()
        for i in range(s.layers)
    }
    model.load_state_dict({f"{k}.weight": torch.tensor(np.ascontiguousarray(v)) for k, v in state.items()}, strict=True)
    return model


def main():
    p = workloads.parser(__doc__)
    p.add_argument("--threads", type=int, default=0, help="torch threads; 0: as many as cores")
    p.add_argument("--attn", default="sdpa", choices=["sdpa", "eager"])
    p.add_argument("--cache", choices=["static"], help="the trainer's cache_implementation; default: one that grows")
    p.add_argument("--continuous-batching", action="store_true")
    p.add_argument("--cb", nargs="*", default=[], metavar="FIELD=N", help="ContinuousBatchingConfig")
    args = p.parse_args()
    torch.set_num_threads(args.threads or len(os.sched_getaffinity(0)))
    transformers.logging.set_verbosity_error()
    shape, w, neutral = workloads.setup(args)
    model = build(shape, neutral, args.attn)

    def logits(tokens):
        with torch.no_grad():
            return model(torch.tensor(tokens, dtype=torch.long)).logits.numpy()

    pages = w.rows.shape[0] * ((w.rows.shape[1] + w.turns * (w.max_new + w.appends.shape[2])) // 32 + 2)
    cb = {"page_size": 32, "num_blocks": pages, "max_batch_tokens": 128}
    cb |= {k: int(v) for k, v in (x.split("=") for x in args.cb)}
    off = workloads.check_logits(logits, neutral, shape, w)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **kw: [0.0] * len(completions),
        train_dataset=Dataset.from_dict({"prompt": ["<1>"] * 64}),
        processing_class=tokenizer(shape.vocab, w.stop),
        args=GRPOConfig(
            output_dir=tempfile.mkdtemp(), report_to="none", save_strategy="no", use_cpu=not torch.cuda.is_available(),
            bf16=False, gradient_checkpointing=False, per_device_train_batch_size=workloads.SEQUENCES,
            num_generations=max(w.group_size, 2), max_completion_length=w.max_new, temperature=1.0, top_p=1.0, top_k=0,
            cache_implementation=args.cache, use_transformers_continuous_batching=args.continuous_batching,
            transformers_continuous_batching_config=cb,
        ),
    )  # fmt: skip

    def one_turn(streams):
        ids, _ = trainer._generate_single_turn(streams.tolist(), None, {}, w.group_size)
        return ids

    def rollout(seed):
        torch.manual_seed(seed)
        return workloads.replay(w, lambda streams, turn: one_turn(streams))

    workloads.measure(
        "TRL continuous batching" if args.continuous_batching else "TRL", args, shape, w,
        rollout=rollout,
        prefill_tokens=workloads.replayed_tokens(w),
        packages=("trl", "transformers", "torch", "accelerate"),
        logits_off=off,
        threads=torch.get_num_threads(), attn=args.attn, cache=args.cache, cb=cb if args.continuous_batching else None,
    )  # fmt: skip


if __name__ == "__main__":
    main()
