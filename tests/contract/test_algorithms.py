"""The contract of every algorithm. A new file in rolljax/trainer/algorithms is tested here automatically.

Trajectories are random, credit and packing are the real ones, and the objective is differentiated with respect to the
log-prob of every token (`tests/unit/trainer/test_update.py` shows that log-probs themselves do not depend on the packing).
"""

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from rolljax.trainer.algorithms.base import Algorithm, Setup
from rolljax.trainer.algorithms.dapo import Dapo
from rolljax.trainer.algorithms.distill import Distill
from rolljax.trainer.algorithms.dpo import Dpo
from rolljax.trainer.algorithms.grpo import Grpo
from rolljax.trainer.algorithms.kto import Kto
from rolljax.trainer.algorithms.maxrl import MaxRl
from rolljax.trainer.algorithms.opd import Opd, Teacher
from rolljax.trainer.algorithms.policy_gradient import PolicyGradient
from rolljax.trainer.algorithms.reward_model import RewardModel
from rolljax.trainer.batch import ARRAYS, PackShape
from rolljax.trainer.credit.shaping import GroupFilter, RewardShaping
from rolljax.trainer.kl import KlLoss, KlReward
from rolljax.trainer.mesh import MeshSpec
from rolljax.trainer.update import mismatch_stats

from ..synthetic import CLASSES, LIMIT_TOK, MODULES, SHAPE, Objective, Raised, credited, episodes_of, groups_of

REQUIRED = {
    Dapo: {"shaping": RewardShaping(overlong_cache=4)},
    Opd: {"teachers": (Teacher("run_start", 0.7), Teacher("phase_start", 0.5, ("toy",))), "reward_coef": 0.5},
    Distill: {"teacher": "run_start"},
    MaxRl: {"shaping": Raised(clip=99.0)},
}
each = pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)


def make(cls, **settings):
    return cls(**{**REQUIRED.get(cls, {}), **settings})


def group_size(cls):
    return {"reference": 1, "pairs": 2, "sampler": 4}[cls.source]


@pytest.fixture(scope="module")
def objectives():
    """Return a function that compiles one program per class and settings."""
    made = {}

    def get(cls, **settings):
        key = (cls, tuple(sorted(settings.items())))
        if key not in made:
            made[key] = Objective(make(cls, **settings))
        return made[key]

    return get


def behaviour(groups):
    return [s.columns["sampler_logp"] for group in groups for s in group]


def moved(groups, seed=1, scale=0.3):
    """Return log-probs, below 0, of a policy that differs from the one that sampled."""
    rng = np.random.default_rng(seed)
    return [np.minimum(x + rng.normal(0, scale, len(x)), -1e-3).astype(np.float32) for x in behaviour(groups)]


@pytest.fixture(scope="module")
def world():
    """Return a function that credits groups by each class, once."""
    made = {}

    def get(cls):
        if cls not in made:
            rng = np.random.default_rng(7)
            made[cls] = credited(make(cls), groups_of(rng, group_size=group_size(cls)))
        return made[cls]

    return get


# ---- the class ------------------------------------------------------------------------------------------------------


def test_every_file_holds_an_algorithm():
    assert len(CLASSES) >= 30
    assert {c.__module__.rsplit(".", 1)[-1] for c in CLASSES} == set(MODULES)


@each
def test_at_most_two_classes_are_between_an_algorithm_and_its_base(cls):
    """Parts (`NormalisedReward`, `ClippedRatio`) are not algorithms, and do not count."""

    def distance(c):
        return 0 if c is Algorithm else 1 + max(distance(b) for b in c.__bases__ if issubclass(b, Algorithm))

    assert distance(cls) <= 3


@each
def test_an_algorithm_is_a_value(cls):
    """Frozen, hashable, equal by value: it is a static part of jitted programs."""
    algorithm = cls()
    assert algorithm == cls() and hash(algorithm) == hash(cls())
    assert algorithm.source in ("reference", "sampler", "pairs")
    for field in dataclasses.fields(cls):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(algorithm, field.name, getattr(algorithm, field.name))
    with pytest.raises((dataclasses.FrozenInstanceError, TypeError)):
        algorithm.something_new = 1


