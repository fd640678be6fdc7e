"""The trainer of a phase with a real model: everything that credit asks for is right and at the right tokens, and a step
is the updates it says it is."""

import dataclasses
import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rolljax import metrics
from rolljax.aot.ahead import CompileAhead
from rolljax.aot.programs import TrainerShapes
from rolljax.errors import DataError, TrainerError
from rolljax.model.attention import packed
from rolljax.model.decoder import Model
from rolljax.model.families.qwen3 import Qwen3Config
from rolljax.model.families.qwen3_moe import Qwen3MoeConfig
from rolljax.trainer import attention_stats
from rolljax.trainer.algorithms.base import Needs
from rolljax.trainer.algorithms.decoupled_ppo import DecoupledPpo
from rolljax.trainer.algorithms.dpo import Dpo
from rolljax.trainer.algorithms.grpo import Grpo
from rolljax.trainer.algorithms.ppo import Ppo
from rolljax.trainer.algorithms.reward_model import PairRewardModel
from rolljax.trainer.attention_stats import AttentionMaps
from rolljax.trainer.batch import PackShape, pack
from rolljax.trainer.credit.episodes import Episodes, apply_credit
from rolljax.trainer.credit.shaping import GroupFilter
from rolljax.trainer.critic import Critic
from rolljax.trainer.kl import AdaptiveKl, KlLoss
from rolljax.trainer.mesh import MeshSpec
from rolljax.trainer.optimizer import AdamW
from rolljax.trainer.phase_trainer import NotFinite, PhaseTrainer
from rolljax.trainer.state import ParamState, fingerprint
from tests.synthetic import VOCAB, groups_of, samples_of, trajectory

ROW_LEN, TEMPERATURE, STEPS = 64, 0.7, 5
SHAPE = PackShape(3, 4, ROW_LEN)
OPTIMIZER = AdamW(lr=1e-2, schedule="linear")


def on_devices(n=1, **axes):
    return MeshSpec(**axes).build(jax.devices()[:n])


SMALL = Qwen3Config(num_layers=1, hidden_size=32, num_heads=2, num_kv_heads=2, init_std=0.1)
"""A shape unlike the policy's, with the same vocabulary."""
PROXIMAL = DecoupledPpo(filter=GroupFilter())


def make_trainer(model, algorithm, *, mesh=None, shape=SHAPE, groups_per_step=4, **settings):
    settings = {"steps": STEPS, "temperature": TEMPERATURE, "limit_tok": 16, "optimizer": OPTIMIZER, **settings}
    return PhaseTrainer(
        mesh or on_devices(), model, algorithm, shape=shape, groups_per_step=groups_per_step, **settings
    )


@pytest.fixture(scope="module")
def groups():
    return groups_of(np.random.default_rng(3), num_groups=4, group_size=4)


# ---- what credit needs to know --------------------------------------------------------------------------------------


MAPS = AttentionMaps(waad_window=3, fai_low=1, fai_high=6, head_frac=0.25)


@dataclasses.dataclass(frozen=True)
class Curious(Grpo):
    """Asks for everything there is."""

    def needs(self):
        return Needs(
            trainer_logp=True,
            ref="phase_start",
            scorer="elsewhere",
            teachers=("elsewhere", "phase_start"),
            critics=Critic(num=2, model=SMALL),
            attention=MAPS,
        )


READ = ("trainer_logp", "entropy", "ref_logp", "scorer_logp", "teacher_logp", "values", "waad", "fai")


@pytest.fixture(scope="module")
def references(model):
    other = Model(SMALL)
    return {
        "phase_start": (model, jax.jit(lambda: model.init(7))()),
        "elsewhere": (other, jax.jit(lambda: other.init(8))()),
    }


def read(model, params, references, groups, **settings):
    found = make_trainer(model, Curious(), references=references, seed=5, **settings)
    state = found.states.init(params)
    episodes = found.compute_credit_inputs(
        state, found.pack_samples(samples_of(groups)), Episodes.of(groups, limit_tok=16, step=2)
    )
    return jax.device_get(state), episodes


