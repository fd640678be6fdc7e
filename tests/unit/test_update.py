"""The update is one function of the trajectories: however they are packed, split over micro-batches or spread over a
mesh, log-probs, loss and gradients are the same."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rolljax import metrics
from rolljax.model.attention import packed
from rolljax.trainer.algorithms.grpo import Grpo
from rolljax.trainer.algorithms.sft import Sft
from rolljax.trainer.batch import PackShape, Sample, TokenBatch, pack
from rolljax.trainer.mesh import MeshSpec
from rolljax.trainer.optimizer import AdamW
from rolljax.trainer.state import fingerprint
from rolljax.trainer.update import gradients, init_state, make_update, micro_loss, token_logp

pytestmark = pytest.mark.usefixtures("quick_compiles")

ROW_LEN, TEMPERATURE = 48, 0.8
GRPO = Grpo(clip_high=0.28)
# eps this large makes a parameter's change a smooth function of its gradient
OPTIMIZER = AdamW(lr=1e-2, eps=1e-2, clip_norm=1e6)


@pytest.fixture(scope="module")
def groups():
    """Ragged: siblings of one to three turns and 1 to 30 trained tokens, advantages of both signs and sizes."""
    rng = np.random.default_rng(0)

    def sibling(prompt, turns):
        sampled = np.concatenate([np.zeros(len(prompt), bool), *(np.arange(s + o) < s for s, o in turns)])
        tokens = rng.integers(0, 264, len(sampled))
        tokens[: len(prompt)] = prompt
        return Sample(
            tokens.astype(np.int32),
            sampled.astype(np.float32),
            np.where(sampled, rng.normal(-5.6, 0.3, len(sampled)), 0).astype(np.float32),
            np.where(sampled, rng.normal(), 0).astype(np.float32),
        )

    layouts = [
        (12, [[(3, 0)], [(7, 2), (4, 0)], [(1, 5), (2, 3), (6, 0)]]),
        (5, [[(30, 0)], [(2, 0)]]),
        (20, [[(4, 0)], [(9, 0)], [(1, 0)], [(3, 6), (8, 0)]]),
        (1, [[(17, 0)]]),
    ]
    prompts = [rng.integers(0, 264, n) for n, _ in layouts]
    return [[sibling(p, turns) for turns in siblings] for p, (_, siblings) in zip(prompts, layouts, strict=True)]


@pytest.fixture(scope="module")
def batch(groups):
    """`[3, 4, ROW_LEN]`, the shape of most batches here: one compiled program serves them. The last rows are empty."""
    packed_rows = pack(groups, PackShape(3, 4, ROW_LEN), TEMPERATURE)
    assert packed_rows.num_micro == 2 and not packed_rows.segment_ids[1, -1].any()
    return packed_rows


def reshaped(batch, *shape):
    """The first 8 or 12 rows in another number of micro-batches; all that hold anything are among them."""
    rows = int(np.prod(shape))
    arrays = {n: np.asarray(getattr(batch, n)).reshape(-1, ROW_LEN)[:rows] for n in TokenBatch.ARRAYS}
    assert arrays["weights"].sum() == batch.weights.sum()
    arrays = {n: a.reshape(*shape, ROW_LEN) for n, a in arrays.items()}
    return dataclasses.replace(batch, **arrays, num_micro=np.int32(shape[0]))


def one_per_row(groups):
    """Every sequence alone in its row: nothing is shared, nothing stands beside it."""
    alone = [pack([[s]], PackShape(1, 1, ROW_LEN), TEMPERATURE) for g in groups for s in g]
    alone += [pack([], PackShape(1, 1, ROW_LEN), TEMPERATURE)] * (12 - len(alone))
    arrays = {n: np.concatenate([getattr(b, n) for b in alone], axis=1) for n in TokenBatch.ARRAYS}
    whole = dataclasses.replace(
        alone[0],
        **arrays,
        num_tokens=np.float32(sum(b.num_tokens for b in alone)),
        num_sequences=np.float32(sum(b.num_sequences for b in alone)),
    )
    return reshaped(whole, 3, 4)


def grads_fn(model, algorithm):
    return jax.jit(lambda params, batch: gradients(model, algorithm, params, batch))


@pytest.fixture(scope="module")
def grads_of(model):
    return grads_fn(model, GRPO)


@pytest.fixture(scope="module")
def expected(grads_of, params, batch):
    """Gradients and statistics of `batch`, the reference of all comparisons."""
    grads, stats = grads_of(params, batch)
    assert float(stats["policy/ratio_max"]) > 1.3 and float(stats["policy/clip_high_frac"]) > 0
    return grads, stats


def distance(got, want):
    """Largest relative difference, in the norm, of any leaf of two trees."""
    pairs = jax.tree.map(lambda a, b: float(np.linalg.norm(np.subtract(a, b)) / np.linalg.norm(b)), got, want)
    return max(jax.tree.leaves(pairs))


def assert_same(got, want, rel=1e-5):
    assert float(got[1]["loss/total"]) == pytest.approx(float(want[1]["loss/total"]), abs=1e-6)
    for name in want[1]:
        assert float(got[1][name]) == pytest.approx(float(want[1][name]), rel=1e-4, abs=1e-6), name
    assert distance(got[0], want[0]) < rel


# ---- log-probs ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scored(model, params, batch):
    """The first eight rows as `[8, ROW_LEN]`, with the trainer's log-probs and entropies of them."""
    rows = reshaped(batch, 8)
    return rows, *jax.tree.map(np.asarray, jax.jit(lambda b: token_logp(model, params, b))(rows))


