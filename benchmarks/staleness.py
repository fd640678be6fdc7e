"""Learning from samples of exactly `alpha` versions ago: seven algorithms, five alphas, five seeds, five rates.

    python benchmarks/staleness.py --out runs/staleness.json --figure docs/staleness.png      # half an hour of one core

A transformer of 10,000 weights learns the task of `plan_task.py` by Adam. Step t samples with the weights of step
`t - alpha`, so that every sample has the same age; nothing depends on time. All algorithms have the same advantages,
those of GRPO. Learning rates are chosen at alpha 0: the highest mean reward over the steps. The table gives the reward
of the newest policy at the end, mean over seeds and the lowest, at that rate, at half of it, and at a quarter.
"""

from __future__ import annotations

import argparse
import collections
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import plan_task

from rolljax.model.attention import packed
from rolljax.model.decoder import Params
from rolljax.trainer import update
from rolljax.trainer.algorithms.base import Algorithm
from rolljax.trainer.algorithms.cispo import Cispo
from rolljax.trainer.algorithms.decoupled_ppo import DecoupledPpo
from rolljax.trainer.algorithms.grpo import Grpo
from rolljax.trainer.algorithms.kimi import Kimi
from rolljax.trainer.algorithms.reinforce import Reinforce
from rolljax.trainer.algorithms.tis import Tis
from rolljax.trainer.algorithms.topr import Topr
from rolljax.trainer.batch import TokenBatch

ALGORITHMS: dict[str, type[Any]] = {
    "REINFORCE": Reinforce,
    "GRPO": Grpo,
    "TIS": Tis,
    "CISPO": Cispo,
    "TOPR": Topr,
    "decoupled PPO": DecoupledPpo,
    "Kimi": Kimi,
}
ALPHAS = (0, 1, 2, 4, 8)
RATES = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3)
LAYERS = 2
EVERY = 10
"""Steps between two measurements of the newest policy."""

Points = np.ndarray
"""Rewards `[alphas, rates, seeds, measurements]`."""


@functools.partial(jax.jit, static_argnums=(0, 1))
def _descend(algorithm: Algorithm, tx: Any, params: Params, state: Any, batch: TokenBatch, lr: jax.Array) -> Any:
    """Apply one step of Adam to each run; `lr [R]`."""
    loss = update.policy_loss(plan_task.model_of(LAYERS), algorithm, {})

    def one(params: Params, state: Any, batch: TokenBatch, lr: jax.Array) -> Any:
        grads = jax.grad(loss, has_aux=True)(params, batch)[0]
        change, state = tx.update(grads, state)
        return jax.tree.map(lambda p, c: p - lr * c, params, change), state

    return jax.vmap(one)(params, state, batch, lr)


@jax.jit
@jax.vmap
def _log_probs(params: Params, tokens_NT: jax.Array) -> jax.Array:
    """Return the log-probs of answers `[R, N, T]`."""
    tokens = jnp.concatenate([jnp.asarray(plan_task.ASKED, jnp.int32)[:, None], tokens_NT], 1)
    ones, positions = jnp.ones_like(tokens), jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    decoder = plan_task.model_of(LAYERS).bind(params)
    hidden = decoder(tokens, positions, packed(ones, ones, positions)).hidden
    logp = jax.nn.log_softmax(decoder.logits(hidden)[:, :-1])
    return jnp.take_along_axis(logp, tokens_NT[..., None], -1)[..., 0]


def _blocks(arrays: Sequence[jax.Array], size: int) -> jax.Array:
    """Return one array: of array number i the rows `i * size` to `(i + 1) * size`."""
    return jnp.concatenate([x[i * size : (i + 1) * size] for i, x in enumerate(arrays)])


def _rewards(tokens: np.ndarray, secrets: np.ndarray) -> np.ndarray:
    """Return the rewards `[R, N]` of answers `[R, N, T]`."""
    right = plan_task.symbols(secrets)[:, None]
    return (tokens[..., plan_task.PLAN :: 2] == right).all(-1).astype(np.float64)


