"""The update is one function of the trajectories: however they are packed, split over micro-batches or spread over a
mesh, log-probs, loss and gradients are the same. For losses of tokens, of sequences, of pairs, and for critics."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rolljax import metrics
from rolljax.model.attention import packed
from rolljax.model.value import ValueModel
from rolljax.trainer.aggregation import token_scales
from rolljax.trainer.algorithms.distill import Distill
from rolljax.trainer.algorithms.dpo import Dpo
from rolljax.trainer.algorithms.grpo import Grpo
from rolljax.trainer.algorithms.gspo import Gspo
from rolljax.trainer.algorithms.ppo import Ppo
from rolljax.trainer.algorithms.sft import Sft
from rolljax.trainer.batch import ARRAYS, PackShape, Sample, pack
from rolljax.trainer.critic import Critic
from rolljax.trainer.forward import critic_values, policy_outputs
from rolljax.trainer.mesh import MeshSpec, gradient_options, put_batch, replicated
from rolljax.trainer.optimizer import AdamW
from rolljax.trainer.phase_trainer import PhaseTrainer
from rolljax.trainer.state import fingerprint
from rolljax.trainer.update import make_critic_update, make_policy_update, policy_loss

ROW_LEN, TEMPERATURE = 48, 0.8
SHAPE = PackShape(3, 4, ROW_LEN)
# eps this large makes a parameter's change a smooth function of its gradient
OPTIMIZER = AdamW(lr=1e-2, eps=1e-2, clip_norm=1e6)
GRPO, GSPO, DPO = (
    Grpo(aggregation="token-mean", clip_high=0.28),
    Gspo(clip_low=0.15, clip_high=0.15),
    Dpo(beta=0.2, sft_coef=0.1),
)
PPO = Ppo(critic=Critic(num=2, clip=0.3, optimizer=OPTIMIZER))
ALGORITHMS = {"token": GRPO, "sequence": GSPO, "pair": DPO}
MESHES = {"one": (MeshSpec(), 1), "data": (MeshSpec(data=8), 8), "all": (MeshSpec(data=2, fsdp=2, tensor=2), 8)}


@pytest.fixture(scope="module")
def groups():
    """Return ragged groups: siblings of one to three turns and 1 to 30 sampled tokens, some of them masked, advantages
    of both signs and sizes. Critics own disjoint trajectories."""
    rng = np.random.default_rng(0)

    def sibling(prompt, turns):
        sampled = np.concatenate([np.zeros(len(prompt), bool), *(np.arange(s + o) < s for s, o in turns)])
        tokens = rng.integers(0, 264, len(sampled))
        tokens[: len(prompt)] = prompt
        n = int(sampled.sum())
        columns = {
            "mask": rng.random(n) < 0.9,
            "sampler_logp": rng.normal(-6.1, 0.3, n),
            "ref_logp": rng.normal(-6.1, 0.3, n),
            "advantages": np.full(n, rng.normal()),
            "returns": rng.normal(0, 1, n),
            "old_values_C": rng.normal(0, 0.3, (n, 2)),
            "critic_weights_C": np.tile(np.eye(2)[rng.integers(2)] * [1.5, 3.0], (n, 1)),
        }
        columns = {k: v if k == "mask" else v.astype(np.float32) for k, v in columns.items()}
        turn_ids = np.repeat(np.arange(len(turns)), [s for s, _ in turns])
        return Sample(tokens.astype(np.int32), np.flatnonzero(sampled), turn_ids, columns)

    layouts = [
        (12, [[(3, 0)], [(7, 2), (4, 0)], [(1, 5), (2, 3), (6, 0)]]),
        (5, [[(30, 0)], [(2, 0)]]),
        (20, [[(4, 0)], [(9, 0)], [(1, 0)], [(3, 6), (8, 0)]]),
        (1, [[(17, 0)]]),
    ]
    prompts = [rng.integers(0, 264, n) for n, _ in layouts]
    made = [[sibling(p, turns) for turns in siblings] for p, (_, siblings) in zip(prompts, layouts, strict=True)]
    owners = {tuple(s.columns["critic_weights_C"][0]) for g in made for s in g}
    assert owners == {(1.5, 0.0), (0.0, 3.0)}
    return made


@pytest.fixture(scope="module")
def units(groups):
    """Return the groups in the form of each algorithm: pairs are two siblings, one of either sign."""

    def signed(s, sign):
        return s.with_columns(advantages=np.full(len(s.indices), sign, np.float32))

    members = [g[i : i + 2] for g in groups for i in (0, 2) if len(g) > i + 1]
    pairs = [[signed(a, (-1) ** i), signed(b, -((-1) ** i))] for i, (a, b) in enumerate(members)]
    return {GRPO: groups, GSPO: groups, DPO: pairs, PPO: groups}


def packed_rows(groups, algorithm, shape=SHAPE):
    return pack(
        groups,
        shape,
        TEMPERATURE,
        aggregation=algorithm.aggregation,
        limit_tok=30,
        unsplit_groups=algorithm.unsplit_groups,
    )


@pytest.fixture(scope="module")
def batches(units):
    """Return batches `[3, 4, ROW_LEN]`, the shape of most batches here, so that one program per algorithm serves
    them."""
    return {algorithm: packed_rows(groups, algorithm).batch for algorithm, groups in units.items()}


@pytest.fixture(scope="module")
def batch(batches):
    """Return the batch of GRPO. Its last rows are empty."""
    found = batches[GRPO]
    assert found.num_micro == 2 and not found.segment_ids[1, -1].any()
    return found


def reshaped(batch, *shape):
    """Return the first rows, which include all non-empty ones, in another number of micro-batches."""
    n, lead = int(np.prod(shape)), np.ndim(batch.tokens) - 1
    rows = {k: np.asarray(a).reshape(-1, *a.shape[lead:]) for k, a in batch.arrays().items()}
    assert not rows["segment_ids"][n:].any()
    arrays = {k: a[:n].reshape(*shape, *a.shape[1:]) for k, a in rows.items()}
    return dataclasses.replace(batch, **arrays, num_micro=np.int32(shape[0]))


def alone(groups, algorithm):
    """Pack every sequence (every pair, for an algorithm of pairs) alone in its row: nothing is shared. Only its scales
    depend on the others."""
    scales = token_scales([[s.mask for s in g] for g in groups], algorithm.aggregation, 30)
    lots = list(zip(groups, scales, strict=True))
    if not algorithm.unsplit_groups:
        lots = [([s], [scale]) for g, scales in lots for s, scale in zip(g, scales, strict=True)]
    rows = []
    for members, scales in lots:
        one = packed_rows([members], algorithm, PackShape(1, 1, ROW_LEN))
        scale = np.zeros_like(one.batch.scale)
        for at, values in zip(one.indices[0], scales, strict=True):
            scale.reshape(-1)[at] = values
        rows.append(dataclasses.replace(one.batch, scale=scale))
    assert len(rows) <= 12
    rows += [jax.tree.map(np.zeros_like, rows[0])] * (12 - len(rows))
    arrays = {n: np.concatenate([getattr(b, n) for b in rows], axis=1) for n in rows[0].arrays()}
    arrays = {n: a.reshape(3, 4, *a.shape[2:]) for n, a in arrays.items()}
    tokens = np.float32(sum(b.num_tokens for b in rows))
    return dataclasses.replace(rows[0], **arrays, num_tokens=tokens, num_micro=np.int32(3))


@functools.cache
def options():
    """Return options with which XLA compiles these programs three times as fast, if it knows them."""
    wanted = {"xla_cpu_use_fusion_emitters": False}
    try:
        jax.jit(lambda: 0).lower().compile(wanted)
    except jax.errors.JaxRuntimeError:
        return {}
    return wanted


def quick(jitted):
    """Return the jitted function with one program for each set of shapes, compiled with these options."""
    programs = {}

    def call(*args):
        shapes = tuple((np.shape(x), str(x.dtype)) for x in jax.tree.leaves(args))
        if shapes not in programs:
            programs[shapes] = jitted.lower(*args).compile(options())
        return programs[shapes](*args)

    return call


@pytest.fixture(scope="module")
def start(model, params):
    """Return a new state with critics, on the host: it is placed on every mesh without another program."""
    mesh = MeshSpec().build(jax.devices()[:1])
    trainer = PhaseTrainer(mesh, model, PPO, OPTIMIZER, SHAPE, steps=10, groups_per_step=4, seed=3)
    return jax.device_get(trainer.states.init(params))


@pytest.fixture(scope="module")
def on_mesh(start):
    """Return (algorithm, mesh, model) -> (update of the policy, a maker of new states, mesh)."""

    @functools.cache
    def get(algorithm, name, model):
        spec, num_devices = MESHES[name]
        mesh = spec.build(jax.devices()[:num_devices])
        where = PhaseTrainer(
            mesh, model, algorithm, OPTIMIZER, SHAPE, steps=10, groups_per_step=4
        ).states.shardings.policy
        update = quick(make_policy_update(mesh, model, algorithm, OPTIMIZER, 10, where, {}))
        return update, lambda: jax.device_put(start.policy, where), mesh

    return get


@pytest.fixture(scope="module")
def run_update(on_mesh, model):
    """Return a function that makes one update of a new or given state."""

    def run(algorithm, batch, state=None, mesh="one", model=model):
        update, fresh, on = on_mesh(algorithm, mesh, model)
        return update(state or fresh(), put_batch(on, batch), {})

    return run


def moments(state):
    """Return Adam's first moments after one update: a tenth of the gradient."""
    return next(x.mu for x in jax.tree.leaves(state.opt_state, is_leaf=lambda x: hasattr(x, "mu")) if hasattr(x, "mu"))


