"""Latent prefixes: their vectors take the place of embeddings, and nothing else of the model changes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rolljax.errors import CheckpointError, ConfigError
from rolljax.model.attention import packed
from rolljax.model.axes import on_mesh
from rolljax.model.decoder import Model
from rolljax.model.families.qwen3 import Qwen3Config
from rolljax.model.prefixes import Prefixes, read_prefixes, save_prefixes
from rolljax.trainer.mesh import MeshSpec, param_shardings

CFG = Qwen3Config(vocab_size=32, num_layers=1, hidden_size=16, num_heads=2, num_kv_heads=1, head_dim=8, ffn_size=32)


@pytest.fixture(scope="module")
def prefixes():
    return Prefixes(np.random.default_rng(0).normal(0, 0.02, (4, 3, 16)).astype(np.float32))


def hidden(model, params, tokens):
    places = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    ones = jnp.ones_like(tokens)
    return model.bind(params)(tokens, places, packed(ones, 0 * ones, places, "xla")).hidden


def test_vectors_are_embeddings_of_ids_after_the_vocabulary(prefixes):
    """A model whose embedding has these vectors as further rows computes the same."""
    tokens = jnp.array([[32, 33, 34, 5, 6, 7], [41, 42, 43, 5, 6, 7]])
    model = Model(CFG, prefixes=prefixes)
    params = model.init(0)
    longer = Model(dataclasses.replace(CFG, vocab_size=32 + prefixes.num_ids))
    rows = {**params, "embed": jnp.concatenate([params["embed"], prefixes.rows])}
    np.testing.assert_array_equal(hidden(model, params, tokens), hidden(longer, rows, tokens))
    assert model.num_ids == 44 and model.bind(params).logits(jnp.zeros((1, 16))).shape == (1, 32)


def test_without_prefix_ids_nothing_changes(prefixes):
    tokens = jnp.array([[1, 2, 31]])
    plain, model = Model(CFG), Model(CFG, prefixes=prefixes)
    params = plain.init(0)
    assert jax.tree.structure(model.init(0)) == jax.tree.structure(params)
    grads = [jax.grad(lambda p, m=m: hidden(m, p, tokens).sum())(params) for m in (plain, model)]
    jax.tree.map(np.testing.assert_array_equal, *grads)


def test_prefix_ids_have_no_gradient(prefixes):
    model = Model(dataclasses.replace(CFG, tie_embeddings=False), prefixes=prefixes)
    grad = jax.grad(lambda p: hidden(model, p, jnp.array([[32, 35, 5]])).sum())(model.init(0))["embed"]
    assert np.flatnonzero(np.abs(grad).sum(1)).tolist() == [5]


def test_on_a_mesh(prefixes):
    if jax.device_count() < 2:
        pytest.skip("one device")
    tokens = jnp.array([[32, 33, 34, 5], [41, 42, 43, 5]])
    model, mesh = Model(CFG, prefixes=prefixes), MeshSpec(fsdp=2, data=1).build(jax.devices()[:2])
    params = model.init(0)
    placed = jax.device_put(params, param_shardings(mesh, model.axes(), model.abstract()))

    @jax.jit
    def run(params, tokens):
        with on_mesh(mesh):
            return hidden(model, params, tokens)

    np.testing.assert_allclose(run(placed, tokens), hidden(model, params, tokens), atol=1e-6)


def test_files(prefixes, tmp_path):
    file = tmp_path / "palette.safetensors"
    save_prefixes(file, prefixes)
    again = read_prefixes(file, 16)
    assert again == prefixes and hash(again) == hash(prefixes)
    assert Prefixes(prefixes.vectors_ZLD + 1) != prefixes
    with pytest.raises(ConfigError, match="hidden size is 32"):
        read_prefixes(file, 32)
    with pytest.raises(ConfigError, match="not a safetensors file"):
        read_prefixes(tmp_path / "absent.safetensors", 16)
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_prefixes(file, 16)
    save_prefixes(file, Prefixes(np.full((1, 1, 16), np.nan, np.float32)))
    with pytest.raises(ConfigError, match="not finite"):
        read_prefixes(file, 16)
