"""The weights that a run starts from: random ones, or those of a Hugging Face folder, placed on the mesh."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from rolljax.model import hf
from rolljax.model.decoder import Params
from rolljax.run.preflight import ResolvedRecipe
from rolljax.trainer.mesh import param_shardings


def start_params(resolved: ResolvedRecipe) -> Params:
    """Return the initial trained parameters: weights, random or the folder's, or new adapters; placed on the mesh."""
    model, seed = resolved.model, resolved.recipe.seed
    shardings = param_shardings(resolved.mesh, model.axes(), model.abstract())
    if isinstance(resolved.recipe.model, str) and not model.lora:
        return hf.load(resolved.recipe.model, model, shardings)
    return jax.jit(lambda: model.init(seed), out_shardings=shardings)()


def base_shapes(resolved: ResolvedRecipe) -> Params | None:
    """Return shapes, dtypes and shardings of the frozen weights that adapters add to; None if everything is trained."""
    model, lora = resolved.model, resolved.model.lora
    if lora is None:
        return None
    shapes = jax.eval_shape(model.base, model.plain.abstract())
    shardings = param_shardings(resolved.mesh, lora.base_axes(model.plain.axes()), shapes)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)


def base_weights(resolved: ResolvedRecipe) -> Params | None:
    """Return the frozen weights that adapters add to, on the mesh; None if everything is trained."""
    model = resolved.model
    placed = base_shapes(resolved)
    if placed is None:
        return None
    plain, shardings = model.plain, jax.tree.map(lambda x: x.sharding, placed)
    if isinstance(resolved.recipe.model, str):
        where = param_shardings(resolved.mesh, plain.axes(), plain.abstract())
        weights = hf.load(resolved.recipe.model, plain, where, computed=True)
        return jax.jit(model.base, out_shardings=shardings, donate_argnums=0)(weights)
    seed = resolved.recipe.seed
    return jax.jit(lambda: model.base(plain.init(seed)), out_shardings=shardings)()


def plain_params(resolved: ResolvedRecipe, full: Params) -> Params:
    """Return all weights in float32 with adapters added, from the argument of `Model.bind`."""
    model = resolved.model
    if model.lora is None:
        return full
    shardings = param_shardings(resolved.mesh, model.plain.axes(), model.plain.abstract())
    to_float32 = lambda p: jax.tree.map(lambda x: x.astype(jnp.float32), model.merged(p))  # noqa: E731
    return jax.jit(to_float32, out_shardings=shardings)(full)
