"""Adapters: the function they compute, the gradient they get, what stays as it was, and what is refused."""

import dataclasses
import functools
import re

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
from rolljax.model.lora import Adapted, Lora, scale_of
from rolljax.trainer.algorithms.ppo import Ppo
from rolljax.trainer.algorithms.reward_model import RewardModel
from rolljax.trainer.algorithms.sft import Sft
from rolljax.trainer.batch import PackShape
from rolljax.trainer.critic import Critic
from rolljax.trainer.mesh import MeshSpec, param_shardings, put_batch
from rolljax.trainer.optimizer import Adafactor, AdamW, Lion, Muon
from rolljax.trainer.phase_trainer import PhaseTrainer
from rolljax.trainer.publish import make_publish
from rolljax.trainer.state import fingerprint
from tests.synthetic import groups_of, samples_of

SHAPE = {"hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "head_dim": 12, "ffn_size": 40, "init_std": 0.15}
FAMILIES = {
    "qwen3": Qwen3Config(**SHAPE),
    "gemma3": Gemma3Config(**SHAPE, sliding_window=5, global_every=2),
    "qwen3_moe": Qwen3MoeConfig(**SHAPE, num_experts=4, experts_per_token=2),
}
RANK, ALPHA = 3, 5.0
LORA = Lora(rank=RANK, alpha=ALPHA)
MAPS = ("q", "k", "v", "o", "gate", "up", "down")
ROWS = PackShape(3, 8, 64)


def model_of(name="qwen3", dtype="float32", **lora):
    return Model(FAMILIES[name], dtype, lora=dataclasses.replace(LORA, **lora))


def noisy(adapters, seed=5, std=0.1):
    """Return adapters in the middle of a training, with a B that is not 0."""
    leaves, tree = jax.tree.flatten(adapters)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    return tree.unflatten([x + std * jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)])


@functools.cache
def weights(name="qwen3"):
    """Return a plain decoder's weights on the host."""
    return jax.device_get(jax.jit(lambda: Model(FAMILIES[name]).init(0))())


def tokens(length=12):
    ids = jax.random.randint(jax.random.key(1), (2, length), 0, 264)
    return ids, jnp.tile(jnp.arange(length), (2, 1)), jnp.ones((2, length), jnp.int32)


def logits_of(model, params):
    ids, positions, segments = tokens()
    decoder = model.bind(params)
    return decoder.logits(decoder(ids, positions, packed(segments, 0 * segments, positions)).hidden)


def explicit(params, adapters, factor=ALPHA / RANK):
    """Return the decoder with `W + A B factor` in place of W, computed independently."""
    layers = dict(params["layers"])
    for name in {key[:-2] for key in adapters["layers"]}:
        a, b = adapters["layers"][f"{name}_a"], adapters["layers"][f"{name}_b"]
        layers[name] = layers[name] + factor * jnp.einsum("lir,lro->lio", a, b).reshape(layers[name].shape)
    return {**params, "layers": layers}


# ---- the function and its gradient ----------------------------------------------------------------------------------


def test_gradients_are_those_of_the_explicit_sum():
    model, params = model_of(), weights()
    adapters = noisy(model.init(7))
    loss = lambda logits: jnp.sum(jnp.sin(3 * logits))  # noqa: E731

    @jax.jit
    def both(params, adapters):
        base = model.base(params)
        ours = jax.value_and_grad(lambda a: loss(logits_of(model, model.full_params(a, base))))(adapters)
        theirs = jax.value_and_grad(lambda a: loss(logits_of(model.plain, explicit(params, a))))(adapters)
        return ours, theirs, logits_of(model.plain, params)

    (value, grads), (want, want_grads), plain = both(params, adapters)
    assert abs(value - want) < 1e-4 * abs(want) + 1e-3 and abs(value - loss(plain)) > 1
    assert grads["layers"].keys() == {f"{m}_{p}" for m in model.lora.maps(model.plain.axes()) for p in "ab"}
    for key, want in want_grads["layers"].items():
        got = grads["layers"][key]
        assert jnp.abs(want).max() > 0.1, key
        np.testing.assert_allclose(got, want, atol=1e-5 * float(jnp.abs(want).max()), rtol=0, err_msg=key)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["gemma3", "qwen3_moe"])