@pytest.fixture(scope="module")
def grads_of(run_update):
    """Return a function to the gradients and statistics of a batch, on one device."""

    def get(algorithm, batch, **options):
        state, stats = run_update(algorithm, batch, **options)
        return jax.tree.map(lambda m: np.asarray(m) / np.float32(0.1), moments(state)), jax.device_get(stats)

    return get


@pytest.fixture(scope="module")
def expected(grads_of, batches):
    """Return algorithm -> gradients and statistics of its batch, the reference of all comparisons."""
    return functools.cache(lambda algorithm: grads_of(algorithm, batches[algorithm]))


def distance(got, want):
    """Return the largest relative difference, in the norm, of any leaf of two trees."""
    pairs = jax.tree.map(lambda a, b: float(np.linalg.norm(np.subtract(a, b)) / np.linalg.norm(b)), got, want)
    return max(jax.tree.leaves(pairs))


def assert_same(got, want, rel=1e-5):
    for name in {"loss/total", "critic/loss"} & set(want[1]):
        assert float(got[1][name]) == pytest.approx(float(want[1][name]), abs=1e-6)
    assert set(got[1]) == set(want[1])
    for name in want[1]:
        assert float(got[1][name]) == pytest.approx(float(want[1][name]), rel=1e-4, abs=1e-6), name
    assert distance(got[0], want[0]) < rel


each = pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=ALGORITHMS)


# ---- log-probs ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scored(model, params, batch):
    """Return the first eight rows as `[8, ROW_LEN]`, with the trainer's log-probs and entropies."""
    rows = reshaped(batch, 8)
    policy = jax.jit(lambda b: policy_outputs(model, params, b))(rows)
    assert policy.divergence is None
    return rows, np.asarray(policy.logp), np.asarray(policy.entropy)


def test_packed_log_probs_are_those_of_each_sequence_alone(model, params, groups, scored):
    @jax.jit
    def by_itself(tokens_T):
        decoder = model.bind(params)
        one = jnp.ones((1, ROW_LEN), jnp.int32)
        positions = jnp.arange(ROW_LEN)[None]
        hidden = decoder(tokens_T[None], positions, packed(one, one, positions)).hidden
        logp_TV = jax.nn.log_softmax(decoder.logits(hidden)[0] / TEMPERATURE)
        entropy_T = -jnp.sum(jnp.exp(logp_TV) * logp_TV, axis=-1)
        return logp_TV[jnp.arange(ROW_LEN - 1), tokens_T[1:]], entropy_T[:-1]

    rows, logp, entropy = scored
    assert logp.dtype == entropy.dtype == np.float32
    num_compared = 0
    for r in range(8):
        segments, branches = rows.segment_ids[r], rows.branch_ids[r]
        for segment, branch in {(s, b) for s, b in zip(segments, branches, strict=True) if s and b}:
            chain = np.flatnonzero((segments == segment) & ((branches == 0) | (branches == branch)))
            tokens = np.zeros(ROW_LEN, np.int32)
            tokens[: len(chain)] = rows.tokens[r, chain]
            want_logp, want_entropy = by_itself(tokens)
            np.testing.assert_allclose(logp[r, chain[1:]], want_logp[: len(chain) - 1], atol=1e-5)
            np.testing.assert_allclose(entropy[r, chain[1:]], want_entropy[: len(chain) - 1], atol=1e-5)
            num_compared += 1
    assert num_compared == sum(len(g) for g in groups)


