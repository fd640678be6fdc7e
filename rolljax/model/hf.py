"""Hugging Face folders in and out (Qwen3 dense): config.json, safetensors with or without an index, tokenizer.

Reading names every missing, extra or misshaped tensor in one error before anything is used. Writing gives a folder
that `transformers` loads and that computes the same logits.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import ml_dtypes  # noqa: F401  # teaches NumPy bfloat16, which safetensors needs to read such folders
import numpy as np

from rolljax.errors import CheckpointError
from rolljax.model.decoder import DecoderConfig, Model, Params

ARCHITECTURE = "Qwen3ForCausalLM"
INDEX, WEIGHTS = "model.safetensors.index.json", "model.safetensors"
Transform = Callable[[np.ndarray], np.ndarray]


def read_config(folder: str | Path) -> DecoderConfig:
    """The decoder's shape from `config.json`.

    Raises:
      CheckpointError: no such file, another architecture, or a feature this decoder does not compute.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{folder} is not a Hugging Face model folder: it has no config.json")
    try:
        raw = json.loads(path.read_text())
    except json.JSONDecodeError as e:
        raise CheckpointError(f"{path} is not JSON: {e}") from e
    found = (raw.get("architectures") or [raw.get("model_type", "nothing")])[0]
    if found not in (ARCHITECTURE, "qwen3"):
        raise CheckpointError(f"{path}: architecture {found} is not known; known: {ARCHITECTURE}")
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    for what, bad in {
        f"rope type {rope.get('rope_type')}": rope.get("rope_type", "default") != "default",
        "attention_bias": raw.get("attention_bias", False),
        "use_sliding_window": raw.get("use_sliding_window", False),
        f"hidden_act {raw.get('hidden_act')}": raw.get("hidden_act", "silu") != "silu",
        "quantization_config": "quantization_config" in raw,
    }.items():
        if bad:
            raise CheckpointError(f"{path}: {what} is not supported")
    try:
        heads, hidden = raw["num_attention_heads"], raw["hidden_size"]
        return DecoderConfig(
            vocab_size=raw["vocab_size"],
            num_layers=raw["num_hidden_layers"],
            hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=raw.get("num_key_value_heads", heads),
            head_dim=raw.get("head_dim") or hidden // heads,
            ffn_size=raw["intermediate_size"],
            rope_theta=float(raw.get("rope_theta") or rope.get("rope_theta") or 10_000.0),
            rms_norm_eps=raw["rms_norm_eps"],
            tie_embeddings=raw.get("tie_word_embeddings", False),
            max_position=raw.get("max_position_embeddings", 4096),
            init_std=raw.get("initializer_range", 0.02),
        )
    except KeyError as e:
        raise CheckpointError(f"{path} has no {e.args[0]}") from e


def write_config(cfg: DecoderConfig, eos_token_id: int | None, pad_token_id: int | None) -> dict[str, Any]:
    """`config.json` for `transformers`, as it reads in versions 4 and 5."""
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        "vocab_size": cfg.vocab_size,
        "num_hidden_layers": cfg.num_layers,
        "hidden_size": cfg.hidden_size,
        "num_attention_heads": cfg.num_heads,
        "num_key_value_heads": cfg.num_kv_heads,
        "head_dim": cfg.head_dim,
        "intermediate_size": cfg.ffn_size,
        "rope_theta": cfg.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": cfg.rope_theta},
        "rms_norm_eps": cfg.rms_norm_eps,
        "tie_word_embeddings": cfg.tie_embeddings,
        "max_position_embeddings": cfg.max_position,
        "initializer_range": cfg.init_std,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "bos_token_id": None,
        "eos_token_id": eos_token_id,
        "pad_token_id": pad_token_id,
        "dtype": "float32",
    }


