"""Descriptions of Hugging Face folders by families: fields of `config.json`, and the conversion of tensors to
parameters."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rolljax.errors import CheckpointError

Transform = Callable[[Any], Any]
"""A function of one array, of the host or traced."""
_NEEDED = object()
MOST = 2**31 - 1
"""Most of anything that `config.json` counts."""
MOST_LAYERS = 2**16
"""Most layers of a model, or experts of a layer."""


def folder_remedy(name: str) -> str:
    """Return advice for a user whose `name` is no model folder."""
    if Path(name).parts[:1] == ("runs",):
        return "a run folder holds a model once its run has ended: train it first, or name another"
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not Path(name).exists():
        here = name.partition("/")[2]
        return f"a name of the Hub is downloaded first: hf download {name} --local-dir {here}; then name that folder"
    return "name a local folder with config.json, *.safetensors and a tokenizer"


@dataclasses.dataclass(frozen=True)
class Folder:
    """The `config.json` of a folder, and checked access to its fields."""

    path: str
    """The file, for errors."""
    fields: Mapping[str, Any]

    def get(self, name: str, default: Any = _NEEDED) -> Any:
        """Return a field; null counts as absent.

        Raises:
          CheckpointError: the field is absent and has no default.
        """
        value = self.fields.get(name)
        if value is None:
            if default is _NEEDED:
                raise CheckpointError(f"{self.path} has no {name}")
            return default
        return value

    def count(self, name: str, default: Any = _NEEDED, most: int = MOST) -> int:
        """Return a field that is a positive integer.

        Raises:
          CheckpointError: as `get`, or the field is no positive integer, or more than `most`.
        """
        value = self.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise CheckpointError(f"{self.path}: {name} = {_shown(value)} is no positive integer")
        if value > most:
            raise CheckpointError(f"{self.path}: {name} = {_shown(value)} is more than {most:,}")
        return value

    def number(self, name: str, default: Any = _NEEDED, *, positive: bool = True) -> float:
        """Return a numeric field as a float.

        Raises:
          CheckpointError: as `get`, or the field is no number, not above 0 (positive=False: below 0), or beyond 10^30.
        """
        value = self.get(name, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value <= 1e30:
            raise CheckpointError(f"{self.path}: {name} = {_shown(value)} is not a number from 0 to 1e30")
        if positive and value == 0:
            raise CheckpointError(f"{self.path}: {name} = {_shown(value)} must be above 0")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """Return a field that is true or false. Raise `CheckpointError` for anything else."""
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise CheckpointError(f"{self.path}: {name} = {_shown(value)} is neither true nor false")
        return value

    def table(self, name: str, default: Any = _NEEDED) -> Folder:
        """Return a field that is a JSON object. Raise `CheckpointError` as `get`, or if it is no object."""
        value = self.get(name, default)
        if not isinstance(value, Mapping):
            raise CheckpointError(f"{self.path}: {name} = {_shown(value)} is not a JSON object")
        return Folder(f"{self.path}: {name}", value)

    def refuse(self, **bad: bool) -> None:
        """Raise `CheckpointError` for the first of these fields that requests an unsupported computation."""
        for name, is_bad in bad.items():
            if is_bad:
                raise CheckpointError(f"{self.path}: {name} = {_shown(self.fields.get(name))} is not supported")

    def rope(self) -> Folder:
        """Return the rotary settings, as `transformers` 5 (`rope_parameters`) or 4 (`rope_theta`, `rope_scaling`)
        writes them."""
        name = "rope_parameters" if self.get("rope_parameters", None) else "rope_scaling"
        table = self.table(name, {})
        found = dict(table.fields)
        found.setdefault("rope_type", found.get("type", "default"))
        found.setdefault("rope_theta", self.get("rope_theta", 10_000.0))
        return Folder(table.path, found)

    def shape(self) -> dict[str, Any]:
        """Return the fields of `DecoderConfig` that have the same names in every family.

        Raises:
          CheckpointError: a field is missing or is no positive count, or the weights are quantised.
        """
        self.refuse(quantization_config="quantization_config" in self.fields)
        heads, hidden = self.count("num_attention_heads"), self.count("hidden_size")
        return {
            "vocab_size": self.count("vocab_size"),
            "num_layers": self.count("num_hidden_layers", most=MOST_LAYERS),
            "hidden_size": hidden,
            "num_heads": heads,
            "num_kv_heads": self.count("num_key_value_heads", heads),
            "head_dim": self.count("head_dim", hidden // heads),
            "ffn_size": self.count("intermediate_size"),
            "rms_norm_eps": self.number("rms_norm_eps", positive=False),
            "max_position": self.count("max_position_embeddings", 4096),
            "init_std": self.number("initializer_range", 0.02, positive=False),
        }

    def plain(self) -> dict[str, Any]:
        """Return `shape`, for families with SwiGLU and unscaled rotary embeddings and no further features.

        Raises:
          CheckpointError: as `shape`, or the folder needs a further feature.
        """
        rotary = self.rope()
        self.refuse(
            rope_parameters=rotary.get("rope_type") != "default",
            use_sliding_window=self.get("use_sliding_window", False),
            hidden_act=self.get("hidden_act", "silu") != "silu",
        )
        tied = self.flag("tie_word_embeddings", False)
        return {**self.shape(), "rope_theta": rotary.number("rope_theta"), "tie_embeddings": tied}


def _shown(value: Any) -> str:
    """Return the text of any value for a message."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # nested too deeply, or a number of too many digits
        return f"a {type(value).__name__}"
    return text if len(text) <= 200 else f"{text[:200]}..."


