"""Policies learn through the training service, several at once: by examples, by reward, by preference."""

import asyncio
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rolljax.model import hf
from rolljax.model.attention import packed
from rolljax.model.decoder import Model
from rolljax.model.families.qwen3 import Qwen3Config
from rolljax.model.tokenizer import byte_tokenizer

from .conftest import ROOT
from .training_service import TrainingService

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]
SEEDS = range(3)


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("example", ROOT / "examples" / "training_service.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def service(example, tmp_path_factory):
    """Return a service whose base model writes right sums about half of the time."""
    folder, model = tmp_path_factory.mktemp("base") / "model", Model(Qwen3Config(hidden_size=64, init_std=0.12))
    params, rule = jax.jit(lambda: model.init(0))(), optax.adam(3e-3)
    state, rng = jax.jit(rule.init)(params), np.random.default_rng(0)

    @jax.jit
    def step(params, state, ids):
        positions, same = jnp.tile(jnp.arange(6), (len(ids), 1)), jnp.ones_like(ids)

        def loss(params):
            decoder = model.bind(params)
            hidden = decoder(ids, positions, packed(same, 0 * same, positions)).hidden
            logp = jnp.take_along_axis(jax.nn.log_softmax(decoder.logits(hidden[:, 3:5])), ids[:, 4:, None], 2)
            return -logp.mean(), jnp.exp(logp[:, 0]).mean()

        (_, right), grads = jax.value_and_grad(loss, has_aux=True)(params)
        updates, state = rule.update(grads, state)
        return optax.apply_updates(params, updates), state, right

    for _ in range(200):
        sums = rng.integers(0, 10, (64, 2))
        ids = np.array([[*example.prompt(a, b), ord(example.sum_digit(a, b)), example.END] for a, b in sums], np.int32)
        params, state, right = step(params, state, ids)
        if right > 0.5:
            break
    hf.save(folder, model, params, byte_tokenizer())
    service = TrainingService(folder, tmp_path_factory.mktemp("service") / "kept", "--max_context", "64")
    yield service
    service.stop()


def test_policies_learn_by_reward_beside_one_that_learns_by_preference(service, example):
    client = service.client()

    async def run():
        policies = [service.policy(client, rank=16, seed=seed) for seed in (*SEEDS, 9)]
        *by_reward, by_preference = policies
        curves = (example.rewarded(p, np.random.default_rng(k), 28, 3e-3) for k, p in enumerate(by_reward))
        wins = example.preferred(by_preference, np.random.default_rng(9), 20, 2e-3)
        return await asyncio.gather(*curves, wins)

    *rewards, wins = asyncio.run(run())
    for curve in rewards:
        first, last = np.mean(curve[:2]), np.mean(curve[-4:])
        assert 0.3 < first < 0.7 and last > 0.75, [round(x, 2) for x in curve]
    assert wins[0] < 0.2 and np.mean(wins[-4:]) > 0.4, wins


@pytest.mark.sweep
def test_a_policy_learns_by_examples(service, example):
    client = service.client()
    policies = [service.policy(client, rank=16, seed=seed) for seed in SEEDS]

    async def run():
        return await asyncio.gather(
            *(example.supervised(p, np.random.default_rng(k), 40, 3e-3) for k, p in enumerate(policies))
        )

    for losses in asyncio.run(run()):
        assert np.mean(losses[-4:]) < 0.5 * losses[0], losses
