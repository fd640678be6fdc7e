"""Known behaviours of algorithms, on problems of seconds: the trainer's own code with tables as policy and critics."""

import math
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import toys

from rolljax.trainer.algorithms.asyppo import AsyPpo
from rolljax.trainer.algorithms.cispo import Cispo
from rolljax.trainer.algorithms.decoupled_ppo import DecoupledPpo
from rolljax.trainer.algorithms.dpo import Dpo
from rolljax.trainer.algorithms.gigpo import GiGpo
from rolljax.trainer.algorithms.grpo import Grpo
from rolljax.trainer.algorithms.ipa import Ipa
from rolljax.trainer.algorithms.opd import Opd, Teacher
from rolljax.trainer.algorithms.ppo import Ppo
from rolljax.trainer.algorithms.rebn import ReBn
from rolljax.trainer.algorithms.reinforce import Reinforce
from rolljax.trainer.algorithms.spiral import Spiral
from rolljax.trainer.algorithms.tis import Tis
from rolljax.trainer.algorithms.topr import SequenceTopr, Topr
from rolljax.trainer.algorithms.turn_reinforce import TurnReinforce
from rolljax.trainer.batch import PackShape, Sample
from rolljax.trainer.credit.episodes import Episodes, apply_credit
from rolljax.trainer.credit.shaping import GroupFilter
from rolljax.trainer.critic import Critic
from rolljax.trainer.optimizer import AdamW
from rolljax.trainer.phase_trainer import PhaseTrainer
from rolljax.types import Key, Task, Trajectory, Turn


@pytest.fixture(scope="module", autouse=True)
def one_device():
    """Run the tiny programs on one device, without the passes that would cost more than they save."""
    with jax.default_device(jax.devices()[0]):
        yield


# ---- the toys are packed as the trainer packs -----------------------------------------------------------------------


def trajectories(played):
    """Return the groups of a step in the loop's form: one prompt token, then a turn per token."""
    e = played.episodes
    every = []
    for n in range(e.num):
        turns = tuple(
            Turn(
                prompt_ids=np.array([played.rows[n, t]] if t else [99], np.int32),
                tokens=played.tokens[n, t : t + 1].astype(np.int32),
                sampler_logp=e.sampler_logp[n, t : t + 1].astype(np.float32),
                versions=np.array([-1 if e.expert[n, t] else 0], np.int32),
                finish_reason="stop",
                reward=float(e.turn_rewards[n, t]),
                text=chr(ord("a") + played.tokens[n, t]),
            )
            for t in range(int(e.num_turns[n]))
        )
        key = Key(0, int(e.groups[n]), n)
        every.append(Trajectory(key, Task("toy", 0, ""), turns, float(e.rewards[n]), {}, bool(e.success[n]), "ok"))
    size = int((e.groups == 0).sum())
    return [every[g : g + size] for g in range(0, e.num, size)]


CASES = {
    "dropped groups": (lambda: toys.Bandit(1, symbols=2), Grpo(filter=GroupFilter())),
    "several turns": (lambda: toys.Bandit(1, symbols=2), GiGpo(clip_low=0.3)),
    "pairs": (lambda: toys.Bandit(1, symbols=2), Dpo()),
    "replayed": (lambda: toys.Chain(1, start="everywhere", actions=2), Ipa()),
    "ragged, one scale": (lambda: toys.GuessTheNumber(1, max_turns=6), ReBn()),
    "critics": (lambda: toys.Bandit(1, symbols=2), AsyPpo()),
}


