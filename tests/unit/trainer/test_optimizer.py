"""Optimizers are optax', applied to stacked layers as to single matrices, and the same wherever parameters and state live."""

import dataclasses
import functools
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from rolljax.errors import ConfigError
from rolljax.model.attention import packed
from rolljax.model.decoder import Model
from rolljax.model.families.qwen3 import Qwen3Config
from rolljax.trainer.mesh import MeshSpec, param_shardings
from rolljax.trainer.optimizer import (
    HOST,
    MATRICES,
    Adafactor,
    AdamW,
    Lion,
    Muon,
    grad_norm_parts,
    opt_state_shardings,
)

MODEL = Model(Qwen3Config(num_heads=8, num_kv_heads=4, tie_embeddings=False, init_std=0.1))
OPTIMIZERS = {
    "AdamW": AdamW(lr=3e-3, weight_decay=0.1),
    "Muon": Muon(lr=3e-3, weight_decay=0.1),
    "Adafactor": Adafactor(lr=3e-2, weight_decay=0.1, momentum=0.9, min_dim_to_factor=16),
    "Lion": Lion(lr=1e-3, weight_decay=0.1),
}
each = pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)


KINDS = ("attn_norm", "q", "o", "gate")


def some(tree):
    """Select a parameter of every kind; programs for all of them would take longer to compile."""
    return {n: tree[n] for n in ("embed", "norm")} | {"layers": {n: tree["layers"][n] for n in KINDS}}


ABSTRACT = some(MODEL.abstract())


@pytest.fixture(scope="module")
def whole():
    return jax.jit(lambda: MODEL.init(0))()


@pytest.fixture(scope="module")
def start(whole):
    return some(whole)


@pytest.fixture(scope="module")
def grads(start):
    """Return two gradients of different sizes in every parameter."""
    rng = np.random.default_rng(0)
    like = lambda x: (rng.normal(size=x.shape) * 10 ** rng.uniform(-3, 0)).astype(np.float32)  # noqa: E731
    return [jax.tree.map(like, start) for _ in range(2)]


@pytest.fixture(scope="module")
def plain(start, grads):
    """Apply each optimizer to the two gradients; return the results by name."""
    return {name: run(built(optimizer), start, grads) for name, optimizer in OPTIMIZERS.items()}


def name_of(optimizer):
    return type(optimizer).__name__


@functools.cache
def programs(tx):
    """Jit the initial state, and an update of parameters and state."""

    def one(params, state, grad, **more):
        updates, state = tx.update(grad, state, params, **more)
        return optax.apply_updates(params, updates), state

    return jax.jit(tx.init), jax.jit(one)


@functools.cache
def built(optimizer):
    return optimizer.build(4)


def run(tx, params, grads, **more):
    """Return parameters and state after an update with each of `grads`."""
    init, one = programs(tx)
    state = init(params)
    for grad in grads:
        params, state = one(params, state, grad, **more)
    return params, state


def largest_difference(got, want):
    diff = lambda a, b: np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)).max(initial=0)  # noqa: E731
    return max(jax.tree.leaves(jax.tree.map(diff, got, want)))


def assert_bitwise(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: np.array_equal(np.asarray(a), np.asarray(b)), got, want)))


# ---- settings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [AdamW, Muon, Adafactor, Lion])
@pytest.mark.parametrize(
    "field, value",
    [
        ("lr", 0.0),
        ("clip_norm", -1.0),
        ("weight_decay", -0.1),
        ("warmup_updates", -1),
        ("final_lr_frac", 1.5),
        ("decay_frac", 0.0),
        ("schedule", "step"),
        ("mu_dtype", "float16"),
    ],
)
def test_a_bad_setting_is_refused_in_the_name_of_its_class(cls, field, value):
    with pytest.raises(ConfigError) as error:
        cls(**{field: value})
    assert error.value.setting == f"{cls.__name__}.{field}" and error.value.value == value


