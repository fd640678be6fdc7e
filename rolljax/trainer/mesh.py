"""The mesh, and where parameters and batches lie on it; the table of logical axes is `model.axes`."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rolljax.errors import ConfigError
from rolljax.model.axes import BATCH_AXES, MESH_AXES, PARAM_RULES, SLOT_AXES, spec
from rolljax.trainer.batch import ARRAYS, SCALARS, Packed, TokenBatch


def available_devices() -> list[jax.Device]:
    """Return all devices that JAX finds.

    Raises:
      ConfigError: JAX finds no device of the kind that `JAX_PLATFORMS` names.
    """
    try:
        return jax.devices()
    except (RuntimeError, AssertionError) as e:
        said = next(iter(str(e).strip().splitlines()), "")
        raise ConfigError(
            "asks for devices that are not here" + (f": {said}" if said else ""),
            setting="JAX_PLATFORMS",
            value=os.environ.get("JAX_PLATFORMS"),
            remedy="pip install 'rolljax[cuda]' (or [tpu]) and look whether the driver works (nvidia-smi); or leave "
            "the variable out, or set it to cpu",
        ) from e


@dataclasses.dataclass(frozen=True)
class MeshSpec:
    """The number of devices of each mesh axis; one axis may be -1, "all that are left".

    With none at -1, the first devices of the machine are used.
    """

    data: int = -1
    """Rows of the batch."""
    fsdp: int = 1
    """Rows of the batch, and parameters with their optimizer state."""
    expert: int = 1
    """Number of devices over which the rows of the batch, parameters with their optimizer state (as with `fsdp`), and
    the experts of each layer are split."""
    context: int = 1
    """The tokens of each row."""
    tensor: int = 1
    """Heads, feed-forward and vocabulary."""

    def __post_init__(self) -> None:
        for name in MESH_AXES:
            if getattr(self, name) < 1 and getattr(self, name) != -1:
                raise ConfigError(
                    "must be positive, or -1 for all devices that are left",
                    setting=f"MeshSpec.{name}",
                    value=getattr(self, name),
                )
        free = [name for name in MESH_AXES if getattr(self, name) == -1]
        if len(free) > 1:
            raise ConfigError("only one mesh axis can be -1", setting=f"MeshSpec.{free[1]}", value=-1)

    def sizes(self, num_devices: int) -> tuple[int, ...]:
        """Return the size of each mesh axis on `num_devices` devices."""
        sizes = [getattr(self, name) for name in MESH_AXES]
        fixed = int(np.prod([s for s in sizes if s != -1]))
        if -1 in sizes and num_devices % fixed == 0:
            sizes[sizes.index(-1)] = num_devices // fixed
        if -1 in sizes or fixed > num_devices:
            raise ConfigError(
                f"asks for {fixed} devices per row of the mesh, there are {num_devices}"
                if -1 in sizes
                else f"the mesh needs {fixed} devices, there are {num_devices}",
                setting=f"MeshSpec.{max(MESH_AXES, key=lambda name: getattr(self, name))}",
                value=max(sizes),
                remedy="make the product of the axes a divisor of the device count",
            )
        return tuple(sizes)

    def build(self, devices: Sequence[jax.Device] | None = None) -> Mesh:
        """Build the mesh over `devices` (default: all of them)."""
        devices = available_devices() if devices is None else devices
        sizes = self.sizes(len(devices))
        return Mesh(np.array(devices[: int(np.prod(sizes))]).reshape(sizes), MESH_AXES)


@dataclasses.dataclass(frozen=True)
class Colocated:
    """Trainer and sampler share the devices of the trainer's mesh, and take turns on each."""


@dataclasses.dataclass(frozen=True)
class Split:
    """Trainer and sampler have separate devices; with `Phase.async_ratio` above 0 both work at the same time."""

    sampler: int
    """Number of the sampler's devices, which come after the trainer's. -1: all that are left; if neither number is -1,
    devices after both shares are not used."""
    trainer: int = -1
    """Number of the trainer's devices, the first ones of the machine. -1: all that are left; if neither number is -1,
    devices after both shares are not used."""

    def __post_init__(self) -> None:
        for name in ("sampler", "trainer"):
            if getattr(self, name) < 1 and getattr(self, name) != -1:
                raise ConfigError(
                    "must be positive, or -1 for all devices that are left",
                    setting=f"Split.{name}",
                    value=getattr(self, name),
                )
        if self.sampler == self.trainer == -1:
            raise ConfigError(
                "and Split.trainer cannot both be -1", setting="Split.sampler", value=-1, remedy="give one a number"
            )

    def shares(self, devices: Sequence[jax.Device]) -> tuple[Sequence[jax.Device], Sequence[jax.Device]]:
        """Split the devices into the trainer's and the sampler's.

        Raises:
          ConfigError: the shares need more devices than there are, or one of them is empty.
        """
        there = len(devices)
        trainer = there - self.sampler if self.trainer == -1 else self.trainer
        sampler = there - trainer if self.sampler == -1 else self.sampler
        if min(trainer, sampler) < 1 or trainer + sampler > there:
            name = "trainer" if self.sampler == -1 else "sampler"
            raise ConfigError(
                f"leaves the {'sampler' if name == 'trainer' else 'trainer'} none of {there} devices"
                if -1 in (self.trainer, self.sampler)
                else f"and Split.trainer = {trainer} are {trainer + sampler} devices, there are {there}",
                setting=f"Split.{name}",
                value=getattr(self, name),
                remedy=f"choose shares whose sum is {there}, or set Recipe.placement = @mesh.Colocated()",
            )
        return devices[:trainer], devices[trainer : trainer + sampler]