@pytest.fixture(scope="module")
def asked(model, params, references, groups):
    """Return the state, and the episodes with all model outputs, computed in one batch."""
    return read(model, params, references, groups)


@functools.cache
def forward(model):
    """Return a function to the hidden states `[N, T, D]` and logits `[N, T, V]` of sequences, each in its own row."""

    @jax.jit
    def both(params, tokens_NT):
        decoder, one = model.bind(params), jnp.ones(tokens_NT.shape, jnp.int32)
        positions = jnp.broadcast_to(jnp.arange(ROW_LEN), tokens_NT.shape)
        hidden = decoder(tokens_NT, positions, packed(one, one, positions)).hidden
        return hidden, decoder.logits(hidden)

    return both


def by_themselves(model, params, groups):
    """Yield for every trajectory, alone in its row, its sampled tokens `[n]`, and the hidden states `[n, D]` and logits
    `[n, V]` just before them."""
    streams = [t.stream() for group in groups for t in group]
    rows = np.zeros((len(streams), ROW_LEN), np.int32)
    for row, (tokens, _, _) in zip(rows, streams, strict=True):
        row[: len(tokens)] = tokens
    found = forward(model)(params, rows)
    for n, (tokens, sampled, _) in enumerate(streams):
        at = np.flatnonzero(sampled)
        yield tokens[at], *(np.asarray(x[n], np.float64)[at - 1] for x in found)


def distributions(model, params, groups):
    """Yield for every trajectory its sampled tokens `[n]`, and the log-probs of all possible ones `[n, V]`."""
    for tokens, _, logits in by_themselves(model, params, groups):
        scores = logits / TEMPERATURE
        yield tokens, scores - np.log(np.exp(scores).sum(-1, keepdims=True))


def direct_logp(model, params, groups):
    for tokens, logp in distributions(model, params, groups):
        yield logp[np.arange(len(tokens)), tokens]


def direct_entropy(model, params, groups):
    for _, logp in distributions(model, params, groups):
        yield -(np.exp(logp) * logp).sum(-1)


def assert_rows(got_NT, want, mask, atol=2e-5):
    for row, values, valid in zip(got_NT, want, mask, strict=True):
        np.testing.assert_allclose(row[valid], values, atol=atol)
        assert not row[~valid].any()


def test_log_probs_are_those_of_each_policy(model, params, references, groups, asked):
    """The policy's own, a reference of the same shape, a scorer and a teacher of another one."""
    _, e = asked
    elsewhere = list(direct_logp(*references["elsewhere"], groups))
    start = list(direct_logp(*references["phase_start"], groups))
    assert_rows(e.trainer_logp, direct_logp(model, params, groups), e.mask)
    assert_rows(e.entropy, direct_entropy(model, params, groups), e.mask)
    assert_rows(e.ref_logp, start, e.mask)
    assert_rows(e.scorer_logp, elsewhere, e.mask)
    assert e.teacher_logp.shape == (2, *e.mask.shape)
    assert_rows(e.teacher_logp[0], elsewhere, e.mask)
    assert_rows(e.teacher_logp[1], start, e.mask)
    apart = [np.abs(a - b).max() for a, b in ((e.trainer_logp, e.ref_logp), (e.ref_logp, e.scorer_logp))]
    assert min(apart) > 0.1


def test_a_stream_that_starts_anew_is_read_from_its_new_start(model, params, groups):
    """As if each of its sequences were a trajectory of its own; credit still sees one episode."""
    one, cut = make_trainer(model, PROXIMAL, shape=PackShape(8, 4, ROW_LEN)), []
    for group in groups:
        cut.append([])
        for t in group:
            turns = [dataclasses.replace(u, restart=k == 1) for k, u in enumerate(t.turns)]
            cut[-1].append(dataclasses.replace(t, turns=tuple(turns)))
    assert any(len(t.starts) == 2 for g in cut for t in g)
    e = Episodes.of(cut, limit_tok=16)
    got = one.compute_credit_inputs(one.states.init(params), one.pack_samples(samples_of(cut)), e)
    parts = [[dataclasses.replace(t, turns=p) for p in (t.turns[:1], t.turns[1:]) if p] for group in cut for t in group]
    logp = iter(direct_logp(model, params, parts))
    assert_rows(got.trainer_logp, [np.concatenate([next(logp) for _ in p]) for p in parts], e.mask)
    kept = apply_credit(one.algorithm.needs(), samples_of(cut), got, one.algorithm.credit(got, {}))
    batch = one.pack(kept).batch
    assert batch.num_tokens == sum(t.num_sampled_tok for g in cut for t in g) == (np.asarray(batch.scale) > 0).sum()


