"""Hugging Face folders in and out: config.json, safetensors with or without an index, tokenizer.

The names of a family's tensors are in the family's file (`families/`). Reading first checks all tensors and names every
missing, extra or misshaped one in a single error. It then copies one layer of one parameter at a time to the devices,
to each only its part. Writing gives a folder that `transformers` loads and that computes the same logits.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from rolljax.console.progress import ProgressBar
from rolljax.errors import CheckpointError, ConfigError
from rolljax.model import shards
from rolljax.model.decoder import DecoderConfig, Dtype, Model, Params
from rolljax.model.families import known
from rolljax.model.files import copied, inside, read_json
from rolljax.model.folder import Folder, Multimodal, Transform, folder_remedy, same
from rolljax.model.shards import DTYPES, Planned, Shards, listed
from rolljax.model.tokenizer import save_tokenizer
from rolljax.model.value import ValueModel

INDEX, WEIGHTS = shards.INDEX.format("model"), shards.WEIGHTS.format("model")
GENERATION = "generation_config.json"
EMBEDDING, HEAD, SCORE = "model.embed_tokens.weight", "lm_head.weight", "score.weight"
CLASSIFIER = "ForSequenceClassification"
"""Ending of architectures that have a head of labels instead of a vocabulary."""
MAX_MISSING = 10_000
"""Most missing tensors before the search ends."""
MAX_SHARD_BYTES = 5 * 10**9
"""Most bytes of a file of weights that is written."""


def read_config(folder: str | Path) -> DecoderConfig:
    """Return the decoder's shape from `config.json`; for a multimodal folder, the shape of its text part.

    Raises:
      CheckpointError: the file is missing, the architecture is unknown, or the family does not compute a feature.
    """
    family, raw, multimodal = _described(Path(folder))
    try:
        return family.from_folder(multimodal.text(raw) if multimodal else raw)
    except ConfigError as e:  # a shape that cannot be
        raise CheckpointError(f"{raw.path} describes no model: {e}") from e


def is_classifier(folder: str | Path) -> bool:
    """Return whether the config of a folder names a sequence classifier."""
    path = inside(Path(folder), "config.json")
    named = read_json(path, "JSON that describes a model").get("architectures") if path.is_file() else None
    return isinstance(named, list) and bool(named) and str(named[0]).endswith(CLASSIFIER)


def read_value_config(folder: str | Path) -> DecoderConfig:
    """Return the shape of the decoder in the folder of a sequence classifier with one label, the form of reward models.

    The decoder has no head, so the embedding is used in its place.

    Raises:
      CheckpointError: as `read_config`, or the model is no classifier, or has another number of labels.
    """
    family, raw, _ = _described(Path(folder), classifier=True)
    named = raw.table("id2label", {}).fields
    labels = len(named) if named else raw.count("num_labels", 2)
    if labels != 1:
        raise CheckpointError(f"{raw.path} has {labels} labels; a reward model has one")
    try:
        return dataclasses.replace(family.from_folder(raw), tie_embeddings=True)
    except ConfigError as e:  # a shape that cannot be
        raise CheckpointError(f"{raw.path} describes no model: {e}") from e


def _described(folder: Path, *, classifier: bool = False) -> tuple[type[DecoderConfig], Folder, Multimodal | None]:
    """Return the family that reads a folder, its whole `config.json`, and its multimodal wrapper if it has one.

    classifier: the folder holds a sequence classifier, whose architecture is named after the decoder's.
    """
    path = inside(folder, "config.json")
    if not path.is_file():
        no_folder = f"{folder} is not a Hugging Face model folder: it has no config.json"
        raise CheckpointError(f"{no_folder}\n  fix:   {folder_remedy(str(folder))}")
    raw = read_json(path, "JSON that describes a model")
    families = known()
    named = raw.get("architectures") or [raw.get("model_type", "nothing")]
    if not isinstance(named, list) or not isinstance(named[0], str):
        raise CheckpointError(f"{path}: architectures is not a list of names")
    found = named[0]
    if classifier:
        if not found.endswith(CLASSIFIER):
            raise CheckpointError(f"{path}: architecture {found} is no sequence classifier")
        found = found.removesuffix(CLASSIFIER).removesuffix("Text") + "ForCausalLM"
    if found not in families:
        names = sorted(name for name in families if name[0].isupper())
        raise CheckpointError(f"{path}: architecture {found} is not known; known: {', '.join(names)}")
    multimodal = families[found].multimodal
    wrapped = multimodal is not None and found == multimodal.architecture
    return families[found], Folder(str(path), raw), multimodal if wrapped else None


def decoder_module(folder: str | Path) -> str:
    """Return the name that `transformers` gives the decoder inside the model it makes of a folder."""
    multimodal = _described(Path(folder))[2]
    return multimodal.module if multimodal else "model"


def write_config(cfg: DecoderConfig, tokenizer: Any, dtype: Dtype = "float32") -> dict[str, Any]:
    """Return `config.json` for versions 4 and 5 of `transformers`."""
    return {
        "architectures": [cfg.architecture],
        "model_type": cfg.model_type,
        **cfg.to_folder(),
        **{f"{kind}_token_id": getattr(tokenizer, f"{kind}_token_id") for kind in ("bos", "eos", "pad")},
        "dtype": dtype,
    }


@dataclasses.dataclass(frozen=True)
class FolderTensor:
    """A tensor of the folder: its name, the parameter's path in our tree, and its index in that parameter."""

    name: str
    path: tuple[str, ...]
    index: tuple[int, ...]
    """Empty, the layer, or layer and expert."""
    to_ours: Transform
    to_theirs: Transform


