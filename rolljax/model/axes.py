"""The one table from logical axis names to mesh axes: for parameters and for activations.

A model names the axes of its arrays and knows no mesh. Code that compiles the model for a mesh declares the mesh with
`on_mesh`. Without `on_mesh`, `constrain` does nothing, and the compiler chooses where arrays are placed.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Mapping, Sequence

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rolljax.errors import ConfigError

MESH_AXES = ("data", "fsdp", "expert", "context", "tensor")
BATCH_AXES = ("data", "fsdp", "expert")
"""Mesh axes that rows of a batch are split over."""
SLOT_AXES = (*BATCH_AXES, "context")
"""Mesh axes that the slots of the sampler are split over; it never splits a row, so `context` holds slots too."""

Rules = Mapping[str, tuple[str, ...]]

PARAM_RULES: Rules = {
    "vocab": ("tensor",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "ffn": ("tensor",),
    "embed": ("fsdp", "expert"),
    "experts": ("expert",),
    "expert_embed": ("fsdp",),
    "expert_ffn": ("tensor",),
    "router": (),
    "norm": (),
    "rank": (),
    "layers": (),
    "head_dim": (),
    "critics": (),
}
"""Mesh axes that each axis of a parameter is split over.

`expert_*`: of the weights of experts, which the expert axis spreads over devices already."""

COMPUTED_RULES: Rules = {**PARAM_RULES, "embed": ()}
"""Mesh axes of a weight while a layer computes with it: axes that are split for size alone are gathered."""
GATHERED = "gathered"
"""Name, for `jax.checkpoint`, of a gathered weight: the backward pass gathers it again."""

ACTIVATION_RULES: Rules = {
    "batch": BATCH_AXES,
    "length": ("context",),
    "keys": (),
    "hidden": (),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "ffn": ("tensor",),
    "head_dim": (),
}
"""Mesh axes that each axis of an activation is split over.

`keys`: tokens to which queries attend; every part of a long row needs all of them."""

_mesh: contextvars.ContextVar[Mesh | None] = contextvars.ContextVar("mesh", default=None)


def spec(names: Sequence[str | None], rules: Rules, mesh: Mesh) -> PartitionSpec:
    """Return how an array with these axes is split over a mesh.

    Raises:
      ConfigError: a name is in no table, or two names of one array are on the same mesh axis.
    """
    used: dict[str, str] = {}
    entries: list[tuple[str, ...] | str | None] = []
    for name in names:
        if name is not None and name not in rules:
            raise ConfigError(
                "is no logical axis", setting="axes", value=name, remedy=f"one of {', '.join(sorted(rules))}"
            )
        axes = tuple(a for a in (rules[name] if name else ()) if mesh.shape.get(a, 1) > 1)
        for axis in axes:
            if axis in used:
                raise ConfigError(
                    f"and {used[axis]} of one array are both split over the mesh axis {axis}",
                    setting="axes",
                    value=name,
                    remedy="give one of them another logical name",
                )
            used[axis] = str(name)
        entries.append(axes[0] if len(axes) == 1 else axes or None)
    return PartitionSpec(*entries)


@contextlib.contextmanager
def on_mesh(mesh: Mesh | None) -> Iterator[None]:
    """Trace for `mesh` inside this context (None: for one device)."""
    token = _mesh.set(mesh)
    try:
        yield
    finally:
        _mesh.reset(token)


def current_mesh() -> Mesh | None:
    """Return the mesh that `on_mesh` has set."""
    return _mesh.get()


def constrain(x: jax.Array, *names: str | None, rules: Rules = ACTIVATION_RULES) -> jax.Array:
    """Return `x` with its axes sharded by their names (None: not split)."""
    mesh = current_mesh()
    if mesh is None or mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec(names, rules, mesh)))


def is_gathered() -> bool:
    """Return whether layers gather their weights before they compute with them."""
    mesh = current_mesh()
    return mesh is not None and any(mesh.shape.get(axis, 1) > 1 for axis in PARAM_RULES["embed"])
