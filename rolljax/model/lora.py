"""Low-rank adapters (LoRA, arXiv:2106.09685): a linear map W stays, and `x W + (x A) B alpha / rank` is computed.

Only A and B are trained. The base weights are an argument of their own in every program: kept in the model's compute
dtype or as int8, never written. The policy without its adapters is the base itself. B starts at 0.

Adapters are a parameter tree like any other, `{"layers": {"q_a": [L, in, rank], "q_b": [L, rank, out], ...}}` with the
heads of a map flattened; the sampler gets the sum of both (`merged`), and knows nothing of all this.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np

from rolljax.errors import ConfigError, Range, check_fields
from rolljax.model.layers import LINEAR, param
from rolljax.model.shards import save_file
from rolljax.model.tokenizer import save_tokenizer

if TYPE_CHECKING:
    from rolljax.model.decoder import DecoderConfig, Params

INT8_MAX = 127


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Adapted:
    """The parameters of a model with adapters."""

    base: Params
    """The decoder's frozen weights (`Lora.base`)."""
    adapters: Params | None
    """None: adapters off."""
    columns: jax.Array | None = None
    """Weights `[B, rank]` of the columns of A in each row of a batch (`SlottedAdapters`); None: all are 1."""

    def parts(self) -> tuple[Params, dict[str, jax.Array]]:
        """Return the decoder's tree, and the further arrays of its layers (`Layers.extend`)."""
        others = dict(self.adapters["layers"]) if self.adapters else {}
        if self.columns is not None:
            depth, (rows, rank) = len(next(iter(others.values()))), self.columns.shape
            others["adapter_columns"] = jnp.broadcast_to(self.columns[:, None], (depth, rows, 1, rank))
        return self.base, others


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SlottedAdapters:
    """Adapters of several policies over one base, side by side: slot k of A has the k-th part of the columns of one
    wide adapter (`LoraSlots`). A batch may mix rows of all policies: each row uses the columns of its own slot, and
    the products stay plain matrix products."""

    base: Params
    adapters: Params
    """As `LoraSlots.lora` describes them."""
    scales: jax.Array
    """Factor of each slot's adapter, float32 `[A]`."""

    def of_rows(self, slots_B: jax.Array) -> Adapted:
        """Return the parameters for a batch whose rows use these slots; -1: the base."""
        total = next(x.shape[-1] for name, x in self.adapters["layers"].items() if name.endswith("_a"))
        slot_of_column = jnp.arange(total) // (total // len(self.scales))
        scale_B1 = self.scales[jnp.maximum(slots_B, 0)][:, None]
        columns = jnp.where(slot_of_column == slots_B[:, None], scale_B1, 0.0)
        return Adapted(self.base, self.adapters, columns)


@dataclasses.dataclass(frozen=True)
class Lora:
    """Low-rank adapters on the linear maps of every layer."""

    rank: Annotated[int, Range(low=1)] = 16
    """Columns of A."""
    alpha: Annotated[float, Range(above=0, below=math.inf)] = 32.0
    """The output of an adapter is scaled by `alpha / rank`."""
    targets: tuple[str, ...] = ("*",)
    """Patterns of names of maps (`fnmatch`): `q`, `k`, `v`, `o`, `gate`, `up`, `down`. Weights of experts have no
    adapters."""
    int8_base: bool = False
    """Keep the base weights of all these maps as int8, one scale for each output: a quarter of float32."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.targets:
            raise ConfigError(
                "names no linear map", setting="Lora.targets", value=self.targets, remedy="('*',) names all of them"
            )

    @property
    def factor(self) -> float:
        """The factor of `(x A) B`."""
        return self.alpha / self.rank

    def maps(self, axes: Params) -> tuple[str, ...]:
        """Return the names of the maps that have adapters.

        Args:
          axes: of the decoder without adapters (`Model.axes`).

        Raises:
          ConfigError: a pattern matches no map.
        """
        known = linear_maps(axes)
        for pattern in self.targets:
            if not fnmatch.filter(known, pattern):
                raise ConfigError(
                    f"fits no linear map of this model: {pattern!r}",
                    setting="Lora.targets",
                    value=self.targets,
                    remedy=f"patterns of {', '.join(known)}",
                )
        return tuple(name for name in known if any(fnmatch.fnmatchcase(name, p) for p in self.targets))

    # ---- of a decoder's tree: `axes` and `shapes` are its own, without adapters -------------------------------------

    def init(self, seed: int, axes: Params, shapes: Params) -> Params:
        """Return new adapters: A random with PEFT's standard deviation, B zero."""
        layers: dict[str, jax.Array] = {}
        for key, name in zip(jax.random.split(jax.random.key(seed), len(LINEAR)), LINEAR, strict=True):
            if name in self.maps(axes):
                depth, ins, out = flat(name, shapes["layers"][name].shape)
                layers[f"{name}_a"] = param(key, (depth, ins, self.rank), (), (3 * ins) ** -0.5)[...]
                layers[f"{name}_b"] = jnp.zeros((depth, self.rank, out))
        return {"layers": layers}

    def axes(self, axes: Params) -> Params:
        """Return the logical axis names of adapters: each is sharded like its map."""
        layers: dict[str, tuple[str, ...]] = {}
        for name in self.maps(axes):
            ins, out = ends(name, axes)
            layers |= {f"{name}_a": ("layers", ins, "rank"), f"{name}_b": ("layers", "rank", out)}
        return {"layers": layers}

    def base(self, axes: Params, params: Params) -> Params:
        """Return the frozen base weights of a decoder's parameters. With `int8_base` the linear maps become int8."""
        return int8_maps(axes, params) if self.int8_base else params

    def base_axes(self, axes: Params) -> Params:
        """Return the logical axis names of `base`."""
        return int8_axes(axes) if self.int8_base else axes


