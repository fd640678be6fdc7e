"""Hugging Face folders: broken ones, folders with images, sharded and streamed reading and writing."""

import dataclasses
import json
import os
import shutil
import struct
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
from jax.sharding import SingleDeviceSharding
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM, Gemma3Config, Gemma3ForConditionalGeneration

from rolljax.commands.export import main as export
from rolljax.errors import CheckpointError
from rolljax.model import hf, lora
from rolljax.model.decoder import Model
from rolljax.model.families import known
from rolljax.model.tokenizer import byte_tokenizer, load_tokenizer, save_tokenizer
from rolljax.trainer.mesh import MeshSpec, param_shardings

from ..families import VOCAB, load, make_folder, our_logits, their_logits

ROOT = Path(__file__).parents[2]


def same_trees(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


# ---- sharded, streamed


@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("qwen2", {"fsdp": 8}),
        ("qwen2", {"data": 2, "fsdp": 2, "tensor": 2}),
        ("qwen3_moe", {"fsdp": 2, "expert": 2, "tensor": 2}),
    ],
    ids=str,
)
def test_each_device_gets_its_part_and_gives_it_back(tmp_path, name, axes):
    """The same parameters on every mesh, and the same folder from it."""
    sizes = {"num_experts": 4} if name == "qwen3_moe" else {}
    make_folder(tmp_path / "in", name, vocab_size=280, num_attention_heads=8, head_dim=6, shard_size="40KB", **sizes)
    model, whole = load(tmp_path / "in")
    mesh = MeshSpec(**({"data": 1} | axes)).build()
    shardings = param_shardings(mesh, model.axes(), model.abstract())
    params = hf.load(tmp_path / "in", model, shardings)
    same_trees(jax.device_get(params), jax.device_get(whole))
    for got, want in zip(jax.tree.leaves(params), jax.tree.leaves(shardings), strict=True):
        assert got.sharding == want
    hf.save(tmp_path / "out", model, params, byte_tokenizer())
    assert not (tmp_path / "out" / hf.INDEX).exists()
    read = load_file(tmp_path / "out" / hf.WEIGHTS)
    before = {k: v for file in (tmp_path / "in").glob("*.safetensors") for k, v in load_file(file).items()}
    same_trees(read, before)


def test_matrices_may_come_in_the_compute_dtype(tmp_path):
    make_folder(tmp_path, "qwen3_moe", dtype=torch.bfloat16)
    model, params = load(tmp_path, "bfloat16")
    here = SingleDeviceSharding(jax.devices()[0])
    got = hf.load(tmp_path, model, jax.tree.map(lambda _: here, params), computed=True)
    same_trees(got, model.computed(params))
    assert got["layers"]["router"].dtype == got["embed"].dtype == "bfloat16" and got["norm"].dtype == "float32"


