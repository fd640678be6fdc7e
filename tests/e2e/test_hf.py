"""Hugging Face folders: `transformers` with torch is the oracle, both ways."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from rolljax.errors import CheckpointError
from rolljax.model import hf
from rolljax.model.attention import packed
from rolljax.model.decoder import Model
from rolljax.model.tokenizer import byte_tokenizer

VOCAB = 277  # a multiple of nothing


def make_folder(folder, *, tied, dtype=torch.float32, shard_size="5GB", **changes):
    torch.manual_seed(0)
    shape = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "intermediate_size": 80,
        "rope_theta": 50_000.0,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
    }
    model = Qwen3ForCausalLM(Qwen3Config(**(shape | {"tie_word_embeddings": tied} | changes))).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:  # norms that are all ones would hide a mistake
                p.uniform_(0.5, 1.5)
    model.to(dtype).save_pretrained(folder, max_shard_size=shard_size)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def load(folder):
    model = Model(hf.read_config(folder))
    device = jax.tree.map(lambda _: jax.devices()[0], model.abstract())
    return model, hf.load(folder, model, device)


def our_logits(model, params, tokens, positions, segments, branches=None):
    decoder = model.bind(params)
    branches = np.zeros_like(segments) if branches is None else branches
    tokens, positions, segments, branches = map(jnp.array, (tokens, positions, segments, branches))
    hidden = decoder(tokens, positions, packed(segments, branches, positions)).hidden
    return np.asarray(decoder.logits(hidden))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("length", [1, 17, 40])
def test_logits_equal_torch_at_every_position(tmp_path, tied, length):
    reference = make_folder(tmp_path, tied=tied)
    tokens = np.random.default_rng(0).integers(0, VOCAB, (3, length))
    with torch.no_grad():
        want = reference(torch.tensor(tokens)).logits.numpy()
    model, params = load(tmp_path)
    positions = np.tile(np.arange(length), (3, 1))
    got = our_logits(model, params, tokens, positions, np.ones_like(tokens))
    np.testing.assert_allclose(got, want, atol=1e-4)
    assert np.abs(want).max() > 1  # the tolerance means something


@pytest.mark.parametrize("tied", [True, False])
def test_left_over_padding_and_packed_sequences(tmp_path, tied):
    reference = make_folder(tmp_path, tied=tied)
    rng = np.random.default_rng(1)
    sequences = [rng.integers(0, VOCAB, n) for n in (5, 11, 8)]
    tokens, segments, positions = np.zeros((3, 1, 32), int)
    at = 0
    for i, s in enumerate(sequences):
        tokens[0, at : at + len(s)], segments[0, at : at + len(s)] = s, i + 1
        positions[0, at : at + len(s)] = np.arange(len(s))
        at += len(s)
    model, params = load(tmp_path)
    got = our_logits(model, params, tokens, positions, segments)
    at = 0
    for s in sequences:
        with torch.no_grad():
            want = reference(torch.tensor(s[None])).logits.numpy()[0]
        np.testing.assert_allclose(got[0, at : at + len(s)], want, atol=1e-4)
        at += len(s)
    assert np.isfinite(got).all()  # padding too


def test_siblings_of_a_shared_prompt_equal_torch(tmp_path):
    reference = make_folder(tmp_path, tied=True)
    rng = np.random.default_rng(2)
    prompt, answers = rng.integers(0, VOCAB, 7), [rng.integers(0, VOCAB, n) for n in (4, 1, 6)]
    tokens = np.concatenate([prompt, *answers])[None]
    branches = np.concatenate([[0] * 7, *([i + 1] * len(a) for i, a in enumerate(answers))])[None]
    positions = np.concatenate([np.arange(7), *(7 + np.arange(len(a)) for a in answers)])[None]
    model, params = load(tmp_path)
    got = our_logits(model, params, tokens, positions, np.ones_like(tokens), branches)[0]
    at = 7
    for a in answers:
        with torch.no_grad():
            want = reference(torch.tensor(np.concatenate([prompt, a])[None])).logits.numpy()[0]
        np.testing.assert_allclose(got[:7], want[:7], atol=1e-4)
        np.testing.assert_allclose(got[at : at + len(a)], want[7:], atol=1e-4)
        at += len(a)


@pytest.mark.parametrize("tied", [True, False])
def test_folder_out_and_back_is_bit_equal(tmp_path, tied):
    reference = make_folder(tmp_path / "in", tied=tied, shard_size="40KB")
    assert (tmp_path / "in" / hf.INDEX).exists()
    model, params = load(tmp_path / "in")
    hf.save(tmp_path / "out", model, params, byte_tokenizer())
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    theirs, ours = reference.state_dict(), again.state_dict()
    assert theirs.keys() == ours.keys()
    for name, value in theirs.items():
        assert torch.equal(value, ours[name]), name
    assert again.config.rope_parameters["rope_theta"] == 50_000.0


def test_bfloat16_folder(tmp_path):
    reference = make_folder(tmp_path, tied=False, dtype=torch.bfloat16)
    tokens = np.arange(20)[None]
    with torch.no_grad():
        want = reference(torch.tensor(tokens)).logits.numpy()
    model, params = load(tmp_path)
    np.testing.assert_allclose(our_logits(model, params, tokens, tokens, np.ones_like(tokens)), want, atol=1e-4)


def edit(folder, change):
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


BROKEN = {
    "no config": (lambda f: (f / "config.json").unlink(), "no config.json"),
    "config is not JSON": (lambda f: (f / "config.json").write_text("{"), "is not JSON"),
    "another architecture": (
        lambda f: edit(f, lambda c: c.update(architectures=["GPT2LMHeadModel"])),
        "GPT2LMHeadModel",
    ),
    "field missing": (lambda f: edit(f, lambda c: c.pop("intermediate_size")), "intermediate_size"),
    "rope scaling": (lambda f: edit(f, lambda c: c["rope_parameters"].update(rope_type="yarn")), "yarn"),
    "other width": (lambda f: edit(f, lambda c: c.update(intermediate_size=81)), "mlp.gate_proj.weight is [80, 48]"),
    "fewer layers": (lambda f: edit(f, lambda c: c.update(num_hidden_layers=1)), "unknown: model.layers.1."),
    "more layers": (lambda f: edit(f, lambda c: c.update(num_hidden_layers=3)), "missing: model.layers.2."),
    "untied without head": (
        lambda f: edit(f, lambda c: c.update(tie_word_embeddings=False)),
        "missing: lm_head.weight",
    ),
    "truncated weights": (
        lambda f: (f / hf.WEIGHTS).write_bytes((f / hf.WEIGHTS).read_bytes()[:500]),
        "cannot be read",
    ),
    "no weights": (lambda f: (f / hf.WEIGHTS).unlink(), "neither"),
    "index of absent file": (
        lambda f: (f / hf.INDEX).write_text(json.dumps({"weight_map": {"x": "model-1.safetensors"}})),
        "model-1.safetensors",
    ),
}


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("good")
    make_folder(folder, tied=True)
    return folder


@pytest.mark.parametrize("case", BROKEN)
def test_broken_folder_is_a_clear_error(good, tmp_path, case):
    folder = tmp_path / "model"
    shutil.copytree(good, folder)
    breaks, says = BROKEN[case]
    breaks(folder)
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    assert says in str(caught.value)
    assert str(folder) in str(caught.value)
