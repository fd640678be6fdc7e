"""The rollout written straight in JAX: the floor to compare samplers with. Not a framework.

    python benchmarks/peers/plain_jax.py --workload fixed

How it was made fast: one prefill per prompt, a few prompts at a time so that activations stay in the processor's cache
(`--prefill-tokens`), repeated for the samples of a group; one KV cache per layer, written in place, keys laid out
[B, K, C, S] and values [B, K, S, C], which grows by 128 slots so that it is hardly larger than the tokens in it;
layers unrolled; 2-D matmuls; q, k and v in one matmul, gate and up too; one random number per token instead of one
per logit (`--sampling gumbel` is `jax.random.categorical`); a program for every length of stream. It knows that all
prompts have one length, and it keeps finished rows in the batch until the last one is done. It returns tokens and their
log-probabilities.
"""

import functools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
import workloads  # noqa: E402

GROWTH = 128


def arrange(shape, params):
    """Return one dict per layer, every matrix 2-D, matrices with the same input side by side."""
    s, stack = shape, params["layers"]
    qkv = np.concatenate([stack[n].reshape(s.layers, s.dim, -1) for n in "qkv"], -1)
    up = np.concatenate([stack["gate"], stack["up"]], -1)
    merged = stack | {"qkv": qkv, "gate_up": up, "o": stack["o"].reshape(s.layers, -1, s.dim)}
    kept = ("attn_norm", "qkv", "q_norm", "k_norm", "o", "ffn_norm", "gate_up", "down")
    layers = [{n: merged[n][i] for n in kept} for i in range(s.layers)]
    tree = {"embed": params["embed"], "layers": layers, "norm": params["norm"], "head": params["head"].T}
    return jax.tree.map(jnp.asarray, tree)


def rms(x, g, eps):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps) * g


