"""The optimizer as a setting: optax's transformations; only the placement of their state is rolljax's.

Parameters are float32 **master weights**; the model casts them to its compute type where it uses them
(`Model.dtype`), so an update smaller than bfloat16 can resolve is not lost. `mu_dtype` concerns momentum only.

Layers are stacked: a parameter of all layers has a leading L. Optimizers with a rule for matrices (Muon, Adafactor)
apply it to each layer's matrix separately.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal, get_args

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from rolljax.errors import ConfigError, Range, check_fields
from rolljax.model.decoder import Dtype, Params

Schedule = Literal["constant", "linear", "cosine", "wsd"]
Transformation = Any  # optax.GradientTransformationExtraArgs
HOST = "pinned_host"
"""JAX's name of the memory that devices can copy from and to while they compute."""

MATRICES = {
    **dict.fromkeys(("q", "k", "v"), optax.contrib.MuonDimensionNumbers(-3, (-2, -1))),
    "o": optax.contrib.MuonDimensionNumbers((-3, -2), -1),
    **dict.fromkeys(("gate", "up", "down"), optax.contrib.MuonDimensionNumbers(-2, -1)),
}
"""The weight matrices of a layer: which axes are their rows (what is multiplied and summed) and which their columns.
The axes before these are batch axes: layers, and any other stacked axis."""