def test_bfloat16_log_probs_are_float32_and_close(model, params, scored):
    rows, want, _ = scored
    half = dataclasses.replace(model, dtype="bfloat16")
    policy = jax.jit(lambda b: policy_outputs(half, params, b))(rows)
    assert policy.logp.dtype == policy.entropy.dtype == jnp.float32
    gap = np.abs(np.asarray(policy.logp) - want)[rows.segment_ids > 0]
    assert gap.mean() < 1e-2 and 0 < gap.max() < 4e-2


def test_supervised_loss_is_the_mean_negative_log_prob(model, params, scored):
    rows, logp, entropy = scored
    loss, (sums, _) = jax.jit(lambda b: policy_loss(model, Sft(), {})(params, b))(rows)
    trained = np.float64(rows.scale > 0)
    assert trained.sum() == rows.num_tokens < (rows.sequence_ids > 0).sum()
    want = -np.sum(logp * trained) / trained.sum()
    assert float(loss) == pytest.approx(want, rel=1e-6) and float(sums["loss/total"]) == float(loss)
    want = np.sum(entropy * trained) / trained.sum()
    assert float(sums["policy/entropy_nat"]) == pytest.approx(want, rel=1e-6)
    assert not any(name.startswith("mismatch/") for name in sums)


def test_effective_sample_size_of_the_ratios(scored, expected):
    rows, logp, _ = scored
    trained = rows.scale > 0
    ratio = np.exp(np.float64(logp[trained]) - rows.sampler_logp[trained])
    stats = expected(GRPO)[1]
    assert stats["policy/ratio_mean"] == pytest.approx(ratio.mean(), rel=1e-4)
    assert stats["policy/ess_frac"] == pytest.approx(ratio.sum() ** 2 / (ratio.size * (ratio**2).sum()), rel=1e-4)


# ---- loss and gradients ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_references_are_worth_comparing_with(expected):
    """Some ratios are clipped, some are not, and pairs stand both ways."""
    token, sequence, pair = (expected(a)[1] for a in (GRPO, GSPO, DPO))
    for stats in (token, sequence):
        assert stats["policy/ratio_max"] > 1.15 and 0 < stats["policy/clip_high_frac"] < 0.9
        assert 0 < stats["policy/clip_low_frac"] < 0.9 and 0 < stats["policy/ess_frac"] < 1
    assert token["policy/ratio_max"] > sequence["policy/ratio_max"] + 0.1
    assert 0 < pair["preference/accuracy_frac"] < 1 and pair["loss/total"] > 0.1


