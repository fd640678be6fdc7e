"""From the trainer's weights to the sampler's: another layout, another dtype, never the same buffers."""

from __future__ import annotations

import functools
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from rolljax.model.decoder import Model, Params
from rolljax.trainer.mesh import param_shardings, replicated


class Publish(Protocol):
    """See `make_publish`."""

    def __call__(self, params: Params, over: Params | None = None) -> Params:
        """The sampler's weights.

        Args:
          params: what `Model.bind` takes. over: weights of the sampler that these replace, in their memory; None: in
            new memory.
        """
        ...


def make_publish(mesh: Mesh, model: Model, to: Mesh | None = None) -> Publish:
    """A copy of what `Model.bind` takes, full on every batch shard, matrices in the model's compute dtype.

    Args:
      mesh: the trainer's. to: the sampler's, if it is another one; weights then travel between devices.

    Adapters are added to their maps, so that the sampler's is the plain decoder; in bfloat16 the sum is rounded, which
    the trainer's adapters are not.
    """
    shapes, _, there = _weights(mesh, model, to or mesh)
    if to is not None and to.devices.flatten().tolist() != mesh.devices.flatten().tolist():
        cast = jax.jit(lambda params: model.plain.computed(jax.tree.map(jnp.copy, model.merged(params, model.dtype))))

        def travel(params: Params, over: Params | None = None) -> Params:
            ready = cast(params)
            for x in jax.tree.leaves(over):
                x.delete()
            return jax.device_put(ready, there)

        return travel
    write = make_write(mesh, model, to or mesh)
    empty = jax.jit(lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes), out_shardings=there)

    def in_place(params: Params, over: Params | None = None) -> Params:
        return write(params, empty() if over is None else over)

    return in_place


def make_write(mesh: Mesh, model: Model, to: Mesh) -> jax.stages.Wrapped:
    """The jitted `(params, over) -> over`, both meshes over the same devices: one layer after the other is gathered and
    written, so that besides both no more than a layer is ever in memory. `over` is donated."""
    plain, (_, here, there) = model.plain, _weights(mesh, model, to)
    axes = model.full_params(model.axes(), model.lora.base_axes(plain.axes()) if model.lora else None)

    def layer_of(params: Params, i: jax.Array | int) -> Params:
        """Layer `i`, and what is of no layer, as they will lie."""

        def one(names: tuple[str, ...], x: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(x, i, 1) if names[0] == "layers" else x

        sliced = jax.tree.map(one, axes, params, is_leaf=lambda x: isinstance(x, tuple))
        cast = plain.computed(model.merged(sliced, model.dtype))
        cast = jax.lax.with_sharding_constraint(cast, here)  # before it travels: half of the bytes
        if to != mesh:  # compilers know no shorter way from one mesh to another, and warn
            cast = jax.lax.with_sharding_constraint(cast, replicated(mesh))
        return jax.lax.with_sharding_constraint(cast, there)

    def write(params: Params, over: Params) -> Params:
        def layer(i: jax.Array, layers: Params) -> Params:
            put = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=i, axis=0)
            return jax.tree.map(put, layers, layer_of(params, i)["layers"])

        rest = jax.tree.map(jnp.copy, layer_of(params, 0))
        return {**rest, "layers": jax.lax.fori_loop(0, model.cfg.num_layers, layer, over["layers"])}

    return jax.jit(write, out_shardings=there, donate_argnums=1, keep_unused=True)


def _weights(mesh: Mesh, model: Model, to: Mesh) -> tuple[Any, Any, Any]:
    """Shapes of the sampler's weights, where the trainer has them, and where the sampler has."""
    plain = model.plain
    shapes = jax.eval_shape(plain.computed, plain.abstract())
    here = param_shardings(mesh, plain.axes(), shapes)
    return shapes, here, param_shardings(to, plain.axes(), shapes, fsdp=False)
