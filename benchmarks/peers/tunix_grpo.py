"""GRPO step time of google-tunix on a tiny random Qwen3 (CPU, no downloads).

  python tunix_grpo.py --layers 4 --dim 128 --prompts 8 --generations 8

Runs on the PyPI package or on a source tree put first on PYTHONPATH.
"""

import importlib.metadata as md
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("WANDB_MODE", "disabled")

import grpo_common as bc
import jax
import numpy as np
import optax
from flax import nnx
from tunix.models.qwen3 import model as qwen3
from tunix.rl import rl_cluster as rlc
from tunix.rl.grpo import grpo_learner
from tunix.rl.rollout import base_rollout


def build_model(args, mesh):
    config = qwen3.ModelConfig(
        num_layers=args.layers,
        vocab_size=args.vocab,
        embed_dim=args.dim,
        hidden_dim=args.ffn,
        num_heads=args.heads,
        head_dim=args.head_dim,
        num_kv_heads=args.kv_heads,
        rope_theta=1_000_000,
        norm_eps=1e-6,
        use_tied_embedding=True,
    )
    with mesh:
        model = qwen3.Qwen3(config, rngs=nnx.Rngs(args.seed))
    # Tunix zero-initialises the MLP (it expects loaded weights) and draws
    # embeddings with a large spread; use the usual N(0, 0.02) for every matrix.
    key = jax.random.key(args.seed)
    state = nnx.state(model, nnx.Param)
    leaves, treedef = jax.tree.flatten(state)
    keys = jax.random.split(key, len(leaves))
    leaves = [
        0.02 * jax.random.normal(k, x.shape, x.dtype) if x.ndim > 1 else x for k, x in zip(keys, leaves, strict=False)
    ]
    nnx.update(model, jax.tree.unflatten(treedef, leaves))
    return model, sum(x.size for x in leaves)


def main():
    p = bc.parser(__doc__)
    p.add_argument("--kv-slack", type=int, default=0, help="extra KV cache slots (the Tunix CLI adds 256)")
    args = p.parse_args()
    total = args.warmup + args.steps + 1

    mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    model, params = build_model(args, mesh)
    reference = build_model(args, mesh)[0] if args.beta else None
    tok = bc.tokenizer(args.vocab)

    cluster = rlc.RLCluster(
        actor=model,
        reference=reference,
        tokenizer=tok,
        cluster_config=rlc.ClusterConfig(
            role_to_mesh={
                rlc.Role.ACTOR: mesh,
                rlc.Role.REFERENCE: mesh,
                rlc.Role.ROLLOUT: mesh,
            },
            rollout_engine="vanilla",
            training_config=rlc.RLTrainingConfig(
                actor_optimizer=optax.chain(
                    optax.clip_by_global_norm(1.0),
                    optax.adamw(args.lr, weight_decay=0.0),
                ),
                eval_every_n_steps=10**9,
                max_steps=total,
                mini_batch_size=args.prompts,
                train_micro_batch_size=args.micro_prompts or args.prompts,
                rollout_micro_batch_size=args.prompts,
                compute_logps_micro_batch_size=args.prompts,
            ),
            rollout_config=base_rollout.RolloutConfig(
                max_tokens_to_generate=args.new_tokens,
                max_prompt_length=args.prompt_len,
                kv_cache_size=args.prompt_len + args.new_tokens + args.kv_slack,
                temperature=args.temperature,
                top_p=1.0,
                eos_tokens=[args.vocab],
            ),
        ),
    )

    rec = bc.Recorder()
    sampled = []
    rollout = cluster.rollout
    generate, update = rollout.generate, cluster.update_actor

    def timed_generate(*a, **k):
        rec.begin_step()
        start = bc.now()
        out = generate(*a, **k)
        rec.add_rollout(start, sum(len(x) for x in out.tokens))
        sampled.append(np.stack([np.asarray(x) for x in out.tokens]))
        return out

    def timed_update(*a, **k):
        start = bc.now()
        update(*a, **k)
        jax.block_until_ready(jax.tree.leaves(nnx.state(cluster.actor_trainer.model)))
        rec.add_train(start)

    rollout.generate = timed_generate
    cluster.update_actor = timed_update

    trainer = grpo_learner.GRPOLearner(
        rl_cluster=cluster,
        reward_fns=lambda prompts, completions, **kw: [bc.reward(c) for c in completions],
        algo_config=grpo_learner.GRPOConfig(
            num_generations=args.generations,
            num_iterations=1,
            beta=args.beta,
            epsilon=0.2,
        ),
    )
    data = [{"prompts": np.array(b)} for b in bc.prompt_batches(args, total + 1)]
    before = [np.array(x.ravel()[: bc.NUM_COMPARED]) for x in jax.tree.leaves(nnx.state(model, nnx.Param))]
    trainer.train(data)
    rec.begin_step()
    trained = nnx.state(cluster.actor_trainer.model, nnx.Param)
    after = [np.array(x.ravel()[: bc.NUM_COMPARED]) for x in jax.tree.leaves(trained)]

    import tunix

    versions = {n: md.version(n) for n in ("jax", "jaxlib", "flax", "optax", "transformers")}
    versions["tunix"] = md.version("google-tunix")
    versions["tunix_path"] = "installed" if "site-packages" in tunix.__path__[0] else "source tree"
    rec.report("tunix GRPO", args, params, versions)
    moved = max(float(np.abs(a - b).max()) for a, b in zip(before, after, strict=False))
    rows = len({r.tobytes() for r in sampled[-1]})
    print(
        f"check: optimiser steps {cluster.actor_trainer.train_steps}, largest weight change {moved:.2e}, "
        f"distinct completions in last batch {rows}/{len(sampled[-1])}"
    )


if __name__ == "__main__":
    main()