def test_values_are_those_of_each_critic(groups, asked):
    state, e = asked
    assert e.values.shape == (2, *e.mask.shape) and np.abs(e.values[0] - e.values[1]).max() > 0.01
    for c in range(2):
        critic = jax.tree.map(lambda x, c=c: x[c], state.critics.params)
        head = critic["value"]
        want = [h @ head["w"] + head["b"] for _, h, _ in by_themselves(Model(SMALL), critic["trunk"], groups)]
        assert_rows(e.values[c], want, e.mask)


def test_attention_statistics_arrive_at_their_tokens(model, params, groups, asked):
    """Measured again with every trajectory alone in its row; only the choice of heads knows of all of them."""
    _, e = asked
    alone = [pack([[s]], PackShape(1, 1, ROW_LEN), 1.0) for g in samples_of(groups) for s in g]
    b = {n: np.concatenate([getattr(p.batch, n)[0] for p in alone]) for n in ("tokens", "positions", "segment_ids")}
    branches, sequences = (
        np.concatenate([getattr(p.batch, n)[0] for p in alone]) for n in ("branch_ids", "sequence_ids")
    )
    measure = attention_stats.make_attention_stats(model, cfg=MAPS)
    stats = attention_stats.reduce([measure(params, *b.values(), branches, sequences > 0)], MAPS)
    at = [s.indices for g in samples_of(groups) for s in g]
    for got, rows in ((e.waad, stats.waad_MBT[0]), (e.fai, stats.fai_MBT[0])):
        assert_rows(got, [row[i] for row, i in zip(rows, at, strict=True)], e.mask)
        assert got[e.mask].std() > 0.01


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "settings",
    [
        {"groups_per_step": 1},
        {"groups_per_step": 4, "updates_per_step": 2},
        pytest.param({"mesh": MeshSpec(data=2, fsdp=2, tensor=2)}, marks=pytest.mark.slow),
    ],
    ids=["a group at a time", "an update's share at a time", "eight devices"],
)
def test_lots_and_meshes_change_nothing_that_is_read(model, params, references, groups, asked, settings):
    if "mesh" in settings:
        settings = {**settings, "mesh": settings["mesh"].build()}
    _, e = read(model, params, references, groups, **settings)
    for name in READ:
        np.testing.assert_allclose(getattr(e, name), getattr(asked[1], name), atol=2e-5, err_msg=name)


def test_more_groups_than_one_pack_holds_are_read_in_lots(model, params, groups):
    """Refills bring more groups than an update takes; all are read before credit chooses."""
    one = make_trainer(model, PROXIMAL, shape=PackShape(1, 4, ROW_LEN), groups_per_step=1)
    samples, e = samples_of(groups), Episodes.of(groups, limit_tok=16)
    with pytest.raises(DataError, match="more than 4 rows"):
        one.pack(samples)
    got = one.compute_credit_inputs(one.states.init(params), one.pack_samples(samples), e)
    assert_rows(got.trainer_logp, direct_logp(model, params, groups), e.mask)