def entries(cfg: DecoderConfig) -> Iterator[FolderTensor]:
    """Yield every tensor of the folder."""
    yield FolderTensor(EMBEDDING, ("embed",), (), same, same)
    yield FolderTensor("model.norm.weight", ("norm",), (), same, same)
    if not cfg.tie_embeddings:
        yield FolderTensor(HEAD, ("head",), (), same, same)
    for tensor in cfg.layer_tensors():
        for i in range(cfg.num_layers):
            index = (i,) if tensor.expert is None else (i, tensor.expert)
            name = f"model.layers.{i}.{tensor.theirs}"
            yield FolderTensor(name, ("layers", tensor.ours), index, tensor.to_ours, tensor.to_theirs)


# ---- reading --------------------------------------------------------------------------------------------------------


def load(
    folder: str | Path, model: Model, shardings: Params, *, computed: bool = False, beside: tuple[str, ...] = ()
) -> Params:
    """Load the parameters of a folder as device arrays in their shardings: the plain decoder's, also if the model has
    adapters.

    The host holds at most one layer of one parameter (or an embedding) for one device at a time, in the dtype of the
    file; device arrays are filled in place. In a cluster each process reads only what its devices need.

    Args:
      computed: return matrices in the model's compute dtype, as `Model.computed` does; otherwise all is float32.
      beside: names of more tensors that the files may hold; these tensors are not read.

    Raises:
      CheckpointError: files are unreadable, or tensors are missing, unknown, not floats, or of another shape than
        `config.json` says. The message names all of them.
    """
    model, like = model.plain, model.plain.abstract()
    stored, expected = _audited(folder, model, like, beside)
    head = stored.tensors.get(HEAD)
    if model.cfg.tie_embeddings and head and not stored.equal(HEAD, EMBEDDING):
        raise CheckpointError(
            f"{stored.folder / head.file}: {HEAD} differs from {EMBEDDING}, although config.json says "
            "tie_word_embeddings"
        )
    if computed:
        like = jax.eval_shape(model.computed, like)
    total = sum(stored.tensors[entry.name].nbytes for entry in expected)
    params: dict[str, Any] = {}
    with ProgressBar(f"reading {stored.folder.name}", total, in_bytes=True, shown=jax.process_index() == 0) as bar:
        for path in dict.fromkeys(entry.path for entry in expected):
            of_path = [entry for entry in expected if entry.path == path]
            node = params
            for key in path[:-1]:
                node = node.setdefault(key, {})
            node[path[-1]] = _parameter(stored, of_path, _leaf(like, path), _leaf(shardings, path), bar.advance)
    return params


def load_value(folder: str | Path, model: ValueModel, shardings: Params) -> Params:
    """Load the parameters of a sequence classifier with one label, with matrices in the model's compute dtype.

    `shardings` has the tree of `model.abstract()`. The head has no bias.

    Raises:
      CheckpointError: as `load`.
    """
    trunk = load(folder, model.trunk, shardings["trunk"], computed=True, beside=(SCORE,))
    stored = Shards(folder)
    head, width = stored.tensors.get(SCORE), model.trunk.cfg.hidden_size
    if head is None or head.shape != (1, width) or head.dtype not in DTYPES:
        there = "nothing" if head is None else f"{list(head.shape)} {head.dtype}"
        raise CheckpointError(f"{folder}: {SCORE} is {there}, not [1, {width}]")
    w = np.asarray(stored.copy(stored.view(SCORE), SCORE)[0], np.float32)
    value = {"w": w, "b": np.zeros((), np.float32)}
    return {"trunk": trunk, "value": jax.device_put(value, shardings["value"])}


