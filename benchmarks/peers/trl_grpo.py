"""GRPO step time of Hugging Face TRL on a tiny random Qwen3 (CPU, no downloads).

  python trl_grpo.py --layers 4 --dim 128 --prompts 8 --generations 8

Same flags and same printed figures as tunix_grpo.py.
"""

import importlib.metadata as md
import os
import tempfile

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import grpo_common as bc
import torch
import transformers
from datasets import Dataset
from transformers import Qwen3Config, Qwen3ForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def main():
    p = bc.parser(__doc__)
    p.add_argument("--threads", type=int, default=0, help="torch threads; 0: all cores")
    p.add_argument("--attn", default="sdpa", choices=["sdpa", "eager"])
    p.add_argument(
        "--continuous-batching",
        action="store_true",
        help="use transformers' paged continuous-batching engine for rollouts",
    )
    args = p.parse_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads or len(os.sched_getaffinity(0)))
    transformers.logging.set_verbosity_error()

    tok = bc.tokenizer(args.vocab)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=args.vocab,
            hidden_size=args.dim,
            intermediate_size=args.ffn,
            num_hidden_layers=args.layers,
            num_attention_heads=args.heads,
            num_key_value_heads=args.kv_heads,
            head_dim=args.head_dim,
            rms_norm_eps=1e-6,
            rope_theta=1_000_000.0,
            tie_word_embeddings=True,
            max_position_embeddings=max(2048, args.prompt_len + args.new_tokens),
            attn_implementation=args.attn,
            initializer_range=0.02,
            pad_token_id=tok.pad_token_id,
            eos_token_id=tok.eos_token_id,
        )
    ).to(torch.float32)
    params = sum(x.numel() for x in model.parameters())

    total = args.warmup + args.steps + 1
    seqs = args.prompts * args.generations
    micro = (args.micro_prompts or args.prompts) * args.generations
    prompts = [x for batch in bc.prompt_batches(args, total) for x in batch]

    def vowels(completions, **kwargs):
        return [bc.reward(c) for c in completions]

    with tempfile.TemporaryDirectory() as out:
        if args.beta:  # TRL re-loads the reference model from the path in the config
            model.save_pretrained(out + "/init")
            model.config._name_or_path = out + "/init"
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=vowels,
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            processing_class=tok,
            args=GRPOConfig(
                output_dir=out,
                max_steps=total,
                report_to="none",
                save_strategy="no",
                logging_strategy="no",
                disable_tqdm=True,
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                shuffle_dataset=False,
                seed=args.seed,
                per_device_train_batch_size=micro,
                gradient_accumulation_steps=seqs // micro,
                num_generations=args.generations,
                num_iterations=1,
                max_completion_length=args.new_tokens,
                temperature=args.temperature,
                top_p=1.0,
                top_k=0,
                loss_type="grpo",
                scale_rewards="group",
                beta=args.beta,
                epsilon=0.2,
                learning_rate=args.lr,
                lr_scheduler_type="constant",
                weight_decay=0.0,
                max_grad_norm=1.0,
                use_transformers_continuous_batching=args.continuous_batching,
            ),
        )

        rec = bc.Recorder()
        sampled, state = [], {}
        single_turn, score = trainer._generate_single_turn, trainer._generate_and_score_completions

        def timed_single_turn(*a, **k):
            start = bc.now()
            ids, logps = single_turn(*a, **k)
            rec.add_rollout(start, sum(len(x) for x in ids))
            sampled.append(ids)
            return ids, logps

        def timed_score(inputs):
            rec.begin_step()
            result = score(inputs)
            state["scored"] = bc.now()
            return result

        class StepEnd(TrainerCallback):
            def on_step_end(self, *a, **k):
                rec.add_train(state["scored"])

        trainer._generate_single_turn = timed_single_turn
        trainer._generate_and_score_completions = timed_score
        trainer.add_callback(StepEnd())
        before = [x.detach().flatten()[: bc.NUM_COMPARED].clone() for x in model.parameters()]
        trainer.train()
        rec.begin_step()

    versions = {n: md.version(n) for n in ("trl", "transformers", "torch", "accelerate")}
    rec.report("TRL GRPO", args, params, versions)
    after = [x.detach().flatten()[: bc.NUM_COMPARED] for x in model.parameters()]
    moved = max(float((a - b).abs().max()) for a, b in zip(before, after, strict=True))
    print(
        f"check: optimiser steps {trainer.state.global_step}, largest weight change {moved:.2e}, "
        f"distinct completions in last batch {len({tuple(x) for x in sampled[-1]})}/{len(sampled[-1])}"
    )


if __name__ == "__main__":
    main()
