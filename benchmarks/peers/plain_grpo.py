"""The same GRPO step written straight in JAX: the floor to compare frameworks with.

  python plain_grpo.py --layers 4 --dim 128 --prompts 8 --generations 8

Same flags, model shape, tokenizer, prompts, reward and printed figures as
tunix_grpo.py and trl_grpo.py. Not a framework: one file, prompts of
equal length, no padding, no reference model.
"""

import importlib.metadata as md
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import grpo_common as bc
import jax
import jax.numpy as jnp
import numpy as np
import optax


def init(a, key):
    def w(i, *shape):
        return 0.02 * jax.random.normal(jax.random.fold_in(key, i), shape)

    L, D, H, K, C, F = a.layers, a.dim, a.heads, a.kv_heads, a.head_dim, a.ffn
    one = jnp.ones
    return {
        "embed": w(0, a.vocab, D),
        "norm": one(D),
        "layers": {
            "n1": one((L, D)),
            "n2": one((L, D)),
            "nq": one((L, C)),
            "nk": one((L, C)),
            "q": w(1, L, D, H * C),
            "kv": w(2, L, D, 2 * K * C),
            "o": w(3, L, H * C, D),
            "gate": w(4, L, D, F),
            "up": w(5, L, D, F),
            "down": w(6, L, F, D),
        },
    }


def rms(x, g):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * g


def rope(x, pos):
    half = x.shape[-1] // 2
    angle = pos[:, None] * 1e6 ** (-jnp.arange(half) / half)
    sin, cos = jnp.sin(angle)[:, None], jnp.cos(angle)[:, None]
    x1, x2 = jnp.split(x, 2, -1)
    return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1)


