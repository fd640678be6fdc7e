"""What every algorithm must do. A new file in rolljax/trainer/algorithms is tested here without being asked."""

import dataclasses
import importlib
import inspect
import pkgutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rolljax.trainer import algorithms, masked
from rolljax.trainer.algorithms.base import Algorithm
from rolljax.trainer.batch import PackShape, Sample, TokenBatch, pack
from rolljax.trainer.state import fingerprint
from rolljax.trainer.update import gradients

pytestmark = pytest.mark.usefixtures("quick_compiles")
MODULES = {
    m.name: importlib.import_module(f"{algorithms.__name__}.{m.name}")
    for m in pkgutil.iter_modules(algorithms.__path__)
    if m.name != "base"
}
CLASSES = [
    c
    for module in MODULES.values()
    for c in vars(module).values()
    if inspect.isclass(c) and issubclass(c, Algorithm) and c.__module__ == module.__name__ and not inspect.isabstract(c)
]
each = pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)
B, T = 2, 6


def test_every_file_holds_an_algorithm():
    assert {c.__name__ for c in CLASSES} >= {"Grpo", "Sft"}
    assert {c.__module__.rsplit(".", 1)[-1] for c in CLASSES} == set(MODULES)


@each
def test_it_is_a_value(cls):
    """Frozen, hashable, equal by value: it is a static part of jitted programs."""
    algorithm = cls()
    assert algorithm == cls() and hash(algorithm) == hash(cls())
    assert algorithm.source in ("gold", "sampler")
    for field in dataclasses.fields(cls):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(algorithm, field.name, getattr(algorithm, field.name))
    with pytest.raises((dataclasses.FrozenInstanceError, TypeError)):
        algorithm.something_new = 1


@each
def test_its_docstring_says_what_it_is(cls):
    doc = cls.__doc__ or ""
    assert not doc.startswith(f"{cls.__name__}("), "the docstring is the one that dataclass writes"
    assert len(doc.split()) >= 8
    assert cls.source == "gold" or "arXiv" in doc or "doi" in doc


@each
def test_advantages_are_finite_and_leave_rewards_alone(cls):
    rng = np.random.default_rng(0)
    size = 1 if cls.source == "gold" else 5
    rewards = [rng.normal(size=size).astype(np.float32) for _ in range(4)]
    rewards += [np.zeros(size, np.float32), np.ones(size, np.float32), np.full(size, 0.1, np.float32)]
    copies = [r.copy() for r in rewards]
    got = cls().advantages(rewards)
    assert len(got) == len(rewards) and any(a is not None for a in got)
    for a in got:
        assert a is None or (a.shape == (size,) and np.isfinite(a).all())
    for r, copy in zip(rewards, copies, strict=True):
        np.testing.assert_array_equal(r, copy)


# ---- the objective alone --------------------------------------------------------------------------------------------


def token_batch(**arrays):
    """`[B, T]` arrays that an objective may look at; the rest is zero."""
    weights = arrays.get("weights", jnp.ones((B, T)))
    zeros = {n: jnp.zeros((B, T)) for n in TokenBatch.ARRAYS}
    one = jnp.float32(1)
    return TokenBatch(
        **{**zeros, "weights": weights, **arrays},
        num_micro=jnp.int32(1),
        num_tokens=weights.sum(),
        num_sequences=jnp.float32(B),
        temperature=one,
    )


@each
def test_on_policy_gradient_is_reinforce(cls):
    """d loss / d logp = -advantage * weight / num_tokens; supervised advantages are 1."""
    rng = np.random.default_rng(0)
    logp = jnp.float32(-rng.exponential(size=(B, T)))
    advantages = jnp.ones((B, T)) if cls.source == "gold" else jnp.float32(rng.normal(size=(B, T)))
    weights = jnp.float32(rng.choice([0, 0.5, 1.0], (B, T)))
    batch = token_batch(sampler_logp=logp, advantages=advantages, weights=weights)

    def loss(logp):
        return masked.total(cls().objective(logp, batch).loss, weights) / batch.num_tokens

    np.testing.assert_allclose(jax.grad(loss)(logp), -advantages * weights / weights.sum(), rtol=1e-5, atol=1e-8)


@each
def test_it_is_finite_however_far_the_policies_are_apart(cls):
    gap = jnp.linspace(-20, 20, B * T).reshape(B, T)
    for advantage in (-3.0, 0.0, 3.0):
        batch = token_batch(sampler_logp=jnp.full((B, T), -25.0), advantages=jnp.full((B, T), advantage))

        def loss(logp, batch=batch):
            return cls().objective(logp, batch).loss.sum()

        out = cls().objective(batch.sampler_logp + gap, batch)
        for name, value in {"loss": out.loss, **out.mean, **out.largest}.items():
            assert value.shape == (B, T) and jnp.isfinite(value).all(), name
        assert jnp.isfinite(jax.grad(loss)(batch.sampler_logp + gap)).all()


# ---- inside the update, with a real model ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def batch():
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 264, 5)

    def sample(n):
        tokens = np.concatenate([prompt, rng.integers(0, 264, n)]).astype(np.int32)
        sampled = np.arange(len(tokens)) >= 5
        logp = np.where(sampled, rng.normal(-5.6, 0.2, len(tokens)), 0).astype(np.float32)
        return Sample(tokens, sampled.astype(np.float32), logp, np.where(sampled, rng.normal(), 0).astype(np.float32))

    return pack([[sample(3), sample(7)], [sample(2), sample(4)]], PackShape(1, 2, 24), 1.0)


@pytest.fixture(scope="module")
def grads_of(model, params):
    """grads_of(class, batch), one compiled program for each class."""
    programs = {}

    def run(cls, batch):
        if cls not in programs:
            programs[cls] = jax.jit(lambda p, b: gradients(model, cls(), p, b))
        return programs[cls](params, batch)

    return run


@each
def test_zero_weights_give_exactly_zero(cls, grads_of, batch):
    for fill in (0.0, np.nan):
        empty = dataclasses.replace(
            batch,
            weights=np.zeros_like(batch.weights),
            advantages=np.full_like(batch.advantages, fill),
            sampler_logp=np.full_like(batch.sampler_logp, fill),
            num_tokens=np.float32(0),
        )
        grads, stats = grads_of(cls, empty)
        assert all((g == 0).all() for g in jax.tree.leaves(grads))
        assert stats["loss/total"] == 0 and all(jnp.isfinite(v) for v in stats.values())


@each
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nothing_under_a_zero_weight_counts(cls, grads_of, batch, bad):
    def poison(values):
        return np.where(batch.weights == 0, bad, values).astype(np.float32)

    poisoned = dataclasses.replace(batch, advantages=poison(batch.advantages), sampler_logp=poison(batch.sampler_logp))
    want = grads_of(cls, batch)
    assert fingerprint(grads_of(cls, poisoned)) == fingerprint(want)
    assert all(jnp.isfinite(g).all() for g in jax.tree.leaves(want))
    assert any((g != 0).any() for g in jax.tree.leaves(want[0]))