@dataclasses.dataclass(frozen=True)
class Optimizer(abc.ABC):
    """Base of all optimizers: a clip by global norm, a learning rate by update, a rule, and the placement of the
    state."""

    random_lr: ClassVar[float] = 1e-3
    """The learning rate where none is set: far more than pre-trained weights bear."""

    lr: Annotated[float | None, Range(above=0)] = None
    """Highest learning rate. None: `random_lr`, which suits small models with random weights; a run that starts from a
    folder's weights must set it."""
    weight_decay: Annotated[float, Range(low=0)] = 0.0
    """Decoupled weight decay: each update subtracts `rate * weight_decay` of every parameter."""
    clip_norm: Annotated[float, Range(above=0)] = 1.0
    """Largest global norm of a gradient; larger ones are scaled down to it."""
    warmup_updates: Annotated[int, Range(low=0)] = 0
    """Number of updates in which the rate rises linearly from 0."""
    schedule: Schedule = "constant"
    """Learning rate after the warm-up: `constant`; `linear` or `cosine`, a fall to `final_lr_frac` of `lr` until the
    phase ends; `wsd`, constant and then a fall."""
    final_lr_frac: Annotated[float, Range(low=0, high=1)] = 0.1
    """Rate at the end, as a share of `lr`."""
    decay_frac: Annotated[float, Range(above=0, high=1)] = 0.1
    """With `wsd`, warm-up stable decay (MiniCPM, arXiv:2404.06395): the share of the phase's updates in which the rate
    falls, linearly."""
    mu_dtype: Dtype = "float32"
    """Data type of the momentum. bfloat16 halves its memory; second moments stay float32."""
    offload: bool = False
    """Keep the optimizer's state in host memory. An update then brings it to the device one parameter at a time, after
    the backward pass, so that the device never holds all of it."""

    def __post_init__(self) -> None:
        check_fields(self)
        for name, kind in (("schedule", Schedule), ("mu_dtype", Dtype)):
            if getattr(self, name) not in get_args(kind):
                raise self._error(name, f"must be one of {get_args(kind)}")

    def _error(self, name: str, message: str, remedy: str = "") -> ConfigError:
        setting = f"{type(self).__name__}.{name}"
        return ConfigError(message, setting=setting, value=getattr(self, name), remedy=remedy)

    @property
    def highest_lr(self) -> float:
        """The learning rate that is set, or that of random weights."""
        return self.random_lr if self.lr is None else self.lr

    def check_rate(self, folder: str) -> None:
        """Raise `ConfigError` if no learning rate is set for the weights of a folder."""
        if self.lr is None:
            raise self._error(
                "lr",
                f"is not set. The default, {self.random_lr:g}, suits small models with random weights and would "
                f"destroy what the model of {folder} has learned",
                f"--set '{type(self).__name__}.lr = 1e-6'; 1e-4 for adapters (Recipe.lora)",
            )

    def rate(self, num_updates: int) -> optax.Schedule:
        """Return the learning rate by update index, 0 to `num_updates` - 1. A decaying rate reaches its final value
        after the last."""
        return self._schedule(self.highest_lr, num_updates)

    def _schedule(self, lr: float, num_updates: int) -> optax.Schedule:
        after = max(num_updates - self.warmup_updates, 1)
        decay = min(max(round(self.decay_frac * num_updates), 1), after)
        last = lr * self.final_lr_frac
        tails = {
            "constant": lambda: optax.constant_schedule(lr),
            "linear": lambda: optax.linear_schedule(lr, last, after),
            "cosine": lambda: optax.cosine_decay_schedule(lr, after, self.final_lr_frac),
            "wsd": lambda: optax.join_schedules(
                [optax.constant_schedule(lr), optax.linear_schedule(lr, last, decay)], [after - decay]
            ),
        }
        tail = tails[self.schedule]()
        if not self.warmup_updates:
            return tail
        # starts one step in: an update at rate 0 would be wasted
        ramp = optax.linear_schedule(lr / self.warmup_updates, lr, self.warmup_updates - 1 or 1)
        return optax.join_schedules([ramp, tail], [self.warmup_updates])

    @abc.abstractmethod
    def rule(self, num_updates: int) -> optax.GradientTransformation:
        """Return the transformation of a clipped gradient. It must treat every parameter independently."""

    def build(self, num_updates: int) -> Transformation:
        """Build the transformation for a phase of `num_updates` optimizer updates.

        `update` takes one more argument than optax requires: where the boolean scalar `ok` is False, the state does not
        change and the updates are 0. With `offload`, call it inside a jitted function whose state has the placement of
        `host_shardings`, and do not compute with the returned state there: it is in host memory.
        """
        rule = _gated(self.rule(num_updates))
        return optax.chain(optax.clip_by_global_norm(self.clip_norm), _one_by_one(rule) if self.offload else rule)

    @property
    def in_branch(self) -> bool:
        """Whether `update.apply` computes an update in a branch (`lax.cond`) that is taken only if the update happens.

        XLA then writes the new state over the old one. Where it has to choose between both afterwards it copies the old
        one first. State in host memory cannot be the result of a branch; there it is chosen, one parameter at a time.
        """
        return not self.offload

    def host_shardings(self, shardings: Any) -> Any:
        """Return where the state is kept between updates: `shardings` (of `opt_state_shardings`), with `offload` on the
        host.

        Raises:
          ConfigError: the devices cannot reach host memory.
        """
        if not self.offload:
            return shardings
        device = jax.tree.leaves(shardings)[0].mesh.local_devices[0]
        kinds = {memory.kind for memory in device.addressable_memories()}
        if HOST not in kinds:
            raise ConfigError(
                f"needs memory of kind {HOST}; {device.platform} devices have {', '.join(sorted(kinds))}",
                setting=f"{type(self).__name__}.offload",
                value=True,
                remedy="set it to False; mu_dtype = 'bfloat16', Lion and Adafactor have smaller states",
            )
        return jax.tree.map(lambda s: s.with_memory_kind(HOST), shardings)