def test_fresh_adapters_change_nothing(name):
    model = model_of(name)

    @jax.jit
    def three(params):
        base, fresh = model.base(params), model.init(3)
        whole = [model.full_params(fresh, base), Adapted(base, None)]
        return fresh, [logits_of(model.plain, params), *(logits_of(model, w) for w in whole)]

    fresh, (plain, adapted, off) = three(weights(name))
    np.testing.assert_allclose(adapted, plain, atol=1e-6)
    np.testing.assert_array_equal(off, plain)
    for name, x in fresh["layers"].items():
        if name.endswith("_b"):
            assert not x.any()
        else:  # as PEFT's uniform law between -1 and 1 over the root of the inputs
            assert np.std(x) == pytest.approx((3 * x.shape[1]) ** -0.5, rel=0.2)
            assert np.corrcoef(x[0].ravel(), x[1].ravel())[0, 1] < 0.3
    again = jax.jit(lambda: model.init(4))()
    assert (again["layers"]["q_a"] != fresh["layers"]["q_a"]).any()


@pytest.mark.parametrize(("dtype", "int8"), [("float32", True), ("bfloat16", False)])
def test_the_sampler_gets_the_sum(dtype, int8):
    mesh = MeshSpec(data=2, fsdp=2, tensor=2).build(jax.devices())
    model, params = model_of(dtype=dtype, int8_base=int8), weights()
    axes = model.plain.axes()
    adapters, base = noisy(model.init(7)), jax.jit(model.base)(params)
    where = param_shardings(mesh, model.lora.base_axes(axes), base), param_shardings(mesh, model.axes(), adapters)
    whole = Adapted(jax.device_put(base, where[0]), jax.device_put(adapters, where[1]))
    got = jax.device_get(make_publish(mesh, model)(whole))
    got["layers"] = jax.tree.map(lambda *layers: np.stack(layers), *got["layers"])
    assert jax.tree.structure(got) == jax.tree.structure(params)
    for name in MAPS:
        w = np.asarray(base["layers"][name], np.float64)
        if int8:
            assert base["layers"][name].dtype == jnp.int8
            scale = np.asarray(base["layers"][scale_of(name)], np.float64)
            w = w.reshape(2, -1, scale.shape[1]) * scale[:, None]
        a, b = (np.asarray(adapters["layers"][f"{name}_{p}"], np.float64) for p in "ab")
        want = (w.reshape(2, a.shape[1], b.shape[2]) + ALPHA / RANK * a @ b).reshape(params["layers"][name].shape)
        one_rounding = 2.0**-8 if dtype == "bfloat16" else 2.0**-22  # half of the distance of neighbours, at most
        assert got["layers"][name].dtype == dtype
        assert np.all(np.abs(got["layers"][name].astype(np.float64) - want) <= one_rounding * np.abs(want) + 1e-6), name
    assert got["embed"].dtype == dtype and got["norm"].dtype == np.float32
    np.testing.assert_array_equal(got["embed"], params["embed"].astype(dtype))
    if dtype == "float32":
        trainer = jax.jit(functools.partial(logits_of, model))(model.full_params(adapters, base))
        np.testing.assert_allclose(jax.jit(functools.partial(logits_of, model.plain))(got), trainer, atol=2e-5)


def test_int8_weights_are_near_and_small():
    model, params = model_of(int8_base=True), weights()
    base = jax.jit(model.base)(params)
    for name in MAPS:
        w = params["layers"][name].reshape(2, -1, base["layers"][scale_of(name)].shape[1])
        scale = np.asarray(base["layers"][scale_of(name)])[:, None]
        np.testing.assert_allclose(scale[:, 0], np.abs(w).max(1) / 127, rtol=1e-6)
        off = np.abs(np.asarray(base["layers"][name]).reshape(w.shape) * scale - w)
        assert (off <= 0.501 * scale).all()
    float_logits = jax.jit(functools.partial(logits_of, model.plain))(params)
    logits = jax.jit(functools.partial(logits_of, model))(Adapted(base, None))
    off = float(jnp.std(logits - float_logits) / jnp.std(float_logits))
    assert 1e-4 < off < 0.04, off
    dense = sum(params["layers"][m].nbytes for m in MAPS)
    kept = sum(base["layers"][m].nbytes + base["layers"][scale_of(m)].nbytes for m in MAPS)
    assert kept < 0.29 * dense  # tiny matrices: their scales still show


# ---- training ---------------------------------------------------------------------------------------------------------