@pytest.mark.parametrize(
    "cls, field, value",
    [
        (AdamW, "eps", 0.0),
        (AdamW, "b2", 1.0),
        (Muon, "ns_steps", 0),
        (Muon, "beta", -0.1),
        (Muon, "adam_lr", 0.0),
        (Adafactor, "momentum", 1.0),
        (Adafactor, "mu_dtype", "bfloat16"),
        (Lion, "b1", 1.1),
    ],
)
def test_a_bad_setting_of_one_optimizer_is_refused(cls, field, value):
    with pytest.raises(ConfigError) as error:
        cls(**{field: value})
    assert error.value.setting == f"{cls.__name__}.{field}"


@pytest.mark.parametrize(
    "settings, expected",
    [
        ({"schedule": "constant"}, [2, 2, 2, 2, 2, 2, 2, 2]),
        ({"schedule": "constant", "warmup_updates": 4}, [0.5, 1, 1.5, 2, 2, 2, 2, 2]),
        ({"schedule": "linear"}, [2, 1.8, 1.6, 1.4, 1.2, 1.0, 0.8, 0.6]),
        ({"schedule": "linear", "warmup_updates": 1}, [2, *(2 - 1.6 * i / 7 for i in range(7))]),
        ({"schedule": "cosine"}, [0.4 + 1.6 * (1 + math.cos(math.pi * i / 8)) / 2 for i in range(8)]),
        ({"schedule": "wsd", "decay_frac": 0.25}, [2, 2, 2, 2, 2, 2, 2, 1.2]),
        ({"schedule": "wsd", "decay_frac": 0.5, "warmup_updates": 2}, [1, 2, 2, 2, 2, 1.6, 1.2, 0.8]),
        ({"schedule": "wsd", "decay_frac": 1.0, "warmup_updates": 4}, [0.5, 1, 1.5, 2, 2, 1.6, 1.2, 0.8]),
    ],
)
def test_the_rate_of_every_update(settings, expected):
    rate = AdamW(lr=2.0, final_lr_frac=0.2, **settings).rate(8)
    np.testing.assert_allclose([rate(i) for i in range(8)], expected, rtol=1e-6)


def test_the_rate_is_the_one_that_is_applied():
    """Lion moves every parameter by exactly the rate."""
    optimizer = Lion(lr=2.0, schedule="wsd", decay_frac=0.5, warmup_updates=2)
    init, one = programs(optimizer.build(8))
    x = {"x": jnp.zeros(3)}
    state, places = init(x), [0.0]
    for _ in range(8):
        x, state = one(x, state, {"x": -np.ones(3, np.float32)})
        places.append(float(x["x"][0]))
    np.testing.assert_allclose(np.diff(places), [optimizer.rate(8)(i) for i in range(8)], rtol=1e-6)


# ---- laws -----------------------------------------------------------------------------------------------------------


def test_adamw_is_bitwise_optax(start, grads):
    settings = AdamW(lr=1e-2, weight_decay=0.1, clip_norm=0.5, schedule="cosine", warmup_updates=1)
    law = optax.adamw(settings.rate(4), 0.9, 0.95, 1e-8, weight_decay=0.1)
    assert_bitwise(
        run(settings.build(4), start, grads), run(optax.chain(optax.clip_by_global_norm(0.5), law), start, grads)
    )


@pytest.fixture(scope="module")
def loss_fn(whole):
    """Return the cross-entropy of fixed rows as a function of some of the model's parameters, and its gradient."""
    tokens = jax.random.randint(jax.random.key(2), (4, 16), 0, 264)
    ones = jnp.ones_like(tokens)

    def loss(params):
        decoder = MODEL.bind(whole | params | {"layers": whole["layers"] | params["layers"]})
        positions = jnp.cumsum(ones, 1) - 1
        hidden = decoder(tokens, positions, packed(ones, 0 * ones, positions)).hidden
        return optax.softmax_cross_entropy_with_integer_labels(decoder.logits(hidden[:, :-1]), tokens[:, 1:]).mean()

    return jax.jit(jax.value_and_grad(loss))


@pytest.mark.sampled(1)
@each
def test_every_optimizer_learns(optimizer, start, loss_fn):
    init, one = programs(built(optimizer))
    params, state, losses = start, init(start), []
    for _ in range(12):
        value, grad = loss_fn(params)
        params, state = one(params, state, grad)
        losses.append(float(value))
    assert losses[-1] < 0.9 * losses[0]
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((params, state)))
    assert all((a != b).any() for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(start), strict=True))


