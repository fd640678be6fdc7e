"""Copies the trainer's weights to the sampler's: another layout, another dtype, never the same buffers."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from rolljax.model.axes import MESH_AXES
from rolljax.model.decoder import Model, Params
from rolljax.trainer.mesh import param_shardings, replicated


class Publish(Protocol):
    """See `make_publish`."""

    def __call__(self, params: Params, over: Params | None = None) -> Params:
        """Return the sampler's weights.

        Args:
          params: the argument of `Model.bind`. over: the sampler's weights to overwrite; None: allocate new memory.
        """
        ...


def make_publish(mesh: Mesh, model: Model, to: Mesh | None = None) -> Publish:
    """Return a function that copies the argument of `Model.bind`, full on every batch shard, matrices in the compute
    dtype or as int8 (`Model.sampled`).

    Args:
      mesh: the trainer's. to: the sampler's, if it differs; over other devices the weights are transferred.

    Adapters are added to their maps, so that the sampler runs the plain decoder. In bfloat16 the sum is rounded; the
    trainer's adapters are not.
    """
    to = to or mesh
    if share_devices(mesh, to):
        write, empty = write_of(mesh, model, to), make_empty(model, to)
        return lambda params, over=None: write(params, empty() if over is None else over)
    reshard = Reshard(mesh, model, to)
    return lambda params, over=None: reshard.write(reshard.move(reshard.cast(params)), over)


def lies_apart(mesh: Mesh) -> bool:
    """Return whether a sampler over these devices has its layers' weights apart (`Model.apart`): everywhere but on
    TPUs. Decode steps then take .62 of the time on a GPU (4B model, docs/accelerators.md) and .67 on a CPU (0.6B)."""
    return bool(mesh.devices.flat[0].platform != "tpu")


def share_devices(mesh: Mesh, other: Mesh) -> bool:
    """Return whether two meshes have the same devices in the same order."""
    return bool(mesh.devices.flatten().tolist() == other.devices.flatten().tolist())


class Reshard:
    """The way of weights between the meshes of one runtime that have no device in common: `cast`, `move`, `write`.

    In between weights lie in as many parts as both meshes can have: each device that receives is sent its part of every
    matrix by a device that has just that part, so nothing passes through the host, and the mesh that receives has one
    part in addition to its weights, not a second copy. Only `write`, on its own mesh, gathers them.

    Args:
      mesh: the trainer's. to: the sampler's.
    """

    def __init__(self, mesh: Mesh, model: Model, to: Mesh) -> None:
        self.parts = math.gcd(mesh.size, to.size, model.cfg.hidden_size)
        self.sent, self.received = in_parts(mesh, self.parts), in_parts(to, self.parts)
        plain = model.plain
        self._shapes, self.landing = stacked_weights(model, self.received, fsdp=True)
        self.cast_program = make_write(mesh, model, self.sent, fsdp=True)
        self.write_program = write_of(self.received, plain, to)
        self._cast_into, self._write_into = make_empty(model, self.sent, fsdp=True), make_empty(model, to)

    @property
    def moved_bytes(self) -> int:
        """Bytes that go from device to device at each publish, all together."""
        each = jax.tree.map(
            lambda x, s: math.prod(s.shard_shape(x.shape)) * x.dtype.itemsize, self._shapes, self.landing
        )
        return self.received.size * sum(jax.tree.leaves(each))

    def cast(self, params: Params) -> Params:
        """Return the argument of `Model.bind` as a plain decoder's weights in the compute dtype; in parts, on the same
        devices."""
        return self.cast_program(params, self._cast_into())

    def move(self, parts: Params) -> Params:
        """Move these parts to the devices of the other mesh."""
        return jax.device_put(parts, self.landing)

    def write(self, parts: Params, over: Params | None) -> Params:
        """Write these parts over the weights `over` of the other mesh, which are donated (None: into new memory)."""
        return self.write_program(parts, self._write_into() if over is None else over)


@jax.jit
def copied(params: Params) -> Params:
    """Copy parameters."""
    return jax.tree.map(jnp.copy, params)


def make_sent(mesh: Mesh, model: Model) -> Callable[[Params], Params]:
    """Return a function from the argument of `Model.bind` to a copy of it that a store can be sent while the trainer
    continues: of a plain decoder, in the compute dtype and in parts; of adapters alone, with the base as it is."""
    if model.lora:
        return lambda params: dataclasses.replace(params, adapters=copied(params.adapters))
    parts = in_own_parts(mesh, model)
    cast, into = make_write(mesh, model, parts, fsdp=True), make_empty(model, parts, fsdp=True)
    return lambda params: cast(params, into())


def in_parts(mesh: Mesh, parts: int) -> Mesh:
    """Return a mesh of the same devices on which parameters are split into `parts` equal parts."""
    sizes = {"data": mesh.size // parts, "fsdp": parts}
    return Mesh(mesh.devices.reshape([sizes.get(axis, 1) for axis in MESH_AXES]), MESH_AXES)


def in_own_parts(mesh: Mesh, model: Model) -> Mesh:
    """Return a mesh of the same devices on which each has a part of its own of every matrix, as far as they divide."""
    return in_parts(mesh, math.gcd(mesh.size, model.cfg.hidden_size))


def takes_parts(mesh: Mesh, model: Model) -> bool:
    """Return whether weights reach a sampler's mesh in parts (`in_own_parts`), to be written by `write_of`: where
    devices have the same weights as others, have their layers apart, or compute with int8."""
    return mesh.shape["data"] > 1 or lies_apart(mesh) or model.int8_sampler


def make_empty(model: Model, to: Mesh, *, fsdp: bool = False) -> Callable[[], Params]:
    """Return a function that makes weights of zeros, to be overwritten; fsdp: see `make_write`."""
    shapes, there = sampler_weights(model, to, fsdp)
    return jax.jit(lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes), out_shardings=there)


def make_write(mesh: Mesh, model: Model, to: Mesh, *, fsdp: bool = False) -> jax.stages.Wrapped:
    """Return the jitted `(params, over) -> over` of weights with stacked layers, both meshes over the same devices.
    `over` is donated.

    It gathers and writes one layer after the other, so that no more than a layer is held in memory besides both.

    fsdp: shard the written weights over that axis of `to` too, like the trainer's parameters.
    """
    layer_of, (_, there) = make_layer_of(mesh, model, to, fsdp), stacked_weights(model, to, fsdp=fsdp)

    def write(params: Params, over: Params) -> Params:
        def layer(i: jax.Array, layers: Params) -> Params:
            put = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=i, axis=0)
            return jax.tree.map(put, layers, layer_of(params, i)["layers"])

        rest = jax.tree.map(jnp.copy, layer_of(params, 0))
        return {**rest, "layers": jax.lax.fori_loop(0, model.cfg.num_layers, layer, over["layers"])}

    return jax.jit(write, out_shardings=there, donate_argnums=1, keep_unused=True)


def make_write_apart(mesh: Mesh, model: Model, to: Mesh) -> Callable[[Params, Params], Params]:
    """Return `make_write`'s function for weights whose layers lie apart: a program writes one layer, so that no more
    than a layer is held in memory besides both."""
    layer_of, (_, there) = make_layer_of(mesh, model, to, False), sampler_weights(model, to)
    rest_there = {name: where for name, where in there.items() if name != "layers"}

    @functools.partial(jax.jit, out_shardings=rest_there, donate_argnums=1, keep_unused=True)
    def rest(params: Params, over: Params) -> Params:
        return {name: jax.tree.map(jnp.copy, x) for name, x in layer_of(params, 0).items() if name in over}

    @functools.partial(jax.jit, out_shardings=there["layers"][0], donate_argnums=1, keep_unused=True)
    def layer(params: Params, over: Params, i: int) -> Params:
        return jax.tree.map(lambda x: x[0], layer_of(params, i)["layers"])

    def write(params: Params, over: Params) -> Params:
        layers = [layer(params, old, i) for i, old in enumerate(over["layers"])]
        return {**rest(params, {name: over[name] for name in rest_there}), "layers": layers}

    return write


def make_layer_of(mesh: Mesh, model: Model, to: Mesh, fsdp: bool) -> Callable[[Params, jax.Array | int], Params]:
    """Return the function from the argument of `Model.bind` to one layer of the plain decoder, and all parameters
    outside of layers, in the compute dtype (or as int8) and sharded over `to`; fsdp: see `make_write`."""
    plain, to_int8 = model.plain, model.int8_sampler and not fsdp
    (_, here), (_, there) = (stacked_weights(model, m, fsdp=f, on_way=fsdp) for m, f in ((mesh, True), (to, fsdp)))
    axes = model.full_params(model.axes(), model.lora.base_axes(plain.axes()) if model.lora else None)

    def layer_of(params: Params, i: jax.Array | int) -> Params:
        def one(names: tuple[str, ...], x: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(x, i, 1) if names[0] == "layers" else x

        sliced = jax.tree.map(one, axes, params, is_leaf=lambda x: isinstance(x, tuple))
        cast = plain.computed(model.merged(sliced, model.dtype))
        if to_int8:  # behind a barrier: of rounded weights, as a sampler in another process receives them
            cast = plain.sampled(jax.lax.optimization_barrier(cast))
        cast = jax.lax.with_sharding_constraint(cast, here)  # before it travels: half of the bytes
        if to != mesh:  # compilers know no shorter way from one mesh to another, and warn
            cast = jax.lax.with_sharding_constraint(cast, replicated(mesh))
        return jax.lax.with_sharding_constraint(cast, there)

    return layer_of


def write_of(mesh: Mesh, model: Model, to: Mesh) -> Callable[[Params, Params], Params]:
    """Return the function that writes weights as a sampler over `to` computes with them."""
    return (make_write_apart if lies_apart(to) else make_write)(mesh, model, to)


def sampler_weights(model: Model, mesh: Mesh, fsdp: bool = False) -> tuple[Any, Any]:
    """Return the shapes of the sampler's weights, and their shardings on a mesh; fsdp: see `param_shardings`.

    With `fsdp` they are on their way, in the compute dtype and with stacked layers; without, they lie as the sampler
    computes with them.
    """
    shapes, shardings = stacked_weights(model, mesh, fsdp=fsdp)
    if fsdp or not lies_apart(mesh):
        return shapes, shardings
    shapes = jax.eval_shape(model.plain.apart, shapes)
    return shapes, param_shardings(mesh, model.apart_axes(), shapes, fsdp=False)


def stacked_weights(model: Model, mesh: Mesh, *, fsdp: bool, on_way: bool | None = None) -> tuple[Any, Any]:
    """Return what `sampler_weights` returns, of weights with stacked layers; on_way: in the compute dtype (default:
    `fsdp`)."""
    plain = model.plain
    shapes, axes = jax.eval_shape(plain.computed, plain.abstract()), plain.axes()
    if not (fsdp if on_way is None else on_way):
        shapes, axes = jax.eval_shape(plain.sampled, shapes), plain.sampled_axes()
    return shapes, param_shardings(mesh, axes, shapes, fsdp=fsdp)


def adapted_weights(model: Model, mesh: Mesh) -> tuple[Any, Any]:
    """Return shapes and shardings of the argument of `Model.bind` of a model with adapters; each device has a part."""
    assert model.lora
    plain = model.plain
    shapes = model.full_params(model.abstract(), jax.eval_shape(model.base, plain.abstract()))
    axes = model.full_params(model.axes(), model.lora.base_axes(plain.axes()))
    return shapes, param_shardings(mesh, axes, shapes)


# ---- whether what arrives is what was sent --------------------------------------------------------------------------


@jax.jit
def checksums(params: Params) -> Params:
    """Compute a checksum of each array, uint32: the sum of its bit patterns, each times `2 i + 1` for its index i.

    It is exact and does not depend on the sharding of an array; swapping parts of an array changes it.
    """
    return jax.tree.map(_checksum, params)


def _checksum(x: jax.Array) -> jax.Array:
    bits = jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}").astype(jnp.uint32)
    strides = [math.prod(x.shape[axis + 1 :]) % 2**32 for axis in range(x.ndim)]
    places = [jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis) * np.uint32(s) for axis, s in enumerate(strides)]
    terms = bits * (2 * sum(places, start=jnp.uint32(0)) + 1)
    if x.ndim > 2:  # layers are added first, entry by entry: on a CPU a sum to one number takes 10 to 50 times as long
        count = max(n for n in range(1, min(x.shape[0], 32) + 1) if x.shape[0] % n == 0)
        sums = jnp.sum(terms.reshape(count, -1, *x.shape[1:]), 0, dtype=jnp.uint32)
        terms = jax.lax.optimization_barrier(sums)  # or compilers make one sum of both
    return jnp.sum(terms, dtype=jnp.uint32)


def differing(sent: Params, received: Params) -> list[str]:
    """Return the names of the arrays whose `checksums` differ."""
    pairs = zip(jax.tree.leaves_with_path(sent), jax.tree.leaves(received), strict=True)
    return [jax.tree_util.keystr(path, simple=True, separator=".") for (path, a), b in pairs if int(a) != int(b)]