def make_trainer(model, algorithm, *, mesh=None, base=None, optimizer=None, steps=50):
    mesh = mesh or MeshSpec().build(jax.devices()[:1])
    if base is None:
        base = jax.jit(model.base)(weights())
    base = jax.device_put(base, param_shardings(mesh, model.lora.base_axes(model.plain.axes()), base))
    settings = {"steps": steps, "groups_per_step": 4, "limit_tok": 16, "base": base}
    return PhaseTrainer(mesh, model, algorithm, optimizer or AdamW(lr=1e-2), ROWS, **settings)


@pytest.fixture(scope="module")
def groups():
    return groups_of(np.random.default_rng(3), num_groups=4, group_size=4)


def test_fifty_updates_leave_the_base_as_it_was(groups):
    """Nor int8, nor scales, nor what stays float32."""
    model = model_of(int8_base=True)
    trainer = make_trainer(model, Sft())
    before = fingerprint(trainer.base)
    start = jax.device_get(jax.jit(lambda: model.init(0))())
    state, algorithm_state, losses = trainer.states.init(start), {}, []
    for step in range(50):
        state, done = trainer.step(state, groups, algorithm_state, step)
        algorithm_state = done.algorithm_state
        losses.append(done.row["loss/total"])
        assert done.row["optim/updates_n"] == 1
    assert losses[-1] < 0.6 * losses[0]
    assert fingerprint(trainer.base) == before
    assert int(state.policy.num_updates) == 50
    moved = jax.tree.map(lambda new, old: bool((np.asarray(new) != old).any()), state.params, start)
    assert all(jax.tree.leaves(moved))


@pytest.mark.slow
def test_losses_and_updates_are_the_same_on_every_mesh(groups):
    cfg = dataclasses.replace(FAMILIES["qwen3"], num_kv_heads=4, vocab_size=264)
    model = Model(cfg, lora=LORA)
    base = jax.device_get(jax.jit(lambda: model.base(model.plain.init(0)))())
    start = jax.device_get(noisy(model.init(0)))
    optimizer = AdamW(lr=1e-2, eps=1e-2, clip_norm=1e6)  # smooth in the gradient
    found = {}
    for name, spec, n in (
        ("one", MeshSpec(), 1),
        ("fsdp", MeshSpec(data=1, fsdp=8), 8),
        ("both", MeshSpec(data=1, fsdp=2, tensor=4), 8),
    ):
        trainer = make_trainer(model, Sft(), mesh=spec.build(jax.devices()[:n]), base=base, optimizer=optimizer)
        done_state, done = trainer.step(trainer.states.init(start), groups, {}, 0)
        found[name] = done.row, jax.device_get(done_state.params)
        if name == "both":
            layers = done_state.params["layers"]
            assert layers["down_a"].addressable_shards[0].data.shape == (2, 40 // 4, RANK)
            assert layers["q_a"].addressable_shards[0].data.shape == (2, 32 // 2, RANK)
    row, params = found["one"]
    assert row["optim/grad_norm"] > 1e-3
    for name in ("fsdp", "both"):
        assert found[name][0]["loss/total"] == pytest.approx(row["loss/total"], abs=1e-5)
        assert found[name][0]["optim/grad_norm"] == pytest.approx(row["optim/grad_norm"], rel=1e-4)
        jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), found[name][1], params)


def num_bytes(tree):
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def test_the_state_is_that_of_the_adapters():
    model = model_of()
    adapters = (
        4
        * RANK
        * 2
        * sum(ins + out for ins, out in [(32, 48), (32, 24), (32, 24), (48, 32), (32, 40), (32, 40), (40, 32)])
    )
    state = make_trainer(model, Sft()).states.abstract()
    assert num_bytes(state.policy.params) == adapters
    counters = 64
    assert 2 * adapters <= num_bytes(state.policy.opt_state) <= 2 * adapters + counters
    assert num_bytes(state) <= 3 * adapters + 2 * counters
    # every critic: adapters and a head of its own, on the one base
    critics = make_trainer(model, Ppo(critic=Critic(num=2))).states.abstract().critics
    assert num_bytes(critics.params) == 2 * (adapters + 4 * 33)
    assert num_bytes(critics.opt_state) <= 2 * 2 * (adapters + 4 * 33) + counters