@pytest.mark.slow
def test_host_memory_stays_near_one_file(tmp_path):
    """In a separate process: peak memory while reading 128 MiB onto 8 devices, in addition to the devices' arrays."""
    command = [
        sys.executable,
        "benchmarks/load_folder.py",
        "--mib",
        "128",
        "--shard_mib",
        "64",
        "--folder",
        str(tmp_path),
    ]
    done = subprocess.run([*command, "--json", str(tmp_path / "out.json")], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    figure = json.loads((tmp_path / "out.json").read_text())
    assert figure["files"] >= 2 and figure["devices"] == 8
    assert figure["device_mib"] > 200
    assert figure["over_mib"] < 1.3 * figure["largest_file_mib"]


def test_export_writes_bfloat16_and_keeps_what_the_folder_said_of_generation(tmp_path, capsys):
    """A folder exported from a folder is equal to it, in files of the requested size."""
    make_folder(tmp_path / "in", "llama3", dtype=torch.bfloat16)
    byte_tokenizer().save_pretrained(tmp_path / "in")
    said = {"eos_token_id": [3, 5], "pad_token_id": 0, "do_sample": True, "temperature": 0.6, "top_p": 0.9}
    (tmp_path / "in" / hf.GENERATION).write_text(json.dumps(said))
    argv = ["--model", str(tmp_path / "in"), "--to", str(tmp_path / "out"), "--dtype", "bfloat16"]
    assert export([*argv, "--max_shard_gb", "0.00004"]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "out")
    index = json.loads((tmp_path / "out" / hf.INDEX).read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 3 and files[0] == f"model-00001-of-{len(files):05}.safetensors"
    read = {k: v for file in files for k, v in load_file(tmp_path / "out" / file).items()}
    same_trees(read, load_file(tmp_path / "in" / hf.WEIGHTS))
    assert index["metadata"]["total_size"] == sum(v.nbytes for v in read.values())
    assert json.loads((tmp_path / "out" / hf.GENERATION).read_text()) == said
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    assert export(argv) == 2  # not an empty folder


@pytest.mark.slow
def test_an_export_that_is_killed_leaves_no_half_a_folder(tmp_path):
    make_folder(tmp_path / "in", "qwen3")
    byte_tokenizer().save_pretrained(tmp_path / "in")
    code = """if True:
        import os, sys
        from rolljax.commands.export import main as export
        from rolljax.storage import durable
        durable.reach = lambda point, path: point == "written" and path.name == "out" and os._exit(9)
        sys.exit(export(sys.argv[1:]))
    """
    argv = ["--model", str(tmp_path / "in"), "--to", str(tmp_path / "out")]
    killed = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True)
    assert killed.returncode == 9 and not (tmp_path / "out").exists(), killed.stderr
    assert export(argv) == 0 and load_tokenizer(tmp_path / "out")


# ---- folders with images


def test_of_a_folder_with_images_the_text_part_is_read(tmp_path):
    from peft import PeftModel

    torch.manual_seed(0)
    text = {
        "vocab_size": VOCAB, "hidden_size": 48, "num_hidden_layers": 2, "intermediate_size": 64, "sliding_window": 8,
        "sliding_window_pattern": 2, "query_pre_attn_scalar": 256, "initializer_range": 0.1,
    }  # fmt: skip
    sizes = {
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "image_size": 28,
        "patch_size": 14,
    }
    tokens = {"image_token_index": 270, "boi_token_index": 271, "eoi_token_index": 272, "mm_tokens_per_image": 4}
    config = Gemma3Config(text_config=text, vision_config={"hidden_size": 16, **sizes}, **tokens)
    reference = Gemma3ForConditionalGeneration(config).eval()
    reference.save_pretrained(tmp_path / "in")
    edit(tmp_path / "in", lambda c: c.update(text_config=text | {"model_type": "gemma3_text"}))  # as Google writes it
    model, params = load(tmp_path / "in")
    assert (model.cfg.num_heads, model.cfg.num_kv_heads, model.cfg.head_dim) == (8, 4, 256)
    ids = np.random.default_rng(0).integers(0, 270, 24)
    segments, positions = np.ones((1, 24), int), np.arange(24)[None]
    got = our_logits(model, params, ids[None], positions, segments)[0]
    want = their_logits(reference, ids)
    np.testing.assert_allclose(got, want, atol=1e-4)
    hf.save(tmp_path / "out", model, params, byte_tokenizer())
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(again).__name__ == "Gemma3ForCausalLM"
    np.testing.assert_allclose(their_logits(again, ids), want, atol=1e-5)
    # adapters belong to the text part's maps only, although the other part has maps of these names, too
    adapted = dataclasses.replace(model, lora=lora.Lora(rank=2))
    adapters = jax.tree.map(lambda x: x + 0.1, jax.jit(lambda: adapted.init(0))())
    inside = hf.decoder_module(tmp_path / "in")
    lora.save_adapter(
        tmp_path / "adapter", adapted.lora, model.cfg, adapters, str(tmp_path / "in"), byte_tokenizer(), inside
    )
    merged = adapted.merged(lora.Adapted(jax.jit(adapted.base)(params), adapters))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Found missing adapter keys")
        reference = PeftModel.from_pretrained(reference, tmp_path / "adapter")
    changed = our_logits(model, merged, ids[None], positions, segments)[0]
    np.testing.assert_allclose(their_logits(reference, ids), changed, atol=1e-4 * np.abs(changed).max())
    assert np.abs(changed - want).max() > 0.1
    (tmp_path / "in" / hf.WEIGHTS).unlink()
    save_file({"language_model.model.norm.weight": np.ones(48, np.float32)}, tmp_path / "in" / hf.WEIGHTS)
    with pytest.raises(CheckpointError, match=r"missing: model\.embed_tokens\.weight"):
        load(tmp_path / "in")


# ---- broken folders


def edit(folder, change):
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def tensors(folder, change):
    """Write the weights again, changed."""
    found = load_file(folder / hf.WEIGHTS)
    change(found)
    save_file(found, folder / hf.WEIGHTS)


def index(folder, change=lambda where: None):
    """Split the weights in two files with an index, changed."""
    found = load_file(folder / hf.WEIGHTS)
    where = {name: f"model-{1 + i % 2}.safetensors" for i, name in enumerate(sorted(found))}
    for file in set(where.values()):
        save_file({k: v for k, v in found.items() if where[k] == file}, folder / file)
    (folder / hf.WEIGHTS).unlink()
    change(where)
    (folder / hf.INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))