@each
def test_gradients_are_clipped_to_the_norm(optimizer, start, grads):
    """What is above the norm has no effect on anything; what is below is left alone."""
    assert optimizer.clip_norm == 1
    norm = float(optax.tree.norm(grads[0]))
    scaled = lambda to: run(built(optimizer), start, [jax.tree.map(lambda g: g * np.float32(to / norm), grads[0])])  # noqa: E731
    at_norm, above, below = scaled(1.0), scaled(1000.0), scaled(0.5)
    assert largest_difference(above, at_norm) < 1e-6
    assert largest_difference(below[1], at_norm[1]) > 1e-5


@each
def test_momentum_in_bfloat16(optimizer, start, grads, plain):
    got, state = run(dataclasses.replace(optimizer, mu_dtype="bfloat16").build(4), start, grads)
    want, full = plain[name_of(optimizer)]
    halves = lambda s: sum(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(s))  # noqa: E731
    assert halves(full) == 0 and halves(state) == len(jax.tree.leaves(start)), "first moments and nothing else"
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(got)), "master weights"
    if not isinstance(optimizer, Lion):  # a sign jumps
        assert 0 < largest_difference(got, want) < 0.1 * largest_difference(want, start)


@pytest.mark.parametrize("optimizer", [AdamW(), AdamW(offload=True)], ids=["device", "host"])
def test_not_ok_changes_nothing(optimizer, start, grads):
    tx = optimizer.build(4)
    broken = jax.tree.map(lambda g: g * np.nan, grads[0])
    params, state = run(tx, start, [broken], ok=jnp.asarray(False))
    assert_bitwise((params, state), (start, tx.init(start)))


MUON = Muon(lr=1e-2, adam_lr=1e-3, weight_decay=0.1, clip_norm=1e6)


def flat(params):
    """Return every layer's matrices as plain 2-D ones."""
    found = {}
    for name in MATRICES.keys() & params["layers"].keys():
        for i, x in enumerate(params["layers"][name]):
            found[f"{name}{i}"] = x.reshape(-1, x.shape[-1]) if name == "o" else x.reshape(x.shape[0], -1)
    return found


def test_muon_of_stacked_layers_is_muon_of_each_matrix(start, grads):
    got, _ = run(built(MUON), start, grads)
    muon = optax.contrib.muon(1e-2, weight_decay=0.1, consistent_rms=0.2)
    want, _ = run(muon, flat(start), [flat(g) for g in grads])
    assert largest_difference(flat(got), want) < 1e-6
    assert largest_difference(flat(start), want) > 1e-3


def test_muon_leaves_the_rest_to_adamw(start, grads):

    def rest(tree):
        return {"embed": tree["embed"], "norm": tree["norm"], "attn_norm": tree["layers"]["attn_norm"]}

    got, _ = run(built(MUON), start, grads)
    want, _ = run(optax.adamw(1e-3, 0.9, 0.95, weight_decay=0.1), rest(start), [rest(g) for g in grads])
    assert largest_difference(rest(got), want) < 1e-7


def test_every_matrix_of_a_layer_is_known_to_muon(whole):
    """A parameter of a layer with two axes or more, besides the layers', is a matrix."""
    assert {name for name, x in whole["layers"].items() if x.ndim > 2} == set(MATRICES)


def test_adafactor_of_stacked_layers_is_adafactor_of_each(start, grads):
    settings = Adafactor(lr=1e-2, momentum=0.9, min_dim_to_factor=16, clip_norm=1e6)
    got, _ = run(settings.build(4), start, grads)
    law = optax.adafactor(1e-2, min_dim_size_to_factor=16, momentum=0.9)
    for i in range(2):
        layer = lambda tree, i=i: jax.tree.map(lambda x: x[i], tree["layers"])  # noqa: E731
        want, _ = run(law, layer(start), [layer(g) for g in grads])
        assert largest_difference(layer(got), want) < 1e-6


