"""Every family against `transformers` with torch: logits, gradients, 200 greedy tokens, and the folder back."""

import asyncio
import functools
import logging
import operator
import pkgutil
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from rolljax.model import families, hf
from rolljax.model.attention import packed
from rolljax.model.tokenizer import byte_tokenizer
from rolljax.sampler.client import Sampler
from rolljax.sampler.engine import Engine
from rolljax.sampler.settings import SamplerConfig
from rolljax.trainer import vocab
from rolljax.trainer.mesh import BATCH_AXES, MeshSpec
from rolljax.types import SamplingParams

from ..families import FAMILIES, VOCAB, load, make_folder, our_logits, their_logits
from .test_sampler import close

pytestmark = [pytest.mark.usefixtures("one_torch_thread"), pytest.mark.sampled(1)]

LENGTH = 40


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request, tmp_path_factory):
    """Return a folder of random float32 weights in several files, torch's model and ours."""
    folder = tmp_path_factory.mktemp(request.param)
    reference = make_folder(folder, request.param, shard_size="40KB")
    return folder, reference, *load(folder)


def test_every_family_has_an_entry():
    assert {module.name for module in pkgutil.iter_modules(families.__path__)} == FAMILIES.keys()


def rows():
    """Return five rows of tokens, and `(row, indices, tokens)` of every sequence in them."""
    rng = np.random.default_rng(0)
    draw = lambda n: rng.integers(0, VOCAB, n)  # noqa: E731
    tokens, segments, positions, branches = np.zeros((4, 5, LENGTH), int)
    sequences = []

    def put(row, places, ids, segment):
        tokens[row, places], segments[row, places], positions[row, places] = ids, segment, np.arange(len(ids))
        sequences.append((row, places, ids))

    for row, length in enumerate((1, 17, LENGTH)):  # padded
        put(row, np.arange(length), draw(length), 1)
    at = 0
    for segment, length in enumerate((5, 19, 12)):  # packed, with a rest
        put(3, at + np.arange(length), draw(length), segment + 1)
        at += length
    prompt, at = draw(13), 13
    for branch, length in enumerate((14, 1, 9)):  # siblings
        places = np.concatenate([np.arange(13), at + np.arange(length)])
        put(4, places, np.concatenate([prompt, draw(length)]), 1)
        branches[4, at : at + length] = branch + 1
        at += length
    return (tokens, positions, segments, branches), sequences


def test_logits_equal_torch_at_every_position(pair):
    _, reference, model, params = pair
    inputs, sequences = rows()
    got = our_logits(model, params, *inputs)
    for row, places, ids in sequences:
        want = their_logits(reference, ids)
        np.testing.assert_allclose(got[row, places], want, atol=1e-4)
        assert np.abs(want).max() > 1  # the tolerance means something
    assert np.isfinite(got).all()  # padding too


def test_greedy_tokens_in_bfloat16(pair, capsys):
    """How often the likeliest token is the same, at 1,000 places; both sides round to bfloat16, in other places."""
    folder, reference, model, _ = pair
    model, params = load(folder, "bfloat16")
    tokens = np.random.default_rng(1).integers(0, VOCAB, (25, LENGTH))
    with torch.no_grad():
        exact = reference(torch.tensor(tokens)).logits.numpy()
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)(torch.tensor(tokens)).logits
    positions = np.tile(np.arange(LENGTH), (25, 1))
    ours = our_logits(model, params, tokens, positions, np.ones_like(tokens)).argmax(-1)
    same = (ours == theirs.float().numpy().argmax(-1)).mean()
    ours_kept, theirs_kept = ((x == exact.argmax(-1)).mean() for x in (ours, theirs.float().numpy().argmax(-1)))
    with capsys.disabled():
        print(  # noqa: T201
            f"\n{type(model.cfg).__name__}, bfloat16: {same:.1%} of the likeliest tokens are torch's; "
            f"of those in float32 we keep {ours_kept:.1%}, torch {theirs_kept:.1%}"
        )
    assert same > 0.8 and ours_kept > theirs_kept - 0.03