@pytest.mark.parametrize("case", CASES)
def test_a_step_of_a_toy_is_what_the_trainer_would_pack(case):
    make, algorithm = CASES[case]
    toy = make()
    rng = np.random.default_rng(0)
    table = rng.normal(size=(toy.rows, toy.symbols))
    values = rng.normal(size=(2, toy.value_rows)) if algorithm.needs().critics else None
    played = toys.read(algorithm, toy, toy.play(table, 0), rng.normal(size=table.shape), table, values)
    e = played.episodes
    groups = trajectories(played)
    own = Episodes.of(groups, limit_tok=e.limit_tok)
    for name in (
        "rewards",
        "groups",
        "mask",
        "turns",
        "turn_rewards",
        "num_turns",
        "cut",
        "truncated",
        "success",
        "expert",
    ):
        width = own.mask.shape[1] if getattr(own, name).ndim == 2 else None
        want, got = getattr(own, name), getattr(e, name)
        np.testing.assert_array_equal(want, got if width is None else got[:, :width], err_msg=name)
    np.testing.assert_allclose(own.sampler_logp, e.sampler_logp[:, : own.mask.shape[1]], rtol=1e-6)

    credit = algorithm.credit(e, {})
    ours = toys.pack(algorithm, played, credit)
    trainer = PhaseTrainer(
        None,
        None,
        algorithm,
        AdamW(),
        PackShape(8, 16, 400),
        steps=1,
        groups_per_step=len(groups),
        limit_tok=e.limit_tok,
    )  # type: ignore[arg-type]
    samples = [[Sample.of(t) for t in group] for group in groups]
    packed = trainer.pack(apply_credit(trainer.algorithm.needs(), samples, e, credit))
    theirs = packed.batch
    assert theirs.num_tokens == ours.num_tokens and theirs.num_sequences == ours.num_sequences
    keep = e.mask.any(1) if credit.keep is None else credit.keep & e.mask.any(1)
    mask = e.mask if credit.mask is None else credit.mask & e.mask
    keep = keep & mask.any(1)
    assert keep.sum() > 0 and sum(len(g) for g in packed.indices) == keep.sum()
    sequences = np.asarray(ours.sequence_ids).reshape(e.mask.shape)
    for n, at in zip(np.flatnonzero(keep), (at for group in packed.indices for at in group), strict=True):
        valid = mask[n][e.mask[n]]
        for name in (
            "scale",
            "advantages",
            "sampler_logp",
            "weights",
            "entropy_weights",
            "rewards",
            "trainer_logp",
            "ref_logp",
        ):
            want, got = getattr(theirs, name), getattr(ours, name)
            assert (want is None) == (got is None), name
            if want is not None:
                want = want.reshape(-1)[at]
                got = got.reshape(e.mask.shape)[n][e.mask[n]]
                np.testing.assert_allclose(got[valid], want[valid], rtol=2e-5, atol=1e-7, err_msg=name)
                assert name != "scale" or (got[~valid] == 0).all() and (want[~valid] == 0).all()
        if values is not None:
            for name in ("returns", "old_values_C", "critic_weights_C"):
                want, got = getattr(theirs, name), getattr(ours, name)
                tail = want.shape[3:]
                np.testing.assert_allclose(
                    got.reshape(*e.mask.shape, *tail)[n][e.mask[n]], want.reshape(-1, *tail)[at], rtol=2e-5, atol=1e-6
                )
        for name in ("sequence_ids", "turn_ids"):  # other numbers, the same parts
            want = getattr(theirs, name).reshape(-1)[at]
            got = getattr(ours, name).reshape(e.mask.shape)[n][e.mask[n]]
            np.testing.assert_array_equal(want - want[0], got - got[0])
        assert len(set(sequences[n][e.mask[n]])) == 1


# ---- stale samples --------------------------------------------------------------------------------------------------

SURROGATES = {
    "ppo": Grpo,
    "tis": Tis,
    "topr": Topr,
    "sequence topr": SequenceTopr,
    "cispo": Cispo,
    "decoupled": DecoupledPpo,
}


BATCH_MEAN = {"mean": "batch", "std": "none", "aggregation": "token-mean"}


def bandit(seed):
    return toys.Bandit(seed, group_size=64)


@pytest.fixture(scope="module")
def steps_to_success():
    """Return the mean number of steps until success reaches .9, by surrogate and lag, with the batch mean as
    baseline."""
    return {
        (name, lag): toys.train(bandit, cls(**BATCH_MEAN), seeds=2, steps=steps, lr=12, lag=lag).steps_to(0.9).mean()
        for name, cls in SURROGATES.items()
        for lag, steps in ((0, 70), (8, 150), (32, 160))
    }


@pytest.mark.slow
def test_on_policy_all_surrogates_are_one(steps_to_success):
    assert len({steps_to_success[name, 0] for name in SURROGATES}) == 1
    assert 40 < steps_to_success["ppo", 0] < 60


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("lag", [8, 32])
def test_clipping_is_the_slowest_answer_to_stale_samples(steps_to_success, lag):
    others = [steps_to_success[name, lag] for name in SURROGATES if name != "ppo"]
    assert steps_to_success["ppo", lag] > 1.25 * max(others)


@pytest.mark.parametrize("name", [n for n in SURROGATES if n != "ppo"])
def test_weighted_surrogates_bear_stale_samples(steps_to_success, name):
    for lag in (8, 32):
        assert steps_to_success[name, lag] <= 2.6 * steps_to_success[name, 0]


