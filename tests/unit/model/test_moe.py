"""Mixtures of experts: every token gets what its own experts make of it, however uneven the choice and whatever the
mesh; how even it is, is counted; what the sampler chose can be chosen again."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from rolljax import metrics
from rolljax.envs.games.frozen_lake import FrozenLake
from rolljax.errors import CheckpointError, ConfigError
from rolljax.model import hf, moe
from rolljax.model.axes import on_mesh
from rolljax.model.decoder import Model
from rolljax.model.families.qwen3 import Qwen3Config
from rolljax.model.families.qwen3_moe import Qwen3MoeConfig
from rolljax.model.folder import Folder
from rolljax.model.tokenizer import byte_tokenizer
from rolljax.recipe import Phase, Recipe
from rolljax.run.preflight import resolve
from rolljax.sampler.engine import Engine
from rolljax.sampler.settings import SamplerConfig
from rolljax.trainer.algorithms.sft import Sft
from rolljax.trainer.batch import PackShape, Sample, pack
from rolljax.trainer.forward import NumShards, policy_outputs
from rolljax.trainer.mesh import BATCH_AXES, MeshSpec, param_shardings, put_batch
from rolljax.trainer.update import gradients
from rolljax.types import Key, Task, Trajectory, Turn

N, D, E, F, K = 40, 16, 8, 12, 2
ROUTING = moe.Routing(E, K, normalise=True, aux_coef=0.01)


@pytest.fixture(scope="module")
def inputs():
    """Return tokens, the weights of their choices, and experts."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    experts = (normal(*shape) / shape[1] ** 0.5 for shape in ((E, D, F), (E, D, F), (E, F, D)))
    return normal(N, D), jnp.abs(normal(N, K)), moe.ExpertWeights(*experts)


def choices(kind):
    rng = np.random.default_rng(1)
    if kind == "one expert":  # that one and a second, by all
        return np.tile([5, 4], (N, 1))
    chosen = np.array([rng.permutation(E)[:K] for _ in range(N)])
    return np.where(chosen < 3, (chosen + 3) % E, chosen) if kind == "some unused" else chosen


def dense(x, weights, experts, chosen):
    """Apply all experts to all tokens, in order."""
    h = jax.nn.silu(jnp.einsum("nd,edf->enf", x, experts.gate)) * jnp.einsum("nd,edf->enf", x, experts.up)
    every = jnp.einsum("enf,efd->end", h, experts.down)
    return sum(every[chosen[:, j], jnp.arange(len(x))] * weights[:, j, None] for j in range(chosen.shape[1]))


def scalar(fn):
    """Return a function to a number whose gradient depends on every output."""
    target = np.random.default_rng(2).normal(size=(N, D))
    return lambda *args: jnp.sum(jnp.sin(fn(*args)) * target)


def near(got, want, rel=1e-5):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=rel * float(jnp.abs(b).max()) + 1e-12)


each_choice = pytest.mark.parametrize("kind", ["even", "some unused", "one expert"])


@pytest.mark.sampled(1)
@each_choice
@pytest.mark.parametrize("parts", [1, 4])
def test_experts_compute_what_all_experts_on_all_tokens_would(inputs, kind, parts, monkeypatch):
    """Also in parts: each device has a few experts, and more rounds than one where most tokens come to it."""
    monkeypatch.setattr(moe, "ROW_TILES", (8, 8))
    chosen, own = jnp.asarray(choices(kind)), E // parts

    def in_parts(x, weights, experts):
        each = [jax.tree.map(lambda w, p=p: w[p * own : (p + 1) * own], experts) for p in range(parts)]
        return sum(moe._sum_over_experts(parts, x, weights, e, chosen - p * own) for p, e in enumerate(each))

    needed = [moe._Rounds.of(chosen - p * own, own, parts).needed for p in range(parts)]
    assert max(map(int, needed)) == (1 if parts == 1 else {"even": 1, "some unused": 2, "one expert": 3}[kind])
    got = jax.jit(jax.value_and_grad(scalar(in_parts), argnums=(0, 1, 2)))(*inputs)
    want = jax.value_and_grad(scalar(lambda *a: dense(*a, chosen)), argnums=(0, 1, 2))(*inputs)
    near(got, want)


