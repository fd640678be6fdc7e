"""Sampling work that is equal in every framework by construction: weights, prompts, lengths, timing (NumPy only).

Every script that is compared imports this file: `benchmarks/peers/*.py`, and rolljax's own. Four workloads, each of 64
sequences at temperature 1:

- fixed: 8 prompts of 64 tokens x 8 samples, exactly 64 new tokens each (nothing is a stop token).
- lognormal: 64 prompts x 1 sample (siblings would share their length), and each ends by its own stop token. Lengths are
  the 64 quantiles of a log-normal (median 64, sigma 1, cap 512), shuffled. They are real in every framework because of
  the weights, a "countdown" model: after token t the next one is t - 1 with probability > 1 - 1e-6, and 0 is the stop
  token. The prompt's last token is therefore the number of tokens to come, the stop token included. All layers compute
  as ever; the head reads the direction of the last token's embedding, which they hardly turn.
- shared_prefix: 4 prompts of 512 tokens x 16 samples, exactly 64 new tokens each.
- conversation: 64 conversations of 8 turns. The first prompt has 64 tokens; every turn samples exactly 16 tokens, and
  the environment then appends 16.

The vocabulary is 576 in all of them. Where nothing stops, the stop token is 576: one past the last logit.
"""

import argparse
import dataclasses
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any

import numpy as np

NAMES = ("fixed", "lognormal", "shared_prefix", "conversation")
SEQUENCES, MEDIAN, CAP = 64, 64, 512
Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Shape:
    """Qwen3 decoder, float32, untied embeddings."""

    vocab: int = 576
    layers: int = 4
    dim: int = 128
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    ffn: int = 384
    rope_theta: float = 1e6
    eps: float = 1e-6


@dataclasses.dataclass(frozen=True)
class Workload:
    """What to sample. Sequence i is sample `i % group_size` of prompt `i // group_size`."""

    name: str
    prompts: np.ndarray
    """[groups, prompt tokens]."""
    group_size: int
    max_new: int
    """Limit of the new tokens of a turn."""
    lengths: np.ndarray
    """[sequences]: new tokens of every turn, the stop token included."""
    stop: int
    appends: np.ndarray
    """[sequences, turns - 1, tokens]: what the environment appends after every turn but the last."""

    @property
    def turns(self) -> int:
        return self.appends.shape[1] + 1

    @property
    def stops(self) -> bool:
        return self.name == "lognormal"

    @property
    def tokens(self) -> int:
        """Tokens sampled in one rollout."""
        return int(self.lengths.sum()) * self.turns

    @property
    def rows(self) -> np.ndarray:
        """[sequences, prompt tokens]: every sequence's own copy of its prompt."""
        return np.repeat(self.prompts, self.group_size, 0)

    def check(self, turns: Sequence[Sequence[Any]], vocab: int) -> None:
        """Fail unless every sequence of every turn has exactly the tokens it has to have."""
        assert len(turns) == self.turns, (len(turns), self.turns)
        for turn in turns:
            turn = [np.asarray(t) for t in turn]
            found = [t.size for t in turn]
            assert found == self.lengths.tolist(), f"lengths {found}, expected {self.lengths.tolist()}"
            assert all(t.min() >= 0 and t.max() < vocab for t in turn), "tokens outside of the vocabulary"
            if self.stops:
                assert all((t == np.arange(t.size)[::-1]).all() for t in turn), "not the countdown"
            else:
                assert len({t.tobytes() for t in turn}) == len(turn), "two sequences are equal"


def load(name: str, shape: Shape, seed: int = 0) -> Workload:
    """Return a workload by name."""
    rng = np.random.default_rng([seed, NAMES.index(name)])
    groups, group_size, prompt, new = {
        "fixed": (8, 8, 64, 64),
        "lognormal": (SEQUENCES, 1, 64, CAP),
        "shared_prefix": (4, 16, 512, 64),
        "conversation": (SEQUENCES, 1, 64, 16),
    }[name]
    draw = lambda *size: rng.integers(1, shape.vocab - 1, size, dtype=np.int32)  # noqa: E731
    prompts, lengths, turns = draw(groups, prompt), np.full(SEQUENCES, new), 8 if name == "conversation" else 1
    if name == "lognormal":
        normal = [statistics.NormalDist().inv_cdf((i + 0.5) / SEQUENCES) for i in range(SEQUENCES)]
        lengths = rng.permutation(np.minimum(np.round(MEDIAN * np.exp(normal)), CAP).astype(np.int64))
        prompts[:, -1] = lengths
    stop = 0 if name == "lognormal" else shape.vocab
    return Workload(name, prompts, group_size, new, lengths, stop, draw(SEQUENCES, turns - 1, 16))


