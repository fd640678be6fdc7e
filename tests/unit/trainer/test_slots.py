"""Several policies over one base: what each call computes is what a policy would get alone."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from rolljax.model.attention import packed
from rolljax.model.decoder import Model
from rolljax.model.families.gemma3 import Gemma3Config
from rolljax.model.families.qwen3 import Qwen3Config
from rolljax.model.lora import Lora, LoraSlots
from rolljax.trainer.mesh import MeshSpec
from rolljax.trainer.slots import LOSSES, Adam, Example, LossSettings, PolicyState, SlotTrainer, token_losses

SHAPE = {"hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "head_dim": 12, "ffn_size": 40, "init_std": 0.15}
FAMILIES = {
    "qwen3": Qwen3Config(**SHAPE),
    "gemma3": Gemma3Config(**SHAPE, sliding_window=5, global_every=2),  # logits with a cap are another path
}
SLOTS = LoraSlots(num=8, rank=4, alpha=6.0)
LORAS = (Lora(rank=4, alpha=6.0), Lora(rank=2, alpha=6.0), Lora(rank=3, alpha=6.0, targets=("q", "down")))


@functools.cache
def trainer(family="qwen3", **mesh):
    """Return the trainer of a family, and the weights of its base."""
    model = Model(FAMILIES[family], lora=SLOTS.lora)
    params = jax.jit(lambda: model.plain.init(0))()
    return SlotTrainer(MeshSpec(**mesh).build(), model, params, SLOTS, 256, micro_tok=128), params


def noisy(state, seed):
    """Return a policy whose B is not 0 where it has an adapter."""
    rng = np.random.default_rng(seed)
    layers = dict(state.adapters["layers"])
    for name, x in layers.items():
        is_used = np.any(np.asarray(layers[name[:-1] + "a"]) != 0, axis=(0, 1))
        noise = 0.1 * rng.normal(size=x.shape).astype(np.float32)
        layers[name] = x + noise * (is_used if name.endswith("_a") else is_used[:, None])
    return dataclasses.replace(state, adapters={"layers": layers})


def policies(one, num=3):
    """Return the states of policies of different ranks and maps."""
    return [noisy(one.new_policy(LORAS[k % len(LORAS)], seed=k), k) for k in range(num)]


def loaded(one, states):
    slots = one.empty()
    for k, state in enumerate(states):
        slots = one.put(slots, k, state)
    return slots


def example(slot, loss, size, seed, k=1):
    rng = np.random.default_rng(seed)
    shape = (size, k)
    tokens = rng.integers(0, 264, size).astype(np.int32)
    given = (
        {}
        if loss == "cross_entropy"
        else {
            "advantages": rng.normal(size=shape).astype(np.float32),
            "sampler_logp": (-5.5 + 0.4 * rng.normal(size=shape)).astype(np.float32),
        }
    )
    weights = rng.normal(size=shape) * (rng.random(shape) < 0.8)
    targets = rng.integers(0, 264, shape).astype(np.int32)
    return Example(
        slot, loss, tokens, targets, weights.astype(np.float32), settings=LossSettings(0.9, 1.3, 0.1), **given
    )


def many():
    """Return examples of three policies with all losses, of many lengths."""
    sizes = (3, 60, 17, 41, 1, 90, 64, 25, 33, 7, 12, 70, 5, 5, 19)
    return [example(i % 3, LOSSES[i % 5], size, i) for i, size in enumerate(sizes)]


def torch_losses(loss, logp, advantages, sampler_logp, settings):
    """Return the losses as Tinker's documentation writes them, in float64."""
    if loss == "cross_entropy":
        return -logp
    ratio = torch.exp(logp - sampler_logp)
    clipped = torch.clamp(ratio, settings.clip_low, settings.clip_high)
    if loss == "importance_sampling":
        return -(ratio * advantages)
    if loss == "ppo":
        return -torch.min(ratio * advantages, clipped * advantages)
    if loss == "cispo":
        return -(clipped.detach() * logp * advantages)
    return -(logp * advantages - 0.5 * settings.beta * (logp - sampler_logp) ** 2)


