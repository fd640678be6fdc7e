"""From the trainer's weights to the sampler's: another layout, another dtype, never the same buffers."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from rolljax.model.decoder import Model, Params
from rolljax.trainer.mesh import param_shardings


def make_publish(mesh: Mesh, model: Model, to: Mesh | None = None) -> Callable[[Params], Params]:
    """A jitted copy of the parameters, whole on every batch shard, matrices in the model's compute dtype.

    Args:
      mesh: the trainer's. to: the sampler's, if it is another one; weights then travel between devices.

    Norm scales stay float32 in both rooms; matrices are cast where they are used, so casting them here changes nothing.
    """
    axes = model.axes()
    shardings = param_shardings(to or mesh, axes, model.abstract(), fsdp=False)

    def one(names: tuple[str, ...], value: jax.Array) -> jax.Array:
        is_matrix = sum(name != "layers" for name in names) > 1
        return jnp.copy(value).astype(model.dtype if is_matrix else value.dtype)

    def copy(params: Params) -> Params:
        return jax.tree.map(one, axes, params, is_leaf=lambda x: isinstance(x, tuple))

    if to is None or to == mesh:
        return jax.jit(copy, out_shardings=shardings)
    cast = jax.jit(copy)
    return lambda params: jax.device_put(cast(params), shardings)