def test_stale_failures_diverge_surrogates_that_cannot_drop_them():
    """Rewards of +1 and -1 without a baseline, and a target that is hardly ever hit."""

    def rare(seed):
        return toys.Bandit(seed, symbols=8, target=3, length=3, group_size=64, wrong=-1)

    largest = {
        cls.__name__: toys.train(
            rare, cls(**{**BATCH_MEAN, "mean": "none"}), seeds=1, steps=300, lr=12, lag=32
        ).measured["largest_logit"][:, -1]
        for cls in (Grpo, Tis, Topr, SequenceTopr, Reinforce)
    }
    assert (largest.pop("Reinforce") > 80).all()
    for name, found in largest.items():
        assert (found < 20).all(), (name, found)


# ---- credit over turns ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "algorithm", [TurnReinforce(), Ipa(failure=0.0, imitation=0.0)], ids=lambda a: type(a).__name__
)
def test_starting_late_solves_what_starting_at_the_beginning_cannot(algorithm):
    def success(start, steps):
        def make(seed):
            return toys.Chain(seed, start=start)

        return toys.train(make, algorithm, seeds=2, steps=steps, lr=32).measured["success"][:, -1]

    assert (success("beginning", 100) < 1e-3).all()
    assert (success("rollback", 100) >= 0.9).all()
    assert (success("everywhere", 200) >= 0.9).all()


@pytest.mark.slow
def test_a_discount_makes_guesses_few():
    def learned(gamma):
        return toys.train(toys.GuessTheNumber, ReBn(gamma=gamma), seeds=2, steps=200, lr=100).measured

    hasty, patient = learned(0.9), learned(1.0)
    assert (hasty["turns"][:, 0] > 5.5).all()
    assert (hasty["turns"][:, -1] <= 3.2).all() and (hasty["success"][:, -1] > 0.99).all()
    assert (patient["turns"][:, -1] > hasty["turns"][:, -1] + 0.3).all() and (patient["success"][:, -1] > 0.9).all()


# ---- critics --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def critics():
    """Return values `[S, M, R]` of critics that learned from disjoint shares, and from the same data."""
    near_sgd = AdamW(lr=2.0, eps=1.0)

    def learned(cls, shard):
        settings = Critic(num=2, epochs=4, shard=shard, optimizer=near_sgd)
        return toys.train(
            lambda s: toys.Walk(s, noise=0.5), cls(critic=settings, lam=1.0), seeds=8, steps=80, lr=0, value_std=1
        ).values

    return learned(AsyPpo, "response"), learned(Ppo, "all")


@pytest.fixture(scope="module")
def visited():
    """Return the states of new walks."""
    return toys.Walk(99, samples=1000).play(np.zeros((12, 2)), 0).value_rows


@pytest.mark.slow
def test_critics_disagree_where_they_are_wrong(critics, visited):
    values, truth = critics[0], toys.Walk(0).true_values
    spread, error = values.std(1), np.abs(values.mean(1) - truth)
    found = [np.corrcoef(s[visited].ravel(), e[visited].ravel())[0, 1] for s, e in zip(spread, error, strict=True)]
    assert np.mean(found) > 0.3


def test_the_mean_of_two_critics_varies_less_than_one(critics, visited):
    values = critics[0]
    alone, mean = values[:, 0].var(0)[visited].mean(), values.mean(1).var(0)[visited].mean()
    assert math.sqrt(alone / mean) >= 1.25


def test_critics_of_the_same_data_agree(critics, visited):
    apart, together = (values.std(1)[:, visited].mean() for values in critics)
    assert together < 0.2 * apart


# ---- a teacher ------------------------------------------------------------------------------------------------------


def test_distillation_falls_to_the_teacher():
    algorithm = Opd(teachers=(Teacher("teacher"),))
    kl = toys.train(bandit, algorithm, seeds=2, steps=60, lr=1).measured["teacher_kl"]
    assert (np.diff(kl[:, ::5]) < 0).all()
    assert (kl[:, -1] < 0.5 * kl[:, 0]).all()


# ---- self-play ------------------------------------------------------------------------------------------------------


def test_a_baseline_for_each_role_learns_a_game_that_favours_one():
    """At Nim the first role is given 80 % of the games. Without its own baseline a role is praised for being that role;
    the same seeds, steps and rate."""
    right = {
        by_role: toys.train(toys.Nim, Spiral(by_role=by_role), seeds=5, steps=100, lr=20).measured["right"][:, -1]
        for by_role in (True, False)
    }
    assert right[True].min() > 0.75 and right[True].mean() > right[False].mean() + 0.15
    fair = toys.train(lambda s: toys.Nim(s, edge=0.0, samples=64), Spiral(), seeds=3, steps=100, lr=20)
    assert fair.measured["right"][:, -1].min() > 0.95