@each
def test_docstrings_describe_the_algorithm_and_its_source(cls):
    doc = cls.__doc__ or ""
    assert not doc.startswith(f"{cls.__name__}("), "the docstring is the one that dataclass writes"
    assert len(doc.split()) >= 8
    assert cls.source == "reference" or "arXiv" in doc or "doi" in doc


@each
def test_credit_is_finite_and_writes_to_nothing(cls):
    rng = np.random.default_rng(0)
    algorithm = make(cls)
    flat = [[0.5] * 4, [-1, 0, 0, 1], [1, 1, 1, 1], [0.1, 0.1, 0.1, 0.1]]
    groups = groups_of(rng, group_size=group_size(cls), rewards=[r[: group_size(cls)] for r in flat])
    e = episodes_of(rng, groups, algorithm.needs())
    before = {f.name: np.array(getattr(e, f.name), copy=True) for f in dataclasses.fields(e)}
    algorithm_state = {}
    for _ in range(2):
        credit = algorithm.credit(e, algorithm_state)
        algorithm_state = credit.algorithm_state
        assert all(isinstance(v, float) for v in algorithm_state.values())
        for name in ("advantages", "weights", "returns", "critic_weights", "entropy_weights"):
            array = getattr(credit, name)
            assert array is None or np.isfinite(np.where(e.mask, array, 0)).all(), name
        assert all(np.isfinite(v) for v in credit.stats.values())
        assert credit.keep is None or (credit.keep.dtype == bool and credit.keep.shape == (e.num,))
    for name, value in before.items():
        np.testing.assert_array_equal(getattr(e, name), value, err_msg=name)


@each
def test_every_setting_does_something(cls):
    """Every setting changes a result, otherwise it has no effect. Settings that all share are tried on GRPO."""
    for field in dataclasses.fields(cls):
        if field.name not in inspect.get_annotations(cls) and cls.__name__ != "Grpo":
            continue
        value = getattr(make(cls), field.name)
        if field.name in INERT_ALONE or not isinstance(value, (bool, int, float)):
            continue
        changed = not value if isinstance(value, bool) else value + 1 if isinstance(value, int) else value * 0.7 + 0.011
        changed = -1.0 if field.name == "failure" else changed  # above 0 it is refused
        assert fingerprint(cls, **{field.name: changed}) != fingerprint(cls), field.name


NESTED = [
    {"shaping": RewardShaping(clip=0.3)},
    {"shaping": RewardShaping(overlong_cache=LIMIT_TOK)},  # the answers here end well before the limit
    {"shaping": RewardShaping(length_reward=0.5)},
    {"filter": GroupFilter(drop_degenerate=False, solve_range=(0.2, 0.9))},
    {"kl": KlLoss(0.1)},
    {"kl": KlLoss(0.2)},
    {"kl": KlLoss(0.1, estimator="k2")},
    {"kl": KlReward(0.1)},
    {"kl": KlReward(0.1, estimator="abs")},
    {"kl": KlReward(0.1, estimator="k2")},
    {"kl": KlReward(0.1, estimator="k3")},
]


def test_every_nested_setting_does_something():
    """On GRPO, each setting changes the loss."""
    prints = [fingerprint(Grpo, **settings) for settings in ({}, *NESTED)]
    assert len(set(prints)) == len(prints)


INERT_ALONE = {
    "mask_truncated",  # nothing is truncated here
    "min_std",  # for flat batches
    "difficulty_weight",  # every group is solved as often as the others
    "lookback",
    "min_segment",
    "min_keep",
    "alpha",
    "tau",
    "top_k",  # inside the model's divergence
    "similarity",
    "cap",
    "entropy_mask_frac",
    "margin",  # simpo's
    "imitation",  # of replayed turns
    "label_smoothing",
    "sft_coef",
}


