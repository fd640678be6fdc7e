"""The decoder: one Flax NNX module for sampling and for training, common to all families.

Parameters of all layers are stacked on a leading axis and run under `lax.scan`, so compile time does not grow with
depth. The module never sees a mask: `attend` (see `attention.py`) decides who sees whom, and may carry a KV cache
through the layers. The family defines what a layer computes (`families/`).

Shape letters: B rows, T tokens, D hidden, H query heads, K key/value heads, C head size, F feed-forward, L layers,
V vocabulary, E experts, k experts of a token.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, Self

import jax
import jax.numpy as jnp
from flax import nnx

from rolljax.errors import ConfigError
from rolljax.model.attention import Attend
from rolljax.model.axes import GATHERED, constrain, is_gathered
from rolljax.model.folder import Folder, Multimodal, Tensor
from rolljax.model.gather import embedded
from rolljax.model.implementations import Implementation
from rolljax.model.layers import ExpertRouting, Layers, param, rms_norm
from rolljax.model.lora import Adapted, Lora, int8_axes, int8_maps, merged
from rolljax.model.moe import Routing
from rolljax.model.prefixes import Prefixes

Dtype = Literal["float32", "bfloat16"]
Remat = Literal["none", "full", "dots", "attention"]
Params = Any
"""Nested dict of arrays: the pure form of a module's parameters, as optimizers, checkpoints and meshes use it."""


@dataclasses.dataclass(frozen=True)
class DecoderConfig(abc.ABC):
    """Shape of a decoder: the sizes common to all families. Sizes follow `transformers`' meaning; the default is a
    model for two CPU cores.

    A family is one file in `families/`: a subclass with the rest of its shape, its `Layers`, and its names in Hugging
    Face folders.
    """

    vocab_size: int = 264
    """Tokens of the vocabulary."""
    num_layers: int = 2
    """Number of decoder blocks."""
    hidden_size: int = 64
    """Width of the residual stream."""
    num_heads: int = 4
    """Number of query heads."""
    num_kv_heads: int = 2
    """Key and value heads, a divisor of `num_heads`."""
    head_dim: int = 16
    """Width of a head."""
    ffn_size: int = 192
    """Width of the feed-forward part."""
    rope_theta: float = 10_000.0
    """Base of the rotary embedding's wavelengths."""
    rms_norm_eps: float = 1e-6
    """Added to mean squares in norms."""
    tie_embeddings: bool = True
    """The output matrix is the embedding."""
    max_position: int = 4096
    """Maximum number of tokens of context."""
    init_std: float = 0.02
    """Standard deviation of random weights. About `hidden_size ** -0.5` makes small models learn fastest."""

    architecture: ClassVar[str]
    """The model class that `config.json` names."""
    model_type: ClassVar[str]
    """`model_type` of `config.json`."""
    multimodal: ClassVar[Multimodal | None] = None
    """An architecture whose folders are read for their text part."""

    def __post_init__(self) -> None:
        name = type(self).__name__
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"does not divide num_heads={self.num_heads}",
                setting=f"{name}.num_kv_heads",
                value=self.num_kv_heads,
                remedy="every key/value head serves an equal number of query heads",
            )
        if self.head_dim % 2:
            raise ConfigError("must be even (rotary embedding)", setting=f"{name}.head_dim", value=self.head_dim)

    @property
    def active_ffn_size(self) -> int:
        """Width of the feed-forward that one token passes through."""
        return self.ffn_size

    @property
    def routing(self) -> Routing | None:
        """The routing of tokens to experts; None: the feed-forward is dense."""
        return None

    @property
    def window(self) -> int | None:
        """Number of tokens to which layers with a sliding window attend; None if no layer has a window."""
        return None

    @property
    def final_softcap(self) -> float | None:
        """Logits z become `cap * tanh(z / cap)`; None: they stay."""
        return None

    @abc.abstractmethod
    def layers(self, rngs: nnx.Rngs) -> Layers:
        """Return the layers, with random weights."""

    def embedded(self, x_BTD: jax.Array) -> jax.Array:
        """Scale rows of the embedding as the first layer expects them. Default: unchanged."""
        return x_BTD

    def final_norm(self, x_BTD: jax.Array, scale: jax.Array) -> jax.Array:
        """Apply the norm after the last layer."""
        return rms_norm(x_BTD, scale, self.rms_norm_eps)

    norm_std: ClassVar[float | None] = None
    """Standard deviation of fresh norm scales (None: all ones)."""

    # ---- Hugging Face folders: see `hf.py` --------------------------------------------------------------------------

    @classmethod
    @abc.abstractmethod
    def from_folder(cls, raw: Folder) -> Self:
        """Return the shape that `config.json` describes.

        Raises:
          CheckpointError: a field is missing, or asks for something this family does not compute.
        """

    @abc.abstractmethod
    def to_folder(self) -> Mapping[str, Any]:
        """Return the family's part of `config.json`."""

    @abc.abstractmethod
    def layer_tensors(self) -> Iterator[Tensor]:
        """Yield the tensors of one layer."""


