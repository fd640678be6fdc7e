"""Shared pieces of the GRPO side-by-side benchmarks.

Both scripts import this file so that flags, tokenizer, prompts, reward and the
printed report are the same by construction. No network access is needed: the
tokenizer is a byte-level BPE without merges, the model is randomly initialised.
"""

import argparse
import json
import os
import platform
import random
import statistics
import string
import time

NUM_COMPARED = 1000
"""How many numbers of each weight are kept to see whether training moved it. A whole copy would count as memory."""


def parser(description):
    p = argparse.ArgumentParser(description=description)
    # Model shape (Qwen3 family, tied embeddings, float32).
    p.add_argument("--layers", type=int, default=4)
    p.add_argument("--dim", type=int, default=128)
    p.add_argument("--heads", type=int, default=4)
    p.add_argument("--kv-heads", type=int, default=2)
    p.add_argument("--head-dim", type=int, default=32)
    p.add_argument("--ffn", type=int, default=384)
    p.add_argument("--vocab", type=int, default=512)
    # Batch shape.
    p.add_argument("--prompts", type=int, default=8, help="prompts per step")
    p.add_argument("--generations", type=int, default=8, help="group size")
    p.add_argument("--prompt-len", type=int, default=64)
    p.add_argument("--prompt-len-min", type=int, default=0, help="0: every prompt has exactly --prompt-len tokens")
    p.add_argument("--new-tokens", type=int, default=64, help="every completion has exactly this length (EOS is off)")
    p.add_argument("--micro-prompts", type=int, default=0, help="prompts per gradient micro-batch; 0: whole batch")
    # Optimisation.
    p.add_argument("--lr", type=float, default=1e-4)
    p.add_argument("--beta", type=float, default=0.0, help="KL weight; 0: no reference")
    p.add_argument("--temperature", type=float, default=1.0)
    p.add_argument("--seed", type=int, default=0)
    # Measurement.
    p.add_argument("--warmup", type=int, default=3)
    p.add_argument("--steps", type=int, default=10)
    p.add_argument("--json", default="", help="also write the figures here")
    return p