def fingerprint(cls, **settings):
    algorithm = make(cls, **settings)
    groups = groups_of(
        np.random.default_rng(7), group_size=group_size(cls), rewards=[[1, 0, 0.4, -1][: group_size(cls)]] * 4
    )
    kept = credited(algorithm, groups)
    if not kept:
        return 0.0
    objective = Objective(algorithm)
    packed = objective.rows(kept)
    total, (grad, *rest), _ = objective(packed, moved(kept))
    targets = [float(np.abs(s.columns["returns"]).sum()) for g in kept for s in g if "returns" in s.columns]
    return (total, *[float(np.abs(g).sum()) for part in (grad, *rest) for g in part], *targets, algorithm.needs())


# ---- the objective --------------------------------------------------------------------------------------------------


@each
def test_on_policy_gradient_is_its_reinforce_form(cls, objectives, world):
    """At the policy that sampled: d loss / d logp = -scale * weight * advantage; supervised advantages are 1."""
    groups = world(cls)
    objective = objectives(cls)
    if getattr(make(cls), "anchor", "") == "proximal":
        logps = [s.columns["trainer_logp"] for group in groups for s in group]
    else:
        logps = behaviour(groups)
    packed = objective.rows(groups)
    scale = packed.unpack(packed.batch.scale)
    _, (grad, *_), _ = objective(packed, logps)
    if issubclass(cls, (Dpo, RewardModel)):
        check_pairs(cls, groups, packed, logps, grad)
        return
    if issubclass(cls, Kto):
        check_labels(groups, logps, grad)
        return
    for g, w, sample in zip(grad, scale, (s for group in groups for s in group), strict=True):
        weight = sample.columns.get("weights", 1.0)
        np.testing.assert_allclose(g, -w * weight * sample.columns["advantages"], rtol=2e-5, atol=1e-8)


def check_pairs(cls, groups, packed, logps, grad):
    """Check d loss / d logp = -beta * sigmoid(-margin) / pairs for the chosen, and its opposite for the rejected."""
    i = 0
    for group in groups:
        signs = [s.columns["returns" if issubclass(cls, RewardModel) else "advantages"] for s in group]
        x = [logps[i + j] - s.columns.get("ref_logp", 0.0) for j, s in enumerate(group)]
        beta = 1.0 if issubclass(cls, RewardModel) else make(cls).beta
        margin = beta * sum(float((sign * d)[s.mask].sum()) for sign, d, s in zip(signs, x, group, strict=True))
        for sign, s in zip(signs, group, strict=True):
            want = np.where(s.mask, -beta * sign / (1 + np.exp(margin)) / len(groups), 0)
            np.testing.assert_allclose(grad[i], want, rtol=1e-4, atol=1e-8)
            i += 1


def check_labels(groups, logps, grad):
    """Check d loss / d logp = -beta * side * s (1 - s) / answers, s = sigmoid(side * beta * (log-ratio - point))."""
    members = [s for group in groups for s in group]
    for x, g, sample in zip(logps, grad, members, strict=True):
        side, point = sample.columns["advantages"][0], sample.columns["reference_points"][0]
        s = 1 / (1 + np.exp(-side * Kto().beta * (float((x - sample.columns["ref_logp"]).sum()) - point)))
        np.testing.assert_allclose(g, -Kto().beta * side * s * (1 - s) / len(members), rtol=1e-4, atol=1e-8)


@each
def test_packing_padding_and_order_change_nothing(cls, objectives, world):
    groups, objective = world(cls), objectives(cls)
    logps = moved(groups)
    want, want_grads, _ = objective(objective.rows(groups), logps)
    assert any(np.abs(g).max() > 0 for g in want_grads[0])
    sizes = np.cumsum([0, *map(len, groups)])
    order = [2, 0, 3, 1] if len(groups) == 4 else list(range(len(groups)))[::-1]
    variants = {
        "another order": (order, SHAPE),
        "longer rows, more padding": (range(len(groups)), PackShape(3, 4, 160)),
        "one row at a time": (range(len(groups)), PackShape(24, 1, 96)),
    }
    for name, (groups_in, shape) in variants.items():
        lots = [groups[g] for g in groups_in]
        ordered = [logps[i] for g in groups_in for i in range(sizes[g], sizes[g + 1])]
        got, got_grads, _ = objective(objective.rows(lots, shape), ordered)
        assert got == pytest.approx(want, rel=1e-6, abs=1e-6), name
        for a, b in zip(got_grads, want_grads, strict=True):
            again = [b[i] for g in groups_in for i in range(sizes[g], sizes[g + 1])]
            for x, y in zip(a, again, strict=True):
                np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7, err_msg=name)