@pytest.mark.sampled(1)
@each
def test_packing_changes_nothing(grads_of, units, expected, algorithm):
    assert_same(grads_of(algorithm, alone(units[algorithm], algorithm)), expected(algorithm))


def test_a_mean_of_micro_batch_means_would_be_wrong(grads_of, batch, expected):
    """What global denominators prevent is far outside the tolerance of these tests on this very batch."""
    parts = []
    for i in range(2):
        arrays = {n: np.stack([a[i]] * 3) for n, a in batch.arrays().items()}
        arrays["scale"] = arrays["scale"] / arrays["scale"][0].sum()
        parts.append(grads_of(GRPO, dataclasses.replace(batch, **arrays, num_micro=np.int32(1))))
    (a, a_stats), (b, b_stats) = parts
    mean_of_means = jax.tree.map(lambda x, y: (x + y) / 2, a, b)
    assert distance(mean_of_means, expected(GRPO)[0]) > 0.1
    loss = (float(a_stats["loss/total"]) + float(b_stats["loss/total"])) / 2
    assert abs(loss - float(expected(GRPO)[1]["loss/total"])) > 1e-3


@each
def test_row_permutation_changes_nothing(grads_of, batches, expected, algorithm):
    order = np.random.default_rng(1).permutation(12)
    rows = reshaped(batches[algorithm], 12)
    shuffled = dataclasses.replace(rows, **{n: a[order] for n, a in rows.arrays().items()})
    assert_same(grads_of(algorithm, reshaped(shuffled, 3, 4)), expected(algorithm))


def test_micro_batches_padding_and_recomputation_change_nothing(grads_of, model, groups, expected):
    """Micro-batches of one longer row, and at least two empty ones, whose content is never read."""
    other = packed_rows(groups, GRPO, PackShape(10, 1, ROW_LEN + 16)).batch
    assert expected(GRPO)[1]["loss/total"] and 2 < other.num_micro <= 8
    poison = np.array(other.scale)
    poison[-2:] = np.nan
    other = dataclasses.replace(other, scale=poison)
    assert_same(grads_of(GRPO, other, model=dataclasses.replace(model, remat="dots")), expected(GRPO))


@each
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_stands_under_a_zero_scale_changes_nothing(grads_of, batches, expected, algorithm, bad):
    batch = batches[algorithm]
    floats = ("advantages", "sampler_logp", "ref_logp", "returns")
    poison = {n: np.where(batch.scale == 0, bad, getattr(batch, n)).astype(np.float32) for n in floats}
    grads, stats = grads_of(algorithm, dataclasses.replace(batch, **poison))
    want, want_stats = expected(algorithm)
    assert fingerprint(grads) == fingerprint(want) and fingerprint(stats) == fingerprint(want_stats)


# ---- the whole update -----------------------------------------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mesh, remat", [("data", "full"), ("all", "none")], ids=["data", "all"])
@each
def test_meshes_change_nothing(run_update, model, batches, expected, algorithm, mesh, remat):
    """One micro-batch of eight rows, on eight devices. Nor does it matter what the backward pass computes again."""
    again = dataclasses.replace(model, remat=remat)
    state, stats = run_update(algorithm, reshaped(batches[algorithm], 1, 8), mesh=mesh, model=again)
    grads = jax.tree.map(lambda m: np.asarray(m) / np.float32(0.1), moments(state))
    assert_same((grads, stats), expected(algorithm))


