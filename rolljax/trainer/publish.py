"""From the trainer's weights to the sampler's: another layout, another dtype, never the same buffers."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from rolljax.model.decoder import Model, Params
from rolljax.trainer.mesh import param_shardings


def make_publish(mesh: Mesh, model: Model, to: Mesh | None = None) -> Callable[[Params], Params]:
    """A jitted copy of what `model.bind` takes, whole on every batch shard, matrices in the model's compute dtype.

    Args:
      mesh: the trainer's. to: the sampler's, if it is another one; weights then travel between devices.

    Adapters are added to their maps, so that the sampler's is the plain decoder; in bfloat16 the sum is rounded, which
    the trainer's adapters are not.
    """
    plain = model.plain
    shardings = param_shardings(to or mesh, plain.axes(), plain.abstract(), fsdp=False)

    def copy(params: Params) -> Params:
        return plain.computed(jax.tree.map(jnp.copy, model.merged(params, model.dtype)))

    if to is None or to == mesh:
        return jax.jit(copy, out_shardings=shardings)
    cast = jax.jit(copy)
    return lambda params: jax.device_put(cast(params), shardings)