@dataclasses.dataclass(frozen=True)
class LoraSlots:
    """Room for the adapters of several policies over one base; see `SlottedAdapters`."""

    num: Annotated[int, Range(low=1)] = 8
    """Slots."""
    rank: Annotated[int, Range(low=1)] = 32
    """Highest rank of an adapter; those of lower ranks are padded with zeros, which stay zero in training."""
    alpha: Annotated[float, Range(above=0, below=math.inf)] = 32.0
    """The output of an adapter is scaled by `alpha / its rank`."""

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def lora(self) -> Lora:
        """The wide adapter that has all slots."""
        return Lora(rank=self.num * self.rank, alpha=self.num * self.rank)

    def padded(self, adapters: Params) -> Params:
        """Pad an adapter of a lower rank with zeros, on its columns of A and rows of B."""

        def one(name: str, x: jax.Array) -> jax.Array:
            widths = [(0, 0)] * 3
            widths[_rank_axis(name)] = (0, self.rank - x.shape[_rank_axis(name)])
            return jnp.pad(x, widths)

        return {"layers": {name: one(name, x) for name, x in adapters["layers"].items()}}

    def cut(self, adapters: Params, rank: int) -> Params:
        """Undo `padded`: return the first `rank` columns of A and rows of B."""
        parts = adapters["layers"].items()
        return {"layers": {name: x[..., :rank] if name.endswith("_a") else x[:, :rank] for name, x in parts}}

    def take(self, tree: Params, slot: jax.Array | int) -> Params:
        """Return the part of one slot of a tree with the shape of the wide adapter. The slot may be traced."""
        return {"layers": {name: self._part(name, x, slot) for name, x in tree["layers"].items()}}

    def put(self, tree: Params, slot: jax.Array | int, part: Params) -> Params:
        """Return the tree with another part of one slot (`take`)."""

        def one(name: str, x: jax.Array) -> jax.Array:
            axis = _rank_axis(name)
            return jax.lax.dynamic_update_slice_in_dim(x, part["layers"][name], slot * self.rank, axis)

        return {"layers": {name: one(name, x) for name, x in tree["layers"].items()}}

    def _part(self, name: str, x: jax.Array, slot: jax.Array | int) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(x, slot * self.rank, self.rank, _rank_axis(name))


def _rank_axis(name: str) -> int:
    """Return the axis of an adapter's matrix, `[L, in, rank]` or `[L, rank, out]`, that counts its columns."""
    return 2 if name.endswith("_a") else 1


def linear_maps(axes: Params) -> tuple[str, ...]:
    """Return the names of the linear maps of a decoder's layers, which `Layers.project` computes."""
    return tuple(name for name in LINEAR if name in axes["layers"] and "experts" not in axes["layers"][name])