@pytest.mark.slow
def test_no_gradient_of_a_whole_weight_exists(groups):
    """Neither of a layer's maps nor of the vocabulary: compilers leave out unused gradients."""
    cfg = dataclasses.replace(FAMILIES["qwen3"], hidden_size=56, ffn_size=88, vocab_size=264)
    model = Model(cfg, remat="full", lora=LORA)
    trainer = make_trainer(model, Sft(), base=jax.jit(lambda: model.base(model.plain.init(0)))())
    columns = lambda s: {"mask": np.ones(len(s.indices), bool), "advantages": np.ones(len(s.indices), np.float32)}  # noqa: E731
    samples = [[s.with_columns(**columns(s)) for s in group] for group in samples_of(groups)]
    batch = put_batch(trainer.mesh, trainer.pack(samples).batch)
    state = trainer.states.init(model.init(0))
    text = trainer.policy_update.lower(state.policy, batch, {}, trainer.base).compile().as_text()
    sums = [
        line for line in text.splitlines() if re.search(r"= f32\[[\d,]+\]\S* (add|dot|dynamic-update-slice)\(", line)
    ]
    assert sum("f32[2,56,3]" in line or "f32[2,3,88]" in line for line in sums) > 0  # adapters' are seen
    for shape in ("264,56", "2,56,88", "2,88,56", "2,56,4,12", "2,4,12,56"):
        assert not [line for line in sums if f"= f32[{shape}]" in line], shape


@pytest.mark.slow
def test_critics_stand_on_the_same_base(groups):
    model = model_of()
    trainer = make_trainer(model, RewardModel(critic=Critic(num=2, shard="all", optimizer=AdamW(lr=1e-2))))
    before = fingerprint(trainer.base)
    state = trainer.states.init(noisy(model.init(0)))
    trunk = state.critics.params["trunk"]["layers"]
    assert trunk.keys() == state.params["layers"].keys()
    np.testing.assert_array_equal(trunk["q_b"][1], state.params["layers"]["q_b"])
    state, done = trainer.step(state, groups, {}, 0)
    assert np.isfinite(done.row["critic/loss"]) and fingerprint(trainer.base) == before
    now = state.critics.params["trunk"]["layers"]["q_b"]
    assert (np.asarray(now[0]) != np.asarray(now[1])).any()
    own = make_trainer(model, Ppo(critic=Critic(model=dataclasses.replace(FAMILIES["qwen3"], num_layers=1))))
    assert own.value_model.trunk.lora is None and "embed" in own.states.abstract().critics.params["trunk"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("optimizer", [Muon(lr=1e-2), Adafactor(), Lion()], ids=lambda o: type(o).__name__)
def test_every_optimizer_takes_adapters(optimizer):
    model = model_of()
    adapters, tx = model.abstract(), optimizer.build(3)
    updates, _ = jax.eval_shape(lambda p: tx.update(p, tx.init(p), p, ok=True), adapters)
    assert jax.tree.map(jnp.shape, updates) == jax.tree.map(jnp.shape, adapters)
    if isinstance(optimizer, Muon):  # no second moments
        assert num_bytes(jax.eval_shape(tx.init, adapters)) < 1.1 * num_bytes(adapters)


# ---- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "targets", "maps"),
    [
        ("qwen3", ("*",), MAPS),
        ("qwen3", ("[qv]",), ("q", "v")),
        ("gemma3", ("o", "*a*"), ("o", "gate")),
        ("qwen3_moe", ("*",), ("q", "k", "v", "o")),
    ],
)
def test_targets_are_patterns(name, targets, maps):
    model = model_of(name, targets=targets)
    assert {key[:-2] for key in model.abstract()["layers"]} == set(maps)


@pytest.mark.parametrize(
    ("name", "settings", "parts"),
    [
        ("qwen3", {"targets": ("q", "q_proj")}, ["Lora.targets", "'q_proj'", "q, k, v, o, gate, up, down"]),
        ("qwen3_moe", {"targets": ("gate",)}, ["Lora.targets", "'gate'", "patterns of q, k, v, o"]),
        ("qwen3", {"targets": ()}, ["Lora.targets"]),
        ("qwen3", {"rank": 0}, ["Lora.rank"]),
        ("qwen3", {"alpha": 0.0}, ["Lora.alpha"]),
        ("qwen3", {"alpha": float("nan")}, ["Lora.alpha"]),
    ],
)
def test_wrong_settings_are_refused(name, settings, parts):
    with pytest.raises(ConfigError) as e:
        model_of(name, **settings).axes()
    for part in parts:
        assert part in str(e.value)
