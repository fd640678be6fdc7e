"""The update: one jitted program per phase, from a TokenBatch to the next TrainState.

A loop over micro-batches sums gradients of the *sum* of token losses divided by the whole update's token count, so
micro-batching, packing and sharding leave the result unchanged. A gate keeps the old state when anything is not
finite; the loop then stops the run before it publishes or saves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding

from rolljax.model.attention import packed
from rolljax.model.decoder import Model, Params
from rolljax.trainer import masked
from rolljax.trainer.algorithms.base import Algorithm
from rolljax.trainer.batch import TokenBatch
from rolljax.trainer.mesh import param_shardings, replicated, rows
from rolljax.trainer.objectives import k3
from rolljax.trainer.state import TrainState

Stats = dict[str, jax.Array]


def token_logp(model: Model, params: Params, batch: TokenBatch) -> tuple[jax.Array, jax.Array]:
    """Log-prob of every token given what stands before it, and the entropy it was drawn at; `[B, T]` float32, nats.

    `batch` arrays are `[B, T]`. This is the only place that shifts: each token is scored by the hidden state of its
    predecessor `batch.prev`. Tokens of weight 0 get whatever their predecessor says; mask before use.
    """
    decoder = model.bind(params)
    hidden_BTD, _ = decoder(batch.tokens, batch.positions, packed(batch.segment_ids, batch.branch_ids))
    before_BTD = jnp.take_along_axis(hidden_BTD, batch.prev[..., None], axis=1)
    logits_BTV = decoder.logits(before_BTD) / batch.temperature
    norm_BT = jax.nn.logsumexp(logits_BTV, axis=-1)
    chosen_BT = jnp.take_along_axis(logits_BTV, batch.tokens[..., None], axis=-1)[..., 0]
    entropy_BT = norm_BT - jnp.sum(jax.nn.softmax(logits_BTV) * logits_BTV, axis=-1)
    return chosen_BT - norm_BT, jax.lax.stop_gradient(entropy_BT)


def micro_loss(
    model: Model, algorithm: Algorithm, params: Params, batch: TokenBatch
) -> tuple[jax.Array, tuple[Stats, Stats]]:
    """This micro-batch's share of the loss, and its statistics (sums to be divided by the token count, maxima)."""
    w = batch.weights
    logp, entropy = token_logp(model, params, batch)
    logp = masked.clean(logp, w)
    batch = dataclasses.replace(
        batch,
        advantages=masked.clean(batch.advantages, w),
        sampler_logp=jnp.where(w != 0, batch.sampler_logp, jax.lax.stop_gradient(logp)),
    )
    out = algorithm.objective(logp, batch)
    denominator = jnp.maximum(batch.num_tokens, 1)
    loss = masked.total(out.loss, w) / denominator
    mean = {"loss/total": out.loss, "policy/entropy_nat": entropy, **out.mean}
    largest = dict(out.largest)
    if algorithm.source == "sampler":
        gap = jax.lax.stop_gradient(logp) - batch.sampler_logp
        mean["mismatch/k3_nat"] = k3(batch.sampler_logp, jax.lax.stop_gradient(logp))
        mean["mismatch/mult_ratio"] = jnp.exp(jnp.abs(gap))
        largest["mismatch/abs_max_nat"] = jnp.abs(gap)
    sums = {k: masked.total(jax.lax.stop_gradient(v), w) / denominator for k, v in mean.items()}
    maxima = {k: masked.maximum(jax.lax.stop_gradient(v), w) for k, v in largest.items()}
    return loss, (sums, maxima)