def train(algorithm: Algorithm, alphas: Sequence[int], rates: Sequence[float], seeds: int, steps: int) -> Points:
    """Train all combinations side by side; return the rewards of the newest policies, 32 answers each."""
    shape = (len(alphas), len(rates), seeds)
    seed_R = np.broadcast_to(np.arange(seeds), shape).reshape(-1)
    lr_R = jnp.asarray(np.broadcast_to(np.array(rates)[:, None], shape).reshape(-1), jnp.float32)
    block = len(rates) * seeds
    secrets = np.array([np.random.default_rng([s, 1]).integers(0, plan_task.PLANS) for s in range(seeds)])[seed_R]
    taught = [plan_task.taught(LAYERS, s) for s in range(seeds)]
    params = jax.tree.map(lambda *x: jnp.stack(x), *(taught[s] for s in seed_R))
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam(b2=0.95))
    state = jax.vmap(tx.init)(params)
    past = collections.deque([params], maxlen=max(alphas) + 1)
    trainer = algorithm.needs().trainer_logp
    points = []
    for step in range(steps + 1):
        keys = jnp.stack([jax.random.fold_in(jax.random.key(int(s)), step) for s in seed_R])
        if step % EVERY == 0:
            newest = np.asarray(plan_task.sample(LAYERS, params, jax.vmap(lambda k: jax.random.fold_in(k, 1))(keys))[0])
            points.append(_rewards(newest, secrets).mean(1).reshape(shape))
        # past[-1 - alpha] is what the sampler has; before step alpha it is the start
        have = [past[max(-1 - alpha, -len(past))] for alpha in alphas]
        sampler = jax.tree.map(lambda *x: _blocks(x, block), *have)
        tokens, logp = (np.asarray(x) for x in plan_task.sample(LAYERS, sampler, keys))
        own = np.asarray(_log_probs(params, tokens)) if trainer else [None] * len(tokens)
        batches = []
        for r in range(len(tokens)):
            e = plan_task.episodes(tokens[r], logp[r], secrets[r], step, None, trainer_logp=own[r])
            batches.append(plan_task.pack(algorithm, tokens[r], e, algorithm.credit(e, {})))
        batch = jax.tree.map(lambda *x: np.stack(x), *batches)
        params, state = _descend(algorithm, tx, params, state, batch, lr_R)
        past.append(params)
    return np.moveaxis(np.array(points), 0, -1)


def chosen_rate(points: Points) -> int:
    """Return the number of the rate with the highest mean reward over the steps at alpha 0."""
    return int(points[0, ..., 1:].mean((-2, -1)).argmax())


def table(found: Mapping[str, Points]) -> str:
    lines = [f"| | rate | {' | '.join(f'alpha {a}' for a in ALPHAS)} |", f"|---|---|{'---|' * len(ALPHAS)}"]
    for name, points in found.items():
        best, ends = chosen_rate(points), points[..., -3:].mean(-1)
        for rate in range(best, max(best - 3, -1), -1):
            cells = [f"{x.mean():.2f} ({x.min():.2f})" for x in ends[:, rate]]
            lines.append(f"| {name if rate == best else ''} | {RATES[rate]:g} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(found: Mapping[str, Points], figure: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(1, len(found), figsize=(2.4 * len(found), 2.8), sharey=True, constrained_layout=True)
    for axis, (name, points) in zip(axes, found.items(), strict=True):
        chosen = chosen_rate(points)
        for a, alpha in enumerate(ALPHAS):
            axis.plot(np.arange(points.shape[-1]) * EVERY, points[a, chosen].mean(0), label=f"{alpha}", color=f"C{a}")
        axis.set(title=name, xlabel="step", ylim=(0, 1.02))
    axes[0].set_ylabel("reward of the newest policy")
    axes[-1].legend(frameon=False, title="alpha")
    fig.savefig(figure, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=list(ALGORITHMS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--out", type=Path, required=True, help="results; algorithms that are in it are not run again")
    parser.add_argument("--figure", type=Path)
    args = parser.parse_args()
    done = json.loads(args.out.read_text()) if args.out.exists() else {}
    for name in args.algorithms:
        if name not in done:
            algorithm = ALGORITHMS[name](mean="group", std="group", aggregation="token-mean")
            done[name] = train(algorithm, ALPHAS, RATES, args.seeds, args.steps).round(4).tolist()
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(done))
            print(table({name: np.array(done[name])}), flush=True)
    found = {name: np.array(done[name]) for name in args.algorithms}
    print(table(found))
    if args.figure:
        draw(found, args.figure)


if __name__ == "__main__":
    main()