@pytest.mark.slow
@pytest.mark.sampled(1)
@each_choice
def test_the_kernel_of_tpus_gives_the_same(inputs, kind, monkeypatch):
    """Interpreted, so that unwritten memory is NaN: rows that belong to no expert of this device."""
    chosen, half = jnp.asarray(choices(kind)), jax.tree.map(lambda w: w[: E // 2], inputs[2])
    fn = scalar(lambda x, weights, experts: moe._sum_over_experts(2, x, weights, experts, chosen))
    want = jax.value_and_grad(fn, argnums=(0, 1, 2))(*inputs[:2], half)
    monkeypatch.setattr(moe, "grouped_matmul", moe._megablox)
    with pltpu.force_tpu_interpret_mode():
        got = jax.value_and_grad(fn, argnums=(0, 1, 2))(*inputs[:2], half)
    near(got, want)


@pytest.mark.sampled(1)
@each_choice
def test_experts_are_read_among_those_of_all_layers(inputs, kind, monkeypatch):
    """The sampler's way: by `ragged_dot`, and by the kernel of TPUs, interpreted."""
    chosen, layers = jnp.asarray(choices(kind)), 3
    for layer in range(layers):
        one = jax.tree.map(lambda w: w[: E // 2], inputs[2])
        stack = one.each(lambda w, layer=layer: jnp.full((layers, *w.shape), jnp.nan).at[layer].set(w))
        stack = stack._replace(layer=jnp.int32(layer))
        fn = jax.jit(lambda experts: moe._sum_over_experts(2, *inputs[:2], experts, chosen))
        want = fn(one)
        np.testing.assert_allclose(fn(stack), want, atol=1e-6)
        with monkeypatch.context() as patch, pltpu.force_tpu_interpret_mode():
            patch.setattr(moe, "grouped_matmul", moe._megablox)
            fn = jax.jit(lambda experts: moe._sum_over_experts(2, *inputs[:2], experts, chosen))
            np.testing.assert_allclose(fn(stack), want, atol=1e-5)


def test_router_takes_the_likeliest_and_what_it_is_told():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(1, 5, E)), jnp.float32)
    law = np.asarray(jax.nn.softmax(logits))
    for normalise in (True, False):
        routing = dataclasses.replace(ROUTING, normalise=normalise)
        (chosen, probs), weights = routing.choose(logits, None)
        np.testing.assert_array_equal(chosen, np.argsort(-law)[..., :K])
        want = np.sort(law)[..., : -K - 1 : -1]
        np.testing.assert_allclose(weights, want / (want.sum(-1, keepdims=True) if normalise else 1), rtol=1e-6)
        np.testing.assert_allclose(probs, law, rtol=1e-6)
        given = np.full((1, 5, K), -1, np.int8)
        given[0, 2] = [7, 1]
        (told, _), told_weights = routing.choose(logits, jnp.asarray(given))
        np.testing.assert_array_equal(told[0, 2], [7, 1])
        np.testing.assert_array_equal(np.delete(told, 2, axis=1), np.delete(chosen, 2, axis=1))
        want = law[0, 2, [7, 1]]
        np.testing.assert_allclose(told_weights[0, 2], want / (want.sum() if normalise else 1), rtol=1e-6)


# ---- in a model, on a mesh ------------------------------------------------------------------------------------------

MODEL = Model(
    Qwen3MoeConfig(
        vocab_size=96,
        hidden_size=32,
        head_dim=8,
        num_experts=E,
        experts_per_token=K,
        expert_ffn_size=24,
        init_std=0.3,
        router_aux_coef=0.5,
    )
)
MESHES = {
    "8 data": MeshSpec(data=8),
    "2 data x 2 expert x 2 tensor": MeshSpec(data=2, expert=2, tensor=2),
    "4 fsdp x 2 expert": MeshSpec(data=1, fsdp=4, expert=2),
}


def trajectory(rng, sibling, turns):
    """Return a trajectory. turns: observed tokens, sampled tokens, and whether their experts are known."""
    made = []
    for seen, said, known in turns:
        experts = rng.integers(0, E, (said, 2, K)).astype(np.int8) if known else None
        ids, tokens = rng.integers(0, 96, seen).astype(np.int32), rng.integers(0, 96, said).astype(np.int32)
        logp = np.full(said, -4.0, np.float32)
        made.append(Turn(ids, tokens, logp, np.zeros(said, np.int32), "stop", 0.0, "", experts=experts))
    return Trajectory(Key(0, 0, sibling), Task("e", 0, "t"), tuple(made), 0.0, {}, True, "ok")


UNKNOWN = np.full((2, K), -1, np.int8)


@pytest.fixture(scope="module")
def batch():
    """Return two micro-batches of uneven rows, with some of their experts given."""
    rng = np.random.default_rng(0)
    lots = [[(5, 9, True)], [(3, 6, False), (4, 3, True)], [(9, 14, True)], [(2, 20, False)]]
    groups = [[Sample.of(trajectory(rng, 0, turns), UNKNOWN)] for turns in lots * 3]
    return pack(groups, PackShape(2, 8, 24), 1.0).batch


@pytest.fixture(scope="module")
def params():
    return jax.jit(lambda: MODEL.init(0))()


@pytest.fixture(scope="module")
def on_one(batch, params):
    return jax.jit(lambda p, b: gradients(MODEL, Sft(), p, b))(params, batch)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", MESHES)
def test_loss_and_gradients_are_the_same_on_every_mesh(batch, params, on_one, name):
    mesh = MESHES[name].build(jax.devices())
    shardings = param_shardings(mesh, MODEL.axes(), MODEL.abstract())
    assert ("expert" in str(shardings["layers"]["gate"].spec)) == ("expert" in name)

    def update(params, batch):
        with on_mesh(mesh):
            return gradients(MODEL, Sft(), params, batch, shards=NumShards.of(mesh))

    grads, stats = jax.jit(update)(jax.device_put(params, shardings), put_batch(mesh, batch))
    assert float(stats["loss/total"]) == pytest.approx(float(on_one[1]["loss/total"]), abs=1e-5)
    for part in ("balance", "max_load_frac", "entropy_nat", "unused_n", "replayed_frac"):
        assert float(stats[f"router/{part}"]) == pytest.approx(float(on_one[1][f"router/{part}"]), rel=1e-5)
    near(jax.device_get(grads), jax.device_get(on_one[0]), 1e-4)


def test_the_balance_is_in_the_loss_by_each_micro_batch_share(batch, params, on_one):
    """And the rest is the loss of a model without it."""

    @jax.jit
    def of_one(rows):
        policy = policy_outputs(MODEL, params, rows)
        return -jnp.sum(policy.logp * rows.scale), policy.load.balance_loss(), policy.load.tokens

    rows = [dataclasses.replace(batch, **{n: a[m] for n, a in batch.arrays().items()}) for m in range(2)]
    loss, balance, tokens = np.transpose([of_one(r) for r in rows])
    np.testing.assert_array_equal(tokens, (batch.segment_ids > 0).sum((1, 2)))
    assert tokens[0] > tokens[1] > 0 and batch.num_computed == tokens.sum()
    want = loss.sum() + 0.5 * (balance * tokens).sum() / tokens.sum()
    assert float(on_one[1]["loss/total"]) == pytest.approx(want, rel=1e-5)


def test_choices_stand_at_their_tokens(batch):
    """Through turns of which not all are known, packing and siblings."""
    rng = np.random.default_rng(3)
    made = [
        trajectory(rng, 0, [(5, 4, True), (2, 3, False), (1, 2, True)]),
        trajectory(rng, 1, [(6, 0, True)]),
        trajectory(rng, 2, []),
    ]
    sample = Sample.of(made[0], UNKNOWN)
    packed = pack([[sample]], PackShape(1, 1, 24), 1.0)
    chosen = packed.batch.expert_ids_Lk[0, 0]
    assert chosen.dtype == np.int8
    turns = made[0].turns
    want = np.full((24, 2, K), -1)
    want[5:9], want[15:17] = turns[0].experts, turns[2].experts
    np.testing.assert_array_equal(chosen, want)
    assert Sample.of(made[1], UNKNOWN).columns["expert_ids_Lk"].shape == (0, 2, K)
    assert "expert_ids_Lk" not in Sample.of(made[0]).columns
    assert batch.expert_ids_Lk.max() > 0


# ---- how evenly they are used ---------------------------------------------------------------------------------------


def load(chosen, probs, counted):
    """Return the metrics of two layers that do the same."""
    mixture = moe.ExpertRouting(*(jnp.stack([jnp.asarray(a)] * 2) for a in (chosen, probs)))
    return moe.Load.of(mixture, jnp.asarray(counted)).metrics(ROUTING)


def test_metrics_of_even_and_of_one_sided_use():
    even = np.stack([np.arange(16) % E, (np.arange(16) + 3) % E], axis=-1).reshape(2, 8, K)
    flat = np.full((2, 8, E), 1 / E, np.float32)
    found = load(even, flat, np.ones((2, 8), bool))
    want = {"balance": 1, "max_load_frac": 1 / E, "entropy_nat": np.log(E), "unused_n": 0, "replayed_frac": 0}
    assert {k: float(v) for k, v in found.items()} == pytest.approx({f"router/{k}": v for k, v in want.items()})
    assert set(found) <= set(metrics.NAMES)
    # padding would have evened it out
    chosen, probs = np.where(np.arange(8)[:, None] < 4, [0, 1], even), flat.copy()
    probs[:, :4] = np.eye(E)[0]
    found = load(chosen, probs, np.tile(np.arange(8) < 4, (2, 1)))
    want = {"balance": E / K, "max_load_frac": 1 / K, "entropy_nat": 0, "unused_n": 2 * (E - 2), "replayed_frac": 0}
    assert {k: float(v) for k, v in found.items()} == pytest.approx({f"router/{k}": v for k, v in want.items()})
    assert metrics.check_row({k: float(v) for k, v in found.items()}) == []


# ---- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bad", [{"experts_per_token": 9}, {"experts_per_token": 0}, {"router_aux_coef": -1.0}], ids=str
)
def test_a_routing_that_cannot_be_is_refused(bad):
    with pytest.raises(ConfigError, match=next(iter(bad))):
        Qwen3MoeConfig(**bad)


@pytest.mark.parametrize("bad", [{"mlp_only_layers": [0]}, {"decoder_sparse_step": 2}], ids=str)
def test_folders_with_dense_layers_are_refused(bad):
    cfg = Qwen3MoeConfig()
    fields = {**cfg.to_folder(), **bad}
    with pytest.raises(CheckpointError, match=next(iter(bad))):
        Qwen3MoeConfig.from_folder(Folder("config.json", fields))
    assert Qwen3MoeConfig.from_folder(Folder("config.json", dict(cfg.to_folder()))) == cfg


def test_there_is_nothing_to_record_without_experts():
    mesh = MeshSpec().build(jax.devices()[:1])
    with pytest.raises(ConfigError, match="record_experts"):
        Engine(Model(Qwen3Config()), SamplerConfig(record_experts=True), mesh, BATCH_AXES)


@pytest.mark.parametrize(
    ("model", "changes", "says"),
    [
        (Qwen3Config(), {"router_aux_coef": 0.1}, "has no experts"),
        (Qwen3MoeConfig(), {"router_aux_coef": 0.1}, "set Qwen3MoeConfig.router_aux_coef"),
        (Qwen3Config(), {"sampler": SamplerConfig(record_experts=True)}, "record_experts.* has no experts"),
    ],
)
def test_a_recipe_with_settings_of_experts_in_the_wrong_place_is_refused(model, changes, says):
    phase = Phase("sft", Sft(), 1, prompts_per_step=8)
    recipe = Recipe(FrozenLake(), (phase,), model=model, **changes)
    with pytest.raises(ConfigError, match=says):
        resolve(recipe, jax.devices()[:1])


def test_the_balance_of_a_folder_can_be_set(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(hf.write_config(MODEL.cfg, byte_tokenizer())))
    phase = Phase("sft", Sft(), 1, prompts_per_step=8)
    recipe = Recipe(FrozenLake(), (phase,), model=str(tmp_path), router_aux_coef=0.0)
    assert resolve(recipe, jax.devices()[:1]).model.cfg.routing.aux_coef == 0


def test_experts_that_do_not_divide_over_their_axis_are_refused():
    mesh = MeshSpec(data=1, expert=8).build(jax.devices())
    model = Model(Qwen3MoeConfig(num_experts=12, hidden_size=64))
    with pytest.raises(ConfigError, match="experts dimension of 12"):
        param_shardings(mesh, model.axes(), model.abstract())