def gradients(model: Model, algorithm: Algorithm, params: Params, batch: TokenBatch) -> tuple[Params, Stats]:
    """Gradients and statistics summed over the micro-batches that hold anything."""

    def micro(i: jax.Array) -> TokenBatch:
        pick = {n: jax.lax.dynamic_index_in_dim(getattr(batch, n), i, keepdims=False) for n in TokenBatch.ARRAYS}
        return dataclasses.replace(batch, **pick)

    grad_fn = jax.grad(lambda p, b: micro_loss(model, algorithm, p, b), has_aux=True)

    def body(i, carry):
        grads, sums, maxima = carry
        g, (s, m) = grad_fn(params, micro(i))
        return (
            jax.tree.map(jnp.add, grads, g),
            jax.tree.map(jnp.add, sums, s),
            jax.tree.map(jnp.maximum, maxima, m),
        )

    like = jax.eval_shape(lambda: grad_fn(params, micro(jnp.int32(0))))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
    grads, sums, maxima = jax.lax.fori_loop(0, batch.num_micro, body, (zeros[0], *zeros[1]))
    return grads, {**sums, **maxima}


def apply(tx: optax.GradientTransformation, state: TrainState, grads: Params, stats: Stats) -> tuple[TrainState, Stats]:
    """One optimizer update, unless the loss or the gradient is not finite: then the old state, and `optim/finite` 0."""
    grad_norm = optax.tree.norm(grads)
    finite = jnp.isfinite(grad_norm) & jnp.isfinite(stats["loss/total"])
    updates, opt_state = tx.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    new = TrainState(params, opt_state, state.num_updates + 1)
    new = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, state)
    return new, {
        **stats,
        "optim/grad_norm": grad_norm,
        "optim/update_norm": optax.tree.norm(updates),
        "optim/finite": finite.astype(jnp.float32),
    }


UpdateFn = Callable[[TrainState, TokenBatch], tuple[TrainState, Stats]]


def state_shardings(mesh: Mesh, model: Model, tx: optax.GradientTransformation) -> TrainState:
    """Where every leaf of the state lives: optimizer moments beside the parameters they belong to."""
    abstract = model.abstract()
    params = param_shardings(mesh, model.axes(), abstract)
    opt_state = optax.tree.map_params(
        tx,
        lambda _, sharding: sharding,
        jax.eval_shape(tx.init, abstract),
        params,
        transform_non_params=lambda _: replicated(mesh),
    )
    return TrainState(params, opt_state, replicated(mesh))  # type: ignore[arg-type]


def batch_shardings(mesh: Mesh) -> TokenBatch:
    """Rows split over the batch axes, scalars everywhere."""
    scalars: dict[str, NamedSharding] = {
        f.name: replicated(mesh) for f in dataclasses.fields(TokenBatch) if f.name not in TokenBatch.ARRAYS
    }
    return TokenBatch(**{n: rows(mesh, 1) for n in TokenBatch.ARRAYS}, **scalars)  # type: ignore[arg-type]


def make_update(
    mesh: Mesh, model: Model, algorithm: Algorithm, tx: optax.GradientTransformation, rate: optax.Schedule
) -> UpdateFn:
    """Jit the update for this mesh. The state is donated; statistics come back replicated.

    Args:
      rate: learning rate by update index, for the record (`tx` has its own).
    """
    state_sh, batch_sh = state_shardings(mesh, model, tx), batch_shardings(mesh)

    def update(state: TrainState, batch: TokenBatch) -> tuple[TrainState, Stats]:
        grads, stats = gradients(model, algorithm, state.params, batch)
        stats["optim/lr"] = jnp.asarray(rate(state.num_updates), jnp.float32)
        return apply(tx, state, grads, stats)

    return jax.jit(
        update, in_shardings=(state_sh, batch_sh), out_shardings=(state_sh, replicated(mesh)), donate_argnums=0
    )


def init_state(mesh: Mesh, model: Model, tx: optax.GradientTransformation, params: Params) -> TrainState:
    """A fresh state around `params`, placed on the mesh."""
    shardings = state_shardings(mesh, model, tx)
    make = jax.jit(
        lambda p: TrainState(p, tx.init(p), jnp.zeros((), jnp.int32)),
        out_shardings=shardings,
    )
    return make(jax.device_put(params, shardings.params))