def test_adafactor_keeps_rows_and_columns(start):
    state = jax.eval_shape(Adafactor(min_dim_to_factor=16).build(4).init, start)
    assert sum(x.size for x in jax.tree.leaves(state)) < 0.1 * sum(x.size for x in jax.tree.leaves(start))


def test_adafactor_decays_by_rate_times_weight_decay(start, grads):
    embed = lambda tree: {"embed": tree["embed"]}  # noqa: E731
    made = [Adafactor(lr=0.1, weight_decay=d).build(4) for d in (0.0, 0.5)]
    without, decayed = (run(tx, embed(start), [embed(grads[0])])[0]["embed"] for tx in made)
    np.testing.assert_allclose(without - decayed, 0.1 * 0.5 * start["embed"], atol=1e-6)


# ---- gradient norms -------------------------------------------------------------------------------------------------


def test_parts_of_the_gradient_add_up(whole):
    parts, layers = grad_norm_parts(whole), whole["layers"]
    assert set(parts) == {"embed", "attention", "ffn", "norm", "head"}
    assert sum(float(x) ** 2 for x in parts.values()) == pytest.approx(float(optax.tree.norm(whole)) ** 2, rel=1e-5)
    assert float(parts["attention"]) == pytest.approx(float(optax.tree.norm([layers[n] for n in "qkvo"])), rel=1e-6)
    norms = [whole["norm"], *(layers[n] for n in ("attn_norm", "q_norm", "k_norm", "ffn_norm"))]
    assert float(parts["norm"]) == pytest.approx(float(optax.tree.norm(norms)), rel=1e-6)


def test_parts_of_a_tied_and_of_a_value_model(params):
    assert set(grad_norm_parts(params)) == {"embed", "attention", "ffn", "norm"}
    parts = grad_norm_parts({"trunk": params, "value": {"w": jnp.full(4, 3.0), "b": jnp.zeros(())}})
    assert float(parts.pop("head")) == 6 and {k: float(v) for k, v in parts.items()} == {
        k: float(v) for k, v in grad_norm_parts(params).items()
    }


# ---- where the state lives ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mesh():
    return MeshSpec(data=1, fsdp=2, tensor=4).build()


@pytest.fixture(scope="module")
def placed(mesh):
    return some(param_shardings(mesh, MODEL.axes(), MODEL.abstract()))


def run_on(mesh, placed, optimizer, params, grads):
    """Call `run` with parameters and state in their shardings."""
    tx = optimizer.build(4)
    state_sh = optimizer.host_shardings(opt_state_shardings(mesh, tx, ABSTRACT, placed))

    def one(params, state, grad):
        updates, state = tx.update(grad, state, params, ok=jnp.isfinite(optax.tree.norm(grad)))
        return optax.apply_updates(params, updates), state

    step = jax.jit(one, out_shardings=(placed, state_sh), donate_argnums=1)
    params = jax.device_put(params, placed)
    state = jax.jit(tx.init, out_shardings=state_sh)(params)
    for grad in grads:
        params, state = step(params, state, jax.device_put(grad, placed))
        for x, s in zip(jax.tree.leaves(state), jax.tree.leaves(state_sh), strict=True):
            assert x.sharding.is_equivalent_to(s, x.ndim) and x.sharding.memory_kind == s.memory_kind
    return params, state


@pytest.mark.sampled(1)
@each
def test_eight_devices_and_host_memory_change_nothing(optimizer, mesh, placed, start, grads, plain):
    spread = run_on(mesh, placed, optimizer, start, grads)
    assert largest_difference(spread[0], plain[name_of(optimizer)][0]) < 1e-6
    offloaded = run_on(mesh, placed, dataclasses.replace(optimizer, offload=True), start, grads)
    assert {x.sharding.memory_kind for x in jax.tree.leaves(offloaded[1])} == {HOST}
    assert HOST not in {x.sharding.memory_kind for x in jax.tree.leaves(spread[1])}
    assert_bitwise(offloaded, spread)


