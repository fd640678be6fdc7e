"""A decoder with one number instead of a vocabulary: critics and reward models."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from rolljax.model.decoder import Model, Params


@dataclasses.dataclass(frozen=True)
class ValueModel:
    """`trunk` up to its last norm, then a linear map to one value; params are `{"trunk": ..., "value": {w, b}}`."""

    trunk: Model

    def init(self, seed: int, trunk: Params | None = None) -> Params:
        """Return random parameters, or the given trunk with a random head. Different seeds give different heads."""
        width = self.trunk.cfg.hidden_size
        w = jax.random.normal(jax.random.key(seed), (width,)) * width**-0.5
        return {
            "trunk": self.trunk.init(seed) if trunk is None else trunk,
            "value": {"w": 0.1 * w, "b": jnp.zeros(())},
        }

    def abstract(self) -> Params:
        """Return the shapes and dtypes of the parameters without allocating them."""
        return jax.eval_shape(lambda: self.init(0))

    def axes(self) -> Params:
        """Return the logical axis names of every parameter, in the tree of the parameters."""
        return {"trunk": self.trunk.axes(), "value": {"w": ("embed",), "b": ()}}

    def full_params(self, params: Params, base: Params | None) -> Params:
        """Combine the trained parameters with the trunk's frozen weights (`Model.full_params`) for `critic_values`."""
        return {**params, "trunk": self.trunk.full_params(params["trunk"], base)}

    def head(self, params: Params, hidden: jax.Array) -> jax.Array:
        """Return the values `[...]` float32 of hidden states `[..., D]`."""
        w, b = params["value"]["w"], params["value"]["b"]
        return jnp.einsum("...d,d->...", hidden, w.astype(hidden.dtype), preferred_element_type=jnp.float32) + b
