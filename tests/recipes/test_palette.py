"""Reasoning Palette: the task, and the latent space."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rolljax.errors import ConfigError
from rolljax.model import hf
from rolljax.model.decoder import Model
from rolljax.model.families.qwen3 import Qwen3Config
from rolljax.model.prefixes import read_prefixes
from rolljax.recipes.palette import latents
from rolljax.recipes.palette.latents import LatentSpace
from rolljax.recipes.palette.styled_words import STYLES, StyledWords, backwards

SPACE = LatentSpace(latents=16, length=3, steps=400)


def test_words_backwards():
    assert [backwards("bad", style) for style in STYLES] == ["dab", "DAB", "412"]


def test_hints_tell_the_style_and_other_styles_earn_less():
    spec, env = StyledWords(hint_frac=0.5, other=0.2), StyledWords(hint_frac=0.5, other=0.2).make()
    hinted = 0
    for task in map(spec.task, range(200)):
        (asked,) = env.reset(task)
        hint, word = asked.content.split(":")
        hinted += bool(hint)
        style = spec.category(task)
        assert set(hint) <= set(STYLES[style])
        rewards = {}
        for name in STYLES:
            env.reset(task)
            rewards[name] = env.step(backwards(word, name)).reward
        env.reset(task)
        assert env.reference_answer() == spec.reference(task)
        assert rewards == {name: 1.0 if name == style else 0.2 for name in STYLES}
        assert env.step(word + "a").reward == 0
    assert 60 < hinted < 140


def test_unknown_styles_are_refused():
    with pytest.raises(ConfigError, match=r"StyledWords\.weights"):
        StyledWords(weights={"runes": 1.0})


def test_divergence_from_the_prior():
    found = latents.kl(jnp.array([1.0, 0.0]), jnp.log(jnp.array([1.0, 0.25])))
    assert float(found) == pytest.approx(0.818147, abs=1e-6)


def test_loss_is_reconstruction_and_divergence():
    rng = np.random.default_rng(0)
    params = {
        "encoder": latents._layers(jax.random.key(0), (8, 16, 4)),
        "decoder": latents._layers(jax.random.key(1), (2, 16, 8)),
    }
    h, noise = rng.normal(size=(5, 8)), rng.normal(size=(5, 2))
    mu, log_var = map(np.asarray, latents.encoded(params, h))
    again = np.asarray(latents._mlp(params["decoder"], mu + np.exp(log_var / 2) * noise))
    divergence = 0.5 * (mu**2 + np.exp(log_var) - 1 - log_var).sum(1)
    expected = (((h - again) ** 2).sum(1) + 0.3 * divergence).mean()
    assert float(latents.loss(params, h, noise, 0.3)) == pytest.approx(expected, rel=1e-5)


def test_latents_of_a_model(tmp_path, chat):
    """Latents have the norm of the embedding, and a seed."""
    model = Model(Qwen3Config(num_layers=1, init_std=0.1))
    hf.save(tmp_path / "hf", model, model.init(0), chat.tokenizer)
    argv = ["--model", str(tmp_path / "hf"), "--env", "styled_words", "--tasks", "300"]
    argv += ["--latents", "16", "--length", "3", "--steps", "100"]
    for name in ("a", "b"):
        assert latents.main([*argv, "--to", str(tmp_path / f"{name}.safetensors")]) == 0
    prefixes = read_prefixes(tmp_path / "a.safetensors", 64)
    assert prefixes == read_prefixes(tmp_path / "b.safetensors", 64)
    table = latents.embedding(tmp_path / "hf")
    norms = np.linalg.norm(prefixes.vectors_ZLD, axis=2)
    np.testing.assert_allclose(norms, np.linalg.norm(table, axis=1).mean(), rtol=1e-5)
    assert (prefixes.vectors_ZLD[:, :1] == prefixes.vectors_ZLD).all()
    each = latents.draw(latents.fit(table, SPACE), LatentSpace(latents=2, length=3, tiled=False), 1.0).vectors_ZLD
    assert not np.allclose(each[:, 0], each[:, 1])


def test_domains_are_apart_in_the_latent_space():
    rng = np.random.default_rng(0)
    domains = rng.integers(0, 3, 300)
    means = rng.normal(0, 0.3, (3, 64))[domains] + rng.normal(0, 0.1, (300, 64))
    z = latents.fit(means, SPACE).encode(means)
    assert separation(z, domains) > 3
    assert separation(z, rng.permutation(domains)) < 0.1


def separation(z, labels):
    """Return the variance between the means of groups over the variance inside them."""
    names = np.unique(labels)
    centres = np.stack([z[labels == name].mean(0) for name in names])
    inside = np.mean([((z[labels == name] - c) ** 2).sum(1).mean() for name, c in zip(names, centres, strict=True)])
    return float(((centres - centres.mean(0)) ** 2).sum(1).mean() / inside)