def check(folder: str | Path, model: Model) -> tuple[int, int]:
    """Check from the files' headers alone that `load` will find every tensor; return the number of tensors and bytes.

    Raises:
      CheckpointError: as `load`.
    """
    stored, expected = _audited(folder, model.plain, model.plain.abstract())
    return len(expected), sum(stored.tensors[entry.name].nbytes for entry in expected)


def _audited(
    folder: str | Path, model: Model, like: Params, beside: tuple[str, ...] = ()
) -> tuple[Shards, list[FolderTensor]]:
    """Return the folder's tensors after checking that they are the model's, and the list of the model's tensors."""
    stored = Shards(folder)
    if multimodal := _described(stored.folder, classifier=SCORE in beside)[2]:
        names = {multimodal.name(theirs): theirs for theirs in stored.tensors}
        stored.tensors = {name: stored.tensors[theirs] for name, theirs in names.items() if name is not None}
    left, expected, wrong = dict(stored.tensors), [], []
    for entry in entries(model.cfg):
        have = left.pop(entry.name, None)
        if have is None:
            wrong.append(f"missing: {entry.name}")
            if len(wrong) > MAX_MISSING:  # the folder is of another model, despite config.json
                break
            continue
        expected.append(entry)
        shape = _leaf(like, entry.path).shape[len(entry.index) :]
        want = entry.to_theirs(np.broadcast_to(np.int8(0), shape)).shape
        if have.shape != want:
            wrong.append(f"shape: {entry.name} is {list(have.shape)}, config.json says {list(want)}")
        if have.dtype not in DTYPES:
            wrong.append(f"dtype: {entry.name} is {have.dtype}, not one of {', '.join(DTYPES)}")
    if model.cfg.tie_embeddings:  # some folders hold a tied head as well
        left.pop(HEAD, None)
    for name in beside:
        left.pop(name, None)
    wrong += [f"unknown: {name}" for name in left]
    if wrong:
        raise CheckpointError(f"{stored.folder} does not hold the model its config.json describes:\n  {listed(wrong)}")
    return stored, expected


def _parameter(
    stored: Shards,
    of_path: list[FolderTensor],
    like: jax.ShapeDtypeStruct,
    sharding: Sharding,
    advance: Callable[[int], None],
) -> jax.Array:
    """Load one parameter, layer by layer."""
    is_stacked = bool(of_path[0].index)
    value = jnp.zeros(like.shape, like.dtype, device=sharding) if is_stacked else None
    for layer, group in itertools.groupby(sorted(of_path, key=lambda e: e.index), key=lambda e: e.index[:1]):
        here = list(group)
        order, part = _layer_part(stored, here, like.shape[is_stacked:], sharding, is_stacked)
        value = _writer(order, like.dtype, sharding)(value, part, *layer)
        jax.block_until_ready(value)  # or the host would run ahead, and hold what devices have not taken yet
        advance(sum(stored.tensors[entry.name].nbytes for entry in here))
    assert value is not None
    return value


def _layer_part(
    stored: Shards, here: list[FolderTensor], shape: tuple[int, ...], sharding: Sharding, is_stacked: bool
) -> tuple[tuple[int, ...], jax.Array]:
    """Return a layer's part of a parameter on the devices, in the file's dtype and with the file's order of axes.

    In the file's order the host copies full rows, which is fast; the devices then transpose the axes.

    Returns:
      `(order, part)`: axis i of the part is axis `order[i]` of the parameter.
    """
    dtypes = {DTYPES[stored.tensors[entry.name].dtype] for entry in here}
    dtype = dtypes.pop() if len(dtypes) == 1 else np.dtype(np.float32)
    strides = here[0].to_ours(stored.view(here[0].name)).strides
    lead = len(shape) - len(strides)  # 1 if the parameter's first axis counts experts, each a tensor of its own
    turned = tuple(int(i) for i in np.argsort([-s for s in strides], kind="stable"))
    order = (*range(lead), *(lead + i for i in turned))

    def one(entry: FolderTensor, index: tuple[slice, ...]) -> np.ndarray:
        view = entry.to_ours(stored.view(entry.name)).transpose(turned)[index]
        return stored.copy(view, entry.name).astype(dtype, copy=False)

    def read(index: tuple[slice, ...]) -> np.ndarray:
        return np.stack([one(entry, index[1:]) for entry in here[index[0]]]) if lead else one(here[0], index)

    if isinstance(sharding, NamedSharding):
        full_spec = (*sharding.spec, *[None] * (is_stacked + len(shape) - len(sharding.spec)))
        sharding = NamedSharding(sharding.mesh, PartitionSpec(*(full_spec[is_stacked + i] for i in order)))
    return order, _on_devices(tuple(shape[i] for i in order), sharding, read)