@pytest.mark.parametrize("loss", LOSSES)
def test_losses_and_slopes_are_those_of_the_formulas(loss):
    rng = np.random.default_rng(0)
    logp, advantages, sampler = (rng.normal(size=(2, 50, 3)) for _ in range(3))
    settings = LossSettings()
    wanted_logp = torch.tensor(logp, requires_grad=True)
    wanted = torch_losses(loss, wanted_logp, torch.tensor(advantages), torch.tensor(sampler), settings)
    wanted.sum().backward()

    def ours(logp):
        numbers = (jnp.float32(x) for x in (settings.clip_low, settings.clip_high, settings.beta))
        losses = token_losses(
            jnp.int32(LOSSES.index(loss)), logp, jnp.float32(advantages), jnp.float32(sampler), *numbers
        )
        return losses.sum(), losses

    slope, losses = jax.grad(ours, has_aux=True)(jnp.float32(logp))
    np.testing.assert_allclose(losses, wanted.detach(), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(slope, wanted_logp.grad, rtol=1e-5, atol=1e-5)


def alone(one, params, state, examples):
    """Return log-probs of each example, and the gradient of their policy, from plain weights `W + A B` and one example
    at a time."""
    plain, factor = one.model.plain, float(state.scale)

    def total(adapters):
        layers, loss, found = dict(params["layers"]), 0.0, []
        for name in {key[:-2] for key in adapters["layers"]}:
            a, b = adapters["layers"][f"{name}_a"], adapters["layers"][f"{name}_b"]
            layers[name] = layers[name] + factor * jnp.einsum("lir,lro->lio", a, b).reshape(layers[name].shape)
        decoder = plain.bind({**params, "layers": layers})
        for e in examples:
            same = jnp.ones((1, len(e.tokens)), jnp.int32)
            positions = jnp.arange(len(e.tokens))[None]
            hidden = decoder(jnp.asarray(e.tokens)[None], positions, packed(same, 0 * same, positions)).hidden
            logp = jnp.take_along_axis(jax.nn.log_softmax(decoder.logits(hidden[0])), jnp.asarray(e.targets), 1)
            zero = jnp.zeros_like(logp)
            given = [zero if x is None else jnp.asarray(x) for x in (e.advantages, e.sampler_logp)]
            numbers = (e.settings.clip_low, e.settings.clip_high, e.settings.beta)
            loss += (e.weights * token_losses(jnp.int32(LOSSES.index(e.loss)), logp, *given, *numbers)).sum()
            found.append(logp)
        return loss, found

    return jax.jit(jax.value_and_grad(total, has_aux=True))(state.adapters)


@pytest.mark.parametrize("family", ["qwen3", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_policies_that_share_rows_get_what_each_would_get_alone(family):
    one, params = trainer(family)
    states = policies(one, SLOTS.num)
    sizes = (5, 40, 17, 5, 90, 17, 40, 5, 40)
    examples = [example(i % SLOTS.num, LOSSES[i % 5], size, i) for i, size in enumerate(sizes)]
    slots, outputs = one.forward_backward(loaded(one, states), examples)
    for k, state in enumerate(states):
        mine = [i for i, e in enumerate(examples) if e.slot == k]
        (loss, logps), grads = alone(one, params, state, [examples[i] for i in mine])
        for i, logp in zip(mine, logps, strict=True):
            np.testing.assert_allclose(outputs[i].logp, logp, atol=2e-5)
        assert sum(outputs[i].loss for i in mine) == pytest.approx(float(loss), rel=1e-5, abs=1e-5)
        for name, found in one.take(slots, k).grads["layers"].items():
            np.testing.assert_allclose(found, grads["layers"][name], rtol=1e-4, atol=1e-4, err_msg=f"{k} {name}")


def test_calls_add_up_and_a_forward_call_adds_nothing():
    one, _ = trainer()
    states, examples = policies(one), many()
    slots, together = one.forward_backward(loaded(one, states), examples)
    apart, outputs = loaded(one, states), []
    for part in (examples[:4], examples[4:9], examples[9:]):
        apart, forward = one.forward_backward(apart, part, backward=False)
        apart, found = one.forward_backward(apart, part)
        outputs += found
        for a, b in zip(forward, found, strict=True):
            np.testing.assert_allclose(a.logp, b.logp, atol=1e-5)
    for a, b in zip(together, outputs, strict=True):
        np.testing.assert_allclose(a.logp, b.logp, atol=1e-5)
    for a, b in zip(jax.tree.leaves(slots.grads), jax.tree.leaves(apart.grads), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_several_targets_for_a_token():
    one, params = trainer()
    state = policies(one)[0]
    examples = [example(0, "cross_entropy", 9, 1, k=3), example(0, "cross_entropy", 5, 2)]
    slots, outputs = one.forward_backward(loaded(one, [state]), examples)
    (_, logps), grads = alone(one, params, state, examples)
    for found, logp in zip(outputs, logps, strict=True):
        assert found.logp.shape == logp.shape
        np.testing.assert_allclose(found.logp, logp, atol=2e-5)
    for name, found in one.take(slots, 0).grads["layers"].items():
        np.testing.assert_allclose(found, grads["layers"][name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("clip_norm", [0.0, 0.5])
def test_a_step_is_torchs_adamw_and_leaves_the_other_policies_alone(clip_norm):
    one, _ = trainer()
    slots, examples = loaded(one, policies(one)), many()
    before = [jax.device_get(one.take(slots, k)) for k in range(3)]
    weights = {n: torch.tensor(np.array(x), requires_grad=True) for n, x in before[1].adapters["layers"].items()}
    for rate, beta2 in ((1e-2, 0.95), (3e-3, 0.9), (1e-2, 0.99)):  # other settings at each step
        slots, _ = one.forward_backward(slots, examples)
        grads = jax.device_get(one.take(slots, 1).grads["layers"])
        for name, x in weights.items():
            x.grad = torch.tensor(np.array(grads[name]))
        norm = float(torch.sqrt(sum((x.grad**2).sum() for x in weights.values())))
        if clip_norm:
            for x in weights.values():
                x.grad *= min(1.0, clip_norm / norm)
        if rate == 1e-2 and beta2 == 0.95:
            theirs = torch.optim.AdamW(weights.values(), eps=1e-12)
        theirs.param_groups[0].update(lr=rate, betas=(0.9, beta2), weight_decay=0.1)
        theirs.step()
        slots, found = one.optimizer_step(slots, 1, Adam(rate, 0.9, beta2, 1e-12, 0.1, clip_norm))
        assert found["finite"] == 1 and found["grad_norm"] == pytest.approx(norm, rel=1e-5)
    after = [jax.device_get(one.take(slots, k)) for k in range(3)]
    for name, x in weights.items():
        np.testing.assert_allclose(after[1].adapters["layers"][name], x.detach(), rtol=1e-4, atol=1e-5)
        assert not after[1].grads["layers"][name].any()
    assert after[1].num_steps == 3
    for k in (0, 2):
        for a, b in zip(jax.tree.leaves(before[k].adapters), jax.tree.leaves(after[k].adapters), strict=True):
            np.testing.assert_array_equal(a, b)


def test_columns_beyond_a_lower_rank_and_maps_without_adapter_stay_zero():
    one, _ = trainer()
    slots, examples = loaded(one, policies(one)), many()
    for _ in range(2):
        slots, _ = one.forward_backward(slots, examples)
        for k in range(3):
            slots, _ = one.optimizer_step(slots, k, Adam(1e-2, weight_decay=0.1))
    second, third = (jax.device_get(one.take(slots, k).adapters)["layers"] for k in (1, 2))
    for name, x in second.items():
        beyond = x[:, :, 2:] if name.endswith("_a") else x[:, 2:]
        assert not beyond.any() and x.any()
    assert not any(third[f"{name}_{part}"].any() for name in ("k", "v", "o", "gate", "up") for part in "ab")
    cut = SLOTS.cut(one.take(slots, 1).adapters, 2)
    for name, x in SLOTS.padded(cut)["layers"].items():
        np.testing.assert_array_equal(x, second[name])


def test_what_is_not_finite_changes_no_policy():
    one, _ = trainer()
    slots = loaded(one, policies(one))
    before = jax.device_get(one.take(slots, 0))
    bad = dataclasses.replace(many()[0], weights=np.full((3, 1), np.inf, np.float32))
    slots, _ = one.forward_backward(slots, [bad, *many()])
    slots, found = one.optimizer_step(slots, 0, Adam())
    after = jax.device_get(one.take(slots, 0))
    assert not found["finite"] and after.num_steps == 0
    for name in ("adapters", "mu", "nu"):
        for a, b in zip(jax.tree.leaves(getattr(before, name)), jax.tree.leaves(getattr(after, name)), strict=True):
            np.testing.assert_array_equal(a, b)
    assert not any(x.any() for x in jax.tree.leaves(after.grads))


def test_a_call_of_a_known_size_compiles_nothing():
    one, _ = trainer()
    slots = loaded(one, policies(one))
    sizes = lambda: [f._cache_size() for f in (one._backward, one._step)]  # noqa: E731
    for examples in (many(), many()[:2], many()[4:5]):
        slots, _ = one.forward_backward(slots, examples)
    slots, _ = one.optimizer_step(slots, 0, Adam())
    known = sizes()
    rng = np.random.default_rng(0)
    for i in range(12):
        some = [dataclasses.replace(e, slot=int(rng.integers(3))) for e in many()]
        slots, _ = one.forward_backward(slots, some[: 1 + i])
        slots, _ = one.optimizer_step(slots, i % 3, Adam(lr=0.001 * i, beta1=0.8, clip_norm=i))
    grown = [b - a for a, b in zip(known, sizes(), strict=True)]
    assert grown[0] <= 3 and grown[1] == 0, "programs depend on more than the sizes of rows"


def test_a_state_goes_through_a_slot_unchanged():
    one, _ = trainer()
    state = policies(one)[2]
    slots = one.put(one.put(one.empty(), 0, policies(one)[0]), 2, state)
    for field in dataclasses.fields(PolicyState):
        for a, b in zip(*(jax.tree.leaves(getattr(s, field.name)) for s in (state, one.take(slots, 2))), strict=True):
            np.testing.assert_array_equal(a, b)


def test_a_mesh_changes_nothing():
    if len(jax.devices()) < 4:
        pytest.skip("needs four devices")
    one, _ = trainer()
    split, _ = trainer(fsdp=2, tensor=2)
    results = [t.forward_backward(loaded(t, policies(t)), many()) for t in (one, split)]
    for a, b in zip(results[0][1], results[1][1], strict=True):
        np.testing.assert_allclose(a.logp, b.logp, atol=2e-5)
    for a, b in zip(*(jax.tree.leaves(slots.grads) for slots, _ in results), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