def tokenizer(vocab):
    """Return a byte-level tokenizer; ids 0..255 are bytes, the rest is filler.

    The EOS id is `vocab`, one past the model's last logit, so it can never be sampled and every completion runs to the
    full length in every framework.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    if vocab < 258:
        raise ValueError("--vocab must be at least 258")
    table = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for i in range(len(table), vocab - 1):
        table[f"<f{i}>"] = i
    table["<pad>"] = vocab - 1
    table["<eos>"] = vocab
    tok = Tokenizer(models.BPE(vocab=table, merges=[]))
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tok.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tok, pad_token="<pad>", eos_token="<eos>", padding_side="left")


def prompt_batches(args, count):
    """Return `count` lists of `args.prompts` random ASCII prompts."""
    rng = random.Random(args.seed)
    alphabet = string.ascii_lowercase + "     "
    low = args.prompt_len_min or args.prompt_len

    def one():
        return "".join(rng.choice(alphabet) for _ in range(rng.randint(low, args.prompt_len)))

    return [[one() for _ in range(args.prompts)] for _ in range(count)]


def reward(completion):
    """Share of vowels and even digits: trivial, cheap, and different for almost every sample.

    Tokens beyond the 256 bytes are texts such as <f1234>, so a large vocabulary needs the digits.
    """
    return sum(c in "aeiouAEIOU02468" for c in completion) / max(len(completion), 1)


def now():
    """Return wall clock and CPU seconds (all threads of this process)."""
    return time.perf_counter(), time.process_time()


class Recorder:
    """Wall and CPU spans by step. A step starts when its rollout starts.

    CPU seconds stay comparable when other programs share the cores; wall-clock
    figures do not, so read them together with the load average.
    """

    def __init__(self):
        self.marks, self.rollout, self.train, self.gen_tokens = [], [], [], []

    def begin_step(self):
        self.marks.append(now())
        self.rollout.append([0.0, 0.0])
        self.train.append([0.0, 0.0])
        self.gen_tokens.append(0)

    def add_rollout(self, start, tokens):
        self._add(self.rollout, start)
        self.gen_tokens[-1] += tokens

    def add_train(self, start):
        self._add(self.train, start)

    def _add(self, spans, start):
        end = now()
        spans[-1][0] += end[0] - start[0]
        spans[-1][1] += end[1] - start[1]

    def report(self, name, args, params, versions):
        lo, hi = args.warmup, args.warmup + args.steps
        assert len(self.marks) > hi, (len(self.marks), hi)
        pairs = list(zip(self.marks[lo:hi], self.marks[lo + 1 : hi + 1], strict=False))
        wall = [b[0] - a[0] for a, b in pairs]
        cpu = [b[1] - a[1] for a, b in pairs]
        roll, train = self.rollout[lo:hi], self.train[lo:hi]
        med = statistics.median

        def col(spans, i):
            return [x[i] for x in spans]

        seqs = args.prompts * args.generations
        gen = statistics.mean(self.gen_tokens[lo:hi])
        tokens = seqs * (args.prompt_len + args.new_tokens)
        out = {
            "name": name,
            "params": params,
            "sequences_per_step": seqs,
            "generated_tokens_per_step": gen,
            "train_tokens_per_step": tokens,
            "s_per_step": med(wall),
            "s_per_step_min": min(wall),
            "s_per_step_mean": statistics.mean(wall),
            "rollout_s": med(col(roll, 0)),
            "train_s": med(col(train, 0)),
            "other_s": med([w - r[0] - t[0] for w, r, t in zip(wall, roll, train, strict=False)]),
            "rollout_s_min": min(col(roll, 0)),
            "train_s_min": min(col(train, 0)),
            "rollout_tokens_per_s": gen / med(col(roll, 0)),
            "train_tokens_per_s": tokens / med(col(train, 0)),
            "overall_tokens_per_s": gen / med(wall),
            "cpu_s_per_step": med(cpu),
            "rollout_cpu_s": med(col(roll, 1)),
            "train_cpu_s": med(col(train, 1)),
            "first_step_s": self.marks[1][0] - self.marks[0][0],
            "cores": len(os.sched_getaffinity(0)),
            "loadavg": os.getloadavg()[0],
            "python": platform.python_version(),
            "versions": versions,
            "args": vars(args),
        }
        o = out
        print(
            f"== {name}: {params:,} params, {seqs} sequences x ({args.prompt_len}+{args.new_tokens}) tokens, "
            f"{args.steps} steps after {args.warmup} warm-up, {o['cores']} cores, loadavg {o['loadavg']:.1f}"
        )
        print(
            f"seconds per GRPO step        median {o['s_per_step']:.3f}  min {o['s_per_step_min']:.3f}  "
            f"mean {o['s_per_step_mean']:.3f}  (first step, with compilation, {o['first_step_s']:.1f})"
        )
        print(
            f"  wall     rollout {o['rollout_s']:.3f} (min {o['rollout_s_min']:.3f})  "
            f"train {o['train_s']:.3f} (min {o['train_s_min']:.3f})  other {o['other_s']:.3f}"
        )
        print(
            f"  CPU      rollout {o['rollout_cpu_s']:.3f}  train {o['train_cpu_s']:.3f}  step {o['cpu_s_per_step']:.3f}"
        )
        print(f"generated tokens/s, rollout  {o['rollout_tokens_per_s']:.0f}")
        print(f"train tokens/s               {o['train_tokens_per_s']:.0f}")
        print(f"generated tokens/s, overall  {o['overall_tokens_per_s']:.0f}")
        print("versions " + ", ".join(f"{k} {v}" for k, v in versions.items()))
        if args.json:
            with open(args.json, "w") as f:
                json.dump(out, f, indent=1)
        return out