@dataclasses.dataclass(frozen=True)
class Apart:
    """Parameters of each layer in arrays of their own, pure dicts without a leading L."""

    layers: Sequence[Params]


class Out(NamedTuple):
    """The outputs of a decoder."""

    hidden: jax.Array
    """`[B, T, D]`, after the last norm."""
    cache: Any
    """The KV cache as it left the last layer."""
    mixtures: ExpertRouting | None
    """Routing of every layer, with a leading L; None without experts."""


class Decoder(nnx.Module):
    """Token ids in, hidden states out; `logits` turns hidden states into next-token logits."""

    def __init__(
        self, cfg: DecoderConfig, dtype: Dtype, remat: Remat, prefixes: Prefixes | None = None, *, rngs: nnx.Rngs
    ) -> None:
        self.cfg, self.dtype, self.remat, self.prefixes = cfg, dtype, remat, prefixes
        shape = (cfg.vocab_size, cfg.hidden_size)
        self.embed = param(rngs.params(), shape, ("vocab", "embed"), cfg.init_std)
        self.layers = cfg.layers(rngs)
        self.norm = param(rngs.params(), (cfg.hidden_size,), ("norm",), cfg.norm_std)
        if not cfg.tie_embeddings:
            self.head = param(rngs.params(), shape, ("vocab", "embed"), cfg.init_std)
        self.apart: Apart | None = None

    def __call__(
        self,
        tokens_BT: jax.Array,
        positions_BT: jax.Array,
        attend: Attend,
        cache: Any = None,
        *,
        expert_ids_LBTk: jax.Array | None = None,
        unroll: bool = False,
        in_place: bool = False,
    ) -> Out:
        """Run all layers.

        Args:
          expert_ids_LBTk: experts to take instead of those the routers choose, -1 where they do choose (router replay).
          unroll: write the layers out instead of scanning over them; `attend` then gets a plain int as its layer.
            Layers that lie apart are always written out.
          in_place: give layers their experts in those of all layers (`Layers.indexed`), for programs without gradients:
            a kernel reads them where they lie, instead of a copy for each layer and step.
        """
        cfg = self.cfg
        unroll = unroll or self.apart is not None
        names = self.layers.indexed if in_place and not unroll else ()
        graph, *states = nnx.split(self.layers, lambda path, _: path[0] in names, ...)
        unsliced, stacked = states
        x = constrain(cfg.embedded(self._rows(tokens_BT)), "batch", "length", "hidden")
        if unroll:
            each = []
            for i in range(cfg.num_layers):
                layer = nnx.merge(graph, unsliced, self._of_layer(i, stacked))
                expert_ids = None if expert_ids_LBTk is None else expert_ids_LBTk[i]
                x, cache, mixture = layer.layer(x, positions_BT, attend, cache, i, expert_ids)
                each.append(mixture)
            return Out(self._normed(x), cache, _stacked(each))

        def body(carry: tuple[jax.Array, Any], xs: Any) -> tuple[tuple[jax.Array, Any], ExpertRouting | None]:
            x, cache = carry
            params, index, expert_ids = xs
            x, cache, mixture = nnx.merge(graph, unsliced, params).layer(
                x, positions_BT, attend, cache, index, expert_ids
            )
            return (constrain(x, "batch", "length", "hidden"), cache), mixture

        if self.remat != "none" or is_gathered():
            body = jax.checkpoint(body, prevent_cse=False, policy=_POLICIES[self.remat])
        (x, cache), mixtures = jax.lax.scan(body, (x, cache), (stacked, jnp.arange(cfg.num_layers), expert_ids_LBTk))
        return Out(self._normed(x), cache, mixtures)

    def _of_layer(self, i: int, stacked: nnx.State) -> nnx.State:
        """Return the parameters of one layer. stacked: those of all layers; of the first layer if they lie apart."""
        if self.apart is None:
            return jax.tree.map(lambda x: x[i], stacked)
        nnx.replace_by_pure_dict(stacked, self.apart.layers[i])
        return stacked

    def _rows(self, tokens_BT: jax.Array) -> jax.Array:
        if self.prefixes is None:
            return embedded(self.embed[...], tokens_BT, self.dtype)
        vocab = self.cfg.vocab_size
        rows = embedded(self.embed[...], jnp.minimum(tokens_BT, vocab - 1), self.dtype)
        latent = jnp.asarray(self.prefixes.rows, self.dtype)[jnp.maximum(tokens_BT - vocab, 0)]
        return jnp.where((tokens_BT >= vocab)[..., None], latent, rows)

    def _normed(self, x_BTD: jax.Array) -> jax.Array:
        return self.cfg.final_norm(x_BTD, self.norm[...])

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Return the next-token logits `[..., V]` in float32 of hidden states `[..., D]`."""
        head = self.head_matrix
        logits = jnp.einsum("...d,vd->...v", hidden, head.astype(hidden.dtype), preferred_element_type=jnp.float32)
        return softcapped(logits, self.cfg.final_softcap)

    @property
    def head_matrix(self) -> jax.Array:
        """The matrix from hidden states to logits, `[V, D]`: the embedding itself if they are tied."""
        return (self.embed if self.cfg.tie_embeddings else self.head)[...]


_POLICIES: Mapping[str, Any] = {
    "none": jax.checkpoint_policies.save_anything_except_these_names(GATHERED),
    "full": None,
    "dots": jax.checkpoint_policies.checkpoint_dots_with_no_batch_dims,
    "attention": jax.checkpoint_policies.save_only_these_names("mixed"),
}


def _stacked(trees: list[Any]) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def softcapped(logits: jax.Array, cap: float | None) -> jax.Array:
    """Return the logits squashed into `(-cap, cap)`; unchanged if `cap` is None."""
    return logits if cap is None else cap * jnp.tanh(logits / cap)


@dataclasses.dataclass(frozen=True)
class Model:
    """A decoder as pure functions over a parameter dict."""

    cfg: DecoderConfig
    dtype: Dtype = "float32"
    """Compute type; parameters are kept in float32 and cast where they are used."""
    remat: Remat = "dots"
    """Recomputation in the backward pass. `none`: nothing; `full`: everything inside a layer; `dots`: all but the
    matmul outputs; `attention`: all but the attention output."""
    attention: Implementation = "auto"
    """Implementation of attention in packed rows (`implementations.Implementation`)."""
    lora: Lora | None = None
    """Low-rank adapters. With adapters, `init`, `abstract` and `axes` describe the adapters alone, and `bind` takes the
    adapters together with the frozen base weights (`full_params`)."""
    prefixes: Prefixes | None = None
    """Vectors of the token ids from `vocab_size` on, which only prompts contain; None: there are none."""
    int8_sampler: bool = False
    """Whether the sampler's copy of the weights has int8 linear maps (`sampled`)."""

    def init(self, seed: int) -> Params:
        """Return random parameters, a nested dict of float32 arrays."""
        if self.lora:
            return self.lora.init(seed, self.plain.axes(), self.plain.abstract())
        return nnx.to_pure_dict(nnx.state(self._module(seed), nnx.Param))

    def abstract(self) -> Params:
        """Return the shapes and dtypes of the parameters without allocating them."""
        if self.lora:
            return jax.eval_shape(lambda: self.init(0))
        return nnx.to_pure_dict(self._empty()[1])

    def axes(self) -> Params:
        """Return the logical axis names of every parameter, in the tree of the parameters."""
        if self.lora:
            return self.lora.axes(self.plain.axes())
        names = jax.tree.map(
            lambda v: v.replace(v.get_metadata()["axes"]),
            self._empty()[1],
            is_leaf=lambda v: isinstance(v, nnx.Variable),
        )
        return nnx.to_pure_dict(names)

    def bind(self, params: Params) -> Decoder:
        """Return the module with these parameters, for use inside a jitted function."""
        beside: dict[str, jax.Array] = {}
        if isinstance(params, Adapted):
            params, beside = params.parts()
        graph, state = self._empty()
        apart = Apart(params["layers"]) if isinstance(params["layers"], list) else None
        layers, known = apart.layers[0] if apart else params["layers"], state["layers"]
        beside |= {name: x for name, x in layers.items() if name not in known}
        own = {name: x for name, x in layers.items() if name in known}
        nnx.replace_by_pure_dict(state, {**params, "layers": own})
        decoder = nnx.merge(graph, state)
        decoder.apart = apart
        decoder.layers.extend(beside, self.lora.factor if self.lora else 0.0)
        return decoder

    @property
    def num_ids(self) -> int:
        """The number of token ids that a prompt may contain."""
        return self.cfg.vocab_size + (self.prefixes.num_ids if self.prefixes else 0)

    def num_params(self) -> int:
        """Return the number of the decoder's parameters, without adapters."""
        return sum(x.size for x in jax.tree.leaves(self.plain.abstract()))

    def computed(self, params: Params) -> Params:
        """Cast the matrices of a plain decoder to the compute dtype. Norm scales stay float32, int8 stays int8.

        Matrices are cast where they are used, so casting them here changes nothing.
        """

        def one(names: tuple[str, ...], value: jax.Array) -> jax.Array:
            is_matrix = sum(name != "layers" for name in names) > 1
            return value.astype(self.dtype) if is_matrix and value.dtype != jnp.int8 else value

        axes = self.plain.axes()
        axes = int8_axes(axes) if params["layers"].keys() - axes["layers"].keys() else axes
        return jax.tree.map(one, axes, params, is_leaf=lambda x: isinstance(x, tuple))

    def sampled(self, computed: Params) -> Params:
        """Return a plain decoder's weights (`computed`) as the sampler computes with them; see `int8_sampler`."""
        return int8_maps(self.plain.axes(), computed) if self.int8_sampler else computed

    def sampled_axes(self) -> Params:
        """Return the logical axis names of `sampled`."""
        axes = self.plain.axes()
        return int8_axes(axes) if self.int8_sampler else axes

    def apart(self, params: Params) -> Params:
        """Put each layer's parameters of a plain decoder into arrays of their own; `bind` takes both forms.

        `layers` becomes a list of a dict for each layer, without the leading L.

        Programs then write the layers out, and read the weights where they lie. Of stacked weights, XLA for GPUs and
        CPUs copies each layer's in every step.
        """
        layers = params["layers"]
        one = functools.partial(jax.lax.index_in_dim, axis=0, keepdims=False)
        each = [jax.tree.map(lambda x, i=i: one(x, i), layers) for i in range(self.cfg.num_layers)]
        return {**params, "layers": each}

    def apart_axes(self) -> Params:
        """Return the logical axis names of `sampled` parameters in the form that `apart` returns."""
        axes = self.sampled_axes()
        layer = jax.tree.map(lambda names: names[1:], axes["layers"], is_leaf=lambda x: isinstance(x, tuple))
        return {**axes, "layers": [layer] * self.cfg.num_layers}

    # ---- adapters ---------------------------------------------------------------------------------------------------

    @property
    def plain(self) -> Model:
        """The decoder without adapters."""
        return dataclasses.replace(self, lora=None)

    def base(self, params: Params) -> Params:
        """Return the frozen base weights for the adapters, made from a plain decoder's parameters."""
        assert self.lora
        return self.computed(self.lora.base(self.plain.axes(), params))

    def full_params(self, params: Params, base: Params | None) -> Params:
        """Combine the trained parameters with the frozen base (only with adapters) into the parameters that `bind`
        takes."""
        if self.lora is None:
            return params
        assert base is not None
        return Adapted(base, params)

    def merged(self, params: Params, dtype: Dtype = "float32") -> Params:
        """Return the parameters of the plain decoder that computes the same as `full_params`. Maps with adapters or in
        int8 become `dtype`."""
        return merged(self.lora, params, dtype) if self.lora else params

    @property
    def saved_bytes(self) -> int:
        """Estimated bytes per token that the forward pass saves for the backward pass, from the widths of the
        layers."""
        cfg = self.cfg
        mixed, heads = cfg.num_heads * cfg.head_dim, (cfg.num_heads + 2 * cfg.num_kv_heads) * cfg.head_dim
        layer = 4 * cfg.hidden_size + mixed + 2 * heads + 4 * cfg.active_ffn_size
        dots = cfg.hidden_size + mixed + heads + 2 * cfg.active_ffn_size
        of_each = {"none": layer, "dots": dots, "attention": cfg.hidden_size + mixed, "full": cfg.hidden_size}[
            self.remat
        ]
        again = 0 if self.remat == "none" else layer
        return (cfg.num_layers * of_each + again) * jnp.dtype(self.dtype).itemsize

    def _module(self, seed: int) -> Decoder:
        return Decoder(self.cfg, self.dtype, self.remat, self.prefixes, rngs=nnx.Rngs(seed))

    def _empty(self) -> tuple[nnx.GraphDef[Decoder], nnx.State]:
        """Return the structure of the module and its state of shapes; the caller may change the state."""
        graph, state = _traced(self.plain)
        return graph, jax.tree.map(lambda x: x, state)


@functools.lru_cache(maxsize=32)
def _traced(model: Model) -> tuple[nnx.GraphDef[Decoder], nnx.State]:
    """Return `Model._empty` of a plain model. Cached, because every traced program needs it."""
    return nnx.split(nnx.eval_shape(lambda: model._module(0)))
