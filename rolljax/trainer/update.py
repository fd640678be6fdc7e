"""The updates: jitted programs from a TokenBatch to the next state, one for the policy and one for the critics.

A loop over micro-batches sums gradients of token losses that already carry their share of the whole update
(`TokenBatch.scale`), so micro-batching, packing and sharding leave the result unchanged. A gate keeps the old state
when anything is not finite; the loop then stops the run before it publishes or saves. A batch without a trainable token
changes nothing, and is counted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import Mesh

from rolljax.model.axes import on_mesh
from rolljax.model.decoder import Model, Params
from rolljax.model.moe import Load
from rolljax.model.value import ValueModel
from rolljax.trainer import masked, objectives
from rolljax.trainer.algorithms.base import Algorithm
from rolljax.trainer.batch import COLUMNS, MAX_SAMPLERS, TokenBatch
from rolljax.trainer.critic import Critic
from rolljax.trainer.forward import UNSHARDED, NumShards, critic_values, policy_outputs
from rolljax.trainer.kl import k3
from rolljax.trainer.mesh import gradient_options, replicated
from rolljax.trainer.optimizer import Optimizer, Transformation, grad_norm_parts
from rolljax.trainer.state import ParamState

Stats = dict[str, Any]
"""Arrays; and of a model with experts its `Load`, until the update has added it up."""
Loss = tuple[jax.Array, tuple[Stats, Stats]]
"""A micro-batch's share of the loss; statistics to be summed, and those whose maximum counts."""
LossFn = Callable[[Params, TokenBatch], Loss]
CriticLossFn = Callable[[Params, jax.Array, jax.Array, TokenBatch], Loss]
"""From parameters, old values and weights `[B, T]`, and the micro-batch."""
ReferencePolicies = Mapping[str, tuple[Model, Params]]
"""Frozen policies, by source."""


def clean_batch(batch: TokenBatch, logp: jax.Array) -> TokenBatch:
    """Return the micro-batch with harmless values wherever the scale is 0, so that nothing there can reach a
    gradient."""
    own_logp, arrays = jax.lax.stop_gradient(logp), batch.arrays()
    logps = {n: a for n, a in arrays.items() if COLUMNS[n].clean == "logp"}
    others = {n: a for n, a in arrays.items() if COLUMNS[n].clean == "zero"}
    return dataclasses.replace(
        batch,
        **{n: jnp.where(batch.scale != 0, a, own_logp) for n, a in logps.items()},
        **{n: masked.clean(a, batch.scale) for n, a in others.items()},
    )


def policy_loss(
    model: Model, algorithm: Algorithm, references: ReferencePolicies, shards: NumShards = UNSHARDED
) -> LossFn:
    """Return the function that computes a micro-batch's share of the policy's loss, and its statistics (sums over
    tokens, maxima)."""
    divergence = algorithm.needs().divergence

    def loss_fn(params: Params, batch: TokenBatch) -> Loss:
        reference = (divergence, *references[divergence.policy]) if divergence else None
        policy = policy_outputs(
            model, params, batch, entropy_grad=algorithm.entropy_grad, reference=reference, shards=shards
        )
        load, policy = policy.load, dataclasses.replace(policy, load=None)
        policy = jax.tree.map(lambda x: masked.clean(x, batch.scale), policy)
        batch = clean_batch(batch, policy.logp)
        out = algorithm.objective(policy, batch)
        mean = {"policy/entropy_nat": policy.entropy, **out.mean}
        largest = dict(out.largest)
        if algorithm.source == "sampler":
            for into, found in zip((mean, largest), mismatch_stats(policy.logp, batch), strict=True):
                into |= found
        total, (sums, maxima) = _share(out.loss, mean, largest, batch)
        if batch.sampler_ids is not None:
            sums["sampler_gaps"] = sampler_gaps(policy.logp, batch, batch.sampler_ids)
        if load is None:
            return total, (sums, maxima)
        balance = _balance(model, load, batch)
        sums |= {"loss/total": sums["loss/total"] + jax.lax.stop_gradient(balance), "load": jax.lax.stop_gradient(load)}
        return total + balance, (sums, maxima)

    return loss_fn


def _balance(model: Model, load: Load, batch: TokenBatch) -> jax.Array:
    """Compute the micro-batch's part of the load-balancing loss, weighted by its fraction of the update's tokens.

    The loss is a product of two means, so that the sum over micro-batches is not the loss of all of them together: each
    is balanced by itself. The mesh makes no difference: a micro-batch is counted over all of its devices.
    """
    assert model.cfg.routing
    share = load.tokens / jnp.maximum(batch.num_computed, 1)
    return model.cfg.routing.aux_coef * load.balance_loss() * share


def critic_loss(model: ValueModel, algorithm: Algorithm) -> CriticLossFn:
    """Return the function that computes a micro-batch's share of one critic's loss, and its statistics."""

    def loss_fn(params: Params, old_values: jax.Array, weights: jax.Array, batch: TokenBatch) -> Loss:
        weights = masked.clean(weights, batch.scale)
        scale = algorithm.critic_scale(batch) * weights
        batch = dataclasses.replace(batch, scale=scale)
        values = masked.clean(critic_values(model, params, batch), scale)
        returns, old = masked.clean(batch.required("returns"), scale), masked.clean(old_values, scale)
        loss, stats = algorithm.critic_loss(values, returns, old, batch)
        return _share(loss, stats, {}, batch, "critic/loss", weights)

    return loss_fn