def weights(workload: Workload, shape: Shape, seed: int = 0) -> Params:
    """Return parameters as NumPy arrays, layers stacked: the tree and the layouts of `rolljax.model.decoder`."""
    rng = np.random.default_rng([seed, 100])
    s, normal = shape, lambda *size: rng.normal(0, 0.02, size).astype(np.float32)
    one = lambda *size: np.ones(size, np.float32)  # noqa: E731
    L, D, H, K, C, F = s.layers, s.dim, s.heads, s.kv_heads, s.head_dim, s.ffn
    layers = {
        "attn_norm": one(L, D), "q": normal(L, D, H, C), "k": normal(L, D, K, C), "v": normal(L, D, K, C),
        "o": normal(L, H, C, D), "q_norm": one(L, C), "k_norm": one(L, C), "ffn_norm": one(L, D),
        "gate": normal(L, D, F), "up": normal(L, D, F), "down": normal(L, F, D),
    }  # fmt: skip
    embed, head = normal(s.vocab, D), normal(s.vocab, D)
    if workload.stops:
        embed *= 50  # of size 1, next to which the layers' outputs are small
        head = 5 * np.roll(embed / np.linalg.norm(embed, axis=-1, keepdims=True), -1, 0)  # head[v] reads embed[v + 1]
    return {"embed": embed, "layers": layers, "norm": one(D), "head": head}