def _on_devices(
    shape: tuple[int, ...], sharding: Sharding, read: Callable[[tuple[slice, ...]], np.ndarray]
) -> jax.Array:
    """Return an array whose parts are read one after the other, each once."""
    wanted = {
        device: tuple(slice(*s.indices(size)) for s, size in zip(index, shape, strict=True))
        for device, index in sharding.addressable_devices_indices_map(shape).items()
        if index is not None
    }
    parts = []
    bounds = lambda index: [(s.start, s.stop) for s in index]  # noqa: E731
    for _, alike in itertools.groupby(sorted(wanted, key=lambda d: bounds(wanted[d])), lambda d: bounds(wanted[d])):
        devices = list(alike)
        value = read(wanted[devices[0]])
        parts += [jax.block_until_ready(jax.device_put(value, device)) for device in devices]
    return jax.make_array_from_single_device_arrays(shape, sharding, parts)


@functools.lru_cache(maxsize=64)
def _writer(order: tuple[int, ...], dtype: np.dtype, sharding: Sharding) -> Callable[..., jax.Array]:
    """Return a jitted function that writes a layer in place: `(parameter, part, layer)`; `(None, part)` makes the whole
    parameter."""
    back = tuple(order.index(i) for i in range(len(order)))

    def write(value: jax.Array | None, part: jax.Array, layer: int | None = None) -> jax.Array:
        ours = jnp.copy(part.transpose(back)).astype(dtype)
        return ours if value is None else jax.lax.dynamic_update_index_in_dim(value, ours, layer, 0)

    return jax.jit(write, donate_argnums=0, out_shardings=sharding)


# ---- writing --------------------------------------------------------------------------------------------------------


def save(
    folder: str | Path,
    model: Model,
    params: Params,
    tokenizer: Any,
    *,
    dtype: Dtype = "float32",
    source: str | Path | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write config, weights, tokenizer with chat template and generation config into a new or empty folder.

    All processes of a cluster call it, the first one writes. On the host there is one file's content at a time.

    Args:
      params: of the plain decoder (`Model.merged`).
      dtype: of the weights that are written.
      source: the folder the model came from, whose tokenizer and generation config go along as they are.
      max_shard_bytes: of a file of weights; a tensor that is larger gets a file of its own.
    """
    folder, writes = Path(folder), jax.process_index() == 0
    planned = [_planned(entry, _leaf(params, entry.path), dtype) for entry in _by_layer(model.cfg)]
    if writes:
        folder.mkdir(parents=True, exist_ok=True)
        save_tokenizer(folder, tokenizer, source)
        _write_json(folder / "config.json", write_config(model.cfg, tokenizer, dtype))
        if source is None or not copied(Path(source), GENERATION, folder):
            ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
            _write_json(folder / GENERATION, {**ids, "do_sample": True, "temperature": 1.0})
    total = sum(tensor.nbytes for tensor in planned)
    with ProgressBar(f"writing {folder.name}", total, in_bytes=True, shown=writes) as bar:
        for done in shards.write(folder, planned, max_shard_bytes, writes=writes):
            bar.advance(done)


def _by_layer(cfg: DecoderConfig) -> list[FolderTensor]:
    return sorted(entries(cfg), key=lambda entry: entry.index)


def _planned(entry: FolderTensor, param: jax.Array, dtype: Dtype) -> Planned:
    nbytes = math.prod(param.shape[len(entry.index) :]) * jnp.dtype(dtype).itemsize
    unsharded = None
    if not param.is_fully_addressable:  # then it lies on a mesh of several processes
        assert isinstance(param.sharding, NamedSharding)
        unsharded = NamedSharding(param.sharding.mesh, PartitionSpec())
    return Planned(
        entry.name, nbytes, lambda: np.asarray(_taker(entry.to_theirs, dtype, unsharded)(param, *entry.index))
    )


@functools.lru_cache(maxsize=64)
def _taker(to_theirs: Transform, dtype: Dtype, unsharded: Sharding | None) -> Callable[..., jax.Array]:
    """Return a jitted function from `(parameter, layer, expert)` to a tensor of the folder; `unsharded` replicates it
    on every device."""

    def take(value: jax.Array, *index: int) -> jax.Array:
        for i in index:
            value = jax.lax.dynamic_index_in_dim(value, i, keepdims=False)
        return to_theirs(value.astype(dtype))

    return jax.jit(take, out_shardings=unsharded)


def _write_json(path: Path, fields: dict[str, Any]) -> None:
    path.write_text(json.dumps(fields, indent=2) + "\n")


def _leaf(tree: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree
