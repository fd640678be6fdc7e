"""Trains the adapters of several policies over one base, call by call.

    calls of any policies -> rows -> forward_backward -> gradients, added up in each policy's slot
                                     optimizer_step of one slot -> its next adapter

Unlike `PhaseTrainer`, which owns the steps of a phase, clients tell this trainer what to do: which tokens have
which loss, when the gradients are used, and with which learning rate. The policies share each batch: a row uses the
adapter and the loss of its own policy (`model.lora.SlottedAdapters`). A loss is a sum over tokens; whoever wants a mean
divides the weights or advantages.

Shape letters: A slots, B rows, T tokens of a row, K targets per token, L layers.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from rolljax.model.attention import packed
from rolljax.model.axes import on_mesh
from rolljax.model.decoder import Model, Params
from rolljax.model.lora import Lora, LoraSlots, SlottedAdapters
from rolljax.trainer import vocab
from rolljax.trainer.forward import NumShards
from rolljax.trainer.mesh import gradient_options, num_batch_shards, param_shardings, put, replicated, rows

Loss = Literal["cross_entropy", "importance_sampling", "ppo", "cispo", "dro"]
LOSSES: tuple[Loss, ...] = get_args(Loss)
TREES = ("adapters", "grads", "mu", "nu")
"""Fields of `PolicyState` that are trees."""
MIN_ROW_TOK = 64
"""Shortest row that a program exists for; the others are 2, 4, 8, ... times as long."""


@dataclasses.dataclass(frozen=True)
class LossSettings:
    """Settings of the losses."""

    clip_low: float = 0.8
    """Lowest ratio of `ppo` and `cispo`."""
    clip_high: float = 1.2
    """Highest ratio of `ppo` and `cispo`."""
    beta: float = 0.05
    """Weight of the quadratic term of `dro`."""


@dataclasses.dataclass(frozen=True)
class Adam:
    """Settings of one optimizer step: AdamW with decoupled weight decay (arXiv:1711.05101)."""

    lr: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    clip_norm: float = 0.0
    """Largest global norm of the gradient; 0: no bound."""


@dataclasses.dataclass(frozen=True, eq=False)
class Example:
    """One sequence, and what its policy is to learn from it; NumPy arrays."""

    slot: int
    """Slot of the policy."""
    loss: Loss
    tokens: np.ndarray
    """`[n]` int32 inputs."""
    targets: np.ndarray
    """`[n, K]` int32: the tokens whose log-probs after each input are computed."""
    weights: np.ndarray
    """`[n, K]` float32: factors of the losses."""
    advantages: np.ndarray | None = None
    """`[n, K]`, for every loss but cross-entropy."""
    sampler_logp: np.ndarray | None = None
    """`[n, K]` log-probs of the policy that sampled the targets, for every loss but cross-entropy."""
    settings: LossSettings = LossSettings()

    @property
    def row_key(self) -> tuple[Any, ...]:
        """What the examples of one row have in common."""
        return self.slot, self.loss, self.settings


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LossBatch:
    """Rows of packed examples; `weights` is 0 where there is none."""

    tokens: Any
    """`[B, T]`."""
    positions: Any
    """`[B, T]`."""
    segment_ids: Any
    """`[B, T]`: examples of a row, from 1 on; 0: empty."""
    targets: Any
    """`[B, T, K]`."""
    weights: Any
    """`[B, T, K]`."""
    advantages: Any
    """`[B, T, K]`."""
    sampler_logp: Any
    """`[B, T, K]`."""
    slot: Any
    """`[B]`."""
    loss: Any
    """`[B]`: index in `LOSSES`."""
    clip_low: Any
    """`[B]`."""
    clip_high: Any
    """`[B]`."""
    beta: Any
    """`[B]`."""


@dataclasses.dataclass(frozen=True, eq=False)
class LossOutput:
    """The result for one example; NumPy arrays."""

    logp: np.ndarray
    """`[n, K]` log-probs of the targets, nats."""
    loss: float
    """Its loss, a sum over tokens."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PolicyState:
    """All that is trained of one policy. Trees have the shape of `LoraSlots.padded` adapters."""

    adapters: Params
    grads: Params
    """Sum of the gradients since the last optimizer step."""
    mu: Params
    """Adam's first moment."""
    nu: Params
    """Adam's second moment."""
    num_steps: Any
    """Optimizer steps so far, int32."""
    scale: Any
    """Factor of the adapter, float32."""