def test_critics_in_host_memory(mesh, placed, start, grads):
    """A stack of models is one program, by vmap; each has its own `ok`."""
    stack = lambda *trees: jax.tree.map(lambda *x: jnp.stack(x), *trees)  # noqa: E731
    params, both = stack(start, grads[1]), stack(*grads)
    where = jax.tree.map(lambda s: NamedSharding(mesh, PartitionSpec(None, *s.spec)), placed)
    abstract = jax.eval_shape(lambda: params)
    found = []
    for offload in (False, True):
        optimizer = AdamW(offload=offload)
        tx = optimizer.build(4)
        state_sh = optimizer.host_shardings(opt_state_shardings(mesh, jax.vmap(tx.init), abstract, where))
        one = lambda g, s, p, ok, tx=tx: tx.update(g, s, p, ok=ok)  # noqa: E731
        state = jax.jit(jax.vmap(tx.init), out_shardings=state_sh)(params)
        found.append(
            jax.jit(jax.vmap(one), out_shardings=(where, state_sh))(both, state, params, jnp.array([True, False]))
        )
        assert {x.sharding.memory_kind == HOST for x in jax.tree.leaves(found[-1][1])} == {offload}
    assert_bitwise(found[1], found[0])
    size = jax.tree.map(lambda x: np.abs(np.asarray(x)).max(axis=tuple(range(1, x.ndim))), found[0][0])
    assert all(first > 0 and second == 0 for first, second in jax.tree.leaves(size))


def specs(optimizer, mesh, placed):
    """Return the sharding of every leaf of the state, by path."""
    found = opt_state_shardings(mesh, optimizer.build(4), ABSTRACT, placed)
    return {jax.tree_util.keystr(path): s for path, s in jax.tree_util.tree_leaves_with_path(found)}


@each
def test_moments_lie_beside_their_parameters(optimizer, mesh, placed):
    found = specs(optimizer, mesh, placed)
    state = jax.tree_util.tree_leaves_with_path(jax.eval_shape(optimizer.build(4).init, ABSTRACT))
    shapes = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(ABSTRACT)}
    beside = 0
    for path, sharding in jax.tree_util.tree_leaves_with_path(placed):
        name = jax.tree_util.keystr(path)
        for key in (jax.tree_util.keystr(p) for p, leaf in state if leaf.shape == shapes[name].shape):
            if key.endswith(name):
                assert found[key].is_equivalent_to(sharding, len(shapes[name].shape)), key
                beside += 1
    assert beside >= len(shapes), "a first moment for each at least"
    counts = [found[jax.tree_util.keystr(path)] for path, leaf in state if jnp.issubdtype(leaf.dtype, jnp.integer)]
    assert counts and all(s.is_fully_replicated for s in counts)


def test_rows_and_columns_keep_the_axes_that_are_left(mesh, placed):
    found = specs(Adafactor(min_dim_to_factor=16), mesh, placed)

    def of(field, *names):
        end = f".{field}" + "".join(f"['{n}']" for n in names)
        (spec,) = [s.spec for key, s in found.items() if key.endswith(end)]
        return tuple(spec)

    # [V 264 tensor, D 64 fsdp]: rows are means over V, columns over D
    assert of("v_row", "embed") == ("fsdp",) and of("v_col", "embed") == ("tensor",)
    # [L, D 64 fsdp, F 192 tensor]
    assert of("v_row", "layers", "gate") == (None, "fsdp") and of("v_col", "layers", "gate") == (None, "tensor")
    # [L, D 64 fsdp, H 8 tensor, C 16]
    assert of("v_row", "layers", "q") == (None, "tensor", None)
    assert of("v_col", "layers", "q") == (None, "fsdp", "tensor")
    assert not any(of("v", "norm")) and not any(of("v", "embed"))


def test_offload_without_host_memory_is_refused():
    device = types.SimpleNamespace(platform="old", addressable_memories=lambda: [types.SimpleNamespace(kind="device")])
    nowhere = types.SimpleNamespace(mesh=types.SimpleNamespace(local_devices=[device]))
    assert Lion().host_shardings([nowhere]) == [nowhere]
    with pytest.raises(ConfigError, match=HOST) as error:
        Lion(offload=True).host_shardings([nowhere])
    assert error.value.setting == "Lion.offload" and "False" in error.value.remedy