def forward(a, params, tokens, start, caches=None):
    """Return the final hidden states of `tokens` [B, T] placed at position `start`.

    caches: per layer (k, v) of shape [B, K, S, C], written in place at `start`.
    """
    B, T = tokens.shape
    H, K, C = a.heads, a.kv_heads, a.head_dim
    pos = start + jnp.arange(T)
    S = T if caches is None else caches[0][0].shape[2]
    mask = jnp.arange(S)[None] <= pos[:, None]
    x, out = params["embed"][tokens].reshape(B * T, -1), []  # 2-D matmuls are faster on CPU
    for i in range(a.layers):
        p = {n: w[i] for n, w in params["layers"].items()}
        h = rms(x, p["n1"])
        q = rope(rms((h @ p["q"]).reshape(B, T, H, C), p["nq"]), pos)
        k, v = jnp.split((h @ p["kv"]).reshape(B, T, 2 * K, C), 2, 2)
        k = rope(rms(k, p["nk"]), pos).swapaxes(1, 2)
        v = v.swapaxes(1, 2)
        if caches is not None:

            def write(old, new):
                return jax.lax.dynamic_update_slice(old, new, (0, 0, start, 0))

            k, v = write(caches[i][0], k), write(caches[i][1], v)
            out.append((k, v))
        q = q.reshape(B, T, K, H // K, C).transpose(0, 2, 3, 1, 4).reshape(B, K, H // K * T, C)
        s = jnp.einsum("bktc,bksc->bkts", q, k) * C**-0.5
        s = jnp.where(jnp.tile(mask, (H // K, 1)), s, -1e30)
        o = jnp.einsum("bkts,bksc->bktc", jax.nn.softmax(s, -1), v)
        o = o.reshape(B, H, T, C).swapaxes(1, 2).reshape(B * T, H * C)
        x = x + o @ p["o"]
        h = rms(x, p["n2"])
        x = x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]
    return rms(x, params["norm"]).reshape(B, T, -1), out


def logits(params, hidden):
    return hidden @ params["embed"].T


def rollout(a, params, prompts, key):
    """Prefill each prompt once, then sample `generations` answers of each: tokens [B, N], logps [B, N]."""
    P, G, N = prompts.shape[0], a.generations, a.new_tokens
    empty = jnp.zeros((P, a.kv_heads, a.prompt_len + N, a.head_dim))
    hidden, caches = forward(a, params, prompts, 0, [(empty, empty)] * a.layers)
    caches = jax.tree.map(lambda x: jnp.repeat(x, G, 0), caches)
    last = jnp.repeat(logits(params, hidden[:, -1]), G, 0)

    def step(algorithm_state, i):
        last, caches = algorithm_state
        last = last / a.temperature
        tok = jax.random.categorical(jax.random.fold_in(key, i), last)
        logp = jnp.take_along_axis(jax.nn.log_softmax(last), tok[:, None], 1)[:, 0]
        hidden, caches = forward(a, params, tok[:, None], a.prompt_len + i, caches)
        return (logits(params, hidden[:, 0]), caches), (tok, logp)

    _, (toks, logps) = jax.lax.scan(step, (last, caches), jnp.arange(N))
    return toks.T, logps.T


def loss(a, params, tokens, advantages):
    hidden, _ = forward(a, params, tokens, 0)
    keep = logits(params, hidden[:, a.prompt_len - 1 : -1]) / a.temperature
    chosen = jnp.take_along_axis(keep, tokens[:, a.prompt_len :, None], -1)[..., 0]
    logp = chosen - jax.nn.logsumexp(keep, -1)
    ratio = jnp.exp(logp - jax.lax.stop_gradient(logp))
    adv = advantages[:, None]
    return -jnp.minimum(ratio * adv, jnp.clip(ratio, 0.8, 1.2) * adv).mean()


def main():
    a = bc.parser(__doc__).parse_args()
    total = a.warmup + a.steps + 1
    seqs = a.prompts * a.generations
    tok = bc.tokenizer(a.vocab)
    params = init(a, jax.random.key(a.seed))
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(a.lr, weight_decay=0.0))
    opt = tx.init(params)
    sample = jax.jit(lambda p, x, k: rollout(a, p, x, k))
    micro = (a.micro_prompts or a.prompts) * a.generations

    def update(params, opt, tokens, adv):
        def one(grads, mb):
            return jax.tree.map(jnp.add, grads, jax.grad(lambda p: loss(a, p, *mb))(params)), None

        if micro == seqs:
            grads = jax.grad(lambda p: loss(a, p, tokens, adv))(params)
        else:
            mbs = (tokens.reshape(-1, micro, tokens.shape[1]), adv.reshape(-1, micro))
            grads, _ = jax.lax.scan(one, jax.tree.map(jnp.zeros_like, params), mbs)
            grads = jax.tree.map(lambda g: g * (micro / seqs), grads)
        up, opt = tx.update(grads, opt, params)
        return optax.apply_updates(params, up), opt

    update = jax.jit(update, donate_argnums=(0, 1))
    before = [np.array(x.ravel()[: bc.NUM_COMPARED]) for x in jax.tree.leaves(params)]
    rec = bc.Recorder()
    for i, batch in enumerate(bc.prompt_batches(a, total)):
        rec.begin_step()
        start = bc.now()
        ids = np.array([tok(p)["input_ids"] for p in batch])
        out, _ = sample(params, ids, jax.random.key(a.seed + 1 + i))
        out = np.asarray(out)
        texts = tok.batch_decode(out)
        rec.add_rollout(start, out.size)
        start = bc.now()
        r = np.array([bc.reward(t) for t in texts]).reshape(a.prompts, a.generations)
        adv = ((r - r.mean(1, keepdims=True)) / (r.std(1, ddof=1, keepdims=True) + 1e-4)).reshape(-1)
        tokens = np.concatenate([np.repeat(ids, a.generations, 0), out], 1)
        params, opt = update(params, opt, tokens, adv.astype(np.float32))
        jax.block_until_ready(params)
        rec.add_train(start)
    rec.begin_step()

    versions = {n: md.version(n) for n in ("jax", "jaxlib", "optax", "transformers")}
    rec.report("plain JAX GRPO", a, sum(x.size for x in jax.tree.leaves(params)), versions)
    after = [np.array(x.ravel()[: bc.NUM_COMPARED]) for x in jax.tree.leaves(params)]
    moved = max(float(np.abs(x - y).max()) for x, y in zip(before, after, strict=True))
    print(
        f"check: optimiser steps {total}, largest weight change {moved:.2e}, "
        f"distinct completions in last batch {len({r.tobytes() for r in out})}/{len(out)}"
    )


if __name__ == "__main__":
    main()