@dataclasses.dataclass(frozen=True)
class AdamW(Optimizer):
    """Adam with decoupled weight decay (arXiv:1711.05101)."""

    b1: Annotated[float, Range(low=0, below=1)] = 0.9
    """Share of the first moment that stays at an update."""
    b2: Annotated[float, Range(low=0, below=1)] = 0.95
    """Share of the second moment that stays at an update."""
    eps: Annotated[float, Range(above=0)] = 1e-8
    """Added to the square root of the second moment."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self)

    def rule(self, num_updates: int) -> optax.GradientTransformation:
        return optax.adamw(
            self.rate(num_updates), self.b1, self.b2, self.eps, mu_dtype=self.mu_dtype, weight_decay=self.weight_decay
        )


@dataclasses.dataclass(frozen=True)
class Muon(Optimizer):
    """Momentum, orthogonalised by Newton-Schulz steps, for the matrices of hidden layers; AdamW for everything else.

    Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks". Embeddings, the output matrix,
    norm scales and vectors are AdamW's. A projection of attention is one matrix over all of its heads.
    """

    beta: Annotated[float, Range(low=0, below=1)] = 0.95
    """Share of the momentum that stays."""
    nesterov: bool = True
    """Look one step ahead with it."""
    ns_steps: Annotated[int, Range(low=1)] = 5
    """Number of Newton-Schulz steps."""
    consistent_rms: Annotated[float | None, Range(above=0)] = 0.2
    """Root mean square of a matrix' update in units of the rate. AdamW's updates typically have 0.2, so with this value
    AdamW's rate and decay also fit Muon (arXiv:2502.16982). None: Jordan's scaling, for which rates near 0.02 are
    usual; set `adam_lr` then."""
    adam_lr: Annotated[float | None, Range(above=0)] = None
    """Highest rate of AdamW's part, on the same schedule (None: `lr`)."""
    adam_b1: Annotated[float, Range(low=0, below=1)] = 0.9
    """`b1` of AdamW's part."""
    adam_b2: Annotated[float, Range(low=0, below=1)] = 0.95
    """`b2` of AdamW's part."""
    adam_eps: Annotated[float, Range(above=0)] = 1e-8
    """`eps` of AdamW's part."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self)

    @property
    def in_branch(self) -> bool:
        """False: in a branch XLA lays out the Newton-Schulz products in another way, so they round differently."""
        return False

    def rule(self, num_updates: int) -> optax.GradientTransformation:
        adam_rate = self._schedule(self.adam_lr or self.highest_lr, num_updates)
        muon = optax.contrib.muon(
            self.rate(num_updates),
            ns_steps=self.ns_steps,
            beta=self.beta,
            weight_decay=self.weight_decay,
            mu_dtype=self.mu_dtype,
            nesterov=self.nesterov,
            muon_weight_dimension_numbers=_matrices,
            consistent_rms=self.consistent_rms,
        )
        # optax' muon has an AdamW of its own, but gives it Nesterov momentum as well
        adamw = optax.adamw(
            adam_rate,
            self.adam_b1,
            self.adam_b2,
            self.adam_eps,
            mu_dtype=self.mu_dtype,
            weight_decay=self.weight_decay,
        )
        return optax.partition({"muon": muon, "adamw": adamw}, _labels(lambda n: "muon" if _matrix(n) else "adamw"))


@dataclasses.dataclass(frozen=True)
class Adafactor(Optimizer):
    """Second moments as row and column means; no momentum by default (arXiv:1804.04235).

    A matrix of size n x m has n + m numbers of state; one without two axes of `min_dim_to_factor` has n * m.
    """

    momentum: Annotated[float | None, Range(above=0, below=1)] = None
    """Share of the first moment that stays (None: no first moment)."""
    decay_rate: Annotated[float, Range(above=0, below=1)] = 0.8
    """Exponent of the second moments' memory: update t forgets t ** -decay_rate of it."""
    relative: bool = True
    """`lr` is in units of a parameter's root mean square (at least 1e-3)."""
    clip_rms: Annotated[float, Range(low=1)] = 1.0
    """Bound on the root mean square of a parameter's update, before the rate."""
    min_dim_to_factor: Annotated[int, Range(low=1)] = 128
    """Smallest axis for which second moments are factored."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self)
        if self.momentum is None and self.mu_dtype != "float32":
            raise self._error("mu_dtype", "can have no effect: Adafactor.momentum is None")

    def rule(self, num_updates: int) -> optax.GradientTransformation:
        rate = self.rate(num_updates)
        # optax' Adafactor decays by this, not by rate times this
        decay = (lambda count: rate(count) * self.weight_decay) if self.weight_decay else None
        rule = optax.adafactor(
            rate,
            min_dim_size_to_factor=self.min_dim_to_factor,
            decay_rate=self.decay_rate,
            multiply_by_parameter_scale=self.relative,
            clipping_threshold=self.clip_rms,
            momentum=self.momentum,
            dtype_momentum=self.mu_dtype,
            weight_decay_rate=decay,
        )
        labels = _labels(lambda names: "layers" if "layers" in names else "rest")
        return optax.partition({"layers": _per_layer(rule), "rest": rule}, labels)


@dataclasses.dataclass(frozen=True)
class Lion(Optimizer):
    """The sign of a momentum (arXiv:2302.06675): one moment, and every parameter moves by exactly the rate.

    Its paper advises a rate 3 to 10 times smaller, and a weight decay as much larger, than AdamW's.
    """

    random_lr: ClassVar[float] = 1e-4

    b1: Annotated[float, Range(low=0, below=1)] = 0.9
    """Share of the momentum in the direction of a step."""
    b2: Annotated[float, Range(low=0, below=1)] = 0.99
    """Share of it that stays."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self)

    def rule(self, num_updates: int) -> optax.GradientTransformation:
        rate = self.rate(num_updates)
        return optax.lion(rate, self.b1, self.b2, mu_dtype=self.mu_dtype, weight_decay=self.weight_decay)