def test_packed_log_probs_are_those_of_each_sequence_alone(model, params, groups, scored):
    @jax.jit
    def alone(tokens_T):
        decoder = model.bind(params)
        one = jnp.ones((1, ROW_LEN), jnp.int32)
        hidden, _ = decoder(tokens_T[None], jnp.arange(ROW_LEN)[None], packed(one, one))
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
            want_logp, want_entropy = alone(tokens)
            np.testing.assert_allclose(logp[r, chain[1:]], want_logp[: len(chain) - 1], atol=1e-5)
            np.testing.assert_allclose(entropy[r, chain[1:]], want_entropy[: len(chain) - 1], atol=1e-5)
            num_compared += 1
    assert num_compared == sum(len(g) for g in groups)


def test_bfloat16_log_probs_are_float32_and_close(model, params, scored):
    rows, want, _ = scored
    half = dataclasses.replace(model, dtype="bfloat16")
    got, entropy = jax.jit(lambda b: token_logp(half, params, b))(rows)
    assert got.dtype == entropy.dtype == jnp.float32
    gap = np.abs(np.asarray(got) - want)[rows.segment_ids > 0]
    assert gap.mean() < 1e-2 and 0 < gap.max() < 4e-2


def test_supervised_loss_is_the_mean_negative_log_prob(model, params, scored):
    rows, logp, entropy = scored
    loss, (sums, _) = jax.jit(lambda b: micro_loss(model, Sft(), params, b))(rows)
    want = -np.sum(logp * rows.weights, dtype=np.float64) / rows.weights.sum()
    assert float(loss) == pytest.approx(want, rel=1e-6) and float(sums["loss/total"]) == float(loss)
    want = np.sum(entropy * rows.weights, dtype=np.float64) / rows.weights.sum()
    assert float(sums["policy/entropy_nat"]) == pytest.approx(want, rel=1e-6)
    assert not any(name.startswith("mismatch/") for name in sums)


# ---- loss and gradients ---------------------------------------------------------------------------------------------


def test_packing_changes_nothing(grads_of, params, groups, expected):
    assert_same(grads_of(params, one_per_row(groups)), expected)


def test_micro_batch_count_changes_nothing(grads_of, params, batch, expected):
    """Eight of one row; the mesh tests below take one of eight."""
    assert_same(grads_of(params, reshaped(batch, 8, 1)), expected)


def test_a_mean_of_micro_batch_means_would_be_wrong(grads_of, params, batch, expected):
    """What the global denominator prevents is far outside the tolerance of these tests on this very batch."""
    parts = []
    for i in range(2):
        arrays = {n: np.stack([getattr(batch, n)[i]] * 3) for n in TokenBatch.ARRAYS}
        tokens = np.float32(batch.weights[i].sum())
        parts.append(grads_of(params, dataclasses.replace(batch, **arrays, num_micro=np.int32(1), num_tokens=tokens)))
    (a, a_stats), (b, b_stats) = parts
    mean_of_means = jax.tree.map(lambda x, y: (x + y) / 2, a, b)
    assert distance(mean_of_means, expected[0]) > 0.1
    loss = (float(a_stats["loss/total"]) + float(b_stats["loss/total"])) / 2
    assert abs(loss - float(expected[1]["loss/total"])) > 1e-3


def test_row_permutation_changes_nothing(grads_of, params, batch, expected):
    order = np.random.default_rng(1).permutation(12)
    rows = reshaped(batch, 12)
    shuffled = dataclasses.replace(rows, **{n: getattr(rows, n)[order] for n in TokenBatch.ARRAYS})
    assert_same(grads_of(params, reshaped(shuffled, 3, 4)), expected)


