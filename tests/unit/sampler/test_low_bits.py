"""Int8 weights and float8 keys and values: what is sampled, against a plain forward pass with rounded numbers."""

import asyncio
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rolljax.errors import ConfigError
from rolljax.model.attention import packed
from rolljax.model.decoder import Model
from rolljax.model.families.gemma3 import Gemma3Config
from rolljax.model.families.qwen3 import Qwen3Config
from rolljax.model.families.qwen3_moe import Qwen3MoeConfig
from rolljax.model.layers import LINEAR
from rolljax.model.lora import linear_maps
from rolljax.sampler.client import Sampler
from rolljax.sampler.engine import Engine
from rolljax.sampler.settings import SamplerConfig
from rolljax.trainer.mesh import BATCH_AXES, MeshSpec
from rolljax.trainer.publish import make_publish
from rolljax.types import SamplingParams

SHAPE = {"hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "ffn_size": 40, "init_std": 0.2}
FAMILIES = {
    "qwen3": Qwen3Config(**SHAPE, tie_embeddings=False),
    "gemma3": Gemma3Config(**SHAPE, sliding_window=7, global_every=2),
    "qwen3_moe": Qwen3MoeConfig(**SHAPE, num_experts=4, experts_per_token=2),
}
SIZES = {"slots": 4, "max_context": 96, "prefill_chunk": 32, "programs": "few"}


def rounded_weights(model, params):
    """Return the weights with each linear map rounded to 255 steps between the largest weights of an output."""
    layers = dict(params["layers"])
    for name in linear_maps(model.axes()):
        w = np.asarray(layers[name], np.float64)
        rows = w.reshape(len(w), np.prod(w.shape[1 : 1 + LINEAR[name]]), -1)
        step = np.abs(rows).max(1, keepdims=True) / 127
        layers[name] = (np.round(rows / step) * step).reshape(w.shape).astype(np.float32)
    return {**params, "layers": layers}


def log_probs(model, params, tokens, *, fp8):
    """Return the log-prob of every token but the first, from one pass over all of them."""
    ids = jnp.asarray(tokens)[None]
    same, positions = jnp.ones_like(ids), jnp.arange(ids.shape[1])[None]
    inner = packed(same, 0 * same, positions)

    def attend(q, k, v, cache, layer, window=None):
        if fp8:
            k, v = (jnp.asarray(np.asarray(x).astype(jnp.float8_e4m3fn).astype(np.float32)) for x in (k, v))
        return inner(q, k, v, cache, layer, window)

    decoder = model.bind(params)
    with jax.disable_jit():
        hidden = decoder(ids, positions, attend, unroll=True).hidden
        logits = jax.nn.log_softmax(decoder.logits(hidden[0, :-1]))
    return np.take_along_axis(np.asarray(logits), np.asarray(tokens)[1:, None], 1)[:, 0]


def prompts():
    rng = np.random.default_rng(3)
    return [rng.integers(0, 256, n).astype(np.int32) for n in (1, 9, 40, 40, 23, 61)]


def sample(model, params, *, num_devices=1, **settings):
    """Return the completion of every prompt, from the weights as they are published."""
    mesh = MeshSpec().build(jax.devices()[:num_devices])
    cfg = SamplerConfig(**SIZES | settings)
    sampler = Sampler(Engine(model, cfg, mesh, BATCH_AXES), make_publish(mesh, model)(params), 0, longest_prompt=0)

    async def run():
        asked = [sampler.generate(x, SamplingParams(1.0, 24), (i,)) for i, x in enumerate(prompts())]
        return await asyncio.gather(*asked)

    try:
        return asyncio.run(run())
    finally:
        sampler.close()


@pytest.mark.parametrize(
    ("family", "int8", "fp8"),
    [
        ("qwen3", True, False),
        ("qwen3", False, True),
        ("gemma3", True, True),
        pytest.param("qwen3_moe", True, True, marks=pytest.mark.slow),
        pytest.param("gemma3", False, True, marks=pytest.mark.slow),
    ],
)
def test_samples_are_those_of_rounded_numbers(family, int8, fp8):
    model = Model(FAMILIES[family], int8_sampler=int8)
    params = jax.jit(lambda: model.init(1))()
    settings = {"quantization": "int8" if int8 else "none", "kv_dtype": "fp8" if fp8 else "auto"}
    with_rounding, without = [], []
    rounded = rounded_weights(model, params) if int8 else params
    for prompt, answer in zip(prompts(), sample(model, params, **settings), strict=True):
        tokens, first = np.concatenate([prompt, answer.tokens]), len(prompt) - 1
        with_rounding.extend(answer.sampler_logp - log_probs(model, rounded, tokens, fp8=fp8)[first:])
        without.extend(answer.sampler_logp - log_probs(model, params, tokens, fp8=False)[first:])
    # a number near the middle of two float8 neighbours may be rounded either way: hence not all
    assert np.quantile(np.abs(with_rounding), 0.9) < 5e-5
    assert np.quantile(np.abs(without), 0.5) > 2e-4, "the test can tell"


@pytest.mark.parametrize(
    "how",
    [
        {"steps_per_dispatch": 3},
        {"pages": 12, "max_context": 96},
        {"prefill_chunk": 64, "num_devices": 2},
        {"speculate": 3},
    ],
    ids=str,
)
def test_float8_samples_do_not_depend_on_the_schedule(how):
    model = Model(FAMILIES["qwen3"], int8_sampler=True)
    params = jax.jit(lambda: model.init(1))()
    low = {"quantization": "int8", "kv_dtype": "fp8"}
    for a, b in zip(sample(model, params, **low), sample(model, params, **low, **how), strict=True):
        np.testing.assert_array_equal(a.tokens, b.tokens)


def test_a_model_and_a_sampler_that_disagree_are_refused():
    mesh = MeshSpec().build(jax.devices()[:1])
    model = Model(FAMILIES["qwen3"])
    with pytest.raises(ConfigError, match=r"SamplerConfig.quantization.*int8_sampler=True"):
        Engine(model, SamplerConfig(quantization="int8"), mesh, BATCH_AXES)
    with pytest.raises(ConfigError, match="SamplerConfig.quantization"):
        Engine(dataclasses.replace(model, int8_sampler=True), SamplerConfig(), mesh, BATCH_AXES)