def test_pairs_are_chosen_from_more_answers_than_fit_beside_each_other(model, params, groups):
    """Rows have room for whole pairs, not for whole groups: credit picks the pair after all answers are read."""
    row_len = max(sum(len(t.stream()[0]) for t in sorted(g, key=lambda t: -t.num_sampled_tok)[:2]) for g in groups)
    assert any(sum(len(t.stream()[0]) for t in g) > row_len * 1.5 for g in groups)
    shape = PackShape(1, len(groups), row_len)
    found = make_trainer(model, Dpo(), shape=shape, references={"phase_start": (model, params)})
    samples = samples_of(groups)
    e = found.compute_credit_inputs(
        found.states.init(params), found.pack_samples(samples), Episodes.of(groups, limit_tok=16)
    )
    assert_rows(e.ref_logp, direct_logp(model, params, groups), e.mask)
    kept = apply_credit(found.algorithm.needs(), samples, e, found.algorithm.credit(e, {}))
    assert [len(g) for g in kept] == [2] * len(groups)
    assert found.pack(kept).batch.num_sequences == 2 * len(groups)


# ---- from credit to samples -----------------------------------------------------------------------------------------


def test_columns_carry_what_credit_said(model, groups, asked):
    """By token, in the order of the samples; who does not take part is left out, and empty groups with them."""
    _, e = asked
    found = make_trainer(model, Curious())
    rng = np.random.default_rng(0)
    credit = found.algorithm.credit(e, {})
    keep = np.arange(e.num) % 4 != 1
    keep[e.groups == 2] = False
    mask = e.mask & (rng.random(e.mask.shape) < 0.7)
    mask[4] = False
    credit = dataclasses.replace(
        credit,
        advantages=rng.normal(size=e.mask.shape),
        weights=rng.normal(size=e.mask.shape),
        entropy_weights=rng.normal(size=e.mask.shape),
        returns=rng.normal(size=e.mask.shape),
        mask=mask,
        keep=keep,
        critic_weights=np.stack([np.arange(e.num) % 2 == c for c in range(2)])[..., None] * e.mask,
    )
    kept = apply_credit(found.algorithm.needs(), samples_of(groups), e, credit)
    took_part = [n for n in range(e.num) if keep[n] and credit.mask[n].any()]
    assert keep[4] and 4 not in took_part
    assert len(kept) == 3 and sum(map(len, kept)) == len(took_part)
    wanted = {"advantages", "weights", "entropy_weights", "returns"}
    part = credit.mask[took_part]
    for s, n in zip((s for g in kept for s in g), took_part, strict=True):
        length = e.lengths[n]
        for name in wanted:
            np.testing.assert_array_equal(s.columns[name], getattr(credit, name)[n, :length].astype(np.float32))
        for name in ("trainer_logp", "ref_logp"):
            np.testing.assert_array_equal(s.columns[name], getattr(e, name)[n, :length].astype(np.float32))
        np.testing.assert_array_equal(s.mask, credit.mask[n, :length])
        np.testing.assert_array_equal(s.columns["old_values_C"], e.values[:, n, :length].T.astype(np.float32))
        own = credit.mask[[i for i in took_part if i % 2 == n % 2]].sum()
        want = np.zeros((length, 2))
        want[:, n % 2] = part.sum() / own  # so that its loss is a mean over its own share
        np.testing.assert_allclose(s.columns["critic_weights_C"], want, rtol=1e-6)


@pytest.mark.parametrize("settings", [{}, {"mesh": on_devices(8, data=2, fsdp=2, tensor=2)}], ids=["one", "eight"])
def test_each_samplers_distance_is_measured(model, params, groups, settings):
    """Before the first of two epochs; turns of no sampler, and what is not trained, are left out."""
    named = [
        [
            dataclasses.replace(
                t, turns=tuple(dataclasses.replace(u, sampler=("a", "b.2", "")[k % 3]) for u in t.turns)
            )
            for k, t in enumerate(group)
        ]
        for group in groups
    ]
    found = make_trainer(model, PROXIMAL, compare_samplers=True, epochs=2, **settings)
    state = found.states.init(params)
    _, step = found.step(state, named, {}, 0)
    gaps = {"a": [], "b.2": []}
    for each in (t for group in named for t in group):
        logp = [step.columns[each.key][name] for name in ("trainer_logp", "advantages")]
        said = np.concatenate([turn.sampler_logp for turn in each.turns])
        trainer, trained = (np.broadcast_to(np.array(x, float), said.shape) for x in logp)
        if name := each.turns[0].sampler:
            gaps[name] += np.abs(trainer - said)[~np.isnan(trained)].tolist()
    assert {name: gap.tokens for name, gap in step.gaps.items()} == {name: len(own) for name, own in gaps.items()}
    for name, own in gaps.items():
        assert step.gaps[name].mean_nat == pytest.approx(np.mean(own), rel=1e-4)


