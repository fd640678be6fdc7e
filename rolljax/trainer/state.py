"""The state that the update carries from step to step, and the construction of new ones (`StateBuilder`)."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import Mesh

from rolljax.errors import TrainerError
from rolljax.model.decoder import Model, Params
from rolljax.model.value import ValueModel
from rolljax.trainer.critic import Critic
from rolljax.trainer.mesh import param_shardings, replicated
from rolljax.trainer.optimizer import Optimizer, opt_state_shardings


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ParamState:
    """Parameters, optimizer state and the number of optimizer updates taken (int32 scalar).

    Of the critics every leaf has a leading axis M: they are one stack, and one program.
    """

    params: Params
    opt_state: Any
    num_updates: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """The policy, and the critics when there are any."""

    policy: ParamState
    critics: ParamState | None = None

    @property
    def params(self) -> Params:
        """The policy's parameters."""
        return self.policy.params


@dataclasses.dataclass(frozen=True, eq=False)
class CriticSettings:
    """Critics of a phase: their settings, the value model that each of them is, and their updates in the phase."""

    settings: Critic
    model: ValueModel
    num_updates: int


@dataclasses.dataclass(frozen=True, eq=False)
class StateBuilder:
    """Makes the states of one phase."""

    mesh: Mesh
    model: Model
    optimizer: Optimizer
    num_updates: int
    """Number of updates of the policy in the whole phase, for its learning-rate schedule."""
    critics: CriticSettings | None
    """None without any."""
    seed: int
    """Random seed of new weights."""

    @functools.cached_property
    def shardings(self) -> TrainState:
        """Shardings of every leaf of the state: optimizer moments have the sharding of their parameter."""
        policy = self._shardings_of(self.optimizer, self.num_updates, self.model)
        critics = None
        if self.critics:
            settings = self.critics.settings
            critics = self._shardings_of(settings.optimizer, self.critics.num_updates, self.critics.model, settings.num)
        return TrainState(policy, critics)

    def _shardings_of(
        self, optimizer: Optimizer, num_updates: int, model: Model | ValueModel, num_critics: int = 0
    ) -> ParamState:
        abstract, axes = model.abstract(), model.axes()
        if num_critics:
            abstract = stacked(abstract, num_critics)
            axes = jax.tree.map(lambda a: ("critics", *a), axes, is_leaf=lambda a: isinstance(a, tuple))
        params = param_shardings(self.mesh, axes, abstract)
        tx = optimizer.build(num_updates)
        init = jax.vmap(tx.init) if num_critics else tx.init
        opt_state = optimizer.host_shardings(opt_state_shardings(self.mesh, init, abstract, params))
        return ParamState(params, opt_state, replicated(self.mesh))  # type: ignore[arg-type]

    def init(self, params: Params, previous: ParamState | None = None) -> TrainState:
        """Return a new state with the policy's `params`.

        Args:
          previous: the critics of the previous phase, for `Critic.model = 'previous'`.

        Raises:
          TrainerError: the settings name the previous phase's critics, and there are none.
        """
        tx = self.optimizer.build(self.num_updates)

        def with_optimizer(params: Params) -> ParamState:
            return ParamState(params, tx.init(params), jnp.zeros((), jnp.int32))

        params = jax.device_put(params, self.shardings.policy.params)
        policy = jax.jit(with_optimizer, out_shardings=self.shardings.policy)(params)
        return TrainState(policy, self._init_critics(params, previous) if self.critics else None)

    def _init_critics(self, params: Params, previous: ParamState | None) -> ParamState:
        critics, shardings = self.critics, self.shardings.critics
        assert critics is not None and shardings is not None
        settings, tx = critics.settings, critics.settings.optimizer.build(critics.num_updates)
        seeds = range(self.seed, self.seed + settings.num)

        def with_optimizer(params: Params, previous: Params | None) -> ParamState:
            if previous is None:
                trunk = params if settings.model is None else None
                each = [critics.model.init(seed, trunk) for seed in seeds]
                previous = jax.tree.map(lambda *x: jnp.stack(x), *each)
            count = jnp.zeros((settings.num,), jnp.int32)
            return ParamState(previous, jax.vmap(tx.init)(previous), count)

        if settings.model == "previous" and previous is None:
            raise TrainerError("Critic.model = 'previous', but the phase before has no critics")
        kept = previous.params if settings.model == "previous" and previous is not None else None
        return jax.jit(with_optimizer, out_shardings=shardings)(params, kept)

    def abstract(self) -> TrainState:
        """Return the shapes and dtypes of the state."""
        params, count = self.model.abstract(), jax.ShapeDtypeStruct((), jnp.int32)
        tx = self.optimizer.build(self.num_updates)
        policy = ParamState(params, jax.eval_shape(tx.init, params), count)  # type: ignore[arg-type]
        if not self.critics:
            return TrainState(policy)
        previous = None
        if self.critics.settings.model == "previous":
            kept = stacked(self.critics.model.abstract(), self.critics.settings.num)
            previous = ParamState(kept, None, count)  # type: ignore[arg-type]
        return TrainState(policy, jax.eval_shape(self._init_critics, params, previous))


def stacked(shapes: Params, num: int) -> Params:
    """Return the shapes with a leading axis of critics."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((num, *x.shape), x.dtype), shapes)


def on_host(leaf: jax.Array | np.ndarray) -> np.ndarray:
    """Return the full array on the host, gathering its shards."""
    if isinstance(leaf, jax.Array) and not (leaf.is_fully_addressable or leaf.is_fully_replicated):
        return process_allgather(leaf, tiled=True)
    return np.asarray(leaf)


def fingerprint(tree: Any) -> str:
    """Compute the SHA-256 of the bytes of every leaf, in tree order: equal only if all leaves are bitwise equal.

    All processes that hold shards of the leaves must call it.

    Raises:
      TypeError: a leaf is no array of numbers.
    """
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        array = on_host(leaf)
        if array.dtype == object:  # its bytes would be an address
            raise TypeError(f"a fingerprint is of arrays: {type(leaf).__name__} is none")
        digest.update(f"{array.shape}{array.dtype}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()