def test_padding_changes_nothing(grads_of, params, groups, batch, expected):
    """Longer rows and a micro-batch beside the point; what stands in the empty one is never looked at."""
    wider = pack(groups, PackShape(3, 4, ROW_LEN + 16), TEMPERATURE)
    assert wider.num_micro < 3
    poison = np.array(wider.weights)
    poison[-1] = np.nan
    assert_same(grads_of(params, dataclasses.replace(wider, weights=poison)), expected)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_stands_under_a_zero_weight_changes_nothing(grads_of, params, batch, expected, bad):
    poisoned = dataclasses.replace(
        batch,
        advantages=np.where(batch.weights == 0, bad, batch.advantages).astype(np.float32),
        sampler_logp=np.where(batch.weights == 0, bad, batch.sampler_logp).astype(np.float32),
    )
    grads, stats = grads_of(params, poisoned)
    assert fingerprint(grads) == fingerprint(expected[0]) and fingerprint(stats) == fingerprint(expected[1])


@pytest.mark.parametrize("remat", ["full", "dots"])
def test_recomputation_changes_no_gradient(model, params, batch, expected, remat):
    got = grads_fn(dataclasses.replace(model, remat=remat), GRPO)(params, batch)
    assert_same(got, expected, rel=1e-6)


# ---- the whole update -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def updates(model, params):
    """name -> (update, a maker of fresh states) on meshes of one and of eight devices."""

    def on(spec, num_devices):
        mesh = spec.build(jax.devices()[:num_devices])
        tx = OPTIMIZER.build(10)
        update = make_update(mesh, model, GRPO, tx, OPTIMIZER.rate(10))
        return update, lambda: init_state(mesh, model, tx, jax.tree.map(jnp.copy, params))

    return {
        "one": on(MeshSpec(), 1),
        "data": on(MeshSpec(data=8), 8),
        "all": on(MeshSpec(data=2, fsdp=2, tensor=2), 8),
    }


def moments(state):
    """Adam's first moments after one update: a tenth of the gradient."""
    return next(x.mu for x in jax.tree.leaves(state.opt_state, is_leaf=lambda x: hasattr(x, "mu")) if hasattr(x, "mu"))


@pytest.mark.parametrize("name", ["one", "data", "all"])
def test_meshes_change_nothing(updates, params, batch, expected, name):
    update, fresh = updates[name]
    state, stats = update(fresh(), reshaped(batch, 1, 8))
    grads = jax.tree.map(lambda m: m / 0.1, moments(state))
    assert_same((grads, {k: stats[k] for k in expected[1]}), expected)
    assert int(state.num_updates) == 1 and float(stats["optim/finite"]) == 1
    assert float(stats["optim/lr"]) == pytest.approx(1e-2)
    norm = np.sqrt(sum(np.sum(np.square(g, dtype=np.float64)) for g in jax.tree.leaves(expected[0])))
    assert float(stats["optim/grad_norm"]) == pytest.approx(norm, rel=1e-5)
    change = jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), state.params, params)
    size = np.sqrt(sum(np.sum(np.square(c, dtype=np.float64)) for c in jax.tree.leaves(change)))
    assert float(stats["optim/update_norm"]) == pytest.approx(size, rel=1e-3) and size > 1e-3
    want = jax.tree.map(lambda g: -1e-2 * np.asarray(g) / (np.abs(g) + 1e-2), expected[0])
    for got_leaf, want_leaf in zip(jax.tree.leaves(change), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(got_leaf, want_leaf, atol=1e-6)


def test_parameters_and_moments_are_split_alike(updates):
    state = updates["all"][1]()
    q = state.params["layers"]["q"]
    assert {s.data.size for s in q.addressable_shards} == {q.size // 4}  # fsdp x tensor
    for a, b in zip(jax.tree.leaves(state.params), jax.tree.leaves(moments(state)), strict=True):
        assert a.sharding == b.sharding


def test_every_statistic_is_in_the_metric_table(updates, batch):
    _, stats = updates["one"][0](updates["one"][1](), reshaped(batch, 1, 8))
    assert metrics.check_row({k: float(v) for k, v in stats.items() if k != "optim/finite"}) == []


@pytest.mark.parametrize("field, bad", [("advantages", np.nan), ("advantages", np.inf), ("sampler_logp", np.nan)])
def test_the_gate_keeps_the_state_when_anything_is_not_finite(updates, batch, field, bad):
    update, fresh = updates["one"]
    state, _ = update(fresh(), reshaped(batch, 1, 8))
    before = fingerprint(state)
    values = np.array(getattr(batch, field))
    values[np.unravel_index(np.argmax(batch.weights), values.shape)] = bad
    state, stats = update(state, reshaped(dataclasses.replace(batch, **{field: values}), 1, 8))
    assert float(stats["optim/finite"]) == 0
    assert fingerprint(state) == before
    state, stats = update(state, reshaped(batch, 1, 8))
    assert float(stats["optim/finite"]) == 1 and fingerprint(state) != before