# ---- a step of the policy -------------------------------------------------------------------------------------------


def test_updates_are_counted_over_shares_and_epochs(model, params, groups):
    """Two shares, three passes; the recomputed log-probs are those of the first update, whose ratio is therefore 1."""
    before = fingerprint(params)
    found = make_trainer(model, PROXIMAL, updates_per_step=2, epochs=3)
    state = found.states.init(params)
    assert found.num_updates == STEPS * 6 == 30
    step_state, step = found.step(state, groups, {}, 0)
    row = step.row
    assert int(step_state.policy.num_updates) == 6 == row["optim/updates_n"] and step.num_trained == len(groups)
    assert row["optim/lr"] == pytest.approx(float(found.optimizer.rate(30)(5)), rel=1e-6)
    assert 0 < row["time/pack_s"] < 60
    assert row["train/sequences_n"] == 16 and row["train/trained_tok_n"] == sum(
        t.num_sampled_tok for g in groups for t in g
    )
    assert metrics.check_row(row) == []
    assert fingerprint(params) == before, "the caller's parameters were donated"

    once = dataclasses.replace(found, updates_per_step=1, epochs=1, steps=30)
    _, step = once.step(once.states.init(params), groups, {}, 0)
    assert step.row["policy/ratio_max"] == pytest.approx(1, abs=1e-4)
    assert step.row["policy/ratio_mean"] == pytest.approx(1, abs=1e-4) and step.row["optim/updates_n"] == 1
    assert row["policy/ratio_max"] > 1.05
    # the gap to the sampler is that before the first update
    assert row["mismatch/k3_nat"] > 0.1


def test_fewer_groups_than_updates_make_fewer_updates(model, params, groups):
    """Groups whose rewards are equal teach nothing, and a share without a group is no update."""
    flat = [[dataclasses.replace(t, reward=1.0) for t in g] for g in groups]
    found = make_trainer(model, PROXIMAL, updates_per_step=2, steps=15)
    state = found.states.init(params)
    before = fingerprint(state)
    nothing_state, nothing = found.step(state, flat, {"x": 1.0}, 0)
    assert nothing.num_trained == 0 and fingerprint(nothing_state) == before
    assert nothing.row["optim/updates_n"] == 0 and nothing.row["reward/zero_std_frac"] == 1
    assert metrics.check_row(nothing.row) == []
    one_state, one = found.step(state, [*flat[:3], groups[3]], {}, 0)
    assert one.num_trained == 1 == one.row["optim/updates_n"] == int(one_state.policy.num_updates)
    assert one.row["credit/masked_frac"] == pytest.approx(
        1 - one.row["train/trained_tok_n"] / sum(t.num_sampled_tok for g in groups for t in g)
    )


@pytest.mark.parametrize("algorithm", [Ppo(), Curious(), Dpo(), PairRewardModel()], ids=lambda a: type(a).__name__)
def test_a_step_without_a_surviving_trajectory_changes_nothing(model, params, algorithm):
    found = make_trainer(model, algorithm, references=dict.fromkeys(algorithm.needs().references, (model, params)))
    state = found.states.init(params)
    step_state, step = found.step(state, [], {"kl_coef": 0.5}, 0)
    assert step_state is state and step.algorithm_state == {"kl_coef": 0.5} and step.num_trained == 0
    assert metrics.check_row(step.row) == [] and step.row["optim/updates_n"] == 0