@each
def test_alone_in_its_row_a_sequence_has_the_same_gradient(cls, objectives, world):
    """Nothing leaks between trajectories that share a row (pairs stay together: their loss is one)."""
    if cls.unsplit_groups:
        pytest.skip("a pair is one loss")
    groups, objective = world(cls), objectives(cls)
    logps = moved(groups)
    together, (grads, *_), _ = objective(objective.rows(groups), logps)
    packed = objective.rows(groups)
    scale = packed.unpack(packed.batch.scale)
    i, total = 0, 0.0
    for group in groups:
        for sample in group:
            alone = objective.rows([[sample]])
            # the share of the whole update, not of this sequence alone
            flat = np.array(alone.batch.scale)
            flat.reshape(-1)[alone.indices[0][0]] = scale[i]
            alone = dataclasses.replace(alone, batch=dataclasses.replace(alone.batch, scale=flat))
            loss, (grad, *_), _ = objective(alone, [logps[i]])
            np.testing.assert_allclose(grad[0], grads[i], rtol=1e-5, atol=1e-7)
            i, total = i + 1, total + loss
    assert total == pytest.approx(together, rel=1e-6, abs=1e-6)


@each
def test_a_mesh_changes_nothing(cls, objectives, world):
    groups, objective = world(cls), objectives(cls)
    logps = moved(groups)
    packed = objective.rows(groups)
    mesh = MeshSpec(data=4).build()
    rows = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
    whole = NamedSharding(mesh, PartitionSpec())
    put = lambda tree: jax.tree.map(lambda x: jax.device_put(x, rows if np.ndim(x) > 1 else whole), tree)  # noqa: E731
    want, want_grads, _ = objective(packed, logps)
    got, got_grads, _ = objective(packed, logps, put)
    assert got == pytest.approx(want, abs=1e-6)
    for x, y in zip(got_grads[0], want_grads[0], strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7)


@each
def test_zero_scale_gives_exactly_zero(cls, objectives, world):
    groups, objective = world(cls), objectives(cls)
    packed = objective.rows(groups)
    empty = dataclasses.replace(
        packed, batch=dataclasses.replace(packed.batch, scale=np.zeros_like(packed.batch.scale))
    )
    loss, grads, stats = objective(empty, moved(groups))
    assert loss == 0 and all((g == 0).all() for part in grads for g in part)
    assert all(np.isfinite(v).all() for found in stats for v in found.values())


@each
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nothing_where_the_scale_is_zero_counts(cls, objectives, world, bad):
    groups, objective = world(cls), objectives(cls)
    packed = objective.rows(groups)
    floats = [
        n for n in ARRAYS if getattr(packed.batch, n) is not None and getattr(packed.batch, n).dtype == np.float32
    ]

    def poison(array):
        empty = np.asarray(packed.batch.scale) == 0
        return np.where(empty if array.ndim == 3 else empty[..., None], bad, array).astype(np.float32)

    arrays = {n: poison(np.asarray(getattr(packed.batch, n))) for n in floats if n != "scale"}
    poisoned = dataclasses.replace(packed, batch=dataclasses.replace(packed.batch, **arrays))
    want, got = objective(packed, moved(groups)), objective(poisoned, moved(groups))
    assert want[0] == got[0]
    for a, b in zip(want[1], got[1], strict=True):
        for x, y in zip(a, b, strict=True):
            np.testing.assert_array_equal(x, y)


@each
def test_the_objective_is_finite_however_far_the_policies_are_apart(cls, objectives, world):
    groups, objective = world(cls), objectives(cls)
    packed = objective.rows(groups)
    for gap in (-20.0, -5.0, 5.0, 20.0):
        logps = [x + np.float32(gap) for x in behaviour(groups)]
        loss, grads, stats = objective(packed, logps)
        assert np.isfinite(loss) and all(np.isfinite(g).all() for part in grads for g in part)
        for found in stats:
            assert all(np.isfinite(v).all() for v in found.values()), gap