def _share(
    loss: jax.Array,
    mean: Stats,
    largest: Stats,
    batch: TokenBatch,
    name: str = "loss/total",
    weights: jax.Array | float = 1.0,
) -> Loss:
    """Return the loss, and its statistics under `name`; `weights`: the weight of a token in the means, on average 1."""
    trained = (batch.scale != 0).astype(jnp.float32)
    total = masked.total(loss, batch.scale)
    counted, tokens = trained * weights, jnp.maximum(batch.num_tokens, 1)
    sums = {k: masked.total(jax.lax.stop_gradient(v), counted) / tokens for k, v in mean.items()}
    sums[name] = jax.lax.stop_gradient(total)
    maxima = {k: masked.maximum(jax.lax.stop_gradient(v), trained) for k, v in largest.items()}
    return total, (sums, maxima)


def mismatch_stats(logp: jax.Array, batch: TokenBatch) -> tuple[Stats, Stats]:
    """Measure the distance of the trainer's log-probs from the sampler's, per token, turn and trajectory: means and
    maxima."""
    trained = (batch.scale != 0).astype(jnp.float32)
    gap = jax.lax.stop_gradient(logp) - batch.sampler_logp
    turn = jnp.abs(objectives.segment_mean(gap, batch.turn_ids, trained))
    sequence = jnp.abs(objectives.segment_mean(gap, batch.sequence_ids, trained))
    product = jnp.abs(objectives.segment_sum(gap * trained, batch.sequence_ids))
    return {
        "mismatch/k3_nat": k3(jnp.clip(-gap, -20, 20), jnp),
        "mismatch/mult_ratio": jnp.exp(jnp.minimum(jnp.abs(gap), 20)),
        "mismatch/turn_abs_nat": turn,
        "mismatch/geometric_abs_nat": sequence,
        "mismatch/trajectory_abs_nat": product,
    }, {"mismatch/abs_max_nat": jnp.abs(gap), "mismatch/trajectory_max_nat": product}


def sampler_gaps(logp: jax.Array, batch: TokenBatch, sampler_ids: jax.Array) -> jax.Array:
    """Sum the distances of the trainer's log-probs from each sampler's, and count their tokens; float32 `[S, 2]`."""
    trained = batch.scale != 0
    gap = jnp.abs(jax.lax.stop_gradient(logp) - batch.sampler_logp)
    both = jnp.stack([jnp.where(trained, gap, 0.0), trained.astype(jnp.float32)], -1)
    return jax.ops.segment_sum(both.reshape(-1, 2), sampler_ids.reshape(-1), MAX_SAMPLERS)


Gradients = tuple[Params, tuple[Stats, Stats]]
"""As `Loss`, with the gradient in place of the loss."""


def accumulate(grad_fn: Callable[[TokenBatch], Gradients], batch: TokenBatch) -> tuple[Params, Stats]:
    """Sum gradients and statistics over the micro-batches that are not empty. `grad_fn` is traced once.

    A batch of one micro-batch needs no sum, so there is one gradient in memory and not two.
    """
    like = jax.eval_shape(batch.micro_batch, jnp.int32(0))
    traced, shapes = jax.make_jaxpr(grad_fn, return_shape=True)(like)
    program = jaxpr_as_fun(traced)
    tree: Any = jax.tree.structure(shapes)

    def run(i: jax.Array) -> Gradients:
        return jax.tree.unflatten(tree, program(*jax.tree.leaves(batch.micro_batch(i))))

    def body(i: jax.Array, total: Gradients) -> Gradients:
        grads, (sums, maxima) = total
        new_grads, (new_sums, new_maxima) = run(i)
        grads, sums = jax.tree.map(jnp.add, grads, new_grads), jax.tree.map(jnp.add, sums, new_sums)
        return grads, (sums, jax.tree.map(jnp.maximum, maxima, new_maxima))

    if batch.tokens.shape[0] == 1:
        grads, (sums, maxima) = run(jnp.int32(0))
    else:
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        grads, (sums, maxima) = jax.lax.fori_loop(0, batch.num_micro, body, zeros)
    return grads, {**sums, **maxima}


def gradients(
    model: Model,
    algorithm: Algorithm,
    params: Params,
    batch: TokenBatch,
    references: ReferencePolicies | None = None,
    shards: NumShards = UNSHARDED,
    base: Params | None = None,
) -> tuple[Params, Stats]:
    """Compute the gradient of the update's loss for the policy's parameters, and the statistics of the update.

    base: frozen weights, if the parameters are adapters.
    """
    loss_fn = policy_loss(model, algorithm, references or {}, shards)
    grad_fn = jax.grad(lambda p, b: loss_fn(model.full_params(p, base), b), has_aux=True)
    grads, stats = accumulate(lambda micro: grad_fn(params, micro), batch)
    if "policy/ratio_sq" in stats:
        square = stats.pop("policy/ratio_sq")
        stats["policy/ess_frac"] = stats["policy/ratio_mean"] ** 2 / jnp.maximum(square, 1e-30)
    if "load" in stats:
        stats |= stats.pop("load").metrics(model.cfg.routing)
    return grads, stats


