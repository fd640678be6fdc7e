"""Two look-ups on a mesh. A compiler may otherwise copy the whole table to every device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from rolljax.model.axes import ACTIVATION_RULES, PARAM_RULES, current_mesh, spec


def embedded(table_VD: jax.Array, ids_BT: jax.Array, dtype: str) -> jax.Array:
    """Look up rows of the embedding, `[B, T, D]` of `dtype`; their gradient is summed in the table's own dtype.

    On a mesh every device sends its token ids to the devices that hold the table's columns and receives the columns of
    these rows: the table is not moved.
    """
    mesh = current_mesh()
    if mesh is None or mesh.size == 1:
        return table_VD[ids_BT].astype(dtype)
    columns = _split(mesh, *PARAM_RULES["embed"])

    parts = _split(mesh, *PARAM_RULES["vocab"])

    def local(table: jax.Array, ids: jax.Array) -> jax.Array:
        if columns:
            ids = jax.lax.all_gather(ids, columns, axis=0, tiled=True)
        index = ids - jax.lax.axis_index(parts) * len(table) if parts else ids
        rows = table[jnp.clip(index, 0, len(table) - 1)].astype(dtype)
        if parts:
            rows = jnp.where(((index >= 0) & (index < len(table)))[..., None], rows, 0)
        if columns:
            rows = jax.lax.all_to_all(rows, columns, split_axis=0, concat_axis=2, tiled=True)
        return jax.lax.psum(rows, parts) if parts else rows

    table_spec = spec(("vocab", "embed"), PARAM_RULES, mesh)
    ids_spec, rows_spec = (
        spec(names, ACTIVATION_RULES, mesh) for names in (("batch", "length"), ("batch", "length", "hidden"))
    )
    mapped = jax.shard_map(local, mesh=mesh, in_specs=(table_spec, ids_spec), out_specs=rows_spec)
    return mapped(table_VD, ids_BT)


def before(hidden_BTD: jax.Array, prev_BT: jax.Array) -> jax.Array:
    """Return for every token of a packed row the hidden state of its predecessor, `[B, T, D]`.

    Args:
      prev_BT: index of the predecessor in the row: the token before, the end of the prompt that the token's group
        shares, or (without a predecessor) the token itself.

    If rows are split, a part of a row needs at most two hidden states of other parts: of the token before its first
    one, and of the end of one prompt, because groups are contiguous and so only one group can begin before the part.
    """
    mesh = current_mesh()
    if mesh is None or not _split(mesh, "context"):
        return jnp.take_along_axis(hidden_BTD, prev_BT[..., None], axis=1)

    def local(hidden: jax.Array, prev: jax.Array) -> jax.Array:
        length = prev.shape[1]
        first = jax.lax.axis_index("context") * length
        index, far = prev - first, prev < first - 1
        own = jnp.take_along_axis(hidden, jnp.clip(index, 0, length - 1)[..., None], axis=1)
        wanted = jnp.stack([jnp.full(len(prev), first - 1), jnp.where(far, prev, -1).max(1)], 1)
        wanted = jax.lax.all_gather(wanted, "context") - first
        found = jnp.take_along_axis(hidden[None], jnp.clip(wanted, 0, length - 1)[..., None], axis=2)
        found = jnp.where(((wanted >= 0) & (wanted < length))[..., None], found, 0)
        neighbour, prompt_end = jnp.moveaxis(jax.lax.psum_scatter(found, "context"), 1, 0)[:, :, None]
        return jnp.where((index >= 0)[..., None], own, jnp.where(far[..., None], prompt_end, neighbour))

    rows, tokens = (
        spec(names, ACTIVATION_RULES, mesh) for names in (("batch", "length", "hidden"), ("batch", "length"))
    )
    mapped = jax.shard_map(local, mesh=mesh, in_specs=(rows, tokens), out_specs=rows)
    return mapped(hidden_BTD, prev_BT)


def _split(mesh: Mesh, *axes: str) -> tuple[str, ...]:
    """Return those of the axes that split anything on this mesh."""
    return tuple(a for a in axes if mesh.shape.get(a, 1) > 1)