@dataclasses.dataclass(frozen=True)
class Multimodal:
    """An architecture of which a family is the text part; the other parts are left where they are."""

    architecture: str
    prefix: str
    """Prefix of the names of the text part's tensors."""
    module: str
    """The name `transformers` gives to the decoder of the text part."""
    others: tuple[str, ...]
    """Prefixes of the rest."""
    defaults: Mapping[str, Any]
    """Default values for settings that `text_config` may leave out."""

    def text(self, raw: Folder) -> Folder:
        """Return the part of `config.json` that describes the text model."""
        outside = {k: raw.fields[k] for k in ("tie_word_embeddings", "quantization_config") if k in raw.fields}
        return Folder(raw.path, {**self.defaults, **outside, **raw.table("text_config").fields})

    def name(self, name: str) -> str | None:
        """Return the name of a tensor in a text-only folder; None if the tensor belongs to another part."""
        return None if name.startswith(self.others) else name.removeprefix(self.prefix)


def written_shape(cfg: Any) -> dict[str, Any]:
    """Return the fields of `config.json` for a shape: the inverse of `Folder.shape`."""
    return {
        "vocab_size": cfg.vocab_size,
        "num_hidden_layers": cfg.num_layers,
        "hidden_size": cfg.hidden_size,
        "num_attention_heads": cfg.num_heads,
        "num_key_value_heads": cfg.num_kv_heads,
        "head_dim": cfg.head_dim,
        "intermediate_size": cfg.ffn_size,
        "rms_norm_eps": cfg.rms_norm_eps,
        "tie_word_embeddings": cfg.tie_embeddings,
        "max_position_embeddings": cfg.max_position,
        "initializer_range": cfg.init_std,
        "attention_dropout": 0.0,
    }


def written_plain(cfg: Any) -> dict[str, Any]:
    """Return the fields of `config.json` for a plain decoder: the inverse of `Folder.plain`."""
    return written_shape(cfg) | {
        "rope_theta": cfg.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": cfg.rope_theta},
        "hidden_act": "silu",
        "use_sliding_window": False,
    }


def same(w: np.ndarray) -> np.ndarray:
    """Return a tensor unchanged."""
    return w


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor of a folder and the parameter of one layer that it becomes, or a part of it."""

    ours: str
    """Name in the layer."""
    theirs: str
    """Name after `model.layers.N.` in the folder."""
    to_ours: Transform = same
    """Conversion from the folder's tensor to the layer's parameter. Transpose and reshape only: a view of a host array
    stays a view."""
    to_theirs: Transform = same
    """Conversion from the layer's parameter to the folder's tensor. Transpose and reshape only: a view of a host array
    stays a view."""
    expert: int | None = None
    """Index of the tensor's slice along the parameter's first axis, if that axis counts experts."""


def turned(w: np.ndarray) -> np.ndarray:
    """Return a matrix transposed."""
    return w.T


def transposed(ours: str, theirs: str, expert: int | None = None) -> Tensor:
    """Return the tensor of a linear map that is `[out, in]` in the folder and `[in, out]` here."""
    return Tensor(ours, f"{theirs}.weight", turned, turned, expert)


def attention_tensors(cfg: Any, *, bias: bool = False, head_norms: bool = False) -> list[Tensor]:
    """Return the tensors of `Layers.declare_attention`, with the names that all families here use."""
    D, H, K, C = cfg.hidden_size, cfg.num_heads, cfg.num_kv_heads, cfg.head_dim

    def into_heads(name: str, n: int) -> list[Tensor]:
        theirs = f"self_attn.{name}_proj"
        found = [
            Tensor(name, f"{theirs}.weight", lambda w: w.T.reshape(D, n, C), lambda w: w.reshape(D, n * C).T),
        ]
        if bias:
            found.append(
                Tensor(f"{name}_bias", f"{theirs}.bias", lambda w: w.reshape(n, C), lambda w: w.reshape(n * C))
            )
        return found

    return [
        Tensor("attn_norm", "input_layernorm.weight"),
        *into_heads("q", H),
        *into_heads("k", K),
        *into_heads("v", K),
        Tensor(
            "o",
            "self_attn.o_proj.weight",
            lambda w: w.T.reshape(H, C, D),
            lambda w: w.reshape(H * C, D).T,
        ),
        *([Tensor(f"{n}_norm", f"self_attn.{n}_norm.weight") for n in ("q", "k")] if head_norms else []),
    ]


def ffn_tensors(norm: str = "post_attention_layernorm") -> list[Tensor]:
    """Return the tensors of `Layers.declare_ffn`."""
    return [
        Tensor("ffn_norm", f"{norm}.weight"),
        *(transposed(name, f"mlp.{name}_proj") for name in ("gate", "up", "down")),
    ]