# ---- what a parameter is --------------------------------------------------------------------------------------------


def _names(path: tuple[Any, ...]) -> tuple[str, ...]:
    return tuple(key.key for key in path if isinstance(key, jax.tree_util.DictKey))


def _labels(label: Callable[[tuple[str, ...]], str]) -> Callable[[Params], Any]:
    """Return a function from a parameter tree to the same tree of `label(names on the path to the leaf)`."""
    return lambda params: jax.tree_util.tree_map_with_path(lambda path, _: label(_names(path)), params)


def _matrix(names: tuple[str, ...]) -> Any:
    """Return the rows and columns of a layer's weight matrix, None for any other parameter."""
    if "layers" not in names:
        return None
    if names[-1].endswith(("_a", "_b")):  # adapters, whose inputs and outputs are flat
        return optax.contrib.MuonDimensionNumbers(-2, -1)
    return MATRICES.get(names[-1])


def _matrices(params: Params) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, _: _matrix(_names(path)), params)


def _part(names: tuple[str, ...]) -> str:
    name = names[-1]
    if name.endswith("norm"):
        return "norm"
    if "layers" not in names:
        return "embed" if name == "embed" else "head"
    return "attention" if name.partition("_")[0] in ("q", "k", "v", "o") else "ffn"


def grad_norm_parts(grads: Params) -> dict[str, jax.Array]:
    """Compute the norms of the gradient's parts, whose squares add up to that of the full gradient.

    Args:
      grads: tree of a decoder's or value model's parameters.

    Returns:
      float32 scalars for `embed`, `attention`, `ffn`, `norm` and `head` (of a value model its linear map). There is no
      `head` if it is the embedding.
    """
    parts: dict[str, list[jax.Array]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
        parts.setdefault(_part(_names(path)), []).append(leaf)
    return {part: optax.tree.norm(leaves) for part, leaves in parts.items()}


# ---- rules, applied -------------------------------------------------------------------------------------------------


def _per_layer(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """Apply `tx` to each layer by itself; arrays and state have a leading L. Without any arrays the result is `tx`."""

    def init(params: Params) -> Any:
        return jax.vmap(tx.init)(params) if jax.tree.leaves(params) else tx.init(params)

    def update(grads: Params, state: Any, params: Params) -> tuple[Params, Any]:
        layers = any(jnp.ndim(x) for x in jax.tree.leaves(state))
        return (jax.vmap(tx.update) if layers else tx.update)(grads, state, params)

    return optax.GradientTransformation(init, update)


def _gated(tx: optax.GradientTransformation) -> Transformation:
    """Wrap `tx` so that it changes nothing where `ok` is False."""

    def update(grads: Params, state: Any, params: Params, *, ok: jax.Array | bool = True) -> tuple[Params, Any]:
        updates, new = tx.update(grads, state, params)
        updates = jax.tree.map(lambda u: jnp.where(ok, u, 0), updates)
        return updates, jax.tree.map(lambda a, b: jnp.where(ok, a, b), new, state)

    return optax.GradientTransformationExtraArgs(tx.init, update)


def _one_by_one(tx: Transformation) -> Transformation:
    """Wrap `tx` to keep its state in host memory: one parameter after the other fetches its part and puts it back.

    The barrier enforces the order. Without it compilers start all copies at once, and an update needs more device
    memory than one that keeps its state there.
    """

    def update(grads: Params, state: Any, params: Params, *, ok: jax.Array | bool = True) -> tuple[Params, Any]:
        owners = _owners(state, grads)
        state_tree: Any = jax.tree.structure(state)
        tree: Any = jax.tree.structure(grads)
        grad_leaves, param_leaves, state_leaves = (jax.tree.leaves(x) for x in (grads, params, state))
        shared = {j: _to_device(state_leaves[j]) for j, owner in enumerate(owners) if owner is None}
        new, updates = dict(shared), []
        before: list[jax.Array] = []
        for i, grad in enumerate(grad_leaves):
            own = [j for j, owner in enumerate(owners) if owner == i]
            (fetched, grad), _ = jax.lax.optimization_barrier((([state_leaves[j] for j in own], grad), before))
            state_i = shared | dict(zip(own, _to_device(fetched), strict=True))
            update_i, new_i = tx.update(
                _only({i: grad}, tree), _only(state_i, state_tree), _only({i: param_leaves[i]}, tree), ok=ok
            )
            updates += jax.tree.leaves(update_i)
            new |= zip(sorted(state_i), jax.tree.leaves(new_i), strict=True)
            new |= zip(own, _to_host([new[j] for j in own]), strict=True)
            before = [new[j] for j in own]
        new |= {j: _to_host(new[j]) for j in shared}
        return tree.unflatten(updates), state_tree.unflatten([new[j] for j in range(len(state_leaves))])

    return optax.GradientTransformationExtraArgs(tx.init, update)


def _owners(state: Any, params: Params) -> list[int | None]:
    """Return for every leaf of `state` the index of the parameter whose path ends its own; None for counters."""
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(params)]

    def owner(path: tuple[Any, ...]) -> int | None:
        fits = [i for i, p in enumerate(paths) if path[-len(p) :] == p]
        return max(fits, key=lambda i: len(paths[i]), default=None)

    return [owner(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)]


def _only(leaves: dict[int, Any], tree: Any) -> Any:
    """Return a tree with some of its leaves; optax skips the others."""
    return tree.unflatten([leaves.get(j, optax.MaskedNode()) for j in range(tree.num_leaves)])


def _to_device(tree: Any) -> Any:
    return jax.device_put(tree, jax.memory.Space.Device)


def _to_host(tree: Any) -> Any:
    return jax.device_put(tree, jax.memory.Space.Host)


# ---- where the state lives ------------------------------------------------------------------------------------------


def opt_state_shardings(mesh: Mesh, init: Any, abstract_params: Params, param_shardings: Any) -> Any:
    """Return the shardings of an optimizer's state.

    Moments have the sharding of their parameter; a mean over some axis keeps the sharding of the other axes. Arrays
    without a parameter's axes are replicated.

    Args:
      init: a transformation, or its `init` (possibly under `vmap`).
      abstract_params: shapes and dtypes. param_shardings: the same tree of `NamedSharding`.
    """
    # JAX itself follows the axes through `init`, on a mesh whose axes are part of every array's type
    typed = AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=(AxisType.Explicit,) * len(mesh.axis_names))

    def sharded(x: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(typed, sharding.spec))

    def on_mesh(x: jax.ShapeDtypeStruct) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec() if x.sharding is None else x.sharding.spec)

    with jax.sharding.use_abstract_mesh(typed):
        state = jax.eval_shape(getattr(init, "init", init), jax.tree.map(sharded, abstract_params, param_shardings))
    return jax.tree.map(on_mesh, state)
