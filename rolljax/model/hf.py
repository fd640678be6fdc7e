"""Hugging Face folders in and out: config.json, safetensors with or without an index, tokenizer.

What the tensors of a family are called stands in its file (`families/`). Reading names every missing, extra or
misshaped tensor in one error before anything is used. Writing gives a folder that `transformers` loads and that
computes the same logits.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import ml_dtypes  # noqa: F401  # teaches NumPy bfloat16, which safetensors needs to read such folders
import numpy as np

from rolljax.errors import CheckpointError
from rolljax.model.decoder import DecoderConfig, Model, Params
from rolljax.model.families import known
from rolljax.model.folder import Folder, Transform, same

INDEX, WEIGHTS = "model.safetensors.index.json", "model.safetensors"


def read_config(folder: str | Path) -> DecoderConfig:
    """The decoder's shape from `config.json`.

    Raises:
      CheckpointError: no such file, an unknown architecture, or a feature its family does not compute.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{folder} is not a Hugging Face model folder: it has no config.json")
    try:
        raw = json.loads(path.read_text())
    except json.JSONDecodeError as e:
        raise CheckpointError(f"{path} is not JSON: {e}") from e
    families = known()
    found = (raw.get("architectures") or [raw.get("model_type", "nothing")])[0]
    if found not in families:
        names = ", ".join(sorted({c.architecture for c in families.values()}))
        raise CheckpointError(f"{path}: architecture {found} is not known; known: {names}")
    return families[found].from_folder(Folder(str(path), raw))


def write_config(cfg: DecoderConfig, eos_token_id: int | None, pad_token_id: int | None) -> dict[str, Any]:
    """`config.json` for `transformers`, as it reads in versions 4 and 5."""
    return {
        "architectures": [cfg.architecture],
        "model_type": cfg.model_type,
        **cfg.to_folder(),
        "bos_token_id": None,
        "eos_token_id": eos_token_id,
        "pad_token_id": pad_token_id,
        "dtype": "float32",
    }


@dataclasses.dataclass(frozen=True)
class Entry:
    """A tensor of the folder: its name, the parameter's path in our tree, and where in that parameter it stands."""

    name: str
    path: tuple[str, ...]
    at: tuple[int, ...]
    to_ours: Transform
    to_theirs: Transform


def entries(cfg: DecoderConfig) -> Iterator[Entry]:
    """Every tensor of the folder."""
    yield Entry("model.embed_tokens.weight", ("embed",), (), same, same)
    yield Entry("model.norm.weight", ("norm",), (), same, same)
    if not cfg.tie_embeddings:
        yield Entry("lm_head.weight", ("head",), (), same, same)
    for tensor in cfg.layer_tensors():
        for i in range(cfg.num_layers):
            at = (i,) if tensor.expert is None else (i, tensor.expert)
            name = f"model.layers.{i}.{tensor.theirs}"
            yield Entry(name, ("layers", tensor.ours), at, tensor.to_ours, tensor.to_theirs)


def load(folder: str | Path, model: Model, shardings: Params) -> Params:
    """Parameters of a folder as float32 device arrays in their shardings, one parameter at a time.

    Raises:
      CheckpointError: names every tensor that is missing, unknown, or of another shape than `config.json` says.
    """
    folder = Path(folder)
    where = _weight_files(folder)
    expected = {entry.name: entry for entry in entries(model.cfg)}
    abstract = model.abstract()
    wrong = [f"missing: {name}" for name in expected if name not in where]
    ignored = {"lm_head.weight"} if model.cfg.tie_embeddings else set()
    wrong += [f"unknown: {name}" for name in where if name not in expected and name not in ignored]
    with _Shards(folder) as shards:
        for name in (n for n in expected if n in where):
            entry = expected[name]
            shape = _at(abstract, entry.path).shape[len(entry.at) :]
            want = entry.to_theirs(np.empty(shape, np.int8)).shape
            have = shards.shape(where[name], name)
            if have != want:
                wrong.append(f"shape: {name} is {list(have)}, config.json says {list(want)}")
        if wrong:
            more = f"\n  ... and {len(wrong) - 20} more" if len(wrong) > 20 else ""
            raise CheckpointError(
                f"{folder} does not hold the model its config.json describes:\n  " + "\n  ".join(wrong[:20]) + more
            )
        params: dict[str, Any] = {}
        for path in dict.fromkeys(entry.path for entry in expected.values()):
            value = np.empty(_at(abstract, path).shape, np.float32)
            for entry in (e for e in expected.values() if e.path == path):
                value[entry.at] = entry.to_ours(shards.read(where[entry.name], entry.name).astype(np.float32))
            node = params
            for key in path[:-1]:
                node = node.setdefault(key, {})
            node[path[-1]] = jax.device_put(value, _at(shardings, path))
    return params


def save(folder: str | Path, model: Model, params: Params, tokenizer: Any) -> None:
    """Write config, float32 weights, tokenizer with chat template and generation config into a new or empty folder."""
    from safetensors.numpy import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for entry in entries(model.cfg):
        value = np.asarray(_at(params, entry.path))[entry.at]
        tensors[entry.name] = np.ascontiguousarray(entry.to_theirs(value))
    eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    tokenizer.save_pretrained(str(folder))
    (folder / "config.json").write_text(json.dumps(write_config(model.cfg, eos, pad), indent=2) + "\n")
    generation = {"eos_token_id": eos, "pad_token_id": pad, "do_sample": True, "temperature": 1.0}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    save_file(tensors, str(folder / WEIGHTS), metadata={"format": "pt"})


def _at(tree: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def _weight_files(folder: Path) -> dict[str, str]:
    """Tensor name -> file, from the index or from the single file."""
    from safetensors import SafetensorError, safe_open

    if (folder / INDEX).is_file():
        weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
        absent = sorted({f for f in weight_map.values() if not (folder / f).is_file()})
        if absent:
            raise CheckpointError(f"{folder / INDEX} names files that are not there: {', '.join(absent)}")
        return weight_map
    if not (folder / WEIGHTS).is_file():
        raise CheckpointError(f"{folder} has neither {WEIGHTS} nor {INDEX}")
    try:
        with safe_open(folder / WEIGHTS, framework="numpy") as f:
            return dict.fromkeys(f.keys(), WEIGHTS)
    except SafetensorError as e:
        raise CheckpointError(f"{folder / WEIGHTS} cannot be read: {e}") from e


class _Shards:
    """Open safetensors files of a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, Any] = {}

    def __enter__(self) -> _Shards:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.clear()

    def _file(self, name: str) -> Any:
        from safetensors import SafetensorError, safe_open

        if name not in self._open:
            try:
                self._open[name] = safe_open(self._folder / name, framework="numpy")
            except SafetensorError as e:
                raise CheckpointError(f"{self._folder / name} cannot be read: {e}") from e
        return self._open[name]

    def shape(self, file: str, name: str) -> tuple[int, ...]:
        f = self._file(file)
        if name not in set(f.keys()):
            raise CheckpointError(f"{self._folder / file} does not hold {name}, which the index says it does")
        return tuple(f.get_slice(name).get_shape())

    def read(self, file: str, name: str) -> np.ndarray:
        return self._file(file).get_tensor(name)