def token_losses(
    loss: jax.Array,
    logp: jax.Array,
    advantages: jax.Array,
    sampler_logp: jax.Array,
    clip_low: jax.Array,
    clip_high: jax.Array,
    beta: jax.Array,
) -> jax.Array:
    """Compute the loss of each target before its weight, of the kind that each row asks for.

        cross_entropy         -logp
        importance_sampling   -ratio * advantage                          (ratio = exp(logp - sampler_logp))
        ppo                   -min(ratio * advantage, clip(ratio) * advantage)          (arXiv:1707.06347)
        cispo                 -stop_gradient(clip(ratio)) * advantage * logp            (arXiv:2506.13585)
        dro                   -(advantage * logp - beta / 2 * (logp - sampler_logp)^2)  (arXiv:2405.19107)

    Args:
      loss, clip_low, clip_high, beta: of each row, broadcast against the others.
      logp, advantages, sampler_logp: `[B, T, K]`.
    """
    gap = jnp.where(loss == LOSSES.index("cross_entropy"), 0.0, logp - sampler_logp)  # no overflow where it is unused
    ratio = jnp.exp(gap)
    clipped = jnp.clip(ratio, clip_low, clip_high)
    of_kind = {
        "cross_entropy": -logp,
        "importance_sampling": -ratio * advantages,
        "ppo": -jnp.minimum(ratio * advantages, clipped * advantages),
        "cispo": -jax.lax.stop_gradient(clipped) * advantages * logp,
        "dro": -(advantages * logp - 0.5 * beta * jnp.square(gap)),
    }
    return jnp.select([loss == i for i in range(len(LOSSES))], [of_kind[name] for name in LOSSES])


@dataclasses.dataclass(frozen=True, eq=False)
class SlotTrainer:
    """The programs for one base. The states of all slots are one `PolicyState` of wide trees, with `[A]` in place of
    numbers."""

    mesh: Mesh
    model: Model
    """With `slots.lora`."""
    base: Params
    slots: LoraSlots
    max_row_tok: int
    """Longest example, in tokens."""
    micro_tok: int = 2048
    """Tokens of a program's rows together; a longer example has a program of its own."""

    # ---- states -----------------------------------------------------------------------------------------------------

    def empty(self) -> PolicyState:
        """Return the states of slots without a policy."""
        A = self.slots.num

        def zeros() -> PolicyState:
            shapes = self.model.abstract()
            trees = {name: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes) for name in TREES}
            return PolicyState(**trees, num_steps=jnp.zeros(A, jnp.int32), scale=jnp.zeros(A, jnp.float32))

        return jax.jit(zeros, out_shardings=self._shardings)()

    def new_policy(self, lora: Lora, seed: int) -> PolicyState:
        """Return the state of a new policy. Maps without an adapter in `lora` have one that stays zero."""
        plain = self.model.plain
        shapes = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self._one_slot)
        fresh = self.slots.padded(lora.init(seed, plain.axes(), plain.abstract()))
        adapters = {"layers": {**shapes["layers"], **fresh["layers"]}}
        return PolicyState(adapters, shapes, shapes, shapes, np.int32(0), np.float32(lora.factor))

    def put(self, states: PolicyState, slot: int, state: PolicyState) -> PolicyState:
        """Put a policy into a slot. states: donated."""
        return self._put(states, slot, state)

    def take(self, states: PolicyState, slot: int) -> PolicyState:
        """Return the state of one slot."""
        return self._take(states, slot)

    # ---- calls ------------------------------------------------------------------------------------------------------

    def forward_backward(
        self, states: PolicyState, examples: Sequence[Example], *, backward: bool = True
    ) -> tuple[PolicyState, list[LossOutput]]:
        """Compute the losses of examples of any policies, and add their gradients to those of their policies.

        Args:
          states: donated. backward: False computes the losses alone.
        """
        outputs: list[LossOutput | None] = [None] * len(examples)
        for batch, placed in self._batches(examples):
            on_devices = put(self.mesh, batch, jax.tree.map(lambda _: rows(self.mesh), batch))
            if backward:
                grads, logp, losses = self._backward(states.grads, states.adapters, states.scale, self.base, on_devices)
                states = dataclasses.replace(states, grads=grads)
            else:
                logp, losses = self._forward(states.adapters, states.scale, self.base, on_devices)
            logp, losses = jax.device_get((logp, losses))
            for i, row, start in placed:
                n, k = examples[i].targets.shape
                here = slice(start, start + n)
                outputs[i] = LossOutput(logp[row, here, :k], float(losses[row, here, :k].sum(dtype=np.float64)))
        return states, outputs  # type: ignore[return-value]

    def optimizer_step(self, states: PolicyState, slot: int, settings: Adam) -> tuple[PolicyState, dict[str, float]]:
        """Update the policy of a slot with its gradients, which are zero afterwards.

        If a gradient is not finite, the policy stays as it is, and its gradients are dropped.

        Args:
          states: donated.

        Returns:
          The states; `grad_norm`, and `finite`: 1, or 0 if nothing was updated.
        """
        numbers = np.array(dataclasses.astuple(settings), np.float32)
        states, found = self._step(states, slot, numbers)
        return states, {name: float(x) for name, x in jax.device_get(found).items()}

    # ---- packing ----------------------------------------------------------------------------------------------------

    def _batches(self, examples: Sequence[Example]) -> Iterator[tuple[LossBatch, list[tuple[int, int, int]]]]:
        """Yield packed rows, and where each example lies: (its index, row, first token).

        Shapes are powers of two, so that few programs serve all calls: T of the longest example of the rows, B up to
        `micro_tok` tokens.
        """
        order = sorted(range(len(examples)), key=lambda i: -len(examples[i].tokens))
        shards = num_batch_shards(self.mesh)
        while order:
            row_tok = _bucket(len(examples[order[0]].tokens), MIN_ROW_TOK, 2)
            most = shards * max(1, self.micro_tok // (row_tok * shards))
            filled: list[int] = []
            keys: list[tuple[Any, ...]] = []
            placed, left = [], []
            for i in order:
                size, key = len(examples[i].tokens), examples[i].row_key
                fits = (r for r, used in enumerate(filled) if keys[r] == key and used + size <= row_tok)
                row = next(fits, len(filled))
                if row == most:
                    left.append(i)
                    continue
                if row == len(filled):
                    filled.append(0)
                    keys.append(key)
                placed.append((i, row, filled[row]))
                filled[row] += size
            order = left
            num_rows = min(_bucket(len(filled), shards, 4), most)
            yield _packed(examples, placed, num_rows, row_tok), placed

    # ---- programs ---------------------------------------------------------------------------------------------------

    @functools.cached_property
    def _one_slot(self) -> Params:
        return jax.eval_shape(lambda: self.slots.take(self.model.init(0), 0))

    @functools.cached_property
    def _shardings(self) -> PolicyState:
        trees = param_shardings(self.mesh, self.model.axes(), self.model.abstract())
        return PolicyState(trees, trees, trees, trees, replicated(self.mesh), replicated(self.mesh))

    @functools.cached_property
    def _put(self) -> jax.stages.Wrapped:
        def change(states: PolicyState, slot: jax.Array, state: PolicyState) -> PolicyState:
            trees = {n: self.slots.put(getattr(states, n), slot, getattr(state, n)) for n in TREES}
            numbers = {n: getattr(states, n).at[slot].set(getattr(state, n)) for n in ("num_steps", "scale")}
            return PolicyState(**trees, **numbers)

        return jax.jit(change, donate_argnums=0, out_shardings=self._shardings)

    @functools.cached_property
    def _take(self) -> jax.stages.Wrapped:
        def part(states: PolicyState, slot: jax.Array) -> PolicyState:
            trees = {n: self.slots.take(getattr(states, n), slot) for n in TREES}
            return PolicyState(**trees, num_steps=states.num_steps[slot], scale=states.scale[slot])

        return jax.jit(part, out_shardings=replicated(self.mesh))

    def _losses(
        self, adapters: Params, scales: jax.Array, base: Params, batch: LossBatch
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """Return the sum of all losses; log-probs and losses `[B, T, K]`."""
        decoder = self.model.bind(SlottedAdapters(base, adapters, scales).of_rows(batch.slot))
        attend = packed(batch.segment_ids, jnp.zeros_like(batch.segment_ids), batch.positions, self.model.attention)
        hidden = decoder(batch.tokens, batch.positions, attend).hidden
        blocks = NumShards.of(self.mesh).blocks()
        logp = vocab.logp_at(hidden, decoder.head_matrix, batch.targets, softcap=self.model.cfg.final_softcap, **blocks)
        used = batch.weights != 0
        each = [x[:, None, None] for x in (batch.clip_low, batch.clip_high, batch.beta)]
        kept = [jnp.where(used, x, 0.0) for x in (logp, batch.advantages, batch.sampler_logp)]
        losses = batch.weights * token_losses(batch.loss[:, None, None], *kept, *each)
        return losses.sum(), (logp, losses)

    @functools.cached_property
    def _backward(self) -> jax.stages.Wrapped:
        def run(grads: Params, adapters: Params, scales: jax.Array, base: Params, batch: LossBatch) -> Any:
            with on_mesh(self.mesh):
                new, outputs = jax.grad(self._losses, has_aux=True)(adapters, scales, base, batch)
            return jax.tree.map(jnp.add, grads, new), *outputs

        whole, options = replicated(self.mesh), gradient_options(self.mesh)
        out = (self._shardings.grads, whole, whole)
        return jax.jit(run, donate_argnums=0, out_shardings=out, compiler_options=options)

    @functools.cached_property
    def _forward(self) -> jax.stages.Wrapped:
        def run(adapters: Params, scales: jax.Array, base: Params, batch: LossBatch) -> Any:
            with on_mesh(self.mesh):
                return self._losses(adapters, scales, base, batch)[1]

        return jax.jit(run, out_shardings=replicated(self.mesh))

    @functools.cached_property
    def _step(self) -> jax.stages.Wrapped:
        def run(states: PolicyState, slot: jax.Array, numbers: jax.Array) -> tuple[PolicyState, dict[str, jax.Array]]:
            settings = Adam(*numbers)  # traced, so that other settings need no other program
            old = {name: self.slots.take(getattr(states, name), slot) for name in TREES}
            norm = optax.tree.norm(old["grads"])
            finite = jnp.isfinite(norm)
            clip = jnp.where(settings.clip_norm > 0, jnp.minimum(1.0, settings.clip_norm / norm), 1.0)
            grads = jax.tree.map(lambda g: jnp.where(finite, g * jnp.where(norm > 0, clip, 1.0), 0.0), old["grads"])
            rule = optax.scale_by_adam(settings.beta1, settings.beta2, settings.eps)
            moments = optax.ScaleByAdamState(states.num_steps[slot], old["mu"], old["nu"])
            updates, moments = rule.update(grads, moments)
            decay = settings.weight_decay
            moved = jax.tree.map(lambda p, u: p - settings.lr * (u + decay * p), old["adapters"], updates)
            new = {"adapters": moved, "mu": moments.mu, "nu": moments.nu}
            new = {name: jax.tree.map(lambda a, b: jnp.where(finite, a, b), new[name], old[name]) for name in new}
            new["grads"] = jax.tree.map(jnp.zeros_like, grads)
            trees = {name: self.slots.put(getattr(states, name), slot, new[name]) for name in TREES}
            steps = states.num_steps.at[slot].add(finite.astype(jnp.int32))
            states = PolicyState(**trees, num_steps=steps, scale=states.scale)
            return states, {"grad_norm": norm, "finite": finite.astype(jnp.float32)}

        return jax.jit(run, donate_argnums=0, out_shardings=(self._shardings, replicated(self.mesh)))


def _bucket(size: int, least: int, step: int) -> int:
    """Return the smallest of `least`, `least * step`, `least * step**2`, ... that is not below `size`."""
    while least < size:
        least *= step
    return least


def _packed(
    examples: Sequence[Example], placed: Sequence[tuple[int, int, int]], num_rows: int, row_tok: int
) -> LossBatch:
    """Write examples into rows; the rows after them stay empty."""
    K = _bucket(max(examples[i].targets.shape[1] for i, _, _ in placed), 1, 2)
    of_row: Mapping[str, np.ndarray] = {
        **{name: np.zeros(num_rows, np.int32) for name in ("slot", "loss")},
        **{name: np.ones(num_rows, np.float32) for name in ("clip_low", "clip_high", "beta")},
    }
    of_token = {name: np.zeros((num_rows, row_tok), np.int32) for name in ("tokens", "positions", "segment_ids")}
    of_target = {
        name: np.zeros((num_rows, row_tok, K), np.int32 if name == "targets" else np.float32)
        for name in ("targets", "weights", "advantages", "sampler_logp")
    }
    in_row = [0] * num_rows
    for i, row, start in placed:
        example = examples[i]
        in_row[row] += 1
        n, k = example.targets.shape
        here = slice(start, start + n)
        of_token["tokens"][row, here] = example.tokens
        of_token["positions"][row, here] = np.arange(n)
        of_token["segment_ids"][row, here] = in_row[row]
        for name, array in of_target.items():
            given = getattr(example, name)
            if given is not None:
                array[row, here, :k] = given
        of_row["slot"][row], of_row["loss"][row] = example.slot, LOSSES.index(example.loss)
        for name in ("clip_low", "clip_high", "beta"):
            of_row[name][row] = getattr(example.settings, name)
    return LossBatch(**of_token, **of_target, **of_row)