@each
def test_float32_comes_out(cls, world):
    """Log-probs of a bfloat16 model are float32 by then; no algorithm may convert them back."""
    groups = world(cls)
    objective = Objective(make(cls))
    packed = objective.rows(groups)
    micro = dataclasses.replace(packed.batch, **{n: a[0] for n, a in packed.batch.arrays().items()})
    zeros = jnp.zeros(micro.tokens.shape, jnp.float32)
    shapes = jax.eval_shape(objective.program, zeros, zeros, zeros, micro)
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(shapes))


def test_mismatch_is_measured_at_four_levels():
    groups = credited(make(next(c for c in CLASSES if c.__name__ == "Grpo")), groups_of(np.random.default_rng(0)))
    objective = Objective(make(next(c for c in CLASSES if c.__name__ == "Grpo")))
    packed = objective.rows(groups, PackShape(1, 8, 160))
    batch = dataclasses.replace(packed.batch, **{n: a[0] for n, a in packed.batch.arrays().items()})
    rng = np.random.default_rng(1)
    gaps = [rng.normal(0, 0.2, len(x)) for x in behaviour(groups)]
    logp = np.zeros(batch.tokens.shape, np.float32)
    for at, x, d in zip((a for g in packed.indices for a in g), behaviour(groups), gaps, strict=True):
        logp.reshape(-1)[at] = x + d
    mean, largest = mismatch_stats(jnp.asarray(logp), batch)
    members = [s for group in groups for s in group]
    level = {
        "mismatch/turn_abs_nat": [
            np.abs([d[s.turns == k].mean() for k in s.turns]) for d, s in zip(gaps, members, strict=True)
        ],
        "mismatch/geometric_abs_nat": [np.full(len(d), abs(d.mean())) for d in gaps],
        "mismatch/trajectory_abs_nat": [np.full(len(d), abs(d.sum())) for d in gaps],
        "mismatch/k3_nat": [np.expm1(d) - d for d in gaps],
        "mismatch/mult_ratio": [np.exp(np.abs(d)) for d in gaps],
    }
    for name, want in level.items():
        got = packed.unpack(np.asarray(mean[name])[None])
        for x, y in zip(got, want, strict=True):
            np.testing.assert_allclose(x, y, atol=2e-5, err_msg=name)
    assert float(largest["mismatch/trajectory_max_nat"].max()) == pytest.approx(
        max(abs(d.sum()) for d in gaps), abs=1e-5
    )


@each
def test_checks_accept_an_ordinary_setup(cls):
    """Nothing is refused with several updates per step, several turns and a fitting group size."""
    size = {"reference": 1, "pairs": 2, "sampler": 8}[cls.source]
    make(cls).check(Setup(group_size=size, updates=2, max_turns=4))


@pytest.mark.parametrize("cls", [c for c in CLASSES if issubclass(c, PolicyGradient)], ids=lambda c: c.__name__)
def test_kl_and_entropy_terms_are_added(cls, objectives, world):
    """With a KL term of estimator k2 and an entropy bonus: the plain gradient plus coefficient times (logp - ref_logp)."""
    terms = {"kl": KlLoss(0.5, estimator="k2"), "entropy_coef": 0.25}
    extra = objectives(cls, **terms)
    groups = credited(make(cls, **terms), groups_of(np.random.default_rng(7)))
    plain = objectives(cls, entropy_coef=0.0)
    packed = extra.rows(groups)
    logps = moved(groups)
    _, (grad, entropy_grad, _), _ = extra(packed, logps)
    _, (base, _, _), _ = plain(packed, logps)
    scale = packed.unpack(packed.batch.scale)
    members = [s for group in groups for s in group]
    for g, b, h, w, x, s in zip(grad, base, entropy_grad, scale, logps, members, strict=True):
        np.testing.assert_allclose(g - b, 0.5 * w * (x - s.columns["ref_logp"]), rtol=1e-3, atol=1e-6)
        np.testing.assert_allclose(h, -0.25 * w * s.columns.get("entropy_weights", 1.0), rtol=1e-5, atol=1e-8)
