"""Folders that we write, as `transformers` 4 and 5 read them, and as other users may."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from rolljax.commands.export import main as export
from rolljax.model import hf, lora
from rolljax.model.tokenizer import Chat, byte_tokenizer, load_tokenizer, save_tokenizer
from rolljax.types import Message

from ..families import FAMILIES, load, make_folder
from . import transformers_reader

BESIDE = Path(sys.prefix) / "transformers4"
"""Where `make setup-test` puts the old version."""
SOME = ("qwen2", "gemma3")
SENTENCE_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)


def sentence_folder(folder):
    """Save a Llama with a tokenizer of SentencePiece's kind, its files as version 4 writes them."""
    from tokenizers import Tokenizer, decoders, models, normalizers, processors

    make_folder(folder, "llama3", vocab_size=288)
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *"▁abcdehilortwy"]
    core = Tokenizer(
        models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    core.add_special_tokens(pieces[:3])
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    core.save(str(folder / "tokenizer.json"))
    token = lambda text: {"content": text, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}  # noqa: E731
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    config = {
        "add_bos_token": True,
        "add_eos_token": False,
        "added_tokens_decoder": {str(i): token(text) | {"special": True} for i, text in enumerate(pieces[:3])},
        **{name: token(text) | {"__type": "AddedToken"} for name, text in named.items()},
        "chat_template": SENTENCE_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "legacy": False,
        "model_max_length": 512,
        "pad_token": None,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "special_tokens_map.json").write_text(json.dumps(named))
    (folder / "generation_config.json").write_text('{"eos_token_id": 2,\n "temperature": 0.25, "do_sample": true}')


def written(top, families):
    """Save our folders with random weights."""
    for name in families:
        make_folder(top / "in" / name, name)
        model, params = load(top / "in" / name)
        hf.save(top / name, model, params, byte_tokenizer(), dtype="bfloat16" if name == "qwen2" else "float32")
    return {name: top / name for name in families}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Name to a folder that we wrote: two families; tokenizers from elsewhere."""
    top = tmp_path_factory.mktemp("folders")
    found = written(top, SOME)
    sentence_folder(top / "in" / "sentence")
    # as version 5 writes it, with special tokens that have no name
    make_folder(top / "in" / "five", "qwen3")
    five = byte_tokenizer()
    five.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|extra|>"]})
    five.save_pretrained(top / "in" / "five")
    for name in ("sentence", "five"):
        assert export(["--model", str(top / "in" / name), "--to", str(top / name)]) == 0
        found[name] = top / name
    return found


def read_by_both(folders):
    """Return the results of both versions for folders, which must be equal."""
    assert BESIDE.is_dir(), f"{BESIDE} is not there: run `make setup-test`"
    paths = list(map(str, folders.values()))
    done = subprocess.run(
        [sys.executable, transformers_reader.__file__, *paths],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(BESIDE), "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr
    old, new = json.loads(done.stdout.splitlines()[-1]), transformers_reader.main(paths)
    assert (old.pop("version").split(".")[0], new.pop("version").split(".")[0]) == ("4", "5")
    assert old == new
    found = {name: new[str(path)] for name, path in folders.items()}
    assert all(len(set(f["greedy"])) > 3 for f in found.values())
    return found


@pytest.mark.sweep
def test_both_versions_read_every_family(tmp_path):
    read_by_both(written(tmp_path, [name for name in FAMILIES if name not in SOME]))


@pytest.mark.slow
def test_both_versions_read_the_same(folders):
    found = read_by_both(folders)
    assert found["qwen2"]["dtype"] == "torch.bfloat16" and found["gemma3"]["dtype"] == "torch.float32"
    assert found["sentence"]["ids"][0][0] == 1 and 261 in found["five"]["ids"][3]
    for name, path in folders.items():
        ids = Chat(load_tokenizer(path)).prompt_ids(
            [Message(m["role"], m["content"]) for m in transformers_reader.TALK]
        )
        assert ids.tolist() == found[name]["chat_ids"]


def test_files_of_a_tokenizer_stay_as_they_are(folders):
    before, after = folders["sentence"].parent / "in" / "sentence", folders["sentence"]
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json"):
        assert (before / name).read_bytes() == (after / name).read_bytes()
    for file in folders["five"].glob("tokenizer*.json"):
        assert "Backend" not in file.read_text()


def test_a_saved_tokenizer_may_be_saved_again(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
    save_tokenizer(tmp_path / "a", byte_tokenizer())
    save_tokenizer(tmp_path / "b", load_tokenizer(tmp_path / "a"), tmp_path / "a")
    files = lambda folder: {f.name: f.read_bytes() for f in folder.iterdir()}  # noqa: E731
    assert files(tmp_path / "a") == files(tmp_path / "b")
    assert set(files(tmp_path / "a")) == {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o007, 0o660)])
def test_all_files_have_the_rights_that_the_umask_gives(folders, tmp_path, umask, mode):
    model, params = load(folders["qwen2"])
    adapted = lora.Lora(rank=1)
    adapters = jax.tree.map(np.asarray, jax.jit(lambda: type(model)(model.cfg, lora=adapted).init(0))())
    before = os.umask(umask)
    try:
        hf.save(tmp_path / "out", model, params, load_tokenizer(folders["sentence"]), source=folders["sentence"])
        hf.save(tmp_path / "shards", model, params, byte_tokenizer(), max_shard_bytes=40_000)
        lora.save_adapter(tmp_path / "adapter", adapted, model.cfg, adapters, str(folders["qwen2"]), byte_tokenizer())
    finally:
        os.umask(before)
    for folder in (tmp_path / "out", tmp_path / "shards", tmp_path / "adapter"):
        files = list(folder.iterdir())
        assert len(files) > 4 and folder.stat().st_mode & 0o777 == 0o777 & ~umask
        assert {f.name: oct(f.stat().st_mode & 0o777) for f in files} == {f.name: oct(mode) for f in files}