def cut(path, size):
    path.write_bytes(path.read_bytes()[:size])


def raw(folder, text):
    """Put a text into config.json, before its end."""
    path = folder / "config.json"
    path.write_text(path.read_text().rstrip().removesuffix("}") + f", {text}}}")


def linked(folder, name):
    """Put a file outside of the folder, with a link to it inside."""
    target = folder.parent / "elsewhere"
    (folder / name).rename(target)
    (folder / name).symlink_to(target)


def header(folder, fields, size=None):
    """Write a file with this header and 8 bytes of numbers."""
    if isinstance(fields, dict):
        fields = json.dumps({n: {"dtype": d, "shape": s, "data_offsets": o} for n, (d, s, o) in fields.items()})
    size = len(fields) if size is None else size
    (folder / hf.WEIGHTS).write_bytes(struct.pack("<Q", size) + fields.encode() + bytes(8))


DOWN, HEAD = "model.layers.1.mlp.down_proj.weight", "lm_head.weight"
BROKEN = {
    "no config": (lambda f: (f / "config.json").unlink(), ["no config.json"]),
    "config is not JSON": (lambda f: (f / "config.json").write_text("{"), ["config.json is not JSON"]),
    "config is a list": (lambda f: (f / "config.json").write_text("[]"), ["not a JSON object"]),
    "unknown architecture": (
        lambda f: edit(f, lambda c: c.update(architectures=["GPT2LMHeadModel"])),
        ["GPT2LMHeadModel is not known", *(cls.architecture for cls in known().values()), "Gemma3ForConditional"],
    ),
    "config of another family": (
        lambda f: edit(f, lambda c: c.update(architectures=["Qwen2ForCausalLM"])),
        ["missing: model.layers.0.self_attn.q_proj.bias", "unknown: model.layers.0.self_attn.q_norm.weight"],
    ),
    "field missing": (lambda f: edit(f, lambda c: c.pop("intermediate_size")), ["has no intermediate_size"]),
    "field of the wrong type": (
        lambda f: edit(f, lambda c: c.update(hidden_size="48")),
        ["hidden_size", "'48'"],
    ),
    "unsupported rope": (lambda f: edit(f, lambda c: c["rope_parameters"].update(rope_type="yarn")), ["rope", "yarn"]),
    "unsupported activation": (lambda f: edit(f, lambda c: c.update(hidden_act="relu")), ["hidden_act", "relu"]),
    "quantised": (
        lambda f: edit(f, lambda c: c.update(quantization_config={"quant_method": "fp8"})),
        ["quantization_config", "fp8"],
    ),
    "another width": (
        lambda f: edit(f, lambda c: c.update(intermediate_size=81)),
        ["shape: model.layers.0.mlp.gate_proj.weight is [80, 48], config.json says [81, 48]"],
    ),
    "heads that do not divide": (
        lambda f: edit(f, lambda c: c.update(num_key_value_heads=4)),
        ["num_kv_heads", "num_heads=6"],
    ),
    "fewer layers": (lambda f: edit(f, lambda c: c.update(num_hidden_layers=1)), ["unknown: model.layers.1."]),
    "more layers": (lambda f: edit(f, lambda c: c.update(num_hidden_layers=3)), ["missing: model.layers.2."]),
    "untied without a head": (lambda f: edit(f, lambda c: c.update(tie_word_embeddings=False)), [f"missing: {HEAD}"]),
    "tied with another head": (
        lambda f: tensors(f, lambda t: t.update({HEAD: t["model.embed_tokens.weight"] + 1})),
        [f"{HEAD} differs", "tie_word_embeddings"],
    ),
    "integer weights": (
        lambda f: tensors(f, lambda t: t.update({DOWN: t[DOWN].astype(np.int64)})),
        [f"dtype: {DOWN} is I64"],
    ),
    "a tensor too few": (lambda f: tensors(f, lambda t: t.pop(DOWN)), [f"missing: {DOWN}"]),
    "a tensor too many": (
        lambda f: tensors(f, lambda t: t.update({"model.extra.weight": t[DOWN]})),
        ["unknown: model.extra.weight"],
    ),
    "a tensor turned around": (
        lambda f: tensors(f, lambda t: t.update({DOWN: np.ascontiguousarray(t[DOWN].T)})),
        [f"shape: {DOWN} is [80, 48], config.json says [48, 80]"],
    ),
    "weights cut off": (lambda f: cut(f / hf.WEIGHTS, -100), [f"{hf.WEIGHTS} cannot be read"]),
    "header cut off": (lambda f: cut(f / hf.WEIGHTS, 500), [f"{hf.WEIGHTS} cannot be read"]),
    "empty weights": (lambda f: cut(f / hf.WEIGHTS, 0), [f"{hf.WEIGHTS} cannot be read"]),
    "garbage": (lambda f: (f / hf.WEIGHTS).write_bytes(b"<!DOCTYPE html>" * 99), [f"{hf.WEIGHTS} cannot be read"]),
    "a pointer of Git LFS": (
        lambda f: (f / hf.WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"),
        [f"{hf.WEIGHTS} cannot be read"],
    ),
    "header of garbage": (
        lambda f: (f / hf.WEIGHTS).write_bytes(struct.pack("<Q", 8) + b"not JSON"),
        [f"{hf.WEIGHTS} cannot be read"],
    ),
    "no tensors": (lambda f: save_file({}, f / hf.WEIGHTS), ["missing: model.embed_tokens.weight", "more"]),
    "no weights": (lambda f: (f / hf.WEIGHTS).unlink(), ["neither", hf.WEIGHTS, hf.INDEX]),
    "index of an absent file": (
        lambda f: (index(f), (f / "model-2.safetensors").unlink()),
        [hf.INDEX, "not there: model-2.safetensors"],
    ),
    "index lacks a tensor": (lambda f: index(f, lambda w: w.pop(DOWN)), [hf.INDEX, DOWN, "does not say so"]),
    "index has a tensor too many": (
        lambda f: index(f, lambda w: w.update({"model.extra": "model-1.safetensors"})),
        [hf.INDEX, "model.extra: not in model-1.safetensors"],
    ),
    "index is not JSON": (lambda f: (index(f), (f / hf.INDEX).write_text("{")), [hf.INDEX, "not an index of weights"]),
    "index without a map": (lambda f: (index(f), (f / hf.INDEX).write_text("{}")), [hf.INDEX, "weight_map"]),
    "a file of several cut off": (
        lambda f: (index(f), cut(f / "model-2.safetensors", -100)),
        ["model-2.safetensors cannot be read"],
    ),
    # ---- and on purpose
    "config nested deeply": (lambda f: raw(f, '"x": ' + "[" * 10**5 + "]" * 10**5), ["config.json", "nested too deeply"]),
    "config with a key twice": (lambda f: raw(f, '"hidden_size": 49'), ["config.json", "the key 'hidden_size' is given twice"]),
    "config with NaN": (lambda f: edit(f, lambda c: c.update(rms_norm_eps=float("nan"))), ["config.json", "NaN"]),
    "config with 1e999": (lambda f: raw(f, '"x": 1e999'), ["config.json", "1e999 is not a finite number"]),
    "config with a number of 5000 digits": (lambda f: raw(f, '"x": ' + "9" * 5000), ["config.json", "digits"]),
    "config that is no UTF-8": (lambda f: (f / "config.json").write_bytes(b'{"a": "\xff"}'), ["config.json", "utf-8"]),
    "config that is a folder": (lambda f: ((f / "config.json").unlink(), (f / "config.json").mkdir()), ["config.json"]),
    "config that is a pipe": (
        lambda f: ((f / "config.json").unlink(), os.mkfifo(f / "config.json")), ["no config.json"],
    ),
    "config that is a link elsewhere": (lambda f: linked(f, "config.json"), ["config.json is a link that leads out"]),
    "links in a circle": (
        lambda f: ((f / "config.json").unlink(), (f / "config.json").symlink_to("config.json")), ["config.json"],
    ),
    "architecture of another type": (lambda f: edit(f, lambda c: c.update(architectures={"a": 1})), ["architectures"]),
    "architecture in a list in a list": (lambda f: edit(f, lambda c: c.update(architectures=[[]])), ["architectures"]),
    **{
        f"{name} = {str(value)[:20]}": (
            lambda f, name=name, value=value: edit(f, lambda c: c.update({name: value})), ["config.json", name]
        )
        for name, value in [
            *((name, value) for name in ("num_hidden_layers", "vocab_size", "hidden_size", "head_dim") for value in (2**40, -1, True, 1.5)),
            ("num_hidden_layers", 2**31 - 1), ("max_position_embeddings", 2**40), ("rms_norm_eps", "1e-6"), ("rms_norm_eps", -1.0),
            ("initializer_range", []), ("tie_word_embeddings", "no"), ("rope_parameters", [1]), ("rope_parameters", "yarn"),
            ("rope_parameters", {"rope_type": {}}), ("rope_parameters", {"rope_theta": 0}), ("rope_parameters", {"rope_theta": 1e300}),
        ]
    },
    "sizes that fit no file": (
        lambda f: edit(f, lambda c: c.update(num_hidden_layers=2**16, hidden_size=2**31 - 2, vocab_size=2**31 - 1)),
        ["missing: model.layers.2", "shape: model.embed_tokens.weight", "more"],
    ),
    **{
        f"index that names {file!r}": (
            lambda f, file=file: index(f, lambda w: w.update({DOWN: file})), [hf.INDEX if file == 3 else repr(file)]
        )
        for file in ("../good/model.safetensors", "/etc/passwd", "..", "", "a/../model-1.safetensors", "a\0b", "C:\\x", 3)
    },
    "index nested deeply": (
        lambda f: (index(f), (f / hf.INDEX).write_text('{"weight_map": ' + "[" * 10**5 + "]" * 10**5 + "}")),
        [hf.INDEX, "nested too deeply"],
    ),
    "index with a tensor twice": (
        lambda f: (index(f), (f / hf.INDEX).write_text('{"weight_map": {"a": "b", "a": "c"}}')), [hf.INDEX, "twice"],
    ),
    "index with NaN": (
        lambda f: (index(f), (f / hf.INDEX).write_text('{"weight_map": {}, "x": NaN}')), [hf.INDEX, "NaN"],
    ),
    "weights that are a link elsewhere": (lambda f: linked(f, hf.WEIGHTS), [f"{hf.WEIGHTS} is a link that leads out"]),
    "a file of several that is a link elsewhere": (
        lambda f: (index(f), linked(f, "model-2.safetensors")), ["model-2.safetensors is a link that leads out"],
    ),
    "only pickles": (
        lambda f: ((f / hf.WEIGHTS).unlink(), (f / "pytorch_model.bin").write_bytes(b"x")),
        ["neither", "pytorch_model.bin may run code when read", "convert it once"],
    ),
    **{
        f"header: {name}": (lambda f, made=made: header(f, *made), [f"{hf.WEIGHTS} cannot be read"])
        for name, made in {
            "longer than the file": ({}, 2**40),
            "longer than anything": ({}, 2**64 - 1),
            "of a hundred thousand brackets": ('{"a": ' + "[" * 10**5 + "]" * 10**5 + "}",),
            "a tensor twice": ('{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}',),
            "behind the end": ({"a": ("F32", [4], [0, 16])},),
            "overlapping": ({"a": ("F32", [1], [0, 4]), "b": ("F32", [1], [2, 6])},),
            "with a hole": ({"a": ("F32", [1], [4, 8])},),
            "backwards": ({"a": ("F32", [1], [4, 0])},),
            "negative": ({"a": ("F32", [-1], [0, 4])},),
            "a shape of another size": ({"a": ("F32", [2], [0, 4])},),
            "a shape that overflows": ({"a": ("F32", [2**32, 2**32], [0, 4])},),
            "an unknown dtype": ({"a": ("X99", [1], [0, 4])},),
            "a dtype of another type": ({"a": (7, [1], [0, 4])},),
            "a shape of texts": ({"a": ("F32", ["1"], [0, 4])},),
            "a list": ("[]",),
        }.items()
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("good")
    make_folder(folder)
    return folder


@pytest.mark.parametrize("case", BROKEN)
def test_broken_folder_is_a_clear_error(good, tmp_path, case):
    folder = tmp_path / "model"
    shutil.copytree(good, folder)
    breaks, says = BROKEN[case]
    breaks(folder)
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    for part in (str(folder), *says):
        assert part in str(caught.value)
    assert len(str(caught.value)) < 5000
    if "differs" not in "".join(says):  # which only their numbers tell
        with pytest.raises(CheckpointError) as checked:
            hf.check(folder, Model(hf.read_config(folder)))
        assert str(checked.value) == str(caught.value)


def test_links_inside_a_folder_and_of_the_cache_are_followed(good, tmp_path):
    """As the hub's cache keeps a folder: each file a link from a snapshot to a blob."""
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "1234", tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for i, file in enumerate(good.iterdir()):
        shutil.copyfile(file, blobs / str(i))
        (snapshot / file.name).symlink_to(Path("../../blobs") / str(i))
    (tmp_path / "link").symlink_to(snapshot)
    same_trees(jax.device_get(load(tmp_path / "link")[1]), jax.device_get(load(good)[1]))


def test_the_check_reads_headers_only(good, tmp_path):
    """The numbers of a folder may be anything; a file that is cut off is found all the same."""
    shutil.copytree(good, tmp_path / "model")
    path = tmp_path / "model" / hf.WEIGHTS
    size = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    nbytes = path.stat().st_size - size
    with path.open("r+b") as f:  # a file with a hole: it would take minutes to read, were it as large as it can be
        f.truncate(size)
        f.truncate(size + nbytes)
    assert hf.check(tmp_path / "model", Model(hf.read_config(good))) == (24, nbytes)


# ---- tokenizers of folders


TOKENIZERS = {
    "none": (lambda f: [(f / n).unlink() for n in ("tokenizer.json", "tokenizer_config.json")], []),
    "not JSON": (lambda f: (f / "tokenizer.json").write_text("{"), ["tokenizer.json"]),
    "nested deeply": (
        lambda f: (f / "tokenizer.json").write_text('{"model": ' + "[" * 10**5 + "]" * 10**5 + "}"),
        ["tokenizer.json", "nested too deeply"],
    ),
    "settings nested deeply": (
        lambda f: (f / "tokenizer_config.json").write_text('{"a": ' + "[" * 10**5 + "]" * 10**5 + "}"),
        ["tokenizer_config.json", "nested too deeply"],
    ),
    "settings with NaN": (lambda f: (f / "tokenizer_config.json").write_text('{"model_max_length": NaN}'), ["NaN"]),
    "a link elsewhere": (lambda f: linked(f, "tokenizer.json"), ["tokenizer.json is a link that leads out"]),
    "a huge id": (lambda f: vocabulary(f, lambda v: v.update(huge=2**40)), []),
    "a negative id": (lambda f: vocabulary(f, lambda v: v.update(huge=-1)), []),
    "an id of text": (lambda f: vocabulary(f, lambda v: v.update(huge="1")), []),
    "no vocabulary": (lambda f: (f / "tokenizer.json").write_text("{}"), []),
    "code of its own": (
        lambda f: (
            (f / "tokenization_own.py").write_text(f"open({str(f / 'ran')!r}, 'w')\nclass Own: pass\n"),
            (f / "tokenizer_config.json").write_text(
                json.dumps({"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": [None, "tokenization_own.Own"]}})
            ),
            (f / "config.json").write_text(json.dumps({"model_type": "own"})),
        ),
        ["trust_remote_code"],
    ),
    "a config with code of its own": (
        lambda f: (
            (f / "configuration_own.py").write_text(f"open({str(f / 'ran')!r}, 'w')\nclass Own: pass\n"),
            (f / "config.json").write_text(
                json.dumps({"model_type": "own", "auto_map": {"AutoConfig": "configuration_own.Own"}})
            ),
            (f / "tokenizer.json").unlink(),
        ),
        [],
    ),
}


def vocabulary(folder, change):
    fields = json.loads((folder / "tokenizer.json").read_text())
    change(fields["model"]["vocab"])
    (folder / "tokenizer.json").write_text(json.dumps(fields))


@pytest.mark.parametrize("case", TOKENIZERS)
def test_a_broken_tokenizer_is_a_clear_error(good, tmp_path, case, monkeypatch):
    """Code that came with the folder is not run, whatever is on standard input."""
    folder = tmp_path / "model"
    shutil.copytree(good, folder)
    save_tokenizer(folder, byte_tokenizer())
    breaks, says = TOKENIZERS[case]
    breaks(folder)
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(CheckpointError) as caught:
        load_tokenizer(folder)
    for part in (str(folder), *says):
        assert part in str(caught.value)
    assert len(str(caught.value)) < 5000 and not (folder / "ran").exists()


def test_a_tied_head_that_is_written_twice_is_no_error(good, tmp_path):
    shutil.copytree(good, tmp_path / "model")
    _, want = load(good)
    tensors(tmp_path / "model", lambda t: t.update({HEAD: t["model.embed_tokens.weight"]}))
    same_trees(jax.device_get(load(tmp_path / "model")[1]), jax.device_get(want))


def test_a_bar_shows_progress_on_terminals_only(good, capfd, monkeypatch):
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    load(good)
    assert capfd.readouterr().err == ""
    monkeypatch.setenv("FORCE_COLOR", "1")  # to rich, any stream is a terminal then
    load(good)
    assert f"reading {good.name}" in capfd.readouterr().err