def test_gradients_equal_autograd(pair):
    """Of a weighted sum of log-probs, through the trainer's own loss over the vocabulary; every tensor by its name."""
    _, reference, model, params = pair
    rng = np.random.default_rng(2)
    tokens, weights = rng.integers(0, VOCAB, (2, 24)), rng.normal(size=(2, 23)).astype(np.float32)
    reference.zero_grad()
    logp = torch.log_softmax(reference(torch.tensor(tokens)).logits[:, :-1], -1)
    chosen = logp.gather(-1, torch.tensor(tokens[:, 1:, None]))[..., 0]
    (torch.tensor(weights) * chosen).sum().backward()
    want = {name: p.grad.numpy() for name, p in reference.named_parameters()}

    @jax.jit
    @jax.grad
    def gradient(params):
        decoder, ids = model.bind(params), jnp.asarray(tokens)
        positions = jnp.broadcast_to(jnp.arange(24), ids.shape)
        ones = jnp.ones_like(ids)
        hidden = decoder(ids, positions, packed(ones, 0 * ones, positions)).hidden[:, :-1]
        cap = model.cfg.final_softcap
        logp, _ = vocab.token_logp(hidden, decoder.head_matrix, ids[:, 1:], softcap=cap)
        return jnp.sum(weights * logp)

    got = jax.device_get(gradient(params))
    want = split_experts(want)
    for entry in hf.entries(model.cfg):
        mine = entry.to_theirs(functools.reduce(operator.getitem, entry.path, got)[entry.index])
        theirs = want.pop(entry.name)
        error = np.linalg.norm(mine - theirs) / np.linalg.norm(theirs)
        assert error <= 1e-3, f"{entry.name}: {error:.1e}"
        assert np.linalg.norm(theirs) > 1e-3 or "bias" in entry.name, entry.name
    assert not want


def split_experts(grads):
    """Return gradients under the names of folders: `transformers` holds all experts of a layer in one array."""
    found = {}
    for name, grad in grads.items():
        prefix, _, kind = name.rpartition(".")
        if kind not in ("gate_up_proj", "down_proj") or not prefix.endswith("experts"):
            found[name] = grad
            continue
        for e, of_one in enumerate(grad):
            parts = np.split(of_one, 2) if kind == "gate_up_proj" else [of_one]
            names = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
            found |= {f"{prefix}.{e}.{n}.weight": part for n, part in zip(names, parts, strict=True)}
    return found


def test_two_hundred_greedy_tokens_equal_those_of_transformers(pair):
    _, reference, model, params = pair
    rng = np.random.default_rng(3)
    prompt = rng.integers(0, VOCAB, 29).astype(np.int32)
    cfg = SamplerConfig(max_context=256, slots=1, prefill_chunk=64, page_size=64)
    mesh = MeshSpec().build(jax.devices()[:1])
    sampler = Sampler(Engine(model, cfg, mesh, BATCH_AXES), params, 0, longest_prompt=0)

    try:
        got = asyncio.run(sampler.generate(prompt, SamplingParams(0.0, 200), (0,))).tokens
    finally:
        close(sampler)
    ids = torch.tensor(prompt[None].astype(np.int64))
    how = {"max_new_tokens": 200, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    want = reference.generate(ids, attention_mask=torch.ones_like(ids), **how)[0, len(prompt) :].numpy()
    np.testing.assert_array_equal(got, want)
    assert len(set(want.tolist())) > 10


# ---- and back


def stored(folder):
    """Return every tensor of a folder as its dtype, shape and bytes."""
    found = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as f:
            for name in f.keys():  # noqa: SIM118
                tensor = f.get_tensor(name)
                found[name] = (
                    tensor.dtype,
                    tuple(tensor.shape),
                    tensor.contiguous().view(torch.uint8).numpy().tobytes(),
                )
    return found


def read_quietly(folder, dtype):
    """Load with `transformers`, without a warning from it or from Python."""
    said = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
            AutoTokenizer.from_pretrained(folder)
            GenerationConfig.from_pretrained(folder)
    finally:
        logger.removeHandler(handler)
    assert said + [str(w.message) for w in caught] == []
    assert model.dtype == dtype
    return model


def test_folder_out_is_bit_equal_and_transformers_has_no_complaint(pair, tmp_path):
    folder, reference, model, params = pair
    assert (folder / hf.INDEX).exists()
    hf.save(tmp_path / "out", model, params, byte_tokenizer(), max_shard_bytes=60_000)
    assert (tmp_path / "out" / hf.INDEX).exists()
    assert all(f.stat().st_size < 65_000 for f in (tmp_path / "out").glob("*.safetensors"))
    assert stored(tmp_path / "out") == stored(folder)
    again = read_quietly(tmp_path / "out", torch.float32)
    mine, theirs = again.config.to_dict(), reference.config.to_dict()
    ours_to_say = {"bos_token_id", "eos_token_id", "pad_token_id", "_name_or_path", "_sliding_window_pattern"}
    differs = {k: (mine.get(k), v) for k, v in theirs.items() if k not in ours_to_say and mine.get(k) != v}
    assert not differs


def test_bfloat16_folder_out_is_bit_equal(pair, tmp_path):
    _, reference, *_ = pair
    reference.bfloat16().save_pretrained(tmp_path / "in")
    reference.float()
    model, params = load(tmp_path / "in")
    hf.save(tmp_path / "out", model, params, byte_tokenizer(), dtype="bfloat16")
    assert stored(tmp_path / "out") == stored(tmp_path / "in")
    read_quietly(tmp_path / "out", torch.bfloat16)