def rope(x, pos, theta):
    half = x.shape[-1] // 2
    angle = pos[:, None] * theta ** (-jnp.arange(half) / half)
    sin, cos = jnp.sin(angle)[:, None], jnp.cos(angle)[:, None]
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def forward(shape, params, tokens, start, caches):
    """Return hidden states [B, T, D] of `tokens` [B, T] put at `start`; caches: per layer k [B, K, C, S], v [B, K, S,
    C]."""
    (B, T), H, K, C = tokens.shape, shape.heads, shape.kv_heads, shape.head_dim
    pos = start + jnp.arange(T)
    mask = jnp.tile(jnp.arange(caches[0][0].shape[3]) <= pos[:, None], (H // K, 1))
    x, out = params["embed"][tokens].reshape(B * T, -1), []
    for p, cache in zip(params["layers"], caches, strict=True):
        h = (rms(x, p["attn_norm"], shape.eps) @ p["qkv"]).reshape(B, T, H + 2 * K, C)
        q, k, v = jnp.split(h, [H, H + K], 2)
        q = rope(rms(q, p["q_norm"], shape.eps), pos, shape.rope_theta)
        k = rope(rms(k, p["k_norm"], shape.eps), pos, shape.rope_theta)
        k = jax.lax.dynamic_update_slice(cache[0], k.transpose(0, 2, 3, 1), (0, 0, 0, start))
        v = jax.lax.dynamic_update_slice(cache[1], v.transpose(0, 2, 1, 3), (0, 0, start, 0))
        out.append((k, v))
        q = q.reshape(B, T, K, H // K, C).transpose(0, 2, 3, 1, 4).reshape(B, K, H // K * T, C)
        score = jnp.where(mask, jnp.einsum("bktc,bkcs->bkts", q, k) * C**-0.5, -1e30)
        o = jnp.einsum("bkts,bksc->bktc", jax.nn.softmax(score, -1), v)
        x = x + o.reshape(B, H, T, C).swapaxes(1, 2).reshape(B * T, H * C) @ p["o"]
        gate, up = jnp.split(rms(x, p["ffn_norm"], shape.eps) @ p["gate_up"], 2, -1)
        x = x + (jax.nn.silu(gate) * up) @ p["down"]
    return rms(x, params["norm"], shape.eps).reshape(B, T, -1), out


def empty(shape, rows, slots):
    zeros = jnp.zeros((rows, shape.kv_heads, shape.head_dim, slots))
    return [(zeros, zeros.swapaxes(2, 3))] * shape.layers


def grow(caches, slots):
    """Return caches with room for `slots` tokens."""
    pad = lambda x, axis: jnp.pad(x, [(0, slots - x.shape[axis] if a == axis else 0) for a in range(4)])  # noqa: E731
    return [(pad(k, 3), pad(v, 2)) for k, v in caches]


def prefill(shape, params, prompts):
    """Return the last hidden states and caches of `prompts` [P, T]."""
    hidden, caches = forward(shape, params, prompts, 0, empty(shape, *prompts.shape))
    return hidden[:, -1], caches


def inverse(key, logits):
    """Sample a token per row, where the cumulated probabilities reach a random number in (0, 1]."""
    reached = jnp.cumsum(jax.nn.softmax(logits), -1)
    return (reached < reached[:, -1:] * (1 - jax.random.uniform(key, (len(logits), 1)))).sum(-1, dtype=jnp.int32)


SAMPLING = {"inverse": inverse, "gumbel": jax.random.categorical}


@functools.partial(jax.jit, static_argnums=(0, 4, 5, 6, 7, 8))
def rollout(shape, params, prompts, key, group_size, new, stop, chunk, sample):
    """Prefill `prompts` [P, T], then sample until all are done or have `new` tokens: tokens, log-probs [B, new]."""
    (P, T), B = prompts.shape, prompts.shape[0] * group_size
    out = jax.lax.map(lambda x: prefill(shape, params, x), prompts.reshape(P // chunk, chunk, T))
    hidden, caches = jax.tree.map(lambda x: jnp.repeat(x.reshape(P, *x.shape[2:]), group_size, 0), out)

    def step(algorithm_state):
        i, logits, caches, tokens, logps, done = algorithm_state
        token = sample(jax.random.fold_in(key, i), logits)
        logp = jnp.take_along_axis(jax.nn.log_softmax(logits), token[:, None], 1)
        tokens = jax.lax.dynamic_update_slice(tokens, token[:, None], (0, i))
        logps = jax.lax.dynamic_update_slice(logps, logp, (0, i))
        hidden, caches = forward(shape, params, token[:, None], T + i, caches)
        return i + 1, hidden[:, 0] @ params["head"], caches, tokens, logps, done | (token == stop)

    tokens, logps, done = jnp.zeros((B, new), jnp.int32), jnp.zeros((B, new)), jnp.zeros(B, bool)
    algorithm_state = 0, hidden @ params["head"], caches, tokens, logps, done
    for end in range(GROWTH, new + GROWTH, GROWTH):
        end = min(end, new)
        algorithm_state = *algorithm_state[:2], grow(algorithm_state[2], T + end), *algorithm_state[3:]
        algorithm_state = jax.lax.while_loop(lambda c, end=end: (c[0] < end) & ~c[5].all(), step, algorithm_state)
    return algorithm_state[3:5]


def main():
    p = workloads.parser(__doc__)
    p.add_argument("--prefill-tokens", type=int, default=512, help="tokens prefilled at a time, in whole prompts")
    p.add_argument("--sampling", choices=SAMPLING, default="inverse")
    args = p.parse_args()
    shape, w, neutral = workloads.setup(args)
    params, seen = arrange(shape, neutral), {}

    def logits(tokens):
        return forward(shape, params, tokens, 0, empty(shape, *tokens.shape))[0] @ params["head"]

    def one_turn(streams, seed):
        prompts = streams[:: w.group_size]
        fits = max(1, args.prefill_tokens // prompts.shape[1])
        chunk = max(n for n in range(1, fits + 1) if len(prompts) % n == 0)
        key, sample = jax.random.key(seed), SAMPLING[args.sampling]
        out = rollout(shape, params, prompts, key, w.group_size, w.max_new, w.stop, chunk, sample)
        tokens, logps = map(np.asarray, out)
        ends = [int(np.argmax(t == w.stop)) + 1 if (t == w.stop).any() else w.max_new for t in tokens]
        seen.update(prompt=streams[0], tokens=tokens[0, : ends[0]], logps=logps[0, : ends[0]])
        return [t[:n] for t, n in zip(tokens, ends, strict=True)]

    workloads.measure(
        "plain JAX", args, shape, w,
        rollout=lambda seed: workloads.replay(w, lambda streams, turn: one_turn(streams, seed * w.turns + turn)),
        prefill_tokens=workloads.replayed_tokens(w) // w.group_size,
        packages=("jax", "jaxlib"),
        logps_off=lambda: workloads.check_logps(neutral, shape, **seen),
        logits_off=workloads.check_logits(logits, neutral, shape, w),
        sampling=args.sampling,
    )  # fmt: skip


if __name__ == "__main__":
    main()