@pytest.mark.parametrize("algorithm", [Grpo(), Ppo(critic=Critic(epochs=1))], ids=["grpo", "ppo"])
@pytest.mark.parametrize("devices", [1, 4])
def test_a_first_step_finds_what_was_compiled_ahead(model, params, groups, caplog, algorithm, devices):
    mesh = on_devices(devices, data=1, fsdp=devices // 2 or 1, tensor=min(devices, 2))
    trainer = make_trainer(model, algorithm, mesh=mesh)
    programs = list(TrainerShapes.of(trainer).programs("", {}))
    CompileAhead([program.lower for program in programs]).wait()
    with jax.log_compiles():
        trainer.step(trainer.states.init(params), groups, {}, 0)
    compiled = [r.getMessage() for r in caplog.records if "Finished XLA compilation" in r.getMessage()]
    assert compiled and not [text for text in compiled if "jit(update)" in text]


def test_an_adaptive_coefficient_is_carried_on_without_another_program(model, params, references, groups):
    found = make_trainer(
        model,
        Grpo(aggregation="token-mean", kl=KlLoss(0.1, adaptive=AdaptiveKl(0.01, horizon=16))),
        references=references,
    )
    state, algorithm_state, used = found.states.init(params), {}, []
    for step in range(3):
        state, result = found.step(state, groups, algorithm_state, step)
        row = result.row
        used.append(row["kl/coef"])
        assert used[-1] == algorithm_state.get("kl_coef", 0.1)
        assert row["loss/total"] - row["loss/policy"] == pytest.approx(used[-1] * row["kl/ref_nat"], rel=1e-4)
        assert row["kl/ref_nat"] > 0.02 and metrics.check_row(row) == []
        algorithm_state = result.algorithm_state
    assert used == pytest.approx([0.1, 0.12, 0.144])  # the KL is above its target: a fifth more each step
    assert found.policy_update._cache_size() == 1


def test_what_is_not_finite_is_named_and_handed_over(model, params, groups):
    found = make_trainer(model, PROXIMAL, steps=30)
    bad = groups[1][2]
    logp = bad.turns[0].sampler_logp.copy()
    logp[0] = np.nan
    turns = (dataclasses.replace(bad.turns[0], sampler_logp=logp), *bad.turns[1:])
    broken = [list(g) for g in groups]
    broken[1][2] = dataclasses.replace(bad, turns=turns)
    with pytest.raises(NotFinite, match="step 4 of the phase, optim: loss nan, gradient norm nan") as raised:
        found.step(found.states.init(params), broken, {}, 3)
    assert isinstance(raised.value, TrainerError)
    copy = pickle.loads(pickle.dumps(raised.value))
    assert str(copy) == str(raised.value)
    for error in (raised.value, copy):
        assert np.isnan(error.batch.sampler_logp).sum() == 1
        assert all(type(array) is np.ndarray for array in error.batch.arrays().values())


# ---- critics --------------------------------------------------------------------------------------------------------


FIXED = Critic(num=2, epochs=2, warmup_steps=1, clip=0.5, optimizer=AdamW(lr=1e-9))
"""Critics that their updates leave where they are."""


def test_critics_learn_first_and_start_from_the_mean_return(model, params, groups):
    """In the warm-up the policy stays as it is, bit for bit; critics take their own number of updates."""
    shifted = [[dataclasses.replace(t, reward=t.reward + 3) for t in g] for g in groups]
    shifted = [
        [dataclasses.replace(t, turns=(*t.turns[:-1], dataclasses.replace(t.turns[-1], reward=t.reward))) for t in g]
        for g in shifted
    ]
    algorithm = Ppo(critic=FIXED, lam=1.0)
    found = make_trainer(model, algorithm, updates_per_step=2)
    assert found.num_critic_updates == STEPS * 4
    state = found.states.init(params)
    assert not np.any(state.critics.params["value"]["b"])
    before = fingerprint(state.policy)
    e = found.compute_credit_inputs(state, found.pack_samples(samples_of(shifted)), Episodes.of(shifted, limit_tok=16))
    returns = algorithm.credit(e, {}).returns
    assert (
        returns[e.mask].mean() == pytest.approx(np.repeat(e.rewards, e.lengths).mean()) and returns[e.mask].mean() > 2
    )

    first_state, first = found.step(state, shifted, {}, 0)
    np.testing.assert_allclose(first_state.critics.params["value"]["b"], returns[e.mask].mean(), atol=1e-4)
    assert fingerprint(first_state.policy) == before and int(first_state.policy.num_updates) == 0
    assert first_state.critics.num_updates.tolist() == [4, 4]
    assert first.row["optim/updates_n"] == 0 and "loss/total" not in first.row
    # what they said before the shift was shifted, too: else the clip around it would hold them back
    assert first.row["critic/abs_error"] < 1.5 and first.row["critic/loss"] < 1
    assert metrics.check_row(first.row) == []

    second_state, second = found.step(first_state, shifted, {}, 1)
    np.testing.assert_allclose(second_state.critics.params["value"]["b"], returns[e.mask].mean(), atol=1e-4)
    assert fingerprint(second_state.policy) != before and second.row["optim/updates_n"] == 2
    assert second_state.critics.num_updates.tolist() == [8, 8] and metrics.check_row(second.row) == []
    # the values of the second step know the mean return
    assert second.row["critic/value_mean"] == pytest.approx(returns[e.mask].mean(), abs=0.3)


def learnable_pairs(rng, num_pairs=16):
    """Return pairs in which the token before the closing one tells which answer is better."""
    groups = []
    for g in range(num_pairs):
        prompt = rng.integers(0, VOCAB, 3)
        pair = []
        for sibling in range(2):
            t = trajectory(rng, g, sibling, prompt, [(0, int(rng.integers(2, 6)))], reward=1.0 - 2 * sibling)
            tokens = t.turns[0].tokens.copy()
            tokens[-2:] = rng.integers(20, 30) if sibling == 0 else rng.integers(30, 40), 3
            pair.append(dataclasses.replace(t, turns=(dataclasses.replace(t.turns[0], tokens=tokens),)))
        groups.append(pair)
    return groups


@pytest.fixture(scope="module")
def reward_model(model, params):
    """Train a reward model for a phase; return accuracies on new pairs, and the states before and after."""
    rng = np.random.default_rng(0)
    algorithm = PairRewardModel(critic=Critic(num=2, optimizer=AdamW(lr=3e-3)))
    found = make_trainer(model, algorithm, groups_per_step=16, steps=40)
    state = found.states.init(params)
    before = fingerprint(state.policy)
    rows = []
    for step in range(40):
        state, result = found.step(state, learnable_pairs(rng), {}, step)
        rows.append(result.row)
        if np.mean([r["preference/accuracy_frac"] for r in rows[-3:]]) > 0.95:
            break
    return before, rows, state


@pytest.mark.slow
def test_a_reward_model_learns_and_leaves_the_policy_alone(reward_model):
    before, rows, state = reward_model
    assert rows[0]["preference/accuracy_frac"] < 0.8 and rows[0]["critic/loss"] > 0.5
    assert len(rows) < 40 and rows[-1]["preference/accuracy_frac"] > 0.9 and rows[-1]["critic/loss"] < 0.4
    assert fingerprint(state.policy) == before and state.critics.num_updates.tolist() == [len(rows)] * 2
    assert all(metrics.check_row(r) == [] and r["optim/updates_n"] == 0 for r in rows)
    assert rows[0]["train/trained_tok_n"] == 32, "one value per answer"


def test_the_next_phase_takes_the_critics_over(model, params, groups, reward_model):
    """Their weights, not their optimizer; they are not shifted to the mean return, and what they were stays readable."""
    trained = reward_model[2].critics
    held = fingerprint(trained)
    found = make_trainer(model, Ppo(critic=dataclasses.replace(FIXED, model="previous")))
    state = found.states.init(params, trained)
    assert fingerprint(state.critics.params) == fingerprint(trained.params)
    assert state.critics.num_updates.tolist() == [0, 0]
    assert not any(np.any(x) for x in jax.tree.leaves(state.critics.opt_state))
    bias = np.array(state.critics.params["value"]["b"])
    after_state, after = found.step(state, groups, {}, 0)
    np.testing.assert_allclose(after_state.critics.params["value"]["b"], bias, atol=1e-6)
    assert metrics.check_row(after.row) == [] and fingerprint(trained) == held
    with pytest.raises(TrainerError, match="phase before has no critics"):
        found.states.init(params)


# ---- the state ------------------------------------------------------------------------------------------------------


def of_kind(kind):
    """Return an algorithm whose state has no critics, ones like the policy, of another shape, or those of the previous
    phase."""
    if kind == "plain":
        return Grpo()
    settings = {
        "same": Critic(num=1),
        "other": Critic(num=2, model=SMALL, optimizer=AdamW(lr=1e-3, mu_dtype="bfloat16")),
        "previous": Critic(num=2, model="previous"),
    }
    return Ppo(critic=settings[kind])


@pytest.mark.parametrize("kind, devices", [("plain", 8), ("same", 8), ("previous", 8), ("other", 1)])
def test_what_is_promised_of_the_state_is_what_it_is(model, params, kind, devices):
    """`abstract` and `shardings` describe `init`: a checkpoint is read back by them."""
    algorithm = of_kind(kind)
    mesh = on_devices(8, data=2, fsdp=2, tensor=2) if devices == 8 else on_devices()
    found = make_trainer(model, algorithm, mesh=mesh)
    previous = None
    if kind == "previous":
        stack = jax.jit(jax.vmap(lambda seed: found.value_model.init(seed, params)))(jnp.arange(2))
        previous = ParamState(stack, None, jnp.zeros(2, jnp.int32))
    state = found.states.init(params, previous)
    promised, where = found.states.abstract(), found.states.shardings
    assert jax.tree.structure(promised) == jax.tree.structure(state) == jax.tree.structure(where)
    for x, like, s in zip(*map(jax.tree.leaves, (state, promised, where)), strict=True):
        assert (x.shape, x.dtype) == (like.shape, like.dtype)
        assert x.sharding.is_equivalent_to(s, x.ndim)
    for a, b in zip(jax.tree.leaves(state.params), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(a, b)
    if algorithm.needs().critics is None:
        assert state.critics is None
        return
    assert {x.shape[0] for x in jax.tree.leaves(state.critics)} == {algorithm.critic.num}
    heads = np.asarray(state.critics.params["value"]["w"])
    assert len(np.unique(heads.round(6), axis=0)) == len(heads)
    if kind == "same":
        for a, b in zip(jax.tree.leaves(state.critics.params["trunk"]), jax.tree.leaves(params), strict=True):
            np.testing.assert_array_equal(a[0], b)
    if devices == 8:
        q = state.critics.params["trunk"]["layers"]["q"]
        assert {s.data.size for s in q.addressable_shards} == {q.size // 4}


@pytest.mark.sweep
def test_critics_may_have_experts(model, params, groups):
    """Also where these lie over a mesh: one step gives the critics of one device."""
    moe = Qwen3MoeConfig(num_layers=1, hidden_size=32, num_heads=2, num_kv_heads=2, num_experts=4, init_std=0.3)
    algorithm = Ppo(critic=Critic(num=2, model=moe, epochs=1, warmup_steps=1, optimizer=AdamW(lr=1e-3)), lam=1.0)
    shape = PackShape(1, 8, SHAPE.row_len)
    made = []
    for mesh in (on_devices(), on_devices(8, data=1, fsdp=2, expert=2, tensor=2)):
        found = make_trainer(model, algorithm, mesh=mesh, shape=shape)
        state = found.states.init(params)
        before = jax.device_get(state.critics.params)
        made.append(jax.device_get(found.step(state, groups, {}, 0)[0].critics.params))
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), made[0], before)
    assert all(moved["trunk"]["layers"][name] > 1e-4 for name in ("router", "gate", "up", "down"))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), *made)


def test_a_fingerprint_is_of_arrays_alone():
    with pytest.raises(TypeError, match="a fingerprint is of arrays: object is none"):
        fingerprint({"params": np.ones(2), "model": object()})