@each
def test_an_update_is_the_optimizers_step_along_the_gradient(run_update, params, batches, expected, algorithm):
    state, stats = run_update(algorithm, batches[algorithm])
    grads = expected(algorithm)[0]
    assert int(state.num_updates) == 1 and float(stats["optim/finite"]) == 1 and float(stats["optim/skipped_n"]) == 0
    assert float(stats["optim/lr"]) == pytest.approx(1e-2)
    norm = np.sqrt(sum(np.sum(np.square(g, dtype=np.float64)) for g in jax.tree.leaves(grads)))
    assert float(stats["optim/grad_norm"]) == pytest.approx(norm, rel=1e-5)
    parts = [float(v) for k, v in stats.items() if k.startswith("optim/grad_norm_")]
    assert len(parts) == 4 and np.linalg.norm(parts) == pytest.approx(norm, rel=1e-5)
    change = jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), state.params, params)
    size = np.sqrt(sum(np.sum(np.square(c, dtype=np.float64)) for c in jax.tree.leaves(change)))
    assert float(stats["optim/update_norm"]) == pytest.approx(size, rel=1e-3) and size > 1e-3
    want = jax.tree.map(lambda g: -1e-2 * np.asarray(g) / (np.abs(g) + 1e-2), grads)
    for got_leaf, want_leaf in zip(jax.tree.leaves(change), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(got_leaf, want_leaf, atol=1e-6)


def test_parameters_and_moments_are_split_alike(on_mesh, model):
    state = on_mesh(GRPO, "all", model)[1]()
    q = state.params["layers"]["q"]
    assert {s.data.size for s in q.addressable_shards} == {q.size // 4}  # fsdp x tensor
    for a, b in zip(jax.tree.leaves(state.params), jax.tree.leaves(moments(state)), strict=True):
        assert a.sharding == b.sharding


@each
def test_every_statistic_is_in_the_metric_table(expected, algorithm):
    stats = expected(algorithm)[1]
    assert metrics.check_row({k: float(v) for k, v in stats.items() if k != "optim/finite"}) == []
    assert {"loss/total", "optim/grad_norm", "optim/grad_norm_attention", "mismatch/trajectory_max_nat"} <= set(stats)


@pytest.mark.parametrize("field, bad", [("advantages", np.nan), ("advantages", np.inf), ("sampler_logp", np.nan)])
def test_the_gate_keeps_the_state_when_anything_is_not_finite(run_update, batch, field, bad):
    state, _ = run_update(GRPO, batch)
    before = fingerprint(state)
    values = np.array(getattr(batch, field))
    values[np.unravel_index(np.argmax(batch.scale), values.shape)] = bad
    state, stats = run_update(GRPO, dataclasses.replace(batch, **{field: values}), state)
    assert float(stats["optim/finite"]) == 0
    assert fingerprint(state) == before
    state, stats = run_update(GRPO, batch, state)
    assert float(stats["optim/finite"]) == 1 and fingerprint(state) != before


@pytest.mark.parametrize("rows", ["masked", "none"])
def test_a_batch_without_a_token_to_train_on_changes_nothing_and_is_counted(run_update, groups, batch, rows):
    """Else momentum and weight decay would move the parameters without a reason."""
    state, _ = run_update(GRPO, batch)
    before = fingerprint(state)
    nothing = [[s.with_columns(mask=np.zeros(len(s.indices), bool)) for s in g] for g in groups]
    empty = packed_rows(nothing if rows == "masked" else [], GRPO).batch
    assert empty.num_micro == (2 if rows == "masked" else 0) and not empty.scale.any()
    for name in set(batch.arrays()) - set(empty.arrays()):
        empty = dataclasses.replace(empty, **{name: np.zeros_like(getattr(batch, name))})
    state, stats = run_update(GRPO, empty, state)
    assert fingerprint(state) == before and int(state.num_updates) == 1
    assert (float(stats["optim/skipped_n"]), float(stats["optim/finite"]), float(stats["loss/total"])) == (1, 1, 0)
    assert metrics.check_row({k: float(v) for k, v in stats.items() if k != "optim/finite"}) == []


# ---- a frozen law ---------------------------------------------------------------------------------------------------


def test_distillation_reads_the_frozen_policy_it_is_given(model, params, start, batch):
    """On a mesh that splits the vocabulary: the KL of the two softmaxes, written out. The teacher has another shape."""
    algorithm = Distill(teacher="run_start", coef=1.0, cross_entropy=0.0, tau=1.3)
    on = MESHES["all"][0].build()
    where = PhaseTrainer(on, model, algorithm, OPTIMIZER, SHAPE, steps=10, groups_per_step=4).states.shardings.policy
    frozen_model = dataclasses.replace(model, cfg=dataclasses.replace(model.cfg, num_layers=1, hidden_size=32))
    update = quick(make_policy_update(on, model, algorithm, OPTIMIZER, 10, where, {"run_start": frozen_model}))
    teacher = jax.jit(lambda: frozen_model.init(5))()
    rows = reshaped(batch, 1, 8)
    teacher = jax.device_put(teacher, replicated(on))
    _, stats = update(jax.device_put(start.policy, where), put_batch(on, rows), {"run_start": teacher})

    def law(m, p):
        decoder = m.bind(p)
        attend = packed(rows.segment_ids[0], rows.branch_ids[0], rows.positions[0])
        hidden = decoder(rows.tokens[0], rows.positions[0], attend).hidden
        logits = np.asarray(decoder.logits(hidden), np.float64)
        before = np.take_along_axis(logits, rows.prev[0][..., None], axis=1) / 1.3
        return before - np.log(np.exp(before).sum(-1, keepdims=True))

    ours, theirs = law(model, params), law(frozen_model, teacher)
    kl = 1.3**2 * np.sum(np.exp(theirs) * (theirs - ours), -1)
    want = np.sum(kl * rows.scale[0])
    assert float(stats["loss/total"]) == pytest.approx(want, rel=1e-5) and want > 0.01
    assert float(stats["optim/grad_norm"]) > 1e-3


# ---- critics --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def critics_on(model, start):
    """Return mesh -> (update of two critics, a maker of new states, mesh)."""

    @functools.cache
    def get(name):
        spec, num_devices = MESHES[name]
        mesh = spec.build(jax.devices()[:num_devices])
        trainer = PhaseTrainer(mesh, model, PPO, OPTIMIZER, SHAPE, steps=10, groups_per_step=4)
        where = trainer.states.shardings.critics
        update = quick(make_critic_update(mesh, trainer.value_model, PPO, PPO.critic, 10, where))
        return update, lambda: jax.device_put(start.critics, where), mesh

    return get


def update_critics(critics_on, name, batch, state=None):
    update, fresh, mesh = critics_on(name)
    return update(state or fresh(), put_batch(mesh, batch))


def critic_grads(critics_on, name, batch):
    state, stats = update_critics(critics_on, name, batch)
    assert state.num_updates.tolist() == [1, 1]
    return jax.tree.map(lambda m: np.asarray(m) / np.float32(0.1), moments(state)), jax.device_get(stats)


@pytest.fixture(scope="module")
def critics(critics_on, batches):
    """Return gradients and statistics of the critics' batch on one device."""
    return critic_grads(critics_on, "one", batches[PPO])


@pytest.mark.slow
def test_each_critic_learns_from_its_own_share_alone(model, start, units, batches, critics):
    """Two critics with disjoint shares are two value models, fitted one by one; the loss is written out here."""
    grads, stats = critics
    both = start.critics.params
    assert np.abs(both["value"]["w"][0] - both["value"]["w"][1]).max() > 1e-2
    num_tokens = batches[PPO].num_tokens

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def written_out(p, rows, c):
        v = critic_values(ValueModel(model), p, rows)
        old = rows.old_values_C[..., c]
        near = old + jnp.clip(v - old, -0.3, 0.3)
        worse = jnp.maximum((v - rows.returns) ** 2, (near - rows.returns) ** 2)
        w = jnp.where(rows.scale > 0, rows.critic_weights_C[..., c] / num_tokens, 0)
        return jnp.sum(0.5 * worse * w), jnp.sum(jnp.abs(v - rows.returns) * w)

    found = []
    for c in range(2):
        own = [[s for s in g if s.columns["critic_weights_C"][0, c]] for g in units[PPO]]
        rows = reshaped(packed_rows([g for g in own if g], PPO).batch, 12)
        assert 0 < rows.num_tokens < num_tokens
        found.append(written_out(jax.tree.map(lambda x, c=c: x[c], both), rows, c))
        assert distance(jax.tree.map(lambda g, c=c: g[c], grads), found[c][1]) < 1e-5
    losses, errors = np.array([aux for aux, _ in found]).T
    assert float(stats["critic/loss"]) == pytest.approx(losses.mean(), rel=1e-5)
    assert float(stats["critic/abs_error"]) == pytest.approx(errors.mean(), rel=1e-5)


def test_critics_do_not_depend_on_packing(critics_on, units, critics):
    assert_same(critic_grads(critics_on, "one", alone(units[PPO], PPO)), critics)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["data", "all"])
def test_critics_do_not_depend_on_the_mesh(critics_on, batches, critics, mesh):
    assert_same(critic_grads(critics_on, mesh, reshaped(batches[PPO], 1, 8)), critics)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nothing_that_no_critic_learns_from_reaches_one(critics_on, batches, critics, bad):
    """Not where the scale is 0, and not where only the other critic learns."""
    b = batches[PPO]
    empty = b.scale == 0
    poison = {
        "returns": np.where(empty, bad, b.returns),
        "old_values_C": np.where(empty[..., None] | (b.critic_weights_C == 0), bad, b.old_values_C),
        "critic_weights_C": np.where(empty[..., None], bad, b.critic_weights_C),
    }
    poisoned = dataclasses.replace(b, **{n: a.astype(np.float32) for n, a in poison.items()})
    assert fingerprint(critic_grads(critics_on, "one", poisoned)) == fingerprint(critics)


def test_the_gate_keeps_a_critic_whose_loss_is_not_finite(critics_on, batches):
    b = batches[PPO]
    state, _ = update_critics(critics_on, "one", b)
    before = jax.device_get(state)
    values = np.array(b.returns)
    values[np.unravel_index(np.argmax(b.scale * b.critic_weights_C[..., 0]), values.shape)] = np.nan
    state, stats = update_critics(critics_on, "one", dataclasses.replace(b, returns=values), state)
    assert float(stats["critic/finite"]) == 0 and state.num_updates.tolist() == [1, 2]
    first = lambda tree: [np.asarray(x)[0] for x in jax.tree.leaves(tree)]  # noqa: E731
    assert fingerprint(first(state)) == fingerprint(first(before))


def test_critics_skip_a_batch_without_a_token(critics_on, batches):
    b = batches[PPO]
    state, _ = update_critics(critics_on, "one", b)
    before = fingerprint(state)
    empty = dataclasses.replace(b, scale=np.zeros_like(b.scale), num_tokens=np.float32(0))
    state, stats = update_critics(critics_on, "one", empty, state)
    assert fingerprint(state) == before and float(stats["critic/skipped_n"]) == 1


def test_a_batch_is_placed_by_rows(batches):
    mesh = MeshSpec(data=2, fsdp=2, tensor=2).build()
    placed = put_batch(mesh, batches[PPO])
    assert set(placed.arrays()) == set(batches[PPO].arrays()) < set(ARRAYS)
    for array in placed.arrays().values():
        assert {s.data.shape[:2] for s in array.addressable_shards} == {(3, 1)}
    assert placed.num_tokens.sharding.is_fully_replicated


# ---- repeatable bits ------------------------------------------------------------------------------------------------


def test_programs_with_gradients_take_no_gpu_kernel_that_gives_other_bits_each_time():
    """XLA knows the option on every platform, so its name can be checked here."""
    gpu = types.SimpleNamespace(devices=np.array([types.SimpleNamespace(platform="gpu")]))
    options = gradient_options(gpu)
    assert options and not gradient_options(MeshSpec().build(jax.devices()[:1]))
    jax.jit(lambda x: x + 1, compiler_options=options).lower(1.0).compile()
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option"):
        jax.jit(lambda x: x + 1, compiler_options={f"{name}_": value for name, value in options.items()})(1.0)