def apply(
    tx: Transformation,
    state: ParamState,
    grads: Params,
    loss: jax.Array,
    num_tokens: jax.Array,
    *,
    in_branch: bool = False,
) -> tuple[ParamState, Stats]:
    """Apply one optimizer update. Keep the old state if something is not finite or there was nothing to train on.

    in_branch: see `Optimizer.in_branch`.
    """
    grad_norm = optax.tree.norm(grads)
    finite = jnp.isfinite(grad_norm) & jnp.isfinite(loss)
    some = num_tokens > 0
    ok = finite & some

    def updated(ok: jax.Array | bool = True) -> tuple[Params, Any, jax.Array]:
        updates, opt_state = tx.update(grads, state.opt_state, state.params, ok=ok)
        return optax.apply_updates(state.params, updates), opt_state, optax.tree.norm(updates)

    def unchanged() -> tuple[Params, Any, jax.Array]:
        return state.params, state.opt_state, jnp.zeros_like(grad_norm)

    params, opt_state, update_norm = jax.lax.cond(ok, updated, unchanged) if in_branch else updated(ok)
    new = ParamState(params, opt_state, state.num_updates + ok.astype(jnp.int32))
    return new, {
        "grad_norm": grad_norm,
        "update_norm": update_norm,
        "finite": finite.astype(jnp.float32),
        "skipped_n": 1 - some.astype(jnp.float32),
    }


def make_policy_update(
    mesh: Mesh,
    model: Model,
    algorithm: Algorithm,
    optimizer: Optimizer,
    num_updates: int,
    shardings: ParamState,
    reference_models: Mapping[str, Model],
) -> jax.stages.Wrapped:
    """Jit the policy's update for this mesh: `(state, batch, parameters of references, base) -> (state, statistics)`.

    The state is donated; the batch must be where `put_batch` puts it; statistics come back replicated. base: the frozen
    weights of a model with adapters, else left out.
    """
    tx, rate = optimizer.build(num_updates), optimizer.rate(num_updates)

    def update(
        state: ParamState, batch: TokenBatch, references: Mapping[str, Params], base: Params | None = None
    ) -> tuple[ParamState, Stats]:
        models = {name: (reference_models[name], params) for name, params in references.items()}
        with on_mesh(mesh):
            grads, stats = gradients(model, algorithm, state.params, batch, models, NumShards.of(mesh), base)
        stats["optim/lr"] = jnp.asarray(rate(state.num_updates), jnp.float32)
        stats |= {f"optim/grad_norm_{part}": norm for part, norm in grad_norm_parts(grads).items()}
        new, applied = apply(tx, state, grads, stats["loss/total"], batch.num_tokens, in_branch=optimizer.in_branch)
        return new, {**stats, **{f"optim/{k}": v for k, v in applied.items()}}

    out = (shardings, replicated(mesh))
    return jax.jit(update, out_shardings=out, donate_argnums=0, compiler_options=gradient_options(mesh))


def make_critic_update(
    mesh: Mesh, model: ValueModel, algorithm: Algorithm, settings: Critic, num_updates: int, shardings: ParamState
) -> jax.stages.Wrapped:
    """Jit one update of all critics, each on its own share of the batch: `(state, batch, base) -> (state, statistics)`.

    The state is donated. base: the frozen weights of a trunk with adapters, else left out.
    """
    tx = settings.optimizer.build(num_updates)
    loss_fn = critic_loss(model, algorithm)

    def one(
        state: ParamState, old_values: jax.Array, weights: jax.Array, batch: TokenBatch, base: Params | None
    ) -> tuple[ParamState, Stats]:
        batch = dataclasses.replace(batch, old_values_C=old_values, critic_weights_C=weights)

        def grad_fn(micro: TokenBatch) -> Gradients:
            old, own = micro.required("old_values_C"), micro.required("critic_weights_C")
            return jax.grad(lambda p: loss_fn(model.full_params(p, base), old, own, micro), has_aux=True)(state.params)

        grads, stats = accumulate(grad_fn, batch)
        new, applied = apply(tx, state, grads, stats["critic/loss"], batch.num_tokens)
        return new, {**stats, **{f"critic/{k}": v for k, v in applied.items()}}

    def update(state: ParamState, batch: TokenBatch, base: Params | None = None) -> tuple[ParamState, Stats]:
        each = jax.vmap(one, in_axes=(0, -1, -1, None, None))
        with on_mesh(mesh):
            state, stats = each(state, batch.required("old_values_C"), batch.required("critic_weights_C"), batch, base)
        return state, {k: v.min() if k == "critic/finite" else v.mean() for k, v in stats.items()}

    out = (shardings, replicated(mesh))
    return jax.jit(update, out_shardings=out, donate_argnums=0, compiler_options=gradient_options(mesh))