def reference_logits(params: Params, shape: Shape, tokens: np.ndarray) -> np.ndarray:
    """Compute logits [T, V] of one sequence in plain NumPy, which every framework must match."""
    s, (T,) = shape, tokens.shape
    rms = lambda x, g: x / np.sqrt((x * x).mean(-1, keepdims=True) + s.eps) * g  # noqa: E731
    angle = np.arange(T)[:, None, None] * s.rope_theta ** (-np.arange(s.head_dim // 2) / (s.head_dim // 2))

    def rope(x):
        a, b = np.split(x, 2, -1)
        return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], -1)

    x = params["embed"][tokens].astype(np.float64)
    for i in range(s.layers):
        p = {name: w[i] for name, w in params["layers"].items()}
        h = rms(x, p["attn_norm"])
        q = rope(rms(np.einsum("td,dhc->thc", h, p["q"]), p["q_norm"]))
        k = rope(rms(np.einsum("td,dkc->tkc", h, p["k"]), p["k_norm"]))
        k, v = (np.repeat(y, s.heads // s.kv_heads, 1) for y in (k, np.einsum("td,dkc->tkc", h, p["v"])))
        score = np.einsum("thc,shc->hts", q, k) * s.head_dim**-0.5 + np.triu(np.full((T, T), -1e30), 1)
        score = np.exp(score - score.max(-1, keepdims=True))
        x = x + np.einsum("hts,shc,hcd->td", score / score.sum(-1, keepdims=True), v, p["o"], optimize=True)
        h = rms(x, p["ffn_norm"])
        gate = h @ p["gate"]
        x = x + (gate / (1 + np.exp(-gate)) * (h @ p["up"])) @ p["down"]
    return rms(x, params["norm"]) @ params["head"].T


def check_logits(logits: Callable[[np.ndarray], Any], params: Params, shape: Shape, workload: Workload) -> float:
    """Fail unless `logits` (of a batch of one) computes the model; the largest difference, relative to their spread."""
    tokens = workload.prompts[0]
    want = reference_logits(params, shape, tokens)
    off = float(np.abs(np.asarray(logits(tokens[None]))[0] - want).max() / want.std())
    assert off < 1e-4, f"logits differ from the reference by {off:.1e} of their spread"
    return off


def check_logps(params: Params, shape: Shape, prompt: np.ndarray, tokens: np.ndarray, logps: np.ndarray) -> float:
    """Fail unless `logps` are the log-probabilities of `tokens` after `prompt`; the largest difference."""
    logits = reference_logits(params, shape, np.concatenate([prompt, tokens]))[len(prompt) - 1 : -1]
    logits = logits - logits.max(-1, keepdims=True)
    want = logits[np.arange(len(tokens)), tokens] - np.log(np.exp(logits).sum(-1))
    off = float(np.abs(logps - want).max())
    assert off < 1e-4, f"log-probabilities differ from the reference by {off:.1e}"
    return off


def replay(workload: Workload, sample: Callable[[np.ndarray, int], Sequence[Any]]) -> list[Sequence[Any]]:
    """Roll out without a cache between turns: `sample(streams, turn)` gets the whole streams at every turn."""
    turns, streams = [], workload.rows
    for turn in range(workload.turns):
        turns.append(sample(streams, turn))
        if turn + 1 < workload.turns:
            streams = np.concatenate([streams, np.asarray(turns[-1]), workload.appends[:, turn]], 1)
    return turns


def replayed_tokens(workload: Workload) -> int:
    """Return the tokens that `replay` prefills when every sequence prefills its own copy of the prompt."""
    rows, prompt = workload.rows.shape
    return sum(rows * (prompt + t * (workload.max_new + workload.appends.shape[2])) for t in range(workload.turns))


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the flags that all scripts share."""
    p = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--workload", required=True, choices=NAMES)
    p.add_argument("--repeat", type=int, default=5, help="rollouts that are timed")
    p.add_argument("--warmup", type=int, default=2, help="rollouts before those; the first one compiles")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--shape", nargs="*", default=[], metavar="FIELD=N", help="model sizes, such as dim=256 layers=8")
    p.add_argument("--json", default="", help="also write the result here")
    return p


def setup(args: argparse.Namespace) -> tuple[Shape, Workload, Params]:
    """Return shape, workload and weights for the flags."""
    shape = Shape(**{k: int(v) for k, v in (x.split("=") for x in args.shape)})
    workload = load(args.workload, shape, args.seed)
    return shape, workload, weights(workload, shape, args.seed)


def measure(
    name: str,
    args: argparse.Namespace,
    shape: Shape,
    workload: Workload,
    rollout: Callable[[int], list[Sequence[Any]]],
    prefill_tokens: int,
    packages: Sequence[str],
    logps_off: Callable[[], float] | None = None,
    **notes: Any,
) -> dict[str, Any]:
    """Time `rollout(seed)`, from prompt ids on the host to new ids on the host (by turn, by sequence); check, report.

    prefill_tokens: tokens that this framework prefills in one rollout.
    logps_off: checks log-probabilities of the last rollout (`check_logps`).
    """
    assert args.warmup > 0, "--warmup must be at least 1: the first rollout compiles"
    wall, cpu = [], []
    for seed in range(args.warmup + args.repeat):
        start = time.perf_counter(), time.process_time()
        turns = rollout(args.seed + seed)
        wall.append(time.perf_counter() - start[0])
        cpu.append(time.process_time() - start[1])
        workload.check(turns, shape.vocab)
    seconds, median = wall[args.warmup :], statistics.median(wall[args.warmup :])
    out = dict(
        name=name,
        workload=workload.name,
        tokens=workload.tokens,
        seconds=seconds,
        tokens_per_s=workload.tokens / median,
        cpu_seconds=cpu[args.warmup :],
        tokens_per_cpu_s=workload.tokens / statistics.median(cpu[args.warmup :]),
        prefill_tokens=prefill_tokens,
        first_s=wall[0],
        compile_s=wall[0] - median,
        cores=len(os.sched_getaffinity(0)),
        loadavg=os.getloadavg()[0],
        shape=dataclasses.asdict(shape),
        logps_off=logps_off and logps_off(),
        versions={"python": platform.python_version()} | {p: metadata.version(p) for p in packages},
        **notes,
    )
    print(
        f"{name:24} {workload.name:14} {out['tokens_per_s']:8.0f} tokens/s"
        f" {out['tokens_per_cpu_s']:8.0f} per CPU second"
        f"  (median of {len(seconds)}: {median:.3f} s, {min(seconds):.3f} to {max(seconds):.3f};"
        f" first {wall[0]:.1f} s; {out['cores']} cores, load {out['loadavg']:.1f})"
    )
    print(json.dumps(out))
    if args.json:
        with open(args.json, "w") as f:
            json.dump(out, f, indent=1)
    return out