def num_batch_shards(mesh: Mesh) -> int:
    """Return the number of parts into which the rows of a batch are split."""
    return int(np.prod([mesh.shape[a] for a in BATCH_AXES]))


def num_slot_shards(mesh: Mesh) -> int:
    """Return the number of parts into which the slots of the sampler are split."""
    return int(np.prod([mesh.shape[a] for a in SLOT_AXES]))


def replicated(mesh: Mesh) -> NamedSharding:
    """Return the sharding of an array that every device of the mesh holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def gradient_options(mesh: Mesh) -> dict[str, bool]:
    """Return the compiler options of programs with gradients. On GPU they forbid kernels that give other bits each
    time, such as cuDNN's usual backward pass of attention: a resumed run must equal an uninterrupted one."""
    return {"xla_gpu_exclude_nondeterministic_ops": True} if mesh.devices.flat[0].platform == "gpu" else {}


def rows(mesh: Mesh, axis: int = 0, *, tokens: bool = False) -> NamedSharding:
    """Return the sharding of an array whose dimension `axis` counts rows; with `tokens` the next dimension counts
    tokens."""
    return NamedSharding(mesh, PartitionSpec(*[None] * axis, BATCH_AXES, *["context"] * tokens))


def put(mesh: Mesh, arrays: Any, shardings: Any) -> Any:
    """Put a tree of host arrays on the mesh. With several processes each has the whole arrays and puts its own
    shards."""
    if mesh.is_multi_process:

        def own_shards(x: Any, sharding: NamedSharding) -> jax.Array:
            return jax.make_array_from_callback(np.shape(x), sharding, np.asarray(x).__getitem__)

        return jax.tree.map(own_shards, arrays, shardings)
    return jax.device_put(arrays, shardings)


def param_shardings(mesh: Mesh, axes: Any, shapes: Any, *, fsdp: bool = True, owner: str = "MeshSpec") -> Any:
    """Return the shardings of a parameter tree.

    Args:
      axes: logical axis names per parameter (`Model.axes`). shapes: the same tree of objects with a shape.
      fsdp: False leaves the fsdp axis out (the sampler's copy: full on every batch shard, but for experts).
      owner: whose settings errors name.

    Raises:
      ConfigError: a dimension does not divide by the mesh axis it is mapped to.
    """

    rules = PARAM_RULES if fsdp else {**PARAM_RULES, "embed": (), "expert_embed": ()}

    def one(names: tuple[str, ...], like: Any) -> NamedSharding:
        axes_of = spec(names, rules, mesh)
        for name, size, entry in zip(names, like.shape, axes_of, strict=True):
            axes = (entry,) if isinstance(entry, str) else entry or ()
            parts = int(np.prod([mesh.shape[a] for a in axes]))
            if size % parts:
                axis = max(axes, key=lambda a: mesh.shape[a])
                raise ConfigError(
                    f"= {mesh.shape[axis]} does not divide the model's {name} dimension of {size}"
                    if parts == mesh.shape[axis]
                    else f"and {' x '.join(axes)} = {parts} do not divide the model's {name} dimension of {size}",
                    setting=f"{owner}.{axis}",
                    value=mesh.shape[axis],
                    remedy=f"choose a divisor of {size}",
                )
        return NamedSharding(mesh, axes_of)

    return jax.tree.map(one, axes, shapes, is_leaf=lambda x: isinstance(x, tuple))


def batch_shardings(mesh: Mesh, like: TokenBatch) -> TokenBatch:
    """Return the shardings of the arrays in `like`: rows split over the batch axes, tokens over `context`, scalars
    replicated."""
    scalars: dict[str, NamedSharding] = {n: replicated(mesh) for n in SCALARS}
    arrays = {n: rows(mesh, 1, tokens=True) for n in ARRAYS if getattr(like, n) is not None}
    return TokenBatch(**{**dict.fromkeys(ARRAYS), **arrays}, **scalars)  # type: ignore[arg-type]


def put_batch(mesh: Mesh, batch: TokenBatch) -> TokenBatch:
    """Put the packed batch on its devices. With several processes each has the whole batch on its host, and puts its
    own shards."""
    return put(mesh, batch, batch_shardings(mesh, batch))


@dataclasses.dataclass(frozen=True, eq=False)
class PlacedBatch:
    """A packed batch on the host and, from its first use, on the devices of a mesh."""

    mesh: Mesh
    packed: Packed

    @property
    def host(self) -> TokenBatch:
        """Return the batch on the host, NumPy arrays."""
        return self.packed.batch

    @functools.cached_property
    def on_devices(self) -> TokenBatch:
        """Return the batch on the devices of the mesh."""
        return put_batch(self.mesh, self.host)
