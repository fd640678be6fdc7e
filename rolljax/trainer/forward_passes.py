"""Forward passes over the sampled tokens of a step, before its updates: the log-probs, entropies and values that credit
needs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from rolljax.model.axes import on_mesh
from rolljax.model.decoder import Model, Params
from rolljax.model.value import ValueModel
from rolljax.trainer import attention_stats
from rolljax.trainer.algorithms.base import Needs
from rolljax.trainer.attention_stats import AttentionStatsFn
from rolljax.trainer.batch import TokenBatch
from rolljax.trainer.forward import NumShards, critic_values, policy_outputs, without_experts
from rolljax.trainer.mesh import PlacedBatch, put, replicated, rows
from rolljax.trainer.update import ReferencePolicies


@dataclasses.dataclass(frozen=True, eq=False)
class ForwardPasses:
    """The programs of a phase that run its models without changing them.

    Arrays that its methods return are `[N, T]` like the mask they take: the sampled tokens of each trajectory, left
    aligned, padded with 0. Batches hold the trajectories in the order of the rows.
    """

    mesh: Mesh
    model: Model
    needs: Needs
    """Inputs that the algorithm requires."""
    references: ReferencePolicies
    """The policies that it names."""
    value_model: ValueModel | None = None
    """Model of each critic."""
    base: Params | None = None
    """The frozen weights of a model with adapters."""

    def compute_logprobs(
        self, params: Params, batches: Sequence[PlacedBatch], mask_NT: np.ndarray
    ) -> dict[str, np.ndarray]:
        """Return the log-probs that the algorithm needs: by the policy of parameters `params`, with the entropies of
        its distributions, and by references. Names are those of `Episodes`: `trainer_logp`, `entropy`, `ref_logp`,
        `scorer_logp` `[N, T]`, `teacher_logp` `[S, N, T]`."""
        needs = self.needs
        policies: dict[str, tuple[Model, Params]] = {}
        if needs.ref:
            policies["ref_logp"] = self.references[needs.ref]
        if needs.scorer:
            policies["scorer_logp"] = self.references[needs.scorer]
        policies |= {f"teacher{i}": self.references[name] for i, name in enumerate(needs.teachers)}
        own = ("trainer_logp", "entropy") if needs.trainer_logp else ()
        own_params = self.model.full_params(params, self.base) if own else params
        found: dict[str, list[np.ndarray]] = {name: [] for name in (*own, *policies)}
        for batch in batches:
            if own:
                outputs = self.policy_program(own_params, batch.on_devices)
                for name, array in zip(own, outputs, strict=True):
                    found[name] += batch.packed.unpack(array)
            for name, (model, weights) in policies.items():
                found[name] += batch.packed.unpack(
                    self.logprob_program(model)(weights, without_experts(batch.on_devices))
                )
        arrays = {name: _padded(values, mask_NT) for name, values in found.items()}
        teachers = [arrays.pop(f"teacher{i}") for i in range(len(needs.teachers))]
        return arrays | ({"teacher_logp": np.stack(teachers)} if teachers else {})

    def compute_context_logprobs(
        self, params: Params, batches: Sequence[PlacedBatch], mask_NT: np.ndarray
    ) -> dict[str, np.ndarray]:
        """Return the log-probs, `[N, T]`, of batches whose samples follow another prompt: by the policy of parameters
        `params` (`context_logp`) and, where there is one, by the reference (`context_ref_logp`)."""
        policies = {"context_logp": (self.model, self.model.full_params(params, self.base))}
        if self.needs.ref:
            policies["context_ref_logp"] = self.references[self.needs.ref]
        found: dict[str, list[np.ndarray]] = {name: [] for name in policies}
        for batch in batches:
            placed = without_experts(batch.on_devices)
            for name, (model, weights) in policies.items():
                found[name] += batch.packed.unpack(self.logprob_program(model)(weights, placed))
        return {name: _padded(values, mask_NT) for name, values in found.items()}

    def compute_values(self, params: Params, batches: Sequence[PlacedBatch], mask_NT: np.ndarray) -> np.ndarray:
        """Compute the values of stacked critics `params` for the state before every token, `[M, N, T]`."""
        assert self.needs.critics is not None
        found: list[list[np.ndarray]] = [[] for _ in range(self.needs.critics.num)]
        for batch in batches:
            values = np.asarray(self.value_program(params, batch.on_devices, self.base))
            for of_one, array in zip(found, values, strict=True):
                of_one += batch.packed.unpack(array)
        return np.stack([_padded(of_one, mask_NT) for of_one in found])

    def compute_attention_stats(
        self, params: Params, batches: Sequence[PlacedBatch], mask_NT: np.ndarray
    ) -> dict[str, np.ndarray]:
        """Compute `waad` and `fai` of the policy with parameters `params`; all batches together choose the heads
        once."""
        settings = self.needs.attention
        assert settings is not None
        params = self.model.full_params(params, self.base)
        parts = []
        for batch in batches:
            for i in range(int(batch.host.num_micro)):
                b = batch.host.micro_batch(i)
                columns = (b.tokens, b.positions, b.segment_ids, b.branch_ids, b.sequence_ids > 0)
                placed = put(self.mesh, columns, (rows(self.mesh),) * len(columns))
                parts.append(jax.device_get(self.attention_program(params, *placed)))
        stats = attention_stats.reduce(parts, settings)
        found: dict[str, list[np.ndarray]] = {"waad": [], "fai": []}
        done = 0
        for batch in batches:
            own = slice(done, done := done + int(batch.host.num_micro))
            for name, values in (("waad", stats.waad_MBT[own]), ("fai", stats.fai_MBT[own])):
                full = np.zeros(np.shape(batch.host.tokens))
                full[: len(values)] = values
                found[name] += batch.packed.unpack(full)
        return {name: _padded(values, mask_NT) for name, values in found.items()}

    # ---- the programs -----------------------------------------------------------------------------------------------

    @functools.cached_property
    def _logprob_programs(self) -> dict[Model, jax.stages.Wrapped]:
        return {}

    def logprob_program(self, model: Model) -> jax.stages.Wrapped:
        """Return the jitted `(params, batch) -> log-probs [M, B, T]`, one for each model."""
        shards = NumShards.of(self.mesh)

        def of_one(params: Params, micro: TokenBatch) -> jax.Array:
            return policy_outputs(model, params, micro, shards=shards).logp

        if model not in self._logprob_programs:
            self._logprob_programs[model] = self._program(of_one)
        return self._logprob_programs[model]

    @functools.cached_property
    def policy_program(self) -> jax.stages.Wrapped:
        """The jitted `(params, batch) -> (log-probs, entropies)`, each `[M, B, T]`, of the policy."""
        shards = NumShards.of(self.mesh)

        def of_one(params: Params, micro: TokenBatch) -> tuple[jax.Array, jax.Array]:
            found = policy_outputs(self.model, params, micro, shards=shards)
            return found.logp, found.entropy

        return self._program(of_one)

    def _program(self, of_one: Callable[[Params, TokenBatch], Any]) -> jax.stages.Wrapped:
        def every(params: Params, batch: TokenBatch) -> Any:
            with on_mesh(self.mesh):
                return _over_micro_batches(of_one, params, batch)

        return jax.jit(every, out_shardings=replicated(self.mesh))

    @functools.cached_property
    def value_program(self) -> jax.stages.Wrapped:
        """The jitted `(params of all critics, batch, base) -> values [critics, M, B, T]`."""
        model = self.value_model
        assert model is not None

        def values(params: Params, batch: TokenBatch, base: Params | None) -> jax.Array:
            def of_one(params: Params, micro: TokenBatch) -> jax.Array:
                return critic_values(model, model.full_params(params, base), micro)

            with on_mesh(self.mesh):
                return jax.vmap(functools.partial(_over_micro_batches, of_one), in_axes=(0, None))(params, batch)

        return jax.jit(values, out_shardings=replicated(self.mesh))

    @functools.cached_property
    def attention_program(self) -> AttentionStatsFn:
        """The jitted program of `attention_stats`, for one micro-batch."""
        assert self.needs.attention is not None
        return attention_stats.make_attention_stats(self.model, self.mesh, self.needs.attention)


def _over_micro_batches(forward: Callable[[Params, TokenBatch], Any], params: Params, batch: TokenBatch) -> Any:
    """Compute `forward(params, micro-batch)`, arrays `[B, T]`, for each non-empty micro-batch; `[M, B, T]`, 0 for empty
    ones."""

    def body(i: jax.Array, out: Any) -> Any:
        new = forward(params, batch.micro_batch(i))
        return jax.tree.map(lambda whole, part: jax.lax.dynamic_update_index_in_dim(whole, part, i, 0), out, new)

    shapes = jax.eval_shape(forward, params, batch.micro_batch(0))
    nothing = jax.tree.map(lambda _: jnp.zeros(batch.tokens.shape, jnp.float32), shapes)
    return jax.lax.fori_loop(0, batch.num_micro, body, nothing)


def _padded(values: Sequence[np.ndarray], mask_NT: np.ndarray) -> np.ndarray:
    """Return the values of each trajectory's sampled tokens, float64 `[N, T]`; 0 after them."""
    out = np.zeros(mask_NT.shape)
    for row, of_one in zip(out, values, strict=True):
        row[: len(of_one)] = of_one
    return out