def flat(name: str, shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Return the number of layers, inputs and outputs of a stacked map."""
    ins = LINEAR[name]
    return shape[0], math.prod(shape[1 : 1 + ins]), math.prod(shape[1 + ins :])


def ends(name: str, axes: Params) -> tuple[str, str]:
    """Return the logical names of a map's inputs and outputs; a flattened axis is split like its first part."""
    names = axes["layers"][name]
    return names[1], names[1 + LINEAR[name]]


def int8_maps(axes: Params, params: Params) -> Params:
    """Return a decoder's parameters with its linear maps as int8. A map `name` has its scales in `{name}_scale`,
    float32 `[L, out]`: a weight is its int8 times the scale of its output.

    Args:
      axes: of the decoder (`Model.axes`).
    """
    layers = dict(params["layers"])
    for name in linear_maps(axes):
        layers[name], layers[scale_of(name)] = to_int8(name, layers[name])
    return {**params, "layers": layers}


def int8_axes(axes: Params) -> Params:
    """Return the logical axis names of `int8_maps`."""
    scales = {scale_of(name): ("layers", ends(name, axes)[1]) for name in linear_maps(axes)}
    return {**axes, "layers": {**axes["layers"], **scales}}


def scale_of(name: str) -> str:
    """Return the name of the scales of an int8 map."""
    return f"{name}_scale"


def to_int8(name: str, w: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return a stacked map as int8, and the scales `[L, out]` of its outputs.

    A scale is the largest absolute weight of its output over 127. Rounding moves no weight by more than half of its
    output's scale.
    """

    def one(w: jax.Array) -> tuple[jax.Array, jax.Array]:
        rows = w.astype(jnp.float32).reshape(math.prod(w.shape[: LINEAR[name]]), -1)
        largest = jnp.abs(rows).max(0)
        scale = jnp.where(largest > 0, largest / INT8_MAX, 1.0)
        return jnp.round(rows / scale).astype(jnp.int8).reshape(w.shape), scale

    return jax.lax.map(one, w)


def merged(lora: Lora, adapted: Adapted, dtype: Any) -> Params:
    """Return the parameters of a decoder that computes the same without adapters: base and adapters added in float32,
    rounded once to `dtype`.

    Layers are merged one after the other, so no float32 copy of all layers of a map exists. Parameters with neither
    adapter nor int8 stay as they are.
    """
    base, adapters = adapted.base, adapted.adapters
    extra = adapters["layers"] if adapters else {}
    layers = dict(base["layers"])
    for name, ins in LINEAR.items():
        parts = layers.pop(scale_of(name), None), extra.get(f"{name}_a"), extra.get(f"{name}_b")
        if all(part is None for part in parts):
            continue

        def one(xs: tuple[Any, ...], ins: int = ins) -> jax.Array:
            w, scale, a, b = xs
            rows = w.astype(jnp.float32).reshape(math.prod(w.shape[:ins]), -1)
            if scale is not None:
                rows *= scale
            if a is not None:
                rows += lora.factor * jnp.matmul(a, b, precision="highest")
            return rows.astype(dtype).reshape(w.shape)

        layers[name] = jax.lax.map(one, (layers[name], *parts))
    return {**base, "layers": layers}


# ---- PEFT -----------------------------------------------------------------------------------------------------------


def save_adapter(
    folder: str | Path,
    lora: Lora,
    cfg: DecoderConfig,
    adapters: Params,
    base: str,
    tokenizer: Any,
    inside: str = "model",
) -> None:
    """Write adapters as the folder that PEFT reads, with the tokenizer, into a new or empty folder.

    Args:
      base: the folder of the base weights, as `adapter_config.json` names it. inside: the name of the decoder inside
        the model that `transformers` makes of that folder (`hf.decoder_module`).
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_tokenizer(folder, tokenizer, base)
    tensors, modules = {}, set()
    for name, theirs in modules_of(cfg):
        if f"{name}_a" not in adapters["layers"]:
            continue
        modules.add(theirs.rpartition(".")[2])
        for part, letter in (("a", "A"), ("b", "B")):
            for i, matrix in enumerate(np.asarray(adapters["layers"][f"{name}_{part}"])):
                key = f"base_model.model.{inside}.layers.{i}.{theirs}.lora_{letter}.weight"
                tensors[key] = np.ascontiguousarray(matrix.T)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        # other parts have modules of these names, too: a pattern, where there are others
        "target_modules": sorted(modules) if inside == "model" else rf"{inside}\..*\.({'|'.join(sorted(modules))})",
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(folder / "adapter_model.safetensors", tensors)


def modules_of(cfg: DecoderConfig) -> Iterator[tuple[str, str]]:
    """Yield each linear map with its name in a layer of `transformers`. Both flatten heads in the same order."""
    for tensor in cfg.layer_tensors():
        if tensor.ours in LINEAR and tensor.expert is None:
            yield tensor.ours, tensor.theirs.removesuffix(".weight")