def _layer_tensors(cfg: DecoderConfig) -> dict[str, tuple[str, Transform, Transform]]:
    """Our name -> (name in the folder, folder to ours, ours to folder), for one layer's slice."""
    D, H, K, C = cfg.hidden_size, cfg.num_heads, cfg.num_kv_heads, cfg.head_dim

    def heads(n: int) -> tuple[Transform, Transform]:
        return lambda w: w.T.reshape(D, n, C), lambda w: w.reshape(D, n * C).T

    transposed: tuple[Transform, Transform] = (lambda w: w.T, lambda w: w.T)
    same: tuple[Transform, Transform] = (lambda w: w, lambda w: w)
    return {
        "attn_norm": ("input_layernorm", *same),
        "q": ("self_attn.q_proj", *heads(H)),
        "k": ("self_attn.k_proj", *heads(K)),
        "v": ("self_attn.v_proj", *heads(K)),
        "o": ("self_attn.o_proj", lambda w: w.T.reshape(H, C, D), lambda w: w.reshape(H * C, D).T),
        "q_norm": ("self_attn.q_norm", *same),
        "k_norm": ("self_attn.k_norm", *same),
        "ffn_norm": ("post_attention_layernorm", *same),
        "gate": ("mlp.gate_proj", *transposed),
        "up": ("mlp.up_proj", *transposed),
        "down": ("mlp.down_proj", *transposed),
    }


def _tensors(cfg: DecoderConfig) -> Iterator[tuple[str, tuple[str, ...], int | None, Transform, Transform]]:
    """Every tensor of the folder: name, path in our tree, layer (None: not stacked), folder to ours, ours to folder."""
    same: Transform = lambda w: w  # noqa: E731
    yield "model.embed_tokens.weight", ("embed",), None, same, same
    yield "model.norm.weight", ("norm",), None, same, same
    if not cfg.tie_embeddings:
        yield "lm_head.weight", ("head",), None, same, same
    for ours, (theirs, to_ours, to_theirs) in _layer_tensors(cfg).items():
        for i in range(cfg.num_layers):
            yield f"model.layers.{i}.{theirs}.weight", ("layers", ours), i, to_ours, to_theirs


def load(folder: str | Path, model: Model, shardings: Params) -> Params:
    """Parameters of a folder as float32 device arrays in their shardings, one parameter at a time.

    Raises:
      CheckpointError: names every tensor that is missing, unknown, or of another shape than `config.json` says.
    """
    folder = Path(folder)
    where = _weight_files(folder)
    expected = {
        name: (path, layer, to_ours, to_theirs) for name, path, layer, to_ours, to_theirs in _tensors(model.cfg)
    }
    abstract = model.abstract()
    wrong = [f"missing: {name}" for name in expected if name not in where]
    ignored = {"lm_head.weight"} if model.cfg.tie_embeddings else set()
    wrong += [f"unknown: {name}" for name in where if name not in expected and name not in ignored]
    with _Shards(folder) as shards:
        for name in (n for n in expected if n in where):
            path, layer, _, to_theirs = expected[name]
            shape = _at(abstract, path).shape[layer is not None :]
            want = to_theirs(np.empty(shape, np.int8)).shape
            have = shards.shape(where[name], name)
            if have != want:
                wrong.append(f"shape: {name} is {list(have)}, config.json says {list(want)}")
        if wrong:
            more = f"\n  ... and {len(wrong) - 20} more" if len(wrong) > 20 else ""
            raise CheckpointError(
                f"{folder} does not hold the model its config.json describes:\n  " + "\n  ".join(wrong[:20]) + more
            )
        params: dict[str, Any] = {}
        for path in dict.fromkeys(path for path, *_ in expected.values()):
            names = [n for n, (p, *_) in expected.items() if p == path]
            parts = [expected[n][2](shards.read(where[n], n).astype(np.float32)) for n in names]
            value = np.stack(parts) if expected[names[0]][1] is not None else parts[0]
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
    for name, path, layer, _, to_theirs in _tensors(model.cfg):
        value = np.asarray(_at(params, path))
        tensors[name] = np.ascontiguousarray(to_theirs(value if layer is None else value[layer]))
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
